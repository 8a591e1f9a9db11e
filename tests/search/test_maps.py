"""Similarity maps: values, images and files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jobs import search
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.map_images import add_header, draw_image, highlight
from pipeline.search.maps import similarity_map, visible_time
from pipeline.search.previews import Previews
from pipeline.search.results import Passage, Word
from pipeline.search.searcher import open_index
from tests.pdfs import Page, pdf

#: Lines of a page of 200 x 100 points; each letter is 6 points wide, so all boxes are known.
PAGE = [(20, 80, "the harbour of Lisbon"), (20, 50, "sells fresh fish"), (20, 20, "every morning")]
NO_PREVIEW = "^item_id must be a page, an image, a video or an audio file, got 'letter.txt' "
NOT_READABLE = (
    "^documents must be the folder that contains the indexed files, got .*, "
    "which has no readable a.pdf .*; pass their folder as --documents pages=FOLDER$"
)
REPRESENTATIONS = [
    {"compressor": {"name": name, "num_vectors": 8}} for name in ("hpool", "samer", "random")
]


@pytest.fixture(scope="module")
def uri(cluster, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("maps")
    (folder / "pages").mkdir()
    (folder / "pages/a.pdf").write_bytes(pdf(Page(PAGE), Page([(20, 50, "a crust of bread")])))
    (folder / "texts").mkdir()
    (folder / "texts/letter.txt").write_text("Dear Ada, fish is cheap in Lisbon.")
    for name, path in (("pages", "pages"), ("text", "texts")):
        fields = {
            "index": str(folder / "index"),
            "source": {"name": name, "path": str(folder / path)},
            "representations": [{"compressor": "none"}, *REPRESENTATIONS],
        }
        spec = config.parse(IndexSpec, fields)
        job.run(spec, IndexResources(), job=name, report=lambda line: None)
    return str(folder / "index")


def test_best_words(uri):
    map = similarity_map(open_index(uri), "fresh fish in Lisbon", "a.pdf#page=1")
    assert map.query_tokens in [("fresh", "fish", "in", name) for name in ("lisbon", "Lisbon")]
    assert [map.best_word(token).text for token in (0, 1, 3)] == ["fresh", "fish", "Lisbon"]
    # "Lisbon" consists of the letters 15 to 20 of a line that starts at 20 points.
    box = map.best_word(3).box
    assert (box[0], box[2]) == pytest.approx(((20 + 15 * 6) / 200, (20 + 21 * 6) / 200), abs=1e-3)
    assert box[1] < 0.2 < box[3]  # the base line is 80 points above the lower edge


def test_credits_sum_to_the_score(uri):
    searcher = open_index(uri)
    map = similarity_map(searcher, "fresh fish in Lisbon", "a.pdf#page=1")
    (hit,) = searcher.search("fresh fish in Lisbon", "full", k=1)
    assert map.score == pytest.approx(hit.score, abs=1e-4)
    # Every word has its own vector.
    assert sum(word.credit for word in map.words) == pytest.approx(map.score, abs=1e-4)
    contributions = sum(match.contribution for match in hit.matches)
    total = sum(word.contribution for word in map.words)
    assert total == pytest.approx(contributions, abs=1e-4) and 0 < total < map.score
    assert map.passages == pytest.approx(hit.passages)


@pytest.mark.parametrize("representation", ["hpool_8", "samer_8", "random_8"])
def test_compressed_representations(uri, representation):
    searcher = open_index(uri)
    map = similarity_map(searcher, "fish", "a.pdf#page=1", representation, by_token=False)
    assert map.evidence == representation and map.is_shared == (representation != "random_8")
    row = searcher.index.items(["a.pdf#page=1"])
    has_vector = np.isfinite(map.values(0))
    if representation == "random_8":  # drops all other tokens
        assert has_vector.sum() == 8 == len(row[representation][0])
    else:
        assert has_vector.all()
        assert map.best_word(0).similarities[0] == np.nanmax(map.values(0))
        full = similarity_map(searcher, "fish", "a.pdf#page=1").values(0)
        assert np.corrcoef(full, map.values(0))[0, 1] > 0.5


@pytest.mark.parametrize("representation", ["hpool_8", "samer_8"])
def test_words_of_merged_vectors_are_compared_by_their_own(uri, representation):
    """The values equal those of the uncompressed map, and the score is that of the search."""
    searcher, query = open_index(uri), "fresh fish in Lisbon"
    map = similarity_map(searcher, query, "a.pdf#page=1", representation)
    full = similarity_map(searcher, query, "a.pdf#page=1", "full")
    assert (map.evidence, map.representation) == ("full", representation)
    assert not map.is_shared and map.passages == full.passages
    for word, expected in zip(map.words, full.words, strict=True):
        assert word.similarities == expected.similarities
        assert word.highlight == expected.highlight
    shared = similarity_map(searcher, query, "a.pdf#page=1", representation, by_token=False)
    assert (map.score, map.contributions) == (shared.score, shared.contributions)
    (hit,) = searcher.search(query, representation, k=1)
    assert map.score == pytest.approx(hit.score, abs=1e-4)
    for word, expected in zip(map.words, shared.words, strict=True):
        assert (word.credit, word.contribution, word.vector) == (
            expected.credit,
            expected.contribution,
            expected.vector,
        )
    (hit,) = searcher.search(query, representation, ids=["a.pdf#page=1"])
    assert map.passages == pytest.approx(hit.passages)


@pytest.mark.parametrize("representation", ["full", "hpool_8", "samer_8"])
def test_whole_query_highlights_the_best_passage(uri, representation):
    """Words that share a vector share its contribution, so that they do not cover the page."""
    map = similarity_map(open_index(uri), "fresh fish", "a.pdf#page=1", representation)
    values = dict(zip((word.text for word in map.words), map.values().tolist(), strict=True))
    spans = [word.span for passage in map.passages for word in passage.highlights]
    inside = {word.text for word in map.words if word.span in spans}
    assert inside and max(values, key=values.__getitem__) in inside
    assert min(values[text] for text in inside) > 0
    shared = sum(values[text] for text in values if text not in inside)
    assert shared <= sum(map.contributions) + 1e-6
    stored = [word["highlight"] for word in json.loads(map.model_dump_json())["words"]]
    assert stored == pytest.approx(list(map.values()), abs=1e-4)


def test_prefix_of_a_representation(nested_uri):
    searcher, text = open_index(nested_uri), "the lift of a wing"
    whole, prefix = (
        similarity_map(searcher, text, "wing/1", name, by_token=False)
        for name in ("nested_8", "nested_8@3")
    )
    by_token = similarity_map(searcher, text, "wing/1", "nested_8@3")
    (hit,) = searcher.search(text, "nested_8@3", ids=["wing/1"])
    assert (by_token.representation, by_token.evidence) == ("nested_8@3", "full")
    assert by_token.passages == hit.passages and by_token.score == prefix.score
    assert prefix.score == pytest.approx(hit.score) and prefix.score < whole.score
    assert len(prefix.words) == len(whole.words)
    similarities = np.stack([word.similarities for word in prefix.words])
    assert similarities.max(axis=0).sum() == pytest.approx(prefix.score)  # no word lacks a vector


def test_image_is_highlighted_at_the_best_word(uri):
    searcher = open_index(uri)
    image = Previews(searcher.index).image("a.pdf#page=1")
    map = similarity_map(searcher, "Lisbon", "a.pdf#page=1")
    before = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).astype(int)
    after = np.asarray(Image.open(io.BytesIO(draw_image(image, map, 0))).convert("RGB")).astype(int)
    assert before.shape == after.shape == (200, 400, 3)
    change = np.abs(after - before).sum(axis=2)
    x0, y0, x1, y1 = (np.array(map.best_word(0).box) * [400, 200, 400, 200]).astype(int)
    assert change[y0:y1, x0:x1].mean() > 150
    assert change[y1 + 40 :].mean() < 30


def test_header(uri):
    searcher = open_index(uri)
    map = similarity_map(searcher, "the harbour of Lisbon", "a.pdf#page=1")
    drawing = highlight(Previews(searcher.index), map)
    for token in (None, 1):
        png = add_header(drawing, map, "the harbour of Lisbon " * 9, token)
        image = Image.open(io.BytesIO(png))
        header = np.asarray(image.convert("RGB")).astype(int)[: image.height - 200]
        assert (image.width, len(header) > 100) == (420, True)
        assert (header.sum(axis=2) < 150).sum() > 1000  # the query, in several lines
        assert ((header[..., 0] - header[..., 2]) > 90).any()  # the colour scale


def test_stop_word_is_hardly_highlighted(uri):
    """A stop word matches itself as well as a rare word does, but contributes less."""
    map = similarity_map(open_index(uri), "the harbour of Lisbon", "a.pdf#page=1")
    words = {word.text: word for word in map.words}
    assert words["of"].credit > 0.75 * words["harbour"].credit
    assert words["of"].contribution < 0.75 * words["harbour"].contribution
    (line,) = map.lines(map.passages[0])
    assert line[0] == pytest.approx(20 / 200, abs=0.02)  # the whole first line
    assert line[2] == pytest.approx((20 + 21 * 6) / 200, abs=0.02)


def test_search_job_saves_maps(uri, tmp_path, capsys):
    out = tmp_path / "maps"
    search.main([uri, "fish", "--k", "1", "--filter", "modality = 'page'", "--save-maps", str(out)])
    assert f"map 1: {out}/1.png; best match: fish" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["1-01-fish.png", "1.json", "1.png"]
    stored = json.loads((out / "1.json").read_text())
    assert stored["item_id"] == "a.pdf#page=1"
    best = max(stored["words"], key=lambda word: word["similarities"][0])
    assert stored["passages"][0]["highlights"][0]["query_token"] == "fish"
    assert best["text"] == "fish" and best["credit"] == pytest.approx(stored["score"], abs=1e-3)


def test_errors(uri, tmp_path):
    searcher = open_index(uri)
    assert similarity_map(searcher, "fish", "letter.txt").best_word().text == "fish"
    with pytest.raises(
        SpecError, match="^item_id must be the id of an item in the index, got 'b.pdf#page=1'$"
    ):
        similarity_map(searcher, "fish", "b.pdf#page=1")
    with pytest.raises(SpecError, match=NO_PREVIEW):
        Previews(searcher.index).image("letter.txt")
    with pytest.raises(SpecError, match=NOT_READABLE):
        Previews(searcher.index, {"": str(tmp_path)}).image("a.pdf#page=1")
    with pytest.raises(SpecError, match=r"documents.path must be .*'.*nowhere'.*does not exist"):
        Previews(searcher.index, {"pages": str(tmp_path / "nowhere")}).image("a.pdf#page=1")


def test_only_indexed_files_are_read(uri, tmp_path):
    """A modified file is rejected; a copy in another folder is accepted."""
    searcher = open_index(uri)
    data = Path(uri).parent.joinpath("pages/a.pdf").read_bytes()
    original = Previews(searcher.index, only_indexed=True)
    copy = Previews(searcher.index, {"": str(tmp_path)}, only_indexed=True)
    (tmp_path / "a.pdf").write_bytes(data)
    for previews in (original, copy):
        assert previews.image("a.pdf#page=1").startswith(b"\xff\xd8")
    (tmp_path / "a.pdf").write_bytes(pdf(Page(PAGE), Page([(20, 50, "somebody else's bread")])))
    modified = "^documents must be an indexed file .* got 'a.pdf', which was modified since$"
    with pytest.raises(SpecError, match=modified):
        copy.image("a.pdf#page=1")
    (tmp_path / "a.pdf").unlink()
    with pytest.raises(SpecError, match=NOT_READABLE):
        copy.image("a.pdf#page=1")
    with pytest.raises(SpecError, match=NO_PREVIEW):
        original.image("letter.txt")


def test_moved_documents(uri, tmp_path):
    searcher = open_index(uri)
    (tmp_path / "a.pdf").write_bytes(Path(uri).parent.joinpath("pages/a.pdf").read_bytes())
    assert (
        Previews(searcher.index, {"": str(tmp_path)}).image("a.pdf#page=2").startswith(b"\xff\xd8")
    )


def test_visible_time():
    def word(text, times):
        place = {"span": (0, 0), "box": (0, 0, 1, 1), "times": times}
        values = {"similarities": (0.0,), "credit": 0.0, "highlight": 0.0, "contribution": 0.0}
        return Word(text=text, **place, **values)

    assert visible_time(word("title", (1.0, 3.0))) == 2.0
    assert visible_time(word("", (1.0, 3.0))) == 1.0  # a patch
    assert visible_time(word("page", None)) is None
    region = Passage(span=(-1, -1), box=(0, 0, 1, 1), times=(1.0, 3.0), contribution=0.0)
    assert visible_time(region) == 1.0

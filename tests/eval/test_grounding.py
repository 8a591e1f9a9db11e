"""Grounding: metrics against loops, relevance maps, and invalid phrases."""

import json

import numpy as np
import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval import Phrase
from pipeline.eval.evaluation import run
from pipeline.eval.grounding import (
    GeneratedPhrases,
    Grounder,
    check_phrases,
    generate_phrases,
    read_phrases,
)
from pipeline.eval.relevance_maps import (
    GRID_SIZE,
    grounding_metrics,
    region_mask,
    relevance_map,
)
from pipeline.eval.report import html
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.searcher import open_index
from tests.pdfs import Page, pdf

pytestmark = pytest.mark.heavy

NAN = np.nan


def expected_metrics(map_YX, region_YX):
    cells = [(float(s), bool(g)) for s, g in zip(map_YX.flat, region_YX.flat, strict=True)]
    mass = sum(s for s, g in cells if g) / (sum(s for s, _ in cells) + 1e-6)
    hits, ious = [], []
    for tenth in range(1, 10):
        above = [s >= tenth / 10 for s, _ in cells]
        both = sum(on and g for on, (_, g) in zip(above, cells, strict=True))
        either = sum(on or g for on, (_, g) in zip(above, cells, strict=True))
        ious.append(both / either if either else 0.0)
        hits.append(ious[-1] >= 0.05)
    return mass, sum(hits) / 9, sum(ious) / 9


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_loops(seed):
    generator = np.random.default_rng(seed)
    map_YX = generator.random((12, 12)) ** 3
    region_YX = generator.random((12, 12)) < 0.02 * (seed + 1)
    assert grounding_metrics(map_YX, region_YX) == pytest.approx(
        expected_metrics(map_YX, region_YX)
    )


def test_perfect_and_empty_maps():
    region_YX = region_mask([(0.25, 0.25, 0.5, 0.75)])
    assert region_YX.sum() == (GRID_SIZE / 4) * (GRID_SIZE / 2)
    assert grounding_metrics(region_YX.astype(float), region_YX) == pytest.approx(
        (1, 1, 1), abs=1e-6
    )
    assert grounding_metrics(np.zeros((GRID_SIZE, GRID_SIZE)), region_YX) == (0, 0, 0)


def test_region_covers_overlapped_cells():
    rows = region_mask([(0.0, 0.0, 0.25, 0.25), (0.5, 0.26, 1.0, 0.27)], side=4)
    assert rows.astype(int).tolist() == [[1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_relevance_map():
    boxes = np.array(
        [[0, 0, 0.5, 0.5], [0, 0, 1, 0.5], [0.5, 0.5, 1, 1], [NAN] * 4, [0, 0.5, 0.5, 1]]
    )
    similarity = np.array([0.2, 0.6, 0.4, -0.2, NAN])
    # The range is -0.2 (the token without a location) to 0.6; the last token has no vector.
    assert relevance_map(similarity, boxes, side=2) == pytest.approx(
        np.array([[1.0, 1.0], [0.0, 0.75]])
    )
    assert relevance_map(np.full(5, 0.3), boxes, side=2).tolist() == [[1, 1], [1, 1]]
    assert relevance_map(np.full(5, NAN), boxes, side=2).tolist() == [[0, 0], [0, 0]]


def write(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_read_phrases(tmp_path):
    row = {"item_id": "a", "phrase": "two words", "boxes": [[0, 0.1, 0.5, 0.2], [0, 0.5, 1, 1]]}
    (phrase,) = read_phrases(write(tmp_path / "phrases.jsonl", row))
    assert tuple(phrase) == ("a", "two words", row["boxes"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"boxes": [[0, 0, 1, 1.5]]}, r"\(line 1 of "),
        ({"boxes": [[0.5, 0, 0.5, 1]]}, r"\(line 1 of "),
        ({"boxes": []}, r"\(line 1 of "),
        ({"boxes": [[0, 0, 1]]}, r"\(line 1 of "),
        ({"phrase": " "}, r"\(line 1 of "),
        ({"item_id": 7}, r"\(line 1 of "),
    ],
)
def test_malformed_phrases(tmp_path, change, problem):
    row = {"item_id": "a", "phrase": "two words", "boxes": [[0, 0, 1, 1]], **change}
    with pytest.raises(SpecError, match=f"^grounding must be .*{problem}") as caught:
        read_phrases(write(tmp_path / "phrases.jsonl", row))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["[]", '{"item_id": "a"', '{"boxes": ' + "[" * 100_000])
def test_phrases_that_are_not_json_objects(tmp_path, line):
    (tmp_path / "phrases.jsonl").write_text(line)
    with pytest.raises(SpecError, match=r"^grounding must be .* \(line 1 of "):
        read_phrases(str(tmp_path / "phrases.jsonl"))


def test_empty_and_missing_phrase_files(tmp_path):
    with pytest.raises(SpecError, match="grounding must be .*is empty"):
        read_phrases(write(tmp_path / "phrases.jsonl"))
    with pytest.raises(SpecError, match="grounding must be .*does not exist"):
        read_phrases(str(tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def uri(cluster, tmp_path_factory) -> str:
    """Returns an index of two pages with characters 6 of 200 points wide, and of a text."""
    folder = tmp_path_factory.mktemp("grounding")
    (folder / "pages").mkdir()
    lines = [(20, 80, "the harbour of Lisbon"), (20, 50, "sells fresh fish"), (20, 20, "and bread")]
    (folder / "pages/a.pdf").write_bytes(pdf(Page(lines), Page([(20, 50, "a crust of bread")])))
    (folder / "texts").mkdir()
    (folder / "texts/letter.txt").write_text("Dear Ada, fish is cheap in Lisbon.")
    for name, path in (("pages", "pages"), ("text", "texts")):
        values = {
            "index": str(folder / "index"),
            "source": {"name": name, "path": str(folder / path)},
            "representations": [
                {"compressor": "none"},
                {"compressor": {"name": "hpool", "num_vectors": 4}},
                {"compressor": {"name": "random", "num_vectors": 4}},
                {"compressor": {"name": "samer", "num_vectors": 4}, "keep_assignment": False},
                {
                    "compressor": {"name": "kcenter", "num_vectors": 8, "output": "progressive"},
                    "id": "nested_8",
                },
            ],
        }
        spec = config.parse(IndexSpec, values)
        job.run(spec, IndexResources(), job=name, report=lambda line: None)
    return str(folder / "index")


def test_generate_phrases(uri):
    spec = GeneratedPhrases(num_phrases=30, num_words=2)
    phrases = generate_phrases(spec, open_index(uri).index, ["full"], None)
    texts = [(phrase.item_id, phrase.text) for phrase in phrases]
    assert len(set(texts)) == len(texts) == 8 + 3  # all word pairs, also across lines
    assert {item_id for item_id, _ in texts} == {"a.pdf#page=1", "a.pdf#page=2"}
    boxes = np.array(phrases[texts.index(("a.pdf#page=1", "fresh fish"))].boxes)
    assert boxes[:, 0].min() == pytest.approx((20 + 6 * 6) / 200, abs=1e-3)
    assert boxes[:, 2].max() == pytest.approx((20 + 16 * 6) / 200, abs=1e-3)
    sample = generate_phrases(
        GeneratedPhrases(num_phrases=2), open_index(uri).index, ["full"], None
    )
    assert [p.text for p in sample] == [
        p.text
        for p in generate_phrases(
            GeneratedPhrases(num_phrases=2), open_index(uri).index, ["full"], None
        )
    ]
    with pytest.raises(SpecError, match="grounding must be a file of phrases if no item has word"):
        generate_phrases(spec, open_index(uri).index, ["full"], "modality = 'text'")


def test_generated_phrases_are_independent_of_row_order(uri, monkeypatch):
    index, spec = open_index(uri).index, GeneratedPhrases(num_phrases=2)
    expected = generate_phrases(spec, index, ["full"], None)
    batches = list(index.batches(["item_id"], filter="modality = 'page'"))
    reverse = [batch.take(np.arange(len(batch))[::-1]) for batch in batches[::-1]]
    monkeypatch.setattr(index, "batches", lambda *_, **options: reverse)
    assert generate_phrases(spec, index, ["full"], None) == expected


@pytest.mark.parametrize("name", ["full", "hpool_4", "random_4"])
def test_metrics_follow_from_stored_columns(uri, name):
    searcher = open_index(uri)
    phrase = Phrase("a.pdf#page=1", "fresh fish", [[0.25, 0.4, 0.6, 0.6]])
    numbers = Grounder(searcher, [phrase]).measure(name)
    info = searcher.index.representation(name)
    extents, assignment = info.positions["extents"], info.assignment_column
    columns = [name, extents, *([assignment] if assignment else [])]
    (row,) = searcher.index.items([phrase.item_id], columns).to_pylist()
    (query,) = searcher.queries([phrase.text], name).tokens
    values = []
    for token in range(len(row[extents])):
        if name == "full":
            output = token
        elif name == "hpool_4":
            output = row[assignment][token]
        else:  # assigns each vector to one input token
            output = row[assignment].index(token) if token in row[assignment] else None
        vector = None if output is None else np.array(row[name][output], float)
        values.append(None if vector is None else np.mean([q.numpy() @ vector for q in query]))
    known = [value for value in values if value is not None]
    cells = np.zeros((GRID_SIZE, GRID_SIZE))
    for value, (x0, y0, x1, y1, *_) in zip(values, row[extents], strict=True):
        if value is not None:
            scaled = (value - min(known)) / (max(known) - min(known))
            for y in range(int(y0 * GRID_SIZE), int(np.ceil(y1 * GRID_SIZE))):
                for x in range(int(x0 * GRID_SIZE), int(np.ceil(x1 * GRID_SIZE))):
                    cells[y, x] = max(cells[y, x], scaled)
    expected = expected_metrics(cells, region_mask(phrase.boxes))
    assert list(numbers.values()) == pytest.approx([*expected, 1], abs=1e-5)


def test_prefix_of_a_representation(uri):
    searcher = open_index(uri)
    phrase = Phrase("a.pdf#page=1", "fresh fish", [[0.25, 0.4, 0.6, 0.6]])
    whole, all_vectors, prefix = (
        Grounder(searcher, [phrase]).measure(name)
        for name in ("nested_8", "nested_8@8", "nested_8@2")
    )
    assert whole == all_vectors != prefix
    assert 0 < prefix["box_mass"] < 1 and prefix["phrases"] == 1


def test_no_metrics_without_assignments(uri):
    assert Grounder(open_index(uri), []).columns("samer_4") is None


@pytest.mark.parametrize(
    ("item_id", "rule"),
    [("b.pdf", "the id of an item in the index"), ("letter.txt", "stored token positions")],
)
def test_check_phrases_rejects_items(uri, item_id, rule):
    phrases = [Phrase(item_id, "fish", [[0, 0, 1, 1]])]
    with pytest.raises(SpecError, match=f"grounding must be .*{rule}.*, got '{item_id}'"):
        check_phrases(phrases, open_index(uri).index, ["full"])


def test_grounding_in_an_evaluation(uri, tmp_path):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\ta.pdf#page=1\t1\n")
    (tmp_path / "queries.jsonl").write_text('{"_id": "1", "text": "fish in Lisbon"}\n')
    values = {
        "index": uri,
        "benchmark": {"name": "beir", "path": str(tmp_path)},
        "output": str(tmp_path / "out"),
        "judged": "item",
        "scores": ["maxsim"],
        "grounding": {"num_phrases": 50, "num_words": 2},
    }
    lines = []
    evaluation = run(config.parse(EvaluateSpec, values), lines.append)
    assert evaluation.row("full.maxsim").grounding["phrases"] == 11
    assert 0 < evaluation.row("hpool_4.maxsim").grounding["box_mass"] < 1
    assert "grounding: 11 phrases found in the texts of the items" in lines
    assert "no grounding for samer_4: no stored assignments or regions" in lines
    page = html.report([evaluation])
    assert "CoverageIoU" in page and "Grounding is measured on 11 phrases" in page

"""Composed queries of text and image, in Python and with the search job."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jobs
from jobs import search
from pipeline import Composed
from pipeline.config import SpecError
from pipeline.search.map_images import highlight
from pipeline.search.maps import similarity_map
from pipeline.search.previews import Previews
from pipeline.search.searcher import open_index
from tests.images import index_photos

pytestmark = pytest.mark.heavy

TEXT = "but in red"


@pytest.fixture(scope="module")
def photos(cluster, checkpoint, tmp_path_factory):
    """Returns the folder of an index built with a tiny Qwen2-VL, and its images."""
    folder = tmp_path_factory.mktemp("composed")
    model = checkpoint("qwen2_vl")
    return folder, index_photos(folder, "qwen_vl", model, output_tokens="visual")


def test_equals_encoded_query(photos):
    folder, images = photos
    searcher = open_index(str(folder / "index"))
    assert searcher.representation("full").encoder.query_kinds == (
        "text",
        "image",
        "video",
        "composed",
    )
    queries = [Composed(TEXT, images["3.png"]), Composed("x", images["1.png"])]
    encoder = searcher.encoder()
    encoded = encoder.encode_media([{"text": q.text, "image": q.image} for q in queries])
    for name in ("full", "hpool_8"):
        for score in ("maxsim", "single_vector", "hybrid"):
            hits = searcher.search(queries, name, score=score)
            assert hits == searcher.search(encoded, name, score=score)
            single = searcher.search(queries[0], name, score=score)
            assert [hit.item_id for hit in single] == [hit.item_id for hit in hits[0]]
    parts = (
        searcher.search(TEXT, score="single_vector"),
        searcher.search(images["3.png"], score="single_vector"),
    )
    together = searcher.search(queries[0], score="single_vector")
    for part in parts:  # the query differs from both of its parts
        assert [hit.score for hit in together] != pytest.approx([hit.score for hit in part])


def test_explanations_and_maps(photos):
    folder, images = photos
    searcher = open_index(str(folder / "index"))
    query = Composed(TEXT, images["3.png"])
    for name in ("full", "hpool_8"):
        hit = searcher.search(query, name, k=1)[0]
        tokens = [match.query_token for match in hit.matches]
        # The query consists of the tokens of the text and the prompt, without image tokens.
        assert TEXT in "".join(tokens) and not any(token.startswith("[") for token in tokens)
        assert all(location.box for match in hit.matches for location in match.locations)
        map = similarity_map(searcher, query, hit.item_id, name)
        assert list(map.query_tokens) == tokens and np.isfinite(map.values()).all()
        assert map.score == pytest.approx(hit.score, abs=1e-3)
        assert highlight(Previews(searcher.index), map).startswith(b"\x89PNG")


def test_rejects_invalid_queries(photos, index_uri):
    folder, images = photos
    searcher = open_index(str(folder / "index"))
    for query, problem in (
        (Composed(" ", images["3.png"]), "at least one word"),
        (Composed(TEXT, b"GIF89a"), "cannot be read"),
    ):
        with pytest.raises(SpecError, match=f"^query must be .*{problem}"):
            searcher.search(query)
    with pytest.raises(
        SpecError, match="^query must be a text or audio.*, which is not supported by MiniLM$"
    ):
        open_index(index_uri).search(Composed(TEXT, images["3.png"]))


def test_search_job(photos, tmp_path, capsys):
    folder, images = photos
    uri, photo = str(folder / "index"), str(folder / "photos" / "3.png")
    expected = open_index(uri).search(Composed(TEXT, images["3.png"]), k=3)
    search.main([uri, *TEXT.split(), "--image", photo, "--k", "3", "--json"])
    hits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [hit["item_id"] for hit in hits] == [hit.item_id for hit in expected]
    assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in expected])
    maps, run = tmp_path / "maps", tmp_path / "run.trec"
    search.main([uri, TEXT, "--image", photo, "--k", "2", "--save-maps", str(maps)])
    assert "best match: box" in capsys.readouterr().out
    assert (maps / "1.png").read_bytes().startswith(b"\x89PNG")
    search.main([uri, TEXT, "--image", photo, "--k", "2", "--run", str(run)])
    assert "queries/s" in capsys.readouterr().out and len(run.read_text().splitlines()) == 2


def test_search_job_rejects_composed_query_for_text_encoder(photos, index_uri, capsys):
    folder, _ = photos
    with pytest.raises(SystemExit) as exit:
        jobs.run(search.main, [index_uri, TEXT, "--image", str(folder / "photos" / "3.png")])
    assert exit.value.code == 2
    kinds = "a text or audio or a video"
    message = f"query must be {kinds}, got 'a text with an image', which is not supported by MiniLM"
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", f"error: {message}")  # after a progress bar

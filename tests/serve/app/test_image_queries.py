"""Tests that image and composed queries over HTTP give the results of in-process searches."""

from __future__ import annotations

import base64
import io
import json

import httpx2
import pytest
import soundfile

from pipeline import Composed
from pipeline.search.searcher import open_index
from pipeline.serve.client import Client, ServerError
from tests.images import index_photos

pytestmark = pytest.mark.heavy


def test_image_queries(serving_once, checkpoint, tmp_path):
    photos = index_photos(tmp_path, "colpali", checkpoint("colqwen2"))
    uri, photo = str(tmp_path / "index"), photos["3.png"]
    url = serving_once({"indexes": {"i": {"uri": uri}}, "single_process": True}, "images")
    with Client(url, tries=20) as client:
        assert client.indexes()[0].representations[0].queries == [
            "text",
            "image",
            "audio",
            "video",
            "vectors",
            "item",
        ]
        searcher = open_index(uri)
        assert client.search(photo, k=1).hits[0].item_id == "3.png"
        for query in (photo, "a bird"):
            response = client.search(query, representation="hpool_8", k=5, explain="map")
            expected = searcher.search(query, "hpool_8", k=5)
            assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in expected]
            scores = [hit.score for hit in expected]
            assert [hit.score for hit in response.hits] == pytest.approx(scores, rel=1e-4)
            boxes = [at.box for match in response.hits[0].matches for at in match.locations]
            assert boxes and all(boxes)
            assert all(word.box and not word.text for word in response.hits[0].map.words)
        both = client.search_batch([photo, "a bird", photo], representation="full", k=1)
        assert both.results[0] == both.results[2] != both.results[1]
        assert len(client.encode([photo, "a bird"]).queries[0].vectors) > 4
        with pytest.raises(ServerError, match="cannot be read"):
            client.search(b"GIF89a")
        message = "query must be a text or an image .* not supported by the encoder of full .422"
        with pytest.raises(ServerError, match=message) as error:
            client.search(Composed("but in red", photo))
        assert error.value.problem.field == "query"


def test_composed_queries(serving_once, checkpoint, tmp_path):
    photos = index_photos(tmp_path, "qwen_vl", checkpoint("qwen2_vl"), output_tokens="visual")
    uri, photo = str(tmp_path / "index"), photos["3.png"]
    url = serving_once({"indexes": {"i": {"uri": uri, "num_shards": 2}}}, "composed")
    query = Composed("but in red", photo)
    with Client(url, tries=20) as client:
        kinds = ["text", "image", "audio", "video", "composed", "vectors", "item"]
        assert client.indexes()[0].representations[0].queries == kinds
        searcher = open_index(uri)
        for name in ("full", "hpool_8"):
            for score in ("maxsim", "hybrid"):
                options = {"k": 5, "score": score}
                server_hits = client.search(
                    query, representation=name, explain="map", **options
                ).hits
                expected = searcher.search(query, name, **options)
                assert [hit.item_id for hit in server_hits] == [hit.item_id for hit in expected]
                scores = [hit.score for hit in expected]
                assert [hit.score for hit in server_hits] == pytest.approx(scores, rel=1e-4)
                tokens = [match.query_token for match in server_hits[0].matches]
                assert "but in red" in "".join(tokens)
                assert list(server_hits[0].map.query_tokens) == tokens
        queries = [query, "but in red", photo, Composed("x", photo), Composed("but in red", photo)]
        results = client.search_batch(queries, k=3).results
        assert results[0] == results[4] == client.search(query, k=3).hits
        assert [results[0]] * 3 != results[1:4] and results[0] not in results[1:4]
        reranked = client.search(query, k=2, representation="hpool_8", rerank={"top": 5})
        assert [hit.score for hit in reranked.hits] == pytest.approx(
            [hit.score for hit in searcher.search(query, "full", k=2)], rel=1e-4
        )
        with pytest.raises(ServerError, match="at least one word"):
            client.search(Composed(" ", photo))
        with pytest.raises(ServerError, match="cannot be read"):
            client.search(Composed("but in red", b"GIF89a"))
    image = base64.b64encode(photo).decode()
    with httpx2.Client(base_url=url, timeout=30) as http:
        body = {"query": {"text": "but in red", "image": image}, "k": 3}
        hits = http.post("/v1/search", json=body).json()["hits"]
        assert [hit["item_id"] for hit in hits] == [hit.item_id for hit in results[0]]
        for query, field in (
            ({"text": "", "image": image}, "query.text"),
            ({"text": "x", "image": image, "vectors": [[1.0]]}, "query.vectors"),
        ):
            response = http.post("/v1/search", json={"query": query})
            assert response.status_code == 422 and response.json()["error"]["field"] == field


def test_spoken_and_negative_queries(serving_once, index_uri, lexical_uri):
    """Audio as JSON and as a form, negative queries, and their errors."""
    samples, rate = soundfile.read("jobs/data/speech/jfk.flac", 3 * 44_100)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    speech = file.getvalue()
    members = {"a": {"index": "i"}, "b": {"index": "j"}}
    indexes = {"i": {"uri": index_uri}, "j": {"uri": lexical_uri}}
    settings = {"indexes": indexes, "federations": {"all": {"members": members}}}
    url = serving_once({**settings, "single_process": True}, "speech")
    searcher = open_index(index_uri)
    with Client(url, tries=20) as client:
        kinds = ["text", "audio", "video", "vectors", "item"]
        assert client.indexes()[0].representations[0].queries == kinds
        response = client.search(Composed(audio=speech), index="i", k=3)
        (warning,) = response.warnings
        assert warning.startswith("recognised in the query: ") and "my fellow" in warning
        expected = searcher.search(warning.partition(": ")[2], k=3)
        assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in expected]
        options = {"negative": "how to bake bread", "negative_weight": 0.25, "k": 3}
        for score in ("maxsim", "hybrid"):
            hits = client.search("a wing", index="i", score=score, **options).hits
            expected = searcher.search("a wing", score=score, **options)
            assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
            scores = [hit.score for hit in expected]
            assert [hit.score for hit in hits] == pytest.approx(scores, rel=1e-4)
            assert hits[0].parts.negative == pytest.approx(expected[0].parts.negative, abs=1e-4)
        both = client.search_batch(["a wing", "heat"], index="i", **options).results
        assert both[0] == client.search("a wing", index="i", **options).hits
        for query, more, field in (
            (Composed(audio=b"no audio"), {}, "query.audio"),
            (Composed(image=b"GIF89a", video=b"x"), {}, "query.image"),
            ("a wing", {"negative": Composed(audio=b"x")}, "negative.audio"),
            ("a wing", {"negative": " "}, "negative"),
            ("a wing", {"negative": "x", "rerank": {"top": 5}}, "negative"),
            ("a wing", {"negative": "x", "index": "all"}, "negative"),
        ):
            with pytest.raises(ServerError) as error:
                client.search(query, **{"index": "i", **more})
            assert (error.value.status, error.value.problem.field) == (422, field)
    with httpx2.Client(base_url=url, timeout=60) as http:
        form = {"text": "the moon", "options": json.dumps({"index": "i", "k": 2})}
        found = http.post("/v1/search", data=form, files={"audio": ("a.wav", speech)}).json()
        assert len(found["hits"]) == 2 and "the moon\n" in found["warnings"][0]
        for data, files, status in (
            ({"other": "x"}, {"audio": ("a.wav", speech)}, 422),
            ({"options": "{"}, {"audio": ("a.wav", speech)}, 400),
            ({"options": json.dumps({"index": "i", "k": 0})}, {"audio": ("a.wav", speech)}, 422),
            ({}, {"audio": ("a.wav", b"x" * (9 << 20))}, 413),
        ):
            assert http.post("/v1/search", data=data, files=files).status_code == status
        body = {"query": "x", "negative": "y", "negative_weight": 2, "index": "i"}
        error = http.post("/v1/search", json=body).json()["error"]
        assert (error["code"], error["field"]) == ("invalid_argument", "negative_weight")

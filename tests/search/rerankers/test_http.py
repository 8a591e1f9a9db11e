"""Rerankers behind an endpoint, with a local server that runs a tiny cross-encoder."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image
from sentence_transformers import CrossEncoder

from jobs import search
from pipeline.config import SpecError
from pipeline.search.rerankers import load_rerankers
from pipeline.search.searcher import open_index
from tests.encoders.endpoints import MODEL, Server
from tests.hub import running
from tests.images import index_photos


class Scores(Server):
    """Server of the interfaces of Cohere, Jina and vLLM."""

    def results(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Computes the results of a request, best first."""
        is_score = path.endswith("score")
        query, documents = (
            body["text_1" if is_score else "query"],
            body["text_2" if is_score else "documents"],
        )
        scores = [self.model(query, document) for document in documents]
        name = "score" if is_score else "relevance_score"
        assert is_score or body["top_n"] == len(documents)
        rows = [{"index": i, name: score} for i, score in enumerate(scores)]
        return sorted(rows, key=lambda row: -row[name])


def brightness(query: str, document: Any) -> float:
    """Returns the mean of the pixels of an image in either format."""
    if "image" in document:
        data = document["image"]
    else:
        (part,) = document["content"]
        data = part["image_url"]["url"].removeprefix("data:image/png;base64,")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    return float(sum(image.convert("L").tobytes()))


@pytest.fixture(scope="module")
def server(cross_encoder):
    model = CrossEncoder(cross_encoder)
    with running(
        Scores(lambda query, text: float(model.predict([(query, text)])[0]))
    ) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def reset(server):
    server.reset()
    server.change = lambda content: {"model": content["model"], "results": content["data"]}


def spec(server, **fields: Any) -> dict[str, Any]:
    return {"name": "http", "url": server.url, "model": MODEL, "max_tries": 1, **fields}


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"])
def test_equals_the_model_in_process(texts, server, cross_encoder, path):
    if path.endswith("score"):
        server.change = lambda content: content
    searcher, queries = open_index(texts), ["lift of a wing", "cone"]
    local = searcher.search(queries, rerank={"name": "cross_encoder", "model": cross_encoder})
    (reranker,) = load_rerankers(spec(server, path=path, batch_size=2))
    remote = searcher.search(queries, rerank=reranker)
    for one, other in zip(local, remote, strict=True):
        assert [hit.item_id for hit in one] == [hit.item_id for hit in other]
        for hit, same in zip(one, other, strict=True):
            assert hit.rerank.score == pytest.approx(same.rerank.score, abs=1e-6)
    assert (reranker.usage.requests, reranker.usage.pairs) == (6, 10)


def test_images(cluster, checkpoint, tmp_path, server):
    photos = index_photos(tmp_path, "colpali", checkpoint("colpali"))
    searcher, model = open_index(str(tmp_path / "index")), server.model
    server.model = brightness
    try:
        for image_format in ("content", "image"):
            fields = spec(server, documents="images", image_format=image_format)
            hits = searcher.search("a wing", k=5, rerank=fields)
            gray = {n: Image.open(io.BytesIO(photo)).convert("L") for n, photo in photos.items()}
            for hit in hits:
                assert hit.rerank.score == sum(gray[hit.item_id].tobytes())
            assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)
    finally:
        server.model = model
    texts_only = searcher.search("a wing", k=5, rerank=spec(server))
    assert {hit.rerank.problem for hit in texts_only} == {"has no text"}
    assert [hit.first_stage.rank for hit in texts_only] == [1, 2, 3, 4, 5]


def test_faults(texts, server, capsys):
    """Each is one sentence that names the URL; the command exits with 2."""
    searcher = open_index(texts)

    def check(message: str, **fields: Any) -> None:
        with pytest.raises(SpecError, match=message):
            searcher.search("wing", rerank=spec(server, **fields))

    start = r"^rerank.url must be the URL of a server that answers /v1/rerank, got '.*' \("
    server.faults = [(500, {})]
    check(start + r".* failed 1 times: status 500 .*fault.*\)$")
    server.delay_s = 0.5
    check(start + r".*failed 1 times: ReadTimeout.*\)$", timeout_s=0.1)
    server.delay_s = 0.0
    server.faults = [(401, {})]
    check(r"^rerank.api_key_variable must be the name of an environment variable")
    server.faults = [(404, {})]
    check(r"^rerank.model must be a model that .* serves at /v1/rerank")
    server.faults = [(400, {})]
    check(
        r"^query must be a query that the endpoint accepts with the items, got 'wing' \(status 400"
    )
    for change, message in (
        (lambda rows: rows[1:], "one result for each of 5 documents, got 4"),
        (lambda rows: [rows[0], *rows[:-1]], "one result for each of 5 documents, got 5"),
        (lambda rows: [{**row, "relevance_score": float("nan")} for row in rows], "got NaN"),
        (lambda rows: [{"index": 0}], "a list of objects with index and relevance_score"),
    ):
        server.change = lambda content, change=change: {"results": change(content["data"])}
        check(start + f".*{message}")
    server.change = lambda content: {"model": "other", "results": content["data"]}
    check(start + "the endpoint must answer with the model tiny/model, got other")
    server.change = lambda content: b"<html>"
    check(start + "the response of the endpoint must be JSON")
    server.reset()
    server.faults = [(500, {})]
    fields = [f"{name}={value}" for name, value in spec(server).items() if name != "name"]
    with pytest.raises(SpecError, match="rerank.url must be"):
        search.main([texts, "wing", "--rerank", "http", *fields])
    check(r"^rerank.url must be the URL of the server without /v1", url=server.url + "/v1")

"""Requests to an endpoint: retries, concurrency, and checks of responses."""

from __future__ import annotations

import base64
import json
import pickle
import time

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders import endpoint
from pipeline.encoders.endpoint import Endpoint, EndpointError, ResponseError, read_vectors
from pipeline.registry import ENCODERS
from tests.encoders.endpoints import MODEL, TextModel, serve


@pytest.fixture(scope="module")
def running(checkpoint):
    with serve(TextModel(checkpoint("colbert_bert"))) as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    monkeypatch.setattr("pipeline.runtime.retries.INITIAL_DELAY_S", 0.01)
    monkeypatch.setattr(endpoint, "OUTAGE_S", 0.2)
    yield running
    running.reset()


def spec(server, **fields):
    given = {"name": "http", "url": server.url, "model": MODEL, "dim": 32, "max_tries": 3}
    return ENCODERS.resolve({**given, **fields})


def embed(server, *texts, **fields):
    (matrices,) = Endpoint(spec(server, **fields)).embed([{"input": list(texts)}])
    return matrices


def test_embeddings(server):
    first, second = embed(server, "wing lift", "drag")
    expected = server.model.tokens("wing lift").mean(dim=0)
    assert first.shape == second.shape == (1, 32)
    np.testing.assert_allclose(first[0], expected / expected.norm(), atol=1e-6)


def test_pooling(server):
    first, second = embed(server, "wing lift", "drag", api="pooling")
    np.testing.assert_allclose(first, server.model.tokens("wing lift"), atol=1e-6)
    assert len(first) == 4 and len(second) == 3
    (body,) = server.requests
    assert body["task"] == "token_embed" and body["encoding_format"] == "float"


def test_results_are_ordered_by_index(server):
    expected = embed(server, "wing lift", "drag")
    server.change = lambda content: {**content, "data": content["data"][::-1]}
    np.testing.assert_array_equal(embed(server, "wing lift", "drag"), expected)


def test_base64(server):
    def encode(content):
        for result in content["data"]:
            vectors = np.array(result.pop("data"), "<f4")
            result["data"] = base64.b64encode(vectors.tobytes()).decode()
        return content

    expected = embed(server, "wing lift", "drag", api="pooling")
    server.change = encode
    for found, vectors in zip(
        embed(server, "wing lift", "drag", api="pooling"), expected, strict=True
    ):
        np.testing.assert_array_equal(found, vectors)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_transient_failures_are_retried(server, status):
    server.faults = [(status, {}), (status, {})]
    assert len(embed(server, "lift")) == 1
    assert server.num_requests == 3


def test_truncated_response_is_retried(server):
    server.faults = [(200, {"Content-Length": "500", "Connection": "close"})]
    assert len(embed(server, "lift")) == 1 and server.num_requests == 2


def test_retry_after_is_respected(server):
    server.faults = [(429, {"Retry-After": "0.3"})]
    start = time.monotonic()
    embed(server, "lift")
    assert time.monotonic() - start >= 0.3


def test_lasting_failure(server):
    server.faults = [(500, {})] * 3
    with pytest.raises(EndpointError, match="/v1/embeddings failed 3 times: status 500"):
        embed(server, "lift")
    assert server.num_requests == 3


def test_timeouts(server):
    """After all attempts timed out, further requests fail at once for a while."""
    client = Endpoint(spec(server, timeout_s=0.1, max_tries=2))
    server.delay_s = 0.3
    with pytest.raises(EndpointError, match="failed 2 times: ReadTimeout"):
        list(client.embed([{"input": ["lift"]}]))
    server.delay_s = 0
    with pytest.raises(EndpointError, match="failed 2 times: ReadTimeout"):
        list(client.embed([{"input": ["lift"]}]))
    time.sleep(0.25)
    assert len(list(client.embed([{"input": ["lift"]}]))) == 1


def test_errors_are_retryable_and_can_be_pickled():
    error = pickle.loads(pickle.dumps(EndpointError("failed")))
    assert isinstance(error, OSError) and str(error) == "failed"
    assert str(pickle.loads(pickle.dumps(ResponseError("bad")))) == "bad"


def test_unreachable_server(server):
    unreachable = spec(server, url="http://127.0.0.1:9", max_tries=1)
    with pytest.raises(SpecError, match="^url must be the URL of a server that answers, got "):
        Endpoint(unreachable).check_model()


def test_requests_are_concurrent_and_in_order(server):
    server.delay_s = 0.1
    client = Endpoint(spec(server, max_concurrency=4))
    bodies = [{"input": [text]} for text in ("lift", "drag", "wing", "flow") * 2]
    start = time.monotonic()
    found = [matrix for (matrix,) in client.embed(bodies)]
    assert time.monotonic() - start < 0.7 and server.max_concurrent == 4
    np.testing.assert_array_equal(found[:4], found[4:])
    np.testing.assert_array_equal(found[1], embed(server, "drag")[0])


def test_rejected_input(server):
    server.faults = [(400, {})]
    with pytest.raises(Unreadable) as caught:
        embed(server, "lift")
    assert caught.value.reason == "rejected by the endpoint" and "status 400" in caught.value.detail


CHANGES = {
    "model": (
        lambda c: {**c, "model": "other"},
        "must answer with the model tiny/model, got other",
    ),
    "count": (lambda c: {**c, "data": c["data"][:1]}, "one result for each of 2 inputs, got 1"),
    "index": (lambda c: {**c, "data": [c["data"][0]] * 2}, "one result for each of 2 inputs"),
    "no data": (lambda c: {"model": MODEL}, "must contain model and data"),
    "not JSON": (lambda c: json.dumps(c).encode()[:-40], "must be JSON"),
    "number": (
        lambda c: {**c, "data": [{"index": i, "data": 1.0} for i in (0, 1)]},
        "shape scalar",
    ),
    "empty": (lambda c: {**c, "data": [{"index": i, "data": []} for i in (0, 1)]}, "of shape 0"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("api", ["embeddings", "pooling"])
def test_invalid_responses(server, name, api):
    server.change, message = CHANGES[name]
    with pytest.raises(ResponseError, match=message):
        embed(server, "lift", "drag", api=api)
    assert server.num_requests == 1


def vectors_response(vectors):
    return json.dumps({"model": MODEL, "data": [{"index": 0, "data": vectors}]}).encode()


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[0.0] * 31], "vectors of width 32, got vectors of width 31"),
        ([[0.0] * 32, [0.0] * 31], "vectors of equal width"),
        ([[float("nan")] * 32], "finite numbers, got NaN"),
        ([[1e39] * 32], "finite numbers"),
        ([0.0] * 32, "a vector per token for each input, got an array of shape 32"),
        ([["x"] * 32], "vectors of equal width"),
        ("AAA", "vectors of equal width"),
    ],
)
def test_invalid_vectors(server, vectors, message):
    with pytest.raises(ResponseError, match=message):
        read_vectors(vectors_response(vectors), 1, spec(server, api="pooling"))


def test_check_model(server):
    Endpoint(spec(server)).check_model()
    with pytest.raises(SpecError, match="^model must be .*tiny/model.*did you mean 'tiny/model'"):
        Endpoint(spec(server, model="tiny/modell")).check_model()
    server.names = []  # a server without the list
    Endpoint(spec(server, model="other")).check_model()


def test_api_key(server, monkeypatch):
    """The key is sent, and appears in no message."""
    server.key = "secret-key"
    monkeypatch.delenv("TINY_KEY", raising=False)
    with pytest.raises(SpecError, match="^api_key_variable must be .*, which is not set"):
        Endpoint(spec(server, api_key_variable="TINY_KEY"))
    monkeypatch.setenv("TINY_KEY", "wrong-key")
    with pytest.raises(SpecError, match="^api_key_variable must be .* valid API key") as caught:
        embed(server, "lift", api_key_variable="TINY_KEY")
    assert "wrong-key" not in str(caught.value) and "***" in str(caught.value)
    monkeypatch.setenv("TINY_KEY", "secret-key")
    assert len(embed(server, "lift", api_key_variable="TINY_KEY")) == 1

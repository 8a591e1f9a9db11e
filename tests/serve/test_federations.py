"""Searches of federations over HTTP, and members that fail, are slow, change or are deleted."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import lance
import pytest
import uvicorn

from pipeline.config import parse
from pipeline.index.reader import ITEMS
from pipeline.search.federated import FederatedSearcher
from pipeline.search.options import SearchOptions
from pipeline.search.rerankers import load_rerankers
from pipeline.serve import wire
from pipeline.serve.api import create_app
from pipeline.serve.client import Client, ServerError
from pipeline.serve.deployments import create_stages
from pipeline.serve.engine import Engine
from pipeline.serve.gateway import Gateway
from pipeline.serve.local import run_locally
from pipeline.serve.metrics import Metrics
from pipeline.serve.responses import hit_truncation_warnings
from pipeline.serve.settings import ServeSpec
from tests.serve.conftest import free_port, write_keys

QUERIES = ["the lift of a wing", "heat", "bread with a golden crust"]
KEYS = {
    "mr_all": {"name": "all"},
    "mr_both": {"name": "both", "indexes": ["one", "two", "both"]},
    "mr_one": {"name": "one", "indexes": ["one", "both"]},
}


class Server:
    """Server in a thread of this process, whose stages can be made to fail."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = parse(ServeSpec, settings)
        self.stages = create_stages(self.settings, run_locally)
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        config = uvicorn.Config(create_app(self._gateway), port=port, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    async def _gateway(self) -> Gateway:
        metrics = Metrics()
        self.events: list[tuple[str, str]] = []
        self.engine = Engine(
            self.settings, self.stages, metrics.stage, lambda *event: self.events.append(event)
        )
        await self.engine.indexes.start()
        return Gateway(self.settings, self.engine, metrics)

    def searcher(self, index: str) -> Any:
        """Returns the stage that searches an index."""
        return self.stages.searchers[index][0]._stage

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def uris(index_uri, tmp_path_factory) -> dict[str, str]:
    """Copies of the index: `one` lacks items about bread, the others those about heat."""
    folder = tmp_path_factory.mktemp("federations")
    uris = {name: str(folder / name) for name in ("one", "two", "three")}
    for name, uri in uris.items():
        shutil.copytree(index_uri, uri)
        lacking = "bread" if name == "one" else "heat"
        lance.dataset(f"{uri}/{ITEMS}").delete(f"parent_id = '{lacking}'")
    return uris


def members(uris: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        "tokens": {"index": uris["one"], "representation": "full"},
        "few": {"index": uris["two"], "representation": "hpool_2", "weight": 0.5},
        "single": {"index": uris["one"], "score": "single_vector", "weight": 0.25},
    }


@pytest.fixture(scope="module")
def texts(checkpoint) -> dict[str, Any]:
    """Reranker of the indexes of the server, whose name is `texts`."""
    return {"name": "cross_encoder", "model": checkpoint("cross_encoder"), "top": 5}


@pytest.fixture(scope="module")
def server(uris, texts, tmp_path_factory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, KEYS)
    rerank = {
        name: [{**texts, "label": "texts"}, {**texts, "label": "other", "batch_size": size}]
        for name, size in (("one", 8), ("two", 16), ("three", 8))
    }
    deleted = {"one": {"index": uris["one"]}, "three": {"index": "three"}}
    settings = {
        "indexes": {name: {"uri": uri, "rerank": rerank[name]} for name, uri in uris.items()},
        "federations": {
            "both": {"members": members(uris)},
            "strict": {"members": members(uris), "require_all": True},
            "deleted": {"members": deleted},
        },
        "keys": str(path),
        "reload_interval_s": 0.2,
        "limits": {"max_k": 50},
        # Tests run beside others, on machines of any speed.
        "timeouts": {"member_s": 60, "encode_s": 60, "filter_s": 60, "search_s": 60},
    }
    with Server(settings) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.url, "mr_all", tries=1) as client:
        yield client


@pytest.fixture
def http(server) -> Iterator[httpx2.Client]:
    headers = {"Authorization": "Bearer mr_all"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=30) as http:
        yield http


def error_message(
    response: httpx2.Response, status: int, code: str, field: str | None = None
) -> str:
    """Returns the message of an error, whose other fields are checked."""
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert (response.status_code, error.code, error.field) == (status, code, field), error
    return error.message


def in_process(
    uris: dict[str, str], query: str, fields: dict[str, Any] | None = None, rerank=(), **options
):
    """Returns the hits of a search in this process."""
    searcher = FederatedSearcher({"members": members(uris), **(fields or {})})
    parsed = parse(SearchOptions, {"explain": "matches", **options})
    return searcher.search_with([query], parsed, load_rerankers(rerank))[0][0]


def without(uris: dict[str, str], name: str) -> dict[str, Any]:
    return {"members": {key: m for key, m in members(uris).items() if key != name}}


@pytest.mark.parametrize("join", ["item", "parent", "overlap"])
@pytest.mark.parametrize(
    "options", [{}, {"k": 3, "filter": "parent_id <> 'wing'"}, {"ids": ["heat", "bread/1"]}]
)
def test_equals_in_process_search(client, uris, join, options):
    """Bit for bit, with explanations."""
    for query in QUERIES:
        response = client.search(query, index="both", join=join, explain="matches", **options)
        assert response.hits == in_process(uris, query, {"join": join}, **options)
        assert not response.degraded and response.warnings == []
    assert (response.index, response.version, response.representation) == ("both", None, None)
    described = [(m.name, m.index, m.representation, m.error) for m in response.members]
    assert described == [
        ("tokens", "one", "full", None),
        ("few", "two", "hpool_2", None),
        ("single", "one", "full", None),
    ]
    assert {"both.tokens", "both.few", "both.single", "total"} <= set(response.durations_ms)


@pytest.mark.parametrize("join", ["item", "parent"])
def test_reranked_hits_equal_in_process_search(client, uris, texts, join):
    stages = [{"name": "texts"}, {"name": "texts", "top": 2, "add_first_stage": True}]
    rerank = [texts, {**texts, "top": 2, "add_first_stage": True}]
    options = {"index": "both", "join": join, "explain": "matches", "k": 3}
    for query in QUERIES:
        response = client.search(query, rerank=stages, **options)
        expected = in_process(uris, query, {"join": join}, rerank=rerank, k=3)
        for hit, other in zip(response.hits, expected, strict=True):  # batches have other sizes
            scores = hit.score, hit.rerank.score
            assert scores == pytest.approx((other.score, other.rerank.score), abs=1e-5)
            changes = {"score": hit.score, "rerank": hit.rerank}
            assert hit == other.model_copy(update=changes)
        assert response.reranked and response.durations_ms["texts"] > 0
        assert response.warnings == hit_truncation_warnings([query], [expected])
    batch = client.search_batch(QUERIES, rerank=stages, **options).results
    assert [hit.item_id for hit in batch[-1]] == [hit.item_id for hit in expected]


def test_a_reranker_that_fails(client, server, uris, monkeypatch):
    monkeypatch.setattr(server.stages.models["one"]._stage, "read", lack)
    stage = {"name": "texts"}
    with pytest.raises(ServerError, match="texts is overloaded") as caught:
        client.search("heat", index="both", rerank=stage)
    assert caught.value.status == 503
    response = client.search(
        "heat", index="both", rerank={**stage, "optional": True}, explain="matches"
    )
    assert response.warnings == ["not reranked: texts is overloaded"] and not response.reranked
    assert response.hits == in_process(uris, "heat") and ("degraded", "texts") in server.events


def test_hits_name_the_members_that_found_them(client):
    hit = client.search("the lift of a wing", index="both", explain="map").hits[0]
    assert {member.member for member in hit.members} == {"tokens", "few", "single"}
    assert hit.score == sum(member.value for member in hit.members)  # three kinds of scores
    assert hit.map is not None and hit.representation == "full"
    assert hit.members[0].member == "tokens"


def test_members_of_a_request(client, uris):
    changed = members(uris)
    changed["few"] |= {"weight": 3.0, "representation": "random_4"}
    changed["tokens"] |= {"candidates": "single", "num_candidates": 60}
    options = {
        "few": {"weight": 3.0, "representation": "random_4"},
        "tokens": {"candidates": "single", "num_candidates": 60},
    }
    responses = client.search_batch(QUERIES, index="both", members=options, explain="matches")
    for query, hits in zip(QUERIES, responses.results, strict=True):
        expected = in_process(uris, query, {"members": changed})
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], 1e-5)
    assert [member.candidates for member in responses.members] == ["single", "exact", "exact"]


async def hang(*_: Any) -> None:
    await asyncio.sleep(60)


async def crash(*_: Any) -> None:
    raise RuntimeError("no memory at /a/b/c")


async def lack(*_: Any) -> None:
    from ray.serve.exceptions import BackPressureError

    raise BackPressureError(1, 1)


FAULTS = {
    "hang": (hang, "it took longer than 2 s"),
    "crash": (crash, "internal server error"),
    "lack": (lack, "search is overloaded"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_members_that_fail_are_left_out(client, server, uris, monkeypatch, fault):
    method, reason = FAULTS[fault]
    assert not client.search("heat", index="both").degraded  # loads models and vectors
    monkeypatch.setattr(server.searcher("two"), "rank", method)
    if fault == "hang":
        timeouts = server.settings.timeouts.model_copy(update={"member_s": 2.0})
        settings = server.settings.model_copy(update={"timeouts": timeouts})
        monkeypatch.setattr(server.engine, "settings", settings)
    response = client.search("heat", index="both", explain="matches")
    assert response.degraded and response.warnings == [f"member few is left out: {reason}"]
    assert [member.error for member in response.members] == [None, reason, None]
    assert response.hits == in_process(uris, "heat", without(uris, "few"))
    assert ("degraded", "both.few") in server.events
    if fault == "hang":
        return
    with pytest.raises(ServerError, match=f"member few is left out: {reason}") as caught:
        client.search("heat", index="strict")
    assert caught.value.status == 503
    monkeypatch.setattr(server.searcher("one"), "rank", method)
    with pytest.raises(ServerError) as caught:
        client.search("heat", index="both")
    sentences = [f"member {name} is left out: {reason}" for name in ("tokens", "few", "single")]
    assert (caught.value.status, caught.value.problem.message) == (503, "; ".join(sentences))


def test_a_member_that_fails_to_describe_its_hits(client, server, uris, monkeypatch):
    monkeypatch.setattr(server.searcher("two"), "describe", crash)
    query = "bread with a golden crust"  # only `few` has such items
    response = client.search(query, index="both", explain="matches")
    assert response.warnings == ["member few is left out: internal server error"]
    assert response.hits == in_process(uris, query, without(uris, "few"))


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"k": 51}, "k", "k must be at most 50, got 51"),
        ({"score": "hybrid"}, "score", "score must be set in the members of the federation, got"),
        ({"group_by": "parent"}, "group_by", "group_by must be null; set `join` to parent, got"),
        ({"rerank": {}}, "rerank.name", "rerank.name must be the name of a reranker for a fede"),
        ({"rerank": {"name": "x"}}, "rerank.name", "rerank.name must be one of texts, other, got"),
        (
            {"rerank": {"name": "other"}},
            "rerank.name",
            "rerank.name must be the same model in all indexes, got 'other', which differs in two",
        ),
        ({"rerank": {"name": "texts", "top": 51}}, "rerank.top", "rerank.top must be at most 50"),
        (
            {"rerank": {"name": "texts"}, "query": {"vectors": [[1, 2]]}},
            "query",
            "query must be a text or an image for texts, got 'vectors'",
        ),
        ({"query": {"item": "heat"}}, "query", "query must be a text, an image, both, or vectors"),
        ({"query": " "}, "query", "query must be a text with at least one word, got ' '"),
        ({"query": {"vectors": [[1, 2]]}}, "query", "query must be vectors of dimension 384, got"),
        ({"filter": "heat ="}, "filter", "filter must be "),
        ({"filter": "a = 1) OR (b = 2"}, "filter", "filter must be "),
        ({"filter": "speed > 3"}, "filter", "filter must be "),
        ({"join": "title"}, "join", "join must be 'item', 'parent' or 'overlap', got 'title'"),
        ({"members": {"all": {}}}, "members", "members must be one of tokens, few, single, got"),
        ({"members": {"few": {"k": 3}}}, "members.few.k", "unknown field 'k' in members.few"),
        ({"members": {"few": {"weight": 0}}}, "members.few.weight", "members.few.weight must be "),
        (
            {"members": {"few": {"representation": "nope"}}},
            "members.few.representation",
            "members.few.representation must be one of",
        ),
        (
            {"members": {"few": {"candidates": "ivf"}}},
            "members.few.candidates",
            "members.few.candidates must be",
        ),
        (
            {"members": {"few": {"score": "fused"}}},
            "members.few.fusion.weights",
            "members.few.fusion.weights must be set for the score fused, got None",
        ),
        ({"index": "one", "join": "item"}, "join", "join must be null for an index, got 'item'"),
        ({"index": "one", "members": {}}, "members", "members must be null for an index, got []"),
    ],
)
def test_invalid_requests(http, change, field, message):
    response = http.post("/v1/search", json={"query": "heat", "index": "both", **change})
    assert error_message(response, 422, "invalid_argument", field).startswith(message)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/encode", {"queries": ["heat"], "index": "both"}),
        ("POST", "/v1/rerank", {"query": "heat", "item_ids": ["heat"], "index": "both"}),
        ("GET", "/v1/items/heat?index=both", None),
        ("GET", "/v1/previews/heat?index=both", None),
        ("GET", "/v1/media/heat?index=both", None),
        ("GET", "/v1/indexes/both/facets", None),
        ("GET", "/v1/indexes/both/map", None),
    ],
)
def test_other_requests_need_an_index(http, method, path, body):
    response = http.request(method, path, json=body)
    message = error_message(response, 422, "invalid_argument", "index")
    assert message == (
        "index must be the name of an index for this request, got 'both', which is a federation"
    )


def test_federations_are_listed_for_keys_that_can_access_all_indexes(server, http):
    both, strict, _ = http.get("/v1/indexes").json()["federations"]
    assert (both["name"], both["join"]) == ("both", "item") and strict["name"] == "strict"
    assert both["rerankers"] == ["texts", "other"]
    assert both["members"][1] == {
        "name": "few",
        "index": "two",
        "weight": 0.5,
        "representation": "hpool_2",
        "score": "maxsim",
        "filter": None,
    }
    with Client(server.url, "mr_both", tries=1) as client:
        assert [federation.name for federation in client.federations()] == ["both"]
        assert client.search("heat", index="both").hits
    with Client(server.url, "mr_one", tries=1) as client:
        assert client.federations() == []
        with pytest.raises(ServerError, match="unknown index 'both'"):
            client.search("heat", index="both")
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert {"FederationInfo", "MemberInfo", "MemberOptions", "MemberResult"} <= schemas.keys()


def test_a_new_version_of_a_member(client, uris):
    before = client.search("wing", index="both")
    lance.dataset(f"{uris['two']}/{ITEMS}").delete("parent_id = 'wing'")
    newest, end = lance.dataset(f"{uris['two']}/{ITEMS}").version, time.monotonic() + 30
    while (response := client.search("wing", index="both")).members[1].version != newest:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "few" in {member.member for member in before.hits[0].members}
    assert "few" not in {member.member for member in response.hits[0].members}
    assert response.members[0] == before.members[0]


def test_a_member_whose_dataset_is_deleted(client, uris):
    query = "bread with a golden crust"  # its items are only in `three`
    assert client.search(query, index="deleted").hits[0].parent_id == "bread"
    shutil.rmtree(Path(uris["three"]) / ITEMS)
    response = client.search(query, index="deleted")
    reason = "the server cannot currently read the index"
    assert response.degraded and response.warnings == [f"member three is left out: {reason}"]
    assert response.hits and all(hit.members[0].member == "one" for hit in response.hits)
    reranked = client.search(query, index="deleted", rerank={"name": "texts"})
    assert reranked.reranked and reranked.degraded and reranked.warnings[0] == response.warnings[0]
    assert {hit.item_id for hit in reranked.hits} == {hit.item_id for hit in response.hits}

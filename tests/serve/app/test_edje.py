"""Tests of EDJE reranking over HTTP, including equality with in-process searches."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import lance
import pyarrow as pa
import pytest
from pydantic import ValidationError

from jobs.serve import _check_indexes
from pipeline import Composed
from pipeline.config import SpecError, parse
from pipeline.index.reader import IndexReader
from pipeline.search.options import Rerank
from pipeline.search.rerankers.contents import NO_TEXT
from pipeline.search.rerankers.edje import NO_TOKENS
from pipeline.search.results import Hit
from pipeline.search.searcher import Searcher, open_index
from pipeline.serve import stages
from pipeline.serve.client import Client, ServerError
from pipeline.serve.mteb import Endpoint
from pipeline.serve.settings import Scale, ServedIndex, ServeSpec, Timeouts
from tests.encoders.edje.models import edje_of, reranker_of
from tests.images import index_captioned, noise, png
from tests.serve.conftest import at_once

pytestmark = pytest.mark.heavy  # its servers take a minute to start

TEXT = "heat at the wing"
OPTIONS = {"representation": "hpool_4", "score": "single_vector"}
NUM_PHOTOS = 8
#: Photo without EDJE tokens. The first photo has no caption.
WITHOUT_TOKENS = "3.png"
TRUNCATED = "the reranker truncated {} by up to {} tokens"


@pytest.fixture(scope="module")
def dual(checkpoint) -> dict[str, Any]:
    return {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}


@pytest.fixture(scope="module")
def model(dual, tmp_path_factory) -> str:
    return edje_of(tmp_path_factory.mktemp("edje"), dual, max_text_tokens=10)


@pytest.fixture(scope="module")
def photos() -> dict[str, bytes]:
    return {f"{seed}.png": png(noise(60 + seed, 50, seed)) for seed in range(NUM_PHOTOS)}


@pytest.fixture(scope="module")
def uri(cluster, tmp_path_factory, dual, model, photos) -> str:
    uri = index_captioned(tmp_path_factory.mktemp("photos"), dual, photos, rerank=model)
    dataset = IndexReader(uri).dataset
    table = dataset.to_table()
    field = table.schema.field("rerank_tokens")
    rows = zip(table["item_id"].to_pylist(), table["rerank_tokens"].to_pylist(), strict=True)
    values = [None if item_id == WITHOUT_TOKENS else tokens for item_id, tokens in rows]
    position = table.schema.get_field_index("rerank_tokens")
    table = table.set_column(position, field, pa.array(values, field.type))
    lance.write_dataset(table, dataset.uri, mode="overwrite", max_rows_per_file=4)
    return uri


@pytest.fixture(scope="module")
def url(serving_here, uri, model, checkpoint) -> str:
    rerank = [
        {"name": "edje", "model": model},
        {"name": "cross_encoder", "model": checkpoint("cross_encoder"), "top": 5, "label": "texts"},
        {"name": "http", "url": "http://127.0.0.1:9", "model": "m", "max_tries": 1},
    ]
    settings = {
        "indexes": {"photos": {"uri": uri, "num_shards": 2, "rerank": rerank}},
        "limits": {"max_rerank_pairs": 40},
        "reload_interval_s": 0.5,
    }
    return serving_here(settings, "edje")


@pytest.fixture
def client(url) -> Iterator[Client]:
    with Client(url, tries=10) as client:
        yield client


@pytest.fixture(scope="module")
def searcher(uri) -> Searcher:
    return open_index(uri)


def assert_same(hits: list[Hit], expected) -> None:
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
    assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-4)
    for hit, other in zip(hits, expected, strict=True):
        first, joint = other.first_stage, other.rerank
        assert hit.first_stage.rank == first.rank
        assert hit.first_stage.score == pytest.approx(first.score, abs=1e-5)
        assert hit.rerank.score == (joint.score and pytest.approx(joint.score, abs=1e-4))
        assert hit.rerank.num_truncated_tokens == joint.num_truncated_tokens
        assert hit.rerank.problem == joint.problem


def wait_until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize("query", ["text", "image"])
def test_equals_in_process_search(client, searcher, model, photos, query):
    query = TEXT if query == "text" else photos["5.png"]
    problems = set()
    for depth, k, add in ((None, 10, False), (4, 8, False), (4, 8, True), (8, 3, True)):
        second = {} if depth is None else {"top": depth}
        second |= {"add_first_stage": True} if add else {}
        response = client.search(query, k=k, rerank={"name": "edje", **second}, **OPTIONS)
        reranker = reranker_of(model, depth or 10, add)
        expected = searcher.search(query, k=k, rerank=reranker, explain=False, **OPTIONS)
        assert response.reranked and {"edje", "total"} < set(response.durations_ms)
        maximum = max(hit.rerank.num_truncated_tokens for hit in expected)
        warnings = [TRUNCATED.format("texts of hits", maximum)] if maximum else []
        assert response.warnings == warnings
        assert_same(response.hits, expected)
        problems |= {
            (hit.item_id, hit.rerank.problem) for hit in response.hits if hit.rerank.problem
        }
    assert problems == {(WITHOUT_TOKENS, NO_TOKENS) if query == TEXT else ("0.png", NO_TEXT)}


def test_equals_in_process_search_with_options(client, searcher, model):
    reranker = reranker_of(model)
    for ours, theirs in (
        ({"score": "maxsim"}, {"score": "maxsim"}),
        ({"filter": "item_id < '5'"}, {"filter": "item_id < '5'"}),
        ({"parents": ["1.png", "6.png"]}, {"parents": ["1.png", "6.png"]}),
        ({"group_by": "parent"}, {"group_by": "parent"}),
        ({"ids": []}, {"ids": []}),
    ):
        response = client.search(TEXT, rerank={"name": "edje"}, **{**OPTIONS, **ours})
        assert_same(response.hits, searcher.search(TEXT, rerank=reranker, **{**OPTIONS, **theirs}))
    server_hits = client.search(TEXT, rerank={"name": "edje"}, explain="matches", **OPTIONS).hits
    for hit, other in zip(
        server_hits, searcher.search(TEXT, rerank=reranker, **OPTIONS), strict=True
    ):
        assert [m.document_token for m in hit.matches] == [m.document_token for m in other.matches]
    assert client.indexes()[0].rerankers == ["edje", "texts", "http"]


def test_batch_and_concurrent_requests(client, searcher, model, photos):
    """Requests contain text and image queries."""
    queries = [TEXT, photos["5.png"], "lift", photos["1.png"]]
    expected = [searcher.search(q, k=3, rerank=reranker_of(model, 5), **OPTIONS) for q in queries]
    second = {"name": "edje", "top": 5}
    results = client.search_batch(queries, k=3, rerank=second, **OPTIONS).results
    for hits, hits_in_process in zip(results, expected, strict=True):
        assert_same(hits, hits_in_process)

    search = partial(client.search, rerank=second, **OPTIONS)
    valid = [partial(search, query, k=3) for query in queries * 5]
    *responses, error = at_once([*valid, partial(search, b"GIF89a")])
    for response, hits_in_process in zip(responses, expected * 5, strict=True):
        assert_same(response.hits, hits_in_process)
    assert isinstance(error, ServerError) and error.problem.field == "query.image"


def test_rerank(client, searcher, model, photos):
    items = ["1.png", "nobody", WITHOUT_TOKENS, "0.png", "5.png", "1.png"]
    for query, missing in (
        (TEXT, ["nobody", WITHOUT_TOKENS]),
        (photos["5.png"], ["nobody", "0.png"]),
    ):
        response = client.rerank(query, items, name="edje")
        hits = searcher.search(query, ids=items, rerank=reranker_of(model), **OPTIONS)
        read = [hit for hit in hits if not hit.rerank.problem]
        assert [item.item_id for item in response.results] == [hit.item_id for hit in read]
        scores = [hit.rerank.score for hit in read]
        assert [item.score for item in response.results] == pytest.approx(scores, abs=1e-4)
        assert response.missing == missing and response.representation is None
        assert client.rerank(query, items, name="edje", k=1).results == response.results[:1]


def test_warns_of_truncated_query(client, searcher, model):
    long = f"{TEXT} {TEXT}"
    response = client.search(long, rerank={"name": "edje"}, **OPTIONS)
    assert_same(response.hits, searcher.search(long, rerank=reranker_of(model), **OPTIONS))
    maximum = max(hit.rerank.num_truncated_tokens for hit in response.hits)
    assert maximum and response.warnings == [TRUNCATED.format("queries", maximum)]
    assert client.rerank(long, ["1.png"], name="edje").warnings == response.warnings


def test_rerankers_in_a_row(client, searcher, model, checkpoint):
    """Hits equal those in Python; a reranker that fails keeps the order if it is optional."""
    texts = {"name": "cross_encoder", "model": checkpoint("cross_encoder"), "top": 3}
    edje = {"name": "edje", "model": model, "top": 6}
    second = [{"name": "edje", "top": 6}, {"name": "texts", "top": 3}]
    query = "a wing with 3 engines"
    for stages_of, specs in ((second, [edje, texts]), (second[1:], [texts])):
        response = client.search(query, k=8, rerank=stages_of, **OPTIONS)
        expected = searcher.search(query, k=8, rerank=specs, explain=False, **OPTIONS)
        assert_same(response.hits, expected)
        assert {stage["name"] for stage in stages_of} < set(response.durations_ms)
    failing = [*second, {"name": "http", "optional": True}]
    degraded = client.search(query, k=8, rerank=failing, **OPTIONS)
    whole = client.search(query, k=8, rerank=second, **OPTIONS)
    assert degraded.hits == whole.hits and degraded.reranked
    assert [w for w in degraded.warnings if w.startswith("not reranked: ")]
    scores = client.rerank(query, ["1.png", "2.png"], name="texts").results
    found = searcher.search(query, k=8, rerank={**texts, "top": 8}, explain=False, **OPTIONS)
    values = {hit.item_id: hit.rerank.score for hit in found}
    for result in scores:
        assert result.score == pytest.approx(values[result.item_id], abs=1e-5)


def test_error_names_invalid_field(client, url, photos):
    image = base64.b64encode(photos["1.png"]).decode()
    with httpx2.Client(base_url=url, timeout=30) as http:
        for change, field, message in (
            (
                {"rerank": {"name": "maxsim"}},
                "rerank.name",
                "one of vectors, edje, texts, http, got 'maxsim'",
            ),
            (
                {"rerank": {"name": "edje", "representation": "hpool_4"}},
                "rerank.representation",
                "",
            ),
            (
                {"rerank": {"add_first_stage": True}},
                "rerank.add_first_stage",
                "omitted for vectors",
            ),
            (
                {"rerank": {"name": "edje", "top": 41}},
                "rerank.top",
                "at most 40 items to rerank, got 41",
            ),
            ({"query": {"vectors": [[1.0] * 32]}}, "query", "must be a text or an image for edje"),
            ({"query": {"image": image, "text": "x"}}, "query", "a text with an image"),
            ({"query": {"image": "AAAA"}}, "query.image", "cannot be read"),
        ):
            body = {"query": TEXT, "rerank": {"name": "edje"}, **OPTIONS, **change}
            response = http.post("/v1/search", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["field"]) == (422, field), error
            assert message in error["message"]
        body = {"queries": [TEXT] * 5, "rerank": {"name": "edje"}, **OPTIONS}
        assert http.post("/v1/search:batch", json=body).status_code == 422
        for change, field in (
            ({"representation": "hpool_4"}, "representation"),
            ({"query": {"vectors": [[1.0] * 32]}}, "query"),
            ({"query": " "}, "query"),
            ({"item_ids": [str(i) for i in range(41)]}, "item_ids"),
        ):
            body = {"query": TEXT, "item_ids": ["1.png"], "name": "edje", **change}
            error = http.post("/v1/rerank", json=body).json()["error"]
            assert error["field"] == field, error
    with pytest.raises(ServerError, match="a text with an image"):
        client.search(Composed("x", photos["1.png"]), rerank={"name": "edje"}, **OPTIONS)
    with pytest.raises(ValidationError, match="omitted unless name is vectors"):
        client.search(TEXT, rerank={"name": "edje", "representation": "hpool_4"})


def test_mteb_scores_preserve_order(client, searcher, model):
    second = {"name": "edje", "top": 4}
    endpoint = Endpoint(client, max_k=8, rerank=second, **OPTIONS)
    (scores,) = endpoint.search([{"id": "q", "text": TEXT}], top_k=8).values()
    expected = searcher.search(TEXT, k=8, rerank=reranker_of(model, 4), **OPTIONS)
    assert sorted(scores, key=scores.get, reverse=True) == [hit.item_id for hit in expected]


def test_checks_edje_model_before_start(url, uri, dual, model, tmp_path):
    def start(edje: str, index: str = uri) -> None:
        rerank = {"name": "edje", "model": edje}
        _check_indexes(parse(ServeSpec, {"indexes": {"i": {"uri": index, "rerank": rerank}}}))

    start(model)
    other = edje_of(tmp_path / "other", dual, seed=1)
    with pytest.raises(SpecError, match=r"indexes.i.rerank\[0\].model must be .*has no edje.json"):
        start(str(tmp_path))
    with pytest.raises(
        SpecError,
        match=r"^indexes.i.rerank\[0\].model must be an EDJE model with the adapter of the index,"
        r" .*, which has the adapter ",
    ):
        start(other)


def kill(deployment: str) -> None:
    """Kills the replicas of a deployment of this server."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if f"edje#{deployment}#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=30).status_code == 200
    except httpx2.TransportError:
        return False


def test_similarity_maps_equal_those_of_first_stage(client, searcher):
    plain = {"representation": "hpool_4", "score": "maxsim", "k": NUM_PHOTOS}
    first = {hit.item_id: hit for hit in client.search(TEXT, explain="map", **plain).hits}
    options = {**plain, "rerank": Rerank(name="edje", top=5)}
    hits = client.search(TEXT, explain="map", **options).hits
    assert [hit.item_id for hit in hits] != list(first)
    for hit in hits:
        assert hit.rerank.score is None or hit.first_stage.rank <= 5
        assert hit.map == first[hit.item_id].map and hit.map.query_tokens
    assert searcher.search(TEXT, "hpool_4", k=1)[0].item_id == next(iter(first))


def test_metrics_and_logs(client, url):
    import ray

    body = {"query": "zeppelin", **OPTIONS, "rerank": {"name": "edje"}}
    response = httpx2.post(f"{url}/v1/search", json=body, headers={"X-Request-ID": "edje-7"})
    assert response.json()["durations_ms"]["edje"] > 0
    wait_until(lambda: 'stage="edje"' in httpx2.get(f"{url}/metrics").text)
    session = ray._private.worker.global_worker.node.get_session_dir_path()

    def lines() -> list[dict[str, Any]]:
        files = Path(session, "logs/serve").glob("*RerankModels-photos*.log")
        logged = [line for file in files for line in file.read_text("utf-8").splitlines()]
        assert not any("zeppelin" in line for line in logged)
        return [json.loads(line) for line in logged if '"request_id": "edje-7"' in line]

    wait_until(lambda: any(line.get("stage") == "edje" for line in lines()))


@pytest.mark.parametrize(("precision", "dtype"), [("int8", "float32"), ("bfloat16", "bfloat16")])
def test_precision_setting(cluster, uri, model, precision, dtype, monkeypatch):
    monkeypatch.setattr(
        stages, "limit_threads", lambda scale: None
    )  # keep the threads of this process
    rerank = {"name": "edje", "model": model, "precision": precision}
    served = parse(ServedIndex, {"uri": uri, "rerank": rerank})
    spec = stages.ModelRanker(served, Scale(), Timeouts())._rerankers["edje"].joint.spec
    assert spec.dtype == dtype and (spec.quantise == "int8") == (precision == "int8")
    with pytest.raises(SpecError, match=r"rerank.precision must be .*'int8'.*, got 'int4'"):
        parse(ServedIndex, {"uri": uri, "rerank": {**rerank, "precision": "int4"}})
    with pytest.raises(SpecError, match="rerank must be rerankers with different labels"):
        parse(ServedIndex, {"uri": uri, "rerank": [rerank, rerank]})


@pytest.mark.heavy
def test_no_server_errors(url):
    from tests.serve.app.test_fuzz import fuzz

    existing = {"index": "photos", "item_id": "2.png", "representation": "hpool_4"}
    existing["rerank"] = {"name": "edje", "top": 3}
    statuses = fuzz(url, existing)
    assert statuses["/v1/search", 200] and statuses["/v1/rerank", 422]
    for route in ("/v1/media/{item_id}", "/v1/previews/{item_id}"):
        assert statuses[route, 200]


@pytest.mark.heavy
def test_recovers_from_killed_replica(client, url):
    wait_until(lambda: is_ready(url))
    options = {"k": 5, "rerank": {"name": "edje"}, **OPTIONS}
    before = client.search(TEXT, **options).hits
    kill("RerankModels-photos")
    assert client.search(TEXT, **options).hits == before
    wait_until(lambda: is_ready(url))
    kill("RerankModels-photos")
    response = client.search(TEXT, k=5, rerank={"name": "edje", "optional": True}, **OPTIONS)
    assert response.reranked or "not reranked: " in response.warnings[0]
    wait_until(lambda: is_ready(url))


def test_new_versions(client, url, uri, model):
    """An item is deleted, then all tokens; requests without or with optional reranking succeed."""
    options = {"k": NUM_PHOTOS, "rerank": {"name": "edje"}, **OPTIONS}
    before = client.search(TEXT, **options)
    best = before.hits[0].item_id
    dataset = lance.dataset(IndexReader(uri).dataset.uri)
    dataset.delete(f"item_id = '{best}'")
    wait_until(lambda: client.search(TEXT, **options).version > before.version, 30)
    expected = open_index(uri).search(TEXT, k=NUM_PHOTOS, rerank=reranker_of(model), **OPTIONS)
    assert_same(client.search(TEXT, **options).hits, expected)
    assert [hit.item_id for hit in expected] == [hit.item_id for hit in before.hits[1:]]

    dataset.drop_columns(["rerank_tokens"])
    newest = dataset.version
    wait_until(lambda: client.search(TEXT, **OPTIONS).version == newest, 30)
    with Client(url, tries=1) as once, pytest.raises(ServerError) as caught:
        once.search(TEXT, **options)
    assert caught.value.status == 503 and model not in str(caught.value)
    assert "cannot currently read a reranker, its endpoint or its tokens in the index" in str(
        caught.value
    )
    response = client.search(TEXT, k=3, rerank={"name": "edje", "optional": True}, **OPTIONS)
    assert not response.reranked and "not reranked" in response.warnings[0]
    assert response.hits == client.search(TEXT, k=3, **OPTIONS).hits
    assert is_ready(url)
    with pytest.raises(
        SpecError,
        match=r"indexes.i.rerank\[0\].model must be an EDJE whose rerank_tokens the index has",
    ):
        rerank = {"name": "edje", "model": model}
        _check_indexes(parse(ServeSpec, {"indexes": {"i": {"uri": uri, "rerank": rerank}}}))

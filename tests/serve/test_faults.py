"""What becomes of requests when a replica dies, a stage is slow, or there are too many of them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable

import httpx2
import lance
import pytest

from pipeline.index.reader import ITEMS
from pipeline.serve import wire
from pipeline.serve.client import AsyncClient, Client, ServerError

pytestmark = pytest.mark.heavy

SEARCH = {"query": "the lift of a wing"}
RERANK = {**SEARCH, "representation": "hpool_2", "rerank": {"depth": 5}}


@pytest.fixture(scope="module")
def uri(index_uri, tmp_path_factory) -> str:
    """An index of the tests' own, which they change."""
    folder = tmp_path_factory.mktemp("faults") / "index"
    shutil.copytree(index_uri, folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(serving, uri) -> str:
    settings = {
        "indexes": {"i": {"uri": uri}},
        "limits": {"in_flight": 4},
        "seconds": {"reload": 0.5, "rerank": 1},
    }
    return serving(settings, "faults")


def kill(deployment: str) -> None:
    """Ends the replicas of a deployment of this server, as a crash does."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if f"faults#{deployment}#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def wait_until(holds: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=30).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("deployment", ["Encoder", "Searcher-i-0", "Gateway"])
def test_a_killed_replica_costs_the_client_no_request(url, deployment):
    wait_until(lambda: is_ready(url))

    async def ask_all() -> list[wire.SearchAnswer]:
        async with AsyncClient(url, tries=10) as client:
            found = []
            for round in range(8):
                asked = [client.search(**SEARCH) for _ in range(3)]
                if round == 2:
                    kill(deployment)
                found += await asyncio.gather(*asked)
            return found

    found = asyncio.run(ask_all())
    assert len(found) == 24
    assert len({tuple(hit.item_id for hit in answer.hits) for answer in found}) == 1
    wait_until(lambda: is_ready(url))


def test_a_dead_reranker_gives_the_first_stage_where_that_is_allowed(url):
    with Client(url, tries=10) as client:
        whole = client.search(**{**RERANK, "rerank": wire.Rerank(depth=5)})
        assert whole.reranked and not whole.warnings
        kill("Reranker-i")
        found = client.search(**{**RERANK, "rerank": wire.Rerank(depth=5, optional=True)})
        assert not found.reranked and "not reranked" in found.warnings[0]
        first = client.search(SEARCH["query"], representation="hpool_2")
        assert [hit.item_id for hit in found.hits] == [hit.item_id for hit in first.hits]
    response = httpx2.post(f"{url}/v1/search", json=RERANK, timeout=30)
    if response.status_code != 200:  # it is not there again yet
        assert response.status_code in (503, 504)
        assert response.json()["error"]["code"] in ("unavailable", "timeout")
    wait_until(lambda: is_ready(url))
    assert httpx2.post(f"{url}/v1/search", json=RERANK, timeout=30).json()["reranked"]


def test_too_many_requests_are_refused_at_once(url):
    wait_until(lambda: is_ready(url))

    async def ask_all() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(timeout=60) as http:
            asked = (http.post(f"{url}/v1/search", json=SEARCH) for _ in range(40))
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert wire.ErrorAnswer.model_validate_json(answer.content).error.code == "unavailable"
            assert answer.headers["retry-after"] == "1"
    assert httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=30).status_code == 200


def test_a_new_version_is_served_and_no_request_fails(url, uri):
    wait_until(lambda: is_ready(url))
    with Client(url, tries=1) as client:
        before = client.search("bread", k=1)
        assert before.hits[0].item_id.startswith("bread")
        lance.dataset(f"{uri}/{ITEMS}").delete("parent_id = 'bread'")
        newest = lance.dataset(f"{uri}/{ITEMS}").version
        assert newest > before.version
        end, versions = time.monotonic() + 60, []
        while not versions or versions[-1] != newest:
            assert time.monotonic() < end
            versions.append(client.search("bread", k=1).version)
        assert set(versions) <= {before.version, newest} and versions == sorted(versions)
        assert not client.search("bread", k=1).hits[0].item_id.startswith("bread")
        assert client.indexes()[0].num_items == 6


def test_an_index_that_cannot_be_read_for_a_while(url, uri):
    with Client(url, tries=1) as client:
        before = client.search(**SEARCH)
        shutil.move(f"{uri}/{ITEMS}", f"{uri}/gone")
        try:
            time.sleep(2)
            with pytest.raises(ServerError, match="cannot read the index") as caught:
                client.search("flow", k=1)
            assert caught.value.status == 503 and uri not in str(caught.value)
        finally:
            shutil.move(f"{uri}/gone", f"{uri}/{ITEMS}")
        assert client.search(**SEARCH).hits == before.hits


def test_another_index_in_its_place(briefly, index_uri, tmp_path):
    """Its version has the same number; what is served is what is there."""
    shutil.copytree(index_uri, tmp_path / "index")
    items = str(tmp_path / "index" / ITEMS)
    table = lance.dataset(items).to_table()
    other = str(tmp_path / "other")
    lance.write_dataset(table.slice(0, 3), other)
    while lance.dataset(other).version < lance.dataset(items).version:
        lance.dataset(other).update_metadata({"n": str(lance.dataset(other).version)})
    assert lance.dataset(other).version == lance.dataset(items).version
    settings = {"indexes": {"i": {"uri": str(tmp_path / "index")}}, "seconds": {"reload": 0.5}}
    url = briefly(settings, "replaced")
    with Client(url, tries=10) as client:
        assert client.indexes()[0].num_items == 8
        shutil.rmtree(items)
        shutil.move(other, items)
        wait_until(lambda: client.indexes()[0].num_items == 3)
        assert len(client.search("lift", k=8).hits) == 3


def test_queries_that_nobody_waits_for_hold_nobody_up(briefly, uri):
    settings = {"indexes": {"i": {"uri": uri}}, "seconds": {"encode": 3}}
    url = briefly({**settings, "limits": {"batch_chars": 400_000}}, "waits")
    slow = {"queries": ["漢" * 4_000] * 60}
    with httpx2.Client(timeout=60) as http:
        assert http.post(f"{url}/v1/search", json=SEARCH).status_code == 200
        start = time.monotonic()
        assert http.post(f"{url}/v1/encode", json=slow).status_code == 504
        statuses = []
        while not statuses or statuses[-1] != 200:
            statuses.append(http.post(f"{url}/v1/search", json=SEARCH).status_code)
        assert time.monotonic() - start < 15  # all of it would have taken a minute and more


def test_a_stage_that_takes_too_long(briefly, uri):
    url = briefly({"indexes": {"i": {"uri": uri}}, "seconds": {"encode": 0.001}}, "hasty")
    response = httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=30)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert "encode took longer than 0.001 s" in response.json()["error"]["message"]


def test_without_keys_only_this_machine_is_answered(url):
    headers = {"X-Forwarded-For": "203.0.113.7"}
    response = httpx2.post(f"{url}/v1/search", json=SEARCH, headers=headers)
    assert response.status_code == 403 and "no access keys" in response.text

"""Tests of failures: killed replicas, slow stages, overload and changed indexes."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2
import lance
import pytest

from pipeline.index.reader import ITEMS
from pipeline.search.options import Rerank
from pipeline.serve import wire
from pipeline.serve.client import Client, ServerError
from tests.serve.conftest import at_once, children, cpu_seconds, write_keys

pytestmark = pytest.mark.heavy

SEARCH = {"query": "the lift of a wing", "index": "i"}
RERANK = {**SEARCH, "representation": "hpool_2", "rerank": {"top": 5}}


@pytest.fixture(scope="module")
def uri(index_uri, tmp_path_factory) -> str:
    """Copy of the index that the tests can modify."""
    folder = tmp_path_factory.mktemp("faults") / "index"
    shutil.copytree(index_uri, folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(serving_here, uri, nested_uri) -> str:
    members = {"first": {"index": "i"}, "second": {"index": "other"}}
    settings = {
        "indexes": {"i": {"uri": uri}, "other": {"uri": nested_uri}},
        "federations": {"both": {"members": members}},
        "limits": {"max_in_flight_requests": 4},
        "reload_interval_s": 0.5,
        "timeouts": {"rerank_s": 1},
    }
    return serving_here(settings, "faults")


def kill(deployment: str) -> None:
    """Kills the replicas of a deployment of this server."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if f"faults#{deployment}#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def kill_proxy() -> None:
    """Kills Ray's HTTP proxy."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if "PROXY" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def wait_until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=30).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("deployment", ["Encoder", "Searcher-i-0", "Gateway"])
def test_client_recovers_from_killed_replica(url, deployment):
    wait_until(lambda: is_ready(url))

    responses = []
    with Client(url, tries=10) as client:
        for round in range(8):
            if round == 2:
                kill(deployment)
            responses += at_once([partial(client.search, **SEARCH)] * 3)
    assert len(responses) == 24
    assert len({tuple(hit.item_id for hit in response.hits) for response in responses}) == 1
    wait_until(lambda: is_ready(url))


def test_a_federation_answers_while_a_replica_of_a_member_is_killed(url):
    """The other member answers if the retry fails as well."""
    wait_until(lambda: is_ready(url))
    with Client(url, tries=1) as client:
        search = partial(client.search, SEARCH["query"], index="both", k=3)
        whole = search()
        responses = []
        for round in range(8):
            if round == 2:
                kill("Searcher-other-0")
            responses += at_once([search] * 3)
        wait_until(lambda: not search().degraded)
        assert not whole.degraded
    for response in responses:
        assert isinstance(response, wire.SearchResponse), response
        if response.degraded:
            (warning,) = response.warnings
            assert warning.startswith("member second is left out: ")
            assert {hit.members[0].member for hit in response.hits} == {"first"}
        else:
            ids = [[hit.item_id for hit in answer.hits] for answer in (response, whole)]
            assert ids[0] == ids[1]


def test_optional_reranking_falls_back_to_first_stage(url):
    with Client(url, tries=10) as client:
        reranked = client.search(**{**RERANK, "rerank": Rerank(top=5)})
        assert reranked.reranked and not reranked.warnings
        kill("Reranker-i")
        degraded = client.search(**{**RERANK, "rerank": Rerank(top=5, optional=True)})
        assert not degraded.reranked and "not reranked" in degraded.warnings[0]
        first = client.search(SEARCH["query"], index="i", representation="hpool_2")
        assert [hit.item_id for hit in degraded.hits] == [hit.item_id for hit in first.hits]
    response = httpx2.post(f"{url}/v1/search", json=RERANK, timeout=30)
    if response.status_code != 200:  # the reranker has not restarted yet
        assert response.status_code in (503, 504)
        assert response.json()["error"]["code"] in ("unavailable", "timeout")
    wait_until(lambda: is_ready(url))
    assert httpx2.post(f"{url}/v1/search", json=RERANK, timeout=30).json()["reranked"]


def test_rejects_excess_requests(url):
    wait_until(lambda: is_ready(url))

    async def search_all() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(timeout=60) as http:
            searches = (http.post(f"{url}/v1/search", json=SEARCH) for _ in range(40))
            return await asyncio.gather(*searches)

    responses = asyncio.run(search_all())
    assert {response.status_code for response in responses} == {200, 503}
    for response in responses:
        if response.status_code == 503:
            error = wire.ErrorResponse.model_validate_json(response.content).error
            assert error.code == "unavailable" and response.headers["retry-after"] == "1"
    assert httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=30).status_code == 200


def test_reloads_new_version_without_failed_requests(url, uri):
    wait_until(lambda: is_ready(url))
    with Client(url, tries=1) as client:
        before = client.search("bread", index="i", k=1)
        assert before.hits[0].item_id.startswith("bread")
        lance.dataset(f"{uri}/{ITEMS}").delete("parent_id = 'bread'")
        newest = lance.dataset(f"{uri}/{ITEMS}").version
        assert newest > before.version
        end, versions = time.monotonic() + 60, []
        while not versions or versions[-1] != newest:
            assert time.monotonic() < end
            versions.append(client.search("bread", index="i", k=1).version)
        assert set(versions) <= {before.version, newest} and versions == sorted(versions)
        assert not client.search("bread", index="i", k=1).hits[0].item_id.startswith("bread")
        assert client.indexes()[0].num_items == 6


def test_temporarily_unreadable_index(url, uri):
    with Client(url, tries=1) as client:
        before = client.search(**SEARCH)
        shutil.move(f"{uri}/{ITEMS}", f"{uri}/gone")
        try:
            time.sleep(2)
            with pytest.raises(ServerError, match="cannot currently read the index") as caught:
                client.search("flow", index="i", k=1)
            assert caught.value.status == 503 and uri not in str(caught.value)
        finally:
            shutil.move(f"{uri}/gone", f"{uri}/{ITEMS}")
        assert client.search(**SEARCH).hits == before.hits


def test_replaced_index_with_same_version_number(serving_once, index_uri, tmp_path):
    shutil.copytree(index_uri, tmp_path / "index")
    items = str(tmp_path / "index" / ITEMS)
    table = lance.dataset(items).to_table()
    other = str(tmp_path / "other")
    lance.write_dataset(table.slice(0, 3), other)
    while lance.dataset(other).version < lance.dataset(items).version:
        lance.dataset(other).update_metadata({"n": str(lance.dataset(other).version)})
    assert lance.dataset(other).version == lance.dataset(items).version
    settings = {"indexes": {"i": {"uri": str(tmp_path / "index")}}, "reload_interval_s": 0.5}
    url = serving_once({**settings, "single_process": True}, "replaced")
    with Client(url, tries=10) as client:
        assert client.indexes()[0].num_items == 8
        shutil.rmtree(items)
        shutil.move(other, items)
        wait_until(lambda: client.indexes()[0].num_items == 3)
        assert len(client.search("lift", k=8).hits) == 3


def deployment_cpu_seconds(deployment: str) -> float:
    """Returns the CPU time of the replicas of a deployment and their child processes."""
    lines = {int(p.parent.name): p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline")}
    replicas = [process for process, line in lines.items() if f":{deployment}".encode() in line]
    assert replicas
    return sum(sum(map(cpu_seconds, (replica, *children(replica)))) for replica in replicas)


@pytest.mark.parametrize("reason", ["disconnected", "deadline"])
def test_stops_encoding_abandoned_queries(serving_once, uri, reason):
    timeouts = {"encode_s": 3 if reason == "deadline" else 120}
    settings = {"indexes": {"i": {"uri": uri}}, "timeouts": timeouts}
    url = serving_once({**settings, "limits": {"max_batch_chars": 400_000}}, "waits")
    slow = {"queries": ["漢" * 4_000] * 60}  # more than a minute
    with httpx2.Client(timeout=60) as http:
        wait_until(lambda: http.post(f"{url}/v1/search", json=SEARCH).status_code == 200)
        if reason == "disconnected":
            with pytest.raises(httpx2.TimeoutException):
                http.post(f"{url}/v1/encode", json=slow, timeout=3)
        else:
            assert http.post(f"{url}/v1/encode", json=slow).status_code == 504
        time.sleep(3)  # until the current slice ends, on a busy machine
        used = deployment_cpu_seconds("waits:Encoder")
        time.sleep(2)
        assert deployment_cpu_seconds("waits:Encoder") - used < 0.5
        assert http.post(f"{url}/v1/search", json=SEARCH).status_code == 200


def test_slow_requests_do_not_delay_other_keys(serving_once, uri, tmp_path):
    """Slow filters and queries of one key are interleaved with requests of another."""
    shutil.copytree(uri, tmp_path / "index")
    text = "Some words, over and over. " * 200_000
    lance.dataset(str(tmp_path / "index" / ITEMS)).update({"text": f"'{text}'"})
    write_keys(tmp_path / "keys.yaml", {"mr_greedy": {"name": "a"}, "mr_other": {"name": "b"}})
    settings = {"indexes": {"i": {"uri": str(tmp_path / "index")}}}
    settings |= {"keys": str(tmp_path / "keys.yaml"), "timeouts": {"filter_s": 3, "encode_s": 60}}
    url = serving_once({**settings, "limits": {"max_batch_chars": 400_000}}, "greedy")
    condition = " AND ".join(f"text NOT ILIKE '%over%never{i}%'" for i in range(130))
    body = {**SEARCH, "k": 1}

    async def search_all() -> tuple[list[int], list[float]]:
        greedy = {"Authorization": "Bearer mr_greedy"}
        async with httpx2.AsyncClient(timeout=120) as http:

            async def search(**change: str) -> httpx2.Response:
                headers = {"Authorization": "Bearer mr_other"}
                return await http.post(f"{url}/v1/search", json={**body, **change}, headers=headers)

            assert (await search(filter="modality = 'text'")).status_code == 200
            filtered = [
                http.post(
                    f"{url}/v1/search",
                    json={**body, "filter": f"{condition} AND text NOT ILIKE '%z{i}%'"},
                    headers=greedy,
                )
                for i in range(3)
            ]
            encoded = http.post(
                f"{url}/v1/encode", json={"queries": ["漢" * 4_000] * 90}, headers=greedy
            )
            slow = [asyncio.ensure_future(request) for request in (*filtered, encoded)]
            await asyncio.sleep(1)
            seconds = []
            for i in range(4):
                begin = time.monotonic()
                response = await search(filter=f"modality = 'text' AND {i} = {i}")
                assert response.status_code == 200
                seconds.append(time.monotonic() - begin)
            assert not slow[-1].done()
            statuses = [(await request).status_code for request in slow[:-1]]
            slow[-1].cancel()
            return statuses, seconds

    statuses, seconds = asyncio.run(search_all())
    assert statuses == [504] * 3
    assert max(seconds) < 8, seconds  # a minute without fair scheduling
    time.sleep(1)
    used = deployment_cpu_seconds("greedy:Searcher-i-0")
    time.sleep(2)
    assert deployment_cpu_seconds("greedy:Searcher-i-0") - used < 0.5


@pytest.mark.parametrize("process", ["gateway", "proxy"])
def test_errors_during_restart_follow_schema(url, process):
    """The client retries errors and refused connections during the restart."""
    wait_until(lambda: is_ready(url))
    stop, unexpected, num_refused = threading.Event(), [], 0

    def watch() -> None:
        nonlocal num_refused
        while not stop.is_set():
            try:
                response = httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=60)
            except httpx2.TransportError:
                num_refused += 1
                time.sleep(0.05)
                continue
            if response.status_code == 200:
                continue
            try:
                problem = wire.ErrorResponse.model_validate_json(response.content).error
                assert (response.status_code, problem.code) == (503, "unavailable")
                assert response.headers["retry-after"] == "1"
            except (ValueError, AssertionError, KeyError):
                unexpected.append((response.status_code, response.text))

    threads = [threading.Thread(target=watch) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    kill("Gateway") if process == "gateway" else kill_proxy()
    with Client(url) as client:
        begin = time.monotonic()
        assert client.search(**SEARCH).hits
        assert time.monotonic() - begin < 40
    wait_until(lambda: is_ready(url))
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not unexpected
    assert num_refused or process == "gateway"


def test_stage_timeout(serving_once, uri):
    url = serving_once({"indexes": {"i": {"uri": uri}}, "timeouts": {"encode_s": 0.001}}, "hasty")
    response = httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=30)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert "encode took longer than 0.001 s" in response.json()["error"]["message"]


def test_rejects_forwarded_requests_without_keys(url):
    headers = {"X-Forwarded-For": "203.0.113.7"}
    response = httpx2.post(f"{url}/v1/search", json=SEARCH, headers=headers)
    assert response.status_code == 403 and "no access keys" in response.text

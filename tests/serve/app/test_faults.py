"""What becomes of requests when a replica dies, a stage is slow, or there are too many of them."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import lance
import pytest

from pipeline.index.reader import ITEMS
from pipeline.serve import wire
from pipeline.serve.client import AsyncClient, Client, ServerError
from tests.serve.conftest import children, cpu_seconds, write_keys

pytestmark = pytest.mark.heavy

SEARCH = {"query": "the lift of a wing"}
RERANK = {**SEARCH, "representation": "hpool_2", "rerank": {"rerank_depth": 5}}


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
        "limits": {"max_in_flight_requests": 4},
        "reload_interval_s": 0.5,
        "timeouts": {"rerank_s": 1},
    }
    return serving(settings, "faults")


def kill(deployment: str) -> None:
    """Ends the replicas of a deployment of this server, as a crash does."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if f"faults#{deployment}#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def kill_proxy() -> None:
    """Ends Ray's HTTP proxy, as a crash does."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if "PROXY" in actor["name"]:
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
        whole = client.search(**{**RERANK, "rerank": wire.Rerank(rerank_depth=5)})
        assert whole.reranked and not whole.warnings
        kill("Reranker-i")
        found = client.search(**{**RERANK, "rerank": wire.Rerank(rerank_depth=5, optional=True)})
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
    settings = {"indexes": {"i": {"uri": str(tmp_path / "index")}}, "reload_interval_s": 0.5}
    url = briefly(settings, "replaced")
    with Client(url, tries=10) as client:
        assert client.indexes()[0].num_items == 8
        shutil.rmtree(items)
        shutil.move(other, items)
        wait_until(lambda: client.indexes()[0].num_items == 3)
        assert len(client.search("lift", k=8).hits) == 3


def cpu_of(deployment: str) -> float:
    """CPU time of the replicas of a deployment, and of the processes that they have started."""
    lines = {int(p.parent.name): p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline")}
    replicas = [process for process, line in lines.items() if f":{deployment}".encode() in line]
    assert replicas
    return sum(sum(map(cpu_seconds, (replica, *children(replica)))) for replica in replicas)


@pytest.mark.parametrize("how", ["gives up", "is too late"])
def test_queries_that_nobody_waits_for_are_not_encoded(briefly, uri, how):
    timeouts = {"encode_s": 3 if how == "is too late" else 120}
    settings = {"indexes": {"i": {"uri": uri}}, "timeouts": timeouts}
    url = briefly({**settings, "limits": {"max_batch_chars": 400_000}}, "waits")
    slow = {"queries": ["漢" * 4_000] * 60}  # a minute and more
    with httpx2.Client(timeout=60) as http:
        wait_until(lambda: http.post(f"{url}/v1/search", json=SEARCH).status_code == 200)
        if how == "gives up":
            with pytest.raises(httpx2.TimeoutException):
                http.post(f"{url}/v1/encode", json=slow, timeout=3)
        else:
            assert http.post(f"{url}/v1/encode", json=slow).status_code == 504
        time.sleep(3)  # the slice under way, on a busy machine
        used = cpu_of("waits:Encoder")
        time.sleep(2)
        assert cpu_of("waits:Encoder") - used < 0.5
        assert http.post(f"{url}/v1/search", json=SEARCH).status_code == 200


def test_a_key_with_slow_requests_delays_nobody(briefly, uri, tmp_path):
    """Filters and queries of one key: those of the others take their turns between."""
    shutil.copytree(uri, tmp_path / "index")
    text = "Some words, over and over. " * 200_000
    lance.dataset(str(tmp_path / "index" / ITEMS)).update({"text": f"'{text}'"})
    write_keys(tmp_path / "keys.yaml", {"mr_greedy": {"name": "a"}, "mr_other": {"name": "b"}})
    settings = {"indexes": {"i": {"uri": str(tmp_path / "index")}}}
    settings |= {"keys": str(tmp_path / "keys.yaml"), "timeouts": {"filter_s": 3, "encode_s": 60}}
    url = briefly({**settings, "limits": {"max_batch_chars": 400_000}}, "greedy")
    condition = " AND ".join(f"text NOT ILIKE '%over%never{i}%'" for i in range(130))
    body = {**SEARCH, "k": 1}

    async def ask_all() -> tuple[list[int], list[float]]:
        greedy = {"Authorization": "Bearer mr_greedy"}
        async with httpx2.AsyncClient(timeout=120) as http:

            async def ask(**change: str) -> httpx2.Response:
                headers = {"Authorization": "Bearer mr_other"}
                return await http.post(f"{url}/v1/search", json={**body, **change}, headers=headers)

            assert (await ask(filter="modality = 'text'")).status_code == 200
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
            slow = [asyncio.ensure_future(each) for each in (*filtered, encoded)]
            await asyncio.sleep(1)
            seconds = []
            for i in range(4):
                begun = time.monotonic()
                answer = await ask(filter=f"modality = 'text' AND {i} = {i}")
                assert answer.status_code == 200
                seconds.append(time.monotonic() - begun)
            assert not slow[-1].done()
            statuses = [(await each).status_code for each in slow[:-1]]
            slow[-1].cancel()
            return statuses, seconds

    statuses, seconds = asyncio.run(ask_all())
    assert statuses == [504] * 3
    assert max(seconds) < 8, seconds  # it was a minute
    time.sleep(1)
    used = cpu_of("greedy:Searcher-i-0")
    time.sleep(2)
    assert cpu_of("greedy:Searcher-i-0") - used < 0.5


@pytest.mark.parametrize("what", ["gateway", "proxy"])
def test_errors_have_one_form_while_a_process_is_started_again(url, what):
    """And the client waits for it, also where connections are refused."""
    wait_until(lambda: is_ready(url))
    ends, wrong, refused = threading.Event(), [], 0

    def watch() -> None:
        nonlocal refused
        while not ends.is_set():
            try:
                response = httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=60)
            except httpx2.TransportError:
                refused += 1
                time.sleep(0.05)
                continue
            if response.status_code == 200:
                continue
            try:
                problem = wire.ErrorAnswer.model_validate_json(response.content).error
                assert (response.status_code, problem.code) == (503, "unavailable")
                assert response.headers["retry-after"] == "1"
            except (ValueError, AssertionError, KeyError):
                wrong.append((response.status_code, response.text))

    watching = [threading.Thread(target=watch) for _ in range(3)]
    for thread in watching:
        thread.start()
    time.sleep(1)
    kill("Gateway") if what == "gateway" else kill_proxy()
    with Client(url) as client:
        begun = time.monotonic()
        assert client.search(**SEARCH).hits
        assert time.monotonic() - begun < 40
    wait_until(lambda: is_ready(url))
    time.sleep(1)
    ends.set()
    for thread in watching:
        thread.join()
    assert not wrong
    assert refused or what == "gateway"


def test_a_stage_that_takes_too_long(briefly, uri):
    url = briefly({"indexes": {"i": {"uri": uri}}, "timeouts": {"encode_s": 0.001}}, "hasty")
    response = httpx2.post(f"{url}/v1/search", json=SEARCH, timeout=30)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert "encode took longer than 0.001 s" in response.json()["error"]["message"]


def test_without_keys_only_this_machine_is_answered(url):
    headers = {"X-Forwarded-For": "203.0.113.7"}
    response = httpx2.post(f"{url}/v1/search", json=SEARCH, headers=headers)
    assert response.status_code == 403 and "no access keys" in response.text

"""Tests of the routing to replicas that have loaded the vectors, of gangs, and of autoscaling."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import lance
import pytest

from pipeline.config import parse
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.search.searcher import open_index
from pipeline.serve.client import Client
from pipeline.serve.router import LOADED, SHARD
from pipeline.serve.settings import ServeSpec
from pipeline.serve.vectors import SearchVectors
from tests.serve.app.test_faults import wait_until
from tests.serve.conftest import Start, at_once

pytestmark = pytest.mark.heavy  # each test starts a server of six replicas or more

FULL = SearchVectors("full", "maxsim", "exact")
POOLED = SearchVectors("hpool_2", "maxsim", "exact")
QUERY = "the lift of a wing"


def call_all(application: str, deployment: str, method: str) -> list:
    """Returns the results of a method of all replicas of a deployment."""
    from ray import serve

    return serve.get_deployment_handle(deployment, application).broadcast(method).results()


def loaded(application: str, deployment: str) -> list[set]:
    """Returns the vectors that each replica of a deployment has loaded, with their versions."""
    results = call_all(application, deployment, "record_routing_stats")
    return [result[LOADED] for result in results]


def replicas(application: str, deployment: str) -> list[str]:
    """Returns the states of the replicas of a deployment."""
    from ray import serve

    status = serve.status().applications[application].deployments[deployment]
    return [state for state, number in status.replica_states.items() for _ in range(number)]


def kill_one(application: str, deployment: str) -> None:
    """Kills one replica of a deployment and waits until Ray Serve has noticed."""
    import ray

    before = replicas(application, deployment)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if f"{application}#{deployment}#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
            break
    wait_until(lambda: replicas(application, deployment) != before)


def test_calls_go_to_replicas_with_loaded_vectors(serving_once: Start, index_uri):
    settings = {
        "indexes": {"i": {"uri": index_uri}},
        "searcher": {"num_replicas": 2},
        "reranker": {"num_replicas": 2},
        "reload_interval_s": 3600,  # gateways do not load the vectors of recent requests meanwhile
    }
    url = serving_once(settings, "warm")
    edition = IndexReader(index_uri).edition
    assert loaded("warm", "Searcher-i-0") == [{(edition, FULL)}] * 2
    with Client(url) as client:
        rerank = {"rerank": {"representation": "hpool_4", "top": 3}}
        client.search(QUERY, representation="hpool_2", **rerank)
        time.sleep(4)  # until the router knows the statistics
        for _ in range(15):
            client.search(QUERY, representation="hpool_2", **rerank)
        with ThreadPoolExecutor(4) as threads:
            searches = [threads.submit(client.search, QUERY, k=3) for _ in range(20)]
            assert all(search.result().hits for search in searches)
    both, one = sorted(loaded("warm", "Searcher-i-0"), key=len, reverse=True)
    assert both == {(edition, FULL), (edition, POOLED)} and one == {(edition, FULL)}
    four = SearchVectors("hpool_4", "maxsim", "exact")
    assert Counter(map(len, loaded("warm", "Reranker-i"))) == {1: 1, 0: 1}
    assert {(edition, four)} in loaded("warm", "Reranker-i")


def test_all_replicas_load_vectors_of_recent_requests(serving_once: Start, index_uri, tmp_path):
    uri = str(tmp_path / "index")
    shutil.copytree(index_uri, uri)
    settings = {
        "indexes": {"i": {"uri": uri}},
        "searcher": {"num_replicas": 2},
        "reload_interval_s": 0.5,
    }
    url = serving_once(settings, "recent")
    edition = IndexReader(uri).edition
    with Client(url, tries=10) as client:
        client.search(QUERY, representation="hpool_2")
        needed = {(edition, FULL), (edition, POOLED)}
        wait_until(lambda: loaded("recent", "Searcher-i-0") == [needed] * 2)
        # A new version is served when all replicas have loaded the same.
        lance.dataset(f"{uri}/{ITEMS}").delete("parent_id = 'bread'")
        newer = IndexReader(uri).edition
        wait_until(lambda: client.search(QUERY, k=1).version == newer.version)
        for vectors in loaded("recent", "Searcher-i-0"):
            assert {(newer, FULL), (newer, POOLED)} <= vectors
        # A replica that starts loads the newest version before it receives calls, the rest later.
        kill_one("recent", "Searcher-i-0")
        wait_until(lambda: replicas("recent", "Searcher-i-0") == ["RUNNING"] * 2)
        assert all((newer, FULL) in vectors for vectors in loaded("recent", "Searcher-i-0"))
        wait_until(lambda: all((newer, POOLED) in v for v in loaded("recent", "Searcher-i-0")))


def test_invalid_options_are_not_loaded_again(serving_once: Start, index_uri, tmp_path):
    """A request that fails must not keep a new version from being served."""
    uri = str(tmp_path / "index")
    shutil.copytree(index_uri, uri)
    url = serving_once({"indexes": {"i": {"uri": uri}}, "reload_interval_s": 0.5}, "invalid")
    with Client(url, tries=10) as client:
        for options in ({"candidates": "ivf"}, {"representation": "nothing"}):
            with pytest.raises(Exception, match="must be"):
                client.search(QUERY, **options)
        client.search(QUERY, representation="hpool_2")
        lance.dataset(f"{uri}/{ITEMS}").drop_columns(["hpool_2"])
        newer = IndexReader(uri).edition
        wait_until(lambda: client.search(QUERY, k=1).version == newer.version)


def test_gangs_of_shards(serving_once: Start, index_uri):
    settings = {
        "indexes": {"i": {"uri": index_uri, "num_shards": 2, "gang": True}},
        "searcher": {"num_replicas": 2},
    }
    url = serving_once(settings, "gangs")
    shards = [
        metadata[SHARD] for metadata in call_all("gangs", "Searcher-i", "record_replica_metadata")
    ]
    assert Counter(shards) == {"0": 2, "1": 2}
    searcher = open_index(index_uri)

    with Client(url) as client:
        search = partial(client.search, QUERY, explain="matches")
        responses = at_once([partial(search, k=k) for k in range(1, 9)] * 4)
    for response in responses:
        expected = searcher.search(QUERY, k=len(response.hits))
        assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in expected]
        scores = [hit.score for hit in expected]
        assert [hit.score for hit in response.hits] == pytest.approx(scores, rel=1e-5)


def test_restart_of_gang(serving_once: Start, index_uri):
    settings = {
        "indexes": {"i": {"uri": index_uri, "num_shards": 2, "gang": True}},
        "searcher": {"num_replicas": 2},
    }
    url = serving_once(settings, "restart")
    with Client(url, tries=10) as client:
        expected = [hit.item_id for hit in client.search(QUERY).hits]
        kill_one("restart", "Searcher-i")
        end = time.monotonic() + 90
        while replicas("restart", "Searcher-i") != ["RUNNING"] * 4:
            assert time.monotonic() < end
            assert [hit.item_id for hit in client.search(QUERY).hits] == expected
        metadata = call_all("restart", "Searcher-i", "record_replica_metadata")
        assert Counter(shard[SHARD] for shard in metadata) == {"0": 2, "1": 2}


@pytest.mark.parametrize("gang", [True, False])
def test_gang_is_placed_completely_or_not_at_all(serving, index_uri, gang):
    """Two shards do not fit on a cluster that has CPUs for one."""
    import ray
    from ray import serve

    from pipeline.serve.app import build

    num_cpus = 0.6 * ray.available_resources()["CPU"]
    settings = {
        "indexes": {"i": {"uri": index_uri, "num_shards": 2, "gang": gang}},
        "searcher": {"num_cpus": num_cpus},
    }
    application = build(parse(ServeSpec, settings))
    target = serve.RunTarget(target=application, name="large", route_prefix="/large")
    serve.run_many([target], wait_for_applications_running=False)
    try:
        wait_until(lambda: "STARTING" in str(serve.status().applications["large"].deployments))
        time.sleep(15)
        deployments = serve.status().applications["large"].deployments
        states = [
            deployments[name].replica_states for name in deployments if name.startswith("Searcher")
        ]
        running = sum(state.get("RUNNING", 0) for state in states)
        assert running == (0 if gang else 1)
    finally:
        serve.delete("large")


def test_scales_with_queueing_delay(serving_once: Start, index_uri):
    encoder = {
        "max_replicas": 2,
        "target_queueing_delay_s": 0.02,
        "upscale_delay_s": 1,
        "downscale_delay_s": 1,
    }
    url = serving_once({"indexes": {"i": {"uri": index_uri}}, "encoder": encoder}, "scales")
    assert replicas("scales", "Encoder") == ["RUNNING"]

    with Client(url, tries=10) as client:
        end = time.monotonic() + 120
        while replicas("scales", "Encoder") != ["RUNNING"] * 2:
            assert time.monotonic() < end
            texts = [f"{QUERY} {i} " * 50 for i in range(24)]
            at_once([partial(client.search, text, k=1) for text in texts])
    wait_until(lambda: replicas("scales", "Encoder") == ["RUNNING"], timeout_s=120)

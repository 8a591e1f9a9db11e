"""Tests of a server whose stages run in the process of the gateway."""

from __future__ import annotations

import shutil
import time
from functools import partial

import httpx2
import lance
import pytest

from pipeline.index.reader import ITEMS
from pipeline.search.searcher import open_index
from pipeline.serve.client import Client, ServerError
from tests.serve.app.test_faults import deployment_cpu_seconds, wait_until
from tests.serve.conftest import at_once

QUERY = "the lift of a wing"


@pytest.fixture(scope="module")
def uri(index_uri, tmp_path_factory) -> str:
    """Copy of the index that the tests can modify."""
    folder = tmp_path_factory.mktemp("single") / "index"
    shutil.copytree(index_uri, folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(serving_here, uri) -> str:
    settings = {
        "indexes": {"i": {"uri": uri}, "sharded": {"uri": uri, "num_shards": 2}},
        "single_process": True,
        "reload_interval_s": 0.5,
        "timeouts": {"encode_s": 25},
        "limits": {"max_batch_chars": 400_000},
    }
    return serving_here(settings, "single")


def test_has_one_deployment(url):
    from ray import serve

    assert list(serve.status().applications["single"].deployments) == ["Gateway"]


@pytest.mark.parametrize("index", ["i", "sharded"])
def test_equals_in_process_search(url, uri, index):
    searcher = open_index(uri)
    rerank = {"representation": "full", "top": 5}

    with Client(url) as client:
        search = partial(client.search, QUERY, index=index)
        calls = [partial(search, k=k, explain="matches") for k in range(1, 6)]
        calls.append(partial(search, representation="hpool_2", k=5, rerank=rerank))
        *plain, reranked = at_once(calls)
    for response in plain:
        hits = searcher.search(QUERY, k=len(response.hits))
        assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in hits]
        scores = [hit.score for hit in hits]
        assert [hit.score for hit in response.hits] == pytest.approx(scores, rel=1e-5)
    assert reranked.reranked
    with Client(url) as client:
        condition = "item_id LIKE 'wing%'"
        response = client.search(QUERY, index=index, filter=condition)
        hits = searcher.search(QUERY, filter=condition)
        assert [hit.item_id for hit in response.hits] == [hit.item_id for hit in hits]
        with pytest.raises(ServerError, match="candidates must be") as caught:
            client.search(QUERY, index=index, candidates="ivf")
        assert caught.value.status == 422


def is_idle() -> bool:
    """Returns whether the server uses less than a third of a CPU for a second."""
    used = deployment_cpu_seconds("single:Gateway")
    time.sleep(1)
    return deployment_cpu_seconds("single:Gateway") - used < 0.35


def test_stops_encoding_queries_of_disconnected_client(url):
    slow = {"queries": ["漢" * 4_000] * 60, "index": "i"}  # more than a minute
    with httpx2.Client(timeout=60) as http:
        with pytest.raises(httpx2.TimeoutException):
            http.post(f"{url}/v1/encode", json=slow, timeout=2)
        wait_until(is_idle, 20)  # at the end of the current slice
        assert http.get(f"{url}/readyz").status_code == 200


def test_reloads_new_version(url, uri):
    with Client(url) as client:
        assert client.search("bread", index="i", k=1).hits[0].item_id.startswith("bread")
        lance.dataset(f"{uri}/{ITEMS}").delete("parent_id = 'bread'")
        newest = lance.dataset(f"{uri}/{ITEMS}").version
        for index in ("i", "sharded"):
            wait_until(lambda i=index: client.search("bread", index=i, k=1).version == newest)
            hits = client.search("bread", index=index, k=8).hits
            assert hits and not any(hit.item_id.startswith("bread") for hit in hits)

"""Tests of deleting items over HTTP, on a copy of the index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import httpx2
import pytest

from pipeline.index.reader import IndexReader
from pipeline.index.writer import IndexWriter
from pipeline.serve.client import Client, ServerError
from pipeline.serve.errors import ApiError
from pipeline.serve.gateway import Gateway
from pipeline.serve.keys import ANONYMOUS
from tests.serve.conftest import write_keys

KEYS = {
    "mr_delete": {"name": "deleter", "delete": True},
    "mr_search": {"name": "searcher", "evaluate": True},
    "mr_elsewhere": {"name": "elsewhere", "indexes": [], "delete": True},
}


@pytest.fixture(scope="module")
def uri(index_uri, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("delete") / "index"
    shutil.copytree(index_uri, folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(serving_here, uri, tmp_path_factory) -> str:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(keys, KEYS)
    settings = {
        "indexes": {"texts": {"uri": uri, "num_shards": 2}},
        "keys": str(keys),
        "reload_interval_s": 3600,  # only a deletion reloads the index
        "single_process": True,
    }
    return serving_here(settings, "deleting")


@pytest.fixture
def http(url) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def delete(http: httpx2.Client, body: object, key: str = "mr_delete") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return http.request("DELETE", "/v1/items", json=body, headers=headers)


@pytest.mark.parametrize(
    ("key", "status", "message"),
    [
        ("mr_search", 403, "the key searcher is not allowed to delete items"),
        ("mr_elsewhere", 404, "unknown index 'texts'"),
        ("mr_unknown", 401, "the access key is unknown or has expired"),
    ],
)
def test_scope_of_keys(http, uri, key, status, message):
    version = IndexReader(uri).version
    response = delete(http, {"index": "texts", "item_ids": ["flow"]}, key)
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    assert IndexReader(uri).version == version


def test_servers_without_keys_do_not_delete():
    with pytest.raises(ApiError, match="requires an access key with `delete: true`"):
        Gateway.check_delete(None, ANONYMOUS)  # type: ignore[arg-type]  # uses the key only


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, None, "either item_ids or filter"),
        ({"item_ids": ["flow"], "filter": "true"}, None, "either item_ids or filter"),
        ({"item_ids": []}, "item_ids", "item_ids must have"),
        ({"item_ids": "flow"}, "item_ids", "item_ids must be"),
        ({"item_ids": [3]}, "item_ids[0]", "item_ids[0] must be"),
        ({"filter": "nothing = 1"}, "filter", "filter must be"),
        ({"filter": "item_id = "}, "filter", "filter must be"),
        ({"filter": "true", "where": "x"}, "where", "where"),
        ({"filter": "true", "dry_run": "perhaps"}, "dry_run", "dry_run must be"),
    ],
)
def test_invalid_bodies(http, uri, body, field, message):
    version = IndexReader(uri).version
    response = delete(http, body)
    error = response.json()["error"]
    assert response.status_code == 422, error
    assert message in error["message"] and error["field"] == field, error
    assert uri not in response.text
    assert (
        len(IndexReader(uri)) == 8 and IndexReader(uri).version - version <= 3
    )  # lease of a failed deletion


def test_a_missing_body(http):
    headers = {"Authorization": "Bearer mr_delete"}
    assert http.request("DELETE", "/v1/items", headers=headers).status_code == 422


def test_a_running_job_is_a_conflict(http, uri):
    writer = IndexWriter(uri, "nightly")
    try:
        response = delete(http, {"item_ids": ["flow"]})
    finally:
        writer.release()
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (409, "conflict")
    assert error["message"] == "another job is writing to the index"
    assert int(response.headers["Retry-After"]) > 0
    assert "nightly" not in response.text


def test_deletes_by_ids_and_by_filter(url, http, uri):
    with Client(url, "mr_delete") as client:
        counted = client.delete_items(filter="item_id LIKE 'bread/%'", dry_run=True)
        assert (counted.selected, counted.deleted) == (2, 0) and len(IndexReader(uri)) == 8
        before = {hit.item_id for hit in client.search("bread", k=8).hits}
        assert "bread/1" in before and "flow" in before

        done = client.delete_items(index="texts", item_ids=["flow", "flow", "unknown", "it's"])
        assert (done.selected, done.unknown, done.deleted) == (1, 2, 1)
        assert done.version > counted.version
        found = client.search("bread", k=8)
        assert {hit.item_id for hit in found.hits} == before - {"flow"}
        assert found.version == done.version
        with pytest.raises(ServerError, match="unknown item 'flow'"):
            client.item("flow")

        done = client.delete_items(filter="item_id LIKE 'bread/%'")
        assert (done.selected, done.unknown, done.deleted) == (2, 0, 2)
        left = {hit.item_id for hit in client.search("bread", k=8).hits}
        assert left == before - {"flow", "bread/1", "bread/2"}
        assert client.delete_items(filter="item_id LIKE 'bread/%'").deleted == 0
    assert set(IndexReader(uri).dataset.to_table()["item_id"].to_pylist()) == left
    assert IndexReader(uri).lease() is None

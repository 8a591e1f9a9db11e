"""Fixtures for servers on the Ray cluster of the test run, and their access keys."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from pipeline.config import parse
from pipeline.serve.client import Client
from pipeline.serve.keys import hash_key
from pipeline.serve.settings import ServeSpec

#: Starts an application with given settings under a name, and returns its URL.
Start = Callable[[dict[str, Any], str], str]
#: Access keys of the server with their entries in the file, except for the hashes.
KEYS: dict[str, dict[str, Any]] = {
    "mr_all": {"name": "all", "evaluate": True},
    "mr_other": {"name": "other", "evaluate": True},
    "mr_few": {"name": "few", "indexes": ["texts"]},
    "mr_none": {"name": "none", "indexes": []},
    "mr_old": {"name": "old", "expires": "2020-01-01"},
    "mr_slow": {"name": "slow", "requests_per_second": 0.01},
    "mr_limited": {"name": "limited", "requests_per_second": 0.01},
}


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs functions at the same time, and returns their results or exceptions in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def free_port() -> int:
    """Returns an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(process: int) -> float:
    """Returns the CPU time of a process in seconds; 0 if it has exited."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return 0.0 if fields[0] == "Z" else sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def children(process: int | str = "self") -> set[int]:
    """Returns the ids of the child processes of a process."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def write_keys(path: Path, keys: dict[str, dict[str, Any]]) -> None:
    """Writes a file of access keys."""
    entries = [{**entry, "sha256": hash_key(key)} for key, entry in keys.items()]
    path.write_text(yaml.safe_dump({"keys": entries}), encoding="utf-8")


@pytest.fixture(scope="package")
def serving(cluster) -> Iterator[Start]:
    """Returns a function that starts an application under a route and returns its URL."""
    from ray import serve

    from pipeline.serve.app import build

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def start(settings: dict[str, Any], name: str) -> str:
        application = build(parse(ServeSpec, settings))
        serve.run(application, name=name, route_prefix=f"/{name}")
        return f"http://127.0.0.1:{port}/{name}"

    yield start
    serve.shutdown()


def deleted_afterwards(serving: Start) -> Iterator[Start]:
    """Yields `serving`, and deletes the applications that were started. Each has six processes."""
    from ray import serve

    names: list[str] = []

    def start(settings: dict[str, Any], name: str) -> str:
        names.append(name)
        return serving(settings, name)

    yield start
    for name in names:
        serve.delete(name)


@pytest.fixture(scope="module")
def serving_here(serving) -> Iterator[Start]:
    """Like `serving`, but deletes the applications after the tests of the file."""
    yield from deleted_afterwards(serving)


@pytest.fixture
def serving_once(serving) -> Iterator[Start]:
    """Like `serving`, but deletes the applications after the test."""
    yield from deleted_afterwards(serving)


@pytest.fixture(scope="package")
def keys_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, KEYS)
    return path


@pytest.fixture(scope="package")
def url(serving, index_uri, keys_file, tmp_path_factory) -> str:
    """URL of a server of two indexes: `texts` with two shards, and `whole`, the same with one."""
    settings = {
        "indexes": {
            "texts": {"uri": index_uri, "num_shards": 2},
            "whole": {"uri": index_uri, "preload": ["hpool_2"]},
        },
        "keys": str(keys_file),
        "limits": {"max_k": 100, "max_batch_queries": 150, "max_body_bytes": 100_000, "burst": 5},
        "evaluations": {"folder": str(tmp_path_factory.mktemp("evaluations"))},
        # Tests run beside others, on machines of any speed.
        "timeouts": {"encode_s": 25, "filter_s": 20, "search_s": 25, "describe_s": 25},
    }
    return serving(settings, "both")


@pytest.fixture
def client(url) -> Iterator[Client]:
    with Client(url, "mr_all") as client:
        yield client


@pytest.fixture
def http(url) -> Iterator[httpx2.Client]:
    """HTTP client without the validation of `Client`, with a key that can access everything."""
    headers = {"Authorization": "Bearer mr_all"}
    with httpx2.Client(base_url=url, headers=headers, timeout=30) as http:
        yield http

"""A server under load opens new versions of an index, which share their files."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from pipeline.config import parse
from pipeline.index import maintain
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.search.cache import Column
from pipeline.serve.client import Client

pytestmark = pytest.mark.heavy

#: Number of items of the index, and of those that each commit appends.
NUM_ITEMS, NUM_APPENDED = 8, 3


@pytest.fixture
def uri(index_uri, tmp_path) -> str:
    """Copy of the index that the test can modify."""
    shutil.copytree(index_uri, tmp_path / "index")
    return str(tmp_path / "index")


def append(uri: str, number: int) -> None:
    """Appends copies of the first items under new ids."""
    table = lance.dataset(f"{uri}/{ITEMS}").to_table(limit=NUM_APPENDED)
    names = pa.array([f"new{number}/{i}" for i in range(NUM_APPENDED)])
    lance.write_dataset(table.set_column(0, "item_id", names), f"{uri}/{ITEMS}", mode="append")


def mapped_files(deployment: str, folder: Path) -> Counter[str]:
    """Counts the mappings of each packed file in the replica of a deployment."""
    (process,) = (
        path.parent
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f":{deployment}".encode() in path.read_bytes()
    )
    lines = (process / "maps").read_text().splitlines()
    return Counter(line.split(maxsplit=5)[5] for line in lines if str(folder) in line)


class Load:
    """Threads that search until they are stopped."""

    def __init__(self, url: str, num_threads: int = 3):
        self.versions: list[int] = []
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[url]) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str) -> None:
        with Client(url, tries=1) as client:
            while not self._stop.is_set():
                try:
                    self.versions.append(client.search("the lift of a wing", k=3).version)
                except Exception as error:
                    self.errors.append(error)

    def wait_for(self, version: int) -> None:
        """Waits until a version is being served."""
        end = time.monotonic() + 90
        while version not in self.versions and not self.errors:
            assert time.monotonic() < end
            time.sleep(0.05)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_versions_share_files_under_load(serving_once, uri):
    folder = Column(IndexReader(uri), "full").folder
    url = serving_once({"indexes": {"i": {"uri": uri}}, "reload_interval_s": 0.2}, "reloading")
    load = Load(url)
    try:
        load.wait_for(IndexReader(uri).version)
        for number in range(5):
            append(uri, number)
            load.wait_for(IndexReader(uri).version)
            files = mapped_files("reloading:Searcher-i-0", folder)
            assert set(files.values()) == {1}  # also if two versions are open
            assert len(files) == len(IndexReader(uri).fragments()) == 3 + number
        lance.dataset(f"{uri}/{ITEMS}").delete("item_id = 'new0/0'")
        load.wait_for(IndexReader(uri).version)
        assert mapped_files("reloading:Searcher-i-0", folder) == files
        spec = parse(maintain.MaintainSpec, {"index": uri})
        maintain.run(spec, job="test", report=lambda line: None)
        load.wait_for(IndexReader(uri).version)
        rewritten = mapped_files("reloading:Searcher-i-0", folder)
        assert len(rewritten.keys() - files.keys()) == len(IndexReader(uri).fragments()) == 1
        for number in (5, 6):  # the versions before them are closed
            append(uri, number)
            load.wait_for(IndexReader(uri).version)
        files = mapped_files("reloading:Searcher-i-0", folder)
        assert len(files) == len(IndexReader(uri).fragments()) == 3 and set(files.values()) == {1}
    finally:
        load.stop()
    assert not load.errors and len(load.versions) > 20
    with Client(url) as client:
        assert client.indexes()[0].num_items == NUM_ITEMS + 7 * NUM_APPENDED - 1

"""Open versions of an index: shared, limited in number, and closed when they are not used."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import lance
import pytest

from pipeline.index.reader import ITEMS, Edition, IndexReader, open_edition
from pipeline.search.searcher import Searcher
from pipeline.serve.settings import Timeouts
from pipeline.serve.versions import MAX_OPEN_VERSIONS, Versions
from tests.search.vectors import rows, write


@pytest.fixture
def uri(tmp_path) -> str:
    """Index of six items in three fragments."""
    write(str(tmp_path / "index"), rows([f"i{i}" for i in range(6)], [4] * 6), max_rows_per_file=2)
    return str(tmp_path / "index")


class Opened:
    """Versions of an index whose vectors are in memory, and the number of openings."""

    def __init__(self, uri: str, unused_s: float):
        self._uri, self.num_opened = uri, 0
        self.versions = Versions(self._open, unused_s)

    def _open(self, edition: Edition) -> Searcher:
        self.num_opened += 1
        searcher = Searcher(open_edition(self._uri, edition), cache=False)
        searcher.load()
        return searcher

    def get(self, edition: Edition) -> Searcher:
        return self.versions.get(edition)


def delete(uri: str, number: int) -> Edition:
    """Deletes the items of a fragment and returns the new version."""
    lance.dataset(f"{uri}/{ITEMS}").delete(f"item_id IN ('i{2 * number}', 'i{2 * number + 1}')")
    return IndexReader(uri).edition


def storage(searcher: Searcher, number: int) -> weakref.ref:
    return weakref.ref(searcher.packed().segments[number].storage)


def wait_for_release(reference: weakref.ref, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while reference() is not None:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_threads_open_a_version_once(uri):
    opened, edition = Opened(uri, 60), IndexReader(uri).edition
    barrier = threading.Barrier(8)

    def get() -> Searcher:
        barrier.wait(30)
        return opened.get(edition)

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(get) for _ in range(8)]
        assert len({id(call.result()) for call in calls}) == opened.num_opened == 1


def test_unused_version_is_closed_without_further_requests(uri):
    opened, first = Opened(uri, 0.3), IndexReader(uri).edition
    old, common = (storage(opened.get(first), number) for number in (0, 1))
    second = delete(uri, 0)
    newest = weakref.ref(opened.get(second))
    assert old() is not None
    wait_for_release(old)
    time.sleep(0.5)
    assert newest() is opened.get(second) and common() is not None  # it stays open without requests
    assert [item.as_py() for item in opened.get(first).items.ids["item_id"]][:1] == ["i0"]
    assert opened.num_opened == 3


def test_used_version_stays_open(uri):
    opened, first = Opened(uri, 0.5), IndexReader(uri).edition
    searcher = opened.get(first)
    opened.get(delete(uri, 0))
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert opened.get(first) is searcher
        time.sleep(0.05)
    reference = storage(searcher, 0)
    del searcher
    wait_for_release(reference)


def test_unused_time_begins_when_the_next_version_is_open(uri):
    """Until then, requests begin with the earlier version."""
    opened, first = Opened(uri, 0.6), IndexReader(uri).edition
    searcher = opened.get(first)
    time.sleep(0.8)
    opened.get(delete(uri, 0))
    assert opened.get(first) is searcher and opened.num_opened == 2


def test_number_of_open_versions(uri):
    opened, first = Opened(uri, 60), IndexReader(uri).edition
    second = delete(uri, 0)
    references = [storage(opened.get(first), 0), storage(opened.get(second), 0)]
    opened.get(delete(uri, 1))
    assert [reference() is None for reference in references] == [True, False]
    assert len(opened.get(first).items) == 6  # a request that began long ago
    assert opened.num_opened == 4 and MAX_OPEN_VERSIONS == 2


def test_request_can_use_a_version_that_is_closed_meanwhile(uri):
    opened, first = Opened(uri, 0.2), IndexReader(uri).edition
    searcher = opened.get(first)
    reference = storage(searcher, 0)
    opened.get(delete(uri, 0))
    time.sleep(0.6)
    assert len(searcher.packed().item(0)) == 4 and reference() is not None
    del searcher
    assert reference() is None


def test_failed_opening_is_repeated(uri):
    opened = Opened(uri, 60)
    edition = IndexReader(uri).edition
    lance.dataset(f"{uri}/{ITEMS}").delete("item_id = 'i0'")
    with pytest.raises(Exception, match="must be the index being served"):
        opened.get(edition._replace(content="0"))
    assert len(opened.get(edition).items) == 6


def test_default_time_exceeds_that_of_a_request():
    assert Timeouts().request_s == 170
    assert Timeouts(encode_s=1, media_s=1, search_s=2, rerank_s=3, describe_s=4).request_s == 11

"""Open versions of an index share the vectors of the fragments that they have in common."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import numpy as np
import pytest

from pipeline.config import SpecError, parse
from pipeline.index import maintain
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.search.cache import packed_column
from pipeline.search.packed import PackedVectors
from pipeline.search.packed_file import BLOCK_BYTES
from pipeline.search.searcher import Searcher, open_index
from pipeline.search.storage import Storage
from tests.search.vectors import DIM, rows, unit, write

NAMES = [f"item{i:02}" for i in range(20)]
LENGTHS = [3, 0, None, 1, 7, *range(1, 16)]
QUERIES = list(unit((4, 3, DIM), seed=9).astype(np.float32))
#: Sources of vectors: packed files, the memory, and a device. The device "meta" has no memory.
SOURCES = {
    "files": {"cache": True},
    "memory": {"cache": False},
    "device": {"cache": True, "device": "meta"},
    "device without files": {"cache": False, "device": "meta"},
}
in_all_sources = pytest.mark.parametrize("source", SOURCES)
in_host_memory = pytest.mark.parametrize("cache", [True, False])


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def uri(tmp_path) -> str:
    """Returns an index of twenty items in four fragments."""
    write(str(tmp_path / "index"), rows(NAMES, LENGTHS), max_rows_per_file=5)
    return str(tmp_path / "index")


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Shows that memory is released without the collection of reference cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def dataset(uri: str) -> lance.LanceDataset:
    return lance.dataset(f"{uri}/{ITEMS}")


def newest(uri: str, source: str) -> PackedVectors:
    """Opens the vectors of the newest version."""
    index = IndexReader(uri)
    return packed_column(index, "full", index.fragments(), **SOURCES[source])


def storages(packed: PackedVectors) -> list[Storage]:
    """Returns the storage of each fragment."""
    owners = (segment.storage for segment in packed.segments)
    return [s for owner in owners for s in (owner if isinstance(owner, list) else [owner])]


def tensors(packed: PackedVectors) -> list[int]:
    """Identifies the tensor of the vectors of each fragment."""
    return [id(storage.parts["values"]) for storage in storages(packed)]


def rank_all(searcher: Searcher, **options) -> list[tuple[list[str], list[float]]]:
    rankings = searcher.rank(QUERIES, k=100, **options)
    return [(ranking.item_ids, ranking.scores) for ranking in rankings]


def append(uri: str, *names: str) -> None:
    write(uri, rows(names, [2] * len(names), seed=5), mode="append")


@in_all_sources
def test_append_shares_all_earlier_fragments(uri, source):
    before = newest(uri, source)
    append(uri, "new1", "new2")
    after = newest(uri, source)
    assert tensors(after)[:4] == tensors(before) and len(tensors(after)) == 5
    num_segments = [len(packed.segments) for packed in (before, after)]
    assert num_segments == ([1, 2] if source == "device" else [4, 5])
    assert len(before) == 20 and len(after) == 22
    for old, new in zip(storages(before), storages(after)[:4], strict=True):
        assert new.parts["values"].data_ptr() == old.parts["values"].data_ptr()


@in_all_sources
def test_deletion_shares_all_fragments(uri, source):
    before = newest(uri, source)
    dataset(uri).delete("item_id IN ('item00', 'item04', 'item19')")
    after = newest(uri, source)
    assert tensors(after) == tensors(before)
    assert len(before) == 20 and len(after) == 17
    dataset(uri).delete("item_id < 'item05'")  # a whole fragment
    last = newest(uri, source)
    assert tensors(last) == tensors(before)[1:] and len(last) == 14


@in_all_sources
def test_added_column_shares_all_fragments(uri, source):
    before = newest(uri, source)
    dataset(uri).add_columns({"number": "1"})
    assert tensors(newest(uri, source)) == tensors(before)


@in_all_sources
def test_compaction_shares_all_but_the_rewritten_fragments(uri, source):
    append(uri, "new1")
    append(uri, "new2")
    before = newest(uri, source)
    spec = {"index": uri, "fragment_items": 5}
    progress = maintain.run(parse(maintain.MaintainSpec, spec), job="test", report=print)
    assert (progress.merged, progress.fragments) == (2, 5)
    after = newest(uri, source)
    assert tensors(after)[:4] == tensors(before)[:4]
    assert tensors(after)[4] not in tensors(before)


def test_files_memory_and_devices_are_separate(uri):
    opened = [newest(uri, source) for source in ("files", "memory", "device")]
    assert len({id for packed in opened for id in tensors(packed)}) == 12


@in_host_memory
def test_other_columns_are_separate(uri, cache):
    searcher = open_index(uri, cache=cache)
    pair = searcher.packed(), searcher.scorer.packed("minilm_pooled")
    assert not set(tensors(pair[0])) & set(tensors(pair[1]))


@in_host_memory
def test_memory_is_released_with_the_last_version(uri, cache, without_gc):
    before = open_index(uri, cache=cache)
    dataset(uri).delete("item_id < 'item07'")
    append(uri, "new1", "new2")
    after = open_index(uri, cache=cache)
    for searcher in (before, after):
        rank_all(searcher)
    references = [weakref.ref(segment.storage) for segment in before.packed().segments]
    del searcher, before
    assert [reference() is None for reference in references] == [True, False, False, False]
    del after
    assert all(reference() is None for reference in references)


def test_prefix_keeps_its_storage(uri, without_gc):
    prefix = open_index(uri, cache=False).packed().prefix(2)
    append(uri, "new1")
    searcher = open_index(uri, cache=False)
    assert tensors(searcher.packed())[:4] == tensors(prefix)
    reference = weakref.ref(prefix.segments[0].storage)
    del searcher
    assert reference() is not None
    del prefix
    assert reference() is None


#: Changes of an index. Each one creates a version.
CHANGES: list[Callable[[str], object]] = [
    lambda uri: append(uri, "new1", "new2"),
    lambda uri: dataset(uri).delete("item_id IN ('item04', 'item06', 'new2')"),
    lambda uri: (
        dataset(uri)
        .merge_insert("item_id")
        .when_matched_update_all()
        .execute(rows(["item07"], [4], seed=77))
    ),
    lambda uri: dataset(uri).delete("item_id < 'item05'"),
    lambda uri: dataset(uri).add_columns({"number": "1"}),
    lambda uri: dataset(uri).optimize.compact_files(),
]


@in_host_memory
@pytest.mark.parametrize("newest_first", [False, True])
def test_results_equal_those_of_versions_opened_alone(uri, cache, newest_first):
    versions = [dataset(uri).version]
    for change in CHANGES:
        change(uri)
        versions.append(dataset(uri).version)
    if newest_first:
        versions.reverse()
    searchers = [open_index(uri, version, cache=cache) for version in versions]
    selections = {}, {"filter": "item_id > 'item03'"}
    rankings = [[rank_all(searcher, **each) for each in selections] for searcher in searchers]
    del searchers
    for version, found in zip(versions, rankings, strict=True):
        alone = open_index(uri, version, cache=cache)
        assert found == [rank_all(alone, **each) for each in selections]
        del alone


def test_older_version_reads_the_rows_that_the_newer_one_lacks(uri):
    version = dataset(uri).version
    dataset(uri).delete("item_id IN ('item04', 'item06')")
    newer = open_index(uri, cache=False)
    first = tensors(newer.packed())
    older = open_index(uri, version, cache=False)
    shared = [a == b for a, b in zip(first, tensors(older.packed()), strict=True)]
    assert shared == [False, False, True, True]
    assert "item04" in rank_all(older)[0][0] and "item04" not in rank_all(newer)[0][0]
    again = open_index(uri, cache=False)  # uses the larger storages
    assert tensors(again.packed()) == tensors(older.packed())
    assert rank_all(again) == rank_all(newer)


@in_all_sources
def test_threads_share_one_copy(uri, source):
    barrier = threading.Barrier(8)

    def load() -> PackedVectors:
        barrier.wait(30)
        return newest(uri, source)

    with ThreadPoolExecutor(8) as threads:
        opened = [call.result() for call in [threads.submit(load) for _ in range(8)]]
    assert len({tuple(tensors(packed)) for packed in opened}) == 1


# -- corrupted files -------------------------------------------------------------------------------


@pytest.fixture
def corrupted(tmp_path, cache_folder) -> tuple[str, Path]:
    """Returns an index of one fragment, and its packed file, whose second block is corrupted."""
    uri = str(tmp_path / "large")
    write(uri, rows(NAMES, [BLOCK_BYTES // (2 * DIM) // 8] * 20))
    open_index(uri).packed()
    (path,) = cache_folder.glob("*/full/*")
    with path.open("r+b") as file:
        file.seek(4096 + BLOCK_BYTES + 77)
        file.write(b"\x55\xaa")
    return uri, path


def test_each_version_reopens_a_corrupted_file(corrupted):
    uri, path = corrupted
    first, second = open_index(uri), open_index(uri)
    assert tensors(first.packed()) == tensors(second.packed())
    with pytest.raises(SpecError, match="corrupted in block 1"):
        first.rank(QUERIES)
    expected = rank_all(open_index(uri, cache=False))
    assert rank_all(first) == expected
    rebuilt = path.stat()
    with pytest.raises(SpecError, match="corrupted in block 1"):
        second.rank(QUERIES)
    assert os.path.samestat(path.stat(), rebuilt)  # it is not removed again
    assert rank_all(second) == expected
    assert tensors(first.packed()) == tensors(second.packed())


def test_copy_of_a_corrupted_file_is_not_shared(corrupted):
    uri, path = corrupted
    with pytest.raises(SpecError, match="corrupted in block 1"):
        newest(uri, "device")
    assert not path.exists()
    assert len(newest(uri, "device")) == len(NAMES)

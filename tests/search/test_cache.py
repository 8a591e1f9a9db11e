"""Packed files: equal results, creation and removal of files, and detection of corruption."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import lance
import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.index.reader import ITEMS
from pipeline.search import cache as cache_module
from pipeline.search.cache import cache_limit, cache_usage
from pipeline.search.packed_file import BLOCK_BYTES, FORMAT
from pipeline.search.searcher import open_index
from tests.conftest import ROOT
from tests.search.vectors import COLUMNS, DIM, lists, rows, unit, write

NAMES = [f"item{i:02}" for i in range(20)]
LENGTHS = [3, 0, None, 1, 7, *range(1, 16)]
QUERIES = list(unit((4, 3, DIM), seed=9).astype(np.float32))
CORRUPTED = "^cache must be an intact file, got .*, which is corrupted in block 1; "


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Returns a cache folder for one test."""
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def uri(tmp_path) -> str:
    """Returns an index of twenty items in four fragments."""
    write(str(tmp_path / "index"), rows(NAMES, LENGTHS), max_rows_per_file=5)
    return str(tmp_path / "index")


def rank_all(searcher, **options) -> list[tuple[list[str], list[float]]]:
    rankings = searcher.rank(QUERIES, k=100, **options)
    return [(ranking.item_ids, ranking.scores) for ranking in rankings]


def files(cache: Path, column: str = "full") -> dict[str, tuple[int, int]]:
    """Returns inode and modification time of all files in the folder of a column."""
    statuses = {path: path.stat() for path in cache.glob(f"*/{column}/*")}
    statuses |= {path: path.stat() for path in cache.glob(f"*/{column}/.*")}
    return {path.name: (status.st_ino, status.st_mtime_ns) for path, status in statuses.items()}


def dataset(uri: str) -> lance.LanceDataset:
    return lance.dataset(f"{uri}/{ITEMS}")


def test_equal_results_with_and_without_cache(uri, cache):
    uncached = open_index(uri, cache=False)
    expected = rank_all(uncached)
    assert not cache.exists()
    assert len(expected[0][0]) == len([n for n in LENGTHS if n])
    assert rank_all(open_index(uri)) == expected
    assert len(files(cache)) == 4
    assert rank_all(open_index(uri)) == expected
    options = {"filter": "item_id > 'item03'", "group_by": "parent"}
    assert rank_all(open_index(uri), **options) == rank_all(uncached, **options)
    for name in NAMES[:3]:
        row = NAMES.index(name)
        packed = open_index(uri).packed()
        assert packed.item(row).tolist() == uncached.packed().item(row).tolist()


def test_equal_for_every_score(index_uri, cache):
    text = "the lift of a wing"
    for score in ("maxsim", "single_vector", "hybrid"):
        for name in ("full", "hpool_2"):
            hits = open_index(index_uri, cache=False).search(text, name, k=100, score=score)
            assert open_index(index_uri).search(text, name, k=100, score=score) == hits
    assert len(files(cache, "minilm_pooled")) == 2


def test_second_opening_writes_no_files(uri, cache):
    rank_all(open_index(uri))
    before = files(cache)
    rank_all(open_index(uri))
    assert files(cache) == before


def test_tensors_are_memory_mapped(uri, cache):
    packed = open_index(uri).packed()
    maps = Path("/proc/self/maps").read_text()
    assert sum(str(cache) in line for line in maps.splitlines()) == len(files(cache))
    handles = Path("/proc/self/fd").iterdir()
    assert not any(str(cache) in os.readlink(h) for h in handles if h.is_symlink())
    address = packed.segments[0].parts["values"].data_ptr()
    ranges = [line.split()[0].split("-") for line in maps.splitlines() if str(cache) in line]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
    for segment in packed.segments:
        assert all(part.data_ptr() % 4096 == 0 for part in segment.parts.values())


def test_append_adds_one_file(uri, cache):
    rank_all(open_index(uri))
    before = files(cache)
    write(uri, rows(["new1", "new2"], [2, 3], seed=5), mode="append")
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    after = files(cache)
    assert len(after) == 5 and before.items() <= after.items()


def test_deletion_adds_no_files(uri, cache):
    rank_all(open_index(uri))
    before = files(cache)
    version = dataset(uri).version
    dataset(uri).delete("item_id IN ('item00', 'item04', 'item19')")
    searcher = open_index(uri)
    assert rank_all(searcher) == rank_all(open_index(uri, cache=False))
    assert not {"item00", "item04", "item19"} & set(rank_all(searcher)[0][0])
    assert files(cache) == before
    assert "item04" in rank_all(open_index(uri, version))[0][0]
    assert files(cache) == before
    dataset(uri).delete("item_id < 'item05'")  # a whole fragment
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert files(cache) == before


def test_older_version_with_more_rows_rewrites_files(uri, cache):
    version = dataset(uri).version
    dataset(uri).delete("item_id IN ('item04', 'item06')")
    after = rank_all(open_index(uri))
    written = files(cache)
    before = rank_all(open_index(uri, version))
    assert before == rank_all(open_index(uri, version, cache=False)) and "item04" in before[0][0]
    rewritten = files(cache)
    assert rewritten.keys() == written.keys() and len(rewritten.items() - written.items()) == 2
    assert rank_all(open_index(uri)) == after  # the larger files serve both versions
    assert files(cache) == rewritten


def test_replaced_row(uri, cache):
    rank_all(open_index(uri))
    before = files(cache)
    new = rows(["item07"], [4], seed=77)
    dataset(uri).merge_insert("item_id").when_matched_update_all().execute(new)
    expected = rank_all(open_index(uri, cache=False))
    assert rank_all(open_index(uri)) == expected
    assert before.items() <= files(cache).items() and len(files(cache)) == 5
    ranking = open_index(uri).rank(QUERIES, k=100)[0]
    row = ranking.rows[ranking.item_ids.index("item07")]
    stored = np.array(new["full"][0].as_py(), np.float32)
    assert open_index(uri).packed().item(row).tolist() == stored.tolist()


def test_rewritten_column_adds_files_for_that_column_only(uri, cache):
    searcher = open_index(uri)
    searcher.load(score="hybrid"), searcher.scorer.packed("minilm_pooled")
    full, pooled = files(cache), files(cache, "minilm_pooled")
    items = dataset(uri)
    fragment = items.get_fragments()[1]
    table = fragment.to_table(columns=[], with_row_id=True)
    table = table.append_column(COLUMNS[1], lists([2] * 5, seed=50).cast(COLUMNS[1].type))
    updated, modified = fragment.update_columns(table)
    operation = lance.LanceOperation.Update(updated_fragments=[updated], fields_modified=modified)
    lance.LanceDataset.commit(items.uri, operation, read_version=items.version)
    searcher = open_index(uri)
    assert rank_all(searcher) == rank_all(open_index(uri, cache=False))
    searcher.scorer.packed("minilm_pooled")
    assert files(cache, "minilm_pooled") == pooled
    assert full.items() <= files(cache).items() and len(files(cache)) == 5


def test_stale_files_are_removed_after_a_day(uri, cache):
    rank_all(open_index(uri))
    old = set(files(cache))
    dataset(uri).optimize.compact_files()
    rank_all(open_index(uri))
    assert old < set(files(cache))
    day = 25 * 3600
    for path in cache.glob("*/full/*"):
        os.utime(path, (path.stat().st_atime - day, path.stat().st_mtime - day))
    rank_all(open_index(uri, cache=True))  # updates access times and writes no files
    assert old < set(files(cache))
    write(uri, rows(["new"], [2], seed=5), mode="append")
    before = rank_all(open_index(uri))
    assert not old & set(files(cache)) and len(files(cache)) == 2
    assert rank_all(open_index(uri)) == before


def test_longest_unused_files_are_removed_beyond_the_limit(uri, cache, monkeypatch):
    rank_all(open_index(uri))
    usage = cache_usage(uri)
    paths = sorted(cache.glob("*/full/*.packed"), key=lambda path: path.stat().st_mtime_ns)
    size = sum(path.stat().st_size for path in paths)
    assert len(paths) == 4 and usage["bytes"] == usage["bytes_all"] == size
    now = time.time()
    for age, path in enumerate(paths[:3], 2):  # the last file was used just now
        os.utime(path, (now - 3600 * age, now - 3600 * age))
    sizes = [path.stat().st_size for path in paths]
    monkeypatch.setenv("MAXRAY_CACHE_BYTES", str(size - 1))
    cache_module._prune()
    assert [path.exists() for path in paths] == [True, True, False, True]
    monkeypatch.setenv("MAXRAY_CACHE_BYTES", str(sizes[0] + sizes[3]))
    cache_module._prune()
    assert [path.exists() for path in paths] == [True, False, False, True]
    monkeypatch.setenv("MAXRAY_CACHE_BYTES", "0")
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert paths[3].exists() and cache_usage(uri)["limit"] == 0  # in use


@pytest.mark.parametrize("text", ["-1", "1.5", "10 GB", ""])
def test_invalid_limit(monkeypatch, text):
    monkeypatch.setenv("MAXRAY_CACHE_BYTES", text)
    with pytest.raises(SpecError, match="MAXRAY_CACHE_BYTES must be an integer >= 0"):
        cache_limit()


def test_files_of_older_versions_are_kept(uri, cache):
    version = dataset(uri).version
    rank_all(open_index(uri, version))
    old = files(cache)
    dataset(uri).optimize.compact_files()
    rank_all(open_index(uri))
    assert old.items() < files(cache).items()
    assert rank_all(open_index(uri, version)) == rank_all(open_index(uri, version, cache=False))


def test_empty_index_and_null_vectors(tmp_path, cache):
    uri = str(tmp_path / "empty")
    write(uri, rows(NAMES[:1], [1]).slice(0, 0))
    assert rank_all(open_index(uri)) == [([], [])] * len(QUERIES)
    assert rank_all(open_index(uri), group_by="parent") == [([], [])] * len(QUERIES)
    write(uri, rows(NAMES[:3], [None, None, 0]), mode="append")
    assert rank_all(open_index(uri)) == [([], [])] * len(QUERIES)
    write(uri, rows(NAMES[3:5], [None, 2]), mode="append")
    assert [ids for ids, _ in rank_all(open_index(uri))] == [[NAMES[4]]] * len(QUERIES)


def test_fragment_without_the_column(uri, cache):
    """A representation looks like this before it is backfilled."""
    short = rows(["late1", "late2"], [1, 1]).drop_columns(["full"])
    lance.write_dataset(short, f"{uri}/{ITEMS}", mode="append")
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert len(files(cache)) == 4
    names = open_index(uri).rank(QUERIES[:1], k=100)[0].item_ids
    assert not {"late1", "late2"} & set(names)


# -- corruption ------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path, cache) -> tuple[str, Path]:
    """Returns an index of one fragment with three blocks of vectors, and its packed file."""
    uri = str(tmp_path / "large")
    per_item = BLOCK_BYTES // (2 * DIM) // 8
    write(uri, rows(NAMES, [per_item] * 20))
    open_index(uri).packed()
    (path,) = cache.glob("*/full/*")
    assert path.stat().st_size > 2 * BLOCK_BYTES
    return uri, path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("size", [0, 100, 4096, 70_000, -8, -1])
def test_truncated_file_is_rebuilt(large, size, caplog):
    uri, path = large
    expected = rank_all(open_index(uri, cache=False))
    whole = path.read_bytes()
    os.truncate(path, size if size >= 0 else len(whole) + size)
    assert rank_all(open_index(uri)) == expected
    assert f"cache file {path} is truncated; rebuilding it" in caplog.text
    assert path.read_bytes() == whole


@pytest.mark.parametrize("offset", [0, 9, 20, 50, 4000, -1, -10, -20, -4115])
def test_opening_detects_corrupted_metadata(large, offset, caplog):
    uri, path = large
    whole = path.read_bytes()
    overwrite(path, offset % len(whole), bytes([whole[offset] ^ 1]))
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert f"cache file {path} " in caplog.text and "; rebuilding it" in caplog.text
    assert path.read_bytes() == whole


def test_file_of_another_format_is_rebuilt(large, caplog):
    uri, path = large
    whole = path.read_bytes()
    overwrite(path, 8, struct.pack("<I", FORMAT + 1))
    rank_all(open_index(uri))
    assert f"cache file {path} does not have format {FORMAT}; rebuilding it" in caplog.text
    assert path.read_bytes() == whole


def test_reading_detects_corrupted_block(large):
    uri, path = large
    expected = rank_all(open_index(uri, cache=False))
    whole = path.read_bytes()
    overwrite(path, 4096 + BLOCK_BYTES + 77, b"\x55\xaa")
    searcher = open_index(uri)
    packed = searcher.packed()
    packed.item(0), packed.item(19)
    with pytest.raises(SpecError) as caught:
        packed.item(9)
    assert caught.value.field == "cache" and caught.value.value == str(path)
    assert str(caught.value).startswith("cache must be an intact file, got '")
    note = ", which is corrupted in block 1; the next search rebuilds it"
    assert str(caught.value).endswith(note)
    assert not path.exists()
    packed.item(0)
    assert rank_all(searcher) == expected  # reopens the column
    assert path.read_bytes() == whole


def test_scoring_detects_corrupted_block(large):
    uri, path = large
    overwrite(path, 4096 + BLOCK_BYTES + 77, b"\x55\xaa")
    searcher = open_index(uri)
    first = searcher.rank(QUERIES, filter="item_id IN ('item00', 'item01')")
    assert [sorted(r.item_ids) for r in first] == [["item00", "item01"]] * len(QUERIES)
    with pytest.raises(SpecError, match=CORRUPTED):
        searcher.rank(QUERIES)
    assert rank_all(searcher) == rank_all(open_index(uri, cache=False))


def test_copy_to_device_detects_corrupted_block(large):
    uri, path = large
    (segment,) = open_index(uri).packed().segments
    copy = segment.to("cpu")  # like a search on a GPU
    assert all(copy.parts[name].equal(part) for name, part in segment.parts.items())
    overwrite(path, 4096 + BLOCK_BYTES + 77, b"\x55\xaa")
    (segment,) = open_index(uri).packed().segments
    with pytest.raises(SpecError, match=CORRUPTED):
        segment.to("cpu")


# -- folders that are not writable -----------------------------------------------------------------


def run(code: str, *arguments: str, **options) -> subprocess.Popen:
    """Starts Python code in another process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip


RANK = """
import json, sys
import numpy as np
from pipeline.search.searcher import open_index
query = np.load(sys.argv[2])
rankings = open_index(sys.argv[1]).rank([query], k=100)
print(json.dumps([rankings[0].item_ids, rankings[0].scores]))
"""


def test_vectors_are_read_into_memory_without_disk_space(large, cache, tmp_path):
    """A limit on the file size simulates a full disk."""
    uri, path = large
    whole = path.read_bytes()
    path.unlink()
    np.save(tmp_path / "query.npy", QUERIES[0])
    limit = len(whole) - 70_000
    process = run(
        RANK,
        uri,
        str(tmp_path / "query.npy"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    output, errors = process.communicate(timeout=120)
    ids, scores = rank_all(open_index(uri, cache=False))[0]
    assert process.returncode == 0, errors
    assert output.strip() == json.dumps([ids, scores])
    (warning,) = [line for line in errors.splitlines() if "MAXRAY_CACHE" in line]
    assert f"got '{path.parent}', which cannot be written (File too large)" in warning
    assert files(cache) == {}
    rank_all(open_index(uri))
    assert path.read_bytes() == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_full_disk(large, tmp_path, monkeypatch, caplog):
    uri, _ = large
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)])
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    try:
        monkeypatch.setenv("MAXRAY_CACHE", str(disk / "cache"))
        assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
        assert ", which cannot be written (No space left on device); " in caplog.text
        assert files(disk / "cache") == {}
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_read_only_folder(uri, cache, caplog):
    rank_all(open_index(uri))
    before = files(cache)
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", str(cache), str(cache)])
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    try:
        assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
        assert files(cache) == before and not caplog.text
        write(uri, rows(["new1", "new2"], [2, 3], seed=5), mode="append")
        assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
        assert files(cache) == before
        assert ", which cannot be written (Read-only file system); " in caplog.text
    finally:
        subprocess.run(["umount", "--lazy", str(cache)], check=True)


def test_folder_cannot_be_created(uri, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "file"))
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert ", which cannot be written (Not a directory); " in caplog.text
    assert len(caplog.records) == 1  # no warning per missing file
    caplog.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXRAY_CACHE", "s3://bucket/cache")
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert "cache must be a local folder (see MAXRAY_CACHE), got 's3://bucket/cache'" in caplog.text
    assert not (tmp_path / "s3:").exists()


def test_default_cache_folder(uri, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MAXRAY_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    expected = rank_all(open_index(uri))
    (folder,) = (tmp_path / "xdg" / "maxray").iterdir()
    assert folder.name.startswith("index-")
    assert [path.name for path in folder.iterdir()] == ["full"]
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/caches")
    assert rank_all(open_index(uri)) == expected
    assert "got '~nobody-of-this-name/caches', which names an unknown user" in caplog.text


# -- several processes -----------------------------------------------------------------------------


def test_concurrent_processes(uri, cache, tmp_path):
    np.save(tmp_path / "query.npy", QUERIES[0])
    processes = [run(RANK, uri, str(tmp_path / "query.npy")) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    ids, scores = rank_all(open_index(uri, cache=False))[0]
    assert {output for output, _ in outputs} == {json.dumps([ids, scores]) + "\n"}
    assert len(files(cache)) == 4
    before = files(cache)
    rank_all(open_index(uri))
    assert files(cache) == before


KILLED = """
import os, signal, sys
import pipeline.search.packed_file as packed_file
write = packed_file.PackedWriter.append
def append_and_pause(self, *arguments):
    write(self, *arguments)
    self._file.flush()
    os.write(1, b"writing\\n")
    signal.pause()
packed_file.PackedWriter.append = append_and_pause
from pipeline.search.searcher import open_index
open_index(sys.argv[1]).packed()
"""


def test_files_of_killed_process_are_removed(uri, cache):
    process = run(KILLED, uri)
    assert process.stdout.readline() == "writing\n"
    unfinished = files(cache)
    assert unfinished and all(name.startswith(".unfinished-") for name in unfinished)
    assert rank_all(open_index(uri)) == rank_all(open_index(uri, cache=False))
    assert unfinished.keys() <= files(cache).keys()  # locked by the other process
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    write(uri, rows(["new1", "new2"], [2, 3], seed=5), mode="append")
    rank_all(open_index(uri))
    assert len(files(cache)) == 5 and not unfinished.keys() & files(cache).keys()

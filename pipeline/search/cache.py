"""Caches token vectors in local files that searches map into memory, one per Lance fragment.

The cache folder is `MAXRAY_CACHE` (default: `$XDG_CACHE_HOME/maxray` or `~/.cache/maxray`). It has
one folder per index and column, with one file (see `packed_file`) per fragment. The file name is a
hash of everything the vectors depend on: the immutable data files, the field and the codec of the
column. Therefore appending rows adds files, deleting rows changes none, and rewriting a column
creates new files. If all files take more than `MAXRAY_CACHE_BYTES` (default: 100 GB), those that
were not used for the longest time are removed, except files that were used in the last hour.

If the folder is full or not writable, a warning is logged and vectors are read into memory.

Open versions of an index share vectors, mapped or in memory, and their copies on a device, by the
same hash. Vectors in memory lack the rows that were deleted before they were read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch

from pipeline.compression.codecs import Codec
from pipeline.config import SpecError, absolute, digest, dump
from pipeline.index.reader import IndexReader, files_with
from pipeline.runtime.atomic import cache_folder
from pipeline.search.packed import (
    FLOATS,
    PackedVectors,
    Segment,
    empty_parts,
    join_adjacent,
    join_blocks,
    single_vectors,
)
from pipeline.search.packed_file import (
    CorruptedError,
    PackedFile,
    PackedWriter,
    remove_unfinished,
)
from pipeline.search.storage import SharedStorages, Storage

log = logging.getLogger("maxray.cache")

#: Number of rows per batch when writing a file. A row may have a thousand vectors.
BATCH_ROWS = 256
#: Minimum age in seconds of files that are deleted because the newest version does not need them.
KEEP_SECONDS = 24 * 3600
#: Minimum interval in seconds between updates of a file's access time.
TOUCH_SECONDS = 3600
SUFFIX = ".packed"
#: Environment variable with the maximum size of the cache folder, and its default, in bytes.
LIMIT_VARIABLE, LIMIT_BYTES = "MAXRAY_CACHE_BYTES", 100_000_000_000

#: Vectors in memory by key of the fragment and device.
_loaded: SharedStorages[Storage] = SharedStorages()
#: Held while a file is published, so that threads that wrote the same one share one copy.
_publishing = threading.Lock()


def cache_limit() -> int:
    """Returns the maximum size of the cache folder in bytes."""
    text = os.environ.get(LIMIT_VARIABLE, str(LIMIT_BYTES))
    if not (text.isascii() and text.isdecimal()):
        raise SpecError(LIMIT_VARIABLE, text, "an integer >= 0, the number of bytes")
    return int(text)


def index_folder(uri: str) -> Path:
    """Returns the folder with the packed files of an index."""
    uri = absolute(uri)
    name = re.sub("[^A-Za-z0-9_.-]", "_", posixpath.basename(uri.rstrip("/")))
    return cache_folder() / f"{name}-{digest(uri)}"


def cache_usage(uri: str) -> dict[str, Any]:
    """Returns the sizes of the packed files of an index and of all indexes, and their limit."""
    folder, index_files = cache_folder(), index_folder(uri)
    sizes = {path: status.st_size for path, status in _packed_files(folder)}
    return {
        "folder": str(folder),
        "bytes": sum(size for path, size in sizes.items() if index_files in path.parents),
        "bytes_all": sum(sizes.values()),
        "limit": cache_limit(),
    }


def _packed_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*/*/*{SUFFIX}"):
        with contextlib.suppress(OSError):
            yield path, path.stat()


@dataclass(frozen=True)
class Column:
    """A column of token vectors, single vectors or codes of a candidate generator."""

    index: IndexReader
    name: str

    @functools.cached_property
    def _size(self) -> int | None:
        """Dimension of single vectors. None for columns of a codec."""
        type = self.index.schema.field(self.name).type
        return type.list_size if pa.types.is_fixed_size_list(type) else None

    @functools.cached_property
    def codec(self) -> Codec:
        """Codec of the stored vectors."""
        if self._is_code:
            return self.index.generator(self.name).codec
        return FLOATS if self._size else self.index.codec(self.name)

    @functools.cached_property
    def dim(self) -> int:
        """Dimension D of the decoded vectors."""
        if self._is_code:
            return self.index.generator(self.name).dim
        return self._size or self.index.representation(self.name).dim

    @property
    def _is_code(self) -> bool:
        return self.name in self.index.candidates_columns

    @property
    def _artefact(self) -> str | None:
        if self._is_code:
            return self.index.candidates_columns[self.name].artefact
        return None if self._size else self.index.representation(self.name).codec_artefact

    @functools.cached_property
    def _fields(self) -> list[int]:
        return self.index.field_ids([self.name])[self.name]

    @functools.cached_property
    def _encoding(self) -> list:
        """Settings that determine the bytes of a vector, for the file names."""
        layout = {name: [str(dtype), width] for name, (dtype, width) in self.layout.items()}
        return [dump(self.codec.spec), self._artefact, self.dim, layout]

    @functools.cached_property
    def layout(self) -> dict[str, tuple[torch.dtype, int]]:
        """Data type and width of each part of an encoded vector."""
        return self.codec.parts(self.dim)

    @functools.cached_property
    def folder(self) -> Path:
        """Folder with the packed files of this column."""
        return index_folder(self.index.uri) / self.name

    def key(self, fragment: lance.LanceFragment) -> str | None:
        """Returns the hash that names the packed file of a fragment, or None without vectors."""
        files = files_with(fragment, self._fields)
        uri = absolute(self.index.uri)
        dependencies = [uri, fragment.fragment_id, files, self._fields, self._encoding]
        return digest(dependencies) if files else None

    def path(self, key: str) -> Path:
        """Returns the path of the packed file with the given key."""
        return self.folder / f"{key}{SUFFIX}"

    def batches(
        self, fragment: lance.LanceFragment
    ) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]:
        """Yields batches of a fragment: parts (t, width), lengths (s,) and row numbers (s,)."""
        for batch in self.index.batches(
            [self.name],
            fragments=[fragment],
            with_address=True,
            batch_rows=BATCH_ROWS,
            ahead=2,  # the default of 16 takes too much memory at a thousand vectors per row
        ):
            if self._size:
                values, lengths = single_vectors(batch[self.name])
                parts = {"values": values}
            else:
                parts, lengths = self.codec.unpack(batch[self.name], self.dim)
            yield parts, lengths, _row_offsets(batch)

    def rows(self, fragment: lance.LanceFragment) -> np.ndarray:
        """Returns the numbers of the rows of a fragment that are not deleted, ascending."""
        if not fragment.num_deletions:
            return np.arange(fragment.physical_rows)
        batches = self.index.batches(
            [], fragments=[fragment], with_address=True, batch_rows=1 << 20
        )
        return np.concatenate([np.empty(0, np.int64), *map(_row_offsets, batches)])

    def read(self, fragment: lance.LanceFragment) -> Storage:
        """Reads the vectors of all rows of a fragment that are not deleted."""
        blocks, rows = [], [np.empty(0, np.int64)]
        for parts, lengths, batch_rows in self.batches(fragment):
            blocks.append((parts, lengths))
            rows.append(batch_rows)
        (segment,) = join_blocks(self.codec, self.dim, blocks).segments
        return Storage(segment.parts, segment.lengths, np.concatenate(rows))

    def segment(
        self,
        storage: Storage,
        rows: np.ndarray,
        verify: Callable[[np.ndarray, np.ndarray], bool] = lambda starts, lengths: True,
    ) -> Segment | None:
        """Returns a view of ascending rows (L,) of a fragment, None if the storage lacks some."""
        indices = storage.find(rows)
        if indices is None:
            return None
        device = storage.lengths.device
        live = torch.from_numpy(indices).to(device) if len(rows) < len(storage.rows) else None
        parts, lengths = storage.parts, storage.lengths
        return Segment(self.codec, self.dim, parts, lengths, live, verify=verify, storage=storage)

    def without_vectors(self, num_documents: int) -> Segment:
        """Creates a segment of documents that have no vectors."""
        parts = empty_parts(self.codec, self.dim, 0)
        return Segment(self.codec, self.dim, parts, torch.zeros(num_documents, dtype=torch.int64))


class _Block:
    """Memory of a device for several fragments, so that one launch of a kernel scores them all.

    Attributes:
        device: The device.
    """

    def __init__(self, sources: Sequence[Segment], device: torch.device):
        self.device, self._end = device, 0
        self._parts: dict[str, torch.Tensor] = {}
        self._size = sum(source.num_rows for source in sources)
        if self._size:
            self._parts = empty_parts(sources[0].codec, sources[0].dim, self._size, device)

    def copy(self, source: Segment) -> Segment:
        """Copies a segment behind those that were copied before, or elsewhere without space."""
        start, end = self._end, self._end + source.num_rows
        if end > self._size:
            return source.to(self.device)
        self._end = end
        return source.to(self.device, {n: part[start:end] for n, part in self._parts.items()})


def _row_offsets(batch: pa.RecordBatch) -> np.ndarray:
    return (batch["_rowaddr"].to_numpy() & np.uint64(0xFFFFFFFF)).astype(np.int64)


def packed_column(
    index: IndexReader,
    name: str,
    fragments: Sequence[lance.LanceFragment],
    *,
    cache: bool = True,
    device: str = "cpu",
    on_corruption: Callable[[], None] = lambda: None,
) -> PackedVectors:
    """Opens the vectors of a column. Each fragment of the index yields one segment.

    Segments share vectors that are in use with those of other versions. On another device than the
    CPU, those of fragments that are copied together are joined.

    Args:
        cache: Whether to read and write packed files. If False, vectors are read into memory.
        on_corruption: Called when reading a file shows that it is corrupted. The column must then
            be reopened.

    Raises:
        SpecError: The index cannot be read. Reading vectors from a corrupted file raises it later
            (field `cache`), or here if they are copied to a device.
    """
    column = Column(index, name)
    keys = [column.key(fragment) for fragment in fragments]
    to_open = {key: f for key, f in zip(keys, fragments, strict=True) if key is not None}
    opened: dict[str, Segment] = {}
    if cache:
        try:
            opened = _open_all(column, to_open, on_corruption)
        except SpecError as error:
            if error.field != "cache":
                raise
            log.warning("%s; reading the vectors into memory instead", error)
            with contextlib.suppress(SpecError):  # files written before the error can be used
                opened = _open_existing(column, to_open, on_corruption)
    target = torch.empty(0, device=device).device  # resolves "cuda" to an index
    block = None
    if target.type != "cpu":
        block = _Block([s for key, s in opened.items() if (key, target) not in _loaded], target)
    segments = []
    for key, fragment in zip(keys, fragments, strict=True):
        if key is None:
            segments.append(column.without_vectors(fragment.count_rows()).to(target))
        elif key in opened and block is None:
            segments.append(opened[key])
        else:
            segments.append(_load(column, key, fragment, block, opened.get(key)))
    if block is not None:
        segments = join_adjacent(segments)
    return PackedVectors(segments or [column.without_vectors(0).to(target)])


def _load(
    column: Column,
    key: str,
    fragment: lance.LanceFragment,
    block: _Block | None,
    file: Segment | None,
) -> Segment:
    rows = column.rows(fragment)

    def load() -> Storage:
        source = file or column.segment(column.read(fragment), rows)
        assert source is not None and isinstance(source.storage, Storage)
        if block is None:
            return source.storage
        copy = block.copy(source)
        return Storage(copy.parts, copy.lengths, source.storage.rows)

    device = torch.device("cpu") if block is None else block.device
    storage = _loaded.get((key, device), load, lambda storage: storage.find(rows) is not None)
    segment = column.segment(storage, rows)
    assert segment is not None
    return segment


def _open_all(
    column: Column,
    fragments: dict[str, lance.LanceFragment],
    on_corruption: Callable[[], None],
) -> dict[str, Segment]:
    """Opens the segments of all fragments by cache key.

    Files that are missing are written first.
    """
    opened = _open_existing(column, fragments, on_corruption)
    missing = {key: f for key, f in fragments.items() if key not in opened}
    if not missing:
        return opened
    try:
        column.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(column.folder)
        # Reading from Lance and computing checksums release the GIL.
        workers = min(len(missing), len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(workers) as executor:
            futures = [executor.submit(_write, column, key, f) for key, f in missing.items()]
            try:
                for future in futures:
                    future.result()
            finally:
                executor.shutdown(cancel_futures=True)
    except OSError as error:
        rule = "a writable folder with space for the vectors (see MAXRAY_CACHE)"
        problem = f"cannot be written ({error.strerror or error})"
        raise SpecError("cache", str(column.folder), rule, problem) from None
    _remove_stale(column)
    _prune()
    return opened | _open_existing(column, missing, on_corruption)


def _write(column: Column, key: str, fragment: lance.LanceFragment) -> None:
    with PackedWriter(column.folder, column.layout) as writer:
        for parts, lengths, rows in column.batches(fragment):
            writer.append(parts, lengths, rows)
        with _publishing:
            with contextlib.suppress(OSError, CorruptedError):
                if _segment(column, key, fragment, lambda: None):
                    return  # another thread or process has published it
            writer.publish(column.path(key), key)


def _open_existing(
    column: Column,
    fragments: dict[str, lance.LanceFragment],
    on_corruption: Callable[[], None],
) -> dict[str, Segment]:
    """Opens the segments of all fragments that have a valid file with all of their rows."""
    opened = {}
    for key, fragment in fragments.items():
        try:
            if segment := _segment(column, key, fragment, on_corruption):
                opened[key] = segment
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, CorruptedError) as error:
            log.warning("cache file %s %s; rebuilding it", column.path(key), error)
    return opened


def _segment(
    column: Column,
    key: str,
    fragment: lance.LanceFragment,
    on_corruption: Callable[[], None],
) -> Segment | None:
    """Opens the packed file of a fragment. Returns None if the file lacks rows."""
    file = PackedFile.shared(column.path(key), key)
    verify = functools.partial(_verify, file, on_corruption)
    segment = column.segment(file, column.rows(fragment), verify)
    if segment is not None:
        _update_access_time(file.path)
    return segment


def _verify(
    file: PackedFile,
    on_corruption: Callable[[], None],
    starts: np.ndarray,
    lengths: np.ndarray,
) -> bool:
    try:
        return file.verify(starts, lengths)
    except CorruptedError as error:
        file.remove()
        on_corruption()
        note = "; the next search rebuilds it"
        raise SpecError("cache", str(file.path), "an intact file", str(error), note) from None


def _update_access_time(path: Path) -> None:
    """Sets the access time, which many file systems do not and `_remove_stale` needs."""
    with contextlib.suppress(OSError):
        status, now = path.stat(), time.time()
        if now - status.st_atime > TOUCH_SECONDS:
            os.utime(path, ns=(int(now * 1e9), status.st_mtime_ns))


def _remove_stale(column: Column) -> None:
    """Removes unused files that the newest version does not need. Mapped ones stay readable."""
    dataset = column.index.dataset
    if dataset.latest_version != dataset.version:
        return
    needed = {column.key(fragment) for fragment in dataset.get_fragments()}
    for path in column.folder.glob(f"*{SUFFIX}"):
        if path.name.removesuffix(SUFFIX) in needed:
            continue
        with contextlib.suppress(OSError):
            if time.time() - _last_use(path.stat()) > KEEP_SECONDS:
                path.unlink()


def _prune() -> None:
    files = sorted(_packed_files(cache_folder()), key=lambda file: _last_use(file[1]))
    excess = sum(status.st_size for _, status in files) - cache_limit()
    for path, status in files:
        if excess <= 0 or time.time() - _last_use(status) < TOUCH_SECONDS:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= status.st_size
            log.info("removed %s from the cache, which exceeds its limit", path)


def _last_use(status: os.stat_result) -> float:
    """Returns the time at which a file was written or opened, to within `TOUCH_SECONDS`."""
    return max(status.st_atime, status.st_mtime)

"""Caches token vectors in local files that searches map into memory, one per Lance fragment.

The cache folder is `MAXRAY_CACHE` (default: `$XDG_CACHE_HOME/maxray` or `~/.cache/maxray`). It has
one folder per index and column, with one file (see `packed_file`) per fragment. The file name is a
hash of everything the vectors depend on: the immutable data files, the field and the codec of the
column. Therefore appending rows adds files, deleting rows changes none (the open version determines
which rows remain), and rewriting a column creates new files. The files take about as much space as
the column in the index and can be deleted at any time.

If the folder is full or not writable, a warning is logged and vectors are read into memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch

from pipeline.codecs import Codec
from pipeline.config import SpecError, absolute, digest, dump_stored, within
from pipeline.index.reader import Index, files_with
from pipeline.search.packed import FLOATS, PackedVectors, Segment, join_blocks, single_vectors
from pipeline.search.packed_file import (
    CorruptedError,
    PackedFile,
    PackedWriter,
    remove_unfinished,
)

log = logging.getLogger("maxray.cache")

#: Number of rows per batch when writing a file. A row may have a thousand vectors.
BATCH_ROWS = 256
#: Minimum age in seconds of files that are deleted because the newest version does not need them.
KEEP_SECONDS = 24 * 3600
#: Minimum interval in seconds between updates of a file's access time.
TOUCH_SECONDS = 3600
SUFFIX = ".packed"


def cache_folder() -> Path:
    """Returns the folder of packed files, which is `MAXRAY_CACHE` or in the user's cache folder.

    Raises:
        SpecError: The folder is a URI or refers to the home of an unknown user (field `cache`).
    """
    with within("cache"):
        if folder := os.environ.get("MAXRAY_CACHE"):
            if "://" in folder:  # would otherwise create a local folder named "s3:"
                raise SpecError("", folder, "a local folder (see MAXRAY_CACHE)", "is a URI")
            return Path(absolute(folder))
        return Path(absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "maxray"


@dataclass(frozen=True)
class Column:
    """A column of token vectors, single vectors or codes of a candidate generator."""

    index: Index
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
        """True if the column contains codes of a candidate generator."""
        return self.name in self.index.candidates_columns

    @property
    def _artefact(self) -> str | None:
        """Hash of the fitted state of the codec."""
        if self._is_code:
            return self.index.candidates_columns[self.name].artefact
        return None if self._size else self.index.representation(self.name).codec_artefact

    @functools.cached_property
    def _fields(self) -> list[int]:
        return self.index.field_ids([self.name])[self.name]

    @functools.cached_property
    def _encoding(self) -> list:
        """Settings that determine the bytes of a vector.

        Part of the file names.
        """
        layout = {name: [str(dtype), width] for name, (dtype, width) in self.layout.items()}
        return [dump_stored(self.codec.spec), self._artefact, self.dim, layout]

    @functools.cached_property
    def layout(self) -> dict[str, tuple[torch.dtype, int]]:
        """Data type and width of each part of an encoded vector."""
        return self.codec.parts(self.dim)

    @functools.cached_property
    def folder(self) -> Path:
        """Folder with the packed files of this column."""
        uri = absolute(self.index.uri)
        name = re.sub("[^A-Za-z0-9_.-]", "_", posixpath.basename(uri.rstrip("/")))
        return cache_folder() / f"{name}-{digest(uri)}" / self.name

    def key(self, fragment: lance.LanceFragment) -> str | None:
        """Returns the hash that names the packed file of a fragment.

        Returns None if it has no vectors.
        """
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

    def without_vectors(self, num_documents: int) -> Segment:
        """Creates a segment of documents that have no vectors."""
        parts = {n: torch.empty(0, width, dtype=dtype) for n, (dtype, width) in self.layout.items()}
        return Segment(self.codec, self.dim, parts, torch.zeros(num_documents, dtype=torch.int64))


def _row_offsets(batch: pa.RecordBatch) -> np.ndarray:
    """Returns the offset of each row in its fragment."""
    return (batch["_rowaddr"].to_numpy() & np.uint64(0xFFFFFFFF)).astype(np.int64)


def packed_column(
    index: Index,
    name: str,
    fragments: Sequence[lance.LanceFragment],
    *,
    cache: bool = True,
    on_corruption: Callable[[], None] = lambda: None,
) -> PackedVectors:
    """Opens the vectors of a column. Each fragment of the index yields one segment.

    Args:
        index: Open version of an index.
        name: Name of the column.
        fragments: Fragments of that version, in storage order.
        cache: Whether to read and write packed files. If False, vectors are read into memory.
        on_corruption: Called when reading a file shows that it is corrupted. The column must then
            be reopened.

    Raises:
        SpecError: The index cannot be read. Reading vectors from a corrupted file raises it later
            (field `cache`).
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
    segments = []
    for key, fragment in zip(keys, fragments, strict=True):
        if key is None:
            segments.append(column.without_vectors(fragment.count_rows()))
        elif key in opened:
            segments.append(opened[key])
        else:
            blocks = [(parts, lengths) for parts, lengths, _ in column.batches(fragment)]
            segments.extend(join_blocks(column.codec, column.dim, blocks).segments)
    return PackedVectors(segments or [column.without_vectors(0)])


def _open_all(
    column: Column,
    fragments: dict[str, lance.LanceFragment],
    on_corruption: Callable[[], None],
) -> dict[str, Segment]:
    """Opens the segments of all fragments by cache key. Files that are missing are written first.

    Raises:
        SpecError: The index cannot be read, or a file cannot be written (field `cache`).
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
    return opened | _open_existing(column, missing, on_corruption)


def _write(column: Column, key: str, fragment: lance.LanceFragment) -> None:
    """Writes the packed file of a fragment. The memory use is constant.

    Raises:
        OSError: The file cannot be written.
        SpecError: The fragment cannot be read.
    """
    with PackedWriter(column.folder, column.layout) as writer:
        for parts, lengths, rows in column.batches(fragment):
            writer.append(parts, lengths, rows)
        with contextlib.suppress(OSError, CorruptedError):
            if _segment(column, key, fragment, lambda: None):
                return  # another process has published it
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
    """Opens the packed file of a fragment. Returns None if the file lacks rows.

    Raises:
        CorruptedError: The file is corrupted.
        OSError: The file is missing or unreadable.
    """
    file = PackedFile.open(column.path(key), key)
    live = _live(column, fragment, file.rows)
    if live is None:
        return None
    _update_access_time(file.path)
    return Segment(
        column.codec,
        column.dim,
        file.parts,
        file.lengths,
        torch.from_numpy(live) if len(live) < len(file.rows) else None,
        verify=functools.partial(_verify, file, on_corruption),
    )


def _live(column: Column, fragment: lance.LanceFragment, rows: np.ndarray) -> np.ndarray | None:
    """Returns the indices of the documents in a file that exist in the open version.

    Returns None if the file lacks rows of that version because it was written for a later one.
    """
    if not fragment.num_deletions:
        wanted = np.arange(fragment.physical_rows)
    else:
        batches = column.index.batches(
            [], fragments=[fragment], with_address=True, batch_rows=1 << 20
        )
        wanted = np.concatenate([np.empty(0, np.int64), *map(_row_offsets, batches)])
    if len(wanted) > len(rows):
        return None
    if len(wanted) == len(rows):
        return np.arange(len(rows)) if np.array_equal(wanted, rows) else None
    live = np.searchsorted(rows, wanted)
    in_range = live < len(rows)
    return live if in_range.all() and np.array_equal(rows[live], wanted) else None


def _verify(
    file: PackedFile,
    on_corruption: Callable[[], None],
    starts: np.ndarray,
    lengths: np.ndarray,
) -> None:
    try:
        file.verify(starts, lengths)
    except CorruptedError as error:
        with contextlib.suppress(OSError):  # the folder may be read-only
            file.path.unlink()
        on_corruption()
        note = "; the next search rebuilds it"
        raise SpecError("cache", str(file.path), "an intact file", str(error), note) from None


def _update_access_time(path: Path) -> None:
    """Sets the access time of a file, since many file systems do not. `_remove_stale` needs it."""
    with contextlib.suppress(OSError):
        status, now = path.stat(), time.time()
        if now - status.st_atime > TOUCH_SECONDS:
            os.utime(path, ns=(int(now * 1e9), status.st_mtime_ns))


def _remove_stale(column: Column) -> None:
    """Removes files that were unused for `KEEP_SECONDS` and that the newest version does not need.

    A mapped file stays readable until its last mapping is closed.
    """
    dataset = column.index.dataset
    if dataset.latest_version != dataset.version:
        return
    needed = {column.key(fragment) for fragment in dataset.get_fragments()}
    for path in column.folder.glob(f"*{SUFFIX}"):
        if path.name.removesuffix(SUFFIX) in needed:
            continue
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_atime, path.stat().st_mtime) > KEEP_SECONDS:
                path.unlink()

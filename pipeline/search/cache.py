"""Caches token vectors in local files that searches map into memory, one per Lance fragment.

`MAXRAY_CACHE` (default `$XDG_CACHE_HOME/maxray` or `~/.cache/maxray`) holds a folder per index and
column, with a file (`packed_file`) per fragment. Its name is a hash of everything that its vectors
depend on: the data files, which never change, the column's field and its codec. So appending rows
adds files, deleting rows changes none (the open version knows the remaining rows), and a column
that was written again has new files. The files take about as much space as the column does in the
index, and can be removed at any time.

If the folder has no space or cannot be written, vectors are read into memory, with a warning.
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
from pipeline.config import SpecError, absolute, digest, dump, within
from pipeline.index.reader import Index, files_with
from pipeline.search.packed import FLOATS, PackedVectors, Segment, packed_of, single_vectors
from pipeline.search.packed_file import (
    DamagedError,
    PackedFile,
    PackedWriter,
    remove_unfinished,
)

log = logging.getLogger("maxray.cache")

#: Number of rows read at once while a file is written; a row may have a thousand vectors.
BATCH_ROWS = 256
#: Seconds for which an unused file is kept that the newest version does not need.
KEEP_SECONDS = 24 * 3600
#: Seconds after which the access time of a file is updated again.
TOUCH_SECONDS = 3600
SUFFIX = ".packed"


def cache_folder() -> Path:
    """Returns the folder of packed files: `MAXRAY_CACHE`, else `maxray` in the user's cache folder.

    Raises:
        SpecError: For `cache`: it is a URI, or begins with the home of an unknown user.
    """
    with within("cache"):
        if chosen := os.environ.get("MAXRAY_CACHE"):
            if "://" in chosen:  # else a folder s3: would be made here
                raise SpecError("", chosen, "a local folder (see MAXRAY_CACHE)", "is a URI")
            return Path(absolute(chosen))
        return Path(absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "maxray"


@dataclass(frozen=True)
class Column:
    """A column of token vectors or of single vectors, and its codec."""

    index: Index
    name: str

    @functools.cached_property
    def _size(self) -> int | None:
        """Dimension of single vectors; None for a column of lists of vectors."""
        type = self.index.schema.field(self.name).type
        return type.list_size if pa.types.is_fixed_size_list(type) else None

    @functools.cached_property
    def codec(self) -> Codec:
        """Codec of the stored vectors."""
        return FLOATS if self._size else self.index.codec(self.name)

    @functools.cached_property
    def dim(self) -> int:
        """D, dimension of the decoded vectors."""
        return self._size or self.index.representation(self.name).dim

    @functools.cached_property
    def _fields(self) -> list[int]:
        return self.index.field_ids([self.name])[self.name]

    @functools.cached_property
    def _meaning(self) -> list:
        """Everything that the bytes of a vector depend on; part of the names of files."""
        artefact = None if self._size else self.index.representation(self.name).codec_artefact
        layout = {name: [str(dtype), width] for name, (dtype, width) in self.layout.items()}
        return [dump(self.codec.spec), artefact, self.dim, layout]

    @functools.cached_property
    def layout(self) -> dict[str, tuple[torch.dtype, int]]:
        """Type and width of each part of a vector."""
        return self.codec.parts(self.dim)

    @functools.cached_property
    def folder(self) -> Path:
        """Folder of the packed files of this column."""
        uri = absolute(self.index.uri)
        name = re.sub("[^A-Za-z0-9_.-]", "_", posixpath.basename(uri.rstrip("/")))
        return cache_folder() / f"{name}-{digest(uri)}" / self.name

    def key(self, fragment: lance.LanceFragment) -> str | None:
        """Returns a hash of everything that a packed file depends on; None without vectors."""
        files = files_with(fragment, self._fields)
        uri = absolute(self.index.uri)
        made_from = [uri, fragment.fragment_id, files, self._fields, self._meaning]
        return digest(made_from) if files else None

    def path(self, key: str) -> Path:
        """Returns the path of a packed file."""
        return self.folder / f"{key}{SUFFIX}"

    def batches(
        self, fragment: lance.LanceFragment
    ) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]:
        """Yields a fragment in batches: parts (t, width), lengths (s,) and row numbers (s,)."""
        for batch in self.index.batches(
            [self.name],
            fragments=[fragment],
            with_address=True,
            batch_rows=BATCH_ROWS,
            ahead=2,  # 16 by default, of a thousand vectors a row
        ):
            if self._size:
                values, lengths = single_vectors(batch[self.name])
                parts = {"values": values}
            else:
                parts, lengths = self.codec.unpack(batch[self.name], self.dim)
            yield parts, lengths, _places(batch)

    def without_vectors(self, num_documents: int) -> Segment:
        """Returns a segment of documents without vectors."""
        parts = {n: torch.empty(0, width, dtype=dtype) for n, (dtype, width) in self.layout.items()}
        return Segment(self.codec, self.dim, parts, torch.zeros(num_documents, dtype=torch.int64))


def _places(batch: pa.RecordBatch) -> np.ndarray:
    return (batch["_rowaddr"].to_numpy() & np.uint64(0xFFFFFFFF)).astype(np.int64)


def packed_column(
    index: Index,
    name: str,
    fragments: Sequence[lance.LanceFragment],
    *,
    cache: bool = True,
    when_damaged: Callable[[], None] = lambda: None,
) -> PackedVectors:
    """Opens the vectors of some fragments of a column, one segment per fragment.

    Args:
        index: Index of an open version.
        name: Name of the column.
        fragments: Fragments of that version, in storage order.
        cache: Whether to read and write packed files; else vectors are read into memory.
        when_damaged: Called when a file turns out to be corrupted while it is read; the column must
            be opened again then.

    Raises:
        SpecError: The index cannot be read. Reading the vectors raises it for `cache` if a file is
            corrupted.
    """
    column = Column(index, name)
    keys = [column.key(fragment) for fragment in fragments]
    to_open = {key: f for key, f in zip(keys, fragments, strict=True) if key is not None}
    opened: dict[str, Segment] = {}
    if cache:
        try:
            opened = _open_all(column, to_open, when_damaged)
        except SpecError as error:
            if error.field != "cache":
                raise
            log.warning("%s; the vectors are read into memory", error)
            with contextlib.suppress(SpecError):  # what was made is of use, if there is a folder
                opened = _there(column, to_open, when_damaged)
    segments = []
    for key, fragment in zip(keys, fragments, strict=True):
        if key is None:
            segments.append(column.without_vectors(fragment.count_rows()))
        elif key in opened:
            segments.append(opened[key])
        else:
            blocks = [(parts, lengths) for parts, lengths, _ in column.batches(fragment)]
            segments.extend(packed_of(column.codec, column.dim, blocks).segments)
    return PackedVectors(segments or [column.without_vectors(0)])


def _open_all(
    column: Column,
    fragments: dict[str, lance.LanceFragment],
    when_damaged: Callable[[], None],
) -> dict[str, Segment]:
    """Returns the segments of fragments by key, after writing the files that are missing.

    Raises:
        SpecError: A file cannot be written; the field is `cache` if the folder is the cause.
    """
    opened = _there(column, fragments, when_damaged)
    missing = {key: f for key, f in fragments.items() if key not in opened}
    if not missing:
        return opened
    try:
        column.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(column.folder)
        # Lance reads, and checksums are made, while other threads run.
        workers = min(len(missing), len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(workers) as executor:
            futures = [executor.submit(_make, column, key, f) for key, f in missing.items()]
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
    return opened | _there(column, missing, when_damaged)


def _make(column: Column, key: str, fragment: lance.LanceFragment) -> None:
    """Writes the packed file of a fragment in constant memory.

    Raises:
        OSError: The file cannot be written.
        SpecError: The fragment cannot be read.
    """
    with PackedWriter(column.folder, column.layout) as writer:
        for parts, lengths, places in column.batches(fragment):
            writer.append(parts, lengths, places)
        with contextlib.suppress(OSError, DamagedError):
            if _segment(column, key, fragment, lambda: None):
                return  # another process has published it
        writer.publish(column.path(key), key)


def _there(
    column: Column,
    fragments: dict[str, lance.LanceFragment],
    when_damaged: Callable[[], None],
) -> dict[str, Segment]:
    """Returns the segments of the fragments whose files exist, are valid and hold every row."""
    found = {}
    for key, fragment in fragments.items():
        try:
            if segment := _segment(column, key, fragment, when_damaged):
                found[key] = segment
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, DamagedError) as error:
            log.warning("%s %s; it is rebuilt", column.path(key), error)
    return found


def _segment(
    column: Column,
    key: str,
    fragment: lance.LanceFragment,
    when_damaged: Callable[[], None],
) -> Segment | None:
    """Opens the packed file of a fragment; returns None if the file lacks rows.

    Raises:
        DamagedError: The file is corrupted.
        OSError: The file is missing or unreadable.
    """
    file = PackedFile.open(column.path(key), key)
    live = _live(column, fragment, file.rows)
    if live is None:
        return None
    _note_use(file.path)
    return Segment(
        column.codec,
        column.dim,
        file.parts,
        file.lengths,
        torch.from_numpy(live) if len(live) < len(file.rows) else None,
        functools.partial(_touch, file, when_damaged),
    )


def _live(column: Column, fragment: lance.LanceFragment, rows: np.ndarray) -> np.ndarray | None:
    """Returns the documents of a file that exist in the open version.

    None if the version has others too, because the file was written for a later one.
    """
    if not fragment.num_deletions:
        wanted = np.arange(fragment.physical_rows)
    else:
        batches = column.index.batches(
            [], fragments=[fragment], with_address=True, batch_rows=1 << 20
        )
        wanted = np.concatenate([np.empty(0, np.int64), *map(_places, batches)])
    if len(wanted) > len(rows):
        return None
    if len(wanted) == len(rows):
        return np.arange(len(rows)) if np.array_equal(wanted, rows) else None
    live = np.searchsorted(rows, wanted)
    found = live < len(rows)
    return live if found.all() and np.array_equal(rows[live], wanted) else None


def _touch(
    file: PackedFile,
    when_damaged: Callable[[], None],
    starts: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    try:
        file.check(starts, lengths)
    except DamagedError as error:
        with contextlib.suppress(OSError):  # in a folder that cannot be written it stays
            file.path.unlink()
        when_damaged()
        note = "; the next search downloads it again"
        raise SpecError("cache", str(file.path), "an intact file", str(error), note) from None


def _note_use(path: Path) -> None:
    """Sets the access time, which many file systems do not update, for `_remove_stale`."""
    with contextlib.suppress(OSError):
        status, now = path.stat(), time.time()
        if now - status.st_atime > TOUCH_SECONDS:
            os.utime(path, ns=(int(now * 1e9), status.st_mtime_ns))


def _remove_stale(column: Column) -> None:
    """Removes files that the newest version does not need and that were unused for a day.

    A file that is mapped stays readable until the last mapping is closed.
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

"""Export of a representation: ids, vectors and items as Parquet or .npy files.

The `vectors` source reads both formats. The output appears atomically: it is written to a temporary
path, on the local disk for remote stores, and moved when it is complete.
"""

from __future__ import annotations

import json
import os
import posixpath
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.atomic import check_writable
from pipeline.config import SpecError, absolute
from pipeline.extras import require_storage
from pipeline.index.filters import filtering
from pipeline.index.reader import Index, combine_filters, first_line
from pipeline.schema import ITEM, METADATA_KEY, column_metadata, vectors_type
from pipeline.sources.vector_files import NpyFiles

Form = Literal["parquet", "npy"]

#: Number of rows per batch in memory and per Parquet row group.
BATCH_ROWS = 256
ITEMS_FILE, METADATA_FILE = "items.jsonl", "metadata.json"
#: Files of an .npy export. The ids are uploaded last; without them the source finds no export.
NPY_FILES = (NpyFiles.VECTORS, NpyFiles.LENGTHS, ITEMS_FILE, METADATA_FILE, NpyFiles.IDS)

REPORT_SECONDS = 5.0
NPY_HEADER_BYTES = 128


def export(
    uri: str,
    output: str,
    representation: str,
    *,
    form: Form = "parquet",
    filter: str | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> int:
    """Exports the items that have a representation, with their vectors.

    The formats are:

    - `parquet`: a file with the columns `id`, `vectors` and those of the items. The metadata of the
      representation is JSON in the schema metadata under the key `maxray`.
    - `npy`: a folder with vectors.npy (T, D), the concatenated vectors of all items, lengths.npy
      (N,), ids.txt, items.jsonl and metadata.json.

    Float vectors keep their stored precision. Other codecs are decoded to float32. Memory use does
    not depend on the size of the index.

    Args:
        uri: URI of the index.
        output: Path or URI of the file or folder to write.
        representation: Column of token vectors, or of single vectors, which count as lists of one.
        form: Format of the export.
        filter: SQL condition over the columns of the items.
        overwrite: Whether to replace an existing export.
        report: Called with each progress line.

    Returns:
        The number of exported items.

    Raises:
        SpecError: The representation does not exist, the filter is invalid or matches no items, or
            the output exists or cannot be written.
    """
    index = Index(uri)
    metadata = _metadata(index, representation)
    filesystem, path = _check_output(output, form, overwrite)
    condition = combine_filters(filter, f"`{representation}` IS NOT NULL")
    num_items = _count(index, condition, filter, representation)
    record = {**metadata, "index": absolute(uri), "version": index.version}
    record |= {"representation": representation, "filter": filter, "items": num_items}
    with _unfinished(filesystem, path) as unfinished:
        writer = {"parquet": _Parquet, "npy": _Npy}[form](unfinished, record)
        num_done, last = 0, time.monotonic()
        for items, vectors, lengths in _rows(index, representation, condition):
            writer.write(items, vectors, lengths)
            num_done += len(items)
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                report(f"{num_done:,} of {num_items:,} items")
        writer.close()
        _move(unfinished, filesystem, path)
    report(f"{num_done:,} items, {writer.num_vectors:,} vectors of {representation}: {output}")
    return num_done


def _metadata(index: Index, representation: str) -> dict[str, Any]:
    """Returns the metadata that the index stores for a column of vectors."""
    columns = [name for name in index.schema.names if _is_exportable(index, name)]
    if representation not in columns:
        problem = "is not in the index"
        raise SpecError.unknown_name("representation", representation, columns, problem)
    return column_metadata(index.schema.field(representation))


def _is_exportable(index: Index, column: str) -> bool:
    return column in index.representations() or column in index.pooled_columns


def _check_output(output: str, form: Form, overwrite: bool) -> tuple[AbstractFileSystem, str]:
    """Returns the file system and path of the output.

    Raises:
        SpecError: The output exists or cannot be written.
    """
    if not output.strip("/ "):
        raise SpecError("output", output, "a path or URI", "names no file or folder")
    if form == "parquet" and not output.lower().endswith(".parquet"):
        rule = "a path that ends in .parquet, unless --format npy is given"
        raise SpecError("output", output, rule)
    require_storage(output)
    try:
        filesystem, path = fsspec.url_to_fs(absolute(output), use_listings_cache=False)
        already_exists, is_folder = filesystem.exists(path), filesystem.isdir(path)
    except OSError:
        raise
    except Exception as error:  # each storage library raises its own errors
        problem = f"cannot be reached ({type(error).__name__}: {first_line(error)})"
        raise SpecError("output", output, "a reachable URI", problem) from None
    check_writable(output, "output", as_file=form == "parquet")
    if not already_exists:
        return filesystem, path
    if form == "npy" and is_folder:
        names = {posixpath.basename(entry.rstrip("/")) for entry in filesystem.ls(path, False)}
        if names - set(NPY_FILES):
            rule = "a new path or an export to overwrite"
            raise SpecError("output", output, rule, "is a folder with other files")
        overwrite = overwrite or not names
    if not overwrite:
        raise SpecError("output", output, "a new path unless --overwrite is given", "exists")
    return filesystem, path


def _count(index: Index, condition: str, filter: str | None, representation: str) -> int:
    with filtering(index, filter):
        num_items = index.dataset.count_rows(condition)
    if num_items == 0:
        if filter is not None:
            raise SpecError(
                "filter", filter, "a condition that matches items with vectors", "matches no items"
            )
        rule = "a representation with vectors"
        raise SpecError("representation", representation, rule, "is empty")
    return num_items


def _rows(
    index: Index, name: str, condition: str
) -> Iterator[tuple[pa.RecordBatch, np.ndarray, np.ndarray]]:
    """Yields batches of items, their vectors (T, D) and the number of vectors per item (B,)."""
    columns = [column for column in ITEM.names if column in index.dataset.schema.names]
    codec = None if name in index.pooled_columns else index.codec(name)
    batches = index.batches([*columns, name], filter=condition, batch_rows=BATCH_ROWS)
    for batch in batches:
        if codec is None:
            numbers = batch[name].flatten().to_numpy(zero_copy_only=False)
            vectors, lengths = numbers.reshape(len(batch), -1), np.ones(len(batch), np.int64)
        else:
            vectors, lengths = codec.decode(batch[name], index.representation(name).dim)
        yield batch.select(columns), vectors, lengths


class _Writer(ABC):
    """Writer of an export to a local path.

    Args:
        path: Path of the file or folder.
        record: Metadata of the export.
    """

    def __init__(self, path: Path, record: dict[str, Any]):
        self.path, self.record, self.num_vectors = path, record, 0

    @abstractmethod
    def write(self, items: pa.RecordBatch, vectors: np.ndarray, lengths: np.ndarray) -> None:
        """Appends items and their vectors (T, D)."""

    @abstractmethod
    def close(self) -> None:
        """Completes and closes the files."""


class _Parquet(_Writer):
    _file: pq.ParquetWriter | None = None

    def write(self, items: pa.RecordBatch, vectors: np.ndarray, lengths: np.ndarray) -> None:
        type = vectors_type(vectors.shape[1], pa.from_numpy_dtype(vectors.dtype))
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        numbers = pa.array(np.ascontiguousarray(vectors).reshape(-1))
        lists = pa.ListArray.from_arrays(
            pa.array(ends), pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
        )
        names = ["id" if name == "item_id" else name for name in items.schema.names]
        columns = dict(zip(names, items.columns, strict=True))
        table = pa.table({"id": columns.pop("id"), "vectors": lists.cast(type), **columns})
        schema_metadata = {METADATA_KEY: json.dumps(self.record, ensure_ascii=False).encode()}
        if self._file is None:
            # Only text is compressed: vectors hardly shrink.
            text_columns = [f.name for f in table.schema if pa.types.is_string(f.type)]
            self._file = pq.ParquetWriter(
                self.path,
                table.schema.with_metadata(schema_metadata),
                compression=dict.fromkeys(text_columns, "zstd"),
                use_dictionary=["parent_id", "source", "modality"],
            )
        self._file.write_table(
            table.replace_schema_metadata(schema_metadata), row_group_size=BATCH_ROWS
        )
        self.num_vectors += len(vectors)

    def close(self) -> None:
        assert self._file is not None
        self._file.close()


class _Npy(_Writer):
    def __init__(self, path: Path, record: dict[str, Any]):
        super().__init__(path, record)
        path.mkdir()
        self._vectors, self._lengths = (
            (path / name).open("wb") for name in (NpyFiles.VECTORS, NpyFiles.LENGTHS)
        )
        self._ids, self._items = (
            (path / name).open("w", encoding="utf-8", newline="\n")
            for name in (NpyFiles.IDS, ITEMS_FILE)
        )
        for stream in (self._vectors, self._lengths):
            stream.write(bytes(NPY_HEADER_BYTES))  # overwritten by `close`, when the shape is known
        self._num_items = 0

    def write(self, items: pa.RecordBatch, vectors: np.ndarray, lengths: np.ndarray) -> None:
        vectors.tofile(self._vectors)
        lengths.astype("<i8").tofile(self._lengths)
        for row in items.to_pylist():
            metadata = json.loads(row["metadata"]) if row.get("metadata") else None
            row = {"id": row.pop("item_id"), **row, "metadata": metadata}
            self._ids.write(f"{row['id']}\n")
            self._items.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._dtype, self._dim = vectors.dtype, vectors.shape[1]
        self._num_items += len(items)
        self.num_vectors += len(vectors)

    def close(self) -> None:
        _write_header(self._vectors, self._dtype, (self.num_vectors, self._dim))
        _write_header(self._lengths, np.dtype("<i8"), (self._num_items,))
        for stream in (self._vectors, self._lengths, self._ids, self._items):
            stream.close()
        record = json.dumps(self.record, indent=1, ensure_ascii=False)
        (self.path / METADATA_FILE).write_text(record + "\n", encoding="utf-8")


def _write_header(stream: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Overwrites the placeholder at the beginning of an .npy file with a header of version 1.0."""
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    text = repr(fields).encode("latin1")
    magic = np.lib.format.magic(1, 0)
    size = NPY_HEADER_BYTES - len(magic) - 2
    stream.seek(0)
    stream.write(magic + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n")


@contextmanager
def _unfinished(filesystem: AbstractFileSystem, path: str) -> Iterator[Path]:
    """Yields a local temporary path for the export.

    Removes what is left of it on exit.
    """
    if isinstance(filesystem, LocalFileSystem):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    else:
        folder = Path(tempfile.mkdtemp(prefix="maxray-export-"))
        unfinished = folder / posixpath.basename(path)
    try:
        yield unfinished
    finally:
        _remove(unfinished)
        if not isinstance(filesystem, LocalFileSystem):
            _remove(folder)


def _move(unfinished: Path, filesystem: AbstractFileSystem, path: str) -> None:
    """Moves a complete export to its final path."""
    if isinstance(filesystem, LocalFileSystem):
        replaced = unfinished.with_suffix(".old")
        if unfinished.is_dir() and Path(path).exists():  # a rename cannot replace a folder
            os.rename(path, replaced)
        os.replace(unfinished, path)
        _remove(replaced)
    elif unfinished.is_dir():
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)
        for name in NPY_FILES:
            filesystem.put_file(str(unfinished / name), f"{path}/{name}")
    else:
        filesystem.put_file(str(unfinished), path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

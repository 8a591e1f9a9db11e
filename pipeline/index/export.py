"""Export of a representation: ids, vectors and items as Parquet or .npy files.

The `vectors` source reads both formats. The output appears atomically: it is written to a temporary
local path and moved when complete.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import SpecError, absolute
from pipeline.data.vector_files import QRELS, QUERIES, QUERY_IDS, DocumentFiles
from pipeline.index.filters import check_matches, filtering
from pipeline.index.info import PREFIX_SEPARATOR
from pipeline.index.reader import IndexReader, access_errors, combine_filters, first_vectors
from pipeline.paths import locate
from pipeline.runtime.atomic import check_writable
from pipeline.schema import ITEM, METADATA_KEY, column_metadata, vectors_type

Form = Literal["parquet", "npy"]
Dtype = Literal["float16", "float32"]

#: Number of rows per batch in memory and per Parquet row group.
BATCH_ROWS = 256
ITEMS_FILE, METADATA_FILE = "items.jsonl", "metadata.json"
#: Files of an .npy export. The vectors are uploaded last; without them the source finds no export.
NPY_FILES = (
    DocumentFiles.LENGTHS,
    DocumentFiles.IDS,
    ITEMS_FILE,
    METADATA_FILE,
    QUERIES,
    QUERY_IDS,
    QRELS,
    DocumentFiles.VECTORS,
)
#: Temporary file of the ids, one per line.
IDS_TEXT_FILE = "doc_ids.tmp"

REPORT_SECONDS = 5.0
NPY_HEADER_BYTES = 128
#: Number of ids that are in memory at the same time.
IDS_PER_BLOCK = 1 << 16


def export(
    uri: str,
    output: str,
    representation: str,
    *,
    form: Form = "parquet",
    dtype: Dtype | None = None,
    filter: str | None = None,
    queries: Mapping[str, np.ndarray] | None = None,
    qrels: Mapping[str, Mapping[str, int]] | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> int:
    """Exports the items that have a representation, with their vectors.

    The formats are:

    - `parquet`: a file with the columns `id`, `vectors` and those of the items. The metadata of the
      representation is JSON in the schema metadata under the key `maxray`.
    - `npy`: a folder with documents.npy (T, D), the concatenated vectors of all items, doclens.npy
      (N,), doc_ids.npy (N,), items.jsonl and metadata.json, and optionally queries.npy (Q, M, D),
      padded with zeros, query_ids.npy (Q,) and qrels.tsv.

    Memory use does not depend on the size of the index.

    Args:
        representation: Representation, prefix of a representation with nested vectors (`NAME@K`),
            or column of single vectors, which count as lists of one.
        queries: Query vectors (M_i, D) by id, only for `npy`.
        qrels: Grades by item id and query id, only for `npy`.

    Raises:
        SpecError: The representation does not exist, the filter is invalid or matches no items, no
            exported item is judged, a vector exceeds the range of float16, or the output exists or
            cannot be written.
    """
    index = IndexReader(uri)
    column, metadata = _column_and_metadata(index, representation)
    filesystem, path = _check_output(output, form, overwrite)
    condition = combine_filters(filter, f"`{column}` IS NOT NULL")
    num_items = _count(index, condition, filter, representation)
    if qrels is not None:
        _check_judged(index, condition, qrels)
    record = {**metadata, "index": absolute(uri), "version": index.version}
    record |= {"representation": representation, "filter": filter, "items": num_items}
    with _unfinished(filesystem, path) as unfinished:
        writer: _Writer
        if form == "npy":
            writer = _Npy(unfinished, record, queries, qrels)
        else:
            writer = _Parquet(unfinished, record)
        num_done, last = 0, time.monotonic()
        for items, vectors, lengths in _rows(index, representation, condition):
            writer.write(items, _cast(vectors, dtype), lengths)
            num_done += len(items)
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                report(f"{num_done:,} of {num_items:,} items")
        writer.close()
        _move(unfinished, filesystem, path)
    report(f"{num_done:,} items, {writer.num_vectors:,} vectors of {representation}: {output}")
    return num_done


def _column_and_metadata(index: IndexReader, representation: str) -> tuple[str, dict[str, Any]]:
    column = representation.partition(PREFIX_SEPARATOR)[0]
    columns = [name for name in index.schema.names if _is_exportable(index, name)]
    if column not in columns:
        problem = "is not in the index"
        raise SpecError.unknown_name("representation", representation, columns, problem)
    if representation not in index.pooled_columns:
        index.representation(representation)  # raises for an invalid prefix
    return column, column_metadata(index.schema.field(column))


def _is_exportable(index: IndexReader, column: str) -> bool:
    return column in index.representations() or column in index.pooled_columns


def _check_judged(
    index: IndexReader, condition: str, qrels: Mapping[str, Mapping[str, int]]
) -> None:
    judged = {document for grades in qrels.values() for document in grades}
    for batch in index.batches(["item_id"], filter=condition):
        if not judged.isdisjoint(batch["item_id"].to_pylist()):
            return
    problem = f"has none of the exported items among {len(judged):,} judged ids"
    raise SpecError("qrels", next(iter(judged), ""), "judgments of item ids", problem)


def _cast(vectors: np.ndarray, dtype: Dtype | None) -> np.ndarray:
    if dtype is None:
        return vectors
    with np.errstate(over="ignore"):
        converted = vectors.astype(dtype)
    if not np.isfinite(converted).all():
        problem = f"cannot represent {np.abs(vectors).max():g}"
        raise SpecError("dtype", dtype, "float32 for vectors of this range", problem)
    return converted


def _check_output(output: str, form: Form, overwrite: bool) -> tuple[AbstractFileSystem, str]:
    if not output.strip("/ "):
        raise SpecError("output", output, "a path or URI", "names no file or folder")
    if form == "parquet" and not output.lower().endswith(".parquet"):
        rule = "a path that ends in .parquet, unless --format npy is given"
        raise SpecError("output", output, rule)
    with access_errors(output, "output"):
        filesystem, path = locate(absolute(output))
        already_exists, is_folder = filesystem.exists(path), filesystem.isdir(path)
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


def _count(index: IndexReader, condition: str, filter: str | None, representation: str) -> int:
    with filtering(index, filter):
        num_items = index.dataset.count_rows(condition)
    if num_items == 0:
        if filter is not None:
            check_matches(num_items, filter)
        rule = "a representation with vectors"
        raise SpecError("representation", representation, rule, "is empty")
    return num_items


def _rows(
    index: IndexReader, name: str, condition: str
) -> Iterator[tuple[pa.RecordBatch, np.ndarray, np.ndarray]]:
    """Yields batches of items, their vectors (T, D) and the number of vectors per item (B,)."""
    columns = [column for column in ITEM.names if column in index.dataset.schema.names]
    info = None if name in index.pooled_columns else index.representation(name)
    column = name if info is None else info.column
    batches = index.batches([*columns, column], filter=condition, batch_rows=BATCH_ROWS)
    for batch in batches:
        if info is None:
            numbers = batch[column].flatten().to_numpy(zero_copy_only=False)
            vectors, lengths = numbers.reshape(len(batch), -1), np.ones(len(batch), np.int64)
        else:
            decoded = index.codec(name).decode(batch[column], info.dim)
            vectors, lengths = first_vectors(*decoded, info.max_vectors)
        yield batch.select(columns), vectors, lengths


class _Writer(ABC):
    def __init__(self, path: Path, record: dict[str, Any]):
        self.path, self.record, self.num_vectors = path, record, 0

    @abstractmethod
    def write(self, items: pa.RecordBatch, vectors: np.ndarray, lengths: np.ndarray) -> None:
        """Appends items and their vectors (T, D)."""

    @abstractmethod
    def close(self) -> None: ...


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
    """Writer of the layout that `DocumentFiles` reads."""

    def __init__(
        self,
        path: Path,
        record: dict[str, Any],
        queries: Mapping[str, np.ndarray] | None,
        qrels: Mapping[str, Mapping[str, int]] | None,
    ):
        super().__init__(path, record)
        path.mkdir()
        if queries is not None:
            _write_queries(path, queries)
        if qrels is not None:
            _write_qrels(path / QRELS, qrels)
        self._vectors, self._lengths = (
            (path / name).open("wb") for name in (DocumentFiles.VECTORS, DocumentFiles.LENGTHS)
        )
        self._ids, self._items = (
            (path / name).open("w+", encoding="utf-8", newline="\n")
            for name in (IDS_TEXT_FILE, ITEMS_FILE)
        )
        for stream in (self._vectors, self._lengths):
            stream.write(bytes(NPY_HEADER_BYTES))  # overwritten by `close`, when the shape is known
        self._num_items = self._max_id_length = 0

    def write(self, items: pa.RecordBatch, vectors: np.ndarray, lengths: np.ndarray) -> None:
        vectors.tofile(self._vectors)
        lengths.astype("<i4").tofile(self._lengths)
        for row in items.to_pylist():
            metadata = json.loads(row["metadata"]) if row.get("metadata") else None
            row = {"id": row.pop("item_id"), **row, "metadata": metadata}
            self._ids.write(f"{row['id']}\n")
            self._max_id_length = max(self._max_id_length, len(row["id"]))
            self._items.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._dtype, self._dim = vectors.dtype, vectors.shape[1]
        self._num_items += len(items)
        self.num_vectors += len(vectors)

    def close(self) -> None:
        _write_header(self._vectors, self._dtype, (self.num_vectors, self._dim))
        _write_header(self._lengths, np.dtype("<i4"), (self._num_items,))
        self._write_ids()
        for stream in (self._vectors, self._lengths, self._ids, self._items):
            stream.close()
        (self.path / IDS_TEXT_FILE).unlink()
        record = json.dumps(self.record, indent=1, ensure_ascii=False)
        (self.path / METADATA_FILE).write_text(record + "\n", encoding="utf-8")

    def _write_ids(self) -> None:
        """Converts the ids to an array, whose width is known after the last item."""
        dtype = np.dtype(f"<U{self._max_id_length}")
        self._ids.seek(0)
        with (self.path / DocumentFiles.IDS).open("wb") as stream:
            stream.write(bytes(NPY_HEADER_BYTES))
            while lines := list(itertools.islice(self._ids, IDS_PER_BLOCK)):
                np.array([line.removesuffix("\n") for line in lines], dtype).tofile(stream)
            _write_header(stream, dtype, (self._num_items,))


def _write_queries(folder: Path, queries: Mapping[str, np.ndarray]) -> None:
    """Writes an array (Q, M, D), padded with zeros, which do not add to MaxSim."""
    arrays = list(queries.values())
    shape = len(arrays), max(map(len, arrays)), arrays[0].shape[1]
    vectors_QMD = np.zeros(shape, np.float32)
    for padded, array in zip(vectors_QMD, arrays, strict=True):
        padded[: len(array)] = array
    np.save(folder / QUERIES, vectors_QMD)
    np.save(folder / QUERY_IDS, np.array(list(queries)))


def _write_qrels(path: Path, qrels: Mapping[str, Mapping[str, int]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write("query-id\tcorpus-id\tscore\n")
        for query_id, grades in qrels.items():
            stream.writelines(f"{query_id}\t{item_id}\t{n}\n" for item_id, n in grades.items())


def _write_header(stream: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    text = repr(fields).encode("latin1")
    magic = np.lib.format.magic(1, 0)
    size = NPY_HEADER_BYTES - len(magic) - 2
    stream.seek(0)
    stream.write(magic + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n")


@contextmanager
def _unfinished(filesystem: AbstractFileSystem, path: str) -> Iterator[Path]:
    """Yields a local temporary path, which is removed on exit."""
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
            if not (unfinished / name).exists():
                continue
            filesystem.put_file(str(unfinished / name), f"{path}/{name}")
    else:
        filesystem.put_file(str(unfinished), path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

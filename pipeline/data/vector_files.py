"""Readers of precomputed vectors in .npy arrays and in columns of Parquet and Arrow files."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow import types
from pydantic import Field

from pipeline.config import ComponentSpec, SpecError, Uri
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import check_regular, open_file
from pipeline.data.files import walk

ROWS_PER_SHARD = 1000
#: Maximum number of rows in memory at the same time.
ROWS_PER_BLOCK = 256
PARQUET, ARROW = (".parquet",), (".arrow", ".feather", ".ipc")
PATH_RULE = (
    "a folder with documents.npy and doclens.npy, a folder with vectors.npy and ids.txt, or a file"
    " or folder of files ending in " + ", ".join(PARQUET + ARROW)
)

#: Errors of reading a corrupted file. `pa.ArrowInvalid` is a ValueError.
UNREADABLE = (OSError, ValueError, pa.ArrowException, Unreadable)

#: Maximum size of the header of an .npy file and of a line of ids.txt, in bytes.
MAX_HEADER_BYTES = 64 << 10
#: Maximum number of values per item (1 GiB of float32). A small file may claim a larger item.
MAX_ITEM_VALUES = 1 << 28
#: Maximum number of values in memory at the same time, unless a single item is larger.
VALUES_PER_BLOCK = 1 << 26
#: Number of rows whose lengths or ids are checked at the same time.
ROWS_PER_CHECK = 1 << 16

#: Names of dtypes in errors, by kind.
FLOATS = {"f": "floats"}
INTEGERS = {"i": "integers", "u": "integers"}
STRINGS = {"U": "strings", "S": "strings"}


class VectorsSpec(ComponentSpec):
    """Options of the vectors source."""

    name: Literal["vectors"] = "vectors"
    path: Uri
    """Local path or fsspec URI."""
    collection: str = ""
    """Name of the collection. Defaults to the last part of the path."""
    dim: int | None = Field(None, gt=0)
    """Number of dimensions of a vector, or null for that of the .npy file."""
    id_column: str = "id"
    """Column of the ids (Parquet and Arrow)."""
    vectors_column: str = "vectors"
    """Column of the vectors (Parquet and Arrow)."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows in flattened form.

    Row i has `lengths[i]` vectors, and vector j has `widths[j]` values.

    Attributes:
        lengths: Number of vectors per row, (n,) int64.
        widths: Number of values per vector, (T,) int64, where T is the sum of `lengths`.
        values: Values of all vectors, float32.
        strings: n UTF-8 strings per string column, or empty when decoding.
    """

    lengths: np.ndarray
    widths: np.ndarray
    values: np.ndarray
    strings: Mapping[str, Sequence[bytes | None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def row_starts(self) -> np.ndarray:
        """Index of the first vector of each row, followed by the number of vectors, (n + 1,)."""
        return start_offsets(self.lengths)

    @functools.cached_property
    def value_starts(self) -> np.ndarray:
        """Index of the first value of each row, followed by the number of values, (n + 1,)."""
        return start_offsets(self.widths)[self.row_starts]

    def flat_vectors(self, row: int) -> np.ndarray:
        """Returns the concatenated vectors of a row."""
        return self.values[self.value_starts[row] : self.value_starts[row + 1]]


def start_offsets(sizes: np.ndarray) -> np.ndarray:
    """Returns the start offsets of parts with the given sizes, followed by the end of the last one.

    >>> start_offsets(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


class NpyArray:
    """Array in a C-ordered .npy file at an fsspec URI, which is read by byte ranges.

    Objects are never unpickled.

    Raises:
        OSError: The file cannot be read, or is shorter than its header specifies.
        ValueError: The header is malformed, the array cannot be read by ranges, or its dtype is not
            allowed.
    """

    def __init__(self, fs: AbstractFileSystem, path: str, dtypes: Mapping[str, str]):
        self._fs, self._path = fs, path
        with open_file(fs, path) as file:
            stream = io.BytesIO(file.read(MAX_HEADER_BYTES))
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                header = np.lib.format.read_array_header_1_0(stream)
            elif version == (2, 0):
                header = np.lib.format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"format version {version}")
            self._offset = stream.tell()
        self.shape, fortran_order, self.dtype = header
        if fortran_order and len(self.shape) > 1:
            raise ValueError("Fortran order; save np.ascontiguousarray(array)")
        if self.dtype.kind not in dtypes:
            allowed = " or ".join(dict.fromkeys(dtypes.values()))
            raise ValueError(f"dtype {self.dtype}; use {allowed}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape}")
        num_bytes = self._offset + self.dtype.itemsize * math.prod(
            self.shape
        )  # Python integers do not overflow
        if fs.size(path) < num_bytes:
            raise OSError(f"{fs.size(path)} bytes, but the header requires {num_bytes}")

    def values(self, start: int, end: int) -> np.ndarray:
        """Reads the values [start, end) of the flattened array."""
        if start == end:
            return np.empty(0, self.dtype)
        first, last = (self._offset + self.dtype.itemsize * i for i in (start, end))
        content = self._fs.cat_file(self._path, start=first, end=last)
        if len(content) < last - first:
            raise OSError(f"{self._path} ends before byte {last}")
        return np.frombuffer(content, self.dtype)


class NpyFiles:
    """Folder with vectors.npy, ids.txt and, if the items have different lengths, lengths.npy."""

    VECTORS, IDS, LENGTHS = "vectors.npy", "ids.txt", "lengths.npy"
    DTYPES: ClassVar[Mapping[str, str]] = FLOATS | INTEGERS
    """Allowed dtypes of the vectors, by kind."""

    def __init__(self, fs: AbstractFileSystem, root: str, spec: VectorsSpec):
        self._fs, self._root, self._spec = fs, root, spec

    @classmethod
    def is_in(cls, fs: AbstractFileSystem, root: str) -> bool:
        """Checks whether a folder contains any file of the layout."""
        return any(fs.exists(f"{root}/{name}") for name in (cls.VECTORS, cls.IDS, cls.LENGTHS))

    def check(self) -> None:
        """Raises `SpecError` if files are missing, malformed or inconsistent. Reads no vectors."""
        self._check_shape(self._vectors.shape)
        if self._vectors.shape[-1] != self.dim:
            raise SpecError(
                "dim", self.dim, f"{self._vectors.shape[-1]}, the width of {self.VECTORS}"
            )
        num_ids = self._count_ids()
        if num_ids != self._num_rows:
            counted = self.LENGTHS if self._lengths else self.VECTORS
            problem = f"has {num_ids} ids and {self._num_rows} rows of {counted}"
            raise self._error(problem, f"a folder with one id in {self.IDS} per row")
        if num_ids == 0:
            raise self._error("contains no items", "a folder with vectors of at least one item")
        if self._lengths:
            self._check_lengths(self._lengths)
        elif len(self._vectors.shape) == 3:
            self._check_item(self._vectors.shape[1])

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        if self._spec.dim is not None:
            return self._spec.dim
        self._check_shape(self._vectors.shape)
        return self._vectors.shape[-1]

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) not in ((2,) if self._lengths else (2, 3)) or not shape[-1]:
            rule = "(T, D)" if self._lengths else "(n, N, D) or (n, D)"
            problem = f"has {self.VECTORS} of shape {shape}"
            raise self._error(problem, f"a folder with {self.VECTORS} of shape {rule}")

    def _check_item(self, num_vectors: int) -> None:
        max_vectors = MAX_ITEM_VALUES // self.dim
        if num_vectors > max_vectors:
            raise self._error(
                f"has an item of {num_vectors:,} vectors",
                f"a folder with at most {max_vectors:,} vectors per item",
            )

    def _check_lengths(self, array: NpyArray) -> None:
        if array.dtype.kind not in INTEGERS or len(array.shape) != 1:
            kind = f"{array.dtype} of shape {array.shape}"
            raise self._error(f"has {self.LENGTHS} as {kind}", "a folder with integer lengths")
        num_vectors = 0
        for row in range(0, self._num_rows, ROWS_PER_CHECK):
            lengths = array.values(row, min(row + ROWS_PER_CHECK, self._num_rows))
            if lengths.min() < 0:
                raise self._error(f"has the length {lengths.min()}", "a folder with lengths >= 0")
            self._check_item(int(lengths.max()))  # so that their sum cannot overflow
            num_vectors += int(lengths.sum(dtype=np.int64))
        if num_vectors != self._vectors.shape[0]:
            problem = f"has {self._vectors.shape[0]} vectors and lengths of sum {num_vectors}"
            rule = f"a folder whose {self.LENGTHS} sums to the rows of {self.VECTORS}"
            raise self._error(problem, rule)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Ranges of rows, with where their ids start and their vectors in rows."""
        starts = range(0, self._num_rows, ROWS_PER_SHARD)
        ranges = [(row, min(row + ROWS_PER_SHARD, self._num_rows)) for row in starts]
        vector = 0
        for (row, end), ids in zip(ranges, self._id_ranges(ranges), strict=True):
            yield {"file": self.VECTORS, "row": row, "end": end, "vector": vector, "ids": ids}
            vector += int(self._row_lengths(row, end).sum())

    def blocks(self, shard: dict[str, Any]) -> Iterator[Block]:
        """Yields all rows of a shard with their ids."""
        ids = self._ids(*shard["ids"])
        for rows in self._group_rows(shard, np.arange(shard["end"] - shard["row"])):
            yield self._block(shard, rows, {"id": ids[rows[0] : rows[-1] + 1]})

    def vectors(self, shard: dict[str, Any], positions: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the vectors (N, D) float32 of ascending row numbers of a shard."""
        for rows in self._group_rows(shard, np.asarray(positions, dtype=np.int64)):
            block = self._block(shard, rows)
            for i in range(len(block)):
                yield block.flat_vectors(i).reshape(-1, self.dim)

    def _group_rows(self, shard: dict[str, Any], positions: np.ndarray) -> Iterator[np.ndarray]:
        """Yields runs of rows (see `_runs`) that fit into memory together."""
        sizes = self._row_lengths(shard["row"], shard["end"]) * self.dim
        for rows in _runs(positions):
            blocks = np.cumsum(sizes[rows]) // VALUES_PER_BLOCK
            yield from np.split(rows, np.flatnonzero(np.diff(blocks)) + 1)

    def _count_ids(self) -> int:
        with self._open(self.IDS) as stream:
            return sum(1 for _ in self._id_lengths(stream))

    def _id_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
        """Yields the arguments of `_ids` for consecutive ranges of rows: byte ranges of ids.txt."""
        with self._open(self.IDS) as stream:
            lengths = self._id_lengths(stream)
            start = 0
            for row, end_row in ranges:
                end = start + sum(itertools.islice(lengths, end_row - row))
                yield [start, end]
                start = end

    def _ids(self, start: int, end: int) -> list[bytes]:
        content = self._fs.cat_file(f"{self._root}/{self.IDS}", start=start, end=end)
        content = content.removeprefix(b"\xef\xbb\xbf") if start == 0 else content
        return [line.removesuffix(b"\r") for line in content.removesuffix(b"\n").split(b"\n")]

    def _id_lengths(self, stream: Any) -> Iterator[int]:
        """Yields the length of each line of ids.txt, in bytes."""
        for number, line in enumerate(iter(lambda: stream.readline(MAX_HEADER_BYTES), b""), 1):
            if len(line) == MAX_HEADER_BYTES:
                problem = f"has more than {MAX_HEADER_BYTES:,} bytes in line {number}"
                raise self._error(problem, "a folder with one id per line in ids.txt")
            yield len(line)

    def _block(
        self,
        shard: dict[str, Any],
        rows: np.ndarray,
        strings: Mapping[str, Sequence[bytes]] | None = None,
    ) -> Block:
        """Reads consecutive rows, numbered from the start of the shard."""
        lengths = self._row_lengths(shard["row"], shard["row"] + int(rows[-1]) + 1)
        vectors = shard["vector"] + start_offsets(lengths)
        width = self._vectors.shape[-1]
        first, last = int(vectors[rows[0]]), int(vectors[rows[-1] + 1])
        values = self._vectors.values(first * width, last * width)
        return Block(lengths[rows], np.full(last - first, width), _float32(values), strings or {})

    def _row_lengths(self, start: int, end: int) -> np.ndarray:
        if self._lengths:
            return self._lengths.values(start, end).astype(np.int64)
        num_vectors = self._vectors.shape[1] if len(self._vectors.shape) == 3 else 1
        return np.full(end - start, num_vectors, dtype=np.int64)

    @functools.cached_property
    def _vectors(self) -> NpyArray:
        return self._array(self.VECTORS, self.DTYPES)

    @functools.cached_property
    def _lengths(self) -> NpyArray | None:
        has_lengths = self._fs.exists(f"{self._root}/{self.LENGTHS}")
        return self._array(self.LENGTHS, FLOATS | INTEGERS) if has_lengths else None

    @property
    def _num_rows(self) -> int:
        return (self._lengths or self._vectors).shape[0]

    def _array(self, name: str, dtypes: Mapping[str, str]) -> NpyArray:
        try:
            return NpyArray(self._fs, f"{self._root}/{name}", dtypes)
        except FileNotFoundError:
            raise self._error(f"contains no {name}", f"a folder with {name}") from None
        except (OSError, ValueError, Unreadable) as error:
            raise self._error(f"has an unreadable {name} ({error})", "a folder of npy") from None

    def _open(self, name: str) -> Any:
        try:
            return open_file(self._fs, f"{self._root}/{name}")
        except Unreadable as error:
            raise self._error(
                f"has an unreadable {name} ({error})", "a folder of regular files"
            ) from None
        except FileNotFoundError:
            raise self._error(f"contains no {name}", f"a folder with {name}") from None

    def _error(self, problem: str, rule: str) -> SpecError:
        return SpecError("path", self._spec.path, rule, problem)


#: Files of the layout of `DocumentFiles` that the source does not read.
QUERIES, QUERY_IDS, QRELS = "queries.npy", "query_ids.npy", "qrels.tsv"


class DocumentFiles(NpyFiles):
    """Folder with documents.npy and doclens.npy, the layout of published multi-vector data sets.

    Vectors are floats of shape (T, D) with the number of vectors per item in doclens.npy, or of
    shape (n, N, D) without doclens.npy. doc_ids.npy contains unique strings or integers. Without
    it, the ids are the row numbers.
    """

    VECTORS, IDS, LENGTHS = "documents.npy", "doc_ids.npy", "doclens.npy"
    DTYPES: ClassVar[Mapping[str, str]] = FLOATS

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) == 2 and not self._lengths:
            raise self._error(f"contains no {self.LENGTHS}", f"a folder with {self.LENGTHS}")
        super()._check_shape(shape)

    def _count_ids(self) -> int:
        array = self._id_array
        if array is None:
            return self._num_rows
        if len(array.shape) != 1:
            problem = f"has {self.IDS} of shape {array.shape}"
            raise self._error(problem, f"a folder with {self.IDS} of shape (n,)")
        num_ids = array.shape[0]
        hashes = np.empty(num_ids, np.uint64)  # in place of the ids, to save memory
        try:
            for row in range(0, num_ids, ROWS_PER_CHECK):
                ids = self._ids(row, min(row + ROWS_PER_CHECK, num_ids))
                hashes[row : row + len(ids)] = [_hash(item_id) for item_id in ids]
        except (OSError, ValueError) as error:
            problem = f"has an unreadable {self.IDS} ({error})"
            raise self._error(problem, "a folder of npy") from None
        order = np.argsort(hashes, kind="stable")
        repeated = order[1:][hashes[order[1:]] == hashes[order[:-1]]]
        if len(repeated):
            row = int(repeated.min())
            (item_id,) = self._ids(row, row + 1)
            problem = f"has the id {item_id.decode(errors='replace')!r} more than once (row {row})"
            raise self._error(problem, f"a folder with unique ids in {self.IDS}")
        return num_ids

    def _id_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
        yield from (list(rows) for rows in ranges)

    def _ids(self, start: int, end: int) -> list[bytes]:
        array = self._id_array
        if array is None:
            return [str(row).encode() for row in range(start, end)]
        ids = array.values(start, end).tolist()
        # Unpaired surrogates are encoded, so that the item and not the file is rejected.
        return [i if isinstance(i, bytes) else str(i).encode(errors="surrogatepass") for i in ids]

    @functools.cached_property
    def _id_array(self) -> NpyArray | None:
        has_ids = self._fs.exists(f"{self._root}/{self.IDS}")
        return self._array(self.IDS, STRINGS | INTEGERS) if has_ids else None


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


class ColumnFiles:
    """Parquet or Arrow IPC files with a column of ids and a column of lists of vectors.

    A chunk is the smallest unit that can be read independently: a row group (Parquet) or a record
    batch (Arrow).
    """

    STRINGS = ("title", "text", "parent_id")

    def __init__(self, fs: AbstractFileSystem, root: str, spec: VectorsSpec):
        if spec.dim is None:
            raise SpecError("dim", None, "the width of the vectors, unless they are .npy files")
        self._fs, self._spec, self.dim = fs, spec, spec.dim
        self._single = None if fs.isdir(root) else root.rpartition("/")[2]
        self._folder = root.rpartition("/")[0] if self._single else root

    def check(self) -> None:
        """Raises `SpecError` if no file is readable, or the first readable file lacks a column."""
        problem, rule = "contains no vectors", PATH_RULE
        for file in self._names():
            rule = "files with at least one row"
            try:
                with self._open(file) as reader:
                    self._check_schema(reader.schema)
                    if any(reader.num_rows(chunk) for chunk in range(reader.num_chunks)):
                        return
                problem = "contains no rows"
            except SpecError:
                raise
            except UNREADABLE as error:
                problem = f"contains the unreadable {file} ({error})"
        raise SpecError("path", self._spec.path, rule, problem)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields runs of chunks [index, number of rows] per file. An unreadable file has none."""
        for file in self._names():
            try:
                chunks = self._chunks(file)
            except UNREADABLE:
                yield {"file": file, "row": 0, "chunks": []}  # listing the shard raises the error
                continue
            row, run = 0, []
            for chunk in chunks:
                run.append(chunk)
                num_rows = sum(n for _, n in run)
                if num_rows >= ROWS_PER_SHARD or chunk is chunks[-1]:
                    yield {"file": file, "row": row, "chunks": run}
                    row, run = row + num_rows, []

    def blocks(self, shard: dict[str, Any]) -> Iterator[Block]:
        """Yields all rows of a shard with their ids, titles, texts and parents."""
        chunks = shard["chunks"] or self._chunks(shard["file"])
        with self._open(shard["file"]) as reader:
            self._check_schema(reader.schema)
            id_column = self._spec.id_column
            strings = [n for n in self.STRINGS if n in reader.schema.names and n != id_column]
            columns = [id_column, self._spec.vectors_column, *strings]
            for chunk, _ in chunks:
                for batch in reader.batches(chunk, columns):
                    strings_by_name = {name: _bytes(batch.column(name)) for name in strings}
                    strings_by_name["id"] = _bytes(batch.column(id_column))
                    yield self._block(batch, strings_by_name)

    def vectors(self, shard: dict[str, Any], positions: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the vectors (N, D) float32 of ascending row numbers of a shard."""
        chunks = shard["chunks"] or self._chunks(shard["file"])
        first = 0
        with self._open(shard["file"]) as reader:
            for chunk, num_rows in chunks:
                wanted = _within(positions, first, first + num_rows)
                if len(wanted):
                    yield from self._chunk_vectors(reader, chunk, wanted)
                first += num_rows

    def _chunk_vectors(
        self, reader: _Parquet | _Arrow, chunk: int, positions: np.ndarray
    ) -> Iterator[np.ndarray]:
        first = 0
        for batch in reader.batches(chunk, [self._spec.vectors_column]):
            wanted = _within(positions, first, first + len(batch))
            if len(wanted):
                block = self._block(batch, {})
                for i in wanted:
                    yield block.flat_vectors(i).reshape(-1, self.dim)
            first += len(batch)
            if first > positions[-1]:
                return

    def _block(self, batch: pa.RecordBatch, strings: dict[str, list[bytes | None]]) -> Block:
        vectors = batch.column(self._spec.vectors_column)
        inner = vectors.flatten()  # without values of null lists and outside of the slice
        values = inner.flatten().to_numpy(zero_copy_only=False)  # nulls become NaN
        return Block(_lengths(vectors), _lengths(inner), _float32(values), strings)

    def _names(self) -> Iterator[str]:
        if self._single:
            if self._single.lower().endswith(PARQUET + ARROW):
                yield self._single
            return
        for file, num_bytes in walk(self._fs, self._folder):
            if file and (num_bytes is None or file.lower().endswith(PARQUET + ARROW)):
                yield file

    def _chunks(self, file: str) -> list[list[int]]:
        with self._open(file) as reader:
            return [[chunk, reader.num_rows(chunk)] for chunk in range(reader.num_chunks)]

    @contextmanager
    def _open(self, file: str) -> Iterator[_Parquet | _Arrow]:
        path = f"{self._folder}/{file}"
        check_regular(self._fs, path)
        is_local = isinstance(self._fs, LocalFileSystem)
        opened = pa.memory_map(path) if is_local else pa.PythonFile(self._fs.open(path, "rb"), "r")
        with opened as source:
            yield (_Arrow if file.lower().endswith(ARROW) else _Parquet)(source)

    def _check_schema(self, schema: pa.Schema) -> None:
        spec = self._spec
        for option in ("id_column", "vectors_column"):
            name = getattr(spec, option)
            if name not in schema.names:
                raise SpecError.unknown_name(option, name, schema.names, "is not a column")
        id_type, type = (schema.field(n).type for n in (spec.id_column, spec.vectors_column))
        if not (_is_string(id_type) or types.is_integer(id_type)):
            rule = "a column of strings or integers"
            raise SpecError("id_column", spec.id_column, rule, f"has the type {id_type}")
        is_nested = _is_list(type) and _is_list(type.value_type)
        if not is_nested or not types.is_floating(type.value_type.value_type):
            rule = "a column of lists of lists of floats"
            raise SpecError("vectors_column", spec.vectors_column, rule, f"has the type {type}")
        inner = type.value_type
        if types.is_fixed_size_list(inner) and inner.list_size != self.dim:
            raise SpecError("dim", self.dim, f"{inner.list_size}, the width of the vectors")
        for name in self.STRINGS:
            if name in schema.names and not _is_string(schema.field(name).type):
                problem = f"has a column {name} of the type {schema.field(name).type}"
                raise SpecError(
                    "path",
                    spec.path,
                    f"a file whose column {name}, if any, contains strings",
                    problem,
                )


class _Parquet:
    def __init__(self, source: pa.NativeFile):
        self._file = pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
        self.schema = self._file.schema_arrow
        self.num_chunks = self._file.num_row_groups

    def num_rows(self, chunk: int) -> int:
        return self._file.metadata.row_group(chunk).num_rows

    def batches(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        rows = min(ROWS_PER_BLOCK, VALUES_PER_BLOCK // self._values_per_row(chunk) or 1)
        return self._file.iter_batches(rows, row_groups=[chunk], columns=columns)

    def _values_per_row(self, chunk: int) -> int:
        """Returns the mean number of values per row of the largest column.

        It is checked before decoding, because a few bytes of Parquet may decode to gigabytes.
        """
        group = self._file.metadata.row_group(chunk)
        num_values = max(group.column(i).num_values for i in range(group.num_columns))
        mean = num_values // max(group.num_rows, 1)
        if mean > MAX_ITEM_VALUES:
            raise ValueError(f"must have at most {MAX_ITEM_VALUES:,} values per row, has {mean:,}")
        return max(mean, 1)


class _Arrow:
    def __init__(self, source: pa.NativeFile):
        self._file = pa.ipc.open_file(source)
        self.schema = self._file.schema
        self.num_chunks = self._file.num_record_batches

    def num_rows(self, chunk: int) -> int:
        return self._file.get_batch(chunk).num_rows

    def batches(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        batch = self._file.get_batch(chunk).select(columns)
        for column in batch.columns:
            _validate(column)
        for row in range(0, len(batch), ROWS_PER_BLOCK):
            yield batch.slice(row, ROWS_PER_BLOCK)


def _runs(positions: np.ndarray) -> Iterator[np.ndarray]:
    """Splits positions into consecutive runs of at most `ROWS_PER_BLOCK` positions."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        for start in range(0, len(run), ROWS_PER_BLOCK):
            yield run[start : start + ROWS_PER_BLOCK]


def _within(positions: Sequence[int] | np.ndarray, start: int, end: int) -> np.ndarray:
    """Selects the positions in [start, end) and makes them relative to `start`."""
    ascending = np.asarray(positions, dtype=np.int64)
    return ascending[slice(*np.searchsorted(ascending, [start, end]))] - start


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # overflows become infinite and are rejected later
        return values.astype(np.float32, copy=False)


def _validate(column: pa.Array) -> None:
    """Raises `pa.ArrowInvalid` for offsets outside of their buffers.

    Arrow does not validate files, so corrupted offsets would crash the process. Strings are checked
    as bytes, because one invalid UTF-8 string should reject its row and not the file.
    """
    plain = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    column.view(plain.get(column.type, column.type)).validate(full=True)


def _bytes(column: pa.Array) -> list[bytes | None]:
    return column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()


def _is_list(type: pa.DataType) -> bool:
    return types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type)


def _is_string(type: pa.DataType) -> bool:
    type = type.value_type if types.is_dictionary(type) else type
    return types.is_string(type) or types.is_large_string(type) or types.is_string_view(type)

"""Rows of JSON lines and of Parquet, without the pictures that tables hold.

Read with pyarrow and fsspec, not with Ray Data, also where Ray runs. To shuffle, every worker needs
the whole listing in one order; a listing without pictures is small and read in seconds. To find a
picture again, and to shuffle so that few row groups are open, the row group of each row has to be
known, and to say what is wrong its line or number: Ray Data tells neither. And what is imported
here is there on machines for training that have no Ray.
"""

from __future__ import annotations

import posixpath
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import MAX_LINE_BYTES
from pipeline.sources.files import existing_root, files_below, open_root
from pipeline.sources.text import parse_line, read_lines

LINES, TABLE = (".jsonl", ".jsonl.gz"), (".parquet",)


@dataclass(frozen=True, slots=True)
class Cell:
    """A picture in a table.

    Attributes:
        table: the URI of the file.
        group: the number of the row group.
        row: the row's number in it.
    """

    table: str
    column: str
    group: int
    row: int


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row, its location for messages, the folder of its file, and the image it holds."""

    location: str
    folder: str
    fields: dict[str, Any]
    cell: Cell | None = None


def files_of(uri: str, suffixes: tuple[str, ...], field: str = "path") -> list[str]:
    """The URIs of the files that a path, a folder or a glob means, sorted.

    Raises:
        SpecError: for `field`: there is none.
    """
    fs, root = open_root(uri)
    found = []
    try:
        if any(sign in root for sign in "*?["):
            found = sorted(path for path in fs.glob(root) if path.lower().endswith(suffixes))
        elif fs.isdir(root):
            found = [f"{root.rstrip('/')}/{file}" for file, _ in files_below(uri, suffixes)]
        elif root.lower().endswith(suffixes):
            found = [existing_root(uri)[1]]
    except SpecError as error:
        raise error.at(field) from None
    except OSError as error:
        raise SpecError(field, uri, "a readable path", f"cannot be read ({error})") from None
    if not found:
        rule = f"a file, folder or glob of {', '.join(suffixes)} files"
        raise SpecError(field, uri, rule, "matches none")
    return [fs.unstrip_protocol(path) if "://" in uri else path for path in found]


def read_rows(
    file: str, columns: Collection[str], picture: str | None = None
) -> Iterator[TableRow]:
    """Yields the rows of a file in order, with those of the columns that it has.

    Args:
        file: Path or URI of a Parquet or JSON-lines file.
        columns: Columns to read.
        picture: Column that may hold images, which are not read.

    Raises:
        SpecError: The file is corrupted; the error names `path` and the line or row.
    """
    if file.lower().endswith(TABLE):
        yield from _read_table(file, columns, picture)
    else:
        yield from _read_lines(file, columns)


def _read_lines(file: str, columns: Collection[str]) -> Iterator[TableRow]:
    folder = posixpath.dirname(file)
    compression = "gzip" if file.lower().endswith(".gz") else None
    number = 0
    try:
        with fsspec.open(file, "rb", compression=compression) as stream:
            for number, (_, line) in enumerate(read_lines(stream, 0, None), start=1):
                location = f"line {number} of {file}"
                if len(line) > MAX_LINE_BYTES:
                    rule = f"a file with lines of at most {MAX_LINE_BYTES:,} bytes"
                    raise SpecError("path", location, rule, "has more")
                if line.strip():
                    fields = _object(line, location)
                    own = {name: fields[name] for name in columns if name in fields}
                    yield TableRow(location, folder, own)
    except (OSError, EOFError) as error:
        problem = f"cannot be read after line {number} ({type(error).__name__}: {error})"
        raise SpecError("path", file, "a readable file", problem) from None


def _object(line: bytes, location: str) -> dict[str, Any]:
    try:
        fields = parse_line(line)
    except (ValueError, RecursionError) as error:
        problem = f"cannot be parsed ({error})"
        if not line.endswith(b"\n"):
            problem = "is truncated by the end of the file"
        shown = line[:60].decode("utf-8", "replace")
        raise SpecError(
            "path", shown, "one JSON object per line", problem, f" ({location})"
        ) from None
    if not isinstance(fields, dict):
        raise SpecError("path", fields, "one JSON object per line", note=f" ({location})")
    return fields


def _read_table(file: str, columns: Collection[str], picture: str | None) -> Iterator[TableRow]:
    folder, number = posixpath.dirname(file), 0
    try:
        with fsspec.open(file, "rb") as stream:
            table = pq.ParquetFile(stream)
            schema = table.schema_arrow
            names = [name for name in columns if name in schema.names]
            column = picture if picture in names else None
            if column is not None and not _holds_bytes(schema.field(column).type):
                column = None
            # Of a struct of bytes and path only the path is read.
            wanted = [f"{name}.path" if name == column else name for name in names]
            for group in range(table.num_row_groups):
                there = None if column is None else _pictures_there(table, group, column)
                rows = table.read_row_group(group, wanted)
                fields_of = rows.to_pylist() if names else [{}] * rows.num_rows
                for row, fields in enumerate(fields_of):
                    location = f"row {number} of {file}"
                    cell = None
                    if column is not None and there is not None and there[row]:
                        cell = Cell(file, column, group, row)
                    number += 1
                    yield TableRow(location, folder, fields, cell)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        problem = f"cannot be read from row {number} on ({' '.join(str(error).split())[:200]})"
        raise SpecError("path", file, "a valid Parquet file", problem) from None


def columns_of(file: str) -> list[str] | None:
    """The columns of a table; None: the file has no schema.

    Raises:
        SpecError: for `path`: it is no table.
    """
    if not file.lower().endswith(TABLE):
        return None
    try:
        with fsspec.open(file, "rb") as stream:
            return pq.ParquetFile(stream).schema_arrow.names
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"cannot be read ({' '.join(str(error).split())[:200]})"
        raise SpecError("path", file, "a valid Parquet file", problem) from None


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return _is_bytes(kind)


def _pictures_there(table: pq.ParquetFile, group: int, picture: str) -> list[bool]:
    """Which rows of a group hold a picture: of the statistics, if they say that all do."""
    about = table.metadata.row_group(group)
    for number in range(about.num_columns):
        column = about.column(number)
        if column.path_in_schema in (picture, f"{picture}.bytes") and column.is_stats_set:
            statistics = column.statistics
            if statistics.has_null_count and statistics.null_count == 0:
                return [True] * about.num_rows
    return [data is not None for data, _ in _values(table.read_row_group(group, [picture])[0])]


def _values(column: pa.ChunkedArray) -> Iterator[tuple[Any, str | None]]:
    """(bytes, path) of each row, bytes as Arrow's scalars, None where there are none."""
    is_struct = pa.types.is_struct(column.type)
    for value in column:
        if is_struct and value.is_valid:
            data = value["bytes"]
            path = value["path"].as_py() if "path" in value else None
            yield (data if data.is_valid else None), path
        else:
            yield (value if value.is_valid and not is_struct else None), None


class Cells:
    """Reads pictures out of tables; the row groups that were read last stay in memory.

    Args:
        groups: how many.
    """

    def __init__(self, groups: int):
        self._groups = groups
        self._kept: OrderedDict[tuple[str, str, int], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()  # quality is measured while the next batch is read

    def read(self, cell: Cell) -> bytes:
        """The bytes of a picture.

        Raises:
            Unreadable: there are none, or the table is damaged.
            OSError: of the storage.
        """
        with self._lock:
            key = (cell.table, cell.column, cell.group)
            if key not in self._kept:
                self._kept[key] = self._read_group(cell)
                while len(self._kept) > self._groups:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            column = self._kept[key]
        data, _ = next(_values(column.slice(cell.row, 1)))
        if data is None:
            raise Unreadable("no image", f"row {cell.row} of row group {cell.group}")
        return data.as_py()

    def _read_group(self, cell: Cell) -> pa.ChunkedArray:
        try:
            with fsspec.open(cell.table, "rb") as stream:
                return pq.ParquetFile(stream).read_row_group(cell.group, [cell.column])[0]
        except (pa.ArrowException, ValueError) as error:
            raise Unreadable("damaged table", f"{type(error).__name__}: {error}") from None

"""Reads the rows of JSON lines and Parquet files, without the images that tables contain.

Files are read with pyarrow and fsspec instead of Ray Data. To shuffle the data, each worker needs
the complete listing in the same order. Without images, the listing is small and can be read in
seconds. The row group of each row must be known to read its image, and to shuffle with only a few
open row groups. Errors should contain the line or row. Ray Data does not provide this information,
and Ray may not be installed on training machines.
"""

from __future__ import annotations

import glob
import posixpath
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from pipeline.config import SpecError, reading
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import MAX_LINE_BYTES, buffered
from pipeline.data.files import existing_root, find_files, open_root
from pipeline.data.rows import to_rows
from pipeline.data.text import parse_line, read_lines
from pipeline.paths import is_uri, open_file

LINES, TABLE = (".jsonl", ".jsonl.gz"), (".parquet",)


@dataclass(frozen=True, slots=True)
class ImageCell:
    """Image in a table."""

    table: str
    column: str
    group: int
    row: int


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """Image, video or audio in an uncompressed archive.

    Attributes:
        offset: Position of the first byte.
    """

    archive: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}#{self.offset}"

    def read(self) -> bytes:
        """Returns the bytes of the member.

        Raises:
            Unreadable: The archive is truncated.
            OSError: Reading from the storage failed.
        """
        with open_file(self.archive) as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise Unreadable("truncated archive", f"{self.archive} at byte {self.offset}")
        return data


@dataclass(frozen=True, slots=True)
class TableRow:
    """Row of a file.

    Attributes:
        location: Line or row and file, for messages.
        fields: Values of the columns that were read, without images.
    """

    location: str
    folder: str
    fields: dict[str, Any]
    cell: ImageCell | None = None


def list_files(uri: str, suffixes: tuple[str, ...], field: str = "path") -> list[str]:
    """Returns the URIs of the files that match a path, a folder or a glob in sorted order."""
    fs, root = open_root(uri, field)
    found = []
    with reading(field, uri, "a readable path"):
        if glob.has_magic(root) and not fs.exists(root):
            found = sorted(path for path in _glob(fs, root) if path.lower().endswith(suffixes))
        elif fs.isdir(root):
            found = [f"{root.rstrip('/')}/{file}" for file, _ in find_files(uri, suffixes)]
        elif root.lower().endswith(suffixes):
            found = [existing_root(uri, field)[1]]
    if not found:
        rule = f"a file, folder or glob of {', '.join(suffixes)} files"
        raise SpecError(field, uri, rule, "matches none")
    return [fs.unstrip_protocol(path) if is_uri(uri) else path for path in found]


def _glob(fs: AbstractFileSystem, pattern: str) -> list[str]:
    """Returns the paths that match a pattern. Its leading folders that exist are no pattern."""
    folder = posixpath.dirname(pattern)
    while glob.has_magic(folder) and not fs.isdir(folder):
        folder = posixpath.dirname(folder)
    found: list[str] = fs.glob(glob.escape(folder) + pattern[len(folder) :])
    return found


def read_rows(
    file: str, columns: Collection[str] | None = None, image_column: str | None = None
) -> Iterator[TableRow]:
    """Yields the rows of a Parquet or JSON-lines file in order, without reading images."""
    if file.lower().endswith(TABLE):
        yield from _read_table(file, columns, image_column)
    else:
        yield from _read_lines(file, columns)


def _read_lines(file: str, columns: Collection[str] | None) -> Iterator[TableRow]:
    folder = posixpath.dirname(file)
    compression = "gzip" if file.lower().endswith(".gz") else None
    number = 0
    try:
        with open_file(file, compression=compression) as opened:
            stream = buffered(opened)
            for number, (_, line) in enumerate(read_lines(stream, 0, None), start=1):
                location = f"line {number} of {file}"
                if len(line) > MAX_LINE_BYTES:
                    rule = f"a file with lines of at most {MAX_LINE_BYTES:,} bytes"
                    raise SpecError("path", location, rule, "is longer")
                if line.strip():
                    fields = _object(line, location)
                    if columns is not None:
                        fields = {name: fields[name] for name in columns if name in fields}
                    yield TableRow(location, folder, fields)
    except (OSError, EOFError) as error:
        problem = f"cannot be read after line {number} ({type(error).__name__}: {error})"
        raise SpecError("path", file, "a readable file", problem) from None


def _object(line: bytes, location: str) -> dict[str, Any]:
    problem = None
    try:
        fields = parse_line(line)
        if isinstance(fields, dict):
            return fields
    except (ValueError, RecursionError) as error:
        problem = f"cannot be parsed ({error})"
        if not line.endswith(b"\n"):
            problem = "is truncated by the end of the file"
    shown = line[:60].decode("utf-8", "replace")
    raise SpecError("path", shown, "one JSON object per line", problem, f" ({location})")


def _read_table(
    file: str, columns: Collection[str] | None, image_column: str | None
) -> Iterator[TableRow]:
    folder, number = posixpath.dirname(file), 0
    try:
        with open_file(file) as stream:
            table = pq.ParquetFile(stream)
            schema = table.schema_arrow
            wanted_names = schema.names if columns is None else columns
            names = [name for name in wanted_names if name in schema.names]
            column = image_column if image_column in names else None
            if column is not None and not _holds_bytes(schema.field(column).type):
                column = None
            # Only the path is read of a struct of bytes and path.
            wanted = [f"{name}.path" if name == column else name for name in names]
            for group in range(table.num_row_groups):
                has_image = None if column is None else _has_image(table, group, column)
                rows = table.read_row_group(group, wanted)
                fields_per_row = to_rows(rows) if names else [{}] * rows.num_rows
                for row, fields in enumerate(fields_per_row):
                    location = f"row {number} of {file}"
                    cell = None
                    if column is not None and has_image is not None and has_image[row]:
                        cell = ImageCell(file, column, group, row)
                    number += 1
                    yield TableRow(location, folder, fields, cell)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        problem = f"cannot be read from row {number} on ({' '.join(str(error).split())[:200]})"
        raise SpecError("path", file, "a valid Parquet file", problem) from None


def table_columns(file: str) -> list[str] | None:
    """Returns the columns of a Parquet file, or None if a file has no schema."""
    if not file.lower().endswith(TABLE):
        return None
    errors = (pa.ArrowException, ValueError)
    with reading("path", file, "a valid Parquet file", *errors), open_file(file) as stream:
        return pq.ParquetFile(stream).schema_arrow.names


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return _is_bytes(kind)


def _has_image(table: pq.ParquetFile, group: int, image_column: str) -> list[bool]:
    """Returns which rows of a group have an image, from the statistics if possible."""
    metadata = table.metadata.row_group(group)
    for number in range(metadata.num_columns):
        column = metadata.column(number)
        paths = (image_column, f"{image_column}.bytes")
        if column.path_in_schema in paths and column.is_stats_set:
            statistics = column.statistics
            if statistics.has_null_count and statistics.null_count == 0:
                return [True] * metadata.num_rows
    images = table.read_row_group(group, [image_column])[0]
    return [data is not None for data, _ in _values(images)]


def _values(column: pa.ChunkedArray) -> Iterator[tuple[Any, str | None]]:
    """Yields the bytes of each row as an Arrow scalar, and its path, or None where missing."""
    is_struct = pa.types.is_struct(column.type)
    for value in column:
        if is_struct and value.is_valid:
            data = value["bytes"]
            path = value["path"].as_py() if "path" in value else None
            yield (data if data.is_valid else None), path
        else:
            yield (value if value.is_valid and not is_struct else None), None


class ImageReader:
    """Reader of images in tables. The row groups that were used last are cached."""

    def __init__(self, groups: int):
        self._groups = groups
        self._cache: OrderedDict[tuple[str, str, int], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()  # validation runs while the next batch is read

    def read(self, cell: ImageCell) -> bytes:
        """Returns the bytes of an image.

        Raises:
            Unreadable: The cell is empty, or the table is corrupted.
            OSError: Reading from the storage failed.
        """
        with self._lock:
            key = (cell.table, cell.column, cell.group)
            if key not in self._cache:
                self._cache[key] = self._read_group(cell)
                while len(self._cache) > self._groups:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
            column = self._cache[key]
        data, _ = next(_values(column.slice(cell.row, 1)))
        if data is None:
            raise Unreadable("no image", f"row {cell.row} of row group {cell.group}")
        return data.as_py()

    def _read_group(self, cell: ImageCell) -> pa.ChunkedArray:
        try:
            with open_file(cell.table) as stream:
                return pq.ParquetFile(stream).read_row_group(cell.group, [cell.column])[0]
        except (pa.ArrowException, ValueError) as error:
            raise Unreadable("corrupted table", f"{type(error).__name__}: {error}") from None

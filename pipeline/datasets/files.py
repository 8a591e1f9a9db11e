"""Reads annotation files of published data sets: JSON, CSV with a header, and Parquet."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from pipeline.config import SpecError, describe, reading
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import open_file
from pipeline.data.files import existing_root, walk
from pipeline.data.rows import to_rows
from pipeline.data.text import parse_line
from pipeline.schema import is_blank

TABLE_SUFFIX = ".parquet"
#: Number of table rows in memory at the same time.
ROWS_PER_BATCH = 64


def read_json(uri: str, field: str, kind: Any = Any, rule: str = "a JSON file") -> Any:
    """Parses a JSON file.

    Args:
        uri: Path or URI of the file.
        field: Spec field that errors name.
        kind: Type of the content, which pydantic validates.
        rule: Description of the content, for errors.

    Raises:
        SpecError: The file is missing, malformed or has another content. The error names the line
            or the field.
    """
    data = read_file(uri, field)
    try:
        return TypeAdapter(kind).validate_python(parse_line(data))
    except json.JSONDecodeError as error:
        problem = f"is malformed in line {error.lineno}, column {error.colno} ({error.msg})"
        is_open = error.msg.startswith("Unterminated string")
        if is_open or not error.doc[error.pos :].strip():
            problem = f"ends in the middle of line {error.lineno}"
    except ValidationError as error:
        problem = f"has another format ({describe(error.errors(), 'the file')})"
    except (ValueError, RecursionError) as error:
        problem = f"cannot be parsed ({error})"
    raise SpecError(field, uri, rule, problem)


def read_file(uri: str, field: str) -> bytes:
    """Returns the content of a file. A `SpecError` names the field if it cannot be read."""
    fs, path = existing_root(uri, field)
    with reading(field, uri, "a readable file"):
        return fs.cat_file(path)


def check_text(text: Any, field: str, location: str) -> str:
    """Returns a text that is not blank, or raises a `SpecError` that names field and location."""
    if not isinstance(text, str) or is_blank(text):
        raise SpecError(field, text, "a text with at least one word", note=f" ({location})")
    return text


def read_csv(
    uri: str, columns: Collection[str], field: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the location and the given columns of each row of a CSV file with a header.

    Raises:
        SpecError: For `field`: the file is missing or malformed, or lacks a column.
    """
    data = read_file(uri, field)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(field, uri, "a UTF-8 file", f"is malformed in line {line}") from None
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
        _check_columns(field, columns, header, uri)
        for row in filter(None, rows):
            location = f"line {rows.line_num} of {uri}"
            if len(row) != len(header):
                shown = ", ".join(header)
                raise SpecError(field, row, f"a row of {shown}", note=f" ({location})")
            values = dict(zip(header, row, strict=True))
            yield location, {column: values[column] for column in columns}
    except csv.Error as error:
        problem = f"is malformed in line {rows.line_num} ({error})"
        raise SpecError(field, uri, "a valid CSV file", problem) from None


def read_table(
    uri: str, columns: Sequence[str], field: str, *, images: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the location and the columns of the rows of Parquet files, a few rows at a time.

    `uri` is a file or a folder of files. All columns are yielded, `image` only with `images`.

    Raises:
        SpecError: For `field`: a file is missing or malformed, or lacks a required column.
    """
    fs, root = existing_root(uri, field)
    paths = [root]
    if fs.isdir(root):
        names = sorted(name for name, _ in walk(fs, root) if name.lower().endswith(TABLE_SUFFIX))
        paths = [posixpath.join(root, name) for name in names]
    if not paths:
        rule = f"a {TABLE_SUFFIX} file or a folder of such files"
        raise SpecError(field, uri, rule, "contains no such file")
    number = 0
    for path in paths:
        errors = (pa.ArrowException, Unreadable)
        with reading(field, path, "a Parquet file", *errors), open_file(fs, path) as stream:
            table = pq.ParquetFile(stream)
            names = table.schema_arrow.names
            _check_columns(field, columns, names, path)
            wanted = [name for name in names if images or name != "image"]
            for batch in table.iter_batches(ROWS_PER_BATCH, columns=wanted):
                for row in to_rows(batch):
                    yield f"row {number} of {uri}", row
                    number += 1


def _check_columns(field: str, columns: Collection[str], names: Collection[str], path: str) -> None:
    """Raises `SpecError` if one of the columns is not in a file."""
    for column in columns:
        if column not in names:
            raise SpecError.unknown_name(field, column, names, f"is not a column of {path}")


def check_number(field: str, expected: int | None, found: int, what: str) -> None:
    """Raises `SpecError` if a data set has another size than expected; None accepts any."""
    if expected is not None and found != expected:
        rule = f"the number of {what} of the data set ({found:,})"
        raise SpecError(field, expected, rule, "differs from it")

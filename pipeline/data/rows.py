"""Converts rows of Arrow tables to Python values."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import types


def to_rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows of a table. Dates, durations and times that Python lacks become texts.

    Raises:
        ValueError: A text is not UTF-8.

    >>> to_rows(pa.table({"day": pa.array([0, 3_000_000], pa.date32())}))
    [{'day': datetime.date(1970, 1, 1)}, {'day': '10183-09-21'}]
    """
    columns = [_to_list(column) for column in table.columns]
    rows = zip(*columns, strict=True) if columns else [()] * table.num_rows
    return [dict(zip(table.column_names, row, strict=True)) for row in rows]


def _to_list(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()
    except (OverflowError, ValueError):
        return [_to_value(scalar) for scalar in column]


def _to_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        type = scalar.type
        if types.is_temporal(type):
            return _to_text(scalar)
        if types.is_map(type):  # its entries are structs
            return [tuple(_to_value(entry).values()) for entry in scalar.values]
        if types.is_struct(type):
            return {field.name: _to_value(scalar[i]) for i, field in enumerate(type)}
        if hasattr(scalar, "values"):
            return [_to_value(value) for value in scalar.values]
        if types.is_dictionary(type) or isinstance(type, pa.BaseExtensionType):
            return _to_value(scalar.value)
        raise


def _to_text(scalar: pa.Scalar) -> str:
    if types.is_duration(scalar.type):
        return f"{scalar.value} {scalar.type.unit}"
    try:
        return scalar.cast(pa.string()).as_py()
    except pa.ArrowInvalid:  # an unknown time zone; the stored time is UTC
        return f"{scalar.cast(pa.timestamp(scalar.type.unit)).cast(pa.string()).as_py()}Z"

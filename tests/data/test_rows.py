"""Values of Arrow tables that Python cannot represent."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.manifests import to_json_value
from pipeline.data.rows import to_rows
from pipeline.train.data.tables import read_rows

LAST = 2**63 - 1
FAR = 253_402_300_800  # seconds from 1970 to the year 10000
CASES = [
    (pa.timestamp("s"), FAR, "10000-01-01 00:00:00"),
    (pa.timestamp("ms"), FAR * 10**3, "10000-01-01 00:00:00.000"),
    (pa.timestamp("us"), FAR * 10**6, "10000-01-01 00:00:00.000000"),
    (pa.timestamp("us"), -62_135_596_801 * 10**6, "0000-12-31 23:59:59.000000"),
    (pa.timestamp("us"), LAST, f"<value out of range: {LAST}>"),
    (pa.timestamp("s"), LAST, f"<value out of range: {LAST}>"),
    (pa.timestamp("us", "Mars/Phobos"), 5, "1970-01-01 00:00:00.000005Z"),
    (pa.timestamp("ns", "Mars/Phobos"), 5, "1970-01-01 00:00:00.000000005Z"),
    (pa.timestamp("us", "UTC"), FAR * 10**6, "10000-01-01 00:00:00.000000Z"),
    (pa.date32(), 2_932_897, "10000-01-01"),
    (pa.date64(), FAR * 10**3, "10000-01-01"),
    (pa.duration("s"), LAST, f"{LAST} s"),
]


def array(type: pa.DataType, value: int) -> pa.Array:
    """Returns an array with a valid value, the given value and null."""
    integer = pa.int32() if type.bit_width == 32 else pa.int64()
    return pa.array([0, value, None], integer).view(type)


@pytest.mark.parametrize(("type", "value", "text"), CASES, ids=lambda case: str(case)[:30])
def test_values_beyond_python_become_texts(type, value, text):
    values = array(type, value)
    nested = pa.StructArray.from_arrays([values, pa.array(["a", "b", "c"])], names=["time", "name"])
    table = {
        "time": values,
        "struct": nested,
        "list": pa.ListArray.from_arrays([0, 1, 2, 3], values),
        "structs": pa.FixedSizeListArray.from_arrays(nested, 1),
        "map": pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["k"] * 3), values),
        "category": values.dictionary_encode(),
        "number": pa.array([1, 2, 3]),
    }
    rows = to_rows(pa.table(table))
    assert rows[1] == {
        "time": text,
        "struct": {"time": text, "name": "b"},
        "list": [text],
        "structs": [{"time": text, "name": "b"}],
        "map": [("k", text)],
        "category": text,
        "number": 2,
    }
    assert rows[2]["time"] is None and rows[2]["list"] == [None] and rows[2]["number"] == 3
    assert isinstance(rows[0]["time"], str) == ("Mars" in str(type))
    json.dumps(to_json_value(rows))


def test_other_values_are_those_of_arrow():
    values = {
        "day": [datetime.date(2026, 1, 2), None],
        "time": [datetime.datetime(2026, 1, 2, 3), None],
        "price": [decimal.Decimal("1.50"), None],
        "clock": [datetime.time(1, 2), None],
        "nested": [{"a": [1, None]}, {"a": []}],
        "bytes": [b"\xff", b""],
    }
    assert to_rows(pa.table(values)) == pa.table(values).to_pylist()
    assert to_rows(pa.table({"a": [1, 2]}).select([])) == [{}, {}]
    with pytest.raises(ValueError, match="utf-8"):
        to_rows(pa.table({"text": pa.array([b"\xff"]).view(pa.string())}))


def test_far_dates_in_training_data(tmp_path):
    taken = pa.array([0, FAR * 10**6], pa.timestamp("us"))
    pq.write_table(pa.table({"query": ["a", "b"], "taken": taken}), tmp_path / "pairs.parquet")
    rows = list(read_rows(str(tmp_path / "pairs.parquet"), ["query", "taken"]))
    assert [row.fields["query"] for row in rows] == ["a", "b"]

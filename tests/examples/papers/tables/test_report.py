"""Tables of reproduced numbers."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
from scipy import stats

from examples.papers.tables.report import (
    Number,
    TableRow,
    correlations,
    pearson,
    text_table,
    write,
)
from tests.examples.papers.tables.tables import table

ROWS = [
    TableRow("full", [50.04, None], [50.0, 60]),
    TableRow("hpool", [41.26, 1.0], [40.25, math.nan]),
]

ORIGIN = {
    "data": {"one": {}, "two": {"owner/two": "abc"}},
    "weights": [{"name": "minilm", "model": "bundled", "fingerprint": "0123"}],
    "seeds": {"train": [0, 1]},
    "hardware": ["a processor"],
    "versions": {"torch": "2"},
}


def test_text_has_the_decimals_of_the_paper():
    lines = text_table(["average R@1", "one R@1"], ROWS).splitlines()
    assert lines[0].split("  ")[-1] == "difference"
    assert lines[1].split() == ["full", "50.04", "50.00", "+0.04", "-", "60.0", "-"]
    assert lines[2].split() == ["hpool", "41.26", "40.25", "+1.01", "1.0", "-", "-"]


def test_many_columns_are_divided_into_blocks():
    row = TableRow("full", [1.0] * 6, [1.0] * 6)
    text = text_table([f"m{i}" for i in range(6)], [row])
    assert len(text.split("\n\n")) == 2 and "m4 ours" in text.split("\n\n")[1]


@pytest.mark.parametrize("is_miniature", [False, True])
def test_files(tmp_path, is_miniature):
    spec = table(notes=["Something is omitted."])
    numbers = [[Number(value, (value - 1, value + 1)) for value in row.values[:1]] for row in ROWS]
    numbers = [[*of_row, Number(row.values[1])] for of_row, row in zip(numbers, ROWS, strict=True)]
    problems = ["Failed: index out: it is full"]
    written = write(spec, ROWS, numbers, str(tmp_path), is_miniature, ORIGIN, problems)
    text, paths = written
    assert "average R@1 ours            95 %  paper" in text and "49.04 to 51.04" in text
    assert "Failed: index out: it is full" in text and "Versions: torch 2" in text
    assert ("MINIATURE" in text) == is_miniature and "Note: Something is omitted." in text
    assert [path.rpartition("/")[2] for path in paths] == [
        "table.txt",
        "table.csv",
        "table.json",
        "table.png",
    ]
    rows = list(csv.DictReader((tmp_path / "table.csv").open(encoding="utf-8")))
    assert len(rows) == 4 and float(rows[2]["difference"]) == pytest.approx(1.01)
    assert rows[1]["ours"] == "" and rows[3]["paper"] == ""
    data = json.loads((tmp_path / "table.json").read_text("utf-8"))
    assert data["miniature"] is is_miniature
    hpool = data["rows"][1]
    assert hpool["values"] == [41.26, 1.0] and hpool["paper"] == [40.25, None]
    assert hpool["intervals"] == [[40.26, 42.26], None] and data["problems"] and data["provenance"]
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_pearson_equals_scipy():
    first, second = np.random.default_rng(0).normal(size=(2, 7))
    assert pearson(first, second) == pytest.approx(stats.pearsonr(first, second).statistic)
    assert math.isnan(pearson(first, np.ones(7)))


def test_correlations_with_inverses():
    columns = [{"dataset": ["one"], "measure": ["R@1", "CV"]}]
    rows = [{"label": str(i), "at": {"method": "full"}, "paper": [i, math.nan]} for i in range(3)]
    spec = table(
        columns=columns,
        rows=rows,
        correlation={"measures": ["CV"], "inverse": True, "paper": {"R@1": [0.5]}},
    )
    measured = [TableRow(str(cv), [1 / cv, cv], [None, None]) for cv in (1.0, 2.0, 5.0)]
    titles, found = correlations(spec, measured)
    assert titles == ["r with 1 / CV"] and found[0].label == "R@1" and found[0].paper == [0.5]
    assert found[0].values[0] == pytest.approx(1.0)
    assert correlations(table(), ROWS) == ([], [])
    # All columns count; missing numbers do not.
    columns = [{"dataset": ["both", "one"], "measure": ["R@1", "CV"]}]
    rows = [{**row, "paper": [1.0] * 4} for row in rows[:2]]
    correlation = {"measures": ["CV"], "paper": {"R@1": [0.5]}}
    spec = table(columns=columns, rows=rows, correlation=correlation)
    pairs = [[1.0, 2.0, 3.0, 5.0], [7.0, None, 4.0, 8.0]]
    titles, found = correlations(spec, [TableRow("", row, [None] * 4) for row in pairs])
    assert titles == ["r with CV"]
    assert found[0].values[0] == pytest.approx(stats.pearsonr([1, 3, 4], [2, 5, 8]).statistic)

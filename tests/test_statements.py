"""Statements about quality in the documentation agree with the tables in the repository."""

from __future__ import annotations

import csv
import re

import pytest

from pipeline.defaults import CODEC, COMPRESSOR, SCORE
from tests.documentation import ROOT

#: Labels of methods in tables of PDF pages and abstracts, and their names in the tables of results.
LABELS = {
    "uncompressed": "uncompressed",
    "attention clustering": "attention_clustering",
    "k-centre": "kcenter",
    "SaMer": "samer",
    "H-Pool": "hpool",
    "SAP": "sap",
    "SAP (pruning)": "sap",
    "spatial": "spatial",
}


def cells(text: str) -> list[list[str]]:
    """Returns the cells of the rows of all Markdown tables."""
    rows = re.findall(r"^\|(.+)\|$", text, re.M)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


@pytest.mark.parametrize("page", ["README.md", "docs/results/quality.md"])
def test_rows_of_pages_equal_the_table_of_methods(page):
    measured = {}
    with (ROOT / "examples/papers/notes/methods-pages.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["method"].strip("`"), row["K"]
            measured[key] = [row[name].strip("*") for name in ("vectors/item", "B/item", "nDCG@10")]
    with (ROOT / "examples/papers/notes/kcenter.csv").open() as file:
        for row in csv.DictReader(file):
            if row["collection"] == "pages":
                sizes = measured["hpool", row["K"]][:2] if ("hpool", row["K"]) in measured else []
                value = re.sub(r" \[.*", "", row["`kcenter`"]).strip("*")
                measured["kcenter", row["K"]] = [*sizes, value]
    checked = 0
    for row in cells((ROOT / page).read_text()):
        label, _, budget = row[0].partition(", K = ")
        if len(row) == 6 and label in LABELS and (budget or label == "uncompressed"):
            assert row[1:4] == measured[LABELS[label], budget or "all"], row
            checked += 1
    assert checked > 5


@pytest.fixture(scope="module")
def study() -> dict[str, dict[str, float]]:
    """Columns of docs/results/defaults.csv; their rows are named `collection row`."""
    columns: dict[str, dict[str, float]] = {}
    with (ROOT / "docs/results/defaults.csv").open() as file:
        for row in csv.DictReader(file):
            name = f"{row.pop('collection')} {row.pop('row')}"
            for column, value in row.items():
                columns.setdefault(column, {})[name] = float(value or "nan")
    return columns


def test_rows_of_the_study_equal_its_table(study):
    collection, checked = "", 0
    for name, *row in cells((ROOT / "docs/results/defaults.md").read_text()):
        if row[0] == "bytes per item":
            collection = name
        elif collection and name.startswith("`"):
            key = f"{collection} {name.strip('`')}"
            choose = study["choose"][key]
            expected = [f"{study['bytes'][key]:,.0f}", f"{choose:.3f}" if choose == choose else ""]
            expected += [f"{study['prove'][key]:.3f}"]
            expected += [f"{study['low'][key]:+.3f} to {study['high'][key]:+.3f}"]
            assert row == expected, key
            checked += 1
    assert checked > 10


DEFAULT = f"{COMPRESSOR['name']}_{COMPRESSOR['num_vectors']}_{CODEC}.{SCORE}"

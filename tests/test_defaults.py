"""Statements about quality in the documentation agree with the tables in the repository."""

from __future__ import annotations

import csv
import re
from pathlib import Path

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
        elif collection and re.fullmatch(r"`[\w.]+`", name):
            key = f"{collection} {name.strip('`')}"
            choose = study["choose"][key]
            expected = [f"{study['bytes'][key]:,.0f}", f"{choose:.3f}" if choose == choose else ""]
            expected += [f"{study['prove'][key]:.3f}"]
            expected += [f"{study['low'][key]:+.3f} to {study['high'][key]:+.3f}"]
            assert row == expected, key
            checked += 1
        elif not name.startswith("-"):  # the heading of another table
            collection = ""
    assert checked > 10


DEFAULT = f"passages {COMPRESSOR['name']}_{COMPRESSOR['num_vectors']}_{CODEC}.{SCORE}"
FULL = "passages full_int8.maxsim"
#: Sentences by page, with the values of the study in place of numbers.
STATEMENTS = {
    "README.md": [
        "{default} k-centre vectors has an nDCG@10 of {quality}, the uncompressed "
        "vectors {full}, and eight vectors lose {eight} points",
        "Of titles that search longer abstracts, {default} vectors lose {titles} points",
    ],
    "docs/tutorials/choosing.md": [
        "{default} vectors per item by `kcenter` as int8, {quality} in nDCG@10",
        "they lose {bit} points at {share} % of the bytes",
        "of titles that search abstracts, {default} vectors lose {titles} points",
    ],
    "docs/results/index.md": [
        "{default} vectors per passage, the [default](defaults.md), lose nothing on 1,182 queries "
        "that nobody tuned on: {quality} instead of {full}.",
        "One bit costs {bit_of_four} points of four vectors",
        "on titles of abstracts ({default} vectors lose {titles} points)",
    ],
    "docs/results/quality.md": [
        "one bit costs {bit} points of {default} vectors and {bit_of_four} of four"
    ],
    "docs/results/collection.md": ["lose {sixteen} points on [*choose*]"],
    "docs/results/defaults.md": [
        "The rule chooses `kcenter_{default}_int8.maxsim`",
        "**{default} vectors lose {titles} points of titles**",
        "{quality} instead of {full} on `prove`",
        "**16 merged vectors lose {sixteen} points on `choose`**",
        "**One bit costs {bit} points of {default} vectors** (-0.2 to 0.8), but {bit_of_four} of",
        "`kcenter_32_bits_1` needs {small} bytes instead of {large}.",
    ],
}


@pytest.mark.parametrize("page", STATEMENTS)
def test_statements_equal_the_table_of_the_study(page, study):
    def lost(row: str, other: str, half: str = "prove", collection: str = "passages") -> str:
        values = study[half]
        return f"{100 * (values[f'{collection} {other}'] - values[f'{collection} {row}']):.1f}"

    large, small = study["bytes"][DEFAULT], study["bytes"]["passages kcenter_32_bits_1.maxsim"]
    values = {
        "default": COMPRESSOR["num_vectors"],
        "quality": f"{study['prove'][DEFAULT]:.3f}",
        "full": f"{study['prove'][FULL]:.3f}",
        "eight": lost("kcenter_8_int8.maxsim", "full_int8.maxsim"),
        "sixteen": lost("kcenter_16_int8.maxsim", "full_int8.maxsim", "choose"),
        "titles": lost("kcenter_32_int8.maxsim", "full_int8.maxsim", collection="titles"),
        "bit": lost("kcenter_32_bits_1.maxsim", "kcenter_32_int8.maxsim"),
        "bit_of_four": lost("kcenter_4_bits_1.maxsim", "kcenter_4_int8.maxsim"),
        "share": f"{100 * small / large:.0f}",
        "small": f"{small:,.0f}",
        "large": f"{large:,.0f}",
    }
    text = " ".join((ROOT / page).read_text().split())
    for statement in STATEMENTS[page]:
        assert statement.format(**values) in text


#: Value of a metric in a sentence. Fractions of fewer digits are mostly settings.
VALUE = re.compile(r"(?<![\d.])0\.\d{3}(?!\d|\.\d)")
NOTES = ROOT / "examples/papers/notes"
#: Values in sentences that are not results, or that are sums of the numbers of a table.
OTHERS = {
    "docs/reference/training.md": {"0.005"},
    "docs/results/collection.md": {"0.025"},
    "docs/results/efficiency.md": {"0.115"},
    "docs/results/quality.md": {"0.967"},
}


def test_values_in_sentences_are_in_a_table():
    missing, checked = {}, 0
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        text = path.read_text()
        sentences = re.sub(r"^```.*?^```|^\|.*?$", "", text, flags=re.M | re.S)
        blocks = re.findall(r"^```.*?^```|^\|.*?$", text, flags=re.M | re.S)
        linked = [path.parent / name for name in re.findall(r"\]\(([^)#\s]+\.(?:md|csv))", text)]
        linked += [NOTES / Path(name).name for name in re.findall(r"`([\w/-]+\.md)`", text)]
        known = "\n".join([*blocks, *(_values(file) for file in linked if file.exists())])
        found = set(VALUE.findall(sentences))
        checked += len(found)
        page = str(path.relative_to(ROOT))
        if unknown := {value for value in found if value not in known} - OTHERS.get(page, set()):
            missing[page] = sorted(unknown)
    assert missing == {} and checked > 70


def _values(path: Path) -> str:
    """Returns the text of a page or table, with values of three digits."""
    return re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", path.read_text())

"""Validation of the specs of tables."""

from __future__ import annotations

import re

import pytest
import yaml

from examples.papers.tables.spec import filled, load_data_sets, load_table, papers
from examples.papers.verbs.run import PAPERS
from pipeline.config import SpecError
from tests.examples.papers.tables.tables import fields, table

KNOWN = [(paper, name) for paper, tables in papers(PAPERS).items() for name in tables]


def test_cells_of_groups_and_placeholders():
    spec = table()
    average, one = spec.selections()
    full, hpool = spec.rows
    both = list(spec.cells(full, average))
    assert [values["dataset"] for values, _ in both] == ["one", "two"]
    assert {values["run"] for values, _ in both} == {"full"}
    ((values, selection),) = spec.cells(hpool, one)
    assert values["run"] == "hpool_8" and selection["representation"] == "hpool_8"
    ((values, selection),) = spec.cells(hpool, one, miniature=True)
    assert values["run"] == "hpool_2" and selection["representation"] == "hpool_2"
    assert len(list(spec.cells(full, average, miniature=True))) == 1
    assert spec.column_titles() == ["average R@1", "one R@1"]


FULL = {"label": "full", "at": {"method": "full"}, "paper": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [{**FULL, "paper": [1.0]}]}, "rows[0].paper must be a list of 2 numbers"),
        ({"rows": [{**FULL, "at": {"method": "full", "x": "1"}}]}, "rows[0].at must be one of"),
        ({"rows": [{**FULL, "at": {"method": "ful"}}]}, "did you mean 'full'?"),
        ({"rows": [{**FULL, "at": {}}]}, "has the variable 'method'"),
        ({"columns": [{"dataset": ["both", "one"]}]}, "has a measure"),
        ({"steps": {}}, "a mapping that ends with an evaluate or latency step"),
        ({"x": "method"}, "x must be one of dataset, R@1, got 'method'"),
        ({"miniature": {"steps": {"indexes": {}}}}, "did you mean 'index'?"),
        ({"row": []}, "unknown field 'row'; did you mean 'rows'?"),
        (
            {"correlation": {"measures": ["CV"], "paper": {"R@1": [0.5]}}},
            "correlation must be 'R@1', got 'CV'",
        ),
    ],
)
def test_invalid_tables(changes, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        table(**changes)


def test_unknown_papers_and_tables_list_the_known_ones(tmp_path):
    (tmp_path / "agc").mkdir()
    for name in ("figure2", "table1", "table2", "table10", "_base"):
        (tmp_path / f"agc/{name}.yaml").write_text(
            yaml.safe_dump(fields(), sort_keys=False), "utf-8"
        )
    assert papers(tmp_path) == {"agc": ["table1", "table2", "table10", "figure2"]}
    assert load_table(tmp_path, "agc", "table10").title == "A table"
    with pytest.raises(SpecError, match="PAPER must be 'agc', got 'acg'"):
        load_table(tmp_path, "acg", "table1")
    with pytest.raises(SpecError, match="TABLE must be one of table1, table2, table10, figure2"):
        load_table(tmp_path, "agc", "table3")


def test_base_of_a_table(tmp_path):
    (tmp_path / "agc").mkdir()
    (tmp_path / "agc/_base.yaml").write_text(yaml.safe_dump(fields(), sort_keys=False), "utf-8")
    fields_of_table = {"base": "_base.yaml", "title": "Another", "labels": {"one": "first"}}
    (tmp_path / "agc/table1.yaml").write_text(yaml.safe_dump(fields_of_table), "utf-8")
    spec = load_table(tmp_path, "agc", "table1")
    assert spec.title == "Another" and spec.labels == {"both": "average", "one": "first"}


def test_rows_of_other_tables(tmp_path):
    (tmp_path / "agc").mkdir()
    (tmp_path / "agc/table1.yaml").write_text(yaml.safe_dump(fields(), sort_keys=False), "utf-8")
    figure = {"base": "table1.yaml", "rows": {"A": "table1.yaml", "B": "table1.yaml"}}
    (tmp_path / "agc/figure1.yaml").write_text(yaml.safe_dump(figure), "utf-8")
    rows = load_table(tmp_path, "agc", "figure1").rows
    assert [row.label for row in rows] == ["A, full", "A, hpool", "B, full", "B, hpool"]
    assert rows[2].paper == [50, 60]


def test_placeholders_become_numbers_and_lists():
    values = {"k": "32", "layers": "[[0], [-1]]", "name": "[CLS]"}
    found = filled(["${k}", "${layers}", "${name}", "a${k}"], values, typed=True)
    assert found == [32, [[0], [-1]], "[CLS]", "a32"]


def test_corrupted_table_names_the_file(tmp_path):
    (tmp_path / "agc").mkdir()
    (tmp_path / "agc/table1.yaml").write_text("title: [", "utf-8")
    with pytest.raises(SpecError, match=r"agc/table1.yaml.table must be a YAML file"):
        load_table(tmp_path, "agc", "table1")


@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_shipped_tables_are_valid(paper, name):
    spec, data_sets = load_table(PAPERS, paper, name), load_data_sets(PAPERS)
    changes = [changes for values in spec.variables.values() for changes in values.values()]
    for required in {name for change in changes for name in change.requires}:
        assert "$" in required or required in data_sets
    assert all(any(number is not None for number in row.paper) for row in spec.rows)
    assert len({row.label for row in spec.rows}) == len(spec.rows)

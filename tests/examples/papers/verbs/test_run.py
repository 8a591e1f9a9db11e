"""Miniatures of all tables, and the errors of the command."""

from __future__ import annotations

import csv
import json

import pytest

import jobs
from examples.papers.tables.spec import papers
from examples.papers.verbs import run as reproduce

#: Tables whose miniatures are run by default, one per paper. All of them take two minutes.
DEFAULT = {
    ("agc", "table9"),
    ("edje", "table2"),
    ("samer", "table6"),
    ("sap", "table1"),
    ("smart", "table3"),
}
TABLES = [
    pytest.param(
        paper,
        table,
        marks=[] if (paper, table) in DEFAULT else pytest.mark.heavy,
        id=f"{paper}-{table}",
    )
    for paper, tables in papers(reproduce.PAPERS).items()
    for table in tables
]


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    """Output folder of all miniatures, which share models and indexes."""
    return str(tmp_path_factory.mktemp("miniatures"))


@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_miniature(cluster, output, capsys, paper, table):
    command = [paper, table, "--miniature", "--output", output]
    reproduce.main(command)
    folder = f"{output}/papers/{paper}/{table}"
    printed = capsys.readouterr().out
    with open(f"{folder}/table.txt", encoding="utf-8") as file:
        text = file.read()
    assert text in printed and "MINIATURE" in text
    with open(f"{folder}/table.json", encoding="utf-8") as file:
        data = json.load(file)
    assert data["miniature"]
    with open(f"{folder}/table.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cells = rows[: len(data["rows"]) * len(data["columns"])]  # correlations may be undefined
    assert len(cells) == len(data["rows"]) * len(data["columns"])
    assert all(row["ours"] for row in cells if row["paper"])
    with open(f"{folder}/table.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.heavy
def test_second_run_repeats_no_step(cluster, output, capsys):
    command = ["agc", "table9", "--miniature", "--output", output]
    reproduce.main(command)
    first = capsys.readouterr().out
    reproduce.main(command)
    again = capsys.readouterr().out
    assert ("step 1/1" not in again and "0 items to encode" in again) or "cached" in again
    assert again.count("is trained") == 4
    assert first.splitlines()[-4:] == again.splitlines()[-4:]


def test_lists_tables(capsys):
    reproduce.main(["agc"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and lines[0].startswith("agc table1 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agx"], "PAPER must be one of agc, edje, samer, sap, smart, got 'agx'"),
        (["agc", "table99"], "TABLE must be one of table1"),
        (["agc", "table4", "--data", "{folder}"], "msrvtt/videos is missing: the videos and"),
        (["samer", "table3", "--data", "{folder}"], "`hf download vidore/colpali-v1.3-hf`"),
    ],
)
def test_errors(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        jobs.run(reproduce.main, [a.format(folder=tmp_path) for a in arguments])
    assert caught.value.code == jobs.BAD_INPUT
    assert message in capsys.readouterr().err


def test_dry_run_lists_steps(tmp_path, capsys):
    reproduce.main(["agc", "table9", "--miniature", "--output", str(tmp_path), "--check"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["train"] * 4 + ["index"] * 4 + [
        "evaluate"
    ] * 4
    assert not list(tmp_path.iterdir())

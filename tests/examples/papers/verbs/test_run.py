"""Miniatures of all tables, and the errors of the command."""

from __future__ import annotations

import csv
import json

import pytest

import jobs
from examples.papers.tables.spec import papers
from examples.papers.verbs import run as reproduce

#: Tables whose miniatures are run by default: one of each paper.
DEFAULT = {
    ("agc", "table9"),
    ("edje", "table5"),
    ("samer", "table6"),
    ("sap", "table6"),
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
    assert "12 of 12 steps done, 0 running, 0 left" in again and "running\n" not in again
    table, repeated = (printed.rpartition(" left\n")[2] for printed in (first, again))
    assert table == repeated and "MINIATURE" in table


@pytest.mark.heavy
def test_failed_steps_are_named(tmp_path, capsys):
    blocked = tmp_path / "agc/msrvtt_test/agc_uniform"  # the folder of an index
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file")
    with pytest.raises(SystemExit) as caught:
        jobs.run(reproduce.main, ["agc", "table9", "--miniature", "--output", str(tmp_path)])
    printed = capsys.readouterr()
    assert caught.value.code == 1
    assert f"1 of 12 steps failed: index {blocked}; rerun to retry them" in printed.err
    assert f"Failed: index {blocked}" in printed.out
    assert f"(needs index {blocked})" in printed.out and "Skipped: evaluate" in printed.out


def test_lists_tables(capsys):
    reproduce.main(["agc"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and lines[0].startswith("agc table1 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agx"], "PAPER must be one of agc, edje, samer, sap, smart, got 'agx'"),
        (["agc", "table99"], "TABLE must be one of table1"),
        (
            ["samer", "table5", "--miniature", "--output", "{folder}", "--parallel", "2"],
            "--parallel must be 1 for a table with queries/s",
        ),
    ],
)
def test_errors(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        jobs.run(reproduce.main, [a.format(folder=tmp_path) for a in arguments])
    assert caught.value.code == jobs.BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--check"]], ids=["run", "check"])
def test_run_needs_a_check_without_problems(arguments, tmp_path, capsys):
    folders = ["--data", f"{tmp_path}/data", "--output", f"{tmp_path}/out"]
    with pytest.raises(SystemExit) as caught:
        jobs.run(reproduce.main, ["samer", "table3", *folders, *arguments])
    assert caught.value.code == jobs.BAD_INPUT
    printed = capsys.readouterr().out
    assert "python -m examples.papers get vidore/colpali-v1.3-hf" in printed
    assert "python -m examples.papers get flickr30k" in printed


def test_check_of_a_miniature(output, capsys):
    reproduce.main(["agc", "table9", "--miniature", "--output", output, "--check"])
    printed = capsys.readouterr().out
    assert "evaluate agc/msrvtt_evaluation/agc_5_5" in printed and "no problems" in printed

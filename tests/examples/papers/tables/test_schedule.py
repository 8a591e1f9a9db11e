"""Order of steps, loads of encoders, resumption, failures and parallel runs."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.papers.tables.plan import plan
from examples.papers.tables.schedule import Progress, schedule
from examples.papers.tables.spec import MEASURING, load_table
from examples.papers.verbs.run import PAPERS
from pipeline.config import SpecError
from tests.conftest import ROOT, actor_pools
from tests.examples.papers.tables.small import run_table, small_plan, table, write_collections
from tests.examples.papers.tables.tables import FOLDERS
from tests.examples.papers.tables.test_spec import KNOWN


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of the collections and of the outputs."""
    folder = tmp_path_factory.mktemp("small")
    write_collections(folder / "data")
    return folder


@pytest.fixture(scope="module")
def sequential(folder):
    """Steps, table and loads of a run in this process."""
    steps, data = run_table(folder)
    return steps, data, (folder / "loads.txt").read_text().split()


def test_rows_of_an_encoder_are_consecutive(tmp_path):
    steps = schedule(small_plan(tmp_path, table(tmp_path)))
    names = [Path(step.step.output).name.removesuffix("_evaluation") for step in steps]
    assert [name for name in names[::3]] == ["food_-1", "flow_-1", "food_-2", "flow_-2"]
    assert [step.step.name for step in steps] == ["index", "recompress", "evaluate"] * 4
    assert [step.group for step in steps] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_all_steps_of_tables_follow_those_that_they_need(paper, name):
    planned = plan(load_table(PAPERS, paper, name), FOLDERS, miniature=False)
    steps = schedule(planned)
    assert {id(s.step) for s in steps} == {id(step) for step in planned.steps}
    place = {step: number for number, step in enumerate(steps)}
    assert all(place[needed] < place[step] for step in steps for needed in step.needs)
    groups = [step.group for step in steps]
    assert groups == sorted(groups)  # each encoder is loaded once
    jobs = [step.step.job for step in steps]
    assert (
        min(number for number, job in enumerate(jobs) if job in MEASURING) <= 3
    )  # an evaluation that fails does so early


def test_progress(tmp_path):
    steps = schedule(small_plan(tmp_path, table(tmp_path)))
    lines: list[str] = []
    progress = Progress(steps, 2, lines.append)
    for step, seconds in zip(steps[:3], (30.0, 10.0, 20.0), strict=True):
        step.state, step.seconds = "done", seconds
        progress.changed(step)
    assert lines[1].endswith("done in 0:10; 2 of 12 steps done, 0 running, 10 left")
    assert lines[2].endswith("9 left, about 1:30 left")  # 3 x 60 s by two at a time
    steps[3].state, steps[4].state, steps[4].error = "running", "failed", "it is full"
    progress.changed(steps[3])
    progress.changed(steps[4])
    assert lines[-1] == f"{steps[4].title}: failed (it is full)"
    assert ", 1 failed, " in progress.summary()
    console = Console(file=io.StringIO(), width=120)
    console.print(progress)
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert shown[1:4] == [
        ["index", "1", "1", "2", "0", "0:45"],
        ["recompress", "1", "0", "2", "1", "0:10"],
        ["evaluate", "1", "0", "3", "0", "0:30"],
    ]
    assert shown[4] == [steps[3].step.output, "0:00"]


def test_encoders_are_loaded_once(sequential):
    steps, data, loads = sequential
    assert loads == ["-1", "-2"]
    assert all(step.state == "done" for step in steps) and not data["problems"]


def test_report(sequential, folder):
    _, data, _ = sequential
    full, random = data["rows"][:2]
    low, high = full["intervals"][1]
    assert low <= full["values"][1] <= high
    assert full["intervals"][3] is None and random["intervals"][2] is not None
    assert full["other_gains"][1] != pytest.approx(full["values"][1])
    text = (folder / "out/table/table.txt").read_text("utf-8")
    assert "nDCG@5, exponential gain, ours" in text and " to " in text
    origin = data["provenance"]
    assert [weights["model"] for weights in origin["weights"]] == ["bundled"] * 2
    assert len({weights["fingerprint"] for weights in origin["weights"]}) == 2
    assert origin["data"] == {"food": {}} and origin["hardware"] and origin["seeds"]
    assert {"torch", "transformers", "maxray"} <= origin["versions"].keys()
    with (folder / "out/table/table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["low"]) == low and float(rows[1]["other gain"])


@pytest.mark.heavy
@pytest.mark.parametrize(("parallel", "collections"), [(1, ("food", "flow")), (2, ("food",))])
def test_ray_loads_encoders_once_and_has_equal_numbers(
    cluster, sequential, folder, parallel, collections
):
    (folder / "loads.txt").unlink()
    rows = [r for r in table(folder).model_dump()["rows"] if r["label"].startswith(collections)]
    with actor_pools():
        steps, data = run_table(folder, f"parallel_{parallel}", parallel=parallel, rows=rows)
    assert all(step.state == "done" for step in steps)
    assert sorted((folder / "loads.txt").read_text().split()) == ["-1", "-2"]
    expected = sequential[1]["rows"]
    assert data["rows"] == [row for row in expected if row["label"].startswith(collections)]


def test_finished_steps_are_not_repeated(sequential, folder):
    lines: list[str] = []
    steps, data = run_table(folder, say=lines.append)
    assert lines == ["12 of 12 steps done, 0 running, 0 left, about 0:00 left"]
    assert data == sequential[1] and steps


def test_other_rows_run_if_a_step_fails(folder):
    lines: list[str] = []
    (folder / "data/flow").rename(folder / "data/hidden")
    try:
        steps, data = run_table(folder, "failed", lines.append)
    finally:
        (folder / "data/hidden").rename(folder / "data/flow")
    states = {f"{s.step.name} {Path(s.step.output).name}": s.state for s in steps}
    assert states["index flow_-1"] == states["index flow_-2"] == "failed"
    assert states["recompress flow_-1"] == states["evaluate flow_-2_evaluation"] == "skipped"
    assert sum(state == "done" for state in states.values()) == 6
    failed = [problem for problem in data["problems"] if problem.startswith("Failed")]
    assert len(failed) == 2 and "source.path must be" in failed[0]
    assert [row["values"][0] is None for row in data["rows"]] == [False] * 4 + [True] * 4
    steps, data = run_table(folder, "failed")  # repeats what failed
    assert all(step.state == "done" for step in steps) and not data["problems"]


def test_parallel_steps_need_resources(cluster, folder):
    with actor_pools(), pytest.raises(SpecError, match="--parallel must be at most 2, .* got 3"):
        run_table(folder, "parallel_3", parallel=3)
    with pytest.raises(SpecError, match="--parallel must be at most 1, .* got 2"):
        run_table(folder, "parallel_3", parallel=2)


@pytest.mark.heavy  # starts two clusters, one after another
def test_resumes_after_a_kill(sequential, folder, tmp_path):
    write_collections(tmp_path / "data")
    command = [sys.executable, "-m", "tests.examples.papers.tables.small", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MAXRAY_EXECUTOR": "ray"}
    environment.pop("RAY_ADDRESS", None)
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as job:
        for line in job.stdout:
            if line.startswith("index") and "flow_-1: running" in line:
                job.kill()
    data = json.loads((tmp_path / "out/table/table.json").read_text("utf-8"))
    assert data["rows"][0]["values"][0] is not None  # the rows that were complete
    assert data["rows"][2]["values"][0] is None and data["problems"]
    again = subprocess.run(command, **options, timeout=240, check=True).stdout
    assert "food_-1: running" not in again and "flow_-1: done" in again
    data = json.loads((tmp_path / "out/table/table.json").read_text("utf-8"))
    assert data["rows"] == sequential[1]["rows"]

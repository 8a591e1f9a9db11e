"""Small runs of the chaos suite: real jobs on a real cluster, disturbed and resumed."""

from __future__ import annotations

import json
import sys

import pytest

from pipeline.config import JobError
from tests.chaos import report, run
from tests.chaos.faults import Fault
from tests.chaos.network import Network
from tests.conftest import start_job

PHASES = ["encoding", "committing", "candidates"]


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_jobs_survive_faults(tmp_path):
    arguments = ["tests.chaos", str(tmp_path / "suite"), "--faults", "6", "--nodes", "1"]
    arguments += ["--seed", "5", "--out", str(tmp_path / "out.json")]
    arguments += ["--figure", str(tmp_path / "figure.png"), "--phases", *PHASES]
    job = start_job(*arguments)
    output, error = job.communicate()
    assert job.returncode == 0, output + error
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["faults"], found["lost"], found["duplicated"]) == (6, 0, 0)
    assert found["problems"] == []
    assert {row[0] for row in found["table"][1:]} == {*PHASES, "all"}
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    job = start_job(*arguments)  # finished rounds are not repeated
    output, error = job.communicate()
    assert job.returncode == 0 and "recovered" not in output, output + error


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_jobs_survive_partitions(tmp_path):
    try:
        Network().close()
    except JobError as error:
        pytest.skip(str(error))
    arguments = ["tests.chaos", str(tmp_path / "suite"), "--faults", "3", "--targets", "network"]
    arguments += ["--out", str(tmp_path / "out.json"), "--phases", "encoding", "candidates"]
    job = start_job(*arguments)
    output, error = job.communicate()
    assert job.returncode == 0, output + error
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["faults"], found["lost"], found["duplicated"]) == (3, 0, 0)
    assert found["problems"] == []
    # One of each: short, beyond the health check, and of all nodes at once.
    assert len(found["actions"]) == 4 and {row[0] for row in found["actions"][1:]} == {"network"}


def outcome(number: int, phase: str, target: str, seconds: float) -> run.Outcome:
    fault = Fault(number, phase, target, "kill", "time", 0.5, 1.0)
    return run.Outcome(fault, f"{phase}; busy: none", seconds, [-9])


def test_rounds_are_restored_and_reported(tmp_path):
    record = run.Record(tmp_path / "rounds.jsonl")
    outcomes = [outcome(0, "listing", "driver", 2.0), outcome(2, "writing", "writer", 4.0)]
    missed = [outcome(1, "writing", "gcs", 0.0).fault]
    record.add(run.Round("index", outcomes, missed, lost=["a"], problems=["a lease remains"]))
    restored = run.Record(tmp_path / "rounds.jsonl")
    assert restored.rounds == record.rounds and restored.numbers == {0, 2}
    assert report.problems(restored.rounds) == ["index: lost a", "index: a lease remains"]
    assert report.cells(restored.rounds) == [
        ["phase", "driver", "writer", "faults", "recovery p50", "p95", "max"],
        ["listing", "1", "0", "1", "2.0 s", "2.0 s", "2.0 s"],
        ["writing", "0", "1", "1", "4.0 s", "4.0 s", "4.0 s"],
        ["all", "1", "1", "2", "3.0 s", "3.9 s", "4.0 s"],
    ]
    assert "2 faults in 1 rounds: 1 items lost, 0 duplicated, 2 checks failed" in report.text(
        restored.rounds
    )
    assert json.loads(report.to_json(restored.rounds))["faults"] == 2
    assert report.figure(restored.rounds).startswith(b"\x89PNG")

"""Tests of the batch script for Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.index.reader import IndexReader
from tests.conftest import ROOT
from tests.test_documentation import check_command

SBATCH = ROOT / "cluster/slurm/job.sbatch"
#: Slurm's commands for nodes that are processes of this machine: `srun` runs the command without
#: its options.
SLURM = """
scontrol() { echo 127.0.0.1; echo 127.0.0.1; }
srun() { while [[ $1 == --* ]]; do shift; done; exec "$@"; }
"""


def test_slurm_script_is_valid_and_its_example_parses(monkeypatch):
    monkeypatch.chdir(ROOT)
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    (example,) = (line for line in SBATCH.read_text().split("\n") if line.startswith("#   sbatch"))
    words = shlex.split(example[1:])
    script = words.index("cluster/slurm/job.sbatch")
    check_command(["python", "-m", f"jobs.{words[script + 1]}", *words[script + 2 :]], {})


@pytest.fixture
def slurm_job(tmp_path):
    """Function that starts the script as Slurm does, on a cluster with two nodes."""
    number = os.getpid() % 10000
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }

    def start(*arguments: str) -> subprocess.Popen:
        script = f"{SLURM}\nset -- {shlex.join(arguments)}\n{SBATCH.read_text()}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=environment, **pipes)

    yield start
    shutil.rmtree(f"/tmp/ray-{number}", ignore_errors=True)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_slurm_script_runs_a_job_that_commits_on_sigterm(tmp_path, slurm_job):
    spec = ("jobs/specs/cranfield.yaml", f"index={tmp_path}/index", "commit_items=64")
    process = slurm_job("index", *spec, "--limit", "1000")
    while "committed" not in (line := process.stdout.readline()) and line:
        pass
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, f"{out[-3000:]}\n{err[-3000:]}"
    number = IndexReader(f"{tmp_path}/index").dataset.count_rows()
    assert 0 < number < 1000

    process = slurm_job("index", *spec, "--limit", str(number + 1))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out[-3000:]}\n{err[-3000:]}"
    assert IndexReader(f"{tmp_path}/index").dataset.count_rows() >= number

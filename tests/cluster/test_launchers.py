"""Tests of the configurations of Ray's cluster launcher and of Slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from pipeline.index.reader import Index
from tests.conftest import CRANFIELD, ROOT
from tests.test_documentation import check_command

SBATCH = ROOT / "cluster/slurm/job.sbatch"
#: Slurm's commands on one node: `srun` runs its command without its options.
SLURM = """
scontrol() { echo localhost; }
srun() { while [[ $1 == --* ]]; do shift; done; "$@"; }
"""


def test_launcher_configuration_is_valid():
    path = ROOT / "cluster/launcher/aws.yaml"
    data = yaml.safe_load(path.read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    jsonschema.validate(data, schema)
    assert data["head_node_type"] in data["available_node_types"]
    most = [node.get("max_workers", 0) for node in data["available_node_types"].values()]
    assert sum(most) <= data["max_workers"]
    assert "--env RAY_AUTH_MODE=token" in data["docker"]["run_options"]
    for command in data["head_start_ray_commands"] + data["worker_start_ray_commands"]:
        for words in map(shlex.split, command.split("&&")):
            assert words[0] in ("cd", "ray")
    comment = path.read_text().partition("\ncluster_name")[0].replace("# ", "")
    (submit,) = (line for line in comment.replace("\\\n", "").split("\n") if "submit" in line)
    check_command(shlex.split(submit)[1:], {})


def test_slurm_script_is_valid_and_its_example_parses(monkeypatch):
    monkeypatch.chdir(ROOT)
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    (example,) = (line for line in SBATCH.read_text().split("\n") if line.startswith("#   sbatch"))
    words = shlex.split(example[1:])
    script = words.index("cluster/slurm/job.sbatch")
    check_command(["python", "-m", f"jobs.{words[script + 1]}", *words[script + 2 :]], {})


@pytest.mark.heavy
def test_slurm_script_runs_a_job_on_a_cluster_of_its_own(tmp_path):
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS",)} | {
        "HOME": str(tmp_path),
        "PATH": programs,
        "PYTHONPATH": str(ROOT),
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
    }
    spec = f"index={tmp_path}/index source.path={CRANFIELD} --limit 50"
    command = f"{SLURM}\nset -- index jobs/specs/cranfield.yaml {spec}\n{SBATCH.read_text()}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert Index(f"{tmp_path}/index").dataset.count_rows() == 50

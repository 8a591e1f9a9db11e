"""The commands of the manifests, submitted to a local Ray cluster as KubeRay submits them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.index.reader import IndexReader
from tests.cluster import manifests
from tests.cluster.conftest import NUM_ITEMS, RAY, Head

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]


def entrypoint(name: str, data: Path) -> str:
    """Returns the command of a manifest with the folder of the data and the CPU profile."""
    text = manifests.jobs()[name]["entrypoint"]
    text = re.sub(r"(?<=[\s=])/data/", f"{data}/", text)
    return text.replace("cluster/profiles/autoscaling_index", "cluster/profiles/laptop")


def submit(name: str, data: Path, head: Head) -> str:
    """Submits a job with the shell command of KubeRay's submitter and returns its output."""
    arguments = [RAY, "job", "submit", "--address", head.dashboard, "--"]
    command = f"{shlex.join(arguments)} {entrypoint(name, data)} ;"
    done = subprocess.run(
        ["bash", "-c", command], env=head.environment, capture_output=True, text=True, cwd=data
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_jobs_run_in_order(head, tmp_path):
    for name in ("index", "recompress", "candidates", "evaluate", "maintain"):
        output = submit(f"{name}-job-RayJob", tmp_path, head)
        assert "succeeded" in output, output
    index = IndexReader(str(tmp_path / "cranfield/index"))
    assert index.dataset.count_rows() == NUM_ITEMS
    assert {"hpool_32", "hpool_64", "samer_8"} <= index.representations().keys()
    evaluation = tmp_path / "cranfield/evaluation"
    assert (evaluation / "report.html").exists() and (evaluation / "results.json").exists()

    output = submit("nightly-cronjob-RayCronJob", tmp_path, head)
    assert "succeeded" in output, output
    assert IndexReader(str(tmp_path / "cranfield/index")).dataset.count_rows() == NUM_ITEMS


def test_a_job_without_the_token_is_rejected(head):
    environment = {**head.environment, "RAY_AUTH_TOKEN": "1" * 64}
    command = [RAY, "job", "submit", "--address", head.dashboard, "--", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()

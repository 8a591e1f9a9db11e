"""The commands of the manifests, submitted to a local Ray cluster as KubeRay submits them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.index.reader import Index
from tests.cluster import manifests
from tests.conftest import CRANFIELD, ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]
#: Items of the collection, which is a part of the shipped one.
NUM_ITEMS = 200
RAY = str(Path(sys.executable).parent / "ray")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Environment of the nodes. The token authentication is that of `authOptions`."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0" * 64)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    unset = {"RAY_ADDRESS", "MAXRAY_REUSE_PROCESSES"}
    return {name: value for name, value in os.environ.items() if name not in unset} | {
        "PATH": programs,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory, environment) -> Iterator[str]:
    """URL of the dashboard of a cluster that was started in a folder like that of the image."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "cluster").symlink_to(ROOT / "cluster")
    (folder / "jobs").mkdir()
    (folder / "jobs/specs").symlink_to(ROOT / "jobs/specs")
    collection = folder / "jobs/data/cranfield"
    (collection / "qrels").mkdir(parents=True)
    lines = (CRANFIELD / "corpus.jsonl").read_text().splitlines(keepends=True)
    (collection / "corpus.jsonl").write_text("".join(lines[:NUM_ITEMS]))
    for name in ("queries.jsonl", "qrels/test.tsv"):
        shutil.copy(CRANFIELD / name, collection / name)
    port = free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=8", f"--port={free_port()}"]
    command += [f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}"]
    command += [f"--ray-client-server-port={free_port()}", f"--object-store-memory={1 << 30}"]
    with (folder / "log").open("w") as log:
        node = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            wait_for(port, node)
            yield f"http://127.0.0.1:{port}"
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(timeout=60)


def wait_for(port: int, process: subprocess.Popen, seconds: float = 120) -> None:
    """Waits until something listens at a port."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert process.poll() is None
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(port)


def entrypoint(name: str, data: Path) -> str:
    """Returns the command of a manifest with the folder of the data and the CPU profile."""
    text = manifests.jobs()[name]["entrypoint"]
    text = re.sub(r"(?<=[\s=])/data/", f"{data}/", text)
    return text.replace("cluster/profiles/autoscaling_index", "cluster/profiles/laptop")


def submit(name: str, data: Path, dashboard: str, environment: dict[str, str]) -> str:
    """Submits a job with the shell command of KubeRay's submitter and returns its output."""
    arguments = [RAY, "job", "submit", "--address", dashboard, "--"]
    command = f"{shlex.join(arguments)} {entrypoint(name, data)} ;"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, cwd=data
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_jobs_run_in_order(dashboard, environment, tmp_path):
    for name in ("index", "recompress", "candidates", "evaluate", "maintain"):
        output = submit(f"{name}-job-RayJob", tmp_path, dashboard, environment)
        assert "succeeded" in output, output
    index = Index(str(tmp_path / "cranfield/index"))
    assert index.dataset.count_rows() == NUM_ITEMS
    representations = {info.name for info in index.representations}
    assert {"hpool_32", "hpool_64", "samer_8"} <= representations
    evaluation = tmp_path / "cranfield/evaluation"
    assert (evaluation / "report.html").exists() and (evaluation / "results.json").exists()

    output = submit("nightly-cronjob-RayCronJob", tmp_path, dashboard, environment)
    assert "succeeded" in output, output
    assert Index(str(tmp_path / "cranfield/index")).dataset.count_rows() == NUM_ITEMS


def test_a_job_without_the_token_is_rejected(dashboard, environment, tmp_path):
    environment = environment | {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "1" * 64}
    command = [RAY, "job", "submit", "--address", dashboard, "--", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "auth" in (done.stdout + done.stderr).lower()

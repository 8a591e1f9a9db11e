"""`ray job submit` of the index job to a running cluster that asks for a token."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.index.reader import Index
from pipeline.index.status import status
from tests.conftest import ROOT

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A head node of its own: the address of its job server, and the environment of clients."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie below it
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PYTHONPATH": "",  # the job has the code from its working directory
    }
    environment.pop("RAY_ADDRESS", None)
    port, dashboard_port, agent_port, agent_grpc_port = free_ports(4)
    options = {
        "num-cpus": 3,
        "port": port,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard_port,
        # Their defaults are fixed: the agent of another cluster on this machine may have them.
        "dashboard-agent-listen-port": agent_port,
        "dashboard-agent-grpc-port": agent_grpc_port,
        "temp-dir": folder,
        "object-store-memory": 1 << 28,
    }
    command = [RAY, "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with open(f"{folder}/head.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{dashboard_port}"
    try:
        deadline = time.time() + 90
        while not answers(f"{address}/api/version"):
            assert process.poll() is None, Path(folder, "head.log").read_text()
            assert time.time() < deadline, "the head does not answer"
            time.sleep(0.2)
        yield address, environment
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(number: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def answers(url: str) -> bool:
    """Whether a server answers, if only to ask for a token."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.mark.heavy
def test_the_index_job_is_submitted(head, tmp_path, collection):
    address, environment = head
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(a="one", b="two"))},
        "encoder": {"name": "sleeping", "seconds": 0.0, "num_tokens": 6, "dim": 8},
        "representations": [{"compressor": "none"}],
    }
    (tmp_path / "code").mkdir()
    for package in ("pipeline", "jobs"):  # what a user ships: the code and the spec
        ignored = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=ignored)
    (tmp_path / "code/spec.yaml").write_text(yaml.safe_dump(spec))

    def submit(*arguments: str, **changes: str) -> subprocess.CompletedProcess:
        command = [RAY, "job", "submit", "--address", address, "--working-dir", tmp_path / "code"]
        return subprocess.run(
            [*command, "--", sys.executable, "-m", "jobs.index", "spec.yaml", *arguments],
            cwd=tmp_path,
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    refused = submit(RAY_AUTH_TOKEN="not the token")
    assert refused.returncode != 0 and not (tmp_path / "index").exists()

    deadline = time.time() + 60
    done = submit("representations.0.id=every")
    while "No available agent" in done.stderr and time.time() < deadline:  # it is starting still
        time.sleep(0.5)
        done = submit("representations.0.id=every")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "listed 2 = indexed 2 (2 new, 0 replaced, 0 as before) + rejected 0" in done.stdout
    there = Index(str(tmp_path / "index")).dataset.to_table()
    assert sorted(there["item_id"].to_pylist()) == ["a", "b"]
    assert [len(vectors) for vectors in there["every"].to_pylist()] == [6, 6]
    (job,) = status(str(tmp_path / "index"))["jobs"]
    assert job["state"] == "done"
    assert json.loads((tmp_path / f"index/jobs/{job['job']}/summary.json").read_text()) == job

"""A Ray cluster that is started as on the nodes of KubeRay, with the files of the image."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import CRANFIELD, ROOT

#: Items of the collection, which is a part of the shipped one.
NUM_ITEMS = 200
RAY = str(Path(sys.executable).parent / "ray")


@dataclass(frozen=True)
class Head:
    """A running head node.

    Attributes:
        pid: Process of `ray start --block`.
        ports: Ports by the name of their option.
        environment: Environment of the node and its clients, with the token.
    """

    pid: int
    ports: dict[str, int]
    environment: dict[str, str]

    @property
    def dashboard(self) -> str:
        """URL of the dashboard."""
        return f"http://127.0.0.1:{self.ports['dashboard-port']}"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def write_image_folder(folder: Path) -> None:
    """Writes the working directory of the image with a part of the collection."""
    collection = folder / "jobs/data/cranfield"
    (collection / "qrels").mkdir(parents=True)
    lines = (CRANFIELD / "corpus.jsonl").read_text().splitlines(keepends=True)
    (collection / "corpus.jsonl").write_text("".join(lines[:NUM_ITEMS]))
    for name in ("queries.jsonl", "qrels/test.tsv"):
        shutil.copy(CRANFIELD / name, collection / name)
    (folder / "cluster").symlink_to(ROOT / "cluster")
    (folder / "jobs/specs").symlink_to(ROOT / "jobs/specs")


@pytest.fixture(scope="session")
def head(tmp_path_factory) -> Iterator[Head]:
    """Head node with the token authentication of `authOptions`, started in the image's folder."""
    folder = tmp_path_factory.mktemp("image")
    sessions = tempfile.mkdtemp(prefix="ray")  # short, because socket paths are limited
    write_image_folder(folder)
    (folder / "token").write_text("0" * 64)
    unset = {"RAY_ADDRESS", "MAXRAY_EXECUTOR"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
    }
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    names += ("ray-client-server-port", "metrics-export-port", "node-manager-port")
    names += ("object-manager-port", "runtime-env-agent-port")
    ports = {name: free_port() for name in names}
    command = [RAY, "start", "--head", "--block", "--num-cpus=8"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += ["--min-worker-port=20000", "--max-worker-port=20999"]
    command += [f"--object-store-memory={1 << 30}", f"--temp-dir={sessions}"]
    with (folder / "log").open("w") as log:
        node = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            wait_for(ports["dashboard-agent-listen-port"], node)
            yield Head(node.pid, ports, environment)
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(timeout=60)
            shutil.rmtree(sessions, ignore_errors=True)


def wait_for(port: int, process: subprocess.Popen, seconds: float = 120) -> None:
    """Waits until something listens at a port."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert process.poll() is None
        with socket.socket() as sock:
            hosts = ("127.0.0.1", socket.gethostbyname(socket.gethostname()))
            if any(sock.connect_ex((host, port)) == 0 for host in hosts):
                return
        time.sleep(0.5)
    raise TimeoutError(port)

"""Tests that nodes can be drained with `ray drain-node`, as docs/tutorials/operations.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.bench.serve import COLUMN, QUERIES, write_index
from tests.chaos.cluster import ChaosCluster
from tests.chaos.compare import accounting, contents, differences, orphaned_leases
from tests.chaos.processes import Process, wait_until
from tests.chaos.run import Suite
from tests.chaos.workload import corpus
from tests.cluster.conftest import RAY, free_port

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]

#: Time after which an encoder without a unit does not get one any more, in seconds.
IDLE_SECONDS = 5.0
#: Duration of the load on a server, in seconds.
LOAD_SECONDS = 60


def drain(cluster: ChaosCluster, node: Process, seconds: int) -> None:
    """Drains a node with the command of the guide."""
    node_id = next(a for a in node.title.split() if a.startswith("--node_id=")).partition("=")[2]
    command = [RAY, "drain-node", "--address", cluster.address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
    command += ["--deadline-remaining-seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def ray_variables() -> dict[str, str]:
    """Returns the environment variables of Ray."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def test_index_job_leaves_a_drained_node(tmp_path):
    before = ray_variables()
    suite = Suite(tmp_path / "suite", 2, False, lambda line: None)
    cluster = suite.cluster
    try:
        expected, _ = suite.expected("index")
        index = suite.disk.folder / "index"
        driver = suite.start("index", index)
        assert wait_until(lambda: driver.last_commit()[0] > 0, 120)
        (encoder,) = cluster.tasks_like("encoder")
        (drained,) = [node for node in cluster.workers if encoder in cluster.tasks_of(node)]
        drain(cluster, drained, 60)
        # The only encoder finishes its units and gets no others. Ray does not move it.
        idle_since = [time.monotonic()]

        def is_idle() -> bool:
            if encoder.title.endswith(".submit"):
                idle_since[0] = time.monotonic()
            return time.monotonic() > idle_since[0] + IDLE_SECONDS

        assert wait_until(is_idle, 60)
        assert driver.exit_code is None and drained.is_alive
        cluster.kill_node(drained)
        assert driver.wait(180) == 0, driver.error()
        found = differences(contents(str(index)), expected)
        assert not found, found.sentences()
        counted = accounting(str(index), corpus())
        assert (counted.lost, counted.duplicated) == ([], [])
        assert not orphaned_leases(str(index))
    finally:
        suite.close()
    assert ray_variables() == before


#: Program that serves an index with two replicas of each stage until its standard input is closed.
SERVER = (
    "import sys, jobs\n"
    "from tests.bench.serve import Server\n"
    "from jobs.serve import set_ray_serve_env\n"
    "set_ray_serve_env()\n"
    "with jobs.cluster():\n"
    "    server = Server(sys.argv[1], int(sys.argv[2]), num_replicas=2)\n"
    "    print('ready', flush=True)\n"
    "    sys.stdin.read()\n"
    "    server.stop()\n"
)


def replicas(cluster: ChaosCluster, node: Process) -> list[str]:
    """Returns the titles of the replicas on a node, without the method that each executes."""
    titles = [task.title.partition(".")[0] for task in cluster.tasks_of(node)]
    return [title for title in titles if "ServeReplica" in title]


def test_server_leaves_a_drained_node_without_a_failed_request(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "cache"))
    write_index(str(tmp_path / "index"), 1000)
    cluster, port = ChaosCluster(2), str(free_port())
    try:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path / "index"), port],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None and server.stdout.readline().strip() == "ready"
        drained, other = sorted(cluster.workers, key=lambda node: -len(replicas(cluster, node)))
        before = Counter([*replicas(cluster, drained), *replicas(cluster, other)])
        assert "Gateway" in " ".join(replicas(cluster, drained))
        fields = {"url": f"http://127.0.0.1:{port}", "body": {"k": 5, "representation": COLUMN}}
        fields |= {"queries": QUERIES, "retries": False, "rate": 5, "seconds": LOAD_SECONDS}
        load = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.serve_load", json.dumps(fields)],
            stdout=subprocess.PIPE,
            text=True,
        )
        time.sleep(5)
        drain(cluster, drained, 60)
        # Ray ends on the node when the last replica has left it.
        assert wait_until(lambda: not drained.is_alive, LOAD_SECONDS)
        cluster.kill_node(drained)
        assert load.poll() is None  # the load continues without the node
        answers = json.loads(load.communicate()[0].splitlines()[-1])["answers"]
        assert Counter(status for _, status, _ in answers) == {200: len(answers)}
        assert len(answers) > LOAD_SECONDS
        assert Counter(replicas(cluster, other)) == before
        server.communicate("", timeout=120)
    finally:
        cluster.close()

"""Tests of Ray's own behaviour, without the workarounds of `jobs._ray_cluster`.

A test that fails after an update of Ray names a workaround that may be removed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy  # depends on the version of Ray only

PROGRAM = """
import json, os, signal, sys

sys.path = [path for path in sys.path if path not in ("", os.getcwd())]
handler = lambda *_: None
signal.signal(signal.SIGTERM, handler)

import ray
from ray._private import auto_init_hook, ray_constants

ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         object_store_memory=1 << 28, num_cpus=1)

@ray.remote
def worker():
    return os.nice(0), sys.path

niceness, path = ray.get(worker.remote())
print(json.dumps({
    "RAY_ENABLE_AUTO_CONNECT": auto_init_hook.enable_auto_connect,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": ray_constants.ENABLE_RAY_CLUSTER,
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S,
    "RAY_worker_niceness": niceness - os.nice(0),
    "SIGTERM handler": signal.getsignal(signal.SIGTERM) is not handler,
    "working directory": os.getcwd() in path,
    "processes": sorted(ray._private.worker._global_node.all_processes),
}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, object]:
    """Returns the behaviour of a local cluster that is started with `ray.init` alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**environment, "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "messages": done.stderr != ""}


@pytest.mark.parametrize(
    ("workaround", "behaviour"),
    [
        ("RAY_ENABLE_AUTO_CONNECT", True),  # threads start clusters
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", True),  # ports on all interfaces
        ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30.0),
        ("RAY_worker_niceness", 15),
        ("SIGTERM handler", True),  # replaced by ray.init
        ("working directory", True),  # searched by workers, not by the driver
        ("processes", ["dashboard", "gcs_server", "log_monitor", "monitor", "raylet"]),
        ("messages", True),  # on the standard error at log level fatal
    ],
)
def test_workaround_is_needed(bare, workaround, behaviour):
    assert bare[workaround] == behaviour, "remove the workaround in jobs/_ray_cluster.py"

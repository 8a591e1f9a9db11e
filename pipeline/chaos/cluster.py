"""Ray cluster on this machine with a head without CPUs and worker nodes that can be killed.

Each node is a raylet with its own object store. The global control store (GCS) persists its tables
in RocksDB, so that it can be restarted while jobs run, as with a persistent volume on Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.chaos.faults import TITLES
from pipeline.chaos.processes import Process, children, descendants, process, survivors

#: Size of the object store of each node, in bytes. Ray requires at least 75 MiB.
OBJECT_STORE_BYTES = 80 << 20
#: Number of CPUs of each worker node.
NODE_CPUS = 2
#: Settings of Ray: nodes that do not answer are dead after seconds instead of half a minute.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
#: Actors of Ray itself, which outlive the jobs that use them.
RAY_ACTORS = (
    "ActorLocation",
    "Board",
    "Dashboard",
    "IDLE",
    "RuntimeEnv",
    "_Autoscaling",
    "_Stats",
    "maxray-board",
)


class ChaosCluster:
    """Cluster whose processes can be killed one by one.

    Args:
        num_nodes: Number of worker nodes. Without any, the head runs all tasks.
    """

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # paths of sockets must be short
        self._cluster: Any = None
        self._victims: list[Process] = []
        # Ray writes the address of a new cluster to its temporary folder. In the usual one, other
        # programs on this machine would join this cluster.
        os.environ.update({**SETTINGS, "RAY_TMPDIR": str(self.folder)})
        self.start()

    def start(self) -> None:
        """Starts the head and the worker nodes."""
        sessions = self.folder / "ray"
        sessions.mkdir(exist_ok=True)
        storage = tempfile.mkdtemp(prefix="gcs-", dir=self.folder)
        os.environ.update({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": storage})
        try:
            self._start(sessions)
        except Exception:  # Ray raises this class if a busy machine starts the raylet too slowly
            for left in descendants(process(os.getpid())):
                left.send(signal.SIGKILL)
            self._start(sessions)
        self.repair()

    def _start(self, sessions: Path) -> None:
        from ray.cluster_utils import Cluster

        with _same_sigterm_handler():
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0 if self.num_nodes else NODE_CPUS,
                    "include_dashboard": False,
                    "object_store_memory": OBJECT_STORE_BYTES,
                    "temp_dir": str(sessions),
                },
            )

    @property
    def address(self) -> str:
        """Address of the cluster, as in `RAY_ADDRESS`."""
        return self._cluster.address

    @property
    def gcs(self) -> Process:
        """Process of the GCS."""
        return _first(self._cluster.head_node, "gcs_server")

    @property
    def head(self) -> Process:
        """Raylet of the head."""
        return _first(self._cluster.head_node, "raylet")

    @property
    def workers(self) -> list[Process]:
        """Raylets of the worker nodes."""
        return [_first(node, "raylet") for node in self._cluster.worker_nodes]

    def tasks(self) -> Iterator[Process]:
        """Yields the processes that run tasks and actors of jobs."""
        for raylet in (self.head, *self.workers):
            yield from self.tasks_of(raylet)

    def tasks_of(self, raylet: Process) -> Iterator[Process]:
        """Yields the processes of a node that run tasks and actors of jobs."""
        for child in children(raylet):
            if is_task(child.title):
                yield child

    def tasks_like(self, role: str) -> set[Process]:
        """Returns the tasks and the actors of a role, see `faults.TITLES`.

        Actors that load their models are not included.
        """
        prefixes = TITLES.get(role, ())
        found = ((task, task.title) for task in self.tasks())
        return {t for t, title in found if title.startswith(prefixes) and "__init__" not in title}

    @property
    def has_lost_head(self) -> bool:
        """True if the head's raylet has died, and with it the cluster."""
        return not self.head.is_alive

    def kill_node(self, raylet: Process) -> None:
        """Kills all processes of a worker node at once."""
        for victim in (raylet, *self._doomed(raylet)):
            victim.send(signal.SIGKILL)

    def kill_raylet(self, raylet: Process) -> None:
        """Kills a raylet. Its workers have to notice and end."""
        self._doomed(raylet)
        raylet.send(signal.SIGKILL)

    def kill_head(self) -> None:
        """Kills all processes of the head, and with them the cluster."""
        for victim in (self.gcs, self.head, *self._doomed(self.head)):
            victim.send(signal.SIGKILL)

    def _doomed(self, raylet: Process) -> list[Process]:
        """Returns the processes of a node, whose end `leaked` checks later."""
        victims = descendants(raylet)
        self._victims += victims
        return victims

    def restart_gcs(self) -> None:
        """Starts the GCS again at the same address, with the tables that it has stored."""
        running = self._cluster.head_node.all_processes["gcs_server"]
        information = running[0]
        port = self.address.rpartition(":")[2]
        arguments = [a for a in information.process.args if not a.startswith("--gcs_server_port")]
        information.process.wait(timeout=10)
        started = subprocess.Popen(
            [*arguments, f"--gcs_server_port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        running[0] = information._replace(process=started)

    def repair(self) -> bool:
        """Restarts what has died: the GCS, worker nodes or the whole cluster.

        Returns:
            True if the cluster is a new one, at another address.
        """
        if self.has_lost_head:
            self.stop()
            self.start()
            return True
        if not self.gcs.is_alive:
            self.restart_gcs()
        for node in list(self._cluster.worker_nodes):
            if not _first(node, "raylet").is_alive:
                self._remove(node)
        while len(self._cluster.worker_nodes) < self.num_nodes:
            with _same_sigterm_handler():
                self._cluster.add_node(
                    wait=False, num_cpus=NODE_CPUS, object_store_memory=OBJECT_STORE_BYTES
                )
        return False

    def _remove(self, node: Any) -> None:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self._cluster.worker_nodes.discard(node)

    def leaked(self, seconds: float) -> list[str]:
        """Returns the titles of processes that outlive their job or their node.

        Called when no job is running.

        Args:
            seconds: Time in which Ray may end them.
        """
        left = survivors([*self._victims, *self.tasks()], seconds)
        self._victims = []
        return [process.title for process in left if process.title]

    def stop(self) -> None:
        """Kills all processes of the cluster. It can be started again."""
        raylets = (self.head, *self.workers)
        everything = [p for raylet in raylets for p in (raylet, *descendants(raylet))]
        with contextlib.suppress(Exception):  # Ray's own clean-up of nodes that are dead
            for node in list(self._cluster.worker_nodes):
                self._remove(node)
            self._cluster.head_node.kill_all_processes(
                check_alive=False, allow_graceful=False, wait=True
            )
        for left in [*everything, *self._victims]:
            left.send(signal.SIGKILL)
        survivors(everything, 10)

    def close(self) -> None:
        """Stops the cluster and removes its files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_task(title: str) -> bool:
    """Returns True if a worker with this title runs a task or an actor of a job.

    >>> is_task("ray::list_shard"), is_task("ray::IDLE"), is_task("ray::_StatsActor.get")
    (True, False, False)
    """
    name = title.removeprefix("ray::")
    return name != title and not name.startswith(RAY_ACTORS)


@contextlib.contextmanager
def _same_sigterm_handler() -> Iterator[None]:
    """Restores the handler of SIGTERM. That of Ray's nodes would drain them for 30 s."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _first(node: Any, kind: str) -> Process:
    """Returns the process of a node. One that has been reaped counts as dead."""
    running = node.all_processes.get(kind)
    if not running or running[0].process.poll() is not None:
        return Process(0, "")
    return process(running[0].process.pid)

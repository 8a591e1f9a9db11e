"""Ray cluster on this machine with a head without CPUs and worker nodes that can be killed.

Each node is a raylet with its own object store, optionally with a network namespace and an IP
address of its own, so that its link can be taken down. The global control store (GCS) persists its
tables in RocksDB, so that it can be restarted while jobs run, as with a persistent volume on
Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import JobError
from tests.chaos.faults import TITLES
from tests.chaos.network import Network, Port
from tests.chaos.processes import Process, children, descendants, process, survivors, wait_until

#: Size of the object store of each node, in bytes. Ray requires at least 75 MiB.
OBJECT_STORE_BYTES = 80 << 20
#: Number of CPUs of each worker node.
NODE_CPUS = 2
#: Time in which the raylet of a node must start, in seconds.
START_SECONDS = 60.0
#: Settings of Ray: nodes that do not answer are dead after seconds instead of a minute, and so are
#: connections.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}
#: Further settings of a cluster with a network. `jobs.run` restricts Ray to the loopback interface.
NETWORK_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
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
        has_network: Whether each worker node has a network namespace, which requires root.

    Raises:
        JobError: Network namespaces are not permitted.
    """

    def __init__(self, num_nodes: int, has_network: bool = False):
        self.num_nodes = num_nodes
        self._network = Network() if has_network else None
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # paths of sockets must be short
        self._cluster: Any = None
        self._nodes: list[_Node | _NetworkNode] = []
        self._dead: list[_NetworkNode] = []
        self._victims: list[Process] = []
        # Ray writes the address of a new cluster to its temporary folder. In the usual one, other
        # programs on this machine would join this cluster.
        self._environment: dict[str, str | None] = {}
        self._set_variables({**SETTINGS, "RAY_TMPDIR": str(self.folder)})
        self._set_variables(NETWORK_SETTINGS if has_network else {})
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Starts the head and the worker nodes."""
        sessions = self.folder / "ray"
        sessions.mkdir(exist_ok=True)
        storage = tempfile.mkdtemp(prefix="gcs-", dir=self.folder)
        self._set_variables({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": storage})
        try:
            self._start(sessions)
        except Exception:  # Ray raises this class if a busy machine starts the raylet too slowly
            for left in descendants(process(os.getpid())):
                left.send(signal.SIGKILL)
            self._start(sessions)
        self.repair()

    def _set_variables(self, variables: Mapping[str, str]) -> None:
        """Sets environment variables, which Ray and the jobs inherit, until `close`."""
        for name, value in variables.items():
            self._environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _start(self, sessions: Path) -> None:
        from ray.cluster_utils import Cluster

        address = {"node_ip_address": self._network.port.address} if self._network else {}
        with _same_sigterm_handler():
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0 if self.num_nodes else NODE_CPUS,
                    "include_dashboard": False,
                    "object_store_memory": OBJECT_STORE_BYTES,
                    "temp_dir": str(sessions),
                    **address,
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
        return [node.raylet for node in self._nodes]

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

    def disconnect(self, raylet: Process) -> None:
        """Takes the link of a node down. Its processes continue to run."""
        self._port(raylet).disconnect()

    def connect(self, raylet: Process) -> None:
        """Takes the link of a node up again, unless the node has been replaced."""
        with contextlib.suppress(StopIteration):
            self._port(raylet).connect()

    def _port(self, raylet: Process) -> Port:
        if raylet == self.head and self._network is not None:
            return self._network.port
        nodes = (node for node in self._nodes if isinstance(node, _NetworkNode))
        return next(node.port for node in nodes if node.raylet == raylet)

    def _ports(self) -> list[Port]:
        if self._network is None:
            return []
        nodes = [node for node in self._nodes if isinstance(node, _NetworkNode)]
        return [self._network.port, *(node.port for node in nodes)]

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

        Takes all links up, because nodes cannot start while they do not reach the head.

        Returns:
            True if the cluster is a new one, at another address.
        """
        for port in self._ports():
            port.connect()
        if self.has_lost_head:
            self.stop()
            self.start()
            return True
        if not self.gcs.is_alive:
            self.restart_gcs()
        for node in [node for node in self._nodes if not node.raylet.is_alive]:
            self._nodes.remove(node)
            if isinstance(node, _NetworkNode):
                self._dead.append(node)  # `leaked` checks that its processes end
            else:
                node.remove()
        while len(self._nodes) < self.num_nodes:
            if self._network is None:
                self._nodes.append(_Node(self._cluster))
            else:
                self._nodes.append(_NetworkNode(self._network, self.address, self.folder))
        for node in self._nodes:
            node.wait()
        return False

    def leaked(self, seconds: float) -> list[str]:
        """Returns titles of processes that outlive their job or node. Called when no job runs."""
        of_dead_nodes = [process for node in self._dead for process in node.processes()]
        left = survivors([*self._victims, *of_dead_nodes, *self.tasks()], seconds)
        self._victims = []
        while self._dead:
            self._dead.pop().remove()
        return [process.title for process in left if process.title]

    def unregistered(self, seconds: float) -> list[str]:
        """Returns the addresses of nodes that run although the GCS considers them dead."""
        state = self._cluster.global_state

        def find() -> list[str]:
            alive = {n["NodeManagerAddress"] for n in state.node_table() if n["Alive"]}
            nodes = [node for node in self._nodes if isinstance(node, _NetworkNode)]
            found = [node for node in nodes if node.raylet.is_alive]
            return [node.port.address for node in found if node.port.address not in alive]

        wait_until(lambda: not find(), seconds, 1.0)
        return find()

    def stop(self) -> None:
        """Kills all processes of the cluster. It can be started again."""
        if self._cluster is None:
            return
        raylets = (self.head, *self.workers)
        everything = [p for raylet in raylets for p in (raylet, *descendants(raylet))]
        with contextlib.suppress(Exception):  # Ray's own clean-up of nodes that are dead
            for node in [*self._nodes, *self._dead]:
                node.remove()
            self._nodes, self._dead = [], []
            self._cluster.head_node.kill_all_processes(
                check_alive=False, allow_graceful=False, wait=True
            )
        for left in [*everything, *self._victims]:
            left.send(signal.SIGKILL)
        survivors(everything, 10)

    def close(self) -> None:
        """Stops the cluster, removes its files and its network, and restores the environment."""
        self.stop()
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if self._network is not None:
            self._network.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Node:
    """Worker node that shares the network of this process."""

    def __init__(self, cluster: Any):
        self._cluster = cluster
        with _same_sigterm_handler():
            self._node = cluster.add_node(
                wait=False, num_cpus=NODE_CPUS, object_store_memory=OBJECT_STORE_BYTES
            )

    @property
    def raylet(self) -> Process:
        return _first(self._node, "raylet")

    def wait(self) -> None:
        """Waits until the raylet has started, which is the case."""

    def remove(self) -> None:
        self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self._cluster.worker_nodes.discard(self._node)


class _NetworkNode:
    """Worker node in a network namespace of its own, started by `ray start`.

    Args:
        folder: Folder for the sessions of Ray. Nodes that start at the same time cannot share one.

    Attributes:
        raylet: Raylet of the node, after `wait`.
    """

    def __init__(self, network: Network, address: str, folder: Path):
        self._network, self.port = network, network.add()
        self.raylet = Process(0, "")
        arguments = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        arguments += [f"--address={address}", f"--node-ip-address={self.port.address}"]
        arguments += [f"--num-cpus={NODE_CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        arguments += [f"--temp-dir={tempfile.mkdtemp(prefix='n', dir=folder)}"]
        self._log = folder / f"{self.port.namespace}.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                self.port.command([*arguments, "--include-log-monitor=false"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        if self.raylet.pid:
            return

        def has_started() -> bool:
            found = [c for c in children(process(self._child.pid)) if "/raylet " in c.title]
            self.raylet = found[0] if found else self.raylet
            return bool(found) or self._child.poll() is not None

        if not wait_until(has_started, START_SECONDS) or not self.raylet.pid:
            output = self._log.read_text(errors="replace").strip()
            raise JobError(f"the node at {self.port.address} did not start: {output[-1000:]}")

    def processes(self) -> list[Process]:
        return self._network.processes(self.port)

    def remove(self) -> None:
        self._network.remove(self.port)
        self._child.wait()


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

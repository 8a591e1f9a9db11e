"""Network of a simulated cluster: a network namespace per node, connected by a bridge.

The bridge is in a namespace of its own, so that this machine gets one interface only, and neither
its addresses nor its firewall affect the nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import JobError
from tests.chaos.processes import Process, process, survivors

#: Addresses of nodes, from the range for benchmarks of networks (RFC 2544), which is not routed.
SUBNETS = [f"198.{18 + n // 256}.{n % 256}" for n in range(512)]
#: Prefix of the names of namespaces, before the id and the start time of the owning process.
PREFIX = "maxray"
#: Folders in which `ip` may be besides those of `PATH`.
FOLDERS = ("/usr/sbin", "/sbin")
#: Folder of the namespaces that have a name.
NAMESPACES = Path("/run/netns")
#: Time in which killed processes of a namespace end, in seconds.
KILL_SECONDS = 10.0


@dataclass(frozen=True)
class Port:
    """Connection of a node to the bridge.

    Attributes:
        namespace: Network namespace of the node, or "" for that of this process.
        address: IP address of the node.
        switch: Namespace of the bridge.
        link: Name of the interface at the bridge.
    """

    namespace: str
    address: str
    switch: str
    link: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs another one at this port."""
        if not self.namespace:
            return [*arguments]
        return ["nsenter", f"--net={NAMESPACES / self.namespace}", *arguments]

    def disconnect(self) -> None:
        """Takes the link down. Packets are lost in both directions, and connections stay open."""
        _ip("-n", self.switch, "link", "set", self.link, "down")

    def connect(self) -> None:
        """Takes the link up again."""
        _ip("-n", self.switch, "link", "set", self.link, "up")


class Network:
    """Bridge with a port for this process, to which nodes can be added.

    Namespaces of processes that were killed before they could remove them are removed first, with
    all processes in them.

    Attributes:
        port: Port of this process.

    Raises:
        JobError: Network namespaces are not permitted.
    """

    def __init__(self) -> None:
        remove_abandoned()
        owner = process(os.getpid())
        self._name = f"{PREFIX}-{owner.pid}-{owner.start}"
        self._numbers = itertools.cycle(range(1, 255))  # a new node does not get a recent address
        self._used: set[int] = set()
        self._subnet = _free_subnet(owner.pid)
        self._link = f"{PREFIX}{owner.pid}"
        try:
            _ip("netns", "add", self._name)
            _ip("-n", self._name, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._name, "link", "set", "bridge", "up")
            self.port = self._plug(self._number(), "", self._link)
        except JobError:
            self.close()
            raise

    def add(self) -> Port:
        """Creates a namespace with an address and connects it."""
        number = self._number()
        name = f"{self._name}-{number}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        return self._plug(number, name, "eth0")

    def _number(self) -> int:
        number = next(n for n in self._numbers if n not in self._used)
        self._used.add(number)
        return number

    def _plug(self, number: int, namespace: str, interface: str) -> Port:
        port = Port(namespace, f"{self._subnet}.{number}", self._name, f"port{number}")
        place = ["netns", namespace or str(os.getpid())]
        peer = ["peer", "name", interface, *place]
        _ip("-n", self._name, "link", "add", port.link, "type", "veth", *peer)
        _ip("-n", self._name, "link", "set", port.link, "master", "bridge", "up")
        inside = ["-n", namespace] if namespace else []
        _ip(*inside, "address", "add", f"{port.address}/24", "dev", interface)
        _ip(*inside, "link", "set", interface, "up")
        return port

    def processes(self, port: Port) -> list[Process]:
        """Returns the processes of a node."""
        return _processes(port.namespace)

    def remove(self, port: Port) -> None:
        """Kills the processes of a node and removes its namespace."""
        _remove(port.namespace)
        self._used.discard(int(port.address.rpartition(".")[2]))

    def close(self) -> None:
        """Kills the processes of all nodes and removes the network."""
        with contextlib.suppress(JobError):  # removed with the namespace, but later
            _ip("link", "delete", self._link)
        for name in _names():
            if name == self._name or name.startswith(f"{self._name}-"):
                _remove(name)


def remove_abandoned() -> list[str]:
    """Removes the namespaces whose owner has ended. Returns their names."""
    abandoned = []
    for name in _names():
        prefix, _, rest = name.partition("-")
        pid, _, start = rest.partition("-")
        owner = Process(int(pid) if pid.isdigit() else 0, start.partition("-")[0])
        if prefix == PREFIX and pid.isdigit() and not owner.is_alive:
            _remove(name)
            abandoned.append(name)
    return abandoned


def _names() -> list[str]:
    return sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def _processes(namespace: str) -> list[Process]:
    return [process(int(pid)) for pid in _ip("netns", "pids", namespace).split()]


def _remove(namespace: str) -> None:
    """Kills the processes of a namespace and removes it. The kernel removes its interfaces."""
    for _ in range(3):  # a process may start others while it is killed
        found = _processes(namespace)
        for left in found:
            left.send(signal.SIGKILL)
        survivors(found, KILL_SECONDS)
        if not found:
            break
    _ip("netns", "delete", namespace)


def _free_subnet(number: int) -> str:
    used = {
        address["local"].rpartition(".")[0]
        for interface in json.loads(_ip("-json", "-4", "address", "show"))
        for address in interface["addr_info"]
    }
    start = number % len(SUBNETS)
    return next(s for s in [*SUBNETS[start:], *SUBNETS[:start]] if s not in used)


def _ip(*arguments: str) -> str:
    path = shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))
    if path is None:
        raise JobError("network namespaces require `ip` (iproute2), which is not installed")
    done = subprocess.run([path, *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        command = " ".join(("ip", *arguments))
        raise JobError(f"network namespaces require root: `{command}` failed ({reason})")
    return done.stdout

"""Tests of network namespaces, with real ones. They require root and `ip` (iproute2)."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pipeline.config import JobError
from tests.chaos.network import NAMESPACES, Network, Port, remove_abandoned
from tests.chaos.processes import wait_until

#: Program that opens a connection to an address and port within a second.
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
#: Program that prints the port at which it accepts connections to an address.
LISTEN = (
    "import socket, sys, time\n"
    "server = socket.create_server((sys.argv[1], 0), backlog=100)\n"
    "print(server.getsockname()[1], flush=True)\n"
    "time.sleep(60)"
)

#: Program that is killed while a process of its network runs.
KILLED = (
    "import os, signal, subprocess\n"
    "from tests.chaos.network import Network\n"
    "port = Network().add()\n"
    "silent = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
    "subprocess.Popen(port.command(['sleep', '60']), **silent)\n"
    "print(port.namespace, port.switch, flush=True)\n"
    "os.kill(os.getpid(), signal.SIGKILL)"
)


def listen(port: Port) -> tuple[subprocess.Popen[str], str]:
    """Starts a server on a node. Returns its process and its port."""
    command = port.command([sys.executable, "-c", LISTEN, port.address])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def reaches(port: Port, address: str, number: str) -> bool:
    """Returns True if a node can connect to a server."""
    command = port.command([sys.executable, "-c", CONNECT, address, number])
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def test_partition_separates_one_node(network):
    first, second = network.add(), network.add()
    server, number = listen(first)
    ports = (network.port, first, second)
    assert [reaches(port, first.address, number) for port in ports] == [True] * 3
    first.disconnect()
    assert [reaches(port, first.address, number) for port in ports] == [False, True, False]
    first.connect()
    assert wait_until(lambda: all(reaches(p, first.address, number) for p in ports), 10)

    network.port.disconnect()  # that of the head, which this process shares
    assert not reaches(network.port, first.address, number)
    assert reaches(second, first.address, number)
    assert {p.pid for p in network.processes(first)} == {server.pid}
    network.remove(first)
    assert server.wait(10) == -signal.SIGKILL
    assert network.add().address not in {port.address for port in ports}


def test_network_of_a_killed_process_is_removed(network):
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    names = killed.stdout.split()
    (left,) = network.processes(Port(names[0], "", "", ""))
    assert left.is_alive
    assert set(names) <= set(remove_abandoned()) and not left.is_alive
    assert not any((NAMESPACES / name).exists() for name in names)
    assert (NAMESPACES / network.port.switch).exists()  # its owner is alive


def test_missing_permission_is_one_sentence():
    code = "import os; from tests.chaos.network import Network\n"
    code += "os.setuid(65534) if os.getuid() == 0 else None; Network()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = done.stderr.strip().splitlines()[-1]
    assert "JobError: network namespaces require " in message


def test_missing_program_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("tests.chaos.network.FOLDERS", ())
    with pytest.raises(JobError, match="require `ip`"):
        Network()

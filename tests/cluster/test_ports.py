"""Ports and authentication of the nodes of a cluster, compared with the documentation."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import httpx2
import psutil
import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PAGE = (ROOT / "docs/reference/operations.md").read_text()


def listening(pid: int) -> dict[int, set[str]]:
    """Returns the addresses by port on which the processes below one listen."""
    found: dict[int, set[str]] = {}
    process = psutil.Process(pid)
    for child in (process, *process.children(recursive=True)):
        for connection in child.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.setdefault(connection.laddr.port, set()).add(connection.laddr.ip)
    return found


def test_all_open_ports_are_documented(head):
    """Ports on other interfaces than the loopback have an option in the table of the page."""
    options = {port: name for name, port in head.ports.items()}
    for port, addresses in listening(head.pid).items():
        if addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}:
            continue
        is_worker = 20000 <= port <= 20999
        option = "max-worker-port" if is_worker else options.get(port)
        assert option, f"{port} on {addresses} has no option"
        assert f"`--{option}`" in PAGE, option


@pytest.mark.parametrize(
    ("option", "path", "status"),
    [
        ("dashboard-port", "/api/jobs/", 401),
        ("dashboard-port", "/nodes?view=summary", 401),
        ("dashboard-agent-listen-port", "/api/job_agent/jobs/", 401),
        ("metrics-export-port", "/metrics", 200),
    ],
)
def test_authentication_is_as_documented(head, option, path, status):
    (row,) = (line for line in PAGE.split("\n") if f"`--{option}`" in line)
    assert ("| none |" in row) == (status == 200)
    hosts = ("127.0.0.1", socket.gethostbyname(socket.gethostname()))
    (port,) = (head.ports[option],)
    address = next(host for host in hosts if socket.socket().connect_ex((host, port)) == 0)
    response = httpx2.get(f"http://{address}:{port}{path}", trust_env=False, timeout=30)
    assert response.status_code == status
    assert re.search("token", response.text, re.IGNORECASE) or status == 200


def test_ray_client_needs_the_token(head):
    code = f"import ray; ray.init('ray://127.0.0.1:{head.ports['ray-client-server-port']}')"
    environment = {**head.environment, "RAY_AUTH_TOKEN": "1" * 64}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "token" in done.stderr.lower()

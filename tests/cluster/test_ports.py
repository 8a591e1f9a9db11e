"""Ports and authentication of the nodes of a cluster, compared with the documentation."""

from __future__ import annotations

import re
import socket

import grpc
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
    options = {port: f"--{name}" for name, port in head.ports.items()}
    options |= {port: "--max-worker-port" for port in range(20000, 21000)}
    options |= {44217: "AUTOSCALER_METRIC_PORT", 44227: "DASHBOARD_METRIC_PORT"}
    for port, addresses in listening(head.pid).items():
        if addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}:
            continue
        assert port in options, f"{port} on {addresses} has no option"
        assert f"`{options[port]}`" in PAGE, options[port]


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
    port = head.ports[option]
    address = next(host for host in hosts if socket.socket().connect_ex((host, port)) == 0)
    response = httpx2.get(f"http://{address}:{port}{path}", trust_env=False, timeout=30)
    assert response.status_code == status
    assert re.search("token", response.text, re.IGNORECASE) or status == 200


@pytest.mark.parametrize(
    ("option", "method"),
    [
        ("port", "JobInfoGcsService/GetAllJobInfo"),
        ("node-manager-port", "NodeManagerService/GetNodeStats"),
        ("object-manager-port", "ObjectManagerService/Push"),
        ("dashboard-agent-grpc-port", "ReporterService/GetTraceback"),
        ("ray-client-server-port", "RayletDriver/ClusterInfo"),
    ],
)
def test_calls_need_the_token(head, option, method):
    assert f"`--{option}`" in PAGE
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(f"127.0.0.1:{head.ports[option]}") as channel:
        call = channel.unary_unary(f"/ray.rpc.{method}")
        for metadata in ([], [("authorization", f"Bearer {'1' * 64}")]):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=30, metadata=metadata)
            assert caught.value.code() == unauthenticated

"""`jobs.serve` as a process: it starts, answers, and ends when it has answered."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from subprocess import Popen

import httpx2
import psutil
import pytest

from pipeline.search.searcher import open_index
from tests.conftest import start_job
from tests.serve.conftest import free_port

pytestmark = pytest.mark.heavy

BODY = {"query": "the lift of a wing", "k": 3, "representation": "hpool_2"}


@pytest.fixture(params=["one process", "deployments"])
def server(index_uri, request) -> Iterator[tuple[str, Popen]]:
    port = free_port()
    settings = ["single_process=false"] * (request.param == "deployments")
    process = start_job("jobs.serve", index_uri, *settings, "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(process, url)
        yield url, process
    finally:
        process.kill()
        process.wait()


def wait_until_it_answers(process: Popen, url: str) -> None:
    end = time.monotonic() + 120
    while not answers(url):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.3)


def answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=30).status_code == 200
    except httpx2.TransportError:
        return False


def test_drains_requests_on_sigterm(server, request):
    url, process = server
    assert httpx2.post(f"{url}/v1/search", json=BODY, timeout=60).status_code == 200
    statuses: list[tuple[float, int]] = []
    ends = threading.Event()

    def ask() -> None:
        with httpx2.Client(timeout=60) as http:
            while not ends.is_set():
                sent = time.monotonic()
                try:
                    status = http.post(f"{url}/v1/search", json=BODY).status_code
                except httpx2.TransportError:
                    status = 0
                statuses.append((sent, status))
                if status != 200:
                    return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    stopped = time.monotonic()
    out, err = process.communicate(timeout=60)
    ends.set()
    for thread in threads:
        thread.join()
    assert process.returncode == 143 and "stopped after draining in-flight requests" in err
    # Each step of the start has a line with its time, and Ray's messages on its end are not shown.
    steps = [line.partition(" ")[2] for line in out.splitlines()]
    assert steps[0] == "starting Ray" and re.fullmatch(r"loading \S+ \(\d+ s\)", steps[2])
    started = {step.split()[1] for step in steps if re.fullmatch(r"started \S+ \(\d+ s\)", step)}
    assert ("Encoder" in started) == ("deployments" in request.node.name)
    assert steps[-1] == "draining in-flight requests"
    assert "retries" not in out + err
    before = [status for sent, status in statuses if sent < stopped]
    assert len(before) > 20 and set(before) == {200}
    assert {status for _, status in statuses} <= {200, 503, 0}


def test_haproxy_in_place_of_the_proxy_of_ray(index_uri):
    """The option that docs/reference/operations.md describes."""
    port, environment = free_port(), {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    environment["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] = "2"
    for name in ("METRICS", "STATS"):
        environment[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(free_port())
    process = start_job("jobs.serve", index_uri, "--port", str(port), **environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(process, url)
        response = httpx2.post(f"{url}/v1/search", json=BODY, timeout=60)
        hits = open_index(index_uri).search(BODY["query"], BODY["representation"], k=BODY["k"])
        assert [hit["item_id"] for hit in response.json()["hits"]] == [hit.item_id for hit in hits]
        json_type = {"Content-Type": "application/json"}
        response = httpx2.post(f"{url}/v1/search", content=b"{", headers=json_type, timeout=30)
        assert response.status_code == 400 and response.json()["error"]["code"] == "bad_request"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")  # never completed
            assert b" 408 " in connection.recv(200)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 143 and "stopped after draining in-flight requests" in err
    finally:
        process.kill()
        process.wait()


def test_rejects_occupied_port(server, index_uri):
    url, _ = server
    port = url.rpartition(":")[2]
    second = start_job("jobs.serve", index_uri, "--port", port)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"port must be an address of this machine and a free port, got '127.0.0.1:{port}'" in err
    assert httpx2.post(f"{url}/v1/search", json=BODY, timeout=30).status_code == 200


def test_only_the_gateway_listens_on_other_interfaces(index_uri):
    port = free_port()
    process = start_job("jobs.serve", index_uri, "--port", str(port))
    try:
        wait_until_it_answers(process, f"http://127.0.0.1:{port}")
        started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        open_ports = {
            connection.laddr
            for pid in (process.pid, *started)
            for connection in psutil.Process(pid).net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    finally:
        process.kill()
        process.wait()
    assert ("127.0.0.1", port) in open_ports and len(open_ports) > 10
    others = {ip for ip, _ in open_ports} - {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert not others, open_ports

"""Jobs that are stopped, or lose what they stand on, end with one sentence."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest
import yaml

from tests.conftest import start_job
from tests.serve.conftest import free_port


def children(process: Popen, name: str) -> list[int]:
    """The child processes of a job whose executable is called `name`."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in listed if Path(f"/proc/{pid}/comm").read_text().strip() == name]


def wait_for(process: Popen, condition) -> None:
    """Waits for a condition while a job runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def spec(tmp_path: Path, collection) -> str:
    """A spec whose job takes 20 s at least and commits after each item."""
    fields = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(**{f"d{i}": "x" for i in range(20)}))},
        "encoder": {"name": "sleeping", "seconds": 1, "num_tokens": 4, "dim": 8},
        "representations": [{"compressor": "none"}],
        "unit_items": 1,
        "fragment_items": 1,
        "commit_items": 1,
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(fields))
    return str(tmp_path / "spec.yaml")


@pytest.mark.parametrize("verb", ["index", "serve"])
def test_sigterm_while_ray_starts(spec, index_uri, verb):
    arguments = {"index": [spec], "serve": [index_uri, "--port", str(free_port())]}[verb]
    process = start_job(f"jobs.{verb}", *arguments)
    wait_for(process, lambda: children(process, "gcs_server"))
    process.send_signal(signal.SIGTERM)
    said, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, "stopped by SIGTERM\n"), said


@pytest.mark.heavy
def test_the_index_is_deleted_during_the_job(cluster, spec, tmp_path):
    process = start_job("jobs.index", spec, address=cluster)
    data = tmp_path / "index/items.lance/data"
    wait_for(process, lambda: data.exists() and len(list(data.iterdir())) > 1)
    shutil.rmtree(tmp_path / "index")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert error.startswith(f"error: the index {tmp_path}/index was deleted"), error
    assert error.count("\n") == 1, error


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_of_ray_dies(spec, name):
    process = start_job("jobs.index", spec)
    wait_for(process, lambda: len(children(process, "raylet")) == 1)
    for line in process.stdout:  # the first line of progress: Ray has started
        if line:
            break
    os.kill(children(process, name)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.startswith(f"error: Ray's {name} died") and error.count("\n") == 1, error


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens(spec, scheme):
    start = time.monotonic()
    address = f"{scheme}127.0.0.1:{free_port()}"
    _, error = start_job("jobs.index", spec, address=address).communicate(timeout=60)
    assert error.startswith(f"error: RAY_ADDRESS: '{address}' cannot be reached"), error
    assert error.count("\n") == 1 and time.monotonic() - start < 40

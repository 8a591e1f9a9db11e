"""The index job survives the death of any of its processes, and its rows are equal bit for bit.

Every test runs the real job on real weights in processes of their own, kills one of them in the
middle, and compares the index in the end with that of an unbroken run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pytest
import yaml

from pipeline.index.lease import Lease
from pipeline.index.reader import Index
from pipeline.index.status import status
from tests.conftest import CRANFIELD, ROOT

NUM_ITEMS = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a collection of short texts, one of them empty."""
    folder = tmp_path_factory.mktemp("kills")
    lines = (CRANFIELD / "corpus.jsonl").read_text().splitlines()[:NUM_ITEMS]
    documents = [json.loads(line) for line in lines]
    short = [{"_id": d["_id"], "text": " ".join(d["text"].split()[:50])} for d in documents]
    short[70]["text"] = ""
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, short)))
    return folder


@pytest.fixture(scope="module")
def unbroken(folder: Path, cluster: str) -> pa.Table:
    """The rows of a run that nothing disturbed."""
    driver = start(folder, "unbroken", cluster)
    assert finish(driver) == 0
    return table(folder / "unbroken")


def start(folder: Path, name: str, cluster: str, lease_seconds: float = 60.0) -> subprocess.Popen:
    """Starts the index job, with small units so that there is a middle to kill it in."""
    spec = {
        "index": str(folder / name),
        "source": {"name": "text", "path": str(folder / "corpus.jsonl")},
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 8}},
            {"compressor": {"name": "random", "num_vectors": 8}},
        ],
        "unit_items": 4,
        "fragment_items": 8,
        "commit_items": 8,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    code = f"""
import jobs, ray
from pipeline import config
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
def main(_):
    spec = config.load(IndexSpec, {str(path)!r})
    with jobs.cluster():
        job.run(spec, IndexResources(), job=jobs.job_id(), lease_seconds={lease_seconds})
jobs.run(main)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": cluster, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(driver: subprocess.Popen) -> int:
    """Waits for a driver's end and returns its exit code; what it said comes with a failure."""
    _, said = driver.communicate(timeout=120)
    print(said)
    return driver.returncode


def committed(index: Path) -> int:
    """How many rows the index has at present."""
    try:
        return lance.dataset(str(index / "items.lance")).count_rows()
    except (ValueError, OSError):
        return 0


def wait_for_rows(index: Path, driver: subprocess.Popen) -> int:
    """Waits until the job is in its middle; returns the committed rows."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (rows := committed(index)) >= 16:
            assert rows < NUM_ITEMS - 40, "too late: nothing is left to be killed"
            return rows
        assert driver.poll() is None, "the job ended before it was in its middle"
        time.sleep(0.02)
    raise AssertionError("the job did not get to its middle")


def processes(title: str) -> list[int]:
    """The processes whose title (as Ray sets it) begins so."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().startswith(title):
                found.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return found


def table(index: Path) -> pa.Table:
    """All rows by item id, each once."""
    rows = lance.dataset(str(index / "items.lance")).to_table().sort_by("item_id")
    assert len(set(rows["item_id"].to_pylist())) == rows.num_rows
    return rows


def last_job(index: Path) -> dict:
    """The summary of the last job."""
    return json.loads(sorted((index / "jobs").glob("*/summary.json"))[-1].read_text())


def check_whole(index: Path, unbroken: pa.Table) -> None:
    """Listed = indexed + rejected, none twice, vectors bit-equal to the unbroken run's."""
    summary = last_job(index)
    assert summary["state"] == "done"
    assert summary["listed"] == NUM_ITEMS
    assert summary["indexed"] == NUM_ITEMS - 1
    assert Index(str(index)).rejects()["reason"].to_pylist() == ["empty text"]
    assert Index(str(index)).lease() is None
    assert table(index).equals(unbroken)


def check_resumed(index: Path, rows_before: int) -> None:
    """The last job encoded what was not committed before, and nothing else."""
    summary = last_job(index)
    assert summary["unchanged"] == rows_before
    assert summary["new"] == NUM_ITEMS - 1 - rows_before


def test_sigkill_to_the_driver(folder: Path, cluster: str, unbroken: pa.Table):
    index = folder / "driver"
    driver = start(folder, index.name, cluster)
    wait_for_rows(index, driver)
    driver.kill()
    finish(driver)
    rows_before = committed(index)
    dataset = Index(str(index)).dataset
    assert Lease.of(dataset).owner  # nobody gave it back ...
    (job,) = status(str(index))["jobs"]
    assert Index(str(index)).lease() is None and job["state"] == "killed"  # ... but it is known
    assert finish(start(folder, index.name, cluster)) == 0
    check_resumed(index, rows_before)
    check_whole(index, unbroken)


@pytest.mark.heavy
@pytest.mark.parametrize("stage", ["StageActor", "WriteFragments"])
def test_sigkill_to_an_actor(folder: Path, cluster: str, unbroken: pa.Table, stage: str):
    index = folder / stage.lower()
    driver = start(folder, index.name, cluster)
    wait_for_rows(index, driver)
    victims = processes(f"ray::MapWorker(MapBatches({stage}))")
    assert victims
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert finish(driver) == 0  # Ray starts another, which redoes what was lost
    check_whole(index, unbroken)


@pytest.mark.heavy
def test_sigterm_commits_what_is_finished(folder: Path, cluster: str, unbroken: pa.Table):
    index = folder / "sigterm"
    driver = start(folder, index.name, cluster)
    wait_for_rows(index, driver)
    driver.terminate()
    assert finish(driver) == 143
    assert Index(str(index)).lease() is None
    assert last_job(index)["state"] == "stopped"
    rows_before = committed(index)
    assert rows_before == last_job(index)["new"]
    assert finish(start(folder, index.name, cluster)) == 0
    check_resumed(index, rows_before)
    check_whole(index, unbroken)


@pytest.fixture
def frozen(folder: Path, cluster: str) -> Iterator[subprocess.Popen]:
    """A driver that is stopped in the middle for longer than its lease lives."""
    driver = start(folder, "frozen", cluster, lease_seconds=4)
    wait_for_rows(folder / "frozen", driver)
    os.kill(driver.pid, signal.SIGSTOP)
    yield driver
    driver.kill()


@pytest.mark.heavy
def test_a_driver_frozen_past_its_lease_adds_nothing(
    folder: Path, cluster: str, unbroken: pa.Table, frozen: subprocess.Popen
):
    index = folder / "frozen"
    time.sleep(4.5)
    assert finish(start(folder, index.name, cluster)) == 0
    check_whole(index, unbroken)
    version = Index(str(index)).version
    os.kill(frozen.pid, signal.SIGCONT)
    _, said = frozen.communicate(timeout=60)
    assert frozen.returncode == 1
    assert said.splitlines()[-1].startswith(f"error: the lease on {index} went to ")
    assert Index(str(index)).version == version
    assert table(index).equals(unbroken)

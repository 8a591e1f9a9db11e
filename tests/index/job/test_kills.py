"""Tests that the index job survives the death of any of its processes with bit-identical rows.

Each test runs the job with pretrained weights in separate processes, kills one of them, resumes
the job, and compares the final index with that of an uninterrupted run.
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

import jobs
from pipeline import config
from pipeline.index import EXECUTOR, job
from pipeline.index.lease import Lease
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.status import status
from tests.conftest import CRANFIELD, ROOT

NUM_ITEMS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a collection of short texts, one of them empty."""
    folder = tmp_path_factory.mktemp("kills")
    lines = (CRANFIELD / "corpus.jsonl").read_text().splitlines()[:NUM_ITEMS]
    documents = [json.loads(line) for line in lines]
    short = [{"_id": d["_id"], "text": " ".join(d["text"].split()[:25])} for d in documents]
    short[70]["text"] = ""
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, short)))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, cluster: str) -> pa.Table:
    """Rows of an uninterrupted run."""
    run(folder, "uninterrupted")
    return table(folder / "uninterrupted")


def write_spec(folder: Path, name: str) -> str:
    """Writes a spec with small units, so that the job can be killed while it runs."""
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
    return str(path)


def run(folder: Path, name: str) -> None:
    """Runs or resumes the index job in this process."""
    spec = config.load(IndexSpec, write_spec(folder, name))
    job.run(spec, IndexResources(), job=jobs.job_id(), report=lambda line: None)


def start(folder: Path, name: str, cluster: str, lease_seconds: float = 60.0) -> subprocess.Popen:
    """Starts the index job in a process."""
    path = write_spec(folder, name)
    code = f"""
import jobs, ray
from pipeline import config
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
def main(_):
    spec = config.load(IndexSpec, {path!r})
    with jobs.cluster():
        job.run(spec, IndexResources(), job=jobs.job_id(), lease_seconds={lease_seconds})
jobs.run(main)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_ADDRESS": cluster,
            "PYTHONPATH": str(ROOT),
            EXECUTOR: "ray",  # the tests kill actors
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(driver: subprocess.Popen) -> int:
    """Waits for a driver, prints its standard error and returns its exit code."""
    _, error = driver.communicate(timeout=120)
    print(error)
    return driver.returncode


def committed(index: Path) -> int:
    """Returns the current number of rows of the index."""
    try:
        return lance.dataset(str(index / "items.lance")).count_rows()
    except (ValueError, OSError):
        return 0


def wait_for_rows(index: Path, driver: subprocess.Popen) -> int:
    """Waits until the job has committed some rows and returns their number."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (rows := committed(index)) >= 16:
            assert rows < NUM_ITEMS - 40, "the job is almost complete"
            return rows
        assert driver.poll() is None, "the job ended before it committed 16 rows"
        time.sleep(0.02)
    raise AssertionError("the job did not commit 16 rows within 90 s")


def processes(title: str) -> list[int]:
    """Returns the ids of the processes whose title, as set by Ray, has a prefix."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().startswith(title):
                pids.append(int(entry.name))
        except OSError:
            continue  # the process has ended
    return pids


def table(index: Path) -> pa.Table:
    """Returns the rows sorted by item id and checks that ids are unique."""
    rows = lance.dataset(str(index / "items.lance")).to_table().sort_by("item_id")
    assert len(set(rows["item_id"].to_pylist())) == rows.num_rows
    return rows


def last_job(index: Path) -> dict:
    """Returns the summary of the last job."""
    return json.loads(sorted((index / "jobs").glob("*/summary.json"))[-1].read_text())


def check_complete(index: Path, uninterrupted: pa.Table) -> None:
    """Checks the counts of the last job and that the rows equal those of the uninterrupted run."""
    summary = last_job(index)
    assert summary["state"] == "done"
    assert summary["listed"] == NUM_ITEMS
    assert summary["indexed"] == NUM_ITEMS - 1
    assert IndexReader(str(index)).rejects()["reason"].to_pylist() == ["empty text"]
    assert IndexReader(str(index)).lease() is None
    assert table(index).equals(uninterrupted)


def check_resumed(index: Path, rows_before: int) -> None:
    """Checks that the last job encoded only the items that were not committed before."""
    summary = last_job(index)
    assert summary["unchanged"] == rows_before
    assert summary["new"] == NUM_ITEMS - 1 - rows_before


@pytest.mark.heavy
def test_sigkill_to_the_driver(folder: Path, cluster: str, uninterrupted: pa.Table):
    index = folder / "driver"
    driver = start(folder, index.name, cluster)
    wait_for_rows(index, driver)
    driver.kill()
    finish(driver)
    rows_before = committed(index)
    dataset = IndexReader(str(index)).dataset
    assert Lease.from_dataset(dataset).owner  # not released ...
    (job,) = status(str(index))["jobs"]
    assert (
        IndexReader(str(index)).lease() is None and job["state"] == "killed"
    )  # ... but its holder is known to be dead
    run(folder, index.name)
    check_resumed(index, rows_before)
    check_complete(index, uninterrupted)


@pytest.mark.heavy
@pytest.mark.parametrize("stage", ["StageActor", "WriteFragments"])
def test_sigkill_to_an_actor(folder: Path, cluster: str, uninterrupted: pa.Table, stage: str):
    index = folder / stage.lower()
    driver = start(folder, index.name, cluster)
    wait_for_rows(index, driver)
    victims = processes(f"ray::MapWorker(MapBatches({stage}))")
    assert victims
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert finish(driver) == 0  # Ray restarts actors and recomputes lost blocks
    check_complete(index, uninterrupted)


@pytest.mark.heavy
def test_sigterm_commits_finished_work(folder: Path, cluster: str, uninterrupted: pa.Table):
    index = folder / "sigterm"
    driver = start(folder, index.name, cluster)
    wait_for_rows(index, driver)
    driver.terminate()
    assert finish(driver) == 143
    assert IndexReader(str(index)).lease() is None
    assert last_job(index)["state"] == "stopped"
    rows_before = committed(index)
    assert rows_before == last_job(index)["new"]
    run(folder, index.name)
    check_resumed(index, rows_before)
    check_complete(index, uninterrupted)


@pytest.fixture
def suspended(folder: Path, cluster: str) -> Iterator[subprocess.Popen]:
    """Driver that is suspended beyond the expiry of its lease."""
    driver = start(folder, "suspended", cluster, lease_seconds=4)
    wait_for_rows(folder / "suspended", driver)
    os.kill(driver.pid, signal.SIGSTOP)
    yield driver
    driver.kill()


@pytest.mark.heavy
def test_driver_suspended_beyond_its_lease_adds_no_rows(
    folder: Path, cluster: str, uninterrupted: pa.Table, suspended: subprocess.Popen
):
    index = folder / "suspended"
    time.sleep(4.5)
    run(folder, index.name)
    check_complete(index, uninterrupted)
    version = IndexReader(str(index)).version
    os.kill(suspended.pid, signal.SIGCONT)
    _, error = suspended.communicate(timeout=60)
    assert suspended.returncode == 1
    assert error.splitlines()[-1].startswith(f"error: the lease on {index} was taken by ")
    assert IndexReader(str(index)).version == version
    assert table(index).equals(uninterrupted)

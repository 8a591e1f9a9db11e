"""Pools of actors and of reused processes."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest
import ray

from pipeline.config import parse
from pipeline.index.stage import REUSE_PROCESSES, Resources, map_batches
from tests.conftest import actor_pools

pytestmark = pytest.mark.usefixtures("cluster")


class Counter:
    """Adds the process and the number of calls of this object to each row."""

    def __init__(self, start: int):
        self.calls = start

    def __call__(self, batch: pa.Table) -> pa.Table:
        self.calls += 1
        columns = {"process": [os.getpid()], "calls": [self.calls], "object": [id(self)]}
        return pa.table({"id": batch["id"], **columns})


def mapped(resources: Resources) -> list[dict[str, int]]:
    dataset = ray.data.from_items([{"id": i} for i in range(6)], override_num_blocks=6)
    options = {"batch_size": 1, "batch_format": "pyarrow"}
    found = map_batches(dataset, Counter, {"start": 10}, resources, **options).take_all()
    return sorted(found, key=lambda row: row["id"])


@pytest.mark.parametrize("reuse_processes", [False, True])
def test_each_process_constructs_one_object_per_pool(reuse_processes):
    rows = mapped(Resources(num_cpus=0.5, reuse_processes=reuse_processes))
    assert [row["id"] for row in rows] == list(range(6))
    for process in {row["process"] for row in rows}:
        calls = sorted(row["calls"] for row in rows if row["process"] == process)
        assert calls == list(range(11, 11 + len(calls)))


def test_only_reused_processes_remain_after_a_job():
    reused = Resources(num_cpus=0.5, reuse_processes=True)
    actors = Resources(num_cpus=0.5, reuse_processes=False)
    processes = [
        {row["process"] for row in mapped(resources)} for resources in [reused, actors] * 2
    ]
    assert processes[0] & processes[2]
    assert not processes[1] & processes[3]


def test_default_is_an_environment_variable(monkeypatch):
    monkeypatch.setenv(REUSE_PROCESSES, "1")
    resources = parse(Resources, {})
    assert resources.reuses_processes
    assert not parse(Resources, {"num_gpus": 0.5}).reuses_processes
    assert not parse(Resources, {"reuse_processes": False}).reuses_processes
    with actor_pools():  # the variable is read when a job starts, not when a profile is parsed
        assert not resources.reuses_processes
    monkeypatch.delenv(REUSE_PROCESSES)
    assert not resources.reuses_processes

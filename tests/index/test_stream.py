"""Fields of resources profiles, shown to act on the stream of a job on the Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
import ray

from pipeline.config import JobError
from pipeline.index import ray_data
from pipeline.index.ray_data import chain, configure, map_batches, rows_of, unit_dataset
from pipeline.index.stage import Processed, Profile, Resources, Stage, Unit
from pipeline.index.units import UnitRange
from pipeline.schema import ITEM, Item

NUM_UNITS = 12


@dataclass(frozen=True)
class Recording(Stage):
    """Stage that sleeps and writes a file per actor and per call."""

    folder: str
    seconds: float = 0.0

    name: ClassVar[str] = "encode"

    def load(self) -> Recording:
        Path(self.folder, f"actor-{os.getpid()}").touch()
        return self

    def process(self, items: pa.Table) -> Processed:
        time.sleep(self.seconds)
        return Processed(items, [])


def read_units(units: UnitRange) -> Iterator[Unit]:
    for number in range(NUM_UNITS):
        row = Item(f"item-{number}", "item", "test", "text", "r1", text="text").row()
        items = pa.Table.from_pylist([row], schema=ITEM)
        yield Unit(f"{number:06d}", items, extra={"replaces": {}, "gone": 0})


def named_units(folder: str, units: UnitRange) -> Iterator[Unit]:
    """Yields two units, and records the shard in a file of the task."""
    with Path(folder, ray.get_runtime_context().get_task_id()).open("a") as file:
        file.write(f"{units.shard} ")
    for number in range(2):
        items = pa.Table.from_pylist([], schema=ITEM)
        yield Unit(f"{units.shard}-{number}", items, extra={"replaces": {}, "gone": 0})


def run(folder: Path, profile: Profile, seconds: float = 0.0, **encode: int) -> ray.data.Dataset:
    """Returns the lazy dataset of a stream with one recording stage."""
    configure(profile)
    shared = Resources(num_cpus=0.01, max_actors=1)
    pool = Resources(num_cpus=0.01, **encode)
    units = unit_dataset(partial(read_units), [UnitRange(0)], shared)
    return chain(units, [([Recording(str(folder), seconds)], pool)])


@pytest.fixture(autouse=True)
def default_context(cluster):
    yield
    configure()


@pytest.mark.heavy
@pytest.mark.parametrize("initial", [1, 3])
def test_initial_actors(tmp_path, initial):
    # Three actors have the time to start. One is done before Ray adds others.
    seconds = 2.0 if initial == 3 else 0.0
    actors = {"min_actors": 1, "max_actors": 3, "initial_actors": initial}
    dataset = run(tmp_path, Profile(), seconds, **actors)
    assert sum(row is not None for row in rows_of(dataset)) == NUM_UNITS
    started = len(list(tmp_path.glob("actor-*")))
    assert started >= initial  # Ray may add actors up to `max_actors`
    assert initial == 3 or started < 3


def test_units_share_blocks_up_to_a_size(tmp_path):
    def num_blocks(block_bytes: int) -> int:
        dataset = run(tmp_path, Profile(block_bytes=block_bytes), max_actors=1)
        return dataset.materialize().num_blocks()

    assert num_blocks(1) == NUM_UNITS
    assert num_blocks(1 << 20) < NUM_UNITS / 2


def test_many_ranges_share_tasks(tmp_path, monkeypatch):
    """Two tasks read three and two ranges, each with all of its units."""
    monkeypatch.setattr(ray_data, "MIN_READ_TASKS", 2)
    monkeypatch.setattr(ray_data, "TASKS_PER_READER", 1)
    configure()
    pool = Resources(num_cpus=0.01, max_actors=1)
    ranges = [UnitRange(shard) for shard in range(5)]
    units = unit_dataset(partial(named_units, str(tmp_path)), ranges, pool)
    names = [row["unit"] for row in units.take_all()]
    assert sorted(names) == sorted(f"{shard}-{n}" for shard in range(5) for n in range(2))
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0 1 2 ", "3 4 "]


def test_job_without_progress_fails(tmp_path):
    dataset = run(tmp_path, Profile(no_progress_seconds=2), seconds=60, max_actors=1)
    start = time.monotonic()
    with pytest.raises(JobError, match="no stage has made progress for 2 s; set no_progress_sec"):
        list(rows_of(dataset))
    assert time.monotonic() - start < 50


def test_memory_of_an_actor_is_reserved(cluster):
    """A second actor does not start if the memory suffices for one."""
    total = int(ray.cluster_resources()["memory"])
    pool = Resources(num_cpus=0.01, memory_bytes=round(0.6 * total))

    @ray.remote(max_retries=0)
    def hold(seconds: float) -> float:
        start = time.time()
        time.sleep(seconds)
        return start

    starts = ray.get([hold.options(**pool.task_options).remote(1.5) for _ in range(2)])
    assert abs(starts[0] - starts[1]) > 1.4


class Counter:
    """Adds the process and the number of calls of this object to each row."""

    def __init__(self, start: int):
        self.calls = start

    def __call__(self, batch: pa.Table) -> pa.Table:
        self.calls += 1
        return pa.table({"id": batch["id"], "process": [os.getpid()], "calls": [self.calls]})


def test_each_process_constructs_one_object_per_pool():
    dataset = ray.data.from_items([{"id": i} for i in range(6)], override_num_blocks=6)
    options = {"batch_size": 1, "batch_format": "pyarrow"}
    pool = Resources(num_cpus=0.5)
    rows = map_batches(dataset, Counter, {"start": 10}, pool, **options).take_all()
    assert sorted(row["id"] for row in rows) == list(range(6))
    for process in {row["process"] for row in rows}:
        calls = sorted(row["calls"] for row in rows if row["process"] == process)
        assert calls == list(range(11, 11 + len(calls)))

"""Tests of filters in subprocesses: results, errors, time and memory limits."""

from __future__ import annotations

import asyncio
import resource

import lance
import pyarrow as pa
import pytest

from pipeline.config import SpecError
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.serve.filters import MAX_PROCESSES, Filters
from pipeline.serve.scheduler import Caller
from tests.serve.conftest import children, cpu_seconds

#: Filter that takes minutes of CPU time on the long texts.
SLOW = " AND ".join(f"text NOT ILIKE '%over%never{i}%'" for i in range(130))
KEY = Caller("k", 60)


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """Index of 200 items with texts of 100 kB each."""
    folder = tmp_path_factory.mktemp("filtered") / "index"
    text = "Some words, over and over. " * 4_000
    table = pa.table(
        {
            "item_id": [f"i{i}" for i in range(200)],
            "number": list(range(200)),
            "text": [text] * 200,
        }
    )
    lance.write_dataset(table, str(folder / ITEMS), max_rows_per_file=50)
    return str(folder)


def test_results_and_errors(uri):
    edition = IndexReader(uri).edition

    async def scenario():
        filters = Filters(uri, None, 30)
        shards = [Filters(uri, (i, 2), 30) for i in range(2)]
        item_ids = await filters.matching_ids(KEY, edition, "number < 30 OR number >= 190")
        assert item_ids.to_pylist() == [f"i{i}" for i in range(200) if i < 30 or i >= 190]
        halves = [await shard.matching_ids(KEY, edition, "number % 2 = 0") for shard in shards]
        assert [len(half) for half in halves] == [50, 50]
        for filter, message in (("nope = 1", "unknown column"), ("number =", "does not parse")):
            with pytest.raises(SpecError, match=f"^filter must be .*{message}"):
                await filters.matching_ids(KEY, edition, filter)
        assert (await filters.matching_ids(KEY, edition, "number = 7")).to_pylist() == ["i7"]
        assert len(filters._idle) == 1  # sequential filters share one process
        with pytest.raises(
            SpecError,
            match=r"^index must be the index being served, got .*"
            r" was replaced by another",
        ):
            other = edition._replace(content="0")
            await filters.matching_ids(KEY, other, "number = 7")

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["deadline", "cancelled"])
def test_stops_work_at_deadline_or_cancellation(uri, reason):
    """Measures the CPU time of this process and its children."""
    edition, before = IndexReader(uri).edition, children()

    async def scenario():
        filters = Filters(uri, None, 30)
        await filters.matching_ids(KEY, edition, "number = 1")
        (process,) = children() - before
        used = cpu_seconds(process)
        if reason == "deadline":  # only here: a busy machine takes long to open the index
            filters._timeout_s = 1.0
        task = asyncio.create_task(filters.matching_ids(KEY, edition, SLOW))
        while cpu_seconds(process) <= used:  # until it works
            assert not task.done()
            await asyncio.sleep(0.02)
        if reason == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(TimeoutError, match="the filter took longer than 1 s"):
                await task
        while cpu_seconds(process) or children() - before:  # until the killed process is reaped
            await asyncio.sleep(0.02)
        start = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(0.5)
        end = resource.getrusage(resource.RUSAGE_SELF)
        assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 0.2
        filters._timeout_s = 30
        assert len(await filters.matching_ids(KEY, edition, "number < 3")) == 3

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_key_uses_at_most_one_process(uri):
    edition = IndexReader(uri).edition

    async def scenario():
        filters = Filters(uri, None, 30)
        greedy = [
            asyncio.create_task(filters.matching_ids(Caller("greedy", 30), edition, SLOW))
            for _ in range(2 * MAX_PROCESSES)
        ]
        await asyncio.sleep(0)
        item_ids = await filters.matching_ids(Caller("other", 20), edition, "number < 3")
        assert len(item_ids) == 3 and not any(task.done() for task in greedy)
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.heavy
def test_limits_memory(uri):
    """Exceeding the limit kills the process or raises an error; the next filter succeeds."""
    edition = IndexReader(uri).edition
    filter = " || ".join(["text"] * 100) + " = 'x'"  # 2 GB for the 200 items

    async def scenario():
        filters = Filters(uri, None, 60, memory_bytes=128 << 20)
        with pytest.raises(SpecError, match="^filter must be "):
            await filters.matching_ids(KEY, edition, filter)
        assert len(await filters.matching_ids(KEY, edition, "number < 3")) == 3

    asyncio.run(scenario())

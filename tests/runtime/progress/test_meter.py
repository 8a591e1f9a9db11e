"""Totals of steps that several processes report to the board, on Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
import ray

from pipeline.index.ray_data import StageActor
from pipeline.index.stage import FINISHED, Unit
from pipeline.index.stages import Prepare
from pipeline.runtime import progress
from pipeline.runtime.progress import (
    MAX_JOBS,
    Board,
    Meter,
    Totals,
    counted_rows,
    meter,
    read_board,
    start_board,
)
from pipeline.schema import ITEM, Item


def test_board_sums_processes_and_replaces_their_totals(monkeypatch):
    board = Board()
    board.put("j", "p", {"read": (2, 1, 0.5)})
    board.put("j", "p", {"read": (5, 2, 1.5), "encode": (3, 1, 1.0)})
    board.put("j", "q", {"read": (1, 1, 0.25)})
    board.put("other", "q", {"read": (7, 7, 7.0)})
    assert board.read("j") == {"read": Totals(6, 3, 1.75, 2), "encode": Totals(3, 1, 1.0, 1)}
    assert board.read("unknown") == {}
    monkeypatch.setattr(progress, "ENDED_SECONDS", 0.0)  # ended processes keep their totals
    assert board.read("j")["read"] == Totals(6, 3, 1.75, 0)


def test_board_forgets_the_oldest_job():
    board = Board()
    for number in range(MAX_JOBS + 1):
        board.put(str(number), "p", {"read": (1, 1, 1.0)})
    assert board.read("0") == {} and board.read("1")


class Recognise(Prepare):
    """Prepares items one at a time, and fails for the item "bad"."""

    def __init__(self, counts: list[int]):
        self._counts = counts

    def load(self) -> Recognise:
        return self

    def _prepare(self, items: pa.Table) -> pa.Table:
        for row in counted_rows(items):
            self._counts.append(meter("job").totals().get("prepare", Totals()).items)
            if items["item_id"][row].as_py() == "bad":
                raise ValueError("no image")
        return items


@pytest.fixture
def unsent(monkeypatch) -> Iterator[Meter]:
    monkeypatch.setattr(progress, "SEND_SECONDS", 60.0)
    unsent = Meter("job")
    monkeypatch.setattr(progress, "_meter", unsent)
    yield unsent
    unsent.close()


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        ("a", [0]),
        ("a b c", [0, 1, 2]),
        ("a b bad c", [0, 1, 2, 2, 2, 2, 2]),  # repeated one by one
        ("bad a", [0, 0, 0]),
    ],
)
def test_items_of_the_unit_in_progress_count_once(unsent, names, counts):
    ids = names.split()
    rows = [Item(name, name, "s", "text", "r").row() for name in ids]
    unit, shown = Unit("0", pa.Table.from_pylist(rows, schema=ITEM)), []
    actor = StageActor([Recognise(shown)], 1, "job", is_last=True)
    for number in (1, 2):
        shown.clear()
        actor(unit.pack())
        assert shown == [count + (number - 1) * len(ids) for count in counts]
        totals = unsent.totals()
        assert totals["prepare"][:2] == totals[FINISHED][:2] == (number * len(ids), number)


def test_items_of_a_step_that_its_stage_does_not_time_remain_counted(unsent):
    unsent.add_item("prepare", "a", 0.5)
    unsent.add_item("prepare", "a", 0.25)
    unsent.add("represent", 1, 1, 0.75)
    unsent.end_unit()
    assert unsent.totals()["prepare"] == Totals(1, 0, 0.75)


def test_rows_are_counted_only_in_units(unsent):
    assert list(counted_rows(pa.table({"text": ["a", "b"]}))) == [0, 1]
    assert unsent.totals() == {}


@ray.remote
def work(job: str, items: int) -> None:
    meter(job).add("encode", items, 1, 0.5)


@pytest.mark.parametrize("job", ["first", "second"])
def test_processes_report_to_the_board(cluster, job):
    start_board()
    start_board()  # the same
    ray.get([work.remote(job, items) for items in (3, 4)])
    deadline = time.monotonic() + 30
    while (totals := read_board(job)).get("encode", Totals()).items < 7:
        assert time.monotonic() < deadline, totals
        time.sleep(0.1)
    assert totals["encode"].units == 2 and totals["encode"].seconds == 1.0
    assert 1 <= totals["encode"].processes <= 2

"""Totals of steps that several processes report to the board, on Ray."""

from __future__ import annotations

import time

import pytest
import ray

from pipeline import meter as module
from pipeline.meter import MAX_JOBS, Board, Totals, meter, read_board, start_board


def test_board_sums_processes_and_replaces_their_totals(monkeypatch):
    board = Board()
    board.put("j", "p", {"read": (2, 1, 0.5)})
    board.put("j", "p", {"read": (5, 2, 1.5), "encode": (3, 1, 1.0)})
    board.put("j", "q", {"read": (1, 1, 0.25)})
    board.put("other", "q", {"read": (7, 7, 7.0)})
    assert board.read("j") == {"read": Totals(6, 3, 1.75, 2), "encode": Totals(3, 1, 1.0, 1)}
    assert board.read("unknown") == {}
    monkeypatch.setattr(module, "ENDED_SECONDS", 0.0)  # ended processes keep their totals
    assert board.read("j")["read"] == Totals(6, 3, 1.75, 0)


def test_board_forgets_the_oldest_job():
    board = Board()
    for number in range(MAX_JOBS + 1):
        board.put(str(number), "p", {"read": (1, 1, 1.0)})
    assert board.read("0") == {} and board.read("1")


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

"""Rates, utilisation and estimates of a monitor, against literal values."""

from __future__ import annotations

import json
import time

import pytest

from pipeline.runtime import progress
from pipeline.runtime.progress import Monitor, Snapshot, StepState, Totals


class Clock:
    """Clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def new_monitor(shown: list[Snapshot] | None = None) -> Monitor:
    shown = [] if shown is None else shown
    return Monitor(Snapshot("j", "index", "uri"), shown.append, lambda text: None, 1.0)


def test_rates_count_from_the_time_at_which_processes_are_ready(clock):
    monitored, totals = new_monitor(), None
    with monitored.phase("index", total=100, steps=lambda: totals):
        clock.now += 20  # actors start
        assert monitored.tick().rate is None
        totals = {}
        monitored.tick()
        clock.now += 4
        totals = {"write": Totals(10, 1, 0.2, 1), "encode": Totals(20, 2, 6.0, 2)}
        monitored.update(20, rejected=3)
        snapshot = monitored.tick()
    assert (snapshot.done, snapshot.total, snapshot.rate) == (20, 100, 5.0)
    assert snapshot.seconds_left == 80 / 5
    assert snapshot.seconds == 24 and snapshot.counts == {"rejected": 3}
    assert snapshot.steps == (
        StepState("encode", 20, 5.0, 6 / 8, 2, 6.0),
        StepState("write", 10, 2.5, 0.2 / 4, 1, 0.2),
    )


def test_rates_are_those_of_the_last_half_minute(clock):
    monitored = new_monitor()
    with monitored.phase("index", total=10_000):
        for second in range(100):  # 10 items/s, and 50 items/s during the last 40 s
            clock.now += 1
            done = 10 * second if second < 60 else 600 + 50 * (second - 60)
            monitored.update(done)
            snapshot = monitored.tick()
    assert snapshot.rate == pytest.approx(50, rel=0.01)


def test_rare_changes_are_averaged_over_the_phase(clock):
    monitored = new_monitor()
    with monitored.phase("index", total=10):
        for second in range(1, 301):  # one item per minute
            clock.now += 1
            monitored.update(second // 60)
            snapshot = monitored.tick()
    assert snapshot.rate == pytest.approx(1 / 60, rel=0.01)
    assert snapshot.seconds_left == pytest.approx(300, rel=0.01)


def test_a_phase_starts_anew_and_keeps_counts(clock):
    shown: list[Snapshot] = []
    monitored = new_monitor(shown)
    with monitored.phase("list", "shards", 2):
        monitored.update(2, listed=9)
    with monitored.phase("load encoder", total=9):
        pass
    last = shown[-1]
    assert (last.phase, last.unit, last.done, last.total) == ("load encoder", "items", 0, 9)
    assert last.counts == {"listed": 9} and last.rate is None


def test_errors_of_reading_do_not_end_the_job(clock):
    def fail():
        raise ConnectionError("the board is gone")

    monitored = new_monitor()
    with monitored.phase("index", total=2, steps=fail):
        monitored.update(1)
        assert monitored.tick().done == 1


def test_snapshots_are_saved_and_restored():
    saved: list[str] = []
    monitored = Monitor(Snapshot("j", "index", "uri"), lambda snapshot: None, saved.append, 0.0)
    monitored.start()
    with monitored.phase("index", total=3, steps=lambda: {"read": Totals(1, 1, 0.1, 1)}):
        monitored.update(1, committed=1)
        deadline = time.monotonic() + 10
        while not any('"done": 1' in text for text in saved) and time.monotonic() < deadline:
            time.sleep(0.05)
    monitored.stop()
    text = next(text for text in saved if '"done": 1' in text)
    snapshot = Snapshot.from_json(text)
    assert (snapshot.job, snapshot.done, snapshot.total) == ("j", 1, 3)
    assert snapshot.steps[0].name == "read"
    later = json.dumps({**json.loads(text), "added_later": 1})
    assert Snapshot.from_json(later) == snapshot

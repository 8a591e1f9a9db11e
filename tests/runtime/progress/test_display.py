"""Displays of progress, on a real pseudo-terminal and as lines."""

from __future__ import annotations

import json
import os
import sys

import pytest

from pipeline.config import SpecError
from pipeline.runtime import progress
from pipeline.runtime.progress import Snapshot, StepState, open_display
from tests.conftest import ROOT
from tests.terminal import Terminal

SNAPSHOT = Snapshot(
    "job-1",
    "index",
    "uri",
    phase="index",
    done=448,
    total=1024,
    rate=12.3,
    seconds_left=46.8,
    seconds=40.0,
    counts={"committed": 256, "rejected": 0},
    steps=(
        StepState("read", 512, 14.1, 0.12, 2),
        StepState("encode", 448, 12.3, 0.98, 1),
    ),
    time=1.0,
)


def test_one_line():
    assert SNAPSHOT.describe() == (
        "index  448/1,024 items (44%)  12.3/s  0:47 left"
        "  [read 14.1/s 12%  encode 12.3/s 98%]  committed 256  rejected 0"
    )
    listing = Snapshot(phase="list", unit="shards", done=3, total=10, counts={"listed": 3000})
    assert listing.describe() == "list  3/10 shards (30%)  estimating the time left  listed 3,000"
    assert Snapshot(phase="load encoder").describe() == "load encoder"


@pytest.mark.parametrize(
    ("done", "items", "shown"),
    [
        (0, {"read": 11, "prepare": 5}, "index  0/11 items (0%)  prepare 5/11  "),
        (0, {"read": 4}, "index  0/11 items (0%)  read 4/11  "),
        (0, {"read": 11, "prepare": 3, "encode": 3}, "index  0/11 items (0%)  encode 3/11  "),
        (0, {"read": 11, "prepare": 11}, "index  0/11 items (0%)  estimating"),
        (0, {"read": 0}, "index  0/11 items (0%)  estimating"),
        (4, {"read": 11, "prepare": 5}, "index  4/11 items (36%)  estimating"),
    ],
)
def test_line_shows_the_slowest_step_until_a_unit_is_finished(done, items, shown):
    steps = tuple(StepState(name, number, 0.1, 0.5, 1) for name, number in items.items())
    snapshot = Snapshot(phase="index", done=done, total=11, steps=steps)
    assert snapshot.describe().startswith(shown)


def test_plain_lines_are_printed_every_five_seconds(capsys, monkeypatch):
    with open_display("plain") as shown:
        shown.phase("start Ray")
        shown.say("listed 3 items")
        shown.show(SNAPSHOT)
        monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
        shown.show(SNAPSHOT)
    first, second = capsys.readouterr().out.splitlines()
    assert first[8:] == " listed 3 items" and second[8:] == f" {SNAPSHOT.describe()}"


def test_json_lines(capsys):
    with open_display("json") as shown:
        shown.phase("start Ray")
        shown.say("listed 3 items")
        shown.show(SNAPSHOT)
        shown.show(SNAPSHOT)  # within a second
        print("(raylet) A worker died")
    print("printed afterwards")
    output, error = capsys.readouterr()
    *lines, last = output.splitlines()
    assert (error, last) == ("(raylet) A worker died\n", "printed afterwards")
    start, message, progress = map(json.loads, lines)
    assert (start["event"], start["phase"], start["total"]) == ("progress", "start Ray", None)
    assert (message["event"], message["text"]) == ("message", "listed 3 items")
    assert progress["steps"][1]["utilisation"] == 0.98
    assert Snapshot.from_json(json.dumps(progress)) == SNAPSHOT


def test_live_needs_a_terminal():
    rule = "--progress must be auto, plain or json unless"
    with pytest.raises(SpecError, match=rule), open_display("live"):
        pass


PROGRAM = """
import logging, os, sys, time
from pipeline.runtime import logs
from pipeline.runtime.progress import Snapshot, open_display
SNAPSHOT = Snapshot.from_json(sys.argv[2])
logs.configure()
with open_display() as display:
    display.phase("start Ray")
    time.sleep(0.6)
    display.show(SNAPSHOT)
    time.sleep(0.6)
    display.say("a sentence")
    print("printed by Python")
    logging.warning("logged by Python")
    print("printed to the standard error", file=sys.stderr)
    sys.stderr.write("foreign bar 10%\\rforeign bar 90%\\n")
    sys.stderr.write("unfinished")
    time.sleep(0.6)
    mode = sys.argv[1]
    if mode == "exit":
        from jobs._errors import report_error
        os._exit(report_error("stopped", 3))
    if mode == "raise":
        raise ValueError("unexpected")
print("after the display")
"""


def run(mode: str, columns: int = 110) -> tuple[Terminal, str, int]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, mode, json.dumps(SNAPSHOT.to_dict())]
    terminal = Terminal(command, environment, str(ROOT), columns)
    text = terminal.read()
    return terminal, text, terminal.close()


def test_live_display_survives_foreign_output():
    terminal, text, code = run("end")
    assert code == 0
    assert any("start Ray" in frame for frame in terminal.frames)
    frame = next(f for f in reversed(terminal.frames) if "encode" in f)
    lines = frame.splitlines()
    assert "448/1,024 items (44%)" in frame and "98% busy" in frame and "1 process" in frame
    assert sum("448/1,024" in line for line in lines) == 1  # drawn in place
    sentences = [
        "a sentence",
        "printed by Python",
        "logged by Python",
        "printed to the standard error",
        "foreign bar 90%",
    ]
    for sentence in sentences:
        (line,) = [line for line in lines if sentence in line]
        assert "items" not in line and "10%" not in line
        assert lines.index(line) < next(i for i, s in enumerate(lines) if "448/1,024" in s)
    # Afterwards the display is gone, the sentences remain, and output goes to the terminal again.
    for sentence in [*sentences, "unfinished", "after the display"]:
        assert text.count(sentence) == 1, text
    assert "448/1,024" not in text and terminal.screen.is_cursor_visible


@pytest.mark.parametrize(("mode", "code"), [("exit", 3), ("raise", 1)])
def test_errors_follow_the_live_display(mode, code):
    terminal, text, exit_code = run(mode)
    assert exit_code == code
    assert (
        text.splitlines()[-1] == {"exit": "error: stopped", "raise": "ValueError: unexpected"}[mode]
    )
    assert "448/1,024" not in text and terminal.screen.is_cursor_visible


def test_narrow_terminal():
    terminal, text, code = run("end", columns=40)
    assert code == 0 and "after the display" in text
    frame = next(f for f in reversed(terminal.frames) if "encode" in f)
    assert max(map(len, frame.splitlines())) <= 40

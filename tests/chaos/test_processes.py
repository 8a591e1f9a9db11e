"""Tests of the view of processes and shared memory, with real processes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from multiprocessing import shared_memory

from tests.chaos.processes import (
    Process,
    children,
    descendants,
    process,
    segments,
    survivors,
    unused_segments,
    wait_until,
)


def test_process_that_is_paused_and_killed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found, here = process(child.pid), process(os.getpid())
    assert found in descendants(here)
    assert wait_until(lambda: found in children(here), 10)
    assert "time.sleep(60)" in found.title and found.is_alive
    assert found.send(signal.SIGSTOP) and survivors([found], 0.1) == [found]
    assert found.send(signal.SIGKILL) and survivors([found], 10) == []  # a zombie has ended
    assert found.title == "" and not found.send(signal.SIGKILL)
    child.wait()
    assert not Process(child.pid, "0").is_alive


def test_process_that_was_never_found_has_no_relatives_and_gets_no_signal():
    # The id 0 is the parent of the init process; a signal to it reaches the whole process group.
    for nobody in (process(0), Process(0, ""), Process(os.getpid(), "0")):
        assert not nobody.is_alive and not nobody.send(signal.SIGTERM)
        assert children(nobody) == descendants(nobody) == []
    assert not process(1).send(signal.SIGCONT)


def test_shared_memory_that_no_process_uses():
    name = f"chaos-test-{secrets.token_hex(4)}"
    segment = shared_memory.SharedMemory(name, create=True, size=4096)
    assert name in segments() and unused_segments([name]) == []
    segment.close()
    assert unused_segments([name]) == [name]
    segment.unlink()
    assert unused_segments([name]) == []

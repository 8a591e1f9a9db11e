"""Tests of the lease of a job and of signals."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from pipeline.config import Spec, SpecError, Stopped
from pipeline.index.lease import Lease
from pipeline.index.session import LEASE_SECONDS, LEASE_VARIABLE, Session


def lease_seconds(uri: str, seconds: float | None = None) -> float:
    """Returns the lifetime of the lease of a job, in seconds."""
    start = time.time()
    with Session(uri, Spec(), "test", "job", dict, seconds) as session:
        lease = Lease.from_dataset(session.writer.dataset)
        assert lease is not None
        return lease.expires - start


@pytest.mark.parametrize(
    ("variable", "argument", "expected"),
    [(None, None, LEASE_SECONDS), ("500", None, 500), ("500", 90.0, 90)],
)
def test_lifetime_of_the_lease(tmp_path, monkeypatch, variable, argument, expected):
    monkeypatch.delenv(LEASE_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(LEASE_VARIABLE, variable)
    assert lease_seconds(str(tmp_path / "index"), argument) == pytest.approx(expected, abs=30)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "a minute", ""])
def test_wrong_lifetime_is_reported_before_anything_is_written(tmp_path, monkeypatch, text):
    monkeypatch.setenv(LEASE_VARIABLE, text)
    message = f"^MAXRAY_LEASE_SECONDS must be a positive number of seconds, got '{text}'$"
    with pytest.raises(SpecError, match=message):
        lease_seconds(str(tmp_path / "index"))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signal_ends_a_wait(tmp_path, number, error):
    uri, is_over = str(tmp_path / "index"), threading.Event()
    before = signal.getsignal(number)
    start = time.monotonic()
    with pytest.raises(error), Session(uri, Spec(), "test", "job", dict) as session:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        session.call(is_over.wait, 60)
    is_over.set()
    assert time.monotonic() - start < 20
    assert signal.getsignal(number) is before
    with Session(uri, Spec(), "test", "next", dict) as session:  # the lease is released
        assert session.call(max, 1, 2) == 2
        with pytest.raises(TimeoutError, match="^of the function$"):
            session.call(_raise, TimeoutError("of the function"))


def _raise(error: Exception) -> None:
    raise error


def test_signal_does_not_interrupt_a_commit(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        Session(str(tmp_path / "index"), Spec(), "test", "job", dict) as session,
    ):
        os.kill(os.getpid(), signal.SIGINT)
        session.record("running")
        session.check()

"""Tests of the lifetime of the lease of a job."""

from __future__ import annotations

import time

import pytest

from pipeline.config import Spec, SpecError
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

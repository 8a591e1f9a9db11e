"""Growth is a decision: what a reader has to hold in the head does not exceed fixed numbers."""

from __future__ import annotations

import pytest

from tests import surface

#: Maximum of each count.
LIMITS = {}


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    return surface.counts()


@pytest.mark.parametrize("name", LIMITS)
def test_counts_do_not_grow(counts, name):
    assert counts[name] <= LIMITS[name], f"{name}: raise this number on purpose"


def test_every_count_has_a_limit(counts):
    assert counts.keys() == LIMITS.keys()

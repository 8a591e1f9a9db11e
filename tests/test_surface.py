"""Growth is a decision: what a reader has to hold in the head does not exceed fixed numbers."""

from __future__ import annotations

import pytest

from tests import surface

#: Maximum of each count.
LIMITS = {
    "lines of code in pipeline/ and jobs/": 51_560,
    "lines of code outside unit tests": 66_540,
    "lines of docstrings in pipeline/ and jobs/": 18_300,
    "packages of pipeline/": 10,
    "root modules of pipeline/": 7,
    "registries": 10,
    "registry entries": 76,
    "verbs": 13,
    "flags of verbs": 122,
    "benches": 26,
    "spec fields": 818,
    "HTTP fields": 234,
    "shipped specs": 26,
    "modules with one importer": 86,
    "places that compose errors": 550,
    "lines that compose errors": 582,
    "lines of code of the longest file": 513,
    "lines of the longest function": 148,
}


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    return surface.counts()


@pytest.mark.parametrize("name", LIMITS)
def test_counts_do_not_grow(counts, name):
    message = f"{name}: {counts[name]:,}; if this is on purpose, raise it in LIMITS and say why"
    assert counts[name] <= LIMITS[name], message


def test_every_count_has_a_limit(counts):
    assert counts.keys() == LIMITS.keys()

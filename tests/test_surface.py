"""Growth is a decision: what a reader has to hold in the head does not exceed fixed numbers."""

from __future__ import annotations

import pytest

from tests import surface

#: Maximum of each count.
LIMITS = {
    "lines of code in pipeline/ and jobs/": 53_707,
    "lines of code outside unit tests": 70_510,
    "lines of docstrings in pipeline/ and jobs/": 14_919,
    "packages of pipeline/": 10,
    "root modules of pipeline/": 8,
    "registries": 11,
    "registry entries": 81,
    "verbs": 13,
    "flags of verbs": 123,
    "benches": 26,
    "spec fields": 842,
    "HTTP fields": 238,
    "shipped specs": 29,
    "modules with one importer": 87,
    "places that compose errors": 571,
    "lines that compose errors": 603,
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

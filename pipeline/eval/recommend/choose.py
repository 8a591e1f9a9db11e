"""Choice of a candidate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Candidates whose sizes differ by less than this fraction are considered equally large. Methods
#: that merge equal tokens store slightly fewer vectors than their budget.
SIZE_TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """Measurements of a candidate.

    Attributes:
        milliseconds: Time to score a query.
        quality: Mean metric of the queries.
        retained: Quality divided by that of the uncompressed vectors.
        low: Lower bound of the 95 % confidence interval of `retained`.
        high: Upper bound of the interval.
        mean_distance: Mean cosine distance of a token to the nearest stored vector.
        max_distance: Largest such distance in an item, averaged over items.
    """

    name: str
    method: str
    num_vectors: int | None
    codec: dict[str, Any]
    vectors_per_item: float
    bytes_per_item: float
    milliseconds: float
    quality: float
    retained: float
    low: float
    high: float
    mean_distance: float
    max_distance: float


@dataclass(frozen=True)
class Target:
    """Requirements on a candidate. A limit of None is not checked."""

    retain: float
    max_bytes: float | None = None
    max_milliseconds: float | None = None

    def violations(self, row: Row) -> list[str]:
        """Returns the names of the requirements that a row does not meet."""
        failed = []
        if row.low < self.retain:
            failed.append("retain")
        if self.max_bytes is not None and row.bytes_per_item > self.max_bytes:
            failed.append("max_bytes")
        if self.max_milliseconds is not None and row.milliseconds > self.max_milliseconds:
            failed.append("max_milliseconds")
        return failed


@dataclass(frozen=True)
class Choice:
    """Recommended row.

    Attributes:
        row: The recommended row, or the closest one if none meets all requirements.
    """

    row: Row
    violations: list[str]


def choose(rows: Sequence[Row], target: Target) -> Choice:
    """Returns the smallest row that meets all requirements.

    Among rows of about the same size, the one with the highest lower bound of quality is chosen. If
    no row meets all requirements, the limits take precedence: the result is the row with the
    highest lower bound of quality within them. Without such a row, it is the smallest row.
    """
    valid = [row for row in rows if not target.violations(row)]
    if valid:
        return Choice(_best_of_smallest(valid), [])
    no_quality = dataclasses.replace(target, retain=-float("inf"))
    within = [row for row in rows if not no_quality.violations(row)]
    row = max(within, key=lambda row: row.low) if within else _best_of_smallest(rows)
    return Choice(row, target.violations(row))


def _best_of_smallest(rows: Sequence[Row]) -> Row:
    smallest = min(row.bytes_per_item for row in rows)
    equal = [row for row in rows if row.bytes_per_item <= (1 + SIZE_TOLERANCE) * smallest]
    return max(equal, key=lambda row: row.low)

"""Units of listed items, and the ranges of units that tasks read."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.base import ItemSize
from pipeline.index import units
from pipeline.index.units import UnitLimits, UnitRange, unit_ranges


def literal_units(positions: list[int], sizes: list[ItemSize], limits: UnitLimits) -> list[int]:
    """Returns the numbers of units by trying every position, including those without an item."""
    by_position = dict(zip(positions, sizes, strict=True))
    groups: list[list[int]] = [[]]
    for position in range(max(positions) + 1):
        members = [by_position[p] for p in [*groups[-1], position] if p in by_position]
        is_over = (
            sum(size.num_bytes for size in members) > limits.num_bytes
            or sum(size.num_tokens for size in members) > limits.num_tokens
        )
        if groups[-1] and (
            len(groups[-1]) == limits.items or (is_over and position in by_position)
        ):
            groups.append([])
        groups[-1].append(position)
    return [next(n for n, group in enumerate(groups) if p in group) for p in positions]


@pytest.mark.parametrize("seed", range(20))
def test_units_equal_a_literal_division(seed):
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(60) < 0.8).tolist()
    sizes = [ItemSize(*rng.integers(1, 12, 2).tolist()) for _ in positions]
    limits = UnitLimits(items=int(rng.integers(1, 9)), num_bytes=20, num_tokens=24)
    expected = literal_units(positions, sizes, limits)
    assert limits.unit_numbers(positions, sizes).tolist() == expected


def test_larger_item_is_a_unit():
    sizes = [ItemSize(n) for n in (1, 50, 1, 1)]
    limits = UnitLimits(num_bytes=10)
    assert limits.unit_numbers(range(4), sizes).tolist() == [0, 1, 2, 2]
    assert list(limits.split(zip("abcd", sizes, strict=True))) == [["a"], ["b"], ["c", "d"]]


def test_split_respects_the_number_of_items():
    entries = [(i, ItemSize(1, 1)) for i in range(5)]
    assert list(UnitLimits(items=2).split(entries)) == [[0, 1], [2, 3], [4]]
    assert list(UnitLimits(items=9).with_items(3).split(entries)) == [[0, 1, 2], [3, 4]]
    assert list(UnitLimits(num_tokens=4).split(entries)) == [[0, 1, 2, 3], [4]]
    assert list(UnitLimits().split([])) == []


def test_ranges_cover_the_units_to_process(monkeypatch):
    monkeypatch.setattr(units, "TASK_ITEMS", 4)
    numbers = np.repeat(np.arange(10), 2)
    sizes = [ItemSize()] * 20
    all_items, no_items = np.ones(20, bool), np.zeros(20, bool)
    ranges = unit_ranges(3, numbers, sizes, all_items, all_items)
    assert ranges[0] == UnitRange(3, 0, 2) and ranges[-1] == UnitRange(3, 8)
    assert [r.first for r in ranges[1:]] == [r.end for r in ranges[:-1]]
    assert unit_ranges(3, numbers, sizes, all_items, no_items) == [UnitRange(3)]
    assert unit_ranges(3, numbers, sizes, no_items, all_items) == []
    second_half = np.arange(20) >= 11  # in the middle of a unit
    assert unit_ranges(0, numbers, sizes, second_half, all_items) == [
        UnitRange(0, 0, 8),
        UnitRange(0, 8),
    ]


def test_ranges_are_limited_by_bytes():
    sizes = [ItemSize(units.TASK_BYTES // 2)] * 6
    mask = np.ones(6, bool)
    ranges = unit_ranges(0, np.arange(6), sizes, mask, mask)
    assert ranges == [UnitRange(0, 0, 3), UnitRange(0, 3)]

"""Division of listed items into units, and of the units of a shard into tasks that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.base import ItemSize

#: Decoded bytes and items that a task reads, unless it reads a whole shard. Small tasks balance the
#: load of the readers.
TASK_BYTES, TASK_ITEMS = 128 << 20, 256


@dataclass(frozen=True)
class UnitLimits:
    """Limits of the items of a unit. A single item may exceed all but the first.

    Attributes:
        items: Maximum number of items.
        num_bytes: Maximum decoded size, in bytes.
        num_tokens: Maximum number of text tokens.
    """

    items: int = 64
    num_bytes: int = 128 << 20
    num_tokens: int = 131_072

    def with_items(self, items: int) -> UnitLimits:
        """Returns these limits with at most `items` items."""
        return UnitLimits(min(self.items, items), self.num_bytes, self.num_tokens)

    def unit_numbers(self, positions: Sequence[int], sizes: Sequence[ItemSize]) -> np.ndarray:
        """Returns the number of the unit of each item, (N,) int64, in ascending order.

        A unit ends before the item that would exceed a limit. The numbers depend only on the
        listing, not on which items remain to be processed. Positions without an item, which belong
        to entries that cannot be listed, count as items.

        >>> UnitLimits(items=2).unit_numbers([0, 1, 2, 5], [ItemSize()] * 4).tolist()
        [0, 0, 1, 2]
        >>> sizes = [ItemSize(num_bytes=n) for n in (3, 3, 9, 1, 1)]
        >>> UnitLimits(num_bytes=6).unit_numbers(range(5), sizes).tolist()
        [0, 0, 1, 2, 2]
        """
        numbers = np.zeros(len(positions), np.int64)
        number = start = num_bytes = num_tokens = 0
        for i, (position, size) in enumerate(zip(positions, sizes, strict=True)):
            num_bytes, num_tokens = num_bytes + size.num_bytes, num_tokens + size.num_tokens
            num_full, over = divmod(position - start, self.items)
            is_full = num_bytes > self.num_bytes or num_tokens > self.num_tokens
            if num_full or (is_full and position > start):
                number += num_full or 1
                start = position - over if num_full else position
                num_bytes, num_tokens = size
            numbers[i] = number
        return numbers

    def split(self, entries: Iterable[tuple[Any, ItemSize]]) -> Iterator[list[Any]]:
        """Splits entries with their sizes into lists within the limits."""
        group: list[Any] = []
        num_bytes = num_tokens = 0
        for entry, size in entries:
            num_bytes, num_tokens = num_bytes + size.num_bytes, num_tokens + size.num_tokens
            is_full = num_bytes > self.num_bytes or num_tokens > self.num_tokens
            if group and (is_full or len(group) == self.items):
                yield group
                group, (num_bytes, num_tokens) = [], size
            group.append(entry)
        if group:
            yield group


class UnitRange(NamedTuple):
    """Consecutive units of a shard, which a task reads.

    Attributes:
        end: Number after the last unit, or -1 for all remaining units of the shard.
    """

    shard: int
    first: int = 0
    end: int = -1


def unit_ranges(
    shard: int,
    numbers: np.ndarray,
    sizes: Sequence[ItemSize],
    to_do: np.ndarray,
    may_cut: np.ndarray,
) -> list[UnitRange]:
    """Divides the units of a shard that remain to be processed into ranges of similar size.

    Args:
        to_do: Mask (N,) of the items that remain to be processed.
        may_cut: Mask (N,) of the items before which a range may end.
    """
    ranges: list[UnitRange] = []
    first = num_bytes = num_items = 0
    for i in np.flatnonzero(to_do).tolist():
        # A range may end before any item since the previous one that begins a unit.
        is_full = num_bytes > TASK_BYTES or num_items >= TASK_ITEMS
        if is_full and may_cut[i] and numbers[i] > numbers[i - 1]:
            ranges.append(UnitRange(shard, first, int(numbers[i])))
            first, num_bytes, num_items = int(numbers[i]), 0, 0
        num_bytes += sizes[i].num_bytes
        num_items += 1
    # The last range has no end: its task also counts the items that no longer exist.
    return [*ranges, UnitRange(shard, first)] if num_items else ranges

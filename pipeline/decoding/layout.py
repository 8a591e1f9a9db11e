"""The order in which the parts of a page are read."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Block = TypeVar("Block")


def is_right_to_left(text: str) -> bool:
    """Whether most letters belong to scripts that are read from the right."""
    directions = Counter(map(unicodedata.bidirectional, text))
    return directions["R"] + directions["AL"] > directions["L"]


def reading_order(
    blocks: Sequence[tuple[np.ndarray, Block]], from_right: bool = False
) -> list[Block]:
    """Blocks by recursive cuts along white space: columns side by side, then from the top.

    Where a stretch has neither kind of gap its blocks stay in the order in which they are given.

    Args:
        blocks: a box x0 y0 x1 y1 in [0, 1] and what stands in it.

    >>> title, left, right = ([0.1, 0.1, 0.9, 0.2], [0.1, 0.3, 0.4, 0.9], [0.5, 0.3, 0.9, 0.9])
    >>> blocks = [(np.array(right), "right"), (np.array(left), "left"), (np.array(title), "title")]
    >>> reading_order(blocks)
    ['title', 'left', 'right']
    """
    if len(blocks) < 2:
        return [block for _, block in blocks]
    boxes = np.stack([box for box, _ in blocks])
    for axis, least in ((0, 0.012), (1, 0.0)):
        groups = _cut(boxes[:, axis], boxes[:, axis + 2], least)
        if len(groups) > 1:
            groups = groups[::-1] if axis == 0 and from_right else groups
            parts = (reading_order([blocks[i] for i in group], from_right) for group in groups)
            return [block for part in parts for block in part]
    return [block for _, block in blocks]


def _cut(starts: np.ndarray, ends: np.ndarray, least: float) -> list[list[int]]:
    """Indices of intervals in two groups, apart at the widest gap; one group if there is none."""
    order = np.argsort(starts, kind="stable")
    gaps = starts[order][1:] - np.maximum.accumulate(ends[order])[:-1]
    widest = int(gaps.argmax())
    if gaps[widest] <= least:
        return [order.tolist()]
    return [sorted(part.tolist()) for part in np.split(order, [widest + 1])]

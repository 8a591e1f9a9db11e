"""Spatial pruning: tokens at uniform distances, a baseline of SaMer (its table 7)."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.compression import Budget, Budgeted, select
from pipeline.tokens import TokenBatch


class Spatial(Budgeted):
    """Keeps K tokens that are uniformly spaced in the token order.

    The tokens of a grid come in its raster order (t, then y, then x), so for them this is uniform
    over the flattened grid; for text and audio it is uniform over the sequence.
    """

    class Spec(Budget):
        name: Literal["spatial"] = "spatial"

    support_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        return select(batch, *uniform_positions(batch.lengths, budgets_B))


def uniform_positions(
    lengths: torch.Tensor, budgets_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions `linspace(0, length - 1, budget).round()` of each item.

    Halves go to the even neighbour. The arithmetic is in integers, so the positions are exact and
    equal on every device. They are distinct: neighbours are at least 1 apart before rounding, and
    exactly 1 apart only if all are integers.

    Args:
        lengths: (B,) int64.
        budgets_B: (B,) int64, how many positions an item gets: at most its length.

    Returns:
        Positions (B, K) int64, ascending, and their mask; K is the largest budget.

    >>> positions, mask = uniform_positions(torch.tensor([6, 2]), torch.tensor([3, 2]))
    >>> positions.tolist(), mask.tolist()
    ([[0, 2, 5], [0, 1, 0]], [[True, True, True], [True, True, False]])
    """
    rank = torch.arange(int(budgets_B.max()) if len(lengths) else 0, device=lengths.device)
    nums = budgets_B.unsqueeze(1)
    mask = rank < nums
    steps = (nums - 1).clamp_min(1)
    numerator = rank * (lengths.unsqueeze(1) - 1).clamp_min(0)
    floor, rest = numerator // steps, numerator % steps
    up = (2 * rest > steps) | ((2 * rest == steps) & (floor % 2 == 1))
    return torch.where(mask, floor + up, 0), mask

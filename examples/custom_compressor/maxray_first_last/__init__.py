"""Example of a custom compressor, which keeps the first and last tokens of each item."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.compression import Budget, Budgeted, select
from pipeline.tokens import TokenBatch


class FirstLast(Budgeted):
    """Keeps the first `ceil(K / 2)` and the last `floor(K / 2)` tokens of each item."""

    class Spec(Budget):
        """Spec of the compressor: its name and its budget."""

        name: Literal["first_last"] = "first_last"

    assignment_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget.

        Args:
            batch: Items whose real tokens come first in each row.
            budgets_B: Number of vectors per item, int64, at most the number of its tokens.
        """
        budgets_B1 = budgets_B.unsqueeze(1)
        slot_BK = torch.arange(int(budgets_B.max()) if len(budgets_B) else 0)
        slot_BK = slot_BK.to(budgets_B.device).expand(len(budgets_B), -1)
        mask_BK = slot_BK < budgets_B1
        num_skipped_B1 = batch.lengths.unsqueeze(1) - budgets_B1
        is_last_BK = slot_BK >= (budgets_B1 + 1) // 2
        index_BK = torch.where(is_last_BK, slot_BK + num_skipped_B1, slot_BK)
        return select(batch, index_BK.masked_fill(~mask_BK, 0), mask_BK)

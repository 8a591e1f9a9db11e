"""A compressor in a package of its own: keeps the first and the last tokens of each item."""

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

    support_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Selects the tokens of each item.

        Args:
            batch: B items; the real tokens of each come first.
            budgets_B: (B,) int64, number of vectors per item, at most its number of tokens.
        """
        budgets_B1 = budgets_B.unsqueeze(1)
        slot_BK = torch.arange(int(budgets_B.max()) if len(budgets_B) else 0)
        slot_BK = slot_BK.to(budgets_B.device).expand(len(budgets_B), -1)
        mask_BK = slot_BK < budgets_B1
        skipped_B1 = batch.lengths.unsqueeze(1) - budgets_B1
        is_last_BK = slot_BK >= (budgets_B1 + 1) // 2
        index_BK = torch.where(is_last_BK, slot_BK + skipped_B1, slot_BK)
        return select(batch, index_BK.masked_fill(~mask_BK, 0), mask_BK)

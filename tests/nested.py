"""Compressor whose vectors are nested, for tests of prefixes."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.compression import Budget, Budgeted
from pipeline.tokens import TokenBatch


class First(Budgeted):
    """Keeps the first tokens and assigns the others to the nearest of them."""

    class Spec(Budget):
        name: Literal["first"] = "first"

    is_nested = True

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        size = int(budgets_B.max())
        vectors_BKD = batch.vectors[:, :size]
        mask_BK = torch.arange(size) < budgets_B[:, None]
        sim_BNK = batch.vectors @ vectors_BKD.mT
        assignment_BN = sim_BNK.masked_fill(~mask_BK[:, None], -2.0).argmax(dim=2)
        return TokenBatch(vectors_BKD, mask_BK, True, pooled=batch.pooled, assignment=assignment_BN)

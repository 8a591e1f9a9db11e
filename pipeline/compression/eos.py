"""EOS attention: what the end of the sequence attends to (SAP appendix C, eq. 11)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, largest, select
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch


class Eos(Budgeted["Eos.Spec"]):
    """Keeps the K tokens to which the last token of the sequence gives most attention.

    The score of token j is `1/H sum_h A_eos,j` in the last layer (eq. 11); `layers` takes others,
    for scans over the depth, and their mean.
    """

    class Spec(Budget):
        """Settings of the compressor."""

        name: Literal["eos"] = "eos"
        layers: list[int] = Field([-1], min_length=1)
        """Layers whose attention is averaged; negative numbers count from the last."""

    support_form = "indices"

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """The row of the last token in the spec's layers."""
        return (Tap("eos_row", layers=",".join(map(str, self.spec.layers))),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        (tap,) = self.needs_taps
        return select(batch, *largest(batch.taps[tap.name], batch.mask, budgets_B))

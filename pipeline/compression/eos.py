"""Pruning by the attention of the end-of-sequence (EOS) token (SAP, appendix C, eq. 11)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, largest, select
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch


class Eos(Budgeted["Eos.Spec"]):
    """Keeps the K tokens to which the last token of the sequence pays the most attention.

    The score of token j is `1/H sum_h A_eos,j` in the last layer (eq. 11).
    """

    class Spec(Budget):
        """Options of `Eos`."""

        name: Literal["eos"] = "eos"
        layers: list[int] = Field([-1], min_length=1)
        """Layers over which the scores are averaged. Negative indices count from the end."""

    assignment_form = "indices"

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention of the last token in the layers of the spec."""
        return (Tap("eos_row", layers=",".join(map(str, self.spec.layers))),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        (tap,) = self.needs_taps
        return select(batch, *largest(batch.taps[tap.name], batch.mask, budgets_B))

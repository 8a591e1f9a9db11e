"""SAP: structural anchor pruning by attention in the middle layers (SAP paper, section 3.1)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from pydantic import model_validator

from pipeline.compression import Budget, Budgeted, largest, select
from pipeline.config import SpecError
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch


class Sap(Budgeted["Sap.Spec"]):
    """Keeps the K tokens that receive most attention from the others in the middle layers.

    The score of token j is the mean over the layers of the window (eq. 5, 6) of the mean (eq. 3) or
    the maximum (eq. 4) over the heads of its in-degree `c_j = sum_i A_ij` (eq. 2), i over the
    content tokens of the item. Rows are not renormalised over them, as in the paper's public code.

    The window is floor(0.4 L) to floor(0.6 L) of L layers, both included, from 0 (eq. 9 and the
    paper's table 4). Its public code takes 8-11 of ColPali's 18 layers where that gives 7-10, and a
    later version goes deeper: `layers` takes any list.
    """

    class Spec(Budget):
        """Which attention is summed.

        Attributes:
            heads: SAP-Mean or SAP-Max.
            window: shares of the depth, alpha and beta of eq. 5.
            layers: numbers from 0, instead of a window; negative ones count from the end.
        """

        name: Literal["sap"] = "sap"
        heads: Literal["mean", "max"] = "mean"
        window: tuple[float, float] = (0.4, 0.6)
        layers: list[int] | None = None

        @model_validator(mode="after")
        def _check_layers(self):
            low, high = self.window
            if not 0 <= low <= high <= 1:
                raise SpecError("window", [low, high], "[alpha, beta] with 0 <= alpha <= beta <= 1")
            if self.layers == []:
                raise SpecError("layers", [], "a non-empty list, or null to use the window")
            return self

    support_form = "indices"

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Column sums of the spec's layers."""
        spec = self.spec
        window = "-".join(f"{share:.6f}".rstrip("0").rstrip(".") for share in spec.window)
        layers = window if spec.layers is None else ",".join(map(str, spec.layers))
        return (Tap("column_sums", spec.heads, layers),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        (tap,) = self.needs_taps
        return select(batch, *largest(batch.taps[tap.name], batch.mask, budgets_B))

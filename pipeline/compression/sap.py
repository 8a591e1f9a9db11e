"""SAP, structural anchor pruning by attention in the middle layers (SAP paper, section 3.1)."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from pipeline.compression import Budget, Budgeted, largest, select
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch


class Sap(Budgeted["Sap.Spec"]):
    """Keeps the K tokens that receive the most attention in the middle layers.

    The score of token j is its in-degree `c_j = sum_i A_ij` over the content tokens i of the item
    (eq. 2), aggregated over heads by mean (eq. 3) or maximum (eq. 4) and averaged over the layers
    of the window (eq. 5, 6). As in the reference implementation, attention rows are not
    renormalised over the content tokens.

    The default window comprises layers floor(0.4 L) to floor(0.6 L), inclusive and counted from 0,
    of L layers (eq. 9 and table 4 of the paper). For the 18 layers of ColPali, this yields 7-10,
    whereas the reference implementation uses 8-11; set `layers` to reproduce it.
    """

    class Spec(Budget):
        """Options of `Sap`."""

        name: Literal["sap"] = "sap"
        heads: Literal["mean", "max"] = "mean"
        """Aggregation over heads: SAP-Mean or SAP-Max."""
        window: tuple[float, float] = (0.4, 0.6)
        """First and last layer relative to the depth of the model, alpha and beta of eq. 5."""
        layers: Annotated[list[int], Field(min_length=1)] | None = None
        """Layer indices that replace the window. Negative indices count from the end."""

        @model_validator(mode="after")
        def _check_layers(self):
            low, high = self.window
            rule = "[alpha, beta] with 0 <= alpha <= beta <= 1"
            self.require(0 <= low <= high <= 1, "window", rule)
            return self

    assignment_form = "indices"

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention column sums of the layers in the spec."""
        spec = self.spec
        window = "-".join(f"{bound:.6f}".rstrip("0").rstrip(".") for bound in spec.window)
        layers = window if spec.layers is None else ",".join(map(str, spec.layers))
        return (Tap("column_sums", spec.heads, layers),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        (tap,) = self.needs_taps
        return select(batch, *largest(batch.taps[tap.name], batch.mask, budgets_B))

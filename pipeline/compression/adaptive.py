"""Adaptive budgets: the same number of vectors, more of them to items that hold more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline import config
from pipeline.compression import Budgeted, Compressor, NumVectors, pack_left
from pipeline.compression.hpool import merge_costs
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS, CompressorSpec
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, unit_vectors

#: Halvings of the range of theta: what is left of it is rounding.
HALVINGS = 60


class Adaptive(Compressor["Adaptive.Spec"]):
    """A method with a budget for each item, `num_vectors` in the mean over a sample of the corpus.

    The papers leave this open: SAP enforces "a uniform token budget across all documents" (sec. 7),
    AGC's future work is a budget "in proportion to a document's inherent information". How much an
    item holds is, by criterion:

        gain      what further vectors gain: it gets `1 + #{Ward merges that add more than theta to
                  the squared error}`. With one theta for all items a vector more would save as much
                  anywhere: this is Ward's clustering of the corpus within items.
        entropy   how far its attention is spread: `theta exp(H)`, H the entropy of a saliency over
                  its tokens, so exp(H) counts those that matter.
        length    its number of tokens: `theta N`, what a ratio gives. The control.

    `fit` finds the theta at which the sample takes as many vectors as with the uniform budget (of
    which items with fewer tokens take less), never more. Budgets stay within `lowest` and `highest`
    times `num_vectors`.
    """

    class Spec(config.ComponentSpec):
        """Which method, and how its budget is spread.

        Attributes:
            num_vectors: what an item has in the mean.
            method: a compressor with a budget, which it gets from here.
            saliency: for the criterion entropy, an attention statistic, see `pipeline.taps`.
        """

        name: Literal["adaptive"] = "adaptive"
        num_vectors: NumVectors
        method: CompressorSpec = Field(default="hpool", validate_default=True)
        criterion: Literal["gain", "entropy", "length"] = "gain"
        lowest: float = Field(0.25, ge=0, le=1)
        highest: float = Field(4.0, ge=1, allow_inf_nan=False)
        saliency: TapName = "pooled_row/mean/last"

        @model_validator(mode="before")
        @classmethod
        def _hand_down_the_budget(cls, data: Any) -> Any:
            if not isinstance(data, Mapping) or "num_vectors" not in data:
                return data
            method = data.get("method", "hpool")
            method = {"name": method} if isinstance(method, str) else method
            if isinstance(method, Mapping):
                rule = f"omitted (the budget is num_vectors={data['num_vectors']})"
                for field in ("num_vectors", "ratio"):
                    value = method.get(field)
                    if value is not None and (field, value) != ("num_vectors", data["num_vectors"]):
                        raise SpecError(f"method.{field}", value, rule)
                method = {**method, "num_vectors": data["num_vectors"]}
            return {**data, "method": method}

        @model_validator(mode="after")
        def _has_a_budget_to_spread(self) -> Self:
            method = COMPRESSORS.build(self.method)
            if not isinstance(method, Budgeted) or method.needs_fit:
                rule = "a method with a vector budget that needs no fitting, such as hpool"
                raise SpecError("method.name", self.method.name, rule)
            return self

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        method = COMPRESSORS.build(spec.method)
        assert isinstance(method, Budgeted)  # by the spec
        self._method = method
        self.support_form = self._method.support_form
        self.normalised = self._method.normalised

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Those of the method, and the saliency if its entropy counts."""
        own = (Tap.parse(self.spec.saliency),) if self.spec.criterion == "entropy" else ()
        return tuple(dict.fromkeys((*self._method.needs_taps, *own)))

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """The theta at which the sample takes the vectors of the uniform budget, or just fewer."""
        measured: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in sample:
            packed, _ = pack_left(batch)
            measured.append((information(packed, spec), packed.lengths))
        wanted = sum(int(n.clamp(max=spec.num_vectors).sum()) for _, n in measured)

        def total(theta: float) -> int:
            return sum(int(budgets(spec, *item, theta).sum()) for item in measured)

        # More vectors as theta falls, for gain, or rises: in logarithms, from none to all.
        few, many = (1e3, 1e-12) if spec.criterion == "gain" else (1e-6, 1e6)
        for _ in range(HALVINGS):
            middle = (few * many) ** 0.5
            few, many = (middle, many) if total(middle) <= wanted else (few, middle)
        return {"theta": np.array([few])}

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        theta = float(self.fitted["theta"][0])
        held = information(batch, self.spec)
        return self._method.reduce(batch, budgets(self.spec, held, batch.lengths, theta))


def information(batch: TokenBatch, spec: Adaptive.Spec) -> torch.Tensor:
    """Measures the information in items by the spec's criterion.

    Args:
        batch: The items, real tokens first in each row.
        spec: Settings of the compressor.

    Returns:
        (B, N) costs of merges for the criterion `gain`, otherwise (B, 1) values.
    """
    lengths_B1 = batch.lengths.double().unsqueeze(1)
    if spec.criterion == "length":
        return lengths_B1
    if spec.criterion == "gain":
        return merge_costs(unit_vectors(batch), batch.lengths)
    weights_BN = batch.taps[spec.saliency].double().masked_fill(~batch.mask, 0.0)
    shares_BN = weights_BN / weights_BN.sum(dim=1, keepdim=True).clamp_min(1e-300)
    return torch.special.entr(shares_BN).sum(dim=1, keepdim=True).exp()


def budgets(
    spec: Adaptive.Spec, held: torch.Tensor, lengths_B: torch.Tensor, theta: float
) -> torch.Tensor:
    """(B,) int64: the vectors of each item, at most its length, by what `information` gives.

    >>> spec = Adaptive.Spec(num_vectors=4, criterion="length")
    >>> held, lengths = torch.tensor([[2.0], [40.0], [90.0]]), torch.tensor([2, 40, 90])
    >>> budgets(spec, held, lengths, theta=0.1).tolist()
    [1, 4, 9]
    """
    if spec.criterion == "gain":
        wanted_B = 1 + (held > theta).sum(dim=1)
    else:
        wanted_B = (held.squeeze(1) * theta).round().clamp(max=2.0**31).long()
    lowest = max(1, round(spec.lowest * spec.num_vectors))
    highest = round(spec.highest * spec.num_vectors)
    return torch.minimum(wanted_B.clamp(lowest, highest), lengths_B)

"""Adaptive budgets, which assign more vectors to items that contain more information."""

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
from pipeline.compression.kcenter import covering_radii
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS, CompressorSpec
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, unit_vectors

#: Criteria whose theta is the smallest gain or radius for which an item receives another vector.
THRESHOLDS = ("gain", "radius")
#: Number of bisection steps. It is sufficient to determine theta with float64 precision.
NUM_BISECTIONS = 60


class Adaptive(Compressor["Adaptive.Spec"]):
    """Runs another compressor with an individual budget for each item.

    The budgets average `num_vectors` over the corpus. The SAP paper enforces "a uniform token
    budget across all documents" (section 7), and the AGC paper suggests a budget "in proportion to
    a document's inherent information" as future work. This class implements such a budget.

    `fit` maximises the total budget of a sample, subject to the constraint that it does not exceed
    the total of a uniform budget. In the uniform budget, items that have fewer than `num_vectors`
    tokens use only as many vectors as they have tokens.
    """

    class Spec(config.ComponentSpec):
        """Options of `Adaptive`."""

        name: Literal["adaptive"] = "adaptive"
        num_vectors: NumVectors
        """Mean number of vectors per item."""
        method: CompressorSpec = Field(default="hpool", validate_default=True)
        """Compressor that is run with the budgets. Its own budget must be omitted."""
        criterion: Literal["gain", "radius", "entropy", "length"] = "gain"
        """Definition of the budget of an item. Theta is a constant of the corpus, determined by
        `fit`.

        - "gain": `1 + #{Ward merges that increase the squared error by more than theta}`. The next
          vector of any item then reduces the error by about the same amount. This is equivalent to
          Ward clustering of the whole corpus in which tokens of different items are never merged.
        - "radius": The smallest number of centres of `kcenter` with a covering radius of at most
          theta, as a distance `1 - cos`. The maximum similarity of a unit query token to these
          centres is then at most `sqrt(2 theta)` below that to all tokens.
        - "entropy": `theta exp(H)`, where H is the entropy of the saliency over the tokens. exp(H)
          can be interpreted as the effective number of salient tokens.
        - "length": `theta N` for an item with N tokens. This baseline is equivalent to a constant
          ratio.
        """
        min_budget: float = Field(0.25, ge=0, le=1)
        """Minimum budget of an item as a fraction of `num_vectors`."""
        max_budget: float = Field(4.0, ge=1, allow_inf_nan=False)
        """Maximum budget of an item as a multiple of `num_vectors`."""
        saliency: TapName = "pooled_row/mean/last"
        """Attention statistic that the criterion "entropy" uses, see `pipeline.taps`."""

        @model_validator(mode="before")
        @classmethod
        def _pass_budget(cls, data: Any) -> Any:
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
                if method.get("name") in COMPRESSORS.names():
                    cls._check_name(method["name"])
                method = {**method, "num_vectors": data["num_vectors"]}
            return {**data, "method": method}

        @model_validator(mode="after")
        def _check_method(self) -> Self:
            self._check_name(self.method.name)
            return self

        @staticmethod
        def _check_name(name: str) -> None:
            method = COMPRESSORS.load(name)
            if not issubclass(method, Budgeted) or method.needs_fit:
                rule = "a method with a vector budget that needs no fitting, such as hpool"
                raise SpecError("method.name", name, rule)

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        method = COMPRESSORS.build(spec.method)
        assert isinstance(method, Budgeted)  # guaranteed by the spec
        self._method = method
        self.assignment_form = self._method.assignment_form
        self.normalised = self._method.normalised

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistics of the compressor and, for the criterion "entropy", the saliency."""
        taps = (Tap.parse(self.spec.saliency),) if self.spec.criterion == "entropy" else ()
        return tuple(dict.fromkeys((*self._method.needs_taps, *taps)))

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Determines theta and returns it as `{"theta": (1,) float64}`.

        The total budget of the sample never exceeds the total of the uniform budget.
        """
        measured: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in sample:
            packed, _ = pack_left(batch)
            measured.append((information(packed, spec), packed.lengths))
        max_total = sum(int(n.clamp(max=spec.num_vectors).sum()) for _, n in measured)

        def total(theta: float) -> int:
            return sum(int(budgets(spec, *item, theta).sum()) for item in measured)

        # Bisection on a logarithmic scale. Smaller values of a threshold yield more vectors.
        few, many = (1e3, 1e-12) if spec.criterion in THRESHOLDS else (1e-6, 1e6)
        for _ in range(NUM_BISECTIONS):
            middle = (few * many) ** 0.5
            few, many = (middle, many) if total(middle) <= max_total else (few, middle)
        return {"theta": np.array([few])}

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        theta = float(self.fitted["theta"][0])
        budgets_B = budgets(self.spec, information(batch, self.spec), batch.lengths, theta)
        return self._method.reduce(batch, budgets_B)


def information(batch: TokenBatch, spec: Adaptive.Spec) -> torch.Tensor:
    """Measures the information in each item by the criterion of the spec.

    Args:
        batch: Items to measure. Padding must be at the end of each row.
        spec: Options of the compressor.

    Returns:
        Costs of the Ward merges (B, N) for "gain"; covering radii of 1, 2, ... centres (B, K) for
        "radius", up to the maximum budget; the effective number of tokens (B, 1) for the other
        criteria.
    """
    lengths_B1 = batch.lengths.double().unsqueeze(1)
    if spec.criterion == "length":
        return lengths_B1
    if spec.criterion == "gain":
        return merge_costs(unit_vectors(batch), batch.lengths)
    if spec.criterion == "radius":
        return covering_radii(batch, round(spec.max_budget * spec.num_vectors))
    weights_BN = batch.taps[spec.saliency].double().masked_fill(~batch.mask, 0.0)
    shares_BN = weights_BN / weights_BN.sum(dim=1, keepdim=True).clamp_min(1e-300)
    return torch.special.entr(shares_BN).sum(dim=1, keepdim=True).exp()


def budgets(
    spec: Adaptive.Spec, measure: torch.Tensor, lengths_B: torch.Tensor, theta: float
) -> torch.Tensor:
    """Computes the budget of each item from its information.

    Args:
        spec: Options of the compressor.
        measure: Information of the items, as returned by `information`.
        lengths_B: Number of tokens per item.
        theta: Constant determined by `Adaptive.fit`.

    Returns:
        Number of vectors per item, (B,) int64. It is at most the number of tokens.

    >>> spec = Adaptive.Spec(num_vectors=4, criterion="length")
    >>> measure, lengths = torch.tensor([[2.0], [40.0], [90.0]]), torch.tensor([2, 40, 90])
    >>> budgets(spec, measure, lengths, theta=0.1).tolist()
    [1, 4, 9]
    """
    if spec.criterion in THRESHOLDS:
        budgets_B = 1 + (measure > theta).sum(dim=1)
    else:
        budgets_B = (measure.squeeze(1) * theta).round().clamp(max=2.0**31).long()
    lowest = max(1, round(spec.min_budget * spec.num_vectors))
    highest = round(spec.max_budget * spec.num_vectors)
    return torch.minimum(budgets_B.clamp(lowest, highest), lengths_B)

"""Adaptive budgets, which assign more vectors to items that need more to be covered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline import config
from pipeline.compression import Budgeted, Compressor, NumVectors, pack_left
from pipeline.compression.kcenter import covering_radii
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS, CompressorSpec
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: Number of bisection steps. It is sufficient to determine theta with float64 precision.
NUM_BISECTIONS = 60


class Adaptive(Compressor["Adaptive.Spec"]):
    """Runs another compressor with an individual budget for each item.

    The budgets average `num_vectors` over the corpus. The SAP paper enforces "a uniform token
    budget across all documents" (section 7), and the AGC paper suggests a budget "in proportion to
    a document's inherent information" as future work. This class implements such a budget: the
    smallest number of centres of `kcenter` with a covering radius of at most theta, as a distance
    `1 - cos`. The maximum similarity of a unit query token to these centres is then at most
    `sqrt(2 theta)` below that to all tokens.

    `fit` determines theta, a constant of the corpus. It maximises the total budget of a sample,
    subject to the constraint that it does not exceed the total of a uniform budget. In the uniform
    budget, items that have fewer than `num_vectors` tokens use only as many vectors as they have
    tokens.
    """

    class Spec(config.ComponentSpec):
        """Options of `Adaptive`."""

        name: Literal["adaptive"] = "adaptive"
        num_vectors: NumVectors
        """Mean number of vectors per item."""
        method: CompressorSpec = Field(default="hpool", validate_default=True)
        """Compressor that is run with the budgets. Its own budget must be omitted."""
        min_budget: float = Field(0.25, ge=0, le=1)
        """Minimum budget of an item as a fraction of `num_vectors`."""
        max_budget: float = Field(4.0, ge=1, allow_inf_nan=False)
        """Maximum budget of an item as a multiple of `num_vectors`."""

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
        self.assignment_form = method.assignment_form
        self.normalised = method.normalised

    @property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistics of the compressor that is run with the budgets."""
        return self._method.needs_taps

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Determines theta and returns it as `{"theta": (1,) float64}`.

        The total budget of the sample never exceeds the total of the uniform budget.
        """
        measured: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in sample:
            packed, _ = pack_left(batch)
            measured.append((radii(packed, spec), packed.lengths))
        max_total = sum(int(n.clamp(max=spec.num_vectors).sum()) for _, n in measured)

        def total(theta: float) -> int:
            return sum(int(budgets(spec, *item, theta).sum()) for item in measured)

        # Bisection on a logarithmic scale. Smaller radii yield more vectors.
        few, many = 1e3, 1e-12
        for _ in range(NUM_BISECTIONS):
            middle = (few * many) ** 0.5
            few, many = (middle, many) if total(middle) <= max_total else (few, middle)
        return {"theta": np.array([few])}

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        theta = float(self.fitted["theta"][0])
        budgets_B = budgets(self.spec, radii(batch, self.spec), batch.lengths, theta)
        return self._method.reduce(batch, budgets_B)


def radii(batch: TokenBatch, spec: Adaptive.Spec) -> torch.Tensor:
    """Returns the covering radii of 1, 2, ... centres up to the maximum budget, (B, K)."""
    return covering_radii(batch, round(spec.max_budget * spec.num_vectors))


def budgets(
    spec: Adaptive.Spec, radii_BK: torch.Tensor, lengths_B: torch.Tensor, theta: float
) -> torch.Tensor:
    """Returns the budget of each item, (B,) int64, from its covering radii and theta of `fit`.

    >>> spec = Adaptive.Spec(num_vectors=4)
    >>> radii_BK = torch.tensor([[0.3, 0.0, -1.0], [0.2, 0.15, 0.05]])
    >>> budgets(spec, radii_BK, torch.tensor([2, 3]), theta=0.1).tolist()
    [2, 3]
    """
    budgets_B = 1 + (radii_BK > theta).sum(dim=1)
    lowest = max(1, round(spec.min_budget * spec.num_vectors))
    highest = round(spec.max_budget * spec.num_vectors)
    return torch.minimum(budgets_B.clamp(lowest, highest), lengths_B)

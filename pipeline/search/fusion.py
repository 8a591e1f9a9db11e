"""Fusion of the rankings by MaxSim, BM25 and single vectors into one ranking.

Each component with a positive weight ranks the items and contributes its best ones (`depth`). The
fused score of an item is the sum over the lists that contain it:

    weight * (score - lowest) / (highest - lowest)   with the bounds of the list

The lowest BM25 score is 0. The lists contain the best items of all shards, so that the result does
not depend on the number of shards.

BM25 and single vectors can be far worse than MaxSim, for example if a query paraphrases the texts.
They therefore only contribute to a query if their best item is one of the few best by MaxSim
(`agreement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from pipeline.config import Spec, SpecError, read

#: Value of the option `score` that fuses rankings.
FUSED = "fused"
#: Components of the fused score, by their names in `FusionWeights` and `Ranking`.
COMPONENTS = ("maxsim", "bm25", "single_vector")
#: Number of scores from which a lower bound of the best scores is estimated.
SELECTION_SAMPLE = 16384


class FusionWeights(Spec):
    """Weights of the components of a fused score. Components of weight 0 are not computed."""

    maxsim: float = Field(1.0, ge=0, le=1e6, allow_inf_nan=False)
    """Weight of the MaxSim score."""
    bm25: float = Field(0.2, ge=0, le=1e6, allow_inf_nan=False)
    """Weight of the BM25 score."""
    single_vector: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Weight of the single-vector score."""

    @model_validator(mode="after")
    def _check_any(self) -> FusionWeights:
        has_weight = any(getattr(self, name) for name in COMPONENTS)
        self.require(has_weight, "maxsim", "above 0 if the other weights are 0")
        return self


class Fusion(Spec):
    """Settings of the fused score."""

    weights: FusionWeights | None = None
    """Weights of the components. They depend on the collection, so that a fused search without them
    is refused; `jobs.evaluate SPEC --fit-fusion FILE` fits them to judged queries."""
    agreement: int = Field(3, ge=0, le=10_000)
    """Number of best items by MaxSim to which the best item of another component must belong for
    this component to contribute to the query. If 0, it always contributes."""
    depth: int = Field(100, ge=1, le=10_000)
    """Number of best items of each component that are fused. It is `k` if that is more."""

    @model_validator(mode="after")
    def _check_agreement(self) -> Fusion:
        self.require(self.agreement <= self.depth, "agreement", f"at most depth = {self.depth}")
        has_maxsim = not self.weights or bool(self.weights.maxsim)
        is_valid = has_maxsim or not self.agreement
        self.require(is_valid, "agreement", "0 if the weight of maxsim is 0")
        return self

    @property
    def component_weights(self) -> FusionWeights:
        """The weights, which must not be null."""
        if self.weights is None:
            note = "; fit them with `maxray evaluate SPEC --fit-fusion fusion.yaml`"
            raise SpecError("fusion.weights", None, "set for the score fused", note=note)
        return self.weights

    def lists(
        self,
        components: Mapping[str, np.ndarray],
        k: int,
        groups: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the ascending indices of the best items of each component.

        Args:
            groups: Group (R,) of each item, or None. If given, the best item of each of the best
                groups is included as well.
        """
        lists = {}
        for name in COMPONENTS:
            if name in components and getattr(self.component_weights, name):
                scores = np.where(components["maxsim"] > -np.inf, components[name], -np.inf)
                if name == "bm25":  # items without a common term do not match
                    scores[scores <= 0] = -np.inf
                lists[name] = best_rows(scores, None, max(self.depth, k), groups)
        return lists

    def scores(
        self,
        components: Mapping[str, np.ndarray],
        k: int,
        groups: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the fused scores (R,) float64; -inf for items to which no list contributes."""
        fused = np.full(len(components["maxsim"]), -np.inf)
        for name, items in self.lists(components, k, groups).items():
            if self._agrees(components["maxsim"], components[name], items):
                contributions = _contributions(name, components[name][items])
                fused[items] = np.maximum(fused[items], 0)
                fused[items] += getattr(self.component_weights, name) * contributions
        return fused

    def _agrees(self, maxsim: np.ndarray, scores: np.ndarray, items: np.ndarray) -> bool:
        """Checks whether the best item of a list is among the `agreement` best by MaxSim."""
        if not self.agreement or not len(items):
            return True
        best = items[scores[items] == scores[items].max()]
        return int((maxsim > maxsim[best].max()).sum()) < self.agreement


def _contributions(name: str, scores: np.ndarray) -> np.ndarray:
    """Returns the scores of the list of a component, normalised to [0, 1]."""
    scores = scores.astype(np.float64)
    if not len(scores):
        return scores
    lowest = 0.0 if name == "bm25" else scores.min()
    width = scores.max() - lowest
    return (scores - lowest) / width if width else np.ones_like(scores)


DEFAULT_FUSION = Fusion()


def _read(value: Any) -> Any:
    return read(value, "") if isinstance(value, str) else value


#: Settings of the fused score as a field of specs: a mapping, or the path of a YAML file.
FusionSpec = Annotated[Fusion, BeforeValidator(_read)]


def pool_rows(
    components: Mapping[str, np.ndarray],
    fusion: Fusion,
    k: int,
    rows: np.ndarray | None,
    groups: np.ndarray | None,
) -> np.ndarray:
    """Returns the ascending indices of the items in the lists of any component.

    Args:
        components: Scores (R,) of the scored items by component.
        rows: (R,) ascending indices of the scored items, or None for all items.
        groups: (B,) group of each item, or None.
    """
    if groups is not None and rows is not None:
        groups = groups[rows]
    lists = fusion.lists(components, k, groups)
    return np.unique(np.concatenate(list(lists.values())))


def best_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    num: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the items with the `num` best scores in ascending order. Ties are all included.

    Args:
        scores: (S,) float. Items with -inf are excluded.
        rows: (S,) ascending indices of the scored items, or None for all items.
        groups: (B,) group of each item, or None. If given, the best item of each of the `num` best
            groups is included as well, so that candidates of few groups do not replace the others.

    >>> best_rows(np.array([3.0, 1.0, 2.0, 2.0]), None, 2).tolist()
    [0, 2, 3]
    >>> scores, groups = np.array([3.0, 2.5, 1.0, 0.5]), np.array([0, 0, 1, 1])
    >>> best_rows(scores, None, 2, groups).tolist()
    [0, 1, 2]
    """
    selected = (scores >= _limit(scores, num)) & (scores > -np.inf)
    if groups is not None and len(scores):
        groups = groups if rows is None else groups[rows]
        best = np.full(groups.max() + 1, -np.inf, scores.dtype)
        np.maximum.at(best, groups, scores)
        selected |= (scores >= max(_limit(best, num), -1e38)) & (scores == best[groups])
    chosen = np.flatnonzero(selected)
    return chosen if rows is None else rows[chosen]


def _limit(scores: np.ndarray, num: int) -> float:
    """Returns the `num`-th best score, or -inf if there are fewer.

    Scores below a bound that is estimated on a sample are left out: selecting among a million
    scores takes longer than computing them.
    """
    if num >= len(scores):
        return -np.inf
    sample = scores[:: max(len(scores) // SELECTION_SAMPLE, 1)]
    # Twice the expected number of sampled scores, plus four standard deviations.
    expected = num * len(sample) / len(scores)
    rank = int(2 * expected + 4 * expected**0.5) + 4
    if rank < len(sample) // 4:
        above = scores[scores >= np.partition(sample, -rank)[-rank]]
        scores = above if len(above) >= num else scores
    return float(np.partition(scores, -num)[-num])

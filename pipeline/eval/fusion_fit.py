"""Fitting of the weights of the fused score to judged queries, with cross-validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.config import Spec, SpecError, dump_yaml
from pipeline.eval import JudgedQueries
from pipeline.eval.level import judged_level
from pipeline.eval.metrics import per_query
from pipeline.eval.ranker import Ranker
from pipeline.eval.significance import bootstrap_interval, randomisation_p
from pipeline.eval.spec import EvaluateSpec
from pipeline.registry import BENCHMARKS
from pipeline.search.fusion import Fusion, FusionWeights
from pipeline.search.options import SearchOptions
from pipeline.search.score import Ranking, fuse
from pipeline.search.searcher import open_index

#: Weights of BM25 and of single vectors that are compared, relative to MaxSim.
BM25_WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
SINGLE_WEIGHTS = (0.0, 0.25, 0.5)
#: Agreements with MaxSim that are compared.
AGREEMENTS = (0, 3)
#: Settings of MaxSim alone.
MAXSIM_ONLY = Fusion(weights=FusionWeights(bm25=0))
#: Number of parts into which the queries are divided for cross-validation.
NUM_FOLDS = 5
#: A fusion is chosen if its mean gain over MaxSim exceeds this number of standard errors. Several
#: settings are compared, so that the best of them gains by chance.
MIN_STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class FusionFit:
    """Result of fitting the fused score, or the weights of a federation.

    Attributes:
        maxsim: Metric of MaxSim alone, or of the best member, (Q,).
        fused: Metric of the settings that were fitted to the other folds, (Q,).
        reference: Name of the ranking that they are compared with.
    """

    representation: str
    fusion: Spec
    maxsim: np.ndarray
    fused: np.ndarray
    measure: str
    reference: str = "MaxSim"

    @property
    def p_value(self) -> float:
        """Two-sided p value of the paired difference on queries that were not fitted."""
        return float(randomisation_p((self.fused - self.maxsim)[np.newaxis])[0])

    def sentence(self) -> str:
        """Summarises the cross-validation, with the 95 % interval of the difference."""
        low, high = bootstrap_interval(self.fused - self.maxsim)
        return (
            f"{self.measure} on held-out queries: {self.fused.mean():.4f}, "
            f"{self.reference} {self.maxsim.mean():.4f} (difference {low:+.4f} to {high:+.4f}, "
            f"p = {self.p_value:.3f}, {len(self.fused)} queries, {NUM_FOLDS} folds)"
        )

    def to_yaml(self) -> str:
        """Returns the settings as YAML, with the cross-validation as a comment."""
        comment = f"# Fitted by jobs.evaluate to {self.representation}.\n# {self.sentence()}\n"
        return comment + dump_yaml(self.fusion)


@dataclass(frozen=True)
class JudgedPools:
    """Judged queries of one representation, with the components of the scores of the best items.

    Attributes:
        pools: Output of `Scorer.rank_part` by query id, with all components.
        k: Number of hits per query.
    """

    options: SearchOptions
    pools: Mapping[str, Ranking]
    judged: JudgedQueries
    k: int
    measure: str
    has_single: bool

    @classmethod
    def read(cls, spec: EvaluateSpec) -> JudgedPools:
        """Ranks the judged queries of an evaluation by all components.

        The representation is the only one of the spec, or the default of searches. The metric is
        nDCG@10, or the first of the spec.
        """
        judged = BENCHMARKS.build(spec.benchmark).load()
        if not judged.has_texts:
            problem = "has queries without texts, which BM25 needs"
            raise SpecError("benchmark", spec.benchmark.name, "a benchmark with texts", problem)
        if len(spec.representations) > 1:
            rule = "a list of one representation for --fit-fusion"
            raise SpecError("representations", spec.representations, rule)
        searcher = open_index(spec.index)
        judged = judged.located([searcher.index], spec.filter)
        info = searcher.representation(next(iter(spec.representations), None))
        level = judged_level(searcher.index, judged, spec.judged, spec.filter)
        spec = spec.model_copy(update={"judged": level})
        has_single = info.pooled_column is not None and not spec.query_vectors
        options = SearchOptions(
            representation=info.name,
            k=spec.k + judged.num_removed,
            score="fused",
            fusion=Fusion(weights=FusionWeights(bm25=1, single_vector=float(has_single))),
            group_by="parent" if level == "parent" else None,
            filter=spec.filter,
        ).resolve(searcher.index)
        ranker = Ranker(spec, judged, searcher)
        queries = ranker.queries_with_texts(info.name, range(len(judged.queries)))
        pools = searcher.scorer.rank_part(queries, options, searcher.items.select(options))
        measure = "nDCG@10" if "nDCG@10" in spec.measures else spec.measures[0]
        by_query = dict(zip(judged.queries, pools, strict=True))
        return cls(options, by_query, judged, spec.k, measure, has_single)

    def measure_fusion(self, fusion: Fusion) -> np.ndarray:
        """Returns the metric of each query, (Q,), for given settings of the fused score."""
        options = self.options.model_copy(update={"fusion": fusion})
        run = {}
        for query_id, pool in self.pools.items():
            ranking = fuse(pool, options)
            is_grouped = options.group_by is not None
            scores = ranking.scores_by_parent() if is_grouped else ranking.scores_by_item()
            run[query_id] = self.judged.remove_queries(query_id, scores, self.k)
        values = per_query(run, self.judged.qrels, [self.measure], self.judged.moments)
        return np.array([values[query_id][self.measure] for query_id in self.pools])


def settings(has_single: bool) -> list[Fusion]:
    """Returns the settings that are compared. The first is MaxSim alone."""
    found = [MAXSIM_ONLY]
    for bm25 in BM25_WEIGHTS:
        for single in SINGLE_WEIGHTS[: None if has_single else 1]:
            weights = FusionWeights(bm25=bm25, single_vector=single)
            found += [Fusion(weights=weights, agreement=agreement) for agreement in AGREEMENTS]
    return found


def fit_fusion(judged: JudgedPools) -> FusionFit:
    """Chooses the settings of the fused score that are best on judged queries."""
    candidates = settings(judged.has_single)
    values_CQ = np.array([judged.measure_fusion(fusion) for fusion in candidates])
    fused_Q = held_out_values(
        values_CQ.shape[1], lambda is_used_Q: values_CQ[choose(values_CQ[:, is_used_Q])]
    )
    fusion = candidates[choose(values_CQ)]
    return FusionFit(judged.options.column, fusion, values_CQ[0], fused_Q, judged.measure)


def held_out_values(num_queries: int, fit: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns the metric (Q,) of each query for the settings fitted to the other folds.

    Args:
        fit: Returns the metric (Q,) of all queries for the settings that are fitted to some of
            them, which are given by a mask (Q,).
    """
    fold_Q = np.random.default_rng(0).permutation(num_queries) % NUM_FOLDS
    values_Q = np.empty(num_queries)
    for fold in range(min(NUM_FOLDS, num_queries)):
        is_held_out_Q = fold_Q == fold
        values_Q[is_held_out_Q] = fit(~is_held_out_Q)[is_held_out_Q]
    return values_Q


def choose(values_CQ: np.ndarray) -> int:
    """Returns the number of the best settings, or 0 unless their gain over the first is certain.

    >>> choose(np.array([[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.41, 0.5], [0.4, 0.0, 0.3, 0.4]]))
    1
    >>> choose(np.array([[0.1, 0.2, 0.3, 0.4], [0.9, 0.0, 0.3, 0.4]]))
    0
    """
    gains_CQ = values_CQ - values_CQ[0]
    best = int(gains_CQ.mean(1).argmax())
    num_queries = values_CQ.shape[1]
    error = gains_CQ[best].std(ddof=1) / np.sqrt(num_queries) if num_queries > 1 else np.inf
    return best if gains_CQ[best].mean() > MIN_STANDARD_ERRORS * error else 0

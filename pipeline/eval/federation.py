"""Evaluation of a federation: a row for each member by itself, and one for all of them together."""

from __future__ import annotations

import functools
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import SpecError, dump, load, parse
from pipeline.encoders import EncodedQueries
from pipeline.eval import Benchmark, BenchmarkRow, JudgedQueries
from pipeline.eval.cache import Cache, Measurements, cache_key
from pipeline.eval.evaluation import reranked_result, versions
from pipeline.eval.fusion_fit import BM25_WEIGHTS, FusionFit, choose, held_out_values
from pipeline.eval.level import judged_level
from pipeline.eval.metrics import per_query, write_run
from pipeline.eval.ranker import Pool, Ranker, add_token_sizes, map_by_pool
from pipeline.eval.results import COSTS, FEDERATED, Evaluation, Result
from pipeline.eval.rows import Candidates, Row
from pipeline.eval.spec import EvaluateSpec, RerankRow, headline_measure, with_main_measure
from pipeline.registry import BENCHMARKS
from pipeline.runtime.atomic import check_writable
from pipeline.search.candidates import EXACT
from pipeline.search.federated import FederatedSearcher, Rankings
from pipeline.search.federation import Federation, Found
from pipeline.search.options import SearchOptions

if TYPE_CHECKING:
    from pipeline.search.rerankers import Reranker

#: Name of the row of all members together.
FEDERATION = "federation"
#: Weights relative to the best member that are compared if there are several others.
FEW_WEIGHTS = (0.1, 0.3, 1.0)
#: Fields of the spec that apply to a federation.
FIELDS = {
    "index", "benchmark", "output", "query_vectors", "measures", "k", "judged", "filter",
    "comparisons", "labels", "plots", "bm25", "diagnostics", "rerank",
}  # fmt: skip


def run(spec: EvaluateSpec, report: Callable[[str], None]) -> Evaluation:
    """Evaluates a federation and its members, and writes their runs and official results.

    The members are evaluated in the same way as an index, without their limit `depth`. All members
    must be available. By default, the federation is compared with each member.

    Args:
        spec: Spec of the evaluation, whose `index` is the path of a federation.
        report: Function that reports a line of progress.

    Raises:
        SpecError: The federation, a member or the benchmark is missing or invalid, or a field of
            the spec does not apply to a federation.
    """
    check_writable(spec.output, "output")
    spec, benchmark, judged, searcher = _open(spec)
    names = list(searcher.searchers)
    evaluator = _Evaluator(spec, judged, searcher)
    for row in spec.rerank:  # fails before any row is scored
        evaluator.rerankers(row)
    headline, notes = headline_measure(spec, judged), [f"{len(judged.queries)} judged queries"]
    report(notes[0])
    results: list[Result] = []

    def add(result: Result, entry: Measurements) -> None:
        run_file = posixpath.join(spec.output, "runs", f"{result.name}.trec")
        write_run(run_file, entry.rankings, result.name)
        seconds = len(entry.rankings) / entry.queries_per_second
        row_fields = entry.rankings, spec.k, seconds, judged.spans
        official = BenchmarkRow(result.name, FEDERATED, *row_fields)
        benchmark.write_result(spec.output, official)
        report(f"{result.name}  {headline} {result.means[headline]:.4f}")
        results.append(result)

    for name in names:
        entry = evaluator.member(name)
        add(_result(name, entry), entry)
    best = max(results, key=lambda result: result.means[headline])
    entry = evaluator.federation()
    add(replace(_result(FEDERATION, entry), first_stage=best.name), entry)
    evaluator.report = report
    for row in spec.rerank:
        rerankers = evaluator.rerankers(row)
        entry = evaluator.federation(rerankers)
        add(reranked_result(_result(FEDERATION, entry), row, rerankers, entry), entry)
    return Evaluation(
        spec=dump(spec),
        headline=headline,
        judgments=evaluator.judgments,
        num_items=sum(searcher.searchers[name].num_items() for name in names),
        notes=notes,
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        versions=versions(),
        results=results,
        query_categories=judged.categories,
    )


def _result(name: str, entry: Measurements) -> Result:
    fields = entry.model_dump(exclude={"rankings", "rerank_usage"})
    return Result(name, FEDERATED, None, FEDERATED, "", **fields)


def _open(
    spec: EvaluateSpec,
) -> tuple[EvaluateSpec, Benchmark, JudgedQueries, FederatedSearcher]:
    """Opens the federation and the benchmark of a spec, and resolves the spec for them."""
    for name in sorted(spec.model_fields_set - FIELDS):
        if (value := getattr(spec, name)) != EvaluateSpec.model_fields[name].get_default(
            call_default_factory=True
        ):
            raise SpecError(name, value, "absent for a federation, whose members set it")
    federation = load(Federation, spec.index, role="index")
    searcher = FederatedSearcher(federation.model_copy(update={"require_all": True}))
    names = list(federation.members)
    rows = [row.row for row in spec.rerank]
    for name in (FEDERATION, *rows):
        if name in names:
            raise SpecError("members", name, f"mappings with other names than {name}")
    for number, row in enumerate(spec.rerank):
        for field in ("representation", "score"):
            if (value := getattr(row, field)) is not None:
                raise SpecError(f"rerank[{number}].{field}", value, "null for a federation")
    comparisons = spec.comparisons or [[FEDERATION, name] for name in names]
    comparisons += [] if spec.comparisons else [[row, FEDERATION] for row in rows]
    for pair in comparisons:
        for name in pair:
            if name not in (*names, FEDERATION, *rows):
                raise SpecError.unknown_name("comparisons", name, [*names, FEDERATION, *rows])
    benchmark = BENCHMARKS.build(spec.benchmark)
    indexes = [opened.index for opened in searcher.searchers.values()]
    judged = benchmark.load().located(indexes, spec.filter)
    spec = with_main_measure(spec, judged)
    level = judged_level(searcher.searchers[names[0]].index, judged, spec.judged, None)
    spec = spec.model_copy(update={"comparisons": comparisons, "judged": level})
    return spec, benchmark, judged, searcher


def fit_weights(spec: EvaluateSpec) -> FusionFit:
    """Chooses the weights of the members that are best on judged queries.

    The result is the best member alone unless other weights are better by two standard errors.
    """
    spec, _, judged, searcher = _open(spec)
    measure = headline_measure(spec, judged)
    hits, federation = _Evaluator(spec, judged, searcher).hits(), searcher.spec

    def measure_weights(weights: Mapping[str, float]) -> list[float]:
        weighted = federation.with_weights(weights)
        chosen = {name: [by_member[name] for by_member in hits] for name in weighted.members}
        joined = weighted.join_hits(chosen, spec.k + judged.num_removed)
        run = {}
        for query_id, best in zip(judged.queries, joined, strict=True):
            scores = searcher.scores(best, spec.judged)
            run[query_id] = judged.remove_queries(query_id, scores, spec.k)
        values = per_query(run, judged.qrels, [measure], judged.moments)
        return [values[query_id][measure] for query_id in judged.queries]

    names = list(searcher.searchers)
    alone = {
        name: measure_weights({other: float(other == name) for other in names}) for name in names
    }
    best = max(names, key=lambda name: sum(alone[name]))
    others = [name for name in names if name != best]
    grid = (0.0, *(BM25_WEIGHTS if len(others) == 1 else FEW_WEIGHTS))

    def all_weights(weights: Sequence[float]) -> dict[str, float]:
        return {best: 1.0, **dict(zip(others, weights, strict=True))}

    @functools.cache
    def values_of(weights: tuple[float, ...]) -> np.ndarray:
        return np.array(measure_weights(all_weights(weights)))

    def fit(is_used_Q: np.ndarray) -> tuple[float, ...]:
        # One weight after another from equal weights: the product of all grids has 4,096 settings
        # of seven members.
        weights, former = (1.0,) * len(others), None
        while weights != former:
            former = weights
            for i in range(len(others)):
                compared = [(*weights[:i], weight, *weights[i + 1 :]) for weight in grid]
                weights = max(compared, key=lambda each: values_of(each)[is_used_Q].mean())
        values_CQ = np.array([alone_Q[is_used_Q], values_of(weights)[is_used_Q]])
        return (best_alone, weights)[choose(values_CQ)]

    best_alone = (0.0,) * len(others)
    alone_Q = values_of(best_alone)
    held_out_Q = held_out_values(len(alone_Q), lambda is_used_Q: values_of(fit(is_used_Q)))
    chosen = all_weights(fit(np.ones(len(alone_Q), bool)))
    fitted = load(Federation, spec.index, role="index").with_weights(chosen)
    return FusionFit(", ".join(names), fitted, alone_Q, held_out_Q, measure, best)


class _Evaluator:
    """Measures the members and the federation. Measurements are cached in the output folder.

    Attributes:
        report: Function that reports the progress of rerankers, if any.
    """

    def __init__(self, spec: EvaluateSpec, judged: JudgedQueries, searcher: FederatedSearcher):
        self._spec, self._searcher, self._cache = spec, searcher, Cache(spec.output)
        self._judged, self._query_ids = judged, list(judged.queries)
        self.report: Callable[[str], None] | None = None
        self._rows: dict[str, Row] = {}
        self._rankers: dict[str, Ranker] = {}
        encoded: dict[str, EncodedQueries] = {}
        for name, opened in searcher.searchers.items():
            member = searcher.spec.members[name]
            options = searcher.options(name, parse(SearchOptions, {"filter": spec.filter}))
            fields = {"filter": options.filter, "fusion": member.fusion}
            ranker = Ranker(spec.model_copy(update=fields), judged, opened, encoded)
            candidates = None
            if options.candidates != EXACT:
                number = options.candidates_per_query(len(opened.index))
                candidates = Candidates(options.candidates, number)
            self._rows[name] = Row(options.column, options.score, candidates=candidates)
            self._rankers[name] = ranker
        self._first = next(iter(self._rankers.values()))
        self.judgments = self._first.judgments

    def rerankers(self, row: RerankRow) -> list[Reranker[Any]]:
        """Returns the rerankers of a row. Each must support a member."""
        from pipeline.search.rerankers.members import check_rerankers

        indexes = {name: opened.index for name, opened in self._searcher.searchers.items()}
        return self._first.rerankers(
            row, lambda rerankers, queries: check_rerankers(rerankers, indexes, queries)
        )

    def _key(self, name: str) -> str:
        return self._rankers[name].key(self._rows[name])

    def hits(self) -> list[dict[str, list[Found]]]:
        """Returns the hits of each query by member."""
        judged = self._judged
        return map_by_pool(self._hits, range(len(self._query_ids)), self._query_ids, judged.pools)

    def _hits(self, numbers: Sequence[int], pool: Pool) -> list[dict[str, list[Found]]]:
        members = self._rank(numbers, pool).members
        return [
            {name: member.found[position] for name, member in members.items()}
            for position in range(len(numbers))
        ]

    def _rank(
        self, numbers: Sequence[int], pool: Pool, rerankers: Sequence[Reranker[Any]] = ()
    ) -> Rankings:
        """Ranks queries, which are given by their numbers, by all members together."""
        k = self._spec.k + self._judged.num_removed
        fields = {"k": k, "filter": self._spec.filter, **self._first.restriction(pool)}
        query_ids = [self._query_ids[number] for number in numbers]
        return self._searcher.rank_with(
            list(self._judged.inputs(query_ids)) if rerankers else [],
            parse(SearchOptions, fields),
            encode=lambda name, column: self._rankers[name].queries_with_texts(column, numbers),
            rerankers=rerankers,
        )

    def member(self, name: str) -> Measurements:
        """Measures a member by itself."""
        ranker, row = self._rankers[name], self._rows[name]
        return self._cache.get(self._key(name), Measurements, lambda: ranker.measure(row))

    def federation(self, rerankers: Sequence[Reranker[Any]] = ()) -> Measurements:
        """Measures all members together. The sizes and the cost are those of all members.

        Args:
            rerankers: Rerankers that are applied in turn to the joined hits.
        """
        members = [self.member(name) for name in self._rows]
        sizes = {
            name: sum(getattr(member, name) for member in members)
            for name in COSTS
            if name not in ("queries_per_second", "median_ms", "p95_ms")
        }
        fields: dict[str, Any] = {"federation": dump(self._searcher.spec)}
        if rerankers:
            fields["rerank"] = [r.rerank_key(rerankers) for r in self._rankers.values()]
            for opened in self._searcher.searchers.values():
                add_token_sizes(sizes, opened.index, rerankers, self._spec.filter)
        key = cache_key(**fields, members=list(map(self._key, self._rows)))

        def rank(numbers: Sequence[int], pool: Pool) -> list[dict[str, float]]:
            joined = self._rank(numbers, pool, rerankers).joined
            return [self._searcher.scores(hits, self._spec.judged) for hits in joined]

        self._first.report = self.report
        return self._cache.get(
            key, Measurements, lambda: self._first.measure_ranking(rank, rerankers, **sizes)
        )

"""Evaluation of a federation: a row for each member by itself, and one for all of them together."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence

from pipeline.config import SpecError, dump, load, parse
from pipeline.encoders import EncodedQueries
from pipeline.eval import JudgedQueries
from pipeline.eval.cache import Cache, Measurements, cache_key
from pipeline.eval.evaluation import versions
from pipeline.eval.level import judged_level
from pipeline.eval.metrics import write_run
from pipeline.eval.ranker import Pool, Ranker
from pipeline.eval.results import COSTS, FEDERATED, Evaluation, Result
from pipeline.eval.rows import Candidates, Row
from pipeline.eval.spec import EvaluateSpec, headline_measure, with_main_measure
from pipeline.registry import BENCHMARKS
from pipeline.runtime.atomic import check_writable
from pipeline.search.candidates import EXACT
from pipeline.search.federated import FederatedSearcher, Federation
from pipeline.search.options import SearchOptions

#: Name of the row of all members together.
FEDERATION = "federation"
#: Fields of the spec that apply to a federation.
FIELDS = {
    "index", "benchmark", "output", "query_vectors", "measures", "k", "judged", "filter",
    "comparisons", "labels", "plots", "bm25", "diagnostics",
}  # fmt: skip


def run(spec: EvaluateSpec, report: Callable[[str], None]) -> Evaluation:
    """Evaluates a federation and its members, and writes their runs.

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
    for name in sorted(spec.model_fields_set - FIELDS):
        if (value := getattr(spec, name)) != EvaluateSpec.model_fields[name].get_default(
            call_default_factory=True
        ):
            raise SpecError(name, value, "absent for a federation, whose members set it")
    federation = load(Federation, spec.index, role="index")
    searcher = FederatedSearcher(federation.model_copy(update={"require_all": True}))
    names = list(federation.members)
    if FEDERATION in names:
        raise SpecError("members", FEDERATION, f"mappings with other names than {FEDERATION}")
    comparisons = spec.comparisons or [[FEDERATION, name] for name in names]
    for pair in comparisons:
        for name in pair:
            if name not in (*names, FEDERATION):
                raise SpecError.unknown_name("comparisons", name, [*names, FEDERATION])
    judged = BENCHMARKS.build(spec.benchmark).load()
    spec = with_main_measure(spec, judged)
    level = judged_level(searcher.searchers[names[0]].index, judged, spec.judged, None)
    spec = spec.model_copy(update={"comparisons": comparisons, "judged": level})
    evaluator = _Evaluator(spec, judged, searcher)
    headline, notes = headline_measure(spec, judged), [f"{len(judged.queries)} judged queries"]
    report(notes[0])
    results: list[Result] = []
    for name in (*names, FEDERATION):
        entry = evaluator.member(name) if name != FEDERATION else evaluator.federation()
        fields = entry.model_dump(exclude={"rankings"})
        best = max(results, key=lambda result: result.means[headline]).name if results else ""
        first_stage = best if name == FEDERATION else ""
        result = Result(name, FEDERATED, None, FEDERATED, "", **fields, first_stage=first_stage)
        write_run(posixpath.join(spec.output, "runs", f"{name}.trec"), entry.rankings, name)
        report(f"{name}  {headline} {result.means[headline]:.4f}")
        results.append(result)
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


class _Evaluator:
    """Measures the members and the federation. Measurements are cached in the output folder."""

    def __init__(self, spec: EvaluateSpec, judged: JudgedQueries, searcher: FederatedSearcher):
        self._spec, self._searcher, self._cache = spec, searcher, Cache(spec.output)
        self._queries, self._num_removed = list(judged.queries.values()), judged.num_removed
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

    def _key(self, name: str) -> str:
        return self._rankers[name].key(self._rows[name])

    def member(self, name: str) -> Measurements:
        """Measures a member by itself."""
        ranker, row = self._rankers[name], self._rows[name]
        return self._cache.get(self._key(name), Measurements, lambda: ranker.measure(row))

    def federation(self) -> Measurements:
        """Measures all members together. The sizes and the cost are those of all members."""
        members = [self.member(name) for name in self._rows]
        sizes = {
            name: sum(getattr(member, name) for member in members)
            for name in COSTS
            if name not in ("queries_per_second", "median_ms", "p95_ms")
        }
        key = cache_key(
            federation=dump(self._searcher.spec), members=list(map(self._key, self._rows))
        )

        def rank(numbers: Sequence[int], pool: Pool) -> list[dict[str, float]]:
            k = self._spec.k + self._num_removed
            restriction = self._first.restriction(pool)
            fields = {"k": k, "filter": self._spec.filter, **restriction}
            rankings = self._searcher.rank_with(
                [self._queries[number] for number in numbers],
                parse(SearchOptions, fields),
                encode=lambda name, column: self._rankers[name].queries_with_texts(column, numbers),
            )
            return [self._searcher.scores(j, self._spec.judged) for j in rankings.joined]

        return self._cache.get(
            key, Measurements, lambda: self._first.measure_ranking(rank, **sizes)
        )

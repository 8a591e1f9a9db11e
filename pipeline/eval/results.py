"""Results of an evaluation, which consist of rows, comparisons of rows, and a results file."""

from __future__ import annotations

import functools
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from pipeline.config import absolute, digest, reading
from pipeline.eval.diagnostics import Diagnosis, Retention, mean_diagnosis
from pipeline.eval.examples import Example
from pipeline.eval.significance import (
    bootstrap_interval,
    holm,
    randomisation_p,
    ratio_intervals,
)
from pipeline.index.columns import codec_name
from pipeline.paths import open_file
from pipeline.registry import COMPRESSORS, short_name

BM25: Final = "bm25"
SINGLE_VECTOR: Final = "single_vector"
FULL: Final = "full"
CANDIDATES: Final = "candidates"
#: Method and score of a federation and of its members.
FEDERATED: Final = "federated"
#: Methods and scores of rows that are not representations by themselves.
COMPOUND: Final = (CANDIDATES, FEDERATED)
RESULTS = "results.json"

#: A difference whose corrected p value is below this is called significant.
ALPHA = 0.05
#: Minimum fraction of the uncompressed quality at which a row counts as retaining it.
QUALITY_THRESHOLD = 0.95
#: Name of the score retention among the metrics of a seed.
OSR = "OSR"
#: Default codec, which method names leave out.
DEFAULT_CODEC = {"name": "float16"}
#: Attributes of a row that are sizes per item, and all that are costs.
SIZES = ("vectors_per_item", "vector_bytes", "assignment_bytes", "position_bytes", "all_bytes")
COSTS = (*SIZES, "queries_per_second", "median_ms", "p95_ms", "maxsim_ops")
#: Settings of a compressor that method names leave out, because they are axes of tables and plots.
AXES = ("num_vectors", "ratio", "seed")


class Budget(NamedTuple):
    """Number or fraction of vectors per item. Adaptive methods have neither."""

    num_vectors: int | None
    ratio: float | None

    def __str__(self) -> str:
        """Returns the budget as formatted in reports.

        >>> str(Budget(32, None)), str(Budget(None, 0.125)), str(Budget(None, None))
        ('K=32', '12.5 %', 'adaptive')
        """
        if self.num_vectors is not None:
            return f"K={self.num_vectors}"
        return "adaptive" if self.ratio is None else f"{100 * self.ratio:g} %"


@dataclass(frozen=True)
class Result:
    """Row of the results table, which is a representation under one score, or BM25.

    Attributes:
        method: Compressor with its settings except the budget; or full, single_vector, bm25 or
            the names of rerankers.
        num_vectors: Budget K; None for uncompressed rows, BM25, and budgets that are a ratio.
        score: maxsim, single_vector, hybrid, fused, bm25, federated, or the names of
            rerankers.
        encoder: Fingerprint of the query encoder; empty for BM25.
        values: Metrics by name, by query id.
        vectors_per_item: Mean number of stored vectors per item, or 0 for BM25, as all sizes are.
        vector_bytes: Mean bytes per item of the vectors that the score reads.
        all_bytes: Mean bytes per item including assignments and token positions.
        assignment_bytes: Part of `all_bytes` that stores the assignments of input tokens to
            vectors.
        position_bytes: Part of `all_bytes` that stores the positions of input tokens.
        queries_per_second: Throughput of scoring and ranking encoded queries with the vectors in
            memory; for BM25, of ranking query texts.
        median_ms: Median latency of a single query, in milliseconds.
        p95_ms: 95th percentile of the latency of a single query, in milliseconds.
        maxsim_ops: Number of similarities between a query token and a stored vector that ranking
            all queries computes (SaMer, table 9), or 0 for rows other than exact MaxSim and hybrid
            rows.
        weights: Weights of the single-vector and the MaxSim score in the hybrid score, or None if
            equal.
        first_stage: Row with which a row is compared: the first stage of a reranker, the exact
            search of a candidate generator, the MaxSim score of a fused score, or the best member
            of a federation.
        rerank: Specs of the `rerankers` that were applied, the number of their `parameters`, and
            their cost: `queries`, `pairs` that were scored, items that were `unread`, `seconds` and
            HTTP `requests`. Empty for other rows.
        candidates: Settings and recall of a candidate generator: `generator`, `num_candidates`,
            `recall@10` and `recall@100`, the shares of the exact results that it finds (of at most
            `k` results).
        fit_sample: Sample that the compressor or codec was fitted on: `num_items`, `num_evaluated`
            (the number of them that are evaluated), and the `origin` of a separate sample. Empty if
            nothing was fitted.
        seeds: Mean metrics and score retention by representation, for a row that is the mean over
            seeds, or empty for methods without a seed.
    """

    representation: str
    method: str
    num_vectors: int | None
    score: str
    encoder: str
    values: dict[str, dict[str, float]]
    vectors_per_item: float
    vector_bytes: float
    all_bytes: float
    queries_per_second: float
    median_ms: float
    p95_ms: float
    compressor: dict[str, Any] = field(default_factory=dict)
    codec: dict[str, Any] = field(default_factory=DEFAULT_CODEC.copy)
    diagnosis: Diagnosis | None = None
    grounding: dict[str, float] = field(default_factory=dict)
    seeds: dict[str, dict[str, float]] = field(default_factory=dict)
    weights: list[float] | None = None
    first_stage: str = ""
    rerank: dict[str, Any] = field(default_factory=dict)
    assignment_bytes: float = 0.0
    position_bytes: float = 0.0
    fit_sample: dict[str, Any] = field(default_factory=dict)
    candidates: dict[str, Any] = field(default_factory=dict)
    fusion: dict[str, Any] = field(default_factory=dict)
    maxsim_ops: float = 0.0

    @property
    def label(self) -> str:
        """Name of the score. Unequal weights are part of the name, for example hybrid 1:0.25."""
        if self.weights is None:
            return self.score
        return f"{self.score} {':'.join(f'{weight:g}' for weight in self.weights)}"

    @property
    def name(self) -> str:
        """Name of the run and its file, such as full.maxsim or full.hybrid-1-0.25."""
        has_one_score = self.is_compound or self.score in (SINGLE_VECTOR, BM25)
        score = self.label.translate(str.maketrans(" :", "--"))
        return self.representation if has_one_score else f"{self.representation}.{score}"

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """Mean over the queries, by metric."""
        from pipeline.eval.metrics import means  # needs ir-measures, and servers do not

        return means(self.values)

    @property
    def is_compound(self) -> bool:
        """True for rows of several stages or indexes, which are not representations."""
        return self.method in COMPOUND or bool(self.rerank)

    @property
    def is_compressed(self) -> bool:
        """True for rows with a budget, False for the references that they are compared with."""
        return not self.is_compound and self.method not in (BM25, SINGLE_VECTOR, FULL)

    @property
    def budget(self) -> Budget:
        """Budget of the method, 100 % if only the codec differs from the uncompressed row."""
        if self.is_compressed and self.compressor.get("name") == "none":
            return Budget(None, 1.0)
        return Budget(self.num_vectors, self.compressor.get("ratio"))

    @property
    def is_random(self) -> bool:
        """True for the random pruning baseline."""
        return self.compressor.get("name") == "random"

    @functools.cached_property
    def retention(self) -> Retention | None:
        """Score retention (OSR), if it was diagnosed against an uncompressed representation."""
        return None if self.diagnosis is None else self.diagnosis.retention()

    def spread(self, name: str) -> float | None:
        """Returns the standard deviation of a metric or the OSR over seeds, or None for one."""
        values = [numbers[name] for numbers in self.seeds.values() if name in numbers]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None


def method_name(
    compressor: Mapping[str, Any], codec: Mapping[str, Any] = DEFAULT_CODEC, field: str = "content"
) -> str:
    """Returns the name of a method, which includes non-default settings, the codec and the field.

    The budget and the seed are omitted, because they are axes of tables and plots.

    >>> method_name({"name": "none"}), method_name({"name": "hpool", "num_vectors": 32})
    ('full', 'hpool')
    >>> method_name({"name": "hpool", "ratio": 0.1, "linkage": "rows"}, codec={"name": "int8"})
    'hpool linkage=rows int8'
    >>> method_name({"name": "none"}, codec={"name": "residual", "bits": 2, "num_centroids": 256})
    'full residual bits=2'
    >>> hpool = {"name": "hpool", "num_vectors": 8, "num_protected": 1}
    >>> method_name({"name": "adaptive", "num_vectors": 8, "method": hpool, "max_budget": 2.0})
    'adaptive (hpool) max_budget=2.0'
    """
    suffixes = [codec_name(codec)] * (codec != DEFAULT_CODEC)
    if compressor["name"] == "none":
        return " ".join([FULL, *suffixes])
    suffixes += [f"of {field}"] * (field != "content")
    defaults = COMPRESSORS.spec_class(compressor["name"]).model_fields
    changed = []
    for key, value in compressor.items():
        default = defaults[key].get_default(call_default_factory=True) if key in defaults else None
        default = list(default) if isinstance(default, tuple) else default  # as in JSON
        if isinstance(value, Mapping):  # a nested compressor
            changed.append(f"({method_name(value)})")
        elif key not in ("name", *AXES) and not (key in defaults and value == default):
            changed.append(f"{key}={value}")
    return " ".join([short_name(compressor["name"]), *changed, *suffixes])


def merge_seeds(results: Sequence[Result]) -> list[Result]:
    """Merges rows that differ only in their seed by averaging them query by query.

    The merged row has the name of the row with the lowest seed, and the mean of the costs. If two
    columns have the same seed, the second one remains a separate row.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        spec = result.compressor
        if "seed" not in spec:
            groups[f"alone {len(groups)}"] = [result]
            continue
        same = {key: value for key, value in spec.items() if key != "seed"}
        key = digest([same, result.method, result.score, result.encoder])
        copies = 0
        while any(r.compressor["seed"] == spec["seed"] for r in groups.get(f"{key} {copies}", ())):
            copies += 1
        groups.setdefault(f"{key} {copies}", []).append(result)
    return [
        _mean_of_seeds(group) if "seed" in group[0].compressor else group[0]
        for group in groups.values()
    ]


def _mean_of_seeds(group: Sequence[Result]) -> Result:
    group = sorted(group, key=lambda result: result.compressor["seed"])
    first = group[0]
    values = {
        query_id: {
            measure: float(np.mean([result.values[query_id][measure] for result in group]))
            for measure in measures
        }
        for query_id, measures in first.values.items()
    }
    diagnoses = [result.diagnosis for result in group if result.diagnosis]
    seeds = {
        result.representation: {
            **result.means,
            **({OSR: result.retention.mean} if result.retention else {}),
        }
        for result in group
    }
    grounded = [result.grounding for result in group if result.grounding]
    return replace(
        first,
        values=values,
        **mean_costs(group),
        diagnosis=mean_diagnosis(diagnoses) if diagnoses else None,
        grounding={
            name: float(np.mean([numbers[name] for numbers in grounded]))
            for name in (grounded[0] if grounded else ())
        },
        seeds=seeds,
    )


def mean_costs(rows: Sequence[Result]) -> dict[str, Any]:
    """Returns the mean costs of rows, as keyword arguments of `replace`."""
    return {name: float(np.mean([getattr(row, name) for row in rows])) for name in COSTS}


@dataclass(frozen=True)
class RowComparison:
    """Comparison of a row with other rows in the headline metric.

    Attributes:
        reference: Name of the row that it is compared with: the uncompressed row of the encoder
            under the same score, or else under MaxSim; without uncompressed rows the row with the
            most bytes; for a reranker its first stage.
        retention: Mean divided by that of the reference, or None if the reference is compressed or
            has a mean of 0.
        p_reference: Corrected p value of the difference from the reference, or None for the
            reference itself.
        p_bm25: Corrected p value of the difference from BM25, or None without BM25.
        p_random: Corrected p value of the difference from random pruning with the same budget,
            codec and score, or None without such a row.
        pareto: Whether no row has better quality with at most as many bytes of vectors. BM25 is not
            compared, because the size of its postings is not measured.
    """

    reference: str
    retention: float | None
    p_reference: float | None
    p_bm25: float | None
    p_random: float | None
    below_bm25: bool
    pareto: bool
    pareto_all: bool

    @property
    def differs_from_bm25(self) -> bool:
        """True if the difference from BM25 is significant."""
        return self.p_bm25 is not None and self.p_bm25 < ALPHA

    @property
    def loses_to_bm25(self) -> bool:
        """True if the row is significantly worse than BM25."""
        return self.below_bm25 and self.differs_from_bm25


@dataclass(frozen=True)
class PlannedComparison:
    """Comparison of two rows in the headline metric that was planned before the evaluation.

    Attributes:
        difference: Mean of `row` minus that of `other`.
        low: Lower bound of the 95 % confidence interval of the difference.
        high: Upper bound.
        p: p value of a paired randomisation test, corrected over the planned comparisons.
    """

    row: str
    other: str
    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation, including everything that its report shows.

    Attributes:
        headline: Main metric, used in the plot, the tests and the summary.
        judgments: Hash of the judged queries, equal for evaluations that can be compared.
        document_categories: Query ids by category of the relevant documents; empty if the spec does
            not ask for it.
        templates: Templates of queries (`query`) and items (`text`, `image`), by encoder. The
            instruction of the task is filled in.
        examples: Queries with the hits of two rows; not part of `to_json`.
    """

    spec: dict[str, Any]
    headline: str
    judgments: str
    num_items: int
    notes: list[str]
    created: str
    versions: dict[str, str]
    results: list[Result]
    document_categories: dict[str, list[str]] = field(default_factory=dict)
    query_categories: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    templates: dict[str, dict[str, str]] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)

    @property
    def benchmark(self) -> str:
        """Name of the benchmark in reports.

        >>> spec = {"benchmark": {"name": "beir", "path": "data/cranfield", "split": "test"}}
        >>> Evaluation(spec, "AP", "", 0, [], "", {}, []).benchmark
        'cranfield test'
        """
        values = self.spec["benchmark"].values()
        name, *others = [value for value in values if isinstance(value, str) and value]
        return " ".join(posixpath.basename(part.rstrip("/")) for part in others) or name

    @property
    def measures(self) -> list[str]:
        """Names of the metrics."""
        return list(self.results[0].means)

    @property
    def num_queries(self) -> int:
        """Number of judged queries."""
        return len(self.results[0].values)

    @functools.cached_property
    def row_comparisons(self) -> list[RowComparison]:
        """Comparison of each row with the others, in the order of the rows."""
        return row_comparisons(self.results, self.headline)

    @functools.cached_property
    def planned_comparisons(self) -> list[PlannedComparison]:
        """Comparisons of the spec, in its order."""
        pairs = self.spec.get("comparisons", ())
        return compare_rows([(self.row(a), self.row(b)) for a, b in pairs], self.headline)

    @functools.cached_property
    def better_than(self) -> dict[str, list[str]]:
        """Rows that each row is significantly better than in the headline metric, by name.

        Only planned comparisons count or, without any, those with the reference and with BM25.
        """
        compared = [(p.row, p.other, p.difference, p.p) for p in self.planned_comparisons]
        if not compared:
            for result, comparison in zip(self.results, self.row_comparisons, strict=True):
                others = (comparison.reference, comparison.p_reference), (BM25, comparison.p_bm25)
                for name, p in others:
                    if p is not None:
                        gain = self.quality(result) - self.quality(self.row(name))
                        compared.append((result.name, name, gain, p))
        found: dict[str, list[str]] = {result.name: [] for result in self.results}
        for row, other, gain, p in compared:
            better, worse = (row, other) if gain > 0 else (other, row)
            if p < ALPHA and worse not in found[better]:
                found[better].append(worse)
        return found

    @functools.cached_property
    def intervals(self) -> dict[str, np.ndarray]:
        """95 % confidence intervals (R, 2) of the means of the rows, by metric, except for MdR."""
        from pipeline.eval.metrics import MDR  # needs ir-measures, and servers do not

        ones_Q = np.ones(self.num_queries)
        values = {
            measure: [[v[measure] for v in result.values.values()] for result in self.results]
            for measure in self.measures
            if measure != MDR
        }
        return {name: ratio_intervals(np.array(v_RQ), ones_Q) for name, v_RQ in values.items()}

    def comparison(self, result: Result) -> RowComparison:
        """Returns the comparison of a row with the others."""
        return self.row_comparisons[self.results.index(result)]

    def row(self, name: str) -> Result:
        """Returns the row with a name."""
        return next(result for result in self.results if result.name == name)

    def value(self, name: str, query_id: str) -> float:
        """Returns the headline metric of a query in the row called `name`."""
        return self.row(name).values[query_id][self.headline]

    def quality(self, result: Result) -> float:
        """Returns the mean headline metric of a row."""
        return result.means[self.headline]

    def best(self, results: Sequence[Result]) -> Result | None:
        """Returns the row with the highest quality, the smaller one of equals, or None."""
        return max(results, key=lambda r: (self.quality(r), -r.vector_bytes), default=None)

    def cheapest(self, results: Sequence[Result]) -> Result | None:
        """Returns the row with the fewest bytes that retains the uncompressed quality."""
        full = self.best([result for result in self.results if result.method == FULL])
        if full is None:
            return None
        threshold = QUALITY_THRESHOLD * self.quality(full)
        candidates = [r for r in results if r.method != BM25 and self.quality(r) >= threshold]
        return min(candidates, key=lambda result: result.vector_bytes, default=None)

    def to_json(self) -> str:
        """Returns the JSON that `read_results` reads."""
        data = asdict(replace(self, examples=[]))
        del data["examples"]
        data["comparisons"] = [asdict(planned) for planned in self.planned_comparisons]
        return json.dumps(data, ensure_ascii=False)


def read_results(output: str, field: str) -> Evaluation:
    """Reads the evaluation in an output folder of `jobs.evaluate`."""
    rule = "the output folder of jobs.evaluate"
    errors = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
    with reading(field, output, rule, *errors, problem=f"contains a corrupted {RESULTS}"):
        with open_file(posixpath.join(absolute(output), RESULTS), "r") as file:
            data = json.load(file)
        results = [_result(row) for row in data.pop("results")]
        data.pop("comparisons", None)  # follow from the other fields
        return Evaluation(**data, results=results)


def _result(row: dict[str, Any]) -> Result:
    diagnosis = row.pop("diagnosis")
    return Result(**row, diagnosis=diagnosis and Diagnosis(**diagnosis))


def sort_results(results: Sequence[Result]) -> list[Result]:
    """Sorts rows.

    BM25 is followed by single vectors, uncompressed representations, methods by descending budget,
    candidate generators and rerankers.
    """
    order = {BM25: 0, SINGLE_VECTOR: 1, FULL: 2, CANDIDATES: 4}
    return sorted(
        results,
        key=lambda r: (
            5 if r.rerank else order.get(r.method, 3),
            r.method,
            -(r.num_vectors or float("inf")),
            -(r.budget.ratio or float("inf")),
            r.representation,
            r.score != "maxsim",
        ),
    )


def row_comparisons(results: Sequence[Result], measure: str) -> list[RowComparison]:
    """Compares each row with the others. Each family of tests has its own correction."""
    references = [_reference(result, results) for result in results]
    bm25s = [next((r for r in results if r.method == BM25), None)] * len(results)
    randoms = [_random(result, results) for result in results]
    p_references, p_bm25s, p_randoms = (
        _p_values(results, others, measure) for others in (references, bm25s, randoms)
    )
    front = pareto_front(results, measure)
    front_all = pareto_front(results, measure, "all_bytes")
    rows = []
    for i, (result, reference, bm25) in enumerate(zip(results, references, bm25s, strict=True)):
        quality = result.means[measure]
        full = reference.means[measure] if reference.method == FULL else 0.0
        rows.append(
            RowComparison(
                reference=reference.name,
                retention=quality / full if full else None,
                p_reference=p_references.get(i),
                p_bm25=p_bm25s.get(i),
                p_random=p_randoms.get(i),
                below_bm25=bm25 is not None and quality < bm25.means[measure],
                pareto=any(result is other for other in front),
                pareto_all=any(result is other for other in front_all),
            )
        )
    return rows


def pareto_front(
    results: Sequence[Result], measure: str, size: str = "vector_bytes"
) -> list[Result]:
    """Returns the Pareto front of quality and bytes, smallest first.

    BM25 is ignored, because it has no vectors. `size` is `vector_bytes` or `all_bytes`.
    """
    front: list[Result] = []
    vectors = (result for result in results if result.method != BM25)
    for result in sorted(vectors, key=lambda r: (getattr(r, size), -r.means[measure])):
        if not front or result.means[measure] > front[-1].means[measure]:
            front.append(result)
    return front


def _reference(result: Result, results: Sequence[Result]) -> Result:
    if result.first_stage:
        return next((r for r in results if r.name == result.first_stage), result)
    peers = [r for r in results if r.method != BM25 and not r.is_compound]
    peers = [r for r in peers if result.encoder in ("", r.encoder)] or [result]
    wanted = [
        [r for r in peers if r.method == FULL and r.score == result.score],
        [r for r in peers if r.method == FULL and r.score == "maxsim"],
        [r for r in peers if r.method == FULL],
        [r for r in peers if r.score == result.score],
        peers,
    ]
    return max(next(filter(None, wanted)), key=lambda r: r.vector_bytes)


def _random(result: Result, results: Sequence[Result]) -> Result | None:
    """Returns the random pruning row with the budget, codec and score of a row, if there is one."""
    candidates = [
        r
        for r in results
        if r.is_random
        and result.is_compressed
        and any(result.budget)
        and (r.budget, r.codec, r.score, r.encoder)
        == (result.budget, result.codec, result.score, result.encoder)
    ]
    return min(candidates, key=lambda r: (len(r.method), r.representation), default=None)


def _p_values(
    results: Sequence[Result], others: Sequence[Result | None], measure: str
) -> dict[int, float]:
    """Corrects the p values of all rows that are compared. Returns them by row number."""
    pairs = {
        i: query_differences(result, other, measure)
        for i, (result, other) in enumerate(zip(results, others, strict=True))
        if other is not None and other is not result
    }
    if not pairs:
        return {}
    p_values = randomisation_p(np.stack(list(pairs.values())))
    return dict(zip(pairs, holm(p_values.tolist()), strict=True))


def compare_rows(pairs: Sequence[tuple[Result, Result]], measure: str) -> list[PlannedComparison]:
    """Compares pairs of rows. Their p values are corrected over the pairs."""
    if not pairs:
        return []
    differences_CQ = np.stack([query_differences(*pair, measure) for pair in pairs])
    p_values = holm(randomisation_p(differences_CQ).tolist())
    return [
        PlannedComparison(a.name, b.name, float(d_Q.mean()), *bootstrap_interval(d_Q), p)
        for (a, b), d_Q, p in zip(pairs, differences_CQ, p_values, strict=True)
    ]


def query_differences(result: Result, other: Result, measure: str) -> np.ndarray:
    """Returns the difference of one row from another for each query, (Q,)."""
    return np.array(
        [row[measure] - other.values[query_id][measure] for query_id, row in result.values.items()]
    )

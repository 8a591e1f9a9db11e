"""What an evaluation found: its rows, how they stand to each other, and the file of them."""

from __future__ import annotations

import functools
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

import fsspec
import numpy as np

from pipeline.config import SpecError, absolute, digest
from pipeline.eval.diagnostics import Diagnosis, Retention, mean_diagnosis
from pipeline.eval.examples import Example
from pipeline.eval.metrics import means
from pipeline.eval.significance import holm, randomisation_p
from pipeline.index.columns import codec_name
from pipeline.registry import COMPRESSORS

BM25: Final = "bm25"
SINGLE: Final = "single"
FULL: Final = "full"
EDJE: Final = "edje"
RESULTS = "results.json"

#: A difference whose corrected p value is below this is called significant.
ALPHA = 0.05
#: The share of the full tokens' quality that counts as keeping it.
KEPT = 0.95
#: What a seed's numbers call its score retention, beside the measures.
OSR = "OSR"
#: How vectors are stored where nothing else is said; names leave it out.
DEFAULT_CODEC = {"name": "float16"}
#: Attributes of a row that are costs.
SIZES = ("vectors_per_item", "vector_bytes", "assignment_bytes", "position_bytes", "all_bytes")
COSTS = (*SIZES, "queries_per_second", "median_ms", "p95_ms")
#: Settings of a compressor that its method's name leaves out: axes of tables and plots, each.
AXES = ("num_vectors", "ratio", "seed")


class Budget(NamedTuple):
    """Number or share of vectors that a method stores per item; neither if it adapts itself."""

    num_vectors: int | None
    ratio: float | None

    def __str__(self) -> str:
        """Returns the budget as the reports show it.

        >>> str(Budget(32, None)), str(Budget(None, 0.125)), str(Budget(None, None))
        ('K=32', '12.5 %', 'adaptive')
        """
        if self.num_vectors is not None:
            return f"K={self.num_vectors}"
        return "adaptive" if self.ratio is None else f"{100 * self.ratio:g} %"


@dataclass(frozen=True)
class Result:
    """One row of the table: a representation under one score, or BM25.

    Attributes:
        representation: the searched column.
        method: the compressor with its settings other than the budget; or full, single, bm25, edje.
        num_vectors: the budget K; None for the full tokens, BM25, and budgets that are a ratio.
        score: late, single, hybrid, bm25, edje.
        encoder: the fingerprint of the query encoder; empty for BM25.
        values: each measure for each query.
        vectors_per_item: stored vectors, mean over the items; 0 for BM25, as all bytes are.
        vector_bytes: bytes of the vectors that the score reads, mean over the items.
        all_bytes: the same with assignments and token positions.
        assignment_bytes: of `all_bytes`, those of which input token each vector stands for.
        position_bytes: of `all_bytes`, those of where each input token stands.
        queries_per_second: scoring and ranking of encoded queries with the vectors in memory; of
            the texts for BM25.
        median_ms: milliseconds that such a query takes when it comes alone, in the median.
        p95_ms: and at the 95th percentile.
        compressor: its resolved spec; empty for BM25 and single vectors.
        codec: the resolved spec of how its vectors are stored.
        diagnosis: what the diagnostics say; None for other than late rows, and without them.
        grounding: the grounding measures by name; empty where they were not asked for.
        weights: of the single and the late score in a hybrid one; None where they are equal.
        first_stage: Of a reranker, the row of its first stage, which it is compared with.
        rerank: Of a reranker, its `model`, `pool` (the rerank depth), `precision` and
            `add_first_stage`.
        fitted: what the compressor or codec was fitted on: `num_items`, how many of these are
            `evaluated`, and the `origin` of a separate sample; the numbers are None where an older
            version did not record them. Empty if nothing was fitted.
        seeds: of a row that is the mean over seeds, by representation, the means of the measures
            and the score retention; empty for methods without a seed.
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
    fitted: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The score, with its weights where they are not equal: hybrid 1:0.25."""
        if self.weights is None:
            return self.score
        return f"{self.score} {':'.join(f'{weight:g}' for weight in self.weights)}"

    @property
    def name(self) -> str:
        """What the run is called, and its file: full.late, full.hybrid-1-0.25."""
        alone = self.score in (SINGLE, BM25, EDJE)
        score = self.label.translate(str.maketrans(" :", "--"))
        return self.representation if alone else f"{self.representation}.{score}"

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """The mean over the queries, by measure."""
        return means(self.values)

    @property
    def is_compressed(self) -> bool:
        """Whether the row has a budget, and is no reference for those that have."""
        return self.method not in (BM25, SINGLE, FULL, EDJE)

    @property
    def budget(self) -> Budget:
        """What the method may keep; all of it where only the codec is another than full tokens'."""
        if self.is_compressed and self.compressor.get("name") == "none":
            return Budget(None, 1.0)
        return Budget(self.num_vectors, self.compressor.get("ratio"))

    @property
    def is_random(self) -> bool:
        """Whether it is the baseline that keeps vectors by chance."""
        return self.compressor.get("name") == "random"

    @functools.cached_property
    def retention(self) -> Retention | None:
        """The score retention (OSR), if it was diagnosed and there are full tokens."""
        return None if self.diagnosis is None else self.diagnosis.retention()

    def spread(self, name: str) -> float | None:
        """The standard deviation over seeds of a measure or of the OSR; None of fewer than two."""
        values = [numbers[name] for numbers in self.seeds.values() if name in numbers]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None


def method_name(
    compressor: Mapping[str, Any], codec: Mapping[str, Any] = DEFAULT_CODEC, of: str = "content"
) -> str:
    """A compressor's name, with all that tells it from others: settings, codec, what it is of.

    Settings that are the defaults are left out, and those that are axes: the budget and the seed.

    >>> method_name({"name": "none"}), method_name({"name": "hpool", "num_vectors": 32})
    ('full', 'hpool')
    >>> method_name({"name": "hpool", "ratio": 0.1, "linkage": "rows"}, codec={"name": "int8"})
    'hpool linkage=rows int8'
    >>> method_name({"name": "none"}, codec={"name": "residual", "bits": 2, "num_centroids": 256})
    'full residual bits=2'
    >>> hpool = {"name": "hpool", "num_vectors": 8, "num_protected": 1}
    >>> method_name({"name": "adaptive", "num_vectors": 8, "method": hpool, "criterion": "entropy"})
    'adaptive (hpool) criterion=entropy'
    """
    apart = [codec_name(codec)] * (codec != DEFAULT_CODEC)
    if compressor["name"] == "none":
        return " ".join([FULL, *apart])
    apart += [f"of {of}"] * (of != "content")
    defaults = COMPRESSORS.load(compressor["name"]).Spec.model_fields
    changed = []
    for key, value in compressor.items():
        default = defaults[key].get_default(call_default_factory=True) if key in defaults else None
        default = list(default) if isinstance(default, tuple) else default  # as JSON has it
        if isinstance(value, Mapping):  # another compressor, by its name
            changed.append(f"({method_name(value)})")
        elif key not in ("name", *AXES) and not (key in defaults and value == default):
            changed.append(f"{key}={value}")
    return " ".join([compressor["name"], *changed, *apart])


def merge_seeds(results: Sequence[Result]) -> list[Result]:
    """One row for all that differ in their seed alone: the mean over seeds, query by query.

    It is called as the one with the lowest seed. Its costs are means too. A second column of the
    same seed is a row of its own.
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
            for measure in of_query
        }
        for query_id, of_query in first.values.items()
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
    """Returns the mean costs of rows, as arguments of `replace`."""
    return {name: float(np.mean([getattr(row, name) for row in rows])) for name in COSTS}


@dataclass(frozen=True)
class Standing:
    """How a row stands to the others, by the headline measure.

    Attributes:
        reference: the row it is held against: the full tokens of its encoder under its score, else
            under the late score; without full tokens the row with the most bytes; a reranker
            against its first stage.
        retention: its mean as a share of the full tokens'; None if they are no reference, or 0.
        p_reference: of the difference to the reference, corrected; None for the reference itself.
        p_bm25: of the difference to BM25, corrected; None without BM25.
        p_random: of the difference to the mean over the seeds of random at the same budget, by the
            same codec and under the same score, corrected; None where there is none.
        below_bm25: whether its mean is lower than BM25's.
        pareto: whether no row has better quality for at most its bytes of vectors; BM25, whose
            postings are not counted, takes no part.
        pareto_all: the same by all stored bytes.
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
        """Whether the difference to BM25 is significant."""
        return self.p_bm25 is not None and self.p_bm25 < ALPHA

    @property
    def loses_to_bm25(self) -> bool:
        """Whether it is significantly worse than BM25."""
        return self.below_bm25 and self.differs_from_bm25


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: everything that its report shows.

    Attributes:
        spec: the resolved `EvaluateSpec`.
        headline: the measure that the plot, the tests and the summary speak of.
        judgments: hash of the judged queries: equal for evaluations that can be compared.
        num_items: items of the index.
        notes: what of the benchmark does not take part.
        made: when, in UTC.
        versions: of this software, what it stands on, and the platform.
        results: the rows, in the order of the table.
        kinds: the queries by kind of their relevant documents, if the spec asks for kinds.
        categories: by field of the benchmark's queries, the queries of each category.
        examples: Queries with the hits of two rows. They are not part of `to_json`.
    """

    spec: dict[str, Any]
    headline: str
    judgments: str
    num_items: int
    notes: list[str]
    made: str
    versions: dict[str, str]
    results: list[Result]
    kinds: dict[str, list[str]] = field(default_factory=dict)
    categories: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)

    @property
    def benchmark(self) -> str:
        """What the benchmark is called in reports.

        >>> spec = {"benchmark": {"name": "beir", "path": "data/cranfield", "split": "test"}}
        >>> Evaluation(spec, "AP", "", 0, [], "", {}, []).benchmark
        'cranfield test'
        """
        name, *others = map(str, self.spec["benchmark"].values())
        return " ".join(posixpath.basename(part.rstrip("/")) for part in others) or name

    @property
    def measures(self) -> list[str]:
        """The names of the measures."""
        return list(self.results[0].means)

    @property
    def num_queries(self) -> int:
        """How many queries were judged."""
        return len(self.results[0].values)

    @functools.cached_property
    def standings(self) -> list[Standing]:
        """How each row stands to the others, in the order of the rows."""
        return standings(self.results, self.headline)

    def standing(self, result: Result) -> Standing:
        """How a row stands to the others."""
        return self.standings[self.results.index(result)]

    def of(self, name: str) -> Result:
        """The row of that name."""
        return next(result for result in self.results if result.name == name)

    def value(self, name: str, query_id: str) -> float:
        """The headline measure of one query in the row of that name."""
        return self.of(name).values[query_id][self.headline]

    def quality(self, result: Result) -> float:
        """A row's mean of the headline measure."""
        return result.means[self.headline]

    def best(self, results: Sequence[Result]) -> Result | None:
        """The row of the highest quality; the cheaper of equal ones; None of none."""
        return max(results, key=lambda r: (self.quality(r), -r.vector_bytes), default=None)

    def frugal(self, results: Sequence[Result]) -> Result | None:
        """The row with the fewest bytes that keeps the quality of the full tokens."""
        full = self.best([result for result in self.results if result.method == FULL])
        if full is None:
            return None
        enough = KEPT * self.quality(full)
        kept = [r for r in results if r.method != BM25 and self.quality(r) >= enough]
        return min(kept, key=lambda result: result.vector_bytes, default=None)

    def to_json(self) -> str:
        """Returns the JSON that `read_results` reads."""
        data = asdict(replace(self, examples=[]))
        del data["examples"]
        return json.dumps(data, ensure_ascii=False)


def read_results(output: str, field: str) -> Evaluation:
    """The evaluation that a job wrote into the folder `output`.

    Raises:
        SpecError: for `field`: there is none, or it is damaged.
    """
    rule = "the output folder of jobs.evaluate"
    try:
        with fsspec.open(posixpath.join(absolute(output), RESULTS), "r", encoding="utf-8") as file:
            data = json.load(file)
        results = [_result(row) for row in data.pop("results")]
        return Evaluation(**data, results=results)
    except FileNotFoundError:
        raise SpecError(field, output, rule, f"contains no {RESULTS}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise SpecError(field, output, rule, f"contains a corrupted {RESULTS}") from None


def _result(row: dict[str, Any]) -> Result:
    diagnosis = row.pop("diagnosis", None)
    return Result(**row, diagnosis=diagnosis and Diagnosis(**diagnosis))


def in_order(results: Sequence[Result]) -> list[Result]:
    """BM25, single vectors and full tokens, then the methods, each from its largest budget down.

    Rerankers come last.
    """
    kinds = {BM25: 0, SINGLE: 1, FULL: 2, EDJE: 4}
    return sorted(
        results,
        key=lambda r: (
            kinds.get(r.method, 3),
            r.method,
            -(r.num_vectors or float("inf")),
            -(r.budget.ratio or float("inf")),
            r.representation,
            r.score != "late",
        ),
    )


def standings(results: Sequence[Result], measure: str) -> list[Standing]:
    """How each row stands to the others; each family of tests is corrected over the rows."""
    references = [_reference(result, results) for result in results]
    bm25s = [next((r for r in results if r.method == BM25), None)] * len(results)
    randoms = [_random(result, results) for result in results]
    of_reference, of_bm25, of_random = (
        _p_values(results, others, measure) for others in (references, bm25s, randoms)
    )
    front = pareto_front(results, measure)
    front_all = pareto_front(results, measure, "all_bytes")
    rows = []
    for i, (result, reference, bm25) in enumerate(zip(results, references, bm25s, strict=True)):
        quality = result.means[measure]
        full = reference.means[measure] if reference.method == FULL else 0.0
        rows.append(
            Standing(
                reference=reference.name,
                retention=quality / full if full else None,
                p_reference=of_reference.get(i),
                p_bm25=of_bm25.get(i),
                p_random=of_random.get(i),
                below_bm25=bm25 is not None and quality < bm25.means[measure],
                pareto=any(result is other for other in front),
                pareto_all=any(result is other for other in front_all),
            )
        )
    return rows


def pareto_front(
    results: Sequence[Result], measure: str, size: str = "vector_bytes"
) -> list[Result]:
    """Returns the rows that no other row beats in quality at no more bytes, the smallest first.

    Args:
        results: Rows to choose from; BM25 has no vectors and is ignored.
        measure: Metric of quality.
        size: Attribute of rows with the bytes per item, `vector_bytes` or `all_bytes`.
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
    peers = [r for r in results if r.method not in (BM25, EDJE)]
    peers = [r for r in peers if result.encoder in ("", r.encoder)] or [result]
    wanted = [
        [r for r in peers if r.method == FULL and r.score == result.score],
        [r for r in peers if r.method == FULL and r.score == "late"],
        [r for r in peers if r.method == FULL],
        [r for r in peers if r.score == result.score],
        peers,
    ]
    return max(next(filter(None, wanted)), key=lambda r: r.vector_bytes)


def _random(result: Result, results: Sequence[Result]) -> Result | None:
    """Random at a row's budget, stored alike; the plain one, if there are several."""
    same = [
        r
        for r in results
        if r.is_random
        and result.is_compressed
        and any(result.budget)
        and (r.budget, r.codec, r.score, r.encoder)
        == (result.budget, result.codec, result.score, result.encoder)
    ]
    return min(same, key=lambda r: (len(r.method), r.representation), default=None)


def _p_values(
    results: Sequence[Result], others: Sequence[Result | None], measure: str
) -> dict[int, float]:
    """Corrected p values by row, of those that differ from what they are held against."""
    pairs = {
        i: differences(result, other, measure)
        for i, (result, other) in enumerate(zip(results, others, strict=True))
        if other is not None and other is not result
    }
    if not pairs:
        return {}
    p_values = randomisation_p(np.stack(list(pairs.values())))
    return dict(zip(pairs, holm(p_values.tolist()), strict=True))


def differences(result: Result, other: Result, measure: str) -> np.ndarray:
    """(Q,) what a row has more than another, query by query."""
    return np.array(
        [row[measure] - other.values[query_id][measure] for query_id, row in result.values.items()]
    )

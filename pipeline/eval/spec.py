"""Spec of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from pipeline.config import ComponentSpec, Spec, SpecError
from pipeline.eval import JudgedQueries
from pipeline.eval.grounding import GeneratedPhrases
from pipeline.eval.metrics import DEFAULT_MEASURES, MDR, parse_measure
from pipeline.registry import BenchmarkSpec, RerankerSpecs, short_name
from pipeline.search.fusion import DEFAULT_FUSION, FUSED, FusionSpec
from pipeline.search.options import EQUAL_WEIGHTS, Weights
from pipeline.search.scores import Score


class RerankRow(Spec):
    """Reranker that adds a row to the table, or several that are applied one after another.

    A mapping without `rerankers` has the fields of a single reranker, besides those below.
    """

    rerankers: RerankerSpecs = Field(min_length=1)
    """Rerankers in the order of their application."""
    representation: str | None = None
    """Representation of the first stage, or null for `full` if it is evaluated, else the first one.
    """
    score: Score | None = None
    """Score of the first stage; null for `single_vector` if the representation has single vectors,
    else `maxsim`."""
    label: str = Field("", pattern=r"^[\w.-]*$")
    """Name of the row, or empty for a generated one such as edje_10, edje_10_int8 or
    edje_50-cross_encoder_20."""

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"rerankers": value}
        if isinstance(value, Mapping) and "rerankers" not in value:
            names = cls.model_fields.keys() & value.keys()
            reranker = {name: item for name, item in value.items() if name not in names}
            return {"rerankers": reranker, **{name: value[name] for name in names}}
        return value

    @property
    def row(self) -> str:
        """Name of the row."""
        return self.label or "-".join(map(_title, self.rerankers))

    @property
    def method(self) -> str:
        """Names of the rerankers."""
        return "-".join(short_name(spec.name) for spec in self.rerankers)

    @property
    def top(self) -> int:
        """Number of items of the first stage that are reranked."""
        tops: list[int] = [vars(spec)["top"] for spec in self.rerankers]
        return max(tops)


def _title(spec: ComponentSpec) -> str:
    fields = vars(spec)
    parts = [short_name(spec.name), str(fields["top"])]
    parts += ["added"] if fields["add_first_stage"] else []
    parts += [fields["precision"]] if fields.get("precision") else []
    return fields["label"] or "_".join(parts)


class CandidatesSpec(Spec):
    """Candidate generator. Each number of candidates adds a row to the table."""

    generator: str
    """Name of the generator that `maxray add candidates` built, `single` for the single vectors, or
    several joined by `+`."""
    representation: str | None = None
    """Representation that is searched, or null for `full` if it is evaluated, else the first
    one."""
    num_candidates: list[PositiveInt] = Field(
        default_factory=lambda: [100, 400, 1600], min_length=1
    )
    """Numbers of candidates of each generator. They are at least `k` of the evaluation."""


class EvaluateSpec(Spec):
    """Spec of `jobs.evaluate`."""

    index: str
    """URI of the index."""
    benchmark: BenchmarkSpec
    """Benchmark with the judged queries."""
    output: str
    """Output folder."""
    query_vectors: str = ""
    """Parquet file with the columns `id` and `vectors`, for an index of your own vectors; empty to
    encode the query texts."""
    representations: list[str] = Field(default_factory=list)
    """Representations to evaluate, or empty for all that are stored. `NAME@K` evaluates the first K
    vectors of each item of a representation with nested vectors."""
    scores: list[Score] = Field(default_factory=list)
    """Scores to evaluate: maxsim, hybrid, single_vector, fused; empty for all that the index has
    vectors for, without fused."""
    weights: Weights = EQUAL_WEIGHTS
    """Weights of the single-vector and the MaxSim score in the hybrid score, such as [1, 0.25]."""
    fusion: FusionSpec = DEFAULT_FUSION
    """Settings of the fused score with its weights: a mapping, or the path of a file that
    `jobs.evaluate --fit-fusion` wrote. The row is compared with the MaxSim row of the same
    representation."""
    measures: list[str] = Field(default_factory=lambda: list(DEFAULT_MEASURES))
    """Metrics, by their ir-measures names, such as `R@10` or `nDCG(dcg='exp-log2')@5`, and `MdR`,
    the median rank of the first relevant document. A document that is not among the `k` hits has
    the rank after the last hit."""
    k: PositiveInt = 100
    """Number of hits per query. No metric can have a larger cutoff."""
    judged: Literal["auto", "parent", "item"] = "auto"
    """Level of the judged ids: `item`, `parent` (ranked by its best item), or `auto` to detect it
    from the index."""
    bm25: bool = True
    """Whether to add a row for BM25 over the texts of the items."""
    text: Literal["text", "caption"] = "text"
    """Column that BM25 searches."""
    filter: str | None = None
    """SQL condition on the item columns, such as "source = 'letters'". Only the items that satisfy
    it are searched and judged."""
    diagnostics: bool = True
    """Whether to diagnose MaxSim rows: score retention, use of the vectors, evenness and
    similarity. This takes about as long as ranking."""
    grounding: GeneratedPhrases | str | None = None
    """Phrases with boxes to measure the grounding of MaxSim rows: a JSONL file, `benchmark` for the
    boxes of the benchmark, or a mapping to generate phrases from the texts of the items; null for
    none."""
    document_categories: str | None = None
    """Item column such as modality, or metadata.KEY: adds a table by category of the relevant
    documents, or null for none."""
    candidates: list[CandidatesSpec] = Field(default_factory=list)
    """Candidate generators, whose recall of the exact results is measured. Each number of
    candidates adds a row."""
    rerank: list[RerankRow] = Field(default_factory=list)
    """Rerankers. Each entry adds a row; an entry that is a list applies several in a row."""
    comparisons: list[list[str]] = Field(default_factory=list)
    """Planned comparisons: pairs of rows such as [hpool_32.maxsim, bm25]. Their p values are
    corrected among themselves only, unlike those of the table of all rows."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of methods in the plots and in the LaTeX table, such as {kcenter int8: k-centre}."""
    plots: Literal["png", "svg", "pdf"] = "png"
    """Format of the plots."""
    search_page: str | None = None
    """URL of a search page that serves the index, such as http://localhost:8000/?index=cranfield.
    The report links its example queries to the side-by-side view."""

    @field_validator("search_page")
    @classmethod
    def _check_search_page(cls, url: str | None) -> str | None:
        if url and urlsplit(url).scheme not in ("http", "https", ""):
            raise SpecError("", url, "a URL that begins with http:// or https://")
        return url

    @field_validator("rerank")
    @classmethod
    def _check_labels(cls, rerank: list[RerankRow]) -> list[RerankRow]:
        names = [reranker.row for reranker in rerank]
        for name in names:
            if names.count(name) > 1:
                raise SpecError("", name, "unique (set a different `label`)", "occurs twice")
        return rerank

    @field_validator("comparisons")
    @classmethod
    def _check_comparisons(cls, comparisons: list[list[str]]) -> list[list[str]]:
        pairs = [frozenset(pair) for pair in comparisons]
        for pair, names in zip(comparisons, pairs, strict=True):
            if len(pair) != 2 or len(names) != 2:
                raise SpecError("", pair, "a pair of two different rows")
            if pairs.count(names) > 1:
                raise SpecError("", pair, "a unique pair", "occurs twice")
        return comparisons

    @field_validator("measures")
    @classmethod
    def _check_measures(cls, names: list[str]) -> list[str]:
        if not names:
            raise SpecError("", names, "a list of at least one ir-measures name")
        if set(names) == {MDR}:
            rule = f"a list with another metric than {MDR}, by which rows are compared"
            raise SpecError("", names, rule)
        return names

    @model_validator(mode="after")
    def _check_weights_used(self) -> EvaluateSpec:
        is_used = not self.scores or "hybrid" in self.scores
        rule = f"{list(EQUAL_WEIGHTS)} unless hybrid is among the scores"
        self.require(is_used or self.weights == EQUAL_WEIGHTS, "weights", rule)
        return self

    @model_validator(mode="after")
    def _check_fusion_used(self) -> EvaluateSpec:
        is_used = self.fusion == DEFAULT_FUSION or FUSED in self.scores
        self.require(is_used, "scores", f"a list with {FUSED} if fusion is set")
        if FUSED in self.scores:
            _ = self.fusion.component_weights  # must be set
        return self

    @model_validator(mode="after")
    def _check_k(self) -> EvaluateSpec:
        for name in self.measures:  # raises for an unknown metric
            depth = parse_measure(name).params.get("cutoff", 0)
            self.require(depth <= self.k, "k", f"at least {depth} for {name}")
        for number, candidates in enumerate(self.candidates):
            if (smallest := min(candidates.num_candidates)) < self.k:
                field = f"candidates[{number}].num_candidates"
                raise SpecError(field, smallest, f"at least k = {self.k}")
        return self


def with_main_measure(spec: EvaluateSpec, judged: JudgedQueries) -> EvaluateSpec:
    """Adds the main metric of the benchmark to the metrics of a spec."""
    if judged.measure is None:
        return spec
    cutoff = parse_measure(judged.measure).params.get("cutoff", 0)
    if cutoff > spec.k:
        raise SpecError("k", spec.k, f"at least {cutoff} for {judged.measure}, the main metric")
    measures = list(dict.fromkeys([judged.measure, *spec.measures]))
    return spec.model_copy(update={"measures": measures})


def headline_measure(spec: EvaluateSpec, judged: JudgedQueries) -> str:
    """Returns the main metric of the benchmark, or else of the spec."""
    if judged.measure is not None:
        return judged.measure
    first = next(name for name in spec.measures if name != MDR)
    return "nDCG@10" if "nDCG@10" in spec.measures else first

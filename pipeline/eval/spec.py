"""The spec of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from pipeline.config import Spec, SpecError, Uri
from pipeline.eval.grounding import Generated
from pipeline.eval.metrics import DEFAULT_MEASURES, parse_measure
from pipeline.eval.results import EDJE
from pipeline.registry import BenchmarkSpec
from pipeline.schema import DEFAULT_RERANK_DEPTH, Precision
from pipeline.search.options import EQUAL, WEIGHTS_RULE, Score, Weights, are_weights


class RerankSpec(Spec):
    """A second stage that has a row of the table.

    Attributes:
        model: the folder of an EDJE, whose adapter's tokens are in the index.
        rerank_depth: Number of first-stage items that are reranked; of a parent only the best.
        add_first_stage: whether its score is added.
        precision: in which the joint encoder computes; null: as its folder says.
        representation, score: the first stage; default: the single score if there is one, else the
            late one of `full` or the first.
        label: what the row is called; default: of the above, such as edje_10 or edje_10_int8.
    """

    renamed: ClassVar[Mapping[str, str]] = {"pool": "rerank_depth"}

    name: Literal["edje"] = "edje"
    model: Uri
    rerank_depth: PositiveInt = DEFAULT_RERANK_DEPTH
    add_first_stage: bool = False
    precision: Precision | None = None
    representation: str | None = None
    score: Score | None = None
    label: str = Field("", pattern=r"^[\w.-]*$")

    @property
    def row(self) -> str:
        """The name of its row."""
        parts = [EDJE, str(self.rerank_depth)]
        if self.add_first_stage:
            parts.append("added")
        if self.precision:
            parts.append(self.precision)
        return self.label or "_".join(parts)


class EvaluateSpec(Spec):
    """What `jobs.evaluate` computes.

    Attributes:
        index: the URI of an index.
        benchmark: where the judged queries come from.
        output: the folder of the results.
        representations: their names; empty for all of the index.
        query_vectors: for an index of your own vectors, the queries' too: Parquet with the columns
            `id` and `vectors`; empty: the encoder reads the queries' texts.
        scores: late, hybrid, single; empty for all that the index has vectors for.
        weights: of the single and the late score in the hybrid one, such as [1, 0.25].
        measures: names of ir-measures.
        k: hits per query: no measure sees deeper.
        judged: what the judgments name: items, or their parents, of which the best item counts;
            auto: the level at which their ids are in the index.
        bm25: whether BM25 over the items' texts has a row.
        text: what BM25 reads: the texts, or the captions.
        filter: SQL condition on the item columns, such as "source = 'letters'". Only the items that
            satisfy it are searched and judged.
        diagnostics: whether late rows are diagnosed: score retention, use of the vectors, evenness
            and similarity; takes about as long again as ranking.
        grounding: phrases with the boxes in which they stand, for how well late rows locate them: a
            JSONL file, or how to draw phrases from the items' own text; null for none.
        rerank: second stages, each with a row of its own.
        kinds: an item column such as modality, or metadata.KEY: the report has a table by kind of
            the relevant documents; null for none.
    """

    renamed: ClassVar[Mapping[str, str]] = {"where": "filter"}

    index: str
    benchmark: BenchmarkSpec
    output: str
    query_vectors: str = ""
    representations: list[str] = Field(default_factory=list)
    scores: list[Score] = Field(default_factory=list)
    weights: Weights = EQUAL
    measures: list[str] = Field(default_factory=lambda: list(DEFAULT_MEASURES))
    k: PositiveInt = 100
    judged: Literal["auto", "parent", "item"] = "auto"
    bm25: bool = True
    text: Literal["text", "caption"] = "text"
    filter: str | None = None
    diagnostics: bool = True
    grounding: Generated | str | None = None
    kinds: str | None = None
    rerank: list[RerankSpec] = Field(default_factory=list)

    @field_validator("rerank")
    @classmethod
    def _other_names(cls, rerank: list[RerankSpec]) -> list[RerankSpec]:
        names = [each.row for each in rerank]
        for name in names:
            if names.count(name) > 1:
                raise SpecError("", name, "unique (set a different `label`)", "occurs twice")
        return rerank

    @field_validator("measures")
    @classmethod
    def _some_measure(cls, names: list[str]) -> list[str]:
        if not names:
            raise SpecError("", names, "a list of at least one ir-measures name")
        return names

    @field_validator("weights", mode="before")
    @classmethod
    def _check_weights(cls, weights: Any) -> Any:
        if not are_weights(weights):
            raise SpecError("", weights, WEIGHTS_RULE)
        return weights

    @model_validator(mode="after")
    def _weights_of_something(self) -> EvaluateSpec:
        if self.weights != EQUAL and self.scores and "hybrid" not in self.scores:
            rule = f"{list(EQUAL)} unless hybrid is among the scores"
            raise SpecError("weights", list(self.weights), rule)
        return self

    @model_validator(mode="after")
    def _deep_enough(self) -> EvaluateSpec:
        for name in self.measures:  # a name that is no measure says so itself
            depth = parse_measure(name).params.get("cutoff", 0)
            if depth > self.k:
                raise SpecError("k", self.k, f"at least {depth} for {name}")
        return self

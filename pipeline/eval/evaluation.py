"""An evaluation: the representations of an index under each score, on one benchmark."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from pipeline.atomic import check_writable, write_atomic
from pipeline.config import Spec, SpecError, absolute, dump_yaml
from pipeline.encoders import EncodedQueries
from pipeline.eval import JudgedQueries, report
from pipeline.eval.metrics import DEFAULT_MEASURES, Run, means, parse_measure, per_query, write_run
from pipeline.eval.report import SINGLE, Result
from pipeline.eval.topics import read_query_vectors
from pipeline.index.reader import Index
from pipeline.index.status import stored
from pipeline.registry import BENCHMARKS, BenchmarkSpec
from pipeline.search.searcher import SCORES, Score, Searcher, open_index

AnyQueries = EncodedQueries | list[np.ndarray]


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
        measures: names of ir-measures.
        k: hits per query: no measure sees deeper.
    """

    index: str
    benchmark: BenchmarkSpec
    output: str
    query_vectors: str = ""
    representations: list[str] = Field(default_factory=list)
    scores: list[Score] = Field(default_factory=list)
    measures: list[str] = Field(default_factory=lambda: list(DEFAULT_MEASURES))
    k: PositiveInt = 100

    @field_validator("measures")
    @classmethod
    def _some_measure(cls, names: list[str]) -> list[str]:
        if not names:
            raise SpecError("", names, "at least one name of ir-measures")
        return names

    @model_validator(mode="after")
    def _deep_enough(self) -> EvaluateSpec:
        for name in self.measures:  # a name that is no measure says so itself
            depth = parse_measure(name).params.get("cutoff", 0)
            if depth > self.k:
                raise SpecError("k", self.k, f"at least {depth}, for {name}")
        return self


def run(spec: EvaluateSpec, say: Callable[[str], None]) -> list[Result]:
    """Evaluates and writes every result file; returns the rows of the table.

    Raises:
        SpecError: the benchmark, the index or a representation is not there or not legal.
    """
    check_writable(spec.output, "output")
    judged = BENCHMARKS.build(spec.benchmark).load()
    searcher = open_index(spec.index)
    plan = list(_plan(spec, searcher))
    for line in _left_out(judged, searcher.index):
        say(line)

    output = absolute(spec.output)
    measure = "nDCG@10" if "nDCG@10" in spec.measures else spec.measures[0]
    encoded: dict[str, AnyQueries] = {}
    results, every_query = [], {}
    for name, score in plan:
        _, about = searcher.representation(name)
        encoder = about["fingerprint"]
        if encoder not in encoded:
            encoded[encoder] = _queries(spec, judged, searcher, name)
        ranked, seconds = _timed_run(searcher, judged, encoded[encoder], name, score, spec.k)
        values = per_query(ranked, judged.qrels, spec.measures)
        speed = len(judged.queries) / seconds
        result = _result(searcher.index, name, about, score, means(values), speed)
        results.append(result)
        every_query[result.name] = values
        write_run(posixpath.join(output, "runs", f"{result.name}.trec"), ranked, result.name)
        say(f"{result.name}: {measure} {result.means[measure]:.4f}, {speed:,.0f} queries/s")

    files = {
        "metrics.csv": report.metrics_csv(results),
        "per_query.csv": report.per_query_csv(every_query),
        "table.md": report.markdown(report.table(results)),
        "quality_bytes.png": report.quality_bytes_png(results, measure),
        "spec.yaml": dump_yaml(spec),
    }
    for name, data in files.items():
        write_atomic(posixpath.join(output, name), data)
    say("")
    say(report.aligned(report.table(results)))
    say("")
    for name in ("runs", *files):
        say(posixpath.join(spec.output, name))
    return results


def _queries(
    spec: EvaluateSpec, judged: JudgedQueries, searcher: Searcher, representation: str
) -> AnyQueries:
    """The judged queries as vectors: the caller's, or those of the representation's encoder."""
    if not spec.query_vectors:
        return searcher.encoder(representation).encode_queries(list(judged.queries.values()))
    vectors = read_query_vectors(spec.query_vectors)
    for query_id in judged.queries:
        if query_id not in vectors:
            legal = "vectors for every judged query"
            raise SpecError("query_vectors", query_id, legal, "is judged and has no vectors")
    return [vectors[query_id] for query_id in judged.queries]


def _plan(spec: EvaluateSpec, searcher: Searcher) -> Iterator[tuple[str, Score]]:
    """The rows of the table; each encoder's single vector once, first.

    Raises:
        SpecError: a representation is not there, or has no single vectors and a score needs them.
    """
    names = spec.representations or list(searcher.index.representations())
    if not names:
        raise SpecError("index", spec.index, "an index with a representation", "has none")
    abouts = {name: searcher.representation(name)[1] for name in names}
    for name, about in abouts.items():
        needy = [score for score in spec.scores if score != "late"]
        if needy and about["pooled"] is None:
            problem = f"needs single vectors, and {name} has none"
            raise SpecError("scores", needy[0], "late", problem)
    scores = spec.scores or SCORES
    if SINGLE in scores:
        by_column = {about["pooled"]: name for name, about in abouts.items() if about["pooled"]}
        yield from ((name, SINGLE) for name in by_column.values())
    for name, about in abouts.items():
        for score in scores:
            if score != SINGLE and (score == "late" or about["pooled"]):
                yield name, score


def _timed_run(
    searcher: Searcher,
    judged: JudgedQueries,
    queries: AnyQueries,
    name: str,
    score: Score,
    k: int,
) -> tuple[Run, float]:
    """The run, and the seconds that scoring and ranking took: the vectors are loaded before."""
    searcher.load(name, score)
    start = time.perf_counter()
    rankings = searcher.rank(queries, name, k=k, score=score, group_by="parent")
    seconds = time.perf_counter() - start
    ranked = zip(judged.queries, rankings, strict=True)
    return {query_id: ranking.scores_by_parent() for query_id, ranking in ranked}, seconds


def _result(
    index: Index,
    name: str,
    about: dict[str, Any],
    score: Score,
    measured: dict[str, float],
    speed: float,
) -> Result:
    pooled_bytes = 0.0
    if score != "late":
        pooled = index.dataset.schema.field(about["pooled"]).type
        pooled_bytes = pooled.list_size * pooled.value_type.bit_width / 8
    if score == SINGLE:
        return Result(
            representation=about["pooled"],
            method=SINGLE,
            num_vectors=1,
            score=score,
            means=measured,
            vectors_per_item=1.0,
            vector_bytes=pooled_bytes,
            all_bytes=pooled_bytes,
            queries_per_second=speed,
        )
    sizes = stored(index, name)
    return Result(
        representation=name,
        method=report.method_name(about["compressor"]),
        num_vectors=about["compressor"].get("num_vectors"),
        score=score,
        means=measured,
        vectors_per_item=sizes["vectors"] + (score == "hybrid"),
        vector_bytes=sizes["bytes_vectors"] + pooled_bytes,
        all_bytes=sizes["bytes_all"] + pooled_bytes,
        queries_per_second=speed,
    )


def _left_out(judged: JudgedQueries, index: Index) -> Iterator[str]:
    """What of the benchmark does not take part, or cannot be found."""
    yield f"{len(judged.queries)} judged queries"
    if judged.num_unjudged:
        yield f"{judged.num_unjudged} queries without judgments are left out"
    if judged.num_orphans:
        yield f"{judged.num_orphans} judged query ids without a text are left out"
    relevant = {
        document
        for grades in judged.qrels.values()
        for document, grade in grades.items()
        if grade > 0
    }
    there = set()
    for batch in index.batches(["parent_id"]):
        there |= relevant & set(batch["parent_id"].to_pylist())
    if missing := len(relevant) - len(there):
        yield f"{missing} of {len(relevant)} relevant documents are not in the index"

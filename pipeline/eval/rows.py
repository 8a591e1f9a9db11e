"""Rows of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pipeline.config import SpecError, within
from pipeline.eval.results import SINGLE_VECTOR
from pipeline.eval.spec import CandidatesSpec, EvaluateSpec, RerankRow
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader, combine_filters
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS, Registry
from pipeline.search.candidates import generator_columns
from pipeline.search.fusion import FUSED
from pipeline.search.options import SearchOptions
from pipeline.search.scores import VECTOR_SCORES, Score
from pipeline.search.searcher import Searcher


class Candidates(NamedTuple):
    """Candidate generator of a row, and its number of candidates."""

    generator: str
    number: int


class Row(NamedTuple):
    """Representation and score of a row. Both are `bm25` for the row of BM25.

    For a row with `rerank`, they are those of the first stage. For a row with `candidates`, they
    are those of the exact search.
    """

    representation: str
    score: Score | Literal["bm25"]
    rerank: RerankRow | None = None
    candidates: Candidates | None = None


def planned_rows(
    spec: EvaluateSpec, searcher: Searcher, encodes: bool, notes: list[str]
) -> Iterator[Row]:
    """Yields the rows of the table. Single vectors come first and appear once per encoder.

    `notes` receives a note for each stored representation that is left out, because a component is
    not installed. Those that the spec names are an error.
    """
    names = list(spec.representations)
    for name in names or _nonempty_representations(searcher.index, spec.filter):
        problem = _missing_component(searcher.representation(name), encodes)
        if problem and spec.representations:
            rule = "a representation whose components are installed"
            raise SpecError("representations", name, rule, problem)
        if problem:
            notes.append(f"no rows for {name}: it {problem}")
        elif not spec.representations:
            names.append(name)
    if not names:
        rule = "an index with a representation whose components are installed"
        raise SpecError("index", spec.index, rule, "has none")
    infos = [searcher.representation(name) for name in names]
    for info in infos:
        single_scores = [score for score in spec.scores if score not in ("maxsim", FUSED)]
        if single_scores and info.pooled_column is None:
            problem = f"needs the single vectors that {info.name} lacks"
            raise SpecError("scores", single_scores[0], "maxsim", problem)
        if FUSED in spec.scores:
            try:
                SearchOptions(score=FUSED, fusion=spec.fusion).resolve(
                    searcher.index, representation=info.name
                )
            except SpecError as error:
                raise error.at("scores") from None
    scores = spec.scores or VECTOR_SCORES
    if SINGLE_VECTOR in scores:
        by_column = {info.pooled_column: info.name for info in infos if info.pooled_column}
        yield from (Row(name, SINGLE_VECTOR) for name in by_column.values())
    for info in infos:
        for score in scores:
            if score != SINGLE_VECTOR and (score in ("maxsim", FUSED) or info.pooled_column):
                yield Row(info.name, score)
    for number, candidates in enumerate(spec.candidates):
        yield from _candidates_rows(candidates, number, searcher, names, spec.scores)
    for reranker in spec.rerank:
        yield _reranked_row(reranker, searcher, names)


def _missing_component(info: RepresentationInfo, encodes: bool) -> str | None:
    """Returns the problem of a representation if the package of a component is not installed."""
    parts: list[tuple[str, Registry[Any], Any]] = [
        ("compressor", COMPRESSORS, info.compressor),
        ("compressor", COMPRESSORS, info.compressor.get("method")),  # of an adaptive budget
        ("codec", CODECS, info.codec),
        ("encoder", ENCODERS, info.encoder.spec if encodes else None),
    ]
    for kind, registry, spec in parts:
        if isinstance(spec, dict):
            try:
                registry.load(spec["name"])
            except SpecError as error:
                reason = error.problem or "which no installed package provides"
                return (
                    f"needs the {kind} {spec['name']!r}, {reason.replace('needs', 'which needs')}"
                )
    return None


def _candidates_rows(
    spec: CandidatesSpec,
    number: int,
    searcher: Searcher,
    names: Sequence[str],
    scores: Sequence[Score],
) -> Iterator[Row]:
    name = spec.representation or ("full" if "full" in names else names[0])
    with within(f"candidates[{number}]"):
        if name not in names:
            problem = "is not evaluated"
            raise SpecError("representation", name, f"one of {', '.join(names)}", problem)
        if scores and "maxsim" not in scores:
            problem = "needs the score maxsim, which is not evaluated"
            raise SpecError("generator", spec.generator, "used with the score maxsim", problem)
        try:
            generator_columns(searcher.index, searcher.representation(name), spec.generator)
        except SpecError as error:
            raise error.at("generator") from None
    for num_candidates in spec.num_candidates:
        yield Row(name, "maxsim", candidates=Candidates(spec.generator, num_candidates))


def _reranked_row(reranker: RerankRow, searcher: Searcher, names: Sequence[str]) -> Row:
    name = reranker.representation or ("full" if "full" in names else names[0])
    info = searcher.representation(name)
    score: Score = reranker.score or (SINGLE_VECTOR if info.pooled_column else "maxsim")
    if score != "maxsim" and info.pooled_column is None:
        problem = f"needs the single vectors that {name} lacks"
        raise SpecError("rerank.score", score, "maxsim", problem)
    return Row(name, score, reranker)


def _nonempty_representations(index: IndexReader, filter: str | None) -> list[str]:
    filters = {
        name: combine_filters(filter, f"`{name}` IS NOT NULL") for name in index.representations()
    }
    return [
        name
        for name, condition in filters.items()
        if any(batch.num_rows for batch in index.batches(["item_id"], filter=condition))
    ]

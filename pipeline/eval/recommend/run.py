"""Recommendation of a representation for an index."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeline.config import ComponentSpec, SpecError, TrainedSpec
from pipeline.eval.level import judged_level
from pipeline.eval.recommend.choose import Choice, Row, Target, choose
from pipeline.eval.recommend.comparison import Comparison
from pipeline.eval.recommend.measure import Measured, measured_candidates
from pipeline.eval.recommend.queries import QuerySet, pseudo_queries
from pipeline.eval.recommend.sample import Sample, draw_sample
from pipeline.eval.recommend.spec import RecommendSpec
from pipeline.eval.recommend.validation import Regret, regrets
from pipeline.eval.topics import judged_query_vectors
from pipeline.index.add import incomplete_fragments
from pipeline.index.columns import (
    Representation,
    changed_setting,
    needs_appended_vectors,
    required_taps,
)
from pipeline.index.info import EncoderInfo
from pipeline.index.isotropy import isotropy_remark
from pipeline.index.languages import index_language_warnings
from pipeline.index.reader import IndexReader
from pipeline.index.recompress import check_taps, stored_encoder
from pipeline.registry import BENCHMARKS, CODECS, COMPRESSORS
from pipeline.search.searcher import Searcher, open_index

#: Method that stores all tokens. It has no budget.
UNCOMPRESSED = "none"
#: Norms of the noise in pseudo-queries relative to that of a token, in ascending order.
NOISES = (1.0, 2.0, 4.0)
#: Quality of the uncompressed vectors above which pseudo-queries are too easy, so that they do not
#: distinguish the candidates.
MAX_QUALITY = 0.9
#: Number of queries below which a warning is reported.
MIN_QUERIES = 50


@dataclass(frozen=True)
class Recommendation:
    """Measurements of all candidates and the choice among them.

    Attributes:
        stored_as: Name under which the index already stores the recommended representation, or
            None.
        is_judged: False if the queries are pseudo-queries.
        quality: Mean metric of the uncompressed vectors.
        better: Rows that are smaller than the uncompressed vectors and significantly better, by
            judged queries, in order of size.
        regrets: Validation of the estimates, or an empty list if it was not requested.
    """

    spec: RecommendSpec
    field: str
    rows: list[Row]
    choice: Choice
    stored_as: str | None
    left_out: dict[str, str]
    num_items: int
    num_sampled: int
    num_queries: int
    is_judged: bool
    quality: float
    better: list[Row]
    regrets: list[Regret]


def recommend(spec: RecommendSpec, report: Callable[[str], None]) -> Recommendation:
    """Compares the candidates on a sample of the items, and chooses one."""
    searcher = open_index(spec.index)
    index = searcher.index
    try:
        encoder_info, field = stored_encoder(index, spec.representation)
    except SpecError as error:
        raise error.at("representation") from None
    if remark := isotropy_remark(index, spec.representation):
        report(remark)
    for warning in index_language_warnings(index, [spec.representation]):
        report(f"warning: {warning}")
    candidates = list_candidates(spec, index, encoder_info, field)
    for name, reason in candidates.left_out.items():
        report(f"{name} is left out: it {reason}")
    sample, judged = _sample_and_queries(spec, searcher, candidates.representations)
    full = _uncompressed(sample, encoder_info)
    queries = judged or _pseudo_queries(spec, sample, full)
    kind = "judged queries" if queries.is_judged else "pseudo-queries"
    report(
        f"{len(candidates.representations)} candidates, {len(sample):,} of {sample.num_items:,}"
        f" items, {len(queries.tokens)} {kind}"
    )
    if len(queries.tokens) < MIN_QUERIES:
        report(f"with fewer than {MIN_QUERIES} queries, the confidence intervals are unreliable")
    comparison = Comparison(sample, full, queries, spec.seed)
    pseudo = None
    if spec.validate_estimate and judged is not None:
        pseudo_set = _pseudo_queries(spec, sample, full)
        pseudo = Comparison(sample, full, pseudo_set, spec.seed)
    measured = measured_candidates(candidates.representations, sample, encoder_info)
    for number, candidate in enumerate(measured, start=1):
        row = comparison.add(candidate)
        if pseudo is not None:
            pseudo.add(candidate)
        report(f"[{number}/{len(candidates.representations)}] {row.name}  {row.retained:.3f}")
    target = Target(spec.retain, spec.max_bytes, spec.max_milliseconds)
    rows = sorted(comparison.rows, key=lambda row: (row.bytes_per_item, -row.low))
    choice = choose(rows, target)
    (chosen,) = (r for r in candidates.representations if r.id == choice.row.name)
    return Recommendation(
        spec=spec,
        field=field,
        rows=rows,
        choice=choice,
        stored_as=_stored_name(index, chosen, encoder_info),
        left_out=candidates.left_out,
        num_items=sample.num_items,
        num_sampled=len(sample),
        num_queries=len(queries.tokens),
        is_judged=queries.is_judged,
        quality=float(comparison.reference_Q.mean()),
        better=sorted(comparison.better(), key=lambda row: row.bytes_per_item),
        regrets=[] if pseudo is None else regrets(comparison, pseudo, target),
    )


def _stored_name(
    index: IndexReader, representation: Representation, encoder_info: EncoderInfo
) -> str | None:
    for name, stored in index.representations().items():
        is_equal = changed_setting(representation, encoder_info, stored) is None
        if is_equal and not incomplete_fragments(index.dataset, [name]):
            return name
    return None


def _uncompressed(sample: Sample, encoder_info: EncoderInfo) -> Measured:
    representation = Representation(compressor=COMPRESSORS.resolve(UNCOMPRESSED))
    (full,) = measured_candidates([representation], sample, encoder_info)
    return full


def _pseudo_queries(spec: RecommendSpec, sample: Sample, full: Measured) -> QuerySet:
    """Returns pseudo-queries with the least noise that makes them hard, or else the most noise."""
    for noise in NOISES:
        queries = pseudo_queries(
            sample, full.packed, num_queries=spec.num_queries, noise=noise, seed=spec.seed
        )
        if queries.measure(full.scores(queries.tokens), sample.ids).mean() <= MAX_QUALITY:
            break
    return queries


def _sample_and_queries(
    spec: RecommendSpec, searcher: Searcher, representations: Sequence[Representation]
) -> tuple[Sample, QuerySet | None]:
    index = searcher.index
    info = index.representation(spec.representation)
    draw = functools.partial(
        draw_sample,
        index,
        info,
        size=spec.sample,
        seed=spec.seed,
        filter=spec.filter,
        taps=required_taps(representations, info.encoder.num_layers),
    )
    if spec.benchmark is None:
        return draw(), None
    judged = BENCHMARKS.build(spec.benchmark).load().located([index], spec.filter)
    level = judged_level(index, judged, spec.judged, spec.filter)
    rng = np.random.default_rng(spec.seed)
    query_ids = list(judged.queries)
    chosen = sorted(rng.permutation(len(query_ids))[: spec.num_queries].tolist())
    query_ids = [query_ids[number] for number in chosen]
    grades = [judged.qrels[query_id] for query_id in query_ids]
    documents = {document for query_grades in grades for document in query_grades}
    sample = draw(level=level, judged=documents)
    ignored = [query_id if judged.is_query(query_id, query_id) else None for query_id in query_ids]
    vectors = judged_query_vectors(spec.query_vectors, judged, query_ids)
    if vectors is not None:
        return sample, QuerySet(searcher.queries(vectors, info.name).tokens, grades, True, ignored)
    texts = [judged.queries[query_id] for query_id in query_ids]
    encoded = searcher.encoder(info.name).encode_queries(texts)
    return sample, QuerySet(searcher.queries(encoded, info.name).tokens, grades, True, ignored)


class Candidates(NamedTuple):
    """Representations to compare."""

    representations: list[Representation]
    left_out: dict[str, str]


def list_candidates(
    spec: RecommendSpec, index: IndexReader, encoder_info: EncoderInfo, field: str
) -> Candidates:
    """Combines the methods, budgets and codecs of a spec."""
    left_out = {}
    codecs = []
    for codec in spec.codecs:
        if CODECS.load(codec.name).needs_fit:
            left_out[codec.name] = "is fitted on the corpus"
        else:
            codecs.append(codec)
    representations = []
    for method in spec.methods:
        try:
            compressors = _compressors(method, spec.budgets)
        except _LeftOut as reason:
            left_out[method] = str(reason)
            continue
        listed = [
            Representation(compressor=compressor, codec=codec, field=field)
            for compressor in compressors
            for codec in codecs
        ]
        if listed and (problem := _problem(listed[0], index, encoder_info)):
            left_out[method] = problem
        else:
            representations += listed
    if not representations:
        reasons = "; ".join(f"{name} {reason}" for name, reason in left_out.items())
        rule = "methods and codecs that can be computed from stored token vectors"
        raise SpecError("methods", spec.methods, rule, note=f" ({reasons})")
    return Candidates(representations, left_out)


class _LeftOut(Exception):
    """Raised for a method that cannot be compared. The message is the reason."""


def _compressors(method: str, budgets: Sequence[int]) -> list[ComponentSpec]:
    compressor_class = COMPRESSORS.load(method)
    if method == UNCOMPRESSED:
        return [COMPRESSORS.resolve(method)]
    if issubclass(compressor_class.Spec, TrainedSpec):
        raise _LeftOut("needs trained weights")
    if compressor_class.needs_fit:
        raise _LeftOut("is fitted on the corpus")
    if "num_vectors" not in compressor_class.Spec.model_fields:
        raise _LeftOut("has no budget num_vectors")
    try:
        return [COMPRESSORS.resolve({"name": method, "num_vectors": n}) for n in budgets]
    except SpecError as error:
        raise _LeftOut(f"needs further settings ({error})") from None


def _problem(
    representation: Representation, index: IndexReader, encoder_info: EncoderInfo
) -> str | None:
    """Returns the reason why a representation cannot be computed from the index, or None."""
    if needs_appended_vectors([representation]):
        return "needs the vectors of appended tokens, which are not stored"
    try:
        check_taps(index, encoder_info.for_field(representation.field), [representation])
    except SpecError as error:
        return f"needs the attention statistic {error.value}, which is not stored"
    return None

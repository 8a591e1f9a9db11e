"""Recommendation of a representation for an index."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.config import SpecError, dump
from pipeline.eval.level import judged_level
from pipeline.eval.significance import ratio_intervals
from pipeline.eval.topics import read_query_vectors
from pipeline.index.columns import Representation, required_taps
from pipeline.index.info import EncoderInfo
from pipeline.index.recompress import stored_encoder
from pipeline.recommend.candidates import UNCOMPRESSED, list_candidates
from pipeline.recommend.choose import Choice, Row, Target, choose
from pipeline.recommend.measure import Measured, measured_candidates
from pipeline.recommend.queries import QuerySet, pseudo_queries
from pipeline.recommend.sample import Sample, draw_sample
from pipeline.recommend.spec import RecommendSpec
from pipeline.registry import BENCHMARKS, COMPRESSORS
from pipeline.search.packed import PackedVectors
from pipeline.search.searcher import Searcher, open_index
from pipeline.tokens import normalise

#: Relative norm of the noise in pseudo-queries. See "Choosing a method and a budget" in the docs.
NOISE = 1.0
#: Maximum number of items whose covering radius is computed.
NUM_COVERED = 100


@dataclass(frozen=True)
class Recommendation:
    """Measurements of all candidates and the choice among them.

    Attributes:
        spec: Options.
        field: Item field of the representation.
        rows: One row per candidate, in order of size.
        values: Metric of each query, by the name of the candidate; "" for the uncompressed vectors.
        choice: Recommended row.
        left_out: Reason by method or codec that was not compared.
        num_items: Number of items of the index.
        num_sampled: Number of items by which the candidates were compared.
        num_queries: Number of queries.
        is_judged: False if the queries are pseudo-queries.
        quality: Mean metric of the uncompressed vectors.
    """

    spec: RecommendSpec
    field: str
    rows: list[Row]
    values: dict[str, list[float]]
    choice: Choice
    left_out: dict[str, str]
    num_items: int
    num_sampled: int
    num_queries: int
    is_judged: bool
    quality: float


def recommend(spec: RecommendSpec, report: Callable[[str], None]) -> Recommendation:
    """Compares the candidates on a sample of the items, and chooses one.

    Args:
        spec: Options.
        report: Function that reports a line of progress.

    Raises:
        SpecError: The index, the representation or the benchmark is missing or invalid.
    """
    searcher = open_index(spec.index)
    index = searcher.index
    if spec.representation not in index.representations():
        names = index.representations()
        raise SpecError.unknown_name(
            "representation", spec.representation, names, "is not in the index"
        )
    encoder_info, field = stored_encoder(index, spec.representation)
    candidates = list_candidates(spec, index, encoder_info, field)
    for name, reason in candidates.left_out.items():
        report(f"{name} is left out: it {reason}")
    sample, queries = _sample_and_queries(spec, searcher, candidates.representations)
    kind = "judged queries" if queries.is_judged else "pseudo-queries"
    report(
        f"{len(candidates.representations)} candidates, {len(sample):,} of {sample.num_items:,}"
        f" items, {len(queries.tokens)} {kind}"
    )
    full = _uncompressed(sample, encoder_info)
    reference_Q = queries.measure(full.scores(queries.tokens), sample.ids)
    if not reference_Q.any():
        rule = "a benchmark with relevant items that the uncompressed vectors find"
        raise SpecError("queries", spec.representation, rule, "has a quality of 0")
    rows, values = [], {"": reference_Q.tolist()}
    covered = _covered_items(full.packed)
    for measured in measured_candidates(candidates.representations, sample, encoder_info):
        values_Q = queries.measure(measured.scores(queries.tokens), sample.ids)
        low, high = ratio_intervals(values_Q[np.newaxis], reference_Q, seed=spec.seed)[0].tolist()
        mean_distance, max_distance = _covering(measured.packed, covered)
        representation = measured.representation
        row = Row(
            name=representation.id,
            method=representation.compressor.name,
            num_vectors=getattr(representation.compressor, "num_vectors", None),
            codec=dump(representation.codec),
            vectors_per_item=measured.vectors_per_item,
            bytes_per_item=measured.bytes_per_item,
            milliseconds=measured.milliseconds(queries.tokens, sample.num_items),
            quality=float(values_Q.mean()),
            retained=float(values_Q.mean() / reference_Q.mean()),
            low=low,
            high=high,
            mean_distance=mean_distance,
            max_distance=max_distance,
        )
        rows.append(row)
        values[row.name] = values_Q.tolist()
        report(f"[{len(rows)}/{len(candidates.representations)}] {row.name}  {row.retained:.3f}")
    rows.sort(key=lambda row: (row.bytes_per_item, -row.low))
    target = Target(spec.retain, spec.max_bytes, spec.max_milliseconds)
    return Recommendation(
        spec=spec,
        field=field,
        rows=rows,
        values=values,
        choice=choose(rows, target),
        left_out=candidates.left_out,
        num_items=sample.num_items,
        num_sampled=len(sample),
        num_queries=len(queries.tokens),
        is_judged=queries.is_judged,
        quality=float(reference_Q.mean()),
    )


def _uncompressed(sample: Sample, encoder_info: EncoderInfo) -> Measured:
    """Returns the uncompressed vectors, which are the reference of all candidates."""
    representation = Representation(compressor=COMPRESSORS.resolve(UNCOMPRESSED))
    (full,) = measured_candidates([representation], sample, encoder_info)
    return full


def _sample_and_queries(
    spec: RecommendSpec, searcher: Searcher, representations: Sequence[Representation]
) -> tuple[Sample, QuerySet]:
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
        sample = draw()
        full = _uncompressed(sample, info.encoder).packed
        return sample, pseudo_queries(
            sample, full, num_queries=spec.num_queries, noise=NOISE, seed=spec.seed
        )
    judged = BENCHMARKS.build(spec.benchmark).load()
    try:
        level = judged_level(index, judged, spec.judged, spec.filter)
    except SpecError as error:
        raise error.at("queries") from None
    rng = np.random.default_rng(spec.seed)
    query_ids = list(judged.queries)
    chosen = sorted(rng.permutation(len(query_ids))[: spec.num_queries].tolist())
    query_ids = [query_ids[number] for number in chosen]
    grades = [judged.qrels[query_id] for query_id in query_ids]
    documents = {document for query_grades in grades for document in query_grades}
    sample = draw(level=level, judged=documents)
    if spec.query_vectors:
        vectors = read_query_vectors(spec.query_vectors)
        for query_id in query_ids:
            if query_id not in vectors:
                rule = "vectors for every judged query"
                raise SpecError("query_vectors", query_id, rule, "has no vectors")
        encoded = [vectors[query_id] for query_id in query_ids]
        return sample, QuerySet(searcher.queries(encoded, info.name).tokens, grades, True)
    texts = [judged.queries[query_id] for query_id in query_ids]
    encoded_texts = searcher.encoder(info.name).encode_queries(texts)
    return sample, QuerySet(searcher.queries(encoded_texts, info.name).tokens, grades, True)


def _covered_items(full: PackedVectors) -> list[tuple[int, torch.Tensor]]:
    """Returns the rows and unit vectors (N, D) of evenly spaced items."""
    rows = np.unique(np.linspace(0, len(full) - 1, min(NUM_COVERED, len(full))).round().astype(int))
    return [(row, normalise(full.item(row))) for row in rows.tolist()]


def _covering(
    packed: PackedVectors, items: Sequence[tuple[int, torch.Tensor]]
) -> tuple[float, float]:
    """Computes the cosine distances of the tokens of items to the nearest stored vector.

    Returns:
        Mean distance, and maximum distance (covering radius), both averaged over the items.
    """
    means, maxima = [], []
    for row, tokens_ND in items:
        similarity_N = (tokens_ND @ normalise(packed.item(row)).T).amax(dim=1)
        distance_N = (1 - similarity_N).clamp_min(0)
        means.append(float(distance_N.mean()))
        maxima.append(float(distance_N.max()))
    return float(np.mean(means)), float(np.mean(maxima))

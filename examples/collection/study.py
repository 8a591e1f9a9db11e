"""Quality of the training-free methods at every budget, codec and score.

The uncompressed vectors of an index are compressed, quantised and searched in memory. No result of
one half of the queries is used for the other.

Shapes: Q queries, B items, R rows of the table.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from pydantic import Field, PositiveInt

from pipeline.config import Spec
from pipeline.eval.recommend.measure import compress
from pipeline.eval.recommend.sample import Sample, draw_sample
from pipeline.index.columns import Representation, required_taps
from pipeline.index.reader import IndexReader
from pipeline.registry import BENCHMARKS, CODECS, COMPRESSORS, BenchmarkSpec, CodecSpec
from pipeline.runtime.atomic import open_atomic
from pipeline.search.fusion import Fusion
from pipeline.search.generators import bm25
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, join_blocks
from pipeline.search.searcher import open_index

#: The metric is nDCG at this rank, with one grade.
DEPTH = 10
#: Number of queries that are scored at a time, which bounds the matrix of scores.
QUERIES_PER_BATCH = 512
HALVES = ("choose", "prove")


class Collection(Spec):
    """Index with uncompressed vectors, and judged queries."""

    index: str
    """URI of the index."""
    benchmark: BenchmarkSpec
    """Benchmark with the queries, whose ids are those of items."""
    splits: list[str] = Field(default_factory=list)
    """Splits `choose` and `prove`; if empty, queries are divided by the hashes of their ids."""


class StudySpec(Spec):
    """Options of `python -m examples.collection study`."""

    output: str
    collections: dict[str, Collection]
    methods: list[str]
    budgets: list[PositiveInt]
    codecs: list[CodecSpec]
    fusions: dict[str, Fusion]
    """Settings of the fused score, by the names of the scores."""
    seed: int = 0


class Queries(NamedTuple):
    """Queries of both halves.

    Attributes:
        ids: Ids of the queries.
        halves: Half of each query.
        relevant: Indices of the relevant items of each query.
        tokens: Unit vectors of each query.
        single: Single-vector scores (Q, B).
        lexical: BM25 scores (Q, B).
    """

    ids: list[str]
    halves: list[str]
    relevant: list[list[int]]
    tokens: list[torch.Tensor]
    single: torch.Tensor
    lexical: np.ndarray


def study(spec: StudySpec, say: Callable[[str], None]) -> None:
    """Writes `OUTPUT/COLLECTION/METHOD.npz` with the metric of each row and query.

    Finished methods are kept, so that an interrupted run resumes.
    """
    for name, collection in spec.collections.items():
        folder = Path(spec.output) / name
        methods = [m for m in ("none", *spec.methods) if not (folder / f"{m}.npz").exists()]
        if methods:
            folder.mkdir(parents=True, exist_ok=True)
            _measure(spec, collection, methods, folder, say)


def half(query_id: str) -> str:
    """Returns the half of a query.

    >>> [half(name) for name in "abcd"]
    ['choose', 'choose', 'choose', 'choose']
    """
    return HALVES[hashlib.sha256(query_id.encode()).digest()[0] % 2]


def _measure(
    spec: StudySpec,
    collection: Collection,
    methods: list[str],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    searcher = open_index(collection.index)
    info = searcher.index.representation("full")
    compressors = {
        method: [COMPRESSORS.resolve({"name": method, "num_vectors": k}) for k in spec.budgets]
        for method in methods
        if method != "none"
    }
    taps = required_taps(
        [Representation(compressor=found[0]) for found in compressors.values()],
        info.encoder.num_layers,
    )
    size = searcher.index.dataset.count_rows()
    sample = draw_sample(searcher.index, info, size=size, seed=spec.seed, taps=taps)
    queries = _queries(searcher, collection, sample)
    _write_queries(folder / "queries.csv", queries, sample)
    compressors |= {"none": [COMPRESSORS.resolve("none")]}
    for method in methods:
        names, sizes, values = [], [], []
        for compressor_spec in compressors[method]:
            compressor = COMPRESSORS.build(compressor_spec)
            with torch.no_grad():
                blocks = [compress(compressor, batch, info.encoder) for batch in sample.batches]
            for codec_spec in spec.codecs:
                packed = _pack(codec_spec, blocks, spec.seed)
                representation = Representation(compressor=compressor_spec, codec=codec_spec)
                found = dict(_metrics(packed, queries, spec.fusions))
                names += [f"{representation.id}.{score}" for score in found]
                values += found.values()
                num_bytes = packed.num_vectors * packed.codec.token_bytes(packed.dim) / len(packed)
                sizes += [num_bytes] * len(found)
                say(f"{folder.name} {representation.id}: {values[-len(found)].mean():.4f}")
        if method == "none":
            names += ["bm25", "single_vector"]
            lexical_QB = torch.from_numpy(queries.lexical)
            values += [ndcg(lexical_QB, queries.relevant), ndcg(queries.single, queries.relevant)]
            sizes += [0.0, 2.0 * info.encoder.dim]
        with open_atomic(str(folder / f"{method}.npz"), "wb") as file:
            np.savez(file, names=names, bytes=sizes, values=np.array(values, np.float32))


def _queries(searcher, collection: Collection, sample: Sample) -> Queries:
    halves: dict[str, str] = {}
    texts: dict[str, str] = {}
    qrels: dict[str, dict[str, int]] = {}
    for number, split in enumerate(collection.splits or [None]):
        benchmark = collection.benchmark
        if split is not None:
            benchmark = benchmark.model_copy(update={"split": split})
        judged = BENCHMARKS.build(benchmark).load()
        texts |= judged.queries
        qrels |= judged.qrels
        halves |= {name: HALVES[number] if split else half(name) for name in judged.queries}
    numbers = {item: number for number, item in enumerate(sample.ids)}
    relevant = [
        [numbers[item] for item, grade in qrels[name].items() if grade > 0 and item in numbers]
        for name in texts
    ]
    encoded = searcher.queries(
        searcher.encoder("full").encode_queries(list(texts.values())), "full"
    )
    items_BD, item_texts = _pooled(searcher.index, sample.ids)
    generator = bm25.Bm25(bm25.Bm25.Spec(), bm25.Bm25.fit(bm25.Bm25.Spec(), [item_texts]))
    postings = bm25.Postings(generator, [bm25.encode(item_texts)])
    return Queries(
        list(texts),
        list(halves.values()),
        relevant,
        list(encoded.tokens),
        encoded.pooled @ items_BD.T,
        np.stack([postings.scores(text) for text in texts.values()]),
    )


def _pooled(index: IndexReader, ids: Sequence[str]) -> tuple[torch.Tensor, list[str]]:
    """Returns the single vectors (B, D) float32 and the texts of items in the given order."""
    column = index.representation("full").pooled_column
    table = index.dataset.to_table(columns=["item_id", column, "text"])
    order = {item: number for number, item in enumerate(table["item_id"].to_pylist())}
    table = table.take([order[item] for item in ids])
    flat = pc.list_flatten(table[column].combine_chunks()).to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.reshape(len(ids), -1)).float(), table["text"].to_pylist()


def _pack(
    codec_spec: CodecSpec, blocks: list[tuple[torch.Tensor, np.ndarray]], seed: int
) -> PackedVectors:
    codec = CODECS.build(codec_spec)
    if codec.needs_fit:
        vectors_TD = torch.cat([vectors for vectors, _ in blocks])
        rows = np.random.default_rng(seed).permutation(len(vectors_TD))[: codec.num_fit_tokens]
        artefact = codec.fit(codec.spec, vectors_TD[rows].numpy(), seed)
        del vectors_TD
        codec = CODECS.build(codec_spec, artefact)
    parts = [
        ({name: part.numpy() for name, part in codec.quantise(vectors).items()}, lengths)
        for vectors, lengths in blocks
    ]
    return join_blocks(codec, blocks[0][0].shape[1], parts)


def _metrics(
    packed: PackedVectors, queries: Queries, fusions: Mapping[str, Fusion]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the metric of each query (Q,) by score."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("maxsim", "hybrid", *fusions)}
    for first in range(0, len(queries.ids), QUERIES_PER_BATCH):
        part = slice(first, first + QUERIES_PER_BATCH)
        tokens = [packed.codec.transform_queries(query) for query in queries.tokens[part]]
        maxsim_QB = maxsim(tokens, packed)
        num_tokens_Q1 = torch.tensor([[max(len(query), 1)] for query in tokens])
        scores = {"maxsim": maxsim_QB, "hybrid": queries.single[part] + maxsim_QB / num_tokens_Q1}
        for name, fusion in fusions.items():
            scores[name] = _fused(fusion, maxsim_QB, queries.lexical[part], queries.single[part])
        for name, scores_QB in scores.items():
            found[name].append(ndcg(scores_QB, queries.relevant[part]))
    for name, parts in found.items():
        yield name, np.concatenate(parts)


def _fused(
    fusion: Fusion, maxsim_QB: torch.Tensor, lexical_QB: np.ndarray, single_QB: torch.Tensor
) -> torch.Tensor:
    names = ("maxsim", "bm25", "single_vector")
    rows = zip(maxsim_QB.numpy(), lexical_QB, single_QB.numpy(), strict=True)
    fused = [fusion.scores(dict(zip(names, row, strict=True)), DEPTH) for row in rows]
    return torch.from_numpy(np.stack(fused))


def ndcg(scores_QB: torch.Tensor, relevant: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns nDCG@10 (Q,) of judgments with one grade. Items of infinite or no score are last.

    >>> ndcg(torch.tensor([[3.0, 2.0, 1.0]]), [[0, 2]]).round(3).tolist()
    [0.92]
    """
    depth = min(DEPTH, scores_QB.shape[1])
    best_Qk = scores_QB.topk(depth).indices.numpy()
    gains_k = 1 / np.log2(np.arange(2, depth + 2))
    return np.array(
        [
            gains_k[np.isin(best_k, items)].sum() / gains_k[: len(items)].sum() if items else 0
            for best_k, items in zip(best_Qk, relevant, strict=True)
        ]
    )


def _write_queries(path: Path, queries: Queries, sample: Sample) -> None:
    """Writes the half of each query and the mean number of tokens of its relevant items."""
    lengths_B = torch.cat([batch.lengths for batch in sample.batches]).numpy()
    with open_atomic(str(path), "w") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["query", "half", "tokens"])
        for name, part, items in zip(queries.ids, queries.halves, queries.relevant, strict=True):
            rows.writerow([name, part, f"{lengths_B[items].mean() if items else 0:.1f}"])

"""Quality of the training-free methods at every budget, codec and score.

The uncompressed vectors of an index are compressed, quantised and searched in memory. No result of
one half of the queries is used for the other.

Shapes: Q queries, B items, R rows of the table.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from pydantic import PositiveInt

from examples.collection.parts import HALVES
from pipeline.config import Spec, dump
from pipeline.eval.recommend.measure import compress
from pipeline.eval.recommend.sample import Sample, draw_sample
from pipeline.index.columns import Representation, default_id, required_taps
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import IndexReader
from pipeline.registry import (
    BENCHMARKS,
    CODECS,
    COMPRESSORS,
    BenchmarkSpec,
    CodecSpec,
    CompressorSpec,
)
from pipeline.search.fusion import Fusion
from pipeline.search.generators import bm25
from pipeline.search.maxsim import best_scores, maxsim
from pipeline.search.packed import PackedVectors, join_blocks
from pipeline.search.searcher import open_index

#: The metric is nDCG at this rank.
DEPTH = 10
#: Index of an item that is not found. Relevant items that are not in the index have smaller ones.
MISSING = -1
#: Ascending indices of the items to score for each query, or None for all.
Rows = list[torch.Tensor] | None
#: Name of a compressor, or its fields.
Method = str | dict[str, Any]
#: Number of queries that are scored at a time, which bounds the matrix of scores.
QUERIES_PER_BATCH = 512
NONE = COMPRESSORS.resolve("none")


class Grid(Spec):
    """Methods, budgets and codecs that are combined. `none` has no budget."""

    methods: list[str | dict[str, Any]]
    """Names or fields of compressors, without the budget."""
    budgets: list[PositiveInt]
    codecs: list[CodecSpec]
    is_fused: bool = True
    """Whether to compute the fused scores, which take most of the time."""


class Collection(Spec):
    """Index and judged queries."""

    index: str
    """URI of the index."""
    representation: str = "full"
    """Representation whose vectors are compressed."""
    max_queries: PositiveInt | None = None
    """Number of queries of each half, evenly spaced. If null, all are used."""
    benchmark: BenchmarkSpec
    """Benchmark with the queries, whose ids are those of items."""
    grids: list[Grid] | None = None
    """Grids of this collection, if they are not those of the study."""
    against: str | None = None
    """Name of the collection of the same items and queries by another encoder."""
    halves: bool = False
    """Whether the benchmark has the splits `choose` and `prove`. Otherwise, nothing is chosen on
    its queries, so that all of them are in the half `prove`."""


class StudySpec(Spec):
    """Options of `python -m examples.collection study`."""

    output: str
    collections: dict[str, Collection]
    grids: list[Grid]
    fusions: dict[str, Fusion]
    """Settings of the fused score, by the names of the scores."""
    candidates: PositiveInt | None = None
    """Number of items per query that are scored: the best by uncompressed vectors, and half as many
    by single vectors and by BM25. If null, all items are scored."""
    seed: int = 0


class Queries(NamedTuple):
    """Queries of both halves.

    Attributes:
        ids: Ids of the queries.
        halves: Half of each query.
        grades: Positive grades by the index of the item, for each query.
        tokens: Unit vectors of each query.
        single: Single-vector scores (Q, B).
        lexical: BM25 scores (Q, B).
        postings_bytes: Mean number of bytes of the BM25 code of an item.
    """

    ids: list[str]
    halves: list[str]
    grades: list[dict[int, int]]
    tokens: list[torch.Tensor]
    single: torch.Tensor
    lexical: np.ndarray
    postings_bytes: float


def study(spec: StudySpec, say: Callable[[str], None]) -> None:
    """Writes `OUTPUT/COLLECTION/METHOD-CODEC-BUDGETS.npz` with the metric of each row and query.

    Finished files are kept, so that an interrupted run resumes. Methods that need attention
    statistics that an index does not store are left out.
    """
    for name, collection in spec.collections.items():
        folder = Path(spec.output) / name
        tasks = [
            (method, grid, codecs)
            for grid in (spec.grids if collection.grids is None else collection.grids)
            for method in grid.methods
            if (codecs := [c for c in grid.codecs if not _file(folder, method, grid, c).exists()])
        ]
        if tasks:
            folder.mkdir(parents=True, exist_ok=True)
            _measure(spec, collection, tasks, folder, say)


def _file(folder: Path, method: Method, grid: Grid, codec: CodecSpec) -> Path:
    name = default_id(_compressors(method, grid.budgets)[0], with_budget=False)
    parts = [name, *dump(codec).values(), *grid.budgets]
    return folder / f"{'-'.join(map(str, parts))}.npz"


def _measure(
    spec: StudySpec,
    collection: Collection,
    tasks: Sequence[tuple[Method, Grid, Sequence[CodecSpec]]],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    searcher = open_index(collection.index)
    info = searcher.index.representation(collection.representation)
    if info.name != "full":  # positions are those of all tokens
        info = replace(info, positions={})
    firsts = [
        Representation(compressor=_compressors(method, grid.budgets)[0])
        for method, grid, _ in tasks
    ]
    taps = required_taps(firsts, info.encoder.num_layers)
    stored = [tap for tap in taps if info.encoder.tap_column(tap) in searcher.index.schema.names]
    size = searcher.index.dataset.count_rows()
    sample = draw_sample(searcher.index, info, size=size, seed=spec.seed, taps=stored)
    queries = _queries(searcher, collection, sample)
    _write_queries(folder / "queries.csv", queries, sample)
    uncompressed = _blocks(NONE, sample, info.encoder)
    candidates = _candidates(
        _pack(CODECS.resolve("int8"), uncompressed, spec.seed), queries, spec.candidates
    )
    del uncompressed
    say(f"{folder.name}: {len(sample)} items, {len(queries.ids)} queries")
    single_bytes = 2.0 * info.encoder.dim
    others = {"maxsim": 0.0, "hybrid": single_bytes}
    for score, fusion in spec.fusions.items():
        is_used = bool(fusion.component_weights.single_vector)
        others[score] = queries.postings_bytes + is_used * single_bytes
    for first, (method, grid, codecs) in zip(firsts, tasks, strict=True):
        if not set(required_taps([first], info.encoder.num_layers)) <= set(stored):
            say(f"{folder.name} {first.id}: left out, needs attention statistics")
            continue
        tables = [_Table() for _ in codecs]
        for compressor_spec in _compressors(method, grid.budgets):
            blocks = _blocks(compressor_spec, sample, info.encoder)
            for codec, table in zip(codecs, tables, strict=True):
                packed = _pack(codec, blocks, spec.seed)
                name = Representation(compressor=compressor_spec, codec=codec).id
                if compressor_spec == NONE:
                    name = name.replace("full", collection.representation, 1)
                found = _metrics(packed, queries, candidates, spec.fusions if grid.is_fused else {})
                num_bytes = packed.num_vectors * packed.codec.token_bytes(packed.dim) / len(packed)
                for score, values_Q in found.items():
                    table.add(f"{name}.{score}", num_bytes + others[score], values_Q)
                say(f"{folder.name} {name}: {found['maxsim'].mean():.4f}")
        for codec, table in zip(codecs, tables, strict=True):
            table.write(_file(folder, method, grid, codec))
    if not (path := folder / "baselines.npz").exists():
        table = _Table()
        baselines = {"bm25": queries.lexical, "single_vector": queries.single.numpy()}
        for name, scores_QB in baselines.items():
            best_QB = np.argsort(-scores_QB, axis=1, kind="stable")[:, :DEPTH]
            # Items without a common term are not found by BM25.
            best_QB[np.take_along_axis(scores_QB, best_QB, 1) == 0] = MISSING
            pairs = zip(best_QB, queries.grades, strict=True)
            values_Q = np.array([ndcg(best, grades) for best, grades in pairs])
            num_bytes = queries.postings_bytes if name == "bm25" else single_bytes
            table.add(name, num_bytes, values_Q)
        table.write(path)


def _compressors(method: Method, budgets: Sequence[int]) -> list[CompressorSpec]:
    if method == NONE.name:
        return [NONE]
    fields = {"name": method} if isinstance(method, str) else method
    return [COMPRESSORS.resolve({**fields, "num_vectors": budget}) for budget in budgets]


@torch.no_grad()
def _blocks(
    spec: CompressorSpec, sample: Sample, encoder: EncoderInfo
) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Returns the vectors (T, D) and numbers of vectors (B,) of the batches of a sample."""
    compressor = COMPRESSORS.build(spec)
    # Stored vectors remain in half precision: those of 100,000 items fill the memory otherwise.
    dtype = sample.batches[0].vectors.dtype if spec == NONE else torch.float32
    found = (compress(compressor, batch, encoder) for batch in sample.batches)
    return [(vectors.to(dtype), lengths) for vectors, lengths in found]


class _Table:
    """Rows with a name, the mean number of bytes per item, and the metric of each query."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._bytes: list[float] = []
        self._values: list[np.ndarray] = []

    def add(self, name: str, num_bytes: float, values_Q: np.ndarray) -> None:
        """Adds a row."""
        self._names.append(name)
        self._bytes.append(num_bytes)
        self._values.append(values_Q.astype(np.float32))

    def write(self, path: Path) -> None:
        """Writes the arrays `names` (R,), `bytes` (R,) and `values` (R, Q)."""
        part = path.with_suffix(".part.npz")
        np.savez(part, names=self._names, bytes=self._bytes, values=np.array(self._values))
        part.replace(path)


def _queries(searcher, collection: Collection, sample: Sample) -> Queries:
    halves: dict[str, str] = {}
    texts: dict[str, str] = {}
    qrels: dict[str, dict[str, int]] = {}
    for part in HALVES if collection.halves else HALVES[1:]:
        changes = {"split": part} if collection.halves else {}
        judged = BENCHMARKS.build(collection.benchmark.model_copy(update=changes)).load()
        names = list(judged.queries)
        number = min(len(names), collection.max_queries or len(names))
        used = [names[place * len(names) // number] for place in range(number)]
        texts |= {name: judged.queries[name] for name in used}
        qrels |= judged.qrels
        halves |= dict.fromkeys(used, part)
    numbers = {item: number for number, item in enumerate(sample.ids)}
    grades = [
        {
            numbers.get(item, MISSING - 1 - place): grade
            for place, (item, grade) in enumerate(qrels[name].items())
            if grade > 0
        }
        for name in texts
    ]
    name = collection.representation
    encoded = searcher.queries(searcher.encoder(name).encode_queries(list(texts.values())), name)
    items_BD, item_texts = _pooled(searcher.index, name, sample.ids)
    generator = bm25.Bm25(bm25.Bm25.Spec(), bm25.Bm25.fit(bm25.Bm25.Spec(), [item_texts]))
    postings = bm25.Postings(generator, [bm25.encode(item_texts)])
    return Queries(
        list(texts),
        list(halves.values()),
        grades,
        list(encoded.tokens),
        encoded.pooled @ items_BD.T,
        np.stack([postings.scores(text) for text in texts.values()]),
        postings.item_bytes,
    )


def _pooled(
    index: IndexReader, representation: str, ids: Sequence[str]
) -> tuple[torch.Tensor, list[str]]:
    """Returns the single vectors (B, D) float32 and the texts of items in the given order."""
    column = index.representation(representation).pooled_column
    assert column is not None
    table = index.dataset.to_table(columns=["item_id", column, "text"])
    order = {item: number for number, item in enumerate(table["item_id"].to_pylist())}
    table = table.take([order[item] for item in ids])
    flat = pc.list_flatten(table[column].combine_chunks()).to_numpy(zero_copy_only=False)
    vectors_BD = torch.from_numpy(flat.reshape(len(ids), -1).astype(np.float32))
    return vectors_BD, table["text"].to_pylist()


def _pack(
    codec_spec: CodecSpec, blocks: list[tuple[torch.Tensor, np.ndarray]], seed: int
) -> PackedVectors:
    codec = CODECS.build(codec_spec)
    if codec.needs_fit:
        vectors_TD = torch.cat([vectors for vectors, _ in blocks])
        rows = np.random.default_rng(seed).permutation(len(vectors_TD))[: codec.num_fit_tokens]
        artefact = codec.fit(codec.spec, vectors_TD[rows].float().numpy(), seed)
        del vectors_TD
        codec = CODECS.build(codec_spec, artefact)
    parts = [
        ({name: part.numpy() for name, part in codec.quantise(vectors.float()).items()}, lengths)
        for vectors, lengths in blocks
    ]
    return join_blocks(codec, blocks[0][0].shape[1], parts)


def _candidates(packed: PackedVectors, queries: Queries, number: int | None) -> Rows:
    """Returns the ascending indices of the best items of each query by any component.

    The best by BM25 and by single vectors are fewer than by MaxSim, since they are less similar to
    the rankings that are compared.
    """
    if number is None or number >= len(packed):
        return None
    found: list[torch.Tensor] = []
    for first in range(0, len(queries.ids), QUERIES_PER_BATCH):
        part = slice(first, first + QUERIES_PER_BATCH)
        tokens = [packed.codec.transform_queries(query) for query in queries.tokens[part]]
        lists = [
            maxsim(tokens, packed).topk(number).indices,
            queries.single[part].topk(number // 2).indices,
            torch.from_numpy(queries.lexical[part]).topk(number // 2).indices,
        ]
        found += [torch.unique(row) for row in torch.cat(lists, dim=1)]
    return found


def _metrics(
    packed: PackedVectors, queries: Queries, candidates: Rows, fusions: Mapping[str, Fusion]
) -> dict[str, np.ndarray]:
    """Returns the metric of each query (Q,) by score."""
    tokens = [packed.codec.transform_queries(query) for query in queries.tokens]
    ranked = best_scores(tokens, packed, len(packed), rows=candidates)
    values: dict[str, list[float]] = {name: [] for name in ("maxsim", "hybrid", *fusions)}
    for query, (items, maxsim_R) in enumerate(ranked):
        single_R, lexical_R = queries.single[query][items].numpy(), queries.lexical[query][items]
        parts = {"maxsim": maxsim_R, "bm25": lexical_R, "single_vector": single_R}
        scores = {"maxsim": maxsim_R, "hybrid": single_R + maxsim_R / max(len(tokens[query]), 1)}
        scores |= {name: fusion.scores(parts, DEPTH) for name, fusion in fusions.items()}
        for name, scores_R in scores.items():
            best = items[np.argsort(-scores_R, kind="stable")[:DEPTH]]
            values[name].append(ndcg(best, queries.grades[query]))
    return {name: np.array(found) for name, found in values.items()}


def ndcg(best: np.ndarray, grades: Mapping[int, int]) -> float:
    """Returns nDCG@10 of ranked items.

    >>> round(ndcg(np.array([4, 1, 2]), {4: 1, 2: 1}), 3)
    0.92
    """
    discounts = np.log2(np.arange(2, DEPTH + 2))
    gains = np.array([grades.get(item, 0) for item in best[:DEPTH].tolist()])
    ideal = np.array(sorted(grades.values(), reverse=True)[:DEPTH])
    largest = (ideal / discounts[: len(ideal)]).sum()
    return float((gains / discounts[: len(gains)]).sum() / largest) if largest else 0.0


def _write_queries(path: Path, queries: Queries, sample: Sample) -> None:
    """Writes the half of each query and the mean number of tokens of its relevant items."""
    lengths_B = torch.cat([batch.lengths for batch in sample.batches]).numpy()
    with path.open("w") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["query", "half", "tokens"])
        for name, half, grades in zip(queries.ids, queries.halves, queries.grades, strict=True):
            items = [item for item in grades if item >= 0]
            rows.writerow([name, half, f"{lengths_B[items].mean() if items else 0:.1f}"])

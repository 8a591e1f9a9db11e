"""Quality of codecs and codes on the shipped collections, also with a direction added to them.

Vectors are those of MiniLM, merged to at most 32 per item by `hpool`. `--dim` keeps their principal
axes. A random direction is added to the vectors of items and queries until the mean cosine is that
of models whose token vectors share a direction.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from pipeline.config import parse
from pipeline.eval.metrics import per_query
from pipeline.eval.report.plot import STYLES, to_png
from pipeline.eval.significance import bootstrap_interval
from pipeline.eval.topics import read_qrels
from pipeline.index import job
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors
from pipeline.search.searcher import Searcher
from pipeline.tokens import normalise
from tests.bench.harness import Bench, table
from tests.bench.maxsim import packed_as

SOURCES = {
    "abstracts": {"name": "text", "path": "jobs/data/cranfield"},
    "pages": {"name": "pages", "path": "jobs/data/pages/pdf"},
}
JUDGMENTS = {"abstracts": "jobs/data/cranfield", "pages": "jobs/data/pages"}
#: Mean cosines. None leaves the vectors of MiniLM unchanged.
COSINES = (None, 0.3, 0.6, 0.95)
#: Numbers of candidates among which the best 10 are sought.
DEPTHS = (20, 100, 400)
CODECS: dict[str, dict[str, Any]] = {
    "float16": {"name": "float16"},
    "int8": {"name": "int8"},
    "residual, 2 bits": {"name": "residual", "bits": 2},
    "bits, 4": {"name": "bits", "bits": 4},
    "bits, 2": {"name": "bits", "bits": 2},
    "bits, 1": {"name": "bits", "bits": 1},
}
METRIC = "nDCG@10"


class Collection(NamedTuple):
    """Vectors of items and queries.

    Attributes:
        vectors_TD: Vectors of all items, one item after another.
        lengths_B: Number of vectors per item.
    """

    ids: list[str]
    vectors_TD: torch.Tensor
    lengths_B: torch.Tensor
    query_ids: list[str]
    queries: list[torch.Tensor]
    qrels: dict[str, dict[str, int]]

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Collection:
        """Returns the collection with all vectors transformed."""
        queries = [function(tokens_MD) for tokens_MD in self.queries]
        return self._replace(vectors_TD=function(self.vectors_TD), queries=queries)

    @property
    def cosine(self) -> float:
        """Mean cosine of the unit vectors."""
        return float(self.vectors_TD.double().mean(dim=0).square().sum())


def load(name: str, folder: str) -> Collection:
    """Indexes a collection, unless the folder has its index, and loads its vectors."""
    uri = f"{folder}/{name}"
    fields = {
        "index": uri,
        "source": SOURCES[name],
        "encoder": {"name": "transcript" if name == "pages" else "minilm"},
        "representations": [{"compressor": {"name": "hpool", "num_vectors": 32}}],
    }
    job.run(parse(IndexSpec, fields), IndexResources(), job="quality", report=lambda line: None)
    index = IndexReader(uri)
    batches = list(index.tokens("hpool_32"))
    qrels = read_qrels(f"{JUDGMENTS[name]}/qrels/test.tsv", "qrels")
    lines = Path(JUDGMENTS[name], "queries.jsonl").read_text().splitlines()
    texts = {line["_id"]: line["text"] for line in map(json.loads, lines)}
    query_ids = [query_id for query_id in texts if query_id in qrels]
    queries = Searcher(index).queries([texts[query_id] for query_id in query_ids], "hpool_32")
    return Collection(
        [item_id for rows, _, _ in batches for item_id in rows["item_id"].to_pylist()],
        torch.from_numpy(np.concatenate([flat for _, flat, _ in batches])).float(),
        torch.from_numpy(np.concatenate([lengths for _, _, lengths in batches])),
        query_ids,
        [tokens_MD.float() for tokens_MD in queries.tokens],
        qrels,
    )


def projected(collection: Collection, dim: int) -> Collection:
    """Keeps the principal axes of the vectors."""
    if dim >= collection.vectors_TD.shape[1]:
        return collection
    _, _, axes = torch.linalg.svd(collection.vectors_TD[::4].double(), full_matrices=False)
    return collection.mapped(lambda x_TD: normalise((x_TD.double() @ axes[:dim].T).float()))


def with_cosine(collection: Collection, cosine: float) -> Collection:
    """Adds a random direction to all vectors."""
    generator = torch.Generator().manual_seed(0)
    direction_D = normalise(torch.randn(1, collection.vectors_TD.shape[1], generator=generator))
    size = (max(cosine - collection.cosine, 0) / (1 - cosine)) ** 0.5
    return collection.mapped(lambda x_TD: normalise(x_TD + size * direction_D))


def scores(collection: Collection) -> Iterator[tuple[str, float | None, torch.Tensor]]:
    """Yields the bytes per vector, which are None for the signs, and scores (Q, B) by codec."""
    vectors_TD, lengths_B = collection.vectors_TD, collection.lengths_B
    for name, fields in CODECS.items():
        packed = packed_as(fields, vectors_TD, lengths_B)
        queries = [packed.codec.transform_queries(query) for query in collection.queries]
        yield name, packed.codec.token_bytes(packed.dim), maxsim(queries, packed)
    signs = PackedVectors.from_values(vectors_TD.sign(), lengths_B)
    yield "signs", vectors_TD.shape[1] / 8, maxsim(collection.queries, signs)


def ndcg(collection: Collection, scores_QB: torch.Tensor) -> np.ndarray:
    """Returns nDCG@10 of each query, (Q,)."""
    best = scores_QB.topk(10)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    found = [{collection.ids[i]: s for s, i in zip(*pair, strict=True)} for pair in pairs]
    run = dict(zip(collection.query_ids, found, strict=True))
    values = per_query(run, collection.qrels, [METRIC])
    return np.array([values[query_id][METRIC] for query_id in collection.query_ids])


def recalls(exact_QB: torch.Tensor, scores_QB: torch.Tensor) -> list[float]:
    """Returns the share of the exact best 10 among the best candidates, by number."""
    best_Q10 = exact_QB.topk(10).indices
    found = [scores_QB.topk(min(depth, scores_QB.shape[1])).indices for depth in DEPTHS]
    is_found = [(best_Q10[:, :, None] == found_QK[:, None]).any(dim=2) for found_QK in found]
    return [found_Q10.float().mean().item() for found_Q10 in is_found]


def quality(bench: Bench, args: Any) -> None:
    """Compares nDCG and the recall of the best 10 by mean cosine."""
    with tempfile.TemporaryDirectory(prefix="maxsim-") as temporary:
        load_in = functools.partial(load, folder=str(args.folder or temporary))
        collections = {name: projected(load_in(name), args.dim) for name in SOURCES}
    figures: dict[str, Any] = {}
    for name, collection in collections.items():
        figures[name] = {}
        for cosine in COSINES:
            changed = collection if cosine is None else with_cosine(collection, cosine)
            exact_QB = maxsim(
                changed.queries, PackedVectors.from_values(changed.vectors_TD, changed.lengths_B)
            )
            rows = figures[name][f"{changed.cosine:.2f}"] = {}
            reference_Q = None
            for codec, num_bytes, scores_QB in scores(changed):
                values_Q = ndcg(changed, scores_QB)
                reference_Q = values_Q if reference_Q is None else reference_Q
                lost_Q = 100 * (reference_Q - values_Q)
                rows[codec] = {
                    "bytes": num_bytes,
                    "ndcg": float(values_Q.mean()),
                    "lost": float(lost_Q.mean()),
                    "interval": bootstrap_interval(lost_Q),
                    "recall": recalls(exact_QB, scores_QB),
                }
        _add(bench, args, name, collection, figures[name])
    if args.figure:
        args.figure.write_bytes(to_png(plot(figures["abstracts"])))


def _add(
    bench: Bench, args: Any, name: str, collection: Collection, by_cosine: Mapping[str, Any]
) -> None:
    columns = [f"mean cosine {cosine}" for cosine in by_cosine]
    mean_length = collection.lengths_B.float().mean().item()
    title = (
        f"{name}: {len(collection.ids):,} items of {mean_length:.1f} vectors of {args.dim}"
        f" dimensions, {len(collection.queries)} queries."
    )
    lost, found = [], []
    for codec, first in next(iter(by_cosine.values())).items():
        sizes = [codec, f"{first['bytes']:.0f}", f"{first['bytes'] * mean_length:,.0f}"]
        rows = [by_codec[codec] for by_codec in by_cosine.values()]
        text = "{lost:.1f} ({interval[0]:.1f} to {interval[1]:.1f})"
        if codec == "float16":
            text = f"{METRIC} {{ndcg:.3f}}"
        lost.append(sizes + [text.format(**row) for row in rows])
        found.append(sizes + [" / ".join(f"{r:.3f}" for r in row["recall"]) for row in rows])
    header = ["codec", "bytes per vector", "bytes per item", *columns]
    say = f"Points of {METRIC} lost against float16, with 95 % intervals"
    bench.add(f"quality {name}", f"{title} {say}", {"rows": by_cosine}, table(header, lost))
    if len(collection.ids) > max(DEPTHS):
        say = f"Share of the exact best 10 among {' / '.join(map(str, DEPTHS))} candidates"
        bench.add(f"recall {name}", f"{title} {say}", {}, table(header, found))


def plot(by_cosine: Mapping[str, Any]) -> Figure:
    """Plots the recall among 20 candidates against the mean cosine."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    cosines = [float(cosine) for cosine in by_cosine]
    for codec, style in zip(next(iter(by_cosine.values())), STYLES, strict=False):
        found = [by_codec[codec]["recall"][0] for by_codec in by_cosine.values()]
        if codec != "float16":
            axes.plot(cosines, found, label=codec, **style)
    axes.set_xlabel("Mean cosine of the vectors")
    axes.set_ylabel(f"Best 10 among {DEPTHS[0]} candidates")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure

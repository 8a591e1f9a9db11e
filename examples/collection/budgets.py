"""Budgets by the number of tokens, and what predicts the loss, from an evaluation of a slice.

    python -m examples.collection.budgets tokens OUTPUT
    python -m examples.collection.budgets items OUTPUT
    python -m examples.collection.budgets agreement OUTPUT
    python -m examples.collection.budgets collections SPEC

OUTPUT is that of `maxray evaluate examples/collection/evaluate.yaml`.

`tokens` prints what an item of n tokens loses, and what other budgets of the same total size gain.
An item whose budget is k has the score that it has in the ranking with k vectors, so that nothing
is compressed or searched. The rankings have 100 items: the result is exact for a query if its tenth
score is at least as high as the last score of each ranking.

`items` prints how well properties of the stored vectors of the relevant item predict the loss.

`collections` prints the same properties for the collections of a study with their losses.

`agreement` prints how well the overlap with the results of uncompressed vectors predicts the loss.

Shapes: Q queries, B items.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
import yaml
from scipy.stats import spearmanr

import jobs
from examples.collection.defaults import read_all, reference
from examples.collection.study import StudySpec
from examples.collection.table import MEASURE, REFERENCE
from examples.collection.table import per_query as read_queries
from pipeline.config import parse
from pipeline.config import read as load
from pipeline.eval.diagnostics import gini
from pipeline.eval.metrics import per_query, read_run
from pipeline.eval.recommend.measure import compress
from pipeline.eval.recommend.sample import draw_sample
from pipeline.eval.significance import bootstrap_interval
from pipeline.eval.topics import read_qrels
from pipeline.index.reader import IndexReader
from pipeline.registry import COMPRESSORS
from pipeline.tokens import flat_from_arrow, flat_rows, normalise

DEPTH = 10
LEVELS, METHODS = (1, 4, 8, 16, 32), ("hpool", "kcenter")
#: Compressor, and number of sampled items, of the properties of a collection.
PROBE, NUM_SAMPLED = {"name": "kcenter", "num_vectors": 8}, 200
#: Representations whose loss they should predict.
LOST = tuple(f"kcenter_{num_vectors}_int8" for num_vectors in (8, 32))
#: Exponents p of budgets theta n^p of an item of n tokens.
POWERS = {"n^1/4": 0.25, "square root": 0.5, "fraction": 1.0, "1 / square root": -0.5}
#: Numbers of tokens that bound the groups of the first table.
BOUNDS = (0, 40, 80, 160, 1 << 30)

#: Minimum number of queries of a group.
MIN_QUERIES = 40

Run = Mapping[str, Mapping[str, float]]


def levels(lengths_B: np.ndarray, power: float, num_vectors: int, ratio: int) -> np.ndarray:
    """Returns the budgets (B,) from K / ratio to ratio K whose total is that of K per item.

    A budget is the level nearest to theta n^power, in logarithms. theta is the largest number whose
    total is not above that of K.

    >>> levels(np.array([9, 100, 100, 400]), 0.5, 8, 2).tolist()
    [4, 8, 8, 8]
    """
    close = [k for k in LEVELS if num_vectors <= k * ratio and k <= num_vectors * ratio]
    allowed = np.array(close if len(close) > 2 else [1, *close])
    total = np.minimum(lengths_B, num_vectors).sum()

    def rounded(theta: float) -> np.ndarray:
        wanted_B = np.log(theta) + power * np.log(lengths_B)
        return allowed[np.abs(wanted_B[:, None] - np.log(allowed)).argmin(axis=1)]

    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        is_small = np.minimum(rounded(middle), lengths_B).sum() <= total
        low, high = (middle, high) if is_small else (low, middle)
    return rounded(low)


def mixed(runs: Mapping[int, Run], budgets: Mapping[str, int]) -> tuple[Run, float]:
    """Returns the best items of each query by the budgets of the items, and the exact share."""
    used, num_exact = set(budgets.values()), 0
    found: dict[str, dict[str, float]] = {}
    for query in runs[next(iter(used))]:
        scores: dict[str, float] = {}
        bound = -np.inf
        for level in used:
            ranking = runs[level][query]
            scores |= {item: s for item, s in ranking.items() if budgets[item] == level}
            bound = max(bound, min(ranking.values()))
        best = sorted(scores.items(), key=lambda pair: -pair[1])[:DEPTH]
        num_exact += len(best) == DEPTH and best[-1][1] >= bound
        found[query] = dict(best)
    return found, num_exact / len(found)


def token_tables(output: Path) -> Iterator[str]:
    """Yields the lines of both tables."""
    uncompressed = read_queries(output)[1][REFERENCE]
    spec = yaml.safe_load((output / "spec.yaml").read_text())
    path = f"{spec['benchmark']['path']}/qrels/{spec['benchmark']['split']}.tsv"
    column = "hpool_32_assignment"
    table = IndexReader(spec["index"]).dataset.to_table(columns=["item_id", column])
    ids = table["item_id"].to_pylist()
    lengths_B = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    lengths = dict(zip(ids, lengths_B.tolist(), strict=True))
    qrels = read_qrels(path, "qrels")
    qrels = {query: grades for query, grades in qrels.items() if grades.keys() & lengths.keys()}

    def values(run: Run) -> np.ndarray:
        by_query = per_query(run, qrels, [MEASURE])
        return np.array([by_query[query][MEASURE] for query in qrels])

    def read(name: str) -> Run:
        return read_run(str(output / "runs" / f"{name}.maxsim.trec"))

    relevant = [[lengths[i] for i in grades if i in lengths] for grades in qrels.values()]
    tokens_Q = np.array([np.mean(found) for found in relevant])
    full_Q = np.array([uncompressed[query] for query in qrels])
    groups = [(tokens_Q > a) & (tokens_Q <= b) for a, b in itertools.pairwise(BOUNDS)]
    runs = {m: {k: read(f"{m}_{k}") for k in LEVELS} for m in METHODS}
    sizes = " | ".join(f"{is_in.sum()} queries" for is_in in groups)
    yield f"| method | correlation | {sizes} |\n|---|---|{'---|' * len(groups)}"
    for method in METHODS:
        for level in LEVELS:
            lost_Q = 100 * (full_Q - values(runs[method][level]))
            cells = [_normal(lost_Q[is_in]) for is_in in groups]
            correlation = spearmanr(tokens_Q, lost_Q).statistic
            yield f"| {method}, K = {level} | {correlation:.2f} | {' | '.join(cells)} |"
    yield f"\n| method | {' | '.join(POWERS)} | exact |\n|---|{'---|' * len(POWERS)}---|"
    for method in METHODS:
        for size in (4, 8, 16):
            first_Q = values(runs[method][size])
            for ratio in (2, 4):
                cells, shares = [], []
                for power in POWERS.values():
                    budgets = levels(lengths_B, power, size, ratio).tolist()
                    run, share = mixed(runs[method], dict(zip(ids, budgets, strict=True)))
                    shares.append(share)
                    cells.append(_interval(100 * (values(run) - first_Q)))
                name = f"{method}, K = {size}, up to {ratio} K"
                yield f"| {name} | {' | '.join(cells)} | {min(shares):.2f} |"


def item_table(output: Path) -> Iterator[str]:
    """Yields a table of the correlation of properties of the relevant item with the loss."""
    spec = yaml.safe_load((output / "spec.yaml").read_text())
    path = f"{spec['benchmark']['path']}/qrels/{spec['benchmark']['split']}.tsv"
    dataset = IndexReader(spec["index"]).dataset
    row_of = {name: row for row, name in enumerate(dataset.to_table(["item_id"])[0].to_pylist())}
    qrels = read_qrels(path, "qrels")
    rows = {query: [row_of[i] for i in grades if i in row_of] for query, grades in qrels.items()}
    rows = {query: found for query, found in rows.items() if found}
    relevant = sorted({row for found in rows.values() for row in found})
    values = read_queries(output)[1]

    def vectors(column: str) -> list[torch.Tensor]:
        flat, lengths = flat_from_arrow(dataset.take(relevant, [column])[column])
        return list(normalise(torch.from_numpy(flat.copy()).float()).split(lengths.tolist()))

    items = vectors("full")
    for number, name in enumerate(f"{m}_{k}" for m in METHODS for k in (4, 8, 16)):
        pairs = zip(items, vectors(name), strict=True)
        found = {row: _properties(*pair) for row, pair in zip(relevant, pairs, strict=True)}
        loss = [values["full.maxsim"][q] - values[f"{name}.maxsim"][q] for q in rows]
        names = next(iter(found.values()))
        means = {n: [np.mean([found[row][n] for row in rows[q]]) for q in rows] for n in names}
        if not number:
            yield f"| candidate | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
        cells = [f"{spearmanr(column, loss).statistic:.2f}" for column in means.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def collection_table(path: Path) -> Iterator[str]:
    """Yields a table of mean properties and losses of the collections of a study."""
    spec = parse(StudySpec, load(str(path), "OUTPUT"))
    compressor = COMPRESSORS.build(COMPRESSORS.resolve(PROBE))
    table: dict[str, list[float]] = {}
    for name, rows in read_all(spec).items():
        index = IndexReader(spec.collections[name].index)
        info = index.representation(spec.collections[name].representation)
        found = []
        for batch in draw_sample(index, info, size=NUM_SAMPLED, seed=0).batches:
            vectors_KD, lengths_B = compress(compressor, batch, info.encoder)
            tokens_ND, _ = flat_rows(batch.vectors.float(), batch.mask)
            parts = (tokens_ND.split(batch.lengths.tolist()), vectors_KD.split(lengths_B.tolist()))
            found += [_properties(normalise(x), y) for x, y in zip(*parts, strict=True)]
        means = {key: float(np.mean([item[key] for item in found])) for key in found[0]}
        quality = {
            row: values_Q.mean() for row, values_Q in zip(rows.names, rows.values, strict=True)
        }
        full = quality[reference(rows)]
        losses = {row: 100 * (1 - quality[f"{row}.maxsim"] / full) for row in LOST}
        if not table:
            yield f"| collection | {' | '.join([*means, *losses])} |"
            yield f"|---|{'---|' * (len(means) + len(losses))}"
        cells = [f"{value:.2f}" for value in means.values()]
        cells += [f"{value:.1f}" for value in losses.values()]
        yield f"| {name} | {' | '.join(cells)} |"
        for key, value in (means | losses).items():
            table.setdefault(key, []).append(value)
    yield f"\n| correlation | {' | '.join(LOST)} |\n|---|{'---|' * len(LOST)}"
    for key in means:
        cells = [f"{spearmanr(table[key], table[row]).statistic:.2f}" for row in LOST]
        yield f"| {key} | {' | '.join(cells)} |"


def _properties(tokens_ND: torch.Tensor, vectors_KD: torch.Tensor) -> dict[str, float]:
    """Computes properties of an item from its unit token vectors and its stored vectors."""
    best_N, group_N = (tokens_ND @ vectors_KD.T).max(dim=1)
    sizes_K = torch.bincount(group_N, minlength=len(vectors_KD))
    sums_KD = torch.zeros_like(vectors_KD).index_add_(0, group_N, tokens_ND)
    means_KD = sums_KD / sizes_K.clamp_min(1).unsqueeze(1)
    within = (tokens_ND - means_KD[group_N]).square().sum()
    total = (tokens_ND - tokens_ND.mean(dim=0)).square().sum().clamp_min(1e-9)
    return {
        "number of tokens": len(tokens_ND),
        "mean distance": float((1 - best_N).mean()),
        "radius": float((1 - best_N).max()),
        "unexplained variance": float(within / total),
        "Gini of group sizes": gini(sizes_K.numpy()) or 0.0,
    }


def _normal(values_Q: np.ndarray) -> str:
    return f"{values_Q.mean():.1f} ± {1.96 * values_Q.std() / len(values_Q) ** 0.5:.1f}"


def _interval(values_Q: np.ndarray) -> str:
    low, high = bootstrap_interval(values_Q, num_samples=3000)
    return f"{values_Q.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def _groups(queries: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    """Returns the ids of the queries by kind, language, what BM25 answers, and pairs of these."""
    groups: dict[str, set[str]] = defaultdict(set)
    for name, row in queries.items():
        kind, language, bm25 = row["kind"], row["language"], row["bm25"]
        for group in ("all", kind, language, bm25, f"{kind} {language}", f"{kind} {bm25}"):
            groups[group].add(name)
    return groups


def agreement_table(proved: Path) -> Iterator[str]:
    """Yields a table of how the agreement with uncompressed results predicts the retained quality.

    The agreement of a query is the share of the ten best items by uncompressed vectors that are
    also found with K vectors. It needs queries, but no judgments.
    """
    questions, values = read_queries(proved)
    names = [f"{m}_{k}" for m in METHODS for k in LEVELS if (m, k) != ("kcenter", 1)]
    best: dict[str, dict[str, set[str]]] = {}
    for name in ("full", *names):
        run = read_run(str(proved / "runs" / f"{name}.maxsim.trec"))
        best[name] = {q: set(sorted(r, key=r.__getitem__)[-DEPTH:]) for q, r in run.items()}
    agreement: list[np.ndarray] = []
    retained: list[np.ndarray] = []
    for ids in _groups(questions).values():
        if len(queries := sorted(ids & best["full"].keys())) < MIN_QUERIES:
            continue
        full = [values["full.maxsim"][q] for q in queries]
        shared = [[len(best["full"][q] & best[n][q]) / DEPTH for q in queries] for n in names]
        agreement.append(np.mean(shared, axis=1))
        quality = [[values[f"{n}.maxsim"][q] for q in queries] for n in names]
        retained.append(np.mean(quality, axis=1) / np.mean(full))
    agreement_GR, retained_GR = np.array(agreement), np.array(retained)
    pairs = list(zip(agreement_GR, retained_GR, strict=True))
    sizes = [int(name.rpartition("_")[2]) for name in names]
    yield f"{len(pairs)} groups of queries"
    yield "| candidates of a group | by the number of vectors | by the agreement |\n|---|---|---|"
    by_size = np.mean([spearmanr(sizes, retained_R).statistic for _, retained_R in pairs])
    by_agreement = np.mean([spearmanr(*pair).statistic for pair in pairs])
    yield f"| mean correlation | {by_size:.2f} | {by_agreement:.2f} |"
    yield f"\n| groups | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    across = [
        spearmanr(*pair).statistic for pair in zip(agreement_GR.T, retained_GR.T, strict=True)
    ]
    yield f"| correlation | {' | '.join(f'{value:.2f}' for value in across)} |"


STEPS = {
    "tokens": token_tables,
    "items": item_table,
    "agreement": agreement_table,
    "collections": collection_table,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = jobs.parser(__doc__)
    parser.add_argument("step", choices=STEPS, help="what to print")
    parser.add_argument("output", metavar="OUTPUT", help="output of an evaluation, or a spec")
    args = parser.parse(arguments)
    for line in STEPS[args.step](Path(args.output)):
        print(line, flush=True)


if __name__ == "__main__":
    jobs.run(main)

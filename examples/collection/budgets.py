"""Budgets by the number of tokens, and recommendations, from evaluations of a slice.

    python -m examples.collection.budgets tokens PROVE
    python -m examples.collection.budgets items PROVE
    python -m examples.collection.budgets agreement PROVE
    python -m examples.collection.budgets regret CHOOSE PROVE

CHOOSE and PROVE are outputs of `maxray evaluate examples/collection/evaluate.yaml`.

`tokens` prints what an item of n tokens loses, and what other budgets of the same total size gain.
An item whose budget is k has the score that it has in the ranking with k vectors, so that nothing
is compressed or searched. The rankings have 100 items: the result is exact for a query if its tenth
score is at least as high as the last score of each ranking.

`items` prints how well properties of the stored vectors of the relevant item predict the loss.

`agreement` prints how well the overlap with the results of uncompressed vectors predicts the loss.

`regret` prints how far recommendations by the judged queries of one half miss the required quality
on the other half. A case is a group of queries and a required fraction of the uncompressed quality.

Shapes: Q queries, B items, R representations.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
import yaml
from scipy.stats import spearmanr

import jobs
from pipeline.config import SpecError
from pipeline.eval.diagnostics import gini
from pipeline.eval.metrics import per_query, read_run
from pipeline.eval.significance import bootstrap_interval, ratio_intervals
from pipeline.eval.topics import read_qrels
from pipeline.index.reader import IndexReader
from pipeline.tokens import flat_from_arrow, normalise

MEASURE, DEPTH = "nDCG@10", 10
LEVELS, METHODS = (1, 4, 8, 16, 32), ("hpool", "kcenter")
#: Exponents p of budgets theta n^p of an item of n tokens.
POWERS = {"n^1/4": 0.25, "square root": 0.5, "fraction": 1.0, "1 / square root": -0.5}
#: Numbers of tokens that bound the groups of the first table.
BOUNDS = (0, 40, 80, 160, 1 << 30)

#: Required fractions of quality, and confidence levels of the bound; 0 is the mean.
REQUIRED, SHARES = (0.9, 0.95, 0.98), (0.0, 0.8, 0.95)
#: Minimum number of queries of a group in each half.
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
    full_Q = values(read("full"))
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
    values = _values(output)

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


def regret_table(chosen: Path, proved: Path) -> Iterator[str]:
    """Yields the lines of the table of recommendations by judged queries.

    The smallest representation is recommended whose lower bound of the retained quality is
    sufficient, or else the uncompressed vectors.
    """
    groups = _groups(chosen)
    halves = [_values(folder) for folder in (chosen, proved)]
    with (proved / "table.csv").open() as file:
        sizes = {row["row"]: float(row["vector_bytes"]) for row in csv.DictReader(file)}
    names = sorted(halves[0].keys() & halves[1].keys() - {"bm25"}, key=lambda name: -sizes[name])
    sizes_R = np.array([sizes[name] for name in names])  # the first one is that of `full`
    pairs = []
    for ids in groups.values():
        both = [
            np.array([[v for q, v in half[name].items() if q in ids] for name in names])
            for half in halves
        ]
        if min(values_RQ.shape[1] for values_RQ in both) >= MIN_QUERIES:
            pairs.append(both)
    yield f"{len(pairs)} groups of queries, {len(pairs) * len(REQUIRED)} cases"
    yield "| confidence | measured on | regret <= 1 | largest | size / best |"
    yield "|---|---|---|---|---|"
    for share in SHARES:
        for title, order in (("prove", (0, 1)), ("choose", (1, 0))):
            rows = np.array(
                [
                    row
                    for both in pairs
                    for row in _regrets(both[order[0]], both[order[1]], sizes_R, share)
                ]
            )
            ratio = np.exp(np.log(rows[:, 1]).mean())
            yield (
                f"| {100 * share:.0f} % | {title} | {100 * (rows[:, 0] <= 1).mean():.0f} % | "
                f"{rows[:, 0].max():.1f} | {ratio:.1f} |"
            )


def _values(folder: Path) -> dict[str, dict[str, float]]:
    values: dict[str, dict[str, float]] = defaultdict(dict)
    with (folder / "per_query.csv").open() as file:
        for row in csv.DictReader(file):
            values[row["run"]][row["query_id"]] = float(row[MEASURE])
    return values


def _groups(folder: Path) -> dict[str, set[str]]:
    """Returns the ids of the queries by kind, language, what BM25 answers, and pairs of these."""
    path = yaml.safe_load((folder / "spec.yaml").read_text())["benchmark"]["path"]
    groups: dict[str, set[str]] = defaultdict(set)
    with open(f"{path}/queries.jsonl", encoding="utf-8") as file:
        for row in map(json.loads, file):
            kind, language, bm25 = row["kind"], row["language"], row["bm25"]
            for group in ("all", kind, language, bm25, f"{kind} {language}", f"{kind} {bm25}"):
                groups[group].add(row["_id"])
    return groups


def agreement_table(proved: Path) -> Iterator[str]:
    """Yields a table of how the agreement with uncompressed results predicts the retained quality.

    The agreement of a query is the share of the ten best items by uncompressed vectors that are
    also found with K vectors. It needs queries, but no judgments.
    """
    values = _values(proved)
    names = [f"{m}_{k}" for m in METHODS for k in LEVELS if (m, k) != ("kcenter", 1)]
    best: dict[str, dict[str, set[str]]] = {}
    for name in ("full", *names):
        run = read_run(str(proved / "runs" / f"{name}.maxsim.trec"))
        best[name] = {q: set(sorted(r, key=r.__getitem__)[-DEPTH:]) for q, r in run.items()}
    agreement: list[np.ndarray] = []
    retained: list[np.ndarray] = []
    for ids in _groups(proved).values():
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


def _regrets(
    chosen_RQ: np.ndarray, proved_RQ: np.ndarray, sizes_R: np.ndarray, share: float
) -> Iterator[tuple[float, float]]:
    """Yields the missing points of retained quality, and the size relative to the best one.

    The first representation is the uncompressed one. Without a confidence `share`, its lower bound
    is the mean.
    """
    means_R = chosen_RQ.mean(axis=1) / chosen_RQ[0].mean()
    low_R = ratio_intervals(chosen_RQ, chosen_RQ[0], share)[:, 0] if share else means_R
    truth_R = proved_RQ.mean(axis=1) / proved_RQ[0].mean()
    for required in REQUIRED:
        found, best = (
            min([0, *np.flatnonzero(x_R >= required)], key=lambda row: sizes_R[row])
            for x_R in (low_R, truth_R)
        )
        yield 100 * max(0.0, required - truth_R[found]), sizes_R[found] / sizes_R[best]


STEPS: dict[str, Callable[..., Iterator[str]]] = {
    "tokens": token_tables,
    "items": item_table,
    "agreement": agreement_table,
    "regret": regret_table,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = jobs.parser(__doc__)
    parser.add_argument("step", choices=STEPS, help="what to print")
    parser.add_argument("outputs", nargs="+", metavar="OUTPUT", help="output of an evaluation")
    args = parser.parse(arguments)
    folders = [Path(output) for output in args.outputs]
    if len(folders) != (2 if args.step == "regret" else 1):
        parser.error("regret needs the outputs of two evaluations, other steps one")
    for folder in folders:
        if not (folder / "per_query.csv").exists():
            rule = "the output folder of `maxray evaluate examples/collection/evaluate.yaml`"
            raise SpecError("OUTPUT", str(folder), rule, "has no per_query.csv")
    for line in STEPS[args.step](*folders):
        print(line, flush=True)


if __name__ == "__main__":
    jobs.run(main)

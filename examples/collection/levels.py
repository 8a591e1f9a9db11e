"""Budgets by the number of tokens, evaluated with the rankings of fixed budgets.

    python -m examples.collection.levels OUTPUT

OUTPUT is that of `maxray evaluate examples/collection/evaluate.yaml`. An item whose budget is k has
the score that it has in the ranking with k vectors, so that nothing is compressed or searched. The
rankings have 100 items: the result is exact for a query if its tenth score is at least as high as
the last score of each ranking. The first table shows what an item of n tokens loses, the second one
what is gained by other budgets of the same total size.

Shapes: B items.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import yaml
from scipy.stats import spearmanr

import jobs
from pipeline.config import SpecError
from pipeline.eval.metrics import per_query, read_run
from pipeline.eval.significance import bootstrap_interval
from pipeline.eval.topics import read_qrels
from pipeline.index.reader import IndexReader

MEASURE, DEPTH = "nDCG@10", 10
LEVELS, METHODS = (1, 4, 8, 16, 32), ("hpool", "kcenter")
#: Exponents p of budgets theta n^p of an item of n tokens.
POWERS = {"n^1/4": 0.25, "square root": 0.5, "fraction": 1.0, "1 / square root": -0.5}
#: Numbers of tokens that bound the groups of the first table.
BOUNDS = (0, 40, 80, 160, 1 << 30)

Run = Mapping[str, Mapping[str, float]]


def levels(lengths_B: np.ndarray, power: float, num_vectors: int, ratio: int) -> np.ndarray:
    """Returns the budgets (B,) from K / ratio to ratio K whose total is that of K per item.

    A budget is the level nearest to theta n^power, in logarithms. theta is the largest number whose
    total is not above that of K.

    >>> levels(np.array([9, 100, 100, 400]), 0.5, 8, 2).tolist()
    [4, 8, 8, 8]
    """
    allowed = [k for k in LEVELS if num_vectors <= k * ratio and k <= num_vectors * ratio]
    allowed = np.array(allowed if len(allowed) > 2 else [1, *allowed])
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
    used, found, num_exact = set(budgets.values()), {}, 0
    for query in runs[next(iter(used))]:
        scores, bound = {}, -np.inf
        for level in used:
            ranking = runs[level][query]
            scores |= {item: s for item, s in ranking.items() if budgets[item] == level}
            bound = max(bound, min(ranking.values()))
        best = sorted(scores.items(), key=lambda pair: -pair[1])[:DEPTH]
        num_exact += len(best) == DEPTH and best[-1][1] >= bound
        found[query] = dict(best)
    return found, num_exact / len(found)


def tables(output: Path) -> Iterator[str]:
    """Yields the lines of both tables."""
    if not (output / "spec.yaml").exists():
        rule = "the output folder of `maxray evaluate examples/collection/evaluate.yaml`"
        raise SpecError("OUTPUT", str(output), rule, "has no spec.yaml")
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
            cells = [_interval(lost_Q[is_in]) for is_in in groups]
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


def _interval(values_Q: np.ndarray) -> str:
    low, high = bootstrap_interval(values_Q)
    return f"{values_Q.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = jobs.parser(__doc__)
    parser.add_argument("output", metavar="OUTPUT", help="output folder of the evaluation")
    for line in tables(Path(parser.parse(arguments).output)):
        print(line, flush=True)


if __name__ == "__main__":
    jobs.run(main)

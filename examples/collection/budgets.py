"""Budgets by the number of tokens, and diagnostics that need no judgments.

    python -m examples.collection.budgets OUT rules NAME=INDEX,BENCHMARK ...
    python -m examples.collection.budgets OUT options NAME=INDEX,BENCHMARK ...
    python -m examples.collection.budgets OUT cases NAME=INDEX,BENCHMARK ... --variants plain ...
    python -m examples.collection.budgets OUT table

`rules` compares budgets that depend on the item with one number of vectors, at equal total bytes.
`options` compares options of `kcenter`. `cases` measures candidates and their diagnostics; `table`
shows how the diagnostics predict the loss. Queries have the halves *choose* and *prove*: the splits
of a benchmark, or else the hashes of the query ids. The uncompressed vectors of an index are
compressed and searched in memory.

Shapes: Q queries, B items, T vectors of all items, N tokens per item, M tokens per query.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr

import jobs
from pipeline.compression import Budgeted
from pipeline.compression.kcenter import covering_radii
from pipeline.config import SpecError
from pipeline.eval.recommend.queries import QuerySet, pseudo_queries
from pipeline.eval.recommend.sample import Sample, draw_sample
from pipeline.eval.significance import bootstrap_interval, ratio_intervals
from pipeline.eval.topics import read_qrels
from pipeline.index.reader import IndexReader
from pipeline.registry import COMPRESSORS
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors
from pipeline.search.searcher import Searcher
from pipeline.tokens import flat_rows, normalise

HALVES = ("choose", "prove")
VARIANTS = ("plain", "cosine", "axes")
METHODS, BUDGETS = ("hpool", "kcenter"), (1, 4, 8, 16, 32)
#: Required fractions of quality, and share of the cases whose regret must be at most one point.
REQUIRED, TARGET = (0.9, 0.95, 0.98), 0.95
#: Minimum number of queries of each half of a kind or language.
MIN_QUERIES = 50
#: Numbers of random items of a collection, and of those that diagnostics are computed from.
NUM_ITEMS, NUM_SAMPLED = 3000, 400
#: Noise and number of tokens of pseudo-queries.
PSEUDO = {"12 tokens, noise 1": (1.0, 12), "noise 2": (2.0, 12), "noise 4": (4.0, 12)}


class Collection(NamedTuple):
    """Items and queries of a collection.

    Attributes:
        queries: Unit vectors (M, D) of each query.
        grades: Grades by item id of each query.
        halves: "choose" or "prove" of each query.
        groups: Kind and language of each query, if they are known.
    """

    name: str
    items: Sample
    small: Sample
    queries: list[torch.Tensor]
    grades: list[dict[str, int]]
    halves: np.ndarray
    groups: list[tuple[str, ...]]


def read(argument: str, with_small: bool = True) -> Collection:
    """Reads the judged items and others from an index, and encodes the queries."""
    name, _, rest = argument.partition("=")
    uri, _, folder = rest.partition(",")
    if not folder:
        raise SpecError("COLLECTION", argument, "NAME=INDEX,BENCHMARK")
    lines = (Path(folder) / "queries.jsonl").read_text("utf-8").splitlines()
    rows = {row["_id"]: row for row in map(json.loads, lines)}
    paths = [Path(folder) / "qrels" / f"{half}.tsv" for half in HALVES]
    is_split = all(path.exists() for path in paths)
    paths = paths if is_split else [Path(folder) / "qrels" / "test.tsv"]
    judged = {path.stem: read_qrels(str(path), "qrels") for path in paths}
    index = IndexReader(uri)
    info = index.representation("full")
    documents = {item for qrels in judged.values() for grades in qrels.values() for item in grades}
    items = draw_sample(index, info, size=NUM_ITEMS, seed=0, judged=documents)
    small = draw_sample(index, info, size=NUM_SAMPLED, seed=0) if with_small else items
    known = set(items.ids)
    ids, grades, halves = [], [], []
    for split, qrels in judged.items():
        for query_id, by_item in qrels.items():
            if query_id in rows and any(g > 0 for i, g in by_item.items() if i in known):
                ids.append(query_id)
                grades.append({i: g for i, g in by_item.items() if i in known})
                number = hashlib.sha256(query_id.encode()).digest()[0] % 2
                halves.append(split if is_split else HALVES[number])
    queries = Searcher(index).queries([rows[query_id]["text"] for query_id in ids], "full").tokens
    groups = [tuple(rows[i][f] for f in ("kind", "language") if f in rows[i]) for i in ids]
    tokens = [query_MD.float() for query_MD in queries]
    return Collection(name, items, small, tokens, grades, np.array(halves), groups)


def varied(collection: Collection, variant: str) -> Collection:
    """Returns the collection with transformed vectors.

    - plain: As they are.
    - cosine: With a direction added such that the mean cosine is 0.6.
    - axes: Projected onto their 64 principal axes.
    """
    if variant == "plain":
        return collection
    vectors_TD = torch.cat([b.vectors[b.mask][::7].float() for b in collection.items.batches])
    dim = vectors_TD.shape[1]
    if variant == "cosine":
        mean = float(vectors_TD.double().mean(dim=0).square().sum())
        generator = torch.Generator().manual_seed(0)
        direction_D = normalise(torch.randn(dim, generator=generator))
        added_D = (max(0.6 - mean, 0) / 0.4) ** 0.5 * direction_D
        function: Callable[[torch.Tensor], torch.Tensor] = lambda x: normalise(x.float() + added_D)  # noqa: E731
    else:
        axes_DD = torch.linalg.svd(vectors_TD, full_matrices=False)[2]
        function = lambda x: normalise(x.float() @ axes_DD[:64].T)  # noqa: E731

    def changed(sample: Sample) -> Sample:
        batches = [
            replace(b, vectors=function(b.vectors).to(b.vectors.dtype), normalised=True)
            for b in sample.batches
        ]
        return Sample(sample.ids, batches, sample.num_items)

    items = changed(collection.items)
    small = items if collection.small is collection.items else changed(collection.small)
    return collection._replace(
        items=items, small=small, queries=[function(q) for q in collection.queries]
    )


def packed(
    sample: Sample, spec: dict[str, Any], budgets: Sequence[torch.Tensor] | None = None
) -> PackedVectors:
    """Compresses a sample, with the budgets (B,) of the items of each batch if they are given."""
    compressor = COMPRESSORS.build(COMPRESSORS.resolve(spec))
    parts = []
    for number, batch in enumerate(sample.batches):
        batch = replace(batch, vectors=batch.vectors.float())
        if budgets is None:
            result = compressor.compress(batch)
        else:
            assert isinstance(compressor, Budgeted)
            result = compressor.reduce(batch, budgets[number])
        parts.append(flat_rows(result.vectors, result.mask))
    lengths_B = torch.from_numpy(np.concatenate([lengths for _, lengths in parts]))
    return PackedVectors.from_values(torch.cat([flat for flat, _ in parts]).float(), lengths_B)


def quality(collection: Collection, vectors: PackedVectors, rows: np.ndarray) -> np.ndarray:
    """Returns nDCG@10 of some queries."""
    queries = QuerySet(
        [collection.queries[row] for row in rows], [collection.grades[row] for row in rows], True
    )
    return queries.measure(maxsim(queries.tokens, vectors), collection.items.ids)


# Budgets that depend on the item


def matched(budgets: Callable[[float], torch.Tensor], total: int) -> torch.Tensor:
    """Returns the largest budgets (B,) whose sum is at most `total`; they increase with theta."""
    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if int(budgets(middle).sum()) <= total else (low, middle)
    return budgets(low)


class Rules:
    """Budgets with the total of K vectors per item, from K / 4 to 4 K."""

    def __init__(self, sample: Sample, num_vectors: int):
        self.sample, self.num_vectors = sample, num_vectors
        self.lengths_B = torch.cat([batch.lengths for batch in sample.batches])

    @cached_property
    def radii_BK(self) -> torch.Tensor:
        """Covering radii of the first K centres."""
        size = 4 * self.num_vectors
        parts = [
            covering_radii(replace(batch, vectors=batch.vectors.float()), size)
            for batch in self.sample.batches
        ]
        padding = [(0, size - part.shape[1]) for part in parts]
        return torch.cat(
            [
                torch.nn.functional.pad(part, pad, value=-1.0)
                for part, pad in zip(parts, padding, strict=True)
            ]
        )

    def budgets(self, rule: str) -> list[torch.Tensor]:
        """Returns the budgets of the items of each batch.

        "fixed", "power P" for theta n^P of n tokens (0.5: square root, 1: fraction), or "radius".
        """
        lengths_B, size = self.lengths_B, self.num_vectors

        def bounded(budgets_B: torch.Tensor) -> torch.Tensor:
            return torch.minimum(budgets_B.clamp(max(1, size // 4), 4 * size), lengths_B)

        total = int(lengths_B.clamp(max=size).sum())
        if rule == "fixed":
            found_B = lengths_B.clamp(max=size)
        elif rule == "radius":
            found_B = matched(lambda x: bounded(1 + (self.radii_BK > 1 / x).sum(dim=1)), total)
        else:
            powers_B = lengths_B.double() ** float(rule.removeprefix("power "))
            found_B = matched(lambda x: bounded((x * powers_B).round().long()), total)
        return list(found_B.split([len(batch) for batch in self.sample.batches]))


RULES = ("fixed", "power 0.25", "power 0.5", "power 1", "radius")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"oversampling {n:g}": {"oversampling": n} for n in (1, 2, 3)},
    **{f"start {name}": {"start": name} for name in ("first", "outlier")},
    "progressive": {"output": "progressive"},
}


def compared(
    collection: Collection, half: str, kind: str, methods: Sequence[str], budgets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `rules` or `options`: nDCG@10, and the gain over the first one."""
    rows = np.flatnonzero(collection.halves == half)
    for size in budgets:
        rules = Rules(collection.items, size)
        for method in methods if kind == "rules" else ["kcenter"]:
            first_Q = None
            for name in RULES if kind == "rules" else OPTIONS:
                spec = {"name": method, "num_vectors": size, **OPTIONS.get(name, {})}
                numbers = rules.budgets(name) if kind == "rules" else None
                vectors = packed(collection.items, spec, numbers)
                values_Q = quality(collection, vectors, rows)
                first_Q = values_Q if first_Q is None else first_Q
                yield {
                    "collection": collection.name,
                    "half": half,
                    "method": method,
                    "K": size,
                    "rule": name,
                    "vectors": vectors.num_vectors / len(vectors),
                    "ndcg": float(values_Q.mean()),
                    "gain": float((values_Q - first_Q).mean()),
                    "interval": bootstrap_interval(values_Q - first_Q),
                    "queries": len(rows),
                }


# Diagnostics


def overlap(first_QB: torch.Tensor, second_QB: torch.Tensor, depth: int = 10) -> float:
    """Returns the share of the best items of the first scores among those of the second."""
    first, second = (x.topk(min(depth, x.shape[1])).indices for x in (first_QB, second_QB))
    return float((first[:, :, None] == second[:, None]).any(dim=2).float().mean())


def diagnose(
    full: PackedVectors, vectors: PackedVectors, sets: dict[str, QuerySet], ids: Sequence[str]
) -> dict[str, float]:
    """Computes diagnostics of a sample; 0 means no loss, except for `gini`."""
    distances, radii, within, total, unevenness = [], [], 0.0, 0.0, []
    mean_D = torch.stack([full.item(row).mean(dim=0) for row in range(len(full))]).mean(dim=0)
    for row in range(0, len(full), max(1, len(full) // 100)):
        tokens_ND, vectors_KD = normalise(full.item(row)), normalise(vectors.item(row))
        best_N, group_N = (tokens_ND @ vectors_KD.T).max(dim=1)
        sizes_K = torch.bincount(group_N, minlength=len(vectors_KD))
        sums_KD = torch.zeros_like(vectors_KD).index_add_(0, group_N, tokens_ND)
        means_KD = sums_KD / sizes_K.clamp_min(1)[:, None]
        distances.append(float((1 - best_N).mean()))
        radii.append(float((1 - best_N).max()))
        within += float((tokens_ND - means_KD[group_N]).square().sum())
        total += float((tokens_ND - mean_D).square().sum())
        ordered_K, ranks_K = sizes_K.sort().values, torch.arange(1, len(sizes_K) + 1)
        weighted = 2 * float((ranks_K * ordered_K).sum()) / float(len(sizes_K) * sizes_K.sum())
        unevenness.append(weighted - (len(sizes_K) + 1) / len(sizes_K))
    found = {
        "mean distance": float(np.mean(distances)),
        "radius": float(np.mean(radii)),
        "unexplained variance": within / total,
        "gini": float(np.mean(unevenness)),
        "share of vectors": 1 - vectors.num_vectors / full.num_vectors,
    }
    for name, queries in sets.items():
        exact_QB, scores_QB = maxsim(queries.tokens, full), maxsim(queries.tokens, vectors)
        exact, value = (float(queries.measure(x, ids).mean()) for x in (exact_QB, scores_QB))
        found[f"pseudo-queries, {name}"] = 1 - value / exact
        found[f"overlap, {name}"] = 1 - overlap(exact_QB, scores_QB)
        found[f"exact, {name}"] = exact
    return found


def measured(collection: Collection, variant: str) -> dict[str, Any]:
    """Measures the values (Q,) of all queries and the diagnostics of each candidate.

    One diagnostic is computed from the queries without their judgments: the overlap of their
    results.
    """
    changed = varied(collection, variant)
    full, small = packed(changed.items, {"name": "none"}), packed(changed.small, {"name": "none"})
    sets = {
        name: pseudo_queries(changed.small, small, num_queries=300, noise=noise, seed=0)
        for name, (noise, _) in PSEUDO.items()
    }
    queries = QuerySet(changed.queries, changed.grades, True)
    exact_QB, ids = maxsim(queries.tokens, full), changed.items.ids
    candidates = {}
    for method, size in [(m, k) for m in METHODS for k in BUDGETS if (m, k) != ("kcenter", 1)]:
        spec = {"name": method, "num_vectors": size}
        vectors = packed(changed.items, spec)
        scores_QB = maxsim(queries.tokens, vectors)
        found = diagnose(small, packed(changed.small, spec), sets, changed.small.ids)
        found["overlap, queries"] = 1 - overlap(exact_QB, scores_QB)
        values_Q = queries.measure(scores_QB, ids)
        candidates[f"{method}_{size}"] = (vectors.num_vectors / len(vectors), values_Q, found)
    return {
        "name": f"{collection.name} {variant}",
        "vectors": full.num_vectors / len(full),
        "reference": queries.measure(exact_QB, ids),
        "halves": collection.halves,
        "groups": collection.groups,
        "candidates": candidates,
    }


class Case(NamedTuple):
    """Candidates of a collection and queries of one kind or language.

    Arrays have one value per candidate. The first candidate is the uncompressed vectors.

    Attributes:
        vectors: Vectors per item.
        reference: nDCG@10 of the uncompressed vectors on *prove*.
        chosen: Retained quality on *choose*.
        low: Lower bound of its 95 % interval.
        proved: Retained quality on *prove*.
        losses: Diagnostics by name; 0 for the uncompressed vectors.
    """

    name: str
    vectors: np.ndarray
    reference: float
    chosen: np.ndarray
    low: np.ndarray
    proved: np.ndarray
    losses: dict[str, np.ndarray]


def read_cases(folder: Path) -> list[Case]:
    """Reads the measurements, and divides them by the kind and the language of the queries."""
    cases = []
    for path in sorted(folder.glob("*.pickle")):
        found = pickle.loads(path.read_bytes())
        groups = found["groups"]
        is_in = {"": np.ones(len(groups), bool)}
        for value in sorted({value for group in groups for value in group}):
            is_in[f" {value}"] = np.array([value in group for group in groups])
        values_CQ = np.stack([found["reference"], *(c[1] for c in found["candidates"].values())])
        diagnostics = [diagnostics for _, _, diagnostics in found["candidates"].values()]
        losses = {name: np.array([0.0] + [d[name] for d in diagnostics]) for name in diagnostics[0]}
        vectors = np.array([found["vectors"], *(c[0] for c in found["candidates"].values())])
        for name, is_in_Q in is_in.items():
            halves = [values_CQ[:, is_in_Q & (found["halves"] == half)] for half in HALVES]
            if min(half.shape[1] for half in halves) < (MIN_QUERIES if name else 20):
                continue
            retained = [half.mean(axis=1) / half[0].mean() for half in halves]
            low = ratio_intervals(halves[0], halves[0][0])[:, 0]
            reference = float(halves[1][0].mean())
            title = found["name"] + name
            cases.append(Case(title, vectors, reference, retained[0], low, retained[1], losses))
    return cases


def smallest(case: Case, estimate: np.ndarray, retain: float) -> int:
    """Returns the smallest candidate whose estimate is sufficient; 0 is always sufficient."""
    sufficient = [0, *np.flatnonzero(estimate >= retain).tolist()]
    return min(sufficient, key=lambda i: (case.vectors[i], -estimate[i]))


def regrets(
    cases: Sequence[Case], estimates: Sequence[np.ndarray], half: str = "prove"
) -> np.ndarray:
    """Returns the points of nDCG@10 below the requirement, and the size relative to the best."""
    rows = []
    for case, estimate in zip(cases, estimates, strict=True):
        truth = case.proved if half == "prove" else case.chosen
        for retain in REQUIRED:
            found, best = smallest(case, estimate, retain), smallest(case, truth, retain)
            lost = max(0.0, retain - truth[found]) * case.reference * 100
            rows.append((lost, case.vectors[found] / case.vectors[best]))
    return np.array(rows)


def fitted_scale(cases: Sequence[Case], name: str) -> float:
    """Returns the smallest factor of a loss with which *choose* reaches the target, or inf."""
    for scale in np.geomspace(0.02, 60, 120):
        estimates = [1 - scale * case.losses[name] for case in cases]
        if (regrets(cases, estimates, "choose")[:, 0] <= 1).mean() >= TARGET:
            return float(scale)
    return float("inf")


def tables(folder: Path) -> Iterator[str]:
    """Yields a Markdown table of the diagnostics and of other estimates of the loss."""
    cases = read_cases(folder)
    yield f"{len(cases)} cases x {len(REQUIRED)} requirements"
    yield "| estimate | correlation | within a case | factor | regret <= 1 | size / best |"
    yield "|---|---|---|---|---|---|"
    estimates: dict[str, list[np.ndarray]] = {
        "judged queries of choose, lower bound": [case.low for case in cases],
        "judged queries of choose, mean": [case.chosen for case in cases],
        "32 vectors": [np.where(c.vectors > 16.5, 1.0, 0.0) for c in cases],
        "uncompressed": [np.zeros(len(c.vectors)) for c in cases],
    }
    for name in [n for n in cases[0].losses if not n.startswith("exact")]:
        pairs = [(case.losses[name][1:], 1 - case.proved[1:]) for case in cases]
        pooled = spearmanr(*(np.concatenate(x) for x in zip(*pairs, strict=True))).statistic
        within = np.nanmean([spearmanr(*pair).statistic for pair in pairs])
        scale = fitted_scale(cases, name)
        found = regrets(
            cases, [np.where(c.losses[name] > 0, 1 - scale * c.losses[name], 1.0) for c in cases]
        )
        yield f"| {name} | {pooled:.2f} | {within:.2f} | {scale:.2g} | {_cells(found)} |"
    for name, values in estimates.items():
        yield f"| {name} | | | | {_cells(regrets(cases, values))} |"


def _cells(rows: np.ndarray) -> str:
    share, ratio = (rows[:, 0] <= 1).mean(), np.exp(np.log(rows[:, 1]).mean())
    return f"{100 * share:.0f} % | {ratio:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one step and writes its results to a folder."""
    parser = jobs.parser(__doc__)
    parser.add_argument("out", metavar="OUT", help="output folder")
    parser.add_argument("step", choices=["rules", "options", "cases", "table"])
    parser.add_argument("collections", nargs="*", metavar="COLLECTION", help="NAME=INDEX,BENCHMARK")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["plain"])
    parser.add_argument("--half", choices=HALVES, default="choose", help="queries to compare")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--budgets", nargs="+", type=jobs.positive, default=[8, 16])
    args = parser.parse_args(arguments)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    if args.step == "table":
        print("\n".join(tables(folder)))
    for argument in args.collections:
        collection = read(argument, with_small=args.step == "cases")
        for variant in args.variants:
            if args.step == "cases":
                case = measured(collection, variant)
                (folder / f"{collection.name}-{variant}.pickle").write_bytes(pickle.dumps(case))
                print(case["name"], f"{case['reference'].mean():.3f}", flush=True)
                continue
            changed = varied(collection, variant)
            with (folder / f"{args.step}.jsonl").open("a") as file:
                for row in compared(changed, args.half, args.step, args.methods, args.budgets):
                    file.write(json.dumps(row | {"variant": variant}) + "\n")
                    low, high = (100 * x for x in row["interval"])
                    print(
                        f"{row['collection']} {variant} {row['half']} {row['method']} {row['K']} "
                        f"{row['rule']}: {row['ndcg']:.3f} {100 * row['gain']:+.1f} "
                        f"({low:+.1f} to {high:+.1f}) {row['vectors']:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    jobs.run(main)

"""Benchmark of the fused score against MaxSim on judged collections.

    python -m tests.bench fusion cranfield=out/fusion/cranfield,jobs/data/cranfield
    python -m tests.bench fusion NAME=INDEX,BENCHMARK --representations full hpool_32 --csv out.csv
    python -m tests.bench fusion --bm25-items 100000

Each index needs `bm25` (maxray add), and each benchmark is a folder in the format of BEIR. For
each representation, the benchmark compares settings of the fused score with MaxSim by nDCG@10 and a
paired randomisation test: fixed settings, and settings that are fitted to the other queries in
five-fold cross-validation.

--bm25-items measures the time and the size of BM25 over that many synthetic texts of 15 to 60 words
with Zipfian frequencies, for queries of 8 words.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import jobs
from pipeline.config import SpecError, parse
from tests.bench.harness import Bench, table

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.search.fusion import Fusion

#: Name of the row with settings that are fitted to the other queries.
FITTED = "fitted"
MEASURE = "nDCG@10"
#: Number of different words of the texts of BM25, and number of queries.
NUM_WORDS, NUM_QUERIES = 60_000, 200


class Comparison(NamedTuple):
    """Quality of a fusion on a collection.

    Attributes:
        quality: Mean metric.
        gain: Mean difference from MaxSim.
        low: Lower bound of the 95 % confidence interval of the gain.
        high: Upper bound.
    """

    collection: str
    representation: str
    fusion: str
    quality: float
    gain: float
    low: float
    high: float
    p: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("collections", nargs="*", metavar="NAME=INDEX,BENCHMARK")
    parser.add_argument("--bm25-items", type=jobs.positive, metavar="N", help="number of texts")
    parser.add_argument("--representations", nargs="+", default=["full"], metavar="NAME")
    parser.add_argument("--csv", type=Path, help="CSV file for the results")
    parser.add_argument("--figure", type=Path, help="PNG file for the plot")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    collections = [_collection(value) for value in args.collections]
    bench = Bench("fusion", arguments, args.out)
    rows: list[Comparison] = []
    for collection in collections:
        found = list(_compare(*collection, args.representations))
        rows += found
        figures = {"rows": [row._asdict() for row in found]}
        name = collection[0]
        bench.add(name, f"{name}: {MEASURE}, gain over MaxSim and p", figures, _table(found))
    if args.bm25_items:
        measured = _measure_bm25(args.bm25_items)
        text = table(["quantity", "value"], list(measured.items()))
        bench.add("bm25", f"BM25 over {args.bm25_items:,} texts", measured, text)
    if args.csv:
        _write_csv(args.csv, rows)
    if args.figure:
        _write_figure(args.figure, rows, args)


def _measure_bm25(num_items: int) -> dict[str, float]:
    from pipeline.search.candidates import MIN_CANDIDATES
    from pipeline.search.fusion import best_rows
    from pipeline.search.generators.bm25 import Bm25, Postings, encode, statistics

    rng = np.random.default_rng(0)
    words = np.array([f"w{number:x}q" for number in range(NUM_WORDS)])
    frequencies = 1 / np.arange(1, NUM_WORDS + 1)
    frequencies /= frequencies.sum()
    lengths = rng.integers(15, 60, num_items)
    tokens = words[rng.choice(NUM_WORDS, lengths.sum(), p=frequencies)]
    texts = [" ".join(part) for part in np.split(tokens, lengths.cumsum()[:-1])]
    start = time.process_time()
    codes = encode(texts)
    encode_s = time.process_time() - start
    generator = Bm25(Bm25.Spec(), statistics([codes]))
    start = time.process_time()
    postings = Postings(generator, [codes])
    open_s = time.process_time() - start
    scores_ms, candidates_ms = [], []
    for _ in range(NUM_QUERIES):
        query = " ".join(words[rng.choice(NUM_WORDS, 8, p=frequencies)])
        start = time.process_time()
        scores = postings.scores(query)
        scores_ms.append(1000 * (time.process_time() - start))
        scores[scores <= 0] = -np.inf
        best_rows(scores, None, MIN_CANDIDATES)
        candidates_ms.append(1000 * (time.process_time() - start))
    selection = f"with the selection of {MIN_CANDIDATES} candidates"
    return {
        "encoded texts/s": num_items / encode_s,
        "bytes per item": postings.item_bytes,
        "opening, s": open_s,
        "scores of all items, median ms": float(np.median(scores_ms)),
        "scores of all items, p95 ms": float(np.percentile(scores_ms, 95)),
        f"{selection}, median ms": float(np.median(candidates_ms)),
        f"{selection}, p95 ms": float(np.percentile(candidates_ms, 95)),
    }


def _collection(value: str) -> tuple[str, str, str]:
    name, equals, locations = value.partition("=")
    index, comma, benchmark = locations.rpartition(",")
    if not (equals and comma and name and index and benchmark):
        raise SpecError("collection", value, "of the form NAME=INDEX,BENCHMARK")
    return name, index, benchmark


def fusions() -> dict[str, Fusion]:
    """Returns the fixed settings by name: weights of MaxSim and the others, agreement."""
    from pipeline.search.fusion import Fusion, FusionWeights

    def settings(bm25: float, single: float = 0, agreement: int = 0) -> Fusion:
        weights = FusionWeights(bm25=bm25, single_vector=single)
        return Fusion(weights=weights, agreement=agreement)

    bm25_alone = FusionWeights(maxsim=0, bm25=1)
    return {
        "BM25 alone": Fusion(weights=bm25_alone, agreement=0),
        "sum 1:1": settings(1),
        "sum 1:0.2": settings(0.2),
        "sum 1:0.2, agreement 3 (default)": settings(0.2, agreement=3),
        "sum 1:0.5, agreement 3": settings(0.5, agreement=3),
        "sum 1:0.2, single vector 0.3, agreement 3": settings(0.2, 0.3, 3),
    }


def _compare(
    name: str, index: str, benchmark: str, representations: Sequence[str]
) -> Iterator[Comparison]:
    from pipeline.eval.fusion_fit import MAXSIM_ONLY, JudgedPools, fit_fusion
    from pipeline.eval.significance import bootstrap_interval, randomisation_p
    from pipeline.eval.spec import EvaluateSpec

    beir = {"name": "beir", "path": benchmark, "ignore_identical_ids": False}  # as published
    fields = {"index": index, "benchmark": beir, "output": "out"}
    for representation in representations:
        spec = parse(EvaluateSpec, {**fields, "representations": [representation]})
        judged = JudgedPools.read(spec)
        values = {fusion: judged.measure_fusion(f) for fusion, f in fusions().items()}
        values[FITTED] = fit_fusion(judged).fused
        maxsim_Q = judged.measure_fusion(MAXSIM_ONLY)
        gains_FQ = np.array([fused_Q - maxsim_Q for fused_Q in values.values()])
        for fusion, gain_Q, p in zip(values, gains_FQ, randomisation_p(gains_FQ), strict=True):
            low, high = bootstrap_interval(gain_Q)
            quality, gain = float(values[fusion].mean()), float(gain_Q.mean())
            yield Comparison(name, representation, fusion, quality, gain, low, high, float(p))


def _table(rows: Sequence[Comparison]) -> str:
    representations = list(dict.fromkeys(row.representation for row in rows))
    cells: dict[str, list[str]] = {}
    for row in rows:
        p = f"{row.p:.3f}" if row.p >= 0.001 else "<0.001"
        cells.setdefault(row.fusion, []).append(f"{row.quality:.4f} ({row.gain:+.4f}, {p})")
    return table(["fusion", *representations], [[name, *line] for name, line in cells.items()])


def _write_csv(path: Path, rows: Sequence[Comparison]) -> None:
    from pipeline.runtime.text import Table

    cells = [[f"{v:.4f}" if isinstance(v, float) else v for v in row] for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Table([Comparison._fields, *cells]).csv(), "utf-8")


def _write_figure(path: Path, rows: Sequence[Comparison], args: Namespace) -> None:
    """Plots the gains with their confidence intervals, one panel per collection."""
    from matplotlib.figure import Figure

    from pipeline.eval.report.plot import REFERENCE, STYLES, apply_style, to_png

    names = list(dict.fromkeys(row.collection for row in rows))
    fusions = list(dict.fromkeys(row.fusion for row in rows))
    figure = Figure(figsize=(3.2 * len(names) + 1, 0.32 * len(fusions) + 1.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        apply_style(panel)
        panel.axvline(0, color=REFERENCE, linewidth=1)
        for number, representation in enumerate(args.representations):
            points = [r for r in rows if (r.collection, r.representation) == (name, representation)]
            offset = 0.16 * (number - (len(args.representations) - 1) / 2)
            panel.errorbar(
                [row.gain for row in points],
                [-fusions.index(row.fusion) - offset for row in points],
                xerr=[[r.gain - r.low for r in points], [r.high - r.gain for r in points]],
                label=representation,
                markersize=4,
                linewidth=1,
                **{**STYLES[number], "linestyle": "none"},
            )
        panel.set_title(name, fontsize=10)
        panel.set_yticks([-i for i in range(len(fusions))], fusions)
        panel.set_xlabel(f"gain in {MEASURE}")
    panels[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_png(figure))

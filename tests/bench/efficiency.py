"""Benchmark of quality, time, bytes and memory of Maxray and other systems on judged queries.

    python -m tests.bench efficiency INDEX BENCHMARK --out FOLDER --python ENV/bin/python
    python -m tests.bench efficiency INDEX BENCHMARK --out FOLDER --systems fast-plaid --steps time

INDEX has MiniLM vectors of the BEIR collection in the folder BENCHMARK. All systems get the vectors
of one representation of it, or its single vectors or texts. Each of them runs in processes of its
own, which build its index (`build`), search all queries (`search`) and measure the time (`time`),
with a time limit. A system that fails has a row with the reason.

Peers of other versions of torch need an environment: `python -m venv ENV`, and in it `pip install
-r tests/bench/peers.txt`; PyLate is installed with `--no-deps`. --out keeps indexes and results;
the same command with other systems or steps adds to them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import jobs
from tests.bench.efficiency_run import STEPS
from tests.bench.efficiency_systems import SYSTEMS, Data, Exact, K
from tests.bench.harness import Bench, Repeats, recall, table

HEADER = (
    *("system", "search", f"nDCG@{K}", f"recall@{K}", "p50 ms", "CPU ms", "queries/s"),
    *("bytes/item", "build s (CPU)", "memory MB", "of the build"),
)
MAXRAY = "Maxray"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", metavar="INDEX", help="index of the collection")
    parser.add_argument("benchmark", metavar="BENCHMARK", help="folder in the layout of BEIR")
    parser.add_argument("--split", default="prove", help="judgments")
    parser.add_argument("--representation", default="hpool_32")
    parser.add_argument("--queries", type=jobs.positive, default=500, help="maximum number")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="processes that time")
    parser.add_argument("--limit", type=jobs.positive, default=3600, help="seconds per process")
    parser.add_argument("--python", default=sys.executable, help="interpreter for other systems")
    parser.add_argument("--out", type=Path, required=True, help="folder of indexes and results")
    parser.add_argument("--figure", type=Path, help="PNG file for plots")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    data = args.out / "data"
    if not (data / "judgments.json").exists():
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as pool:  # frees its memory
            pool.submit(prepare, args, data).result()
    for step in STEPS:
        for _ in range(args.repeats if step == "time" else 1):
            for name in args.systems:
                if step in args.steps:
                    run(args, name, step)
    bench = Bench("efficiency", arguments, args.out / "efficiency.json")
    judgments = json.loads((data / "judgments.json").read_text())
    results = {name: read(args.out / name) for name in SYSTEMS if (args.out / name).exists()}
    rows = [row for name in results for row in measures(args.out / name, results[name], judgments)]
    lengths = np.load(data / "lengths.npy")
    title = (
        f"{len(lengths):,} items of {lengths.mean():.1f} vectors, {len(judgments['qrels'])} queries"
    )
    bench.add("systems", title, {"results": results}, table(HEADER, cells(rows)))
    if args.figure:
        write_figure(args.figure, rows)


def prepare(args: Namespace, folder: Path) -> None:
    """Writes vectors, texts and judgments, and the exact results of the vectors."""
    from pipeline.config import parse
    from pipeline.registry import BENCHMARKS
    from pipeline.search.searcher import open_index

    spec = {"name": "beir", "path": args.benchmark, "split": args.split}
    judged = BENCHMARKS.load("beir")(parse(BENCHMARKS.load("beir").Spec, spec)).load()
    searcher = open_index(args.index)
    index, pooled = searcher.index, searcher.representation(args.representation).pooled_column
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, int] = {}
    texts, singles = [], []
    for batch in index.batches(["item_id", "text", *filter(None, [pooled])]):
        rows |= {item: len(rows) + n for n, item in enumerate(batch["item_id"].to_pylist())}
        texts += [text or "" for text in batch["text"].to_pylist()]
        if pooled:
            singles.append(np.stack(batch[pooled].to_numpy(zero_copy_only=False)))
    packed = searcher.scorer.vectors(args.representation)
    shape = packed.num_vectors, packed.dim
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float16, shape)
    first = 0
    for _, tokens, _ in index.tokens(args.representation):
        vectors[first : first + len(tokens)] = tokens
        first += len(tokens)
    vectors.flush()
    qrels = {
        query: {str(rows[item]): grade for item, grade in grades.items() if item in rows}
        for query, grades in judged.qrels.items()
    }
    ids = [query for query, grades in qrels.items() if any(grades.values())]
    ids = [ids[n] for n in np.linspace(0, len(ids), min(args.queries, len(ids)), False, dtype=int)]
    query_texts = [judged.queries[query] for query in ids]
    encoded = searcher.queries(query_texts, args.representation)
    none = np.empty((0, 0), np.float32)
    arrays = {
        "lengths": packed.lengths.numpy(),
        "singles": unit(np.concatenate(singles)) if pooled else none,
        "query_vectors": np.concatenate([tokens.numpy() for tokens in encoded.tokens]),
        "query_lengths": np.array([len(tokens) for tokens in encoded.tokens]),
        "query_singles": none if encoded.pooled is None else unit(encoded.pooled.numpy()),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "texts.json").write_text(json.dumps([texts, query_texts]))
    exact = Exact(Data(folder), "float16")
    best = [exact.best(number).tolist() for number in range(len(ids))]
    judgments = {"qrels": {query: qrels[query] for query in ids}, "exact": best}
    (folder / "judgments.json").write_text(json.dumps(judgments))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors of unit length in float32."""
    vectors = vectors.astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def run(args: Namespace, name: str, step: str) -> None:
    """Runs a step of a system in a process, and adds its measurements to those of the system."""
    folder: Path = args.out / name
    folder.mkdir(exist_ok=True)
    results = read(folder)
    if step == "build":
        results = {}
        shutil.rmtree(folder / "files", ignore_errors=True)
        (folder / "files").mkdir()
    if "error" in results:
        return
    python = sys.executable if name.startswith(MAXRAY) else args.python
    command = [python, "-m", "tests.bench.efficiency_run", step, name]
    command += [str(args.out / "data"), str(folder / "files")]
    environment = {**os.environ, "MAXRAY_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    print(shlex.join(command), flush=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, env=environment
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            results["error"] = f"{step}: {lines[-1]}"
            print(done.stderr[-2000:], flush=True)
        else:
            found = json.loads(done.stdout.splitlines()[-1])
            results[step] = [*results.get(step, []), found][-args.repeats :]
    except subprocess.TimeoutExpired:
        results["error"] = f"{step}: exceeds {args.limit:,} s"
    (folder / "results.json").write_text(json.dumps(results))


def read(folder: Path) -> dict[str, Any]:
    """Returns the measurements of a system by step, each a list of those of its processes."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measures(
    folder: Path, results: Mapping[str, Any], judgments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the rows of a system: its costs, and quality and time of each setting."""
    if "error" in results or "search" not in results:
        reason = results.get("error", "was not searched")
        return [{"system": folder.name, "search": reason, "ok": False}]
    from pipeline.eval.metrics import means, per_query

    built, queries = results["build"][-1], list(judgments["qrels"])
    version = built["version"].partition(" ")[2]
    rows = []
    with np.load(folder / "files/found.npz") as found:
        for label in found.files:
            ranked = [[row for row in hits if row >= 0] for hits in found[label].tolist()]
            run = {
                query: {str(row): -float(rank) for rank, row in enumerate(hits)}
                for query, hits in zip(queries, ranked, strict=True)
            }
            times = [timed[label] for timed in results.get("time", []) if label in timed]
            measure = f"nDCG@{K}"
            rows.append(
                {
                    "system": f"{folder.name} {version}".strip(),
                    "search": label,
                    "ok": True,
                    "ndcg": means(per_query(run, judgments["qrels"], [measure]))[measure],
                    "recall": recall(judgments["exact"], ranked, K),
                    "p50": Repeats(tuple(ms for ms, _, _ in times)) if times else None,
                    "cpu_ms": Repeats(tuple(ms for _, _, ms in times)) if times else None,
                    "rate": Repeats(tuple(rate for _, rate, _ in times)) if times else None,
                    "bytes": built["bytes"],
                    "seconds": built["seconds"],
                    "cpu": built["cpu_seconds"],
                    "memory": results["search"][-1]["memory"] / 1e6,
                    "build_memory": built["memory"] / 1e6,
                }
            )
    return rows


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the cells of the table. Costs of a system are in its first row."""
    lines: list[list[Any]] = []
    for number, row in enumerate(rows):
        is_first = number == 0 or rows[number - 1]["system"] != row["system"]
        line = [row["system"] if is_first else "", row["search"]]
        if row["ok"]:
            line += [f"{row['ndcg']:.3f}", f"{row['recall']:.3f}"]
            line += [str(row[name] or "") for name in ("p50", "cpu_ms", "rate")]
        if row["ok"] and is_first:
            line += [f"{row['bytes']:,.0f}", f"{row['seconds']:.0f} ({row['cpu']:.0f})"]
            line += [f"{row['memory']:,.0f}", f"{row['build_memory']:,.0f}"]
        lines.append(line + [""] * (len(HEADER) - len(line)))
    return lines


def write_figure(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plots quality against bytes, and recall against time."""
    from matplotlib.figure import Figure

    from pipeline.eval.report.plot import STYLES, apply_style, to_png

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    measured = [row for row in rows if row["ok"]]
    for number, name in enumerate(dict.fromkeys(row["system"] for row in measured)):
        settings = [row for row in measured if row["system"] == name]
        fill = "full" if number < len(STYLES) else "none"  # tells the others apart
        style = STYLES[number % len(STYLES)] | {"fillstyle": fill}
        best = max(settings, key=lambda row: row["ndcg"])
        panels[0].plot(best["bytes"], best["ndcg"], label=name, **style | {"linestyle": "none"})
        timed = sorted((row["p50"].median, row["recall"]) for row in settings if row["p50"])
        if timed:
            panels[1].plot(*zip(*timed, strict=True), **style)
    panels[0].set(xscale="log", xlabel="bytes per item", ylabel=f"nDCG@{K}")
    panels[1].set(xscale="log", xlabel="p50 latency, ms", ylabel=f"recall@{K} of exact MaxSim")
    for panel in panels:
        apply_style(panel)
    figure.legend(loc="outside right upper", fontsize="small")
    path.write_bytes(to_png(figure))

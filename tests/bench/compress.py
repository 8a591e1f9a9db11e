"""Benchmark of compressors: time per document, memory, and share of the index job.

    python -m tests.bench compress
    python -m tests.bench compress --only methods --methods samer hpool --out figures.json
    python -m tests.bench compress --only methods --device cuda
    python -m tests.bench compress --only index --items 256

`methods` compresses random unit vectors with boxes. `index` encodes shipped abstracts once and runs
every method on them in the stage of the index job, in one process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS
from tests.bench.harness import Bench, Repeats, run_apart, table

CRANFIELD = Path(jobs.__file__).parent / "data/cranfield"
#: Methods based on Ward linkage or k-means, which `index` omits.
SLOW = ("adaptive", "cluster", "hpool")
#: Methods that need a trained encoder or trained weights, which `index` omits as well.
LEARNED = ("agc", "memtok", "seqresize")
#: Variants of methods with a different running time.
READINGS = (
    "hpool,linkage=rows",
    "hpool,linkage=condensed",
    "kcenter,oversampling=1",
    "kcenter,output=progressive",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    names = sorted([*COMPRESSORS.names(), *READINGS])
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=names,
        metavar="NAME",
        help="compressors, with settings as in hpool,linkage=rows (default: all)",
    )
    parser.add_argument("--batch", type=jobs.positive, nargs="+", default=[1, 256], metavar="SIZE")
    parser.add_argument("--tokens", type=jobs.positive, default=1030, help="tokens per document, N")
    parser.add_argument("--dim", type=jobs.positive, default=128, help="dimensions, D")
    parser.add_argument("--vectors", type=jobs.positive, default=64, help="vectors per document, K")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of `methods`"
    )
    parser.add_argument(
        "--seconds", type=jobs.positive, default=20, help="time limit per method and batch size"
    )
    parser.add_argument(
        "--items", type=jobs.positive, default=256, help="number of abstracts for `index`"
    )
    parser.add_argument("--repeats", type=jobs.positive, default=5, help="repeats per measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpecError("device", "cuda", "cpu", "is not available")
    for method in args.methods:
        COMPRESSORS.load(method.partition(",")[0])  # unknown names fail before any work
    bench = Bench("compress", arguments, args.out)
    for name, figure in FIGURES.items():
        if not args.only or name in args.only:
            figure(bench, args)


def methods(bench: Bench, args: Any) -> None:
    """Measures each method in a separate process. Also measures its lower bound, if it has one."""
    unit, per_second = ("us", 1e6) if args.device == "cuda" else ("ms", 1e3)
    sizes = {"num_tokens": args.tokens, "dim": args.dim, "num_vectors": args.vectors}
    protocol = {"batches": args.batch, "repeats": args.repeats, "seconds": args.seconds}
    rows, figures = [], {}
    for name in args.methods:
        fields = {"name": name, "device": args.device, **protocol, **sizes}
        run = run_apart("tests.bench.compress_run", json.dumps(fields))
        figures[name] = run
        if "problem" in run:
            rows.append([name, *["-"] * 6, run["problem"]])
            continue
        for batch in run["batches"]:
            times, cpu_times = (
                Repeats(tuple(per_second * seconds for seconds in batch[side]))
                for side in ("seconds", "cpu_seconds")
            )
            compared: tuple[Repeats | str, Repeats | str] = "-", "-"
            if "bare" in batch:
                bare = Repeats(tuple(per_second * seconds for seconds in batch["bare"]))
                batch["ratio"] = times.over(bare)
                compared = bare, batch["ratio"]
            memory = f"{batch['peak_bytes'] / 2**20:,.0f}"
            rows.append([name, batch["size"], times, cpu_times, *compared, memory, ""])
    memory = "GPU MiB" if args.device == "cuda" else "process MiB"
    columns = [f"{unit}/document", f"CPU {unit}/document", f"bare, {unit}/document"]
    header = ["method", "batch", *columns, "ratio", memory, ""]
    title = (
        f"N = {args.tokens:,} tokens of D = {args.dim} to K = {args.vectors} vectors on"
        f" {args.device}"
    )
    if args.device == "cpu":
        before = [run["before_bytes"] for run in figures.values() if "before_bytes" in run]
        least = min(before, default=0) / 2**20
        title += f"; a process uses {least:,.0f} MiB before the first document"
    bench.add("methods", title, {"methods": figures}, table(header, rows))


def index(bench: Bench, args: Any) -> None:
    """Measures the cost of all methods in the stage of the index job, relative to encoding."""
    from tests.bench.compress_index import encode_and_compress

    named = dict.fromkeys(method.partition(",")[0] for method in args.methods)
    names = [name for name in named if name not in (*SLOW, *LEARNED)]
    run = encode_and_compress(CRANFIELD, args.items, names, args.repeats)
    seconds = {name: Repeats(tuple(taken)) for name, taken in run["seconds"].items()}
    rounds = zip(*(run["seconds"][name] for name in seconds), strict=True)
    share = Repeats(
        tuple((tapped + compression) / plain - 1 for plain, tapped, compression in rounds)
    )
    rows = [[name, taken] for name, taken in seconds.items()]
    rows.append(["**attention and methods, in encodes**", f"**{share}**"])
    left_out = sorted(set(named) - set(names))
    title = (
        f"MiniLM on {run['items']:,} Cranfield abstracts, then {', '.join(run['methods'])} at"
        f" K = {run['num_vectors']}"
    )
    if left_out:
        title += f"; left out: {', '.join(left_out)}"
    figures = {**seconds, "share": share, "methods": run["methods"], "left_out": left_out}
    bench.add("index", title, figures, table(["", "seconds"], rows))


FIGURES = {"methods": methods, "index": index}

"""Benchmark of exact search on a GPU, in process and by Ray Serve over HTTP.

    python -m tests.bench serve_gpu
    python -m tests.bench serve_gpu --items 200000 --only process --out figures.json

The index has 32 random int8 vectors of 128 dimensions per item, which the GPU holds. Queries have
32 tokens; an encoder without a model replaces that of the index. `process` searches in this
process, one query after another and in batches of 32, and compares the hits of one query with those
of the CPU. `http` sends searches from another process to a server on this machine.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jobs
from jobs.serve import set_ray_serve_env
from pipeline.config import SpecError, parse
from pipeline.registry import ENCODERS
from pipeline.search.searcher import open_index
from pipeline.tokens import normalise
from tests.bench.harness import Bench, run_apart, table
from tests.bench.maxsim_index import COLUMN, write_index
from tests.bench.serve import Load
from tests.tiny import SLEEPING

NUM_VECTORS, DIM, QUERY_TOKENS, K = 32, 128, 32, 10
ENCODER = {
    "seconds": 0.0,
    "num_tokens": NUM_VECTORS,
    "dim": DIM,
}
CLIENTS = (1, 8, 32)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--items", type=jobs.positive, default=1_000_000)
    parser.add_argument("--seconds", type=jobs.positive, default=10, help="duration of each load")
    parser.add_argument("--repeats", type=jobs.positive, default=50, help="searches per size")
    parser.add_argument("--port", type=jobs.positive, default=8766)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    if args.device != "cpu" and not torch.cuda.is_available():
        raise SpecError("device", args.device, "a CUDA device", "is not available")
    bench = Bench("serve_gpu", arguments, args.out)
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        os.environ["MAXRAY_CACHE"] = f"{folder}/cache"
        index = f"{folder}/index"
        started = time.perf_counter()
        spec = parse(ENCODERS.load(SLEEPING).Spec, ENCODER)
        write_index(index, args.items, NUM_VECTORS, DIM, spec)
        print(f"index     written in {time.perf_counter() - started:.0f} s", flush=True)
        for name in args.only:
            FIGURES[name](bench, index, args)


def process(bench: Bench, index: str, args: Any) -> None:
    """Measures searches in this process."""
    started = time.perf_counter()
    searcher = open_index(index, device=args.device)
    searcher.packed(COLUMN)
    opened = time.perf_counter() - started
    generator = torch.Generator().manual_seed(1)
    shape = (32, QUERY_TOKENS, DIM)
    queries = [query.numpy() for query in normalise(torch.randn(shape, generator=generator))]

    def search(number: int) -> float:
        start = time.perf_counter()
        searcher.rank(queries[:number], COLUMN, k=K)
        return time.perf_counter() - start

    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    for number in (1, 32):
        search(number)  # compiles kernels
        seconds = [search(number) for _ in range(args.repeats)]
        p50, p99 = (1e3 * float(np.percentile(seconds, percent)) for percent in (50, 99))
        rows.append([number, p50, p99, number / float(np.median(seconds))])
        figures[str(number)] = seconds
    found, expected = (
        each.rank(queries[:1], COLUMN, k=K)[0] for each in (searcher, open_index(index))
    )
    is_equal = found.item_ids == expected.item_ids
    deviation = float(np.abs(np.subtract(found.scores, expected.scores)).max())
    figures |= {"open_seconds": opened, "equal": is_equal, "deviation": deviation}
    title = f"{args.items:,} items, exact, in process, opened in {opened:.1f} s; the hits "
    title += f"{'equal' if is_equal else 'DIFFER FROM'} those of the CPU, scores to {deviation:.0e}"
    header = ["queries per call", "p50, ms", "p99, ms", "queries/s"]
    bench.add("process", title, figures, table(header, rows))


def http(bench: Bench, index: str, args: Any) -> None:
    """Measures searches over HTTP."""
    from ray import serve

    from pipeline.serve.app import build
    from pipeline.serve.settings import ServeSpec

    set_ray_serve_env()
    words = random.Random(0)
    queries = [" ".join(f"w{words.randrange(9999)}" for _ in range(QUERY_TOKENS)) for _ in range(9)]
    served = {"uri": index, "preload": [COLUMN], "device": args.device}
    searcher = {"num_gpus": 0 if args.device == "cpu" else 1}
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    with jobs.cluster():
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        settings = {"indexes": {"bench": served}, "searcher": searcher}
        serve.run(build(parse(ServeSpec, settings)))
        fields = {"url": f"http://127.0.0.1:{args.port}", "queries": queries, "retries": False}
        fields |= {"body": {"k": K, "representation": COLUMN}}
        for clients in (1, *CLIENTS):  # the first load is a warm-up
            pattern = {**fields, "clients": clients, "seconds": args.seconds}
            load = Load(**run_apart("tests.bench.serve_load", json.dumps(pattern)))
            figures[str(clients)] = {"rate": load.rate, "statuses": dict(load.statuses())}
            row = [clients, load.percentile(50), load.percentile(99), load.rate]
            stages = list(load.durations[0])
            rows.append([*row, *map(load.stage, stages)])
        serve.shutdown()
    header = ["clients", "p50, ms", "p99, ms", "searches/s", *(f"{name}, ms" for name in stages)]
    bench.add("http", f"{args.items:,} items, exact, over HTTP", figures, table(header, rows[1:]))


FIGURES = {"process": process, "http": http}

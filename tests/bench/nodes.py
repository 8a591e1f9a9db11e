"""Benchmark of the index job on several nodes: items/s of sleeping encoders, one per node.

    python -m tests.bench nodes
    python -m tests.bench nodes --nodes 1 2 --seconds 20 --repeats 1 --out figures.json

Each node is a raylet with its own object store, all on this machine, and the head has no CPUs. The
encoder sleeps instead of computing, so that the nodes do not share the cores of the machine, and
the ideal is the number of nodes divided by the time of an item. The rate is that of steady state,
read from the commits of the index. Lost efficiency is that of listing, scheduling, transfers
between nodes, writing and commits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import jobs
from tests.bench.commit_history import commits
from tests.bench.harness import Bench, Repeats, run_apart, table
from tests.bench.pipeline import Runs, numbered, rate_after
from tests.tiny import SLEEPING

#: Items per unit. The encoder sleeps once per unit.
UNIT_ITEMS = 32
#: Items per fragment and commit.
COMMIT_ITEMS = 64
#: Beginning of the steady state, as a fraction of the items.
STEADY = 1 / 3
#: CPUs of an encoder, so that there is one per node of two CPUs.
ENCODER_CPUS = 1.25


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--nodes", type=jobs.positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds per unit of 32 items")
    parser.add_argument("--seconds", type=jobs.positive, default=60, help="ideal time of a run")
    parser.add_argument("--repeats", type=jobs.positive, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("nodes", arguments, args.out)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        for num_nodes in args.nodes:
            runs = [_run(Path(folder), num_nodes, args) for _ in range(args.repeats)]
            rates = Repeats(tuple(run["items_per_second"] for run in runs))
            ideal = num_nodes * UNIT_ITEMS / args.sleep
            shares = Repeats(tuple(rate / ideal for rate in rates.values))
            rows.append([num_nodes, f"{runs[0]['items']:,}", f"{ideal:g}", rates, shares])
            figures[num_nodes] = {"rates": rates, "ideal": ideal, "runs": runs}
    header = ["nodes", "items", "ideal, items/s", "items/s", "of the ideal"]
    title = f"Encoders that sleep {args.sleep:g} s per unit of {UNIT_ITEMS} items, one per node"
    bench.add("nodes", title, {"nodes": figures}, table(header, rows))


def _run(folder: Path, num_nodes: int, args: Any) -> dict[str, Any]:
    from tests.chaos.cluster import ChaosCluster

    profile = folder / f"profile-{num_nodes}.yaml"
    encode = {"num_cpus": ENCODER_CPUS, "min_actors": num_nodes, "max_actors": num_nodes}
    others = {"num_cpus": 0.25, "max_actors": num_nodes}
    profile.write_text(yaml.safe_dump({"read": others, "encode": encode, "write": others}))
    num_items = round(num_nodes * args.seconds / args.sleep) * UNIT_ITEMS
    runs = Runs(folder, profile)
    encoder = {
        "class": SLEEPING,
        "seconds": args.sleep,
        "batch_size": UNIT_ITEMS,
    }
    spec = runs.spec(
        "index",
        source={"name": "text", "path": runs.corpus(f"corpus-{num_items}", numbered(num_items))},
        encoder={**encoder, "num_tokens": 64},
        representations=[{"compressor": "none"}],
        unit_items=UNIT_ITEMS,
        fragment_items=COMMIT_ITEMS,
        commit_items=COMMIT_ITEMS,
    )
    cluster = ChaosCluster(num_nodes)
    try:
        os.environ["RAY_ADDRESS"] = cluster.address
        summary = run_apart("tests.bench.index_run", "ray", str(spec), str(profile))["summary"]
    finally:
        cluster.close()
    # The last fragment does not wait for further units, so its commit is early.
    history = commits(folder / "index")[:-1]
    runs.remove("index")
    rate = rate_after(STEADY, history)
    return {"items": num_items, "items_per_second": rate, "summary": summary, "commits": history}

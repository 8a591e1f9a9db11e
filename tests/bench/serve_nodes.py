"""Benchmark of serving while a node dies: latency and failed searches before and after.

    python -m tests.bench serve_nodes
    python -m tests.bench serve_nodes --rate 3 --seconds 60 --repeats 1 --out figures.json

The server of `bench serve` runs on two nodes with two replicas of each deployment, one per node.
Each node is a raylet with its own object store on this machine; the head runs the HTTP proxy and no
replicas. All processes of a node are killed under a constant load, once with the retrying client
and once with single requests. Ray Serve restarts the replicas on the other node, so that each run
starts the server again on two nodes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
from jobs.serve import set_ray_serve_env
from tests.bench.harness import Bench, Repeats, table
from tests.bench.serve import Load, Server, failures, write_index

if TYPE_CHECKING:
    from tests.chaos.cluster import ChaosCluster

NUM_NODES = 2
#: Deployments of the server: gateway, encoder, searcher, reranker and library.
NUM_STAGES = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--items", type=jobs.positive, default=10_000, help="items of the index")
    parser.add_argument("--rate", type=float, default=5.0, help="searches per second")
    parser.add_argument("--seconds", type=jobs.positive, default=60, help="duration of a load")
    parser.add_argument("--repeats", type=jobs.positive, default=3)
    parser.add_argument("--port", type=jobs.positive, default=8766)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("serve_nodes", arguments, args.out)

    from tests.chaos.cluster import ChaosCluster

    set_ray_serve_env()
    loads: dict[bool, list[Load]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        os.environ["MAXRAY_CACHE"] = f"{folder}/cache"
        write_index(f"{folder}/index", args.items)
        cluster = ChaosCluster(NUM_NODES)
        try:
            os.environ["RAY_ADDRESS"] = cluster.address
            with jobs.cluster():
                for _ in range(args.repeats):
                    for retries, taken in loads.items():
                        server = Server(f"{folder}/index", args.port, num_replicas=NUM_NODES)
                        taken.append(_lose_a_node(cluster, server, args, retries))
                        server.stop()
        finally:
            cluster.close()
    rows, figures = [], {}
    killed = args.seconds / 3
    for retries, taken in loads.items():
        statuses = sum((load.statuses() for load in taken), Counter())
        failed = [load.failed() for load in taken]
        columns = [
            Repeats(tuple(load.percentile(percent, *span) for load in taken))
            for span in ((0.0, killed), (killed,))
            for percent in (50, 99)
        ]
        outage = Repeats(tuple(max(due) - min(due) if due else 0.0 for due in failed))
        label = "the client retries" if retries else "sent once"
        rows.append([label, statuses.total(), *columns, failures(statuses), outage])
        figures[label] = {"statuses": dict(statuses), "percentiles": columns, "outage": outage}
    header = ["", "searches", "p50 before, ms", "p99 before, ms", "p50 after, ms", "p99 after, ms"]
    header += ["failed", "first to last failure, s"]
    title = f"One of {NUM_NODES} nodes killed after {killed:g} s of {args.rate:g} searches/s"
    bench.add("serve_nodes", title, figures, table(header, rows))


def _lose_a_node(cluster: ChaosCluster, server: Server, args: Any, retries: bool) -> Load:
    """Kills a node under load and replaces it. Returns the load."""
    victim = cluster.workers[-1]
    num_replicas = sum("ServeReplica" in task.title for task in cluster.tasks_of(victim))
    if num_replicas < NUM_STAGES:
        raise RuntimeError(f"{num_replicas} replicas run on the node, expected {NUM_STAGES}")
    wait = server.start_load(args.seconds, retries=retries, rate=args.rate)
    time.sleep(args.seconds / 3)
    cluster.kill_node(victim)
    load = wait()
    cluster.repair()
    return load

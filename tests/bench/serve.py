"""Benchmark of serving: overhead over search in process, overload, crashes, new versions.

    python -m tests.bench serve
    python -m tests.bench serve --only overhead overload --seconds 20
    python -m tests.bench serve --only kills swap
    python -m tests.bench serve --only reranking

The index has random vectors and real texts. Queries are encoded by the bundled MiniLM. The load
comes from another process over loopback. `overhead` compares latency with the same search in this
process, for a server and for one with `single_process`, and measures the saturation throughput.
`overload` sends half and twice that rate. `kills` kills the replica of each deployment under load,
once with the retrying client and once with single requests. `swap` commits new versions of the
index under load. `reranking` adds EDJE's joint encoder (bundled MiniLM, 64 random tokens per item)
and compares its throughput with that in this process, and latency with and without it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch

import jobs
from jobs.serve import APPLICATION, set_ray_serve_env
from pipeline.config import dump, parse
from pipeline.encoders.minilm import MiniLM
from pipeline.index.columns import Representation, encoder_fields, representation_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import ITEMS, part_uri
from pipeline.index.rerank_tokens import rerank_field
from pipeline.registry import ENCODERS
from pipeline.schema import ITEM, Item
from pipeline.search.searcher import Searcher, open_index
from pipeline.tokens import lists_of, normalise
from tests.bench.harness import Bench, Repeats, table
from tests.bench.maxsim_index import random_int8

COLUMN, K, NUM_VECTORS = "hpool_32_int8", 10, 32
RERANK_DEPTH, NUM_TOKENS = 10, 64
CLIENTS = (1, 2, 4, 8, 16, 32)
QUERIES = [
    "the lift of a wing in a propeller slipstream",
    "heat transfer to a blunt body at hypersonic speed",
    "buckling of thin cylindrical shells under axial compression",
    "boundary layer transition on a cone",
    "how do interference effects change with mach number",
    "what is known of flutter of panels",
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument("--items", type=jobs.positive, default=10_000, help="items of the index")
    parser.add_argument(
        "--seconds",
        type=jobs.positive,
        default=60,
        help="duration of each load; closed loops take a sixth of it",
    )
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="repeats of closed loops")
    parser.add_argument("--port", type=jobs.positive, default=8765)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("serve", arguments, args.out)
    chosen = args.only or FIGURES
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        os.environ["MAXRAY_CACHE"] = f"{folder}/cache"
        set_ray_serve_env()
        with jobs.cluster():
            if plain := [run for name, run in PLAIN.items() if name in chosen]:
                with serving(f"{folder}/plain", args) as server:
                    for figure in plain:
                        figure(bench, server, args)
            if "reranking" in chosen:
                edje = f"{folder}/edje"
                write_edje(edje)
                with serving(f"{folder}/reranked", args, edje) as server:
                    reranking(bench, server, edje, args)


@contextlib.contextmanager
def serving(uri: str, args: argparse.Namespace, edje: str | None = None) -> Iterator[Server]:
    """Context manager that serves a new index and stops the server at the end.

    Args:
        edje: Folder of the EDJE that reranks, if any.
    """
    write_index(uri, args.items, edje)
    server = Server(uri, args.port, edje)
    try:
        yield server
    finally:
        server.stop()


def write_edje(folder: str) -> None:
    """Writes an EDJE whose joint encoder is the embedded MiniLM, with random heads."""
    from pipeline.encoders.edje.adapter import Adapter
    from pipeline.encoders.edje.joint import JointEncoder
    from pipeline.encoders.edje.model import Edje

    encoder = MiniLM(MiniLM.Spec())
    vision = {"spec": dump(encoder.spec), "fingerprint": encoder.fingerprint}
    joint = JointEncoder(
        JointEncoder.Spec(), encoder.dim
    )  # the pooled vector has the same dimension
    adapter = Adapter(Adapter.Spec(num_tokens=NUM_TOKENS, hidden=64), encoder.dim, joint.dim)
    Edje(adapter, joint, vision).save(Path(folder))


def write_index(uri: str, num_items: int, edje: str | None = None) -> None:
    """Writes an index that contains random vectors and the texts of Cranfield, repeated.

    Args:
        edje: Folder of an EDJE, to store random rerank tokens.
    """
    spec = ENCODERS.resolve("minilm")
    encoder_info = EncoderInfo.from_encoder(ENCODERS.build(spec), spec)
    given = {"compressor": {"name": "hpool", "num_vectors": NUM_VECTORS}, "codec": "int8"}
    fields = representation_fields(
        parse(Representation, {**given, "id": COLUMN}), encoder_info, None
    )
    field = next(f for f in fields if f.name == COLUMN)
    pooled = next(f for f in encoder_fields(encoder_info, False) if f.name.endswith("pooled"))
    corpus = Path(jobs.__file__).parent / "data/cranfield/corpus.jsonl"
    texts = [json.loads(line) for line in corpus.read_text("utf-8").splitlines()]
    rows = []
    for i in range(num_items):
        text = texts[i % len(texts)]
        texts_of_item = {"title": text.get("title"), "text": text["text"]}
        rows.append(Item(f"{i:06}", f"{i:06}", "bench", "text", "1", **texts_of_item).row())
    generator = np.random.default_rng(0)
    column = random_int8(generator, num_items, NUM_VECTORS, encoder_info.dim).cast(field.type)
    single = normalise(_tensor(generator, num_items, encoder_info.dim)).numpy()
    whole = pa.Table.from_pylist(rows, schema=ITEM)
    whole = whole.append_column(
        pooled,
        pa.FixedSizeListArray.from_arrays(pa.array(single.ravel()), encoder_info.dim).cast(
            pooled.type
        ),
    )
    whole = whole.append_column(field, column)
    if edje is not None:
        field = rerank_field(edje, encoder_info)
        dim = field.type.value_type.list_size
        tokens = generator.standard_normal((num_items * NUM_TOKENS, dim), np.float32)
        lengths = np.full(num_items, NUM_TOKENS)
        whole = whole.append_column(
            field, lists_of(tokens.astype(np.float16), lengths, pa.float16()).cast(field.type)
        )
    lance.write_dataset(whole, part_uri(uri, ITEMS))


def _tensor(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(generator.standard_normal(shape, np.float32))


class Server:
    """The application on the Ray cluster of this process, and the load that is put on it.

    Args:
        uri: URI of the index.
        port: HTTP port.
        edje: Folder of the EDJE that reranks, if any.
        num_replicas: Number of replicas of each deployment. Ray Serve spreads them over the nodes.
        single_process: Whether all stages run in the process of the gateway, under a route of its
            own.
    """

    def __init__(
        self,
        uri: str,
        port: int,
        edje: str | None = None,
        num_replicas: int = 1,
        single_process: bool = False,
    ):
        from ray import serve

        from pipeline.serve.app import build
        from pipeline.serve.settings import ServeSpec

        self._name = "single" if single_process else APPLICATION
        route = "/single" if single_process else "/"
        self.uri, self.url = uri, f"http://127.0.0.1:{port}{route}".rstrip("/")
        self.saturation: float | None = None  # searches per second, once measured
        self.body = {"k": K, "representation": COLUMN}
        names = ["gateway"]
        names += [] if single_process else ["encoder", "searcher", "reranker", "library"]
        rerank = {"rerank": {"name": "edje", "model": edje}} if edje else {}
        settings = {
            **{name: {"num_replicas": num_replicas} for name in names},
            "single_process": single_process,
            "indexes": {"bench": {"uri": uri, "preload": [COLUMN], **rerank}},
            "limits": {"max_in_flight_requests": 32},
            "reload_interval_s": 1,
        }
        # One proxy, because the nodes of a simulated cluster share the ports of this machine.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(parse(ServeSpec, settings)), name=self._name, route_prefix=route)
        self.load(clients=2, seconds=5)  # warm-up: the first request opens the index

    def stop(self) -> None:
        """Shuts Ray Serve down."""
        from ray import serve

        serve.shutdown()

    def delete(self) -> None:
        """Deletes the application."""
        from ray import serve

        serve.delete(self._name)

    def start_load(
        self, seconds: float, *, retries: bool = False, **pattern: float
    ) -> Callable[[], Load]:
        """Starts a load in another process and returns a function that waits for its end."""
        fields = {"url": self.url, "body": self.body, "queries": QUERIES, "seconds": seconds}
        fields |= {"retries": retries, **pattern}
        command = [sys.executable, "-m", "tests.bench.serve_load", json.dumps(fields)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return lambda: Load(**json.loads(process.communicate()[0].splitlines()[-1]))

    def load(self, seconds: float, **pattern: Any) -> Load:
        """Runs a load to its end."""
        return self.start_load(seconds, **pattern)()

    def kill(self, deployment: str) -> None:
        """Kills the replicas of a deployment."""
        import ray

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if f"#{deployment}#" in actor["name"] and "REPLICA" in actor["name"]:
                ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


class Load:
    """Responses to a load.

    Args:
        answers: Due time in seconds, HTTP status and latency in milliseconds of each request.
        durations: Milliseconds of each stage of successful requests.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[float]],
        seconds: float,
        durations: Sequence[Mapping[str, float]] = (),
    ):
        self.answers = sorted((due, int(status), ms) for due, status, ms in answers)
        self.seconds, self.durations = seconds, durations

    @property
    def rate(self) -> float:
        """Successful searches per second."""
        return sum(status == 200 for _, status, _ in self.answers) / self.seconds

    def percentile(self, percent: float, after: float = 0.0, before: float = float("inf")) -> float:
        """Returns a percentile of the latency of successful searches in milliseconds.

        Args:
            percent: The percentile.
            after: Due time of the first search, in seconds.
            before: Due time of the first search that does not count, in seconds.
        """
        taken = [ms for due, status, ms in self.answers if status == 200 and after <= due < before]
        return float(np.percentile(taken, percent)) if taken else float("nan")

    def stage(self, name: str) -> float:
        """Returns the median duration of a stage in milliseconds."""
        return float(np.median([durations[name] for durations in self.durations]))

    def statuses(self) -> Counter[int]:
        """Counts the responses by status code. The code 0 means that there was no response."""
        return Counter(status for _, status, _ in self.answers)

    def failed(self) -> list[float]:
        """Returns the due times of failed requests."""
        return [due for due, status, _ in self.answers if status != 200]


def failures(statuses: Counter[int]) -> str:
    """Formats the counts of all status codes other than 200.

    >>> failures(Counter({200: 5, 503: 2, 0: 1}))
    '1 x none, 2 x 503'
    """
    others = sorted((status, n) for status, n in statuses.items() if status != 200)
    return ", ".join(f"{n} x {status or 'none'}" for status, n in others) or "none"


# -- figures ---------------------------------------------------------------------------------------


def in_process(searcher: Searcher, seconds: float) -> Load:
    """Runs the searches one after another in this process."""
    start = time.perf_counter()
    answers: list[tuple[float, int, float]] = []
    durations: list[dict[str, float]] = []
    while (due := time.perf_counter()) < start + seconds:
        queries = searcher.queries([QUERIES[len(answers) % len(QUERIES)]], COLUMN)
        encoded = time.perf_counter()
        searcher.search(queries, COLUMN, k=K, explain=False)
        end = time.perf_counter()
        answers.append((due - start, 200, 1e3 * (end - due)))
        durations.append({"encode": 1e3 * (encoded - due), "search": 1e3 * (end - encoded)})
    return Load(answers, time.perf_counter() - start, durations)


def overhead(bench: Bench, server: Server, args: Any) -> None:
    """Compares a single client with search in process and determines the saturation throughput."""
    searcher = open_index(server.uri)
    in_process(searcher, 2)
    single = Server(server.uri, args.port, single_process=True)
    servers = {"over HTTP": server, "single process": single}
    seconds = max(args.seconds / 6, 3)
    alone: dict[str, list[Load]] = {name: [] for name in ("in process", *servers)}
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.repeats):
        alone["in process"].append(in_process(searcher, seconds))
        for name, one in servers.items():
            alone[name].append(one.load(seconds, clients=1))
        for clients in CLIENTS:
            for name, one in servers.items():
                rate = one.load(seconds, clients=clients).rate
                rates.setdefault((name, clients), []).append(rate)
    single.delete()
    rows, overheads = [], {}
    for name, loads in alone.items():
        taken = [Repeats(tuple(load.percentile(p) for load in loads)) for p in (50, 99)]
        rows.append([name, *taken, Repeats(tuple(load.rate for load in loads))])
    for name in servers:
        pairs = list(zip(alone[name], alone["in process"], strict=True))
        overheads[name] = [
            Repeats(tuple(remote.percentile(p) - local.percentile(p) for remote, local in pairs))
            for p in (50, 99)
        ]
        rows.append([f"**overhead, {name}**", *overheads[name], ""])
    text = table(["sequential", "p50, ms", "p99, ms", "searches/s"], rows)
    text += "\n\n" + table(["step, p50 in ms", *alone], _steps(alone))
    best = {key: Repeats(tuple(values)) for key, values in rates.items()}
    local_rate = Repeats(tuple(load.rate for load in alone["in process"]))
    rows = []
    for key in itertools.product(servers, CLIENTS):
        rows.append([*key, best[key], best[key].over(local_rate)])
    text += "\n\n" + table(["server", "clients", "searches/s", "x in process"], rows)
    server.saturation = max(best["over HTTP", clients].median for clients in CLIENTS)
    title = f"{args.items:,} items of {NUM_VECTORS} int8 vectors, k = {K}, loads of {seconds:g} s"
    figures = {f"{name}, {clients} clients": rate for (name, clients), rate in best.items()}
    bench.add("overhead", title, {"alone": overheads, "rates": figures}, text)


def _steps(alone: Mapping[str, Sequence[Load]]) -> list[list[Any]]:
    """Returns rows with the time of each step of a search, in process and of each server."""
    rows = [
        [name, *(Repeats(tuple(load.stage(name) for load in loads)) for loads in alone.values())]
        for name in ("encode", "search")
    ]
    gateway: list[Any] = ["rest of the gateway", ""]
    outside: list[Any] = ["proxy and client", ""]
    for loads in list(alone.values())[1:]:
        totals = [load.stage("total") for load in loads]
        pairs = list(zip(loads, totals, strict=True))
        gateway.append(
            Repeats(
                tuple(total - load.stage("encode") - load.stage("search") for load, total in pairs)
            )
        )
        outside.append(Repeats(tuple(load.percentile(50) - total for load, total in pairs)))
    return [*rows, gateway, outside]


def overload(bench: Bench, server: Server, args: Any) -> None:
    """Measures half and twice the saturation rate, and then the recovery at half the rate."""
    saturation = _saturation(server, args)
    rows = []
    for name, share, seconds in (
        ("half", 0.5, args.seconds),
        ("twice", 2.0, args.seconds),
        ("half, 10 s after the overload", 0.5, 20),
    ):
        load = server.load(seconds, rate=share * saturation)
        after = 10.0 if "after" in name else 0.0
        rows.append(
            [
                name,
                f"{share * saturation:.1f}",
                f"{load.rate:.1f}",
                *(load.percentile(p, after) for p in (50, 99)),
                failures(Counter(s for due, s, _ in load.answers if due >= after)),
            ]
        )
    header = ["load", "requests/s", "answered/s", "p50, ms", "p99, ms", "not successful"]
    title = f"Open loop; saturation at {saturation:.1f} searches/s; at most 32 requests in flight"
    bench.add("overload", title, {"rows": rows}, table(header, rows))


def _saturation(server: Server, args: Any) -> float:
    if server.saturation is None:
        seconds = max(args.seconds / 6, 3)
        rates = [server.load(seconds, clients=c).rate for c in (8, 16) for _ in range(2)]
        server.saturation = max(rates)
    return server.saturation


def kills(bench: Bench, server: Server, args: Any) -> None:
    """Kills the replica of each deployment under load."""
    rate = 0.3 * _saturation(server, args)
    rows = []
    deployments = ("Encoder", "Searcher-bench-0", "Reranker-bench", "Library", "Gateway")
    for deployment in deployments:
        outcomes = {}
        for retries in (True, False):
            plain = dict(server.body)
            if deployment.startswith("Reranker"):
                server.body = {**plain, "rerank": {"top": 20, "representation": COLUMN}}
            wait = server.start_load(30, retries=retries, rate=rate)
            time.sleep(8)
            server.kill(deployment)
            outcomes[retries] = wait()
            server.body = plain
        raw = outcomes[False]
        failed = raw.failed()
        recovered = max(failed) - min(failed) if failed else 0.0
        rows.append(
            [
                deployment,
                len(outcomes[True].answers),
                len(outcomes[True].failed()),
                failures(outcomes[True].statuses()),
                outcomes[True].percentile(99),
                f"{len(failed)} of {len(raw.answers)}: {failures(raw.statuses())}",
                f"{recovered:.1f}",
            ]
        )
    header = ["killed", "requests", "failed with retries", "statuses", "p99, ms"]
    header += ["failed without retries", "first to last failure, s"]
    title = f"Replicas killed after 8 s of a load of {rate:.1f} requests/s for 30 s"
    bench.add("kills", title, {"rows": rows}, table(header, rows))


def swap(bench: Bench, server: Server, args: Any) -> None:
    """Commits new versions of the index while it is under load."""
    rate = 0.3 * _saturation(server, args)
    wait = server.start_load(30, rate=rate)
    num_versions = 4
    for number in range(num_versions):
        time.sleep(5)
        dataset = lance.dataset(part_uri(server.uri, ITEMS))
        dataset.delete(f"item_id = '{number:06}'")
    load = wait()
    rows = [[num_versions, len(load.answers), len(load.failed()), failures(load.statuses()),
             load.percentile(50), load.percentile(99)]]  # fmt: skip
    header = ["versions", "requests", "failed", "statuses", "p50, ms", "p99, ms"]
    title = f"New versions committed under a load of {rate:.1f} requests/s, without retries"
    bench.add("swap", title, {"rows": rows}, table(header, rows))


def reranking(bench: Bench, server: Server, edje: str, args: Any) -> None:
    """Measures pairs per second of EDJE's second stage, and its latency at equal load."""
    from pipeline.search.rerankers import load_rerankers

    searcher = open_index(server.uri)
    (reranker,) = load_rerankers({"name": "edje", "model": edje, "top": RERANK_DEPTH})
    seconds = max(args.seconds / 6, 3)
    plain = server.body
    reranked = {**plain, "rerank": {"name": "edje", "top": RERANK_DEPTH}}
    rates: dict[str, list[float]] = {}
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for at_once in (1, 8, 32):
            queries, start, done = (QUERIES * at_once)[:at_once], time.perf_counter(), 0
            while time.perf_counter() < start + seconds:
                searcher.search(queries, COLUMN, k=K, explain=False, rerank=reranker)
                done += len(queries)
            rate = RERANK_DEPTH * done / (time.perf_counter() - start)
            rates.setdefault(f"in process, {at_once} queries at once", []).append(rate)
        server.body = reranked
        for clients in (1, 8, 32):
            rate = RERANK_DEPTH * server.load(seconds, clients=clients).rate
            rates.setdefault(f"over HTTP, {clients} clients", []).append(rate)
        server.body = plain
        if not repeat:
            rates.clear()
    pairs = {name: Repeats(tuple(values)) for name, values in rates.items()}
    best = {
        side: max((rate for name, rate in pairs.items() if side in name), key=lambda r: r.median)
        for side in ("in process", "over HTTP")
    }
    rows = [
        [name, pair_rate, pair_rate.over(best["in process"])] for name, pair_rate in pairs.items()
    ]
    text = table(["rerank depth 10", "pairs/s", "x the best in process"], rows)

    load = 0.5 * best["over HTTP"].median / RERANK_DEPTH
    rows, found = [], {}
    for name, body in (("search only", plain), ("with reranking", reranked)):
        server.body = body
        loads = [server.load(args.seconds, rate=load) for _ in range(args.repeats)]
        taken = [Repeats(tuple(one.percentile(p) for one in loads)) for p in (50, 99)]
        statuses = sum((one.statuses() for one in loads), Counter())
        rows.append([name, Repeats(tuple(one.rate for one in loads)), *taken, failures(statuses)])
        found[name] = taken
    server.body = plain
    header = [f"{load:.1f} requests/s", "answered/s", "p50, ms", "p99, ms", "not successful"]
    text += "\n\n" + table(header, rows)
    ratio = best["over HTTP"].over(best["in process"])
    title = f"{args.items:,} items of {NUM_TOKENS} tokens, MiniLM-L6, float32; ratio {ratio}"
    bench.add("reranking", title, {"pairs": pairs, "latency": found}, text)


PLAIN = {"overhead": overhead, "overload": overload, "kills": kills, "swap": swap}
FIGURES = [*PLAIN, "reranking"]

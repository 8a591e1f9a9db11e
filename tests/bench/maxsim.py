"""Benchmark of MaxSim on CPUs against a padded einsum, maxsim-cpu and the machine's peak rates.

    python -m tests.bench maxsim
    python -m tests.bench maxsim --only scoring --queries 1 --repeats 5 --out figures.json
    python -m tests.bench maxsim --only stored --documents 1000000
    python -m tests.bench maxsim --only quality --figure docs/results/figures/codecs.png
    python -m tests.bench maxsim_gpu                              # on a GPU; needs no Ray, no Lance

`scoring` scores random unit vectors in memory; `prefixes` scores the first vectors of documents of
64 vectors and, for comparison, documents that have only these; `corpus` scores all queries against
all images; `stored` searches a memory-mapped index of random int8 vectors, starting from an empty
cache; `quality` compares nDCG and recall of codecs. Except for `prefixes` and `quality`, the peak
rates of the machine are measured before and after. If one changes by more than 20 %, the
measurement is repeated, and marked as unsteady if it changes again.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import jobs
from pipeline.registry import CODECS
from pipeline.search import native
from pipeline.search.maxsim import backends, maxsim
from pipeline.search.packed import PackedVectors, Segment
from pipeline.tokens import normalise
from tests.bench.harness import Bench, Repeats, run_apart, table

T = TypeVar("T")
#: Documents per batch of the batched padded einsum, as in colpali-engine.
PADDED_BATCH = 128
#: Maximum relative change of a peak rate during a measurement.
STEADY = 0.2
#: Numbers of vectors of the prefixes that are compared.
PREFIXES = (4, 8, 16, 32)
LAYOUTS = {"64": (64, 64), "16-256": (16, 256), "1030": (1030, 1030)}
#: Spec of each codec, and the precision of torch's matrix product that limits it.
CODEC_SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"name": "float32"}, "float32"),
    "float16": ({"name": "float16"}, "bfloat16"),
    "int8": ({"name": "int8"}, "int8"),
    "bits": ({"name": "bits"}, "int8"),
    "residual": ({"name": "residual", "bits": 4}, "bfloat16"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument(
        "--tokens", type=jobs.positive, default=1_280_000, help="tokens of all documents together"
    )
    parser.add_argument("--dim", type=jobs.positive, default=128, help="dimensions, D")
    parser.add_argument(
        "--query-tokens", type=jobs.positive, default=32, help="tokens per query, M"
    )
    parser.add_argument("--queries", type=jobs.positive, nargs="+", default=[1, 32], metavar="Q")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--documents", type=jobs.positive, default=1_000_000, help="documents of `stored`"
    )
    parser.add_argument("--threads", type=jobs.positive, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=jobs.positive, default=5, help="repeats per measurement")
    parser.add_argument(
        "--folder", type=Path, help="folder for `stored` (default: a temporary one)"
    )
    parser.add_argument("--figure", type=Path, help="PNG file for the plot of `quality`")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    bench = Bench("maxsim", arguments, args.out)
    print(
        f"kernels   {', '.join(native.available()) or 'none, only torch'}; {args.threads} threads"
    )
    for name, figure in FIGURES.items():
        if not args.only or name in args.only:
            figure(bench, args)


# -- peak rates --------------------------------------------------------------------------------


def peaks() -> dict[str, float]:
    """Measures the bytes read per second, and the arithmetic operations per second by data type."""
    numbers = torch.ones(1 << 28)  # 1 GiB, larger than any cache
    found = {"read": numbers.nbytes / best_time(lambda: numbers.sum())}
    size = 3072
    square = torch.randn(size, size)
    half = square.bfloat16()
    small = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    products: dict[str, Callable[[], object]] = {
        "float32": lambda: square @ square,
        "bfloat16": lambda: half @ half,
        "int8": lambda: torch._int_mm(small, small),
    }
    for name, product in products.items():
        found[name] = 2 * size**3 / best_time(product)
    return found


def best_time(call: Callable[[], object], seconds: float = 1.5) -> float:
    """Returns the minimum duration of repeated calls, which is not affected by interruptions."""
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        best = min(best, seconds_of(call))
    return best


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def with_steady_peaks(take: Callable[[], T]) -> tuple[T, dict[str, float], str]:
    """Returns the result of `take`, the mean of the peaks around it, and a sentence about them."""
    for _ in range(2):
        before = peaks()
        taken = take()
        after = peaks()
        moved = {name: abs(after[name] / before[name] - 1) for name in before}
        worst = max(moved, key=lambda name: moved[name])
        if moved[worst] <= STEADY:
            break
        print(f"the peak of {worst} moved by {moved[worst]:.0%}", flush=True)
    mean = {name: (before[name] + after[name]) / 2 for name in before}
    say = (
        f"Peaks: {mean['read'] / 1e9:.1f} GB/s read;"
        + ",".join(f" {name} {mean[name] / 1e9:,.0f}" for name in ("float32", "bfloat16", "int8"))
        + f" GFLOP/s; moved by {max(moved.values()):.0%} at most"
    )
    if moved[worst] > STEADY:
        say += " (**unsteady**, taken twice)"
    return taken, mean, say


def in_turns(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Repeats]:
    """Measures the seconds that each side takes per round.

    The order of the sides rotates, and the first round is a warm-up. Short calls are repeated
    within a round and averaged.
    """
    calls = {name: max(int(0.2 / seconds_of(side)), 1) for name, side in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            side = sides[name]

            def some(side: Callable[[], object] = side, number: int = calls[name]) -> None:
                for _ in range(number):
                    side()

            taken[name].append(seconds_of(some) / calls[name])
    return {name: Repeats(tuple(seconds)) for name, seconds in taken.items()}


# -- scoring -----------------------------------------------------------------------------------


def unit_vectors(num: int, dim: int, seed: int) -> torch.Tensor:
    """Returns random unit vectors (num, dim)."""
    return normalise(torch.randn(num, dim, generator=torch.Generator().manual_seed(seed)))


def lengths_of(layout: str, num_tokens: int) -> torch.Tensor:
    """Draws the number of tokens of each document, with a total of about `num_tokens`."""
    least, most = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)
    size = max(2 * num_tokens // (least + most), 1)
    return torch.randint(least, most + 1, (size,), generator=generator)


def packed_as(
    fields: Mapping[str, Any], vectors_TD: torch.Tensor, lengths: torch.Tensor
) -> PackedVectors:
    """Returns vectors (T, D) of documents of `lengths` (B,) as a codec stores them."""
    spec = CODECS.resolve(fields)
    kind = CODECS.load(spec.name)
    sample = vectors_TD[: 1 << 15].numpy()
    codec = kind(spec, kind.fit(spec, sample) if kind.needs_fit else None)
    return PackedVectors([Segment(codec, vectors_TD.shape[1], codec.quantise(vectors_TD), lengths)])


def pad_and_einsum(
    queries_QMD: torch.Tensor, documents: Sequence[torch.Tensor], batch: int | None = None
) -> torch.Tensor:
    """Computes (Q, B) scores like most implementations: pad, einsum, maximum and sum.

    As in most implementations, padding is not masked. It therefore wins if all similarities are
    negative.

    Args:
        documents: Token vectors (N, D) of each document.
        batch: Number of documents scored at a time; default: all.
    """
    scores = []
    batch = batch or len(documents)
    for first in range(0, len(documents), batch):
        some = torch.nn.utils.rnn.pad_sequence(
            list(documents[first : first + batch]), batch_first=True
        )
        scores.append(torch.einsum("qmd,bnd->qbmn", queries_QMD, some).amax(dim=3).sum(dim=2))
    return torch.cat(scores, dim=1)


def by_maxsim_cpu(
    queries: Sequence[torch.Tensor], documents: Sequence[torch.Tensor], even: bool
) -> Callable[[], object] | None:
    """Returns a scorer with the package maxsim-cpu, or None if it is not installed."""
    try:
        import maxsim_cpu
    except ImportError:
        return None
    arrays = [query.numpy() for query in queries]
    if even:
        stacked = torch.stack(list(documents)).numpy()
        return lambda: [maxsim_cpu.maxsim_scores(query, stacked) for query in arrays]
    ragged = [document.numpy() for document in documents]
    return lambda: [maxsim_cpu.maxsim_scores_variable(query, ragged) for query in arrays]


def scoring(bench: Bench, args: Any) -> None:
    """Compares each codec and instruction set with the padded einsum and with maxsim-cpu."""
    for layout, num_queries in itertools.product(args.layouts, args.queries):
        lengths = lengths_of(layout, args.tokens)
        vectors = unit_vectors(int(lengths.sum()), args.dim, seed=1)
        queries = [
            unit_vectors(args.query_tokens, args.dim, seed=2 + i) for i in range(num_queries)
        ]
        sides, notes = scoring_sides(queries, vectors, lengths)
        taken, peak, say = with_steady_peaks(functools.partial(in_turns, sides, args.repeats))
        work = 2 * num_queries * args.query_tokens * len(vectors) * args.dim
        rows = []
        for name, seconds in taken.items():
            num_bytes, precision = notes[name]
            rows.append(
                [
                    name,
                    Repeats(tuple(1e3 * s for s in seconds.values)),
                    f"{num_queries * len(lengths) / seconds.median:,.0f}",
                    f"{work / seconds.median / 1e9:,.0f}",
                    f"{work / seconds.median / peak[precision]:.0%} of {precision}",
                    f"{num_bytes / seconds.median / peak['read']:.0%}",
                    taken[COMMON].over(seconds) if COMMON in taken else "-",
                    taken[IN_BATCHES].over(seconds),
                    taken[THEIRS].over(seconds) if THEIRS in taken else "-",
                ]
            )
        header = ["side", "ms", "documents/s", "GFLOP/s", "of the matrix peak", "of the read peak"]
        header += ["x pad and einsum", "x the same in batches", "x maxsim-cpu"]
        title = (
            f"{num_queries} x {args.query_tokens} query tokens of {args.dim} numbers,"
            f" {len(lengths):,} documents of {layout} tokens ({len(vectors):,}),"
            f" {args.threads} threads. {say}"
        )
        figures = {"seconds": taken, "peaks": peak, "documents": len(lengths)}
        bench.add(f"scoring {layout} x {num_queries}", title, figures, table(header, rows))


COMMON, THEIRS = "pad and einsum, float32", "maxsim-cpu, float32"
IN_BATCHES = f"pad and einsum, float32, {PADDED_BATCH} documents at a time"


def scoring_sides(
    queries: Sequence[torch.Tensor], vectors: torch.Tensor, lengths: torch.Tensor
) -> tuple[dict[str, Callable[[], object]], dict[str, tuple[int, str]]]:
    """Returns the sides by name, with the bytes that each reads and its precision."""
    documents = vectors.split(lengths.tolist())
    stacked = torch.stack(list(queries))
    sides: dict[str, Callable[[], object]] = {
        IN_BATCHES: lambda: pad_and_einsum(stacked, documents, PADDED_BATCH)
    }
    if len(queries) == 1:  # the similarities of more queries take many GB
        sides[COMMON] = lambda: pad_and_einsum(stacked, documents)
    notes = dict.fromkeys((COMMON, IN_BATCHES), (vectors.nbytes, "float32"))
    if theirs := by_maxsim_cpu(queries, documents, even=bool((lengths == lengths[0]).all())):
        sides[THEIRS], notes[THEIRS] = theirs, (vectors.nbytes, "float32")
    for name, (spec, precision) in CODEC_SPECS.items():
        packed = packed_as(spec, vectors, lengths)
        transformed = [packed.codec.transform_queries(query) for query in queries]
        valid = backends(packed)
        num_bytes = sum(part.nbytes for part in packed.segments[0].parts.values())
        # The narrower instruction sets are slow and run only once.
        for backend in valid if name == "int8" and len(queries) == 1 else valid[-1:]:
            side = f"{name}, {backend}"
            sides[side] = functools.partial(maxsim, transformed, packed, backend=backend)
            notes[side] = (num_bytes, precision)
    return sides, notes


def prefixes(bench: Bench, args: Any) -> None:
    """Compares prefixes of documents of 64 vectors with documents that store only these."""
    num_vectors, rows = 64, []
    vectors = unit_vectors(args.tokens, args.dim, seed=1)
    vectors = vectors[: len(vectors) // num_vectors * num_vectors]
    by_document = vectors.view(-1, num_vectors, args.dim)
    query = unit_vectors(args.query_tokens, args.dim, seed=2)
    figures: dict[str, dict[str, Repeats]] = {}
    for codec in ("float16", "int8"):
        sizes = {k: torch.full((len(by_document),), k) for k in (*PREFIXES, num_vectors)}
        whole = packed_as(CODEC_SPECS[codec][0], vectors, sizes[num_vectors])
        queries = [whole.codec.transform_queries(query)]
        sides: dict[str, Callable[[], object]] = {}
        for k in PREFIXES:
            smaller = packed_as(CODEC_SPECS[codec][0], by_document[:, :k].flatten(0, 1), sizes[k])
            sides[f"{k} of {num_vectors}"] = functools.partial(maxsim, queries, whole.prefix(k))
            sides[f"{k}"] = functools.partial(maxsim, queries, smaller)
        sides[f"{num_vectors}"] = functools.partial(maxsim, queries, whole)
        taken = figures[codec] = in_turns(sides, args.repeats)
        for k in PREFIXES:
            prefix, column = taken[f"{k} of {num_vectors}"], taken[f"{k}"]
            times = (Repeats(tuple(1e3 * s for s in side.values)) for side in (prefix, column))
            whole_over_prefix = taken[f"{num_vectors}"].over(prefix)
            rows.append([codec, k, *times, prefix.over(column), whole_over_prefix])
    header = ["codec", "k", "ms of the prefix", "ms of k vectors", "ratio", "x faster than all"]
    title = (
        f"one query of {args.query_tokens} x {args.dim}, {len(by_document):,} documents of"
        f" {num_vectors} vectors, {args.threads} threads"
    )
    bench.add("prefixes", title, {"seconds": figures}, table(header, rows))


# -- a whole corpus ----------------------------------------------------------------------------


def corpus(bench: Bench, args: Any) -> None:
    """Ranks 1,000 images for 5,000 queries at K = 64 (SaMer, Table 5)."""
    num_images, num_queries, num_vectors, k = 1000, 5000, 64, 10
    vectors = unit_vectors(num_images * num_vectors, args.dim, seed=1)
    lengths = torch.full((num_images,), num_vectors)
    queries = [unit_vectors(20, args.dim, seed=2 + i) for i in range(num_queries)]

    def common() -> None:
        documents = vectors.split(lengths.tolist())
        for first in range(0, num_queries, 32):
            some = torch.stack(queries[first : first + 32])
            scores = pad_and_einsum(some, documents, PADDED_BATCH)
            scores.topk(k, dim=1)

    def ours(packed: PackedVectors) -> None:
        transformed = [packed.codec.transform_queries(query) for query in queries]
        maxsim(transformed, packed).topk(k, dim=1)

    sides: dict[str, Callable[[], object]] = {IN_BATCHES: common}
    for name, (spec, _) in CODEC_SPECS.items():
        sides[name] = functools.partial(ours, packed_as(spec, vectors, lengths))
    taken, peak, say = with_steady_peaks(lambda: in_turns(sides, args.repeats))
    work = 2 * num_queries * 20 * len(vectors) * args.dim
    rows = []
    for name, seconds in taken.items():
        precision = CODEC_SPECS.get(name, ({}, "float32"))[1]
        rate = Repeats(tuple(num_queries / s for s in seconds.values))
        share = f"{work / seconds.median / peak[precision]:.0%} of {precision}"
        rows.append([name, rate, share, taken[IN_BATCHES].over(seconds)])
    header = ["codec", "queries/s", "of the matrix peak", "x pad and einsum in batches"]
    title = (
        f"{num_queries:,} queries of 20 x {args.dim} against {num_images:,} images of"
        f" {num_vectors} vectors, with the best {k}, {args.threads} threads. {say}"
    )
    bench.add("corpus", title, {"seconds": taken, "peaks": peak}, table(header, rows))


# -- a memory-mapped index ---------------------------------------------------------------------


def stored(bench: Bench, args: Any) -> None:
    """Searches a memory-mapped index of random int8 vectors."""
    from tests.bench.maxsim_index import write_index  # needs Lance

    with tempfile.TemporaryDirectory(dir=args.folder, prefix="maxsim-") as folder:
        write_index(f"{folder}/index", args.documents, num_vectors=64, dim=args.dim)
        fields = {"folder": folder, "threads": args.threads, "repeats": args.repeats}
        fields |= {"query_tokens": args.query_tokens, "queries": args.queries}

        def take() -> dict[str, Any]:
            return run_apart("tests.bench.maxsim_index", json.dumps(fields))

        built = take()  # the first process packs the vectors
        run, peak, say = with_steady_peaks(take)
    read = run["bytes"] / peak["read"]
    rows = [
        ["packing from Lance (once)", f"{built['open_seconds']:.1f} s", "", ""],
        ["opening the index and its files", f"{run['open_seconds']:.3f} s", "", ""],
        ["first query, checksums included", f"{run['first_seconds']:.2f} s", "", ""],
    ]
    for num_queries, seconds in run["seconds"].items():
        taken = Repeats(tuple(seconds))
        rate = f"{int(num_queries) / taken.median:.2f}"
        name = "one query" if num_queries == "1" else f"{num_queries} queries"
        rows.append([name, f"{taken} s", rate, f"{read / taken.median:.0%}"])
    title = (
        f"{args.documents:,} documents of 64 int8 vectors ({run['bytes'] / 1e9:.2f} GB) in a mapped"
        f" file, queries of {args.query_tokens} x {args.dim}, the best 10, {args.threads} threads;"
        f" {run['peak_bytes'] / 2**30:.1f} GiB resident, including pages of the file. {say}"
    )
    header = ["", "time", "queries/s", "of the read peak"]
    figures = {"run": run, "packing_seconds": built["open_seconds"], "peaks": peak}
    bench.add("stored", title, figures, table(header, rows))


def quality(bench: Bench, args: Any) -> None:
    """Compares the quality of codecs on the shipped collections."""
    from tests.bench import maxsim_quality  # needs Lance and the encoder

    maxsim_quality.quality(bench, args)


FIGURES = {
    "scoring": scoring,
    "prefixes": prefixes,
    "corpus": corpus,
    "stored": stored,
    "quality": quality,
}

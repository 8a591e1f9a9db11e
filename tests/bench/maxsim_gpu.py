"""Benchmark of MaxSim on a GPU against a padded einsum and the peak rates of the device.

    python -m tests.bench maxsim_gpu
    python -m tests.bench maxsim_gpu --documents 4000000 --repeats 20 --out figures.json

Vectors are random and in GPU memory. Bytes count the documents once. Operations count all pairs of
tokens. The peak rates of the device are measured before and after. The benchmark needs neither Ray
nor Lance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jobs
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.int8 import Int8
from pipeline.config import SpecError
from pipeline.search.maxsim import backends, maxsim
from pipeline.search.packed import PackedVectors, Segment
from tests.bench.harness import Bench, Repeats, table

#: The papers' workload: images, tokens per image, queries, tokens per query, hits per query.
IMAGES, IMAGE_TOKENS, QUERIES, QUERY_TOKENS, TOP_K = 1000, 64, 5000, 20, 10
#: Queries per einsum. Larger batches are not faster and need more memory.
EINSUM_QUERIES = 250
#: Maximum fraction of the free memory for documents.
MEMORY_SHARE = 0.7
#: Data types of the vectors. The codec `bits`, with one bit per dimension, multiplies int8 numbers.
TYPES = {"float16": torch.float16, "int8": torch.int8, "bits": torch.uint8}
PRODUCTS = {"float16": "float16", "int8": "int8", "bits": "int8"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--documents", type=jobs.positive, default=2_000_000, help="maximum number of documents"
    )
    parser.add_argument("--tokens", type=jobs.positive, default=64, help="tokens per document")
    parser.add_argument(
        "--query-tokens", type=jobs.positive, default=32, help="tokens per query, M"
    )
    parser.add_argument("--queries", type=jobs.positive, nargs="+", default=[1, 32], metavar="Q")
    parser.add_argument("--dim", type=jobs.positive, default=128, help="dimensions, D")
    parser.add_argument("--repeats", type=jobs.positive, default=10, help="repeats per measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SpecError("device", "cuda", "a CUDA device", "is not available")
    bench = Bench("maxsim_gpu", arguments, args.out)
    figures = measure(
        num_docs=args.documents,
        num_tokens=args.tokens,
        dim=args.dim,
        query_counts=args.queries,
        query_tokens=args.query_tokens,
        repeats=args.repeats,
    )
    report(bench, figures)


def measure(
    *,
    num_docs: int = 2_000_000,
    num_tokens: int = 64,
    dim: int = 128,
    query_counts: Sequence[int] = (1, 32),
    query_tokens: int = 32,
    repeats: int = 10,
) -> dict[str, Any]:
    """Runs all measurements on the current CUDA device.

    Returns:
        `peaks`: bytes copied per second (read and written) and operations per second by type,
        before and after; `scoring`: one run per type and number of queries; `corpus`: the papers'
        workload by side; `memory`: bytes in addition to documents and scores, by number of
        documents. Times are `Repeats` of seconds.
    """
    torch.manual_seed(0)
    before = peaks(repeats)
    scoring = []
    for name, dtype in TYPES.items():
        width = dim // 8 if dtype == torch.uint8 else dim * dtype.itemsize
        size = min(num_docs, most_documents(num_tokens * (width + 4)))
        packed = documents(dtype, size, num_tokens, dim)
        for num_queries in query_counts:
            asked = queries(packed, num_queries, query_tokens)
            run = seconds(functools.partial(maxsim, asked, packed), repeats)
            scoring.append(
                {
                    "type": name,
                    "documents": size,
                    "queries": num_queries,
                    "backend": backends(packed)[-1],
                    "seconds": run,
                    "bytes": sum(part.nbytes for part in packed.segments[0].parts.values()),
                    "operations": 2 * num_queries * query_tokens * size * num_tokens * dim,
                    "off": off(asked, packed),
                }
            )
        del packed
    found = {
        "scoring": scoring,
        "corpus": corpus(dim, repeats),
        "memory": memory(min(num_docs, 200_000), num_tokens, dim, query_tokens),
    }
    return {"peaks": {"before": before, "after": peaks(repeats)}, **found}


def report(bench: Bench, figures: dict[str, Any]) -> None:
    """Prints the results together with the mean of the peak rates before and after."""
    both = figures["peaks"]
    peak = {name: (both["before"][name] + both["after"][name]) / 2 for name in both["before"]}
    rows = [
        [
            f"{name}, {'TB/s' if name == 'copy' else 'Tops/s'}",
            both["before"][name] / 1e12,
            both["after"][name] / 1e12,
        ]
        for name in peak
    ]
    bench.add("peaks", "Peak rates of the device", both, table(["", "before", "after"], rows))
    rows = []
    for run in figures["scoring"]:
        time = run["seconds"].median
        rows.append(
            [
                run["type"],
                f"{run['queries']:,}",
                f"{run['documents']:,}",
                run["backend"],
                scaled(run["seconds"], 1e3),
                f"{run['bytes'] / time / peak['copy']:.0%}",
                f"{run['operations'] / time / peak[PRODUCTS[run['type']]]:.0%}",
                f"{run['off']:.0e}",
            ]
        )
    header = ["type", "queries", "documents", "by", "ms", "of copy", "of matmul", "off at most"]
    bench.add("scoring", "All documents", {"runs": figures["scoring"]}, table(header, rows))
    rows = []
    for name, run in figures["corpus"].items():
        time = run["seconds"].median
        rate = run["operations"] / time / peak["float16"]
        rows.append([name, scaled(run["seconds"], 1e3), run["queries"] / time, f"{rate:.0%}"])
    title = (
        f"{QUERIES:,} queries of {QUERY_TOKENS} tokens, {IMAGES:,} images of {IMAGE_TOKENS}, with"
        f" the {TOP_K} best"
    )
    header = ["side", "ms", "queries/s", "of matmul"]
    bench.add("corpus", title, {"sides": figures["corpus"]}, table(header, rows))
    rows = [[f"{size:,}", extra / 2**20] for size, extra in figures["memory"].items()]
    title = "Memory in addition to documents and scores, MiB"
    bench.add("memory", title, {"bytes": figures["memory"]}, table(["documents", "MiB"], rows))


# -- peak rates --------------------------------------------------------------------------------


def peaks(repeats: int) -> dict[str, float]:
    """Measures the bytes copied per second, and the operations per second of matrix products."""
    found = {"copy": copied(most_documents(2 << 20, at_most=2048) << 20, repeats)}
    size = 8192
    square = torch.randn(size, size, device="cuda")
    half, brain = square.half(), square.bfloat16()
    small = torch.randint(-127, 128, (size, size), dtype=torch.int8, device="cuda")
    # The second factor has the layout of documents: the numbers of a token are contiguous.
    sides: dict[str, Callable[[], Any]] = {
        "float16": lambda: half @ half.T,
        "bfloat16": lambda: brain @ brain.T,
        "int8": lambda: torch._int_mm(small, small.T),
    }
    for name, side in sides.items():
        found[name] = 2 * size**3 / seconds(side, repeats).median
    return found


def copied(size: int, repeats: int) -> float:
    """Measures the bytes read and written per second when `size` bytes are copied."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), repeats).median


def seconds(call: Callable[[], object], repeats: int) -> Repeats:
    """Measures consecutive calls with CUDA events after two warm-up calls."""
    taken = []
    for turn in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 2:
            taken.append(start.elapsed_time(end) / 1e3)
    return Repeats(tuple(taken))


def scaled(times: Repeats, factor: float) -> Repeats:
    """Returns the times in another unit."""
    return Repeats(tuple(factor * value for value in times.values))


# -- documents and queries ---------------------------------------------------------------------


def most_documents(item_bytes: int, at_most: int = 1 << 40) -> int:
    """Returns how many items of `item_bytes` bytes fit into the free GPU memory."""
    torch.cuda.empty_cache()  # counts cached blocks as free
    free, _ = torch.cuda.mem_get_info()
    return max(min(int(MEMORY_SHARE * free) // item_bytes, at_most), 1)


def documents(dtype: torch.dtype, num_docs: int, num_tokens: int, dim: int) -> PackedVectors:
    """Generates random vectors whose length is approximately 1."""
    shape, lengths = (num_docs * num_tokens, dim), torch.full((num_docs,), num_tokens).cuda()
    if dtype == torch.int8:
        values = torch.empty(shape, dtype=dtype, device="cuda").random_(-127, 128)
        scales = torch.full((shape[0], 1), 1 / (73 * dim**0.5), device="cuda")
        parts = {"values": values, "scales": scales}
        return PackedVectors([Segment(Int8(Int8.Spec()), dim, parts, lengths)])
    if dtype == torch.uint8:
        codec = Bits(Bits.Spec(), Bits.fit(Bits.Spec(), np.ones((1, dim), np.float32)))
        parts = {
            "bits": torch.empty(shape[0], dim // 8, dtype=dtype, device="cuda").random_(0, 256),
            "scales": torch.full((shape[0], 1), dim**-0.5, dtype=torch.float16, device="cuda"),
            "projections": torch.zeros(shape[0], 1, dtype=torch.float16, device="cuda"),
        }
        return PackedVectors([Segment(codec, dim, parts, lengths)])
    values = torch.empty(shape, dtype=dtype, device="cuda").normal_(0, dim**-0.5)
    return PackedVectors.from_values(values, lengths)


def queries(packed: PackedVectors, num_queries: int, num_tokens: int) -> list[torch.Tensor]:
    """Generates random unit vectors and transforms them with the codec of the documents."""
    numbers = torch.randn(num_queries, num_tokens, packed.dim, device="cuda")
    numbers = torch.nn.functional.normalize(numbers, dim=2)
    return [packed.codec.transform_queries(query) for query in numbers]


def off(asked: list[torch.Tensor], packed: PackedVectors, num_docs: int = 1000) -> float:
    """Returns the maximum deviation from torch per query token, measured on the first documents."""
    rows = torch.arange(min(num_docs, len(packed)), device="cuda")
    theirs = maxsim(asked, packed, rows=rows, backend="torch")
    return ((maxsim(asked, packed, rows=rows) - theirs).abs().max() / len(asked[0])).item()


def corpus(dim: int, repeats: int) -> dict[str, Any]:
    """Compares the papers' workload, including the top images per query, with a padded einsum."""
    packed = documents(torch.float16, IMAGES, IMAGE_TOKENS, dim)
    asked = queries(packed, QUERIES, QUERY_TOKENS)
    docs_BND = packed.segments[0].parts["values"].view(IMAGES, IMAGE_TOKENS, dim)
    queries_QMD = torch.stack(asked).half()

    def by_einsum() -> torch.Tensor:
        scores = [
            torch.einsum("qmd,bnd->qbmn", some_qMD, docs_BND).amax(dim=3).float().sum(dim=2)
            for some_qMD in queries_QMD.split(EINSUM_QUERIES)
        ]
        return torch.cat(scores).topk(TOP_K).indices

    sides: dict[str, Callable[[], Any]] = {
        backends(packed)[-1]: lambda: maxsim(asked, packed).topk(TOP_K).indices,
        "padded einsum, float16": by_einsum,
    }
    count = 2 * QUERIES * QUERY_TOKENS * IMAGES * IMAGE_TOKENS * dim
    return {
        name: {"seconds": seconds(side, repeats), "queries": QUERIES, "operations": count}
        for name, side in sides.items()
    }


def memory(num_docs: int, num_tokens: int, dim: int, query_tokens: int) -> dict[int, int]:
    """Measures the peak memory for 8 queries that is allocated beyond documents and scores."""
    found = {}
    for size in (max(num_docs // 10, 1), num_docs):
        packed = documents(torch.float16, size, num_tokens, dim)
        asked = queries(packed, 8, query_tokens)
        maxsim(asked, packed)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = maxsim(asked, packed)
        found[size] = torch.cuda.max_memory_allocated() - before - scores.nbytes
        del packed, scores
    return found


if __name__ == "__main__":
    jobs.run(main)

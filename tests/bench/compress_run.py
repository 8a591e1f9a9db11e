"""Measures one compressor and its lower bound in this process.

    python -m tests.bench.compress_run '{"name": "samer", "batches": [1, 256], "repeats": 5, ...}'

The argument is a JSON object with the fields of `Run`. The last line of the output is a JSON object
with the size of each batch, the seconds per document of both sides and the CPU seconds of the
method for each repeat, and the peak memory of the method. The script needs neither Ray nor Lance.

The lower bound ("bare") consists of the operations that the method cannot avoid. For `samer`,
`attention_clustering` and `agc`, these are the matrix products of their equations with the same
number of threads: distances (N x K x D) and means (K x N x D) of each iteration, and the final
ones. For hierarchical clustering, it is scipy's `pdist`, `linkage` and `fcluster` on the CPU, one
document at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist

from pipeline.compression import Compressor
from pipeline.config import SpecError, override, parse
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch
from tests.bench.harness import peak_bytes

NUM_FITTED = 8  # documents on which methods are fitted
NUM_PROBED = 16  # documents that are sufficient to recognise a slow method


@dataclass(frozen=True)
class Run:
    """Settings of a measurement.

    Attributes:
        name: Compressor, with settings as in "hpool,linkage=rows".
        batches: Batch sizes. On a CPU, all but the smallest are reduced if all repeats would take
            longer than `seconds`; on a GPU, only if a single call would. Then the number of repeats
            is reduced.
        repeats: Repeats per measurement, alternating between the two sides.
        seconds: Approximate time limit per batch size.
        num_tokens: Tokens per document, N.
        dim: Dimensions, D.
        num_vectors: Vectors per document, K.
        device: Device, "cpu" or "cuda".
    """

    name: str
    batches: tuple[int, ...]
    repeats: int
    seconds: float
    num_tokens: int
    dim: int
    num_vectors: int
    device: str


def main() -> None:
    """Prints the measurements."""
    print(json.dumps(measure(Run(**json.loads(sys.argv[1])))))


def measure(run: Run) -> dict[str, Any]:
    """Measures a method.

    Returns the reason if the method cannot be built from a name and K alone.
    """
    try:
        compressor = build(run)
    except SpecError as error:
        return {"name": run.name, "problem": str(error)}
    before = peak_bytes()
    rows: list[dict[str, Any]] = []
    for size in sorted(run.batches):
        if rows:
            size = max(rows[-1]["size"], fitting_size(run, compressor, size, rows[-1]))
        batch = documents(run, compressor, size).to(run.device)
        rows.append(time_both(run, compressor, batch))
    return {
        "name": run.name,
        "batches": rows,
        "before_bytes": before,
        "threads": torch.get_num_threads(),
    }


def fitting_size(run: Run, compressor: Compressor, size: int, row: dict[str, Any]) -> int:
    """Returns the batch size that fits into the time limit, given the results of a smaller one.

    On a GPU, launches of kernels determine the time of a small batch, which is about the same for
    larger ones.
    """
    least = min(size, NUM_PROBED)
    each = sorted(row["seconds"])[len(row["seconds"]) // 2]
    if run.device == "cuda":
        batch = documents(run, compressor, least).to(run.device)
        sides = both_sides(run, compressor, batch).values()
        each = sum(min(timed(side, run.device) for _ in range(2)) for side in sides) / least
        if each * size <= run.seconds:
            return size
    return min(size, max(least, int(run.seconds / (each * (1 + run.repeats)))))


def both_sides(
    run: Run, compressor: Compressor, batch: TokenBatch
) -> dict[str, Callable[[], object]]:
    """Returns the method and its lower bound, if it has one, by their keys in the results."""
    sides: dict[str, Callable[[], object]] = {"seconds": lambda: compressor.compress(batch)}
    if make_bare := BARE.get(run.name) or BARE.get(compressor.spec.name):
        sides["bare"] = make_bare(run, compressor, batch)
    return sides


def time_both(run: Run, compressor: Compressor, batch: TokenBatch) -> dict[str, Any]:
    """Measures the seconds per document of the method and its lower bound, and the peak memory.

    The CPU seconds of the method are those of all threads. Other processes change them less.
    """
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first = timed(lambda: compressor.compress(batch), run.device)  # warm-up
    peak = torch.cuda.max_memory_allocated() if run.device == "cuda" else peak_bytes()
    sides = both_sides(run, compressor, batch)
    if "bare" in sides:
        timed(sides["bare"], run.device)
    if run.device == "cuda":  # the first call initialises libraries and allocates memory
        first = timed(sides["seconds"], run.device)
    repeats = max(1, min(run.repeats, int(run.seconds / first)))
    taken: dict[str, list[float]] = {name: [] for name in (*sides, "cpu_seconds")}
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            cpu_start = time.process_time()
            taken[side].append(timed(sides[side], run.device) / len(batch))
            if side == "seconds":
                taken["cpu_seconds"].append((time.process_time() - cpu_start) / len(batch))
    return {"size": len(batch), "peak_bytes": peak, **taken}


def timed(work: Callable[[], object], device: str) -> float:
    """Measures the duration of a call in seconds. On a GPU, CUDA events measure its kernels."""
    if device != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1000


def build(run: Run) -> Compressor:
    """Builds the compressor with K vectors and default options, and fits it if necessary."""
    name, *settings = run.name.split(",")
    cls = COMPRESSORS.load(name)
    budget = {"num_vectors": run.num_vectors, "ratio": run.num_vectors / run.num_tokens}
    fields = next(({key: budget[key]} for key in budget if key in cls.Spec.model_fields), {})
    compressor = cls(parse(cls.Spec, override({"name": name, **fields}, settings)))
    if not compressor.needs_fit:
        return compressor
    sample = documents(run, compressor, NUM_FITTED, seed=1)
    return cls(compressor.spec, cls.fit(compressor.spec, [sample]))


def documents(run: Run, compressor: Compressor, size: int, seed: int = 0) -> TokenBatch:
    """Generates random vectors with boxes, appended tokens and attention statistics if needed."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(size, run.num_tokens, run.dim, generator=generator)
    corners = torch.rand(size, run.num_tokens, 2, generator=generator) * 0.9
    no_times = torch.full_like(corners, torch.nan)
    return TokenBatch(
        torch.nn.functional.normalize(vectors, dim=2),
        torch.ones(size, run.num_tokens, dtype=torch.bool),
        normalised=True,
        extents=torch.cat([corners, corners + 0.1, no_times], dim=2),
        taps={
            tap.name: torch.rand(size, run.num_tokens, generator=generator)
            for tap in compressor.needs_taps
        },
        appended=torch.randn(size, run.num_vectors, run.dim, generator=generator),
    )


def products(rounds: int, run: Run, batch: TokenBatch) -> Callable[[], None]:
    """Returns a function that computes distances to K centroids and K weighted sums in rounds."""
    tokens_BND = batch.vectors
    centroids_BKD = tokens_BND[:, : run.num_vectors].contiguous()
    weights_BKN = tokens_BND.new_ones(len(batch), run.num_vectors, run.num_tokens)

    def work() -> None:
        for _ in range(rounds):
            tokens_BND @ centroids_BKD.mT
            weights_BKN @ tokens_BND

    return work


def samer(run: Run, compressor: Compressor, batch: TokenBatch) -> Callable[[], None]:
    """Returns the products of eq. 2 and the means of each iteration, followed by eq. 2 and 3."""
    return products(compressor.spec.num_iterations + 1, run, batch)


def assignment(run: Run, compressor: Compressor, batch: TokenBatch) -> Callable[[], None]:
    """Returns the products of the assignment to the K most salient tokens and of the means."""
    return products(1, run, batch)


def ward(
    distances: Callable[[np.ndarray], np.ndarray],
) -> Callable[[Run, Compressor, TokenBatch], Callable[[], None]]:
    """Returns a function that clusters the tokens of a document by Ward linkage."""

    def bare(run: Run, compressor: Compressor, batch: TokenBatch) -> Callable[[], None]:
        items = batch.vectors.double().cpu().numpy()

        def work() -> None:
            for item in items:
                tree = hierarchy.linkage(distances(item), method="ward")
                hierarchy.fcluster(tree, run.num_vectors, criterion="maxclust")

        return work

    return bare


def row_distances(item: np.ndarray) -> np.ndarray:
    """Computes condensed distances between the rows of the cosine distance matrix."""
    return pdist(1 - item @ item.T)


BARE = {
    "samer": samer,
    "attention_clustering": assignment,
    "agc": assignment,
    "hpool": ward(pdist),
    "hpool,linkage=rows": ward(row_distances),
    "hpool,linkage=condensed": ward(lambda item: pdist(item, "cosine")),
}


if __name__ == "__main__":
    main()

"""Benchmark of the MaxSim of training on a GPU against kernels of other projects.

    python -m tests.bench maxsim_loss
    python -m tests.bench maxsim_loss --documents 64 256 --tokens 64 1030 --out figures.json

Time and peak memory of the scores of a batch (every query with every document) and their gradient,
in bfloat16 vectors, for `pipeline.train.losses.late_scores`, a padded einsum, and the packages
late-interaction-kernels and flash-maxsim, which must be installed. Deviations are relative to the
largest value of the gradient of the documents in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import jobs
from pipeline.config import SpecError
from pipeline.tokens import normalise
from pipeline.train.losses import late_scores
from tests.bench.harness import Bench, Repeats, table

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--documents", type=jobs.positive, nargs="+", default=[32, 128, 512])
    parser.add_argument("--tokens", type=jobs.positive, nargs="+", default=[64, 1030])
    parser.add_argument("--query-tokens", type=jobs.positive, default=32)
    parser.add_argument("--dim", type=jobs.positive, default=128)
    parser.add_argument("--repeats", type=jobs.positive, default=10)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SpecError("device", "cuda", "a CUDA device", "is not available")
    bench = Bench("maxsim_loss", arguments, args.out)
    for num_docs in args.documents:
        for num_tokens in args.tokens:
            compare(bench, num_docs, num_tokens, args)


def sides() -> dict[str, Scores]:
    """Returns the implementations by name."""
    from flash_maxsim import flash_maxsim_batched_train
    from late_interaction_kernels import maxsim

    return {
        "late_scores": _ours,
        "padded einsum": _einsum,
        "late-interaction-kernels": maxsim,
        "late-interaction-kernels, lowmem": functools.partial(maxsim, backward="lowmem"),
        "flash-maxsim": flash_maxsim_batched_train,
    }


def _ours(queries: torch.Tensor, docs: torch.Tensor) -> torch.Tensor:
    masks = (torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for t in (queries, docs))
    query_mask, doc_mask = masks
    return late_scores(queries, query_mask, docs, doc_mask, reduction="sum")


def _einsum(queries: torch.Tensor, docs: torch.Tensor) -> torch.Tensor:
    return torch.einsum("qmd,bnd->qmbn", queries, docs).amax(dim=3).sum(dim=1).float()


def compare(bench: Bench, num_docs: int, num_tokens: int, args: Any) -> None:
    """Measures all implementations at one size."""
    torch.manual_seed(0)
    shapes = ((num_docs, args.query_tokens, args.dim), (num_docs, num_tokens, args.dim))
    queries, docs = (
        normalise(torch.randn(shape, device="cuda")).bfloat16().requires_grad_() for shape in shapes
    )
    upstream = torch.randn(num_docs, num_docs, device="cuda")
    exact = [t.detach().double().requires_grad_() for t in (queries, docs)]
    (_blockwise_exact(*exact) * upstream).sum().backward()
    assert exact[1].grad is not None
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    for name, scores in sides().items():
        try:
            figures[name] = measure(scores, queries, docs, upstream, exact[1].grad, args.repeats)
        except torch.OutOfMemoryError:
            rows.append([name, *["out of memory"] * 2, "", ""])
            torch.cuda.empty_cache()
            continue
        taken = figures[name]
        times = (Repeats(tuple(1e3 * s for s in taken[k])) for k in ("forward", "both"))
        rows.append([name, *times, f"{taken['bytes'] / 2**20:,.0f}", f"{taken['deviation']:.0e}"])
    header = ["", "forward, ms", "with backward, ms", "peak MiB", "deviation of the gradient"]
    shape = f"{num_docs} queries of {args.query_tokens} and {num_docs} documents of {num_tokens}"
    bench.add(f"{num_docs} {num_tokens}", f"{shape} tokens", figures, table(header, rows))


def _blockwise_exact(queries: torch.Tensor, docs: torch.Tensor) -> torch.Tensor:
    """Computes exact scores document by document, so that float64 fits into memory."""
    each = [
        torch.utils.checkpoint.checkpoint(
            lambda q, d: (q @ d.T).amax(dim=2).sum(dim=1), queries, doc, use_reentrant=False
        )
        for doc in docs
    ]
    return torch.stack(each, dim=1)


def measure(
    scores: Scores,
    queries: torch.Tensor,
    docs: torch.Tensor,
    upstream: torch.Tensor,
    exact_gradient: torch.Tensor,
    repeats: int,
) -> dict[str, Any]:
    """Measures one implementation.

    Returns:
        `forward` and `both`: seconds per repeat; `bytes`: peak memory beyond the inputs;
        `deviation`: of the gradient of the documents.
    """

    def run(with_backward: bool) -> None:
        queries.grad = docs.grad = None
        total = (scores(queries, docs) * upstream).sum()
        if with_backward:
            total.backward()

    run(True)  # compiles kernels
    assert docs.grad is not None
    deviation = (docs.grad.double() - exact_gradient).abs().max() / exact_gradient.abs().max()
    queries.grad = docs.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(True)
    peak = torch.cuda.max_memory_allocated() - before
    times: dict[str, list[float]] = {"forward": [], "both": []}
    for _ in range(repeats):
        for name, with_backward in (("forward", False), ("both", True)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(with_backward)
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return {**times, "bytes": peak, "deviation": float(deviation)}

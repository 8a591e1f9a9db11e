"""Runs the benchmarks of docs/results/benchmarks.md on this machine.

    python -m tests.bench pipeline
    python -m tests.bench pipeline --only minilm --items 1500 --repeats 1 --out figures.json

Each benchmark prints its results with the machine, the versions and the command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import jobs

BENCHES = {
    "add": "vectors given in Python against writing them to Lance",
    "candidates": "candidate generators against exact search: build time, recall, latency",
    "commits": "commits, lease renewals, opening and filters against the number of fragments",
    "compress": "time and memory of each compressor; their share of indexing",
    "driver": "empty units through the stream of the index job; scaling of sleeping actors",
    "efficiency": "quality, time, bytes and memory of Maxray and other systems",
    "encode": "image and text encoders: attention statistics, throughput, number of actors",
    "first_hit": "Maxray and other tools from an empty environment to the first hit in 40 files",
    "fusion": "the fused score against MaxSim on judged collections",
    "index_gpu": "the index job on one GPU: throughput, use of the GPU, recovery, recompression",
    "listing": "planning of millions of files in an object store with latency",
    "maxsim": "MaxSim on CPUs against a padded einsum and the peak rates of the machine",
    "maxsim_gpu": "MaxSim on a GPU against a padded einsum and the peak rates of the device",
    "maxsim_loss": "MaxSim of training and its gradient on a GPU against other kernels",
    "media": "video and audio sources against plain loops; memory; OCR and ASR",
    "mteb": "reading and evaluating a snapshot of an mteb task against mteb's own loop",
    "nodes": "the index job with sleeping encoders on 1, 2 and 4 nodes",
    "pages": "the source of PDF pages against a plain loop; memory on a long document",
    "pipeline": "the index job against a plain loop; resuming; memory of the driver",
    "plan": "predicted and actual time and size of index jobs",
    "reload": "memory of a new version of an index next to the one in service",
    "rerank": "throughput and latency of EDJE reranking against a plain loop",
    "serve": "search over HTTP against search in process; overload, crashes, new versions",
    "serve_gpu": "exact search on a GPU, in process and over HTTP",
    "serve_nodes": "searches over HTTP while a node of the cluster dies",
    "train": "training with and without cached hidden states; LoRA on a large model",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark that the first argument names and passes the other arguments to it."""
    parser = jobs.parser(__doc__)
    listing = "; ".join(f"{name}: {summary}" for name, summary in BENCHES.items())
    parser.add_argument("bench", choices=BENCHES, help=listing)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    bench = parser.parse_args(
        arguments[:1]
    ).bench  # the rest, including --help, is for the benchmark
    importlib.import_module(f"tests.bench.{bench}").main(arguments[1:])


if __name__ == "__main__":
    jobs.run(main)

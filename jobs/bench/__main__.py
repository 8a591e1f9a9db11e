"""Measures this software on this machine: `bench WHAT`, the figures of docs/benchmarks.md.

    python -m jobs.bench pipeline
    python -m jobs.bench pipeline --only minilm --items 1500 --repeats 1 --out figures.json

Each prints the machine, the versions and the command with its figures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import jobs

BENCHES = {
    "compress": "the time and memory of each compressor; their share of the index job",
    "encode": "encoders of pictures: attention taps, JPEG files to vectors, actors",
    "maxsim": "scoring on CPUs beside the common scorer and the peaks of the machine",
    "maxsim_gpu": "MaxSim on a GPU against copying, multiplying and a padded einsum",
    "media": "the sources of video and sound against bare loops; memory; recognition",
    "pages": "the source of PDF pages against a bare loop; the memory of a long document",
    "pipeline": "the index job against a bare loop; resuming; the driver's memory",
    "rerank": "pairs of text and item a second, and the latency of a query, beside a plain loop",
    "serve": "searches over HTTP beside searches in process; load, crashes, new versions",
    "train": "an epoch with and without cached hidden states; LoRA on a large model",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench that the first argument names; the others are its own."""
    parser = jobs.parser(__doc__)
    listing = "; ".join(f"{name}: {about}" for name, about in BENCHES.items())
    parser.add_argument("bench", choices=BENCHES, help=listing)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    bench = parser.parse_args(arguments[:1]).bench  # what follows, --help too, is the bench's own
    importlib.import_module(f"jobs.bench.{bench}").main(arguments[1:])


if __name__ == "__main__":
    jobs.run(main)

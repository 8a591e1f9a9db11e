"""Measures this software on this machine: `bench WHAT`, the figures of docs/benchmarks.md.

    python -m jobs.bench pipeline
    python -m jobs.bench pipeline --only minilm --items 1500 --repeats 1 --out figures.json

Each prints the machine, the versions and the command with its figures.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import jobs

BENCHES = {
    "compress": "the time and memory of each compressor; their share of the index job",
    "media": "the sources of video and sound against bare loops; memory; recognition",
    "pages": "the source of PDF pages against a bare loop; the memory of a long document",
    "pipeline": "the index job against a bare loop; resuming; the driver's memory",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench that the first argument names; the others are its own."""
    parser = jobs.parser(__doc__)
    listing = "; ".join(f"{name}: {about}" for name, about in BENCHES.items())
    parser.add_argument("bench", choices=BENCHES, help=listing)
    args, others = parser.parse_known_args(arguments[:1] if arguments is not None else None)
    importlib.import_module(f"jobs.bench.{args.bench}").main(others)


if __name__ == "__main__":
    jobs.run(main)

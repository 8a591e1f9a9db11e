"""The demo: indexes the shipped Cranfield collection, evaluates every method, searches.

    python -m jobs.demo

No GPU and no model hub needed. Run it again: the index is there, so nothing is encoded twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jobs
from jobs import evaluate, index, search

SPECS = "jobs/specs/cranfield.yaml", "jobs/specs/cranfield_evaluate.yaml"
INDEX, OUTPUT = "out/cranfield/index", "out/cranfield/evaluation"
SEARCHES = [
    ("hpool_32", "how does a slipstream change the lift of a wing"),
    ("samer_32", "heat transfer to a blunt body at hypersonic speed"),
    ("full", "buckling of thin cylindrical shells under axial compression"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the phases one after the other, each timed."""
    jobs.parser(__doc__).parse(arguments)
    spent = []

    def phase(name: str, run, *arguments: str) -> None:
        print(f"\n== {name}: python -m {run.__module__} {' '.join(arguments)}", flush=True)
        start = time.perf_counter()
        run(arguments)
        spent.append((name, time.perf_counter() - start))

    phase("index", index.main, SPECS[0], "--resources", "cluster/profiles/laptop.yaml")
    for representation, query in SEARCHES:
        name = f"search in {representation}"
        phase(name, search.main, INDEX, query, "--representation", representation, "--k", "3")
    phase("evaluate", evaluate.main, SPECS[1])
    print("\ntimes: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent))
    print(f"table: {OUTPUT}/table.md\nplot:  {OUTPUT}/quality_bytes.png")


if __name__ == "__main__":
    jobs.run(main)

"""The demo: indexes the shipped abstracts and PDF pages, searches them, evaluates every method.

    python -m jobs.demo

No GPU and no model hub needed. Run it again: what is indexed and evaluated is not done twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jobs
from jobs import evaluate, index, search

RESOURCES = "cluster/profiles/laptop.yaml"
ABSTRACTS, PAGES = "out/cranfield", "out/pages"
SEARCHES = [
    (ABSTRACTS, "hpool_32", "how does a slipstream change the lift of a wing", []),
    (ABSTRACTS, "full", "buckling of thin cylindrical shells under axial compression", []),
    (PAGES, "full", "how many people have a severe disability", ["--save-maps", f"{PAGES}/maps"]),
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

    phase("index abstracts", index.main, "jobs/specs/cranfield.yaml", "--resources", RESOURCES)
    phase("index pages", index.main, "jobs/specs/pages.yaml", "--resources", RESOURCES)
    for folder, representation, query, options in SEARCHES:
        asked = (f"{folder}/index", query, "--representation", representation, "--k", "2", *options)
        phase("search", search.main, *asked)
    phase("evaluate abstracts", evaluate.main, "jobs/specs/cranfield_evaluate.yaml")
    phase("evaluate pages", evaluate.main, "jobs/specs/pages_evaluate.yaml")
    print("\ntimes: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent))
    for folder in (ABSTRACTS, PAGES):
        print(f"report: {folder}/evaluation/report.html")
    print(f"maps:   {PAGES}/maps")


if __name__ == "__main__":
    jobs.run(main)

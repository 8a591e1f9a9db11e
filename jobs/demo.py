"""The demo: indexes what is shipped of five kinds into one index, searches and evaluates it.

    python -m jobs.demo

Abstracts, PDF pages, photos, clips and a speech; questions whose answers are on a page, in what is
said and in a photo. No GPU and no model hub needed. Run it again: what is indexed and evaluated is
not done twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jobs
from jobs import evaluate, index, search

RESOURCES = "cluster/profiles/laptop.yaml"
OUT = "out/demo"
INDEX = f"{OUT}/index"
COLLECTIONS = ["cranfield", "us_government", "photos"]
#: What is asked, and of which representation.
QUESTIONS = [
    ("how does a slipstream change the lift of a wing", "hpool_32"),
    ("how many people have a severe disability", "full"),
    ("ask what you can do for your country", "full"),
    ("two people on horseback at the sea", "caption_full"),
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

    phase("index", index.main, "jobs/specs/demo.yaml", "--resources", RESOURCES)
    for number, (question, representation) in enumerate(QUESTIONS, start=1):
        how = ("--representation", representation, "--k", "2", "--group-by", "parent")
        maps = ("--save-maps", f"{OUT}/maps/{number}") if number > 1 else ()
        phase("search", search.main, INDEX, question, *how, *maps)
    for name in COLLECTIONS:
        phase(f"evaluate {name}", evaluate.main, f"jobs/specs/{name}_evaluate.yaml")
    print("\ntimes: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent))
    for name in COLLECTIONS:
        print(f"report: {OUT}/{name.replace('_', '-')}/report.html")
    print(f"maps:   {OUT}/maps")


if __name__ == "__main__":
    jobs.run(main)

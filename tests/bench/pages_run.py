"""Reads text and images of all pages in a folder with the source stage or with a plain loop.

    python -m tests.bench.pages_run ray FOLDER PROCESSES
    python -m tests.bench.pages_run bare FOLDER PROCESSES

The plain loop calls the reading functions of the source in the given number of processes, without
Ray, without a process that isolates crashes, and without blocks for transport. The last line of the
output is a JSON object with the number of pages and the seconds from the first to the last result
(for the plain loop: of reading).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jobs
from pipeline.data.decode import pdf
from pipeline.data.pages import Pages
from tests.bench.loops import run_loops

NEEDS = ("text", "image")


def main() -> None:
    """Runs one side and prints its result."""
    side, folder, processes = sys.argv[1:]
    run = {"ray": source_stage, "bare": bare_loops}[side]
    print(json.dumps(run(Pages.Spec(path=folder), int(processes))))


def source_stage(spec: Pages.Spec, processes: int) -> dict[str, Any]:
    """Measures the source stage of the index job without its start-up time."""
    from pipeline.index import listing, unit_reader
    from pipeline.index.ray_data import configure, rows_of, unit_dataset
    from pipeline.index.stage import Resources, from_ipc

    with tempfile.TemporaryDirectory() as folder, jobs.cluster():
        listed = listing.ListingJob(f"{folder}/index", f"{folder}/job", spec, "", (), NEEDS)
        ranges = [r for tally in listing.list_source(listed) for r in tally.ranges]
        configure()
        pool = Resources(num_cpus=1, max_actors=processes)
        arrivals = [
            (from_ipc(row["items"]).num_rows, time.perf_counter())
            for row in rows_of(unit_dataset(partial(unit_reader.read_units, listed), ranges, pool))
            if row is not None
        ]
    pages = sum(num_pages for num_pages, _ in arrivals[1:])
    return {"amount": pages, "seconds": arrivals[-1][1] - arrivals[0][1]}


def bare_loops(spec: Pages.Spec, processes: int) -> dict[str, Any]:
    """Runs plain loops over the documents of a folder."""
    settings = {"text": True, "image": True, "dpi": spec.dpi, "max_pixels": spec.max_pixels}
    paths = sorted(map(str, Path(spec.path).rglob("*.pdf")))
    return run_loops(_read_pages, paths, settings, processes)


def _read_pages(path: str, settings: dict[str, Any]) -> float:
    numbers = range(1, pdf.describe(path)["num_pages"] + 1)
    pages = pdf.read_pages(path, list(numbers), settings)
    return sum(isinstance(page, dict) for page in pages)


if __name__ == "__main__":
    main()

"""Benchmark of PDF pages: the source stage against a plain loop, and memory on a long document.

    python -m tests.bench pages
    python -m tests.bench pages --only speed --copies 4 --repeats 1 --out figures.json

The input consists of copies of the shipped PDFs, and of one PDF with all their pages, repeated.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pypdfium2 as pdfium
import yaml

import jobs
from tests.bench.commit_history import commits
from tests.bench.harness import Bench, Repeats, descendants, proportional_bytes, run_apart, table
from tests.tiny import SLEEPING

PDFS = Path(jobs.__file__).parent / "data/pages/pdf"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument(
        "--copies", type=jobs.positive, default=16, help="copies of the 77 shipped pages"
    )
    parser.add_argument(
        "--pages", type=jobs.positive, default=2000, help="pages of the long document"
    )
    parser.add_argument("--processes", type=jobs.positive, default=2, help="reading processes")
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="repeats per comparison")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("pages", arguments, args.out)
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        for name, figure in FIGURES.items():
            if not args.only or name in args.only:
                figure(bench, Path(folder), args)


def speed(bench: Bench, folder: Path, args: Any) -> None:
    """Compares the pages per second of both sides, alternating their order."""
    copies = folder / "copies"
    for copy in range(args.copies):
        shutil.copytree(PDFS, copies / f"{copy:02}")
    taken: dict[str, list[float]] = {"ray": [], "bare": []}
    for repeat in range(args.repeats):
        for side in ("ray", "bare") if repeat % 2 == 0 else ("bare", "ray"):
            run = run_apart("tests.bench.pages_run", side, str(copies), str(args.processes))
            taken[side].append(run["amount"] / run["seconds"])
    rates = {side: Repeats(tuple(values)) for side, values in taken.items()}
    ratio = rates["ray"].over(rates["bare"])
    rows: list[tuple[str, Repeats | str]] = [
        ("plain pypdfium2 loops", rates["bare"]),
        ("source stage", rates["ray"]),
        ("**ratio**", f"**{ratio}**"),
    ]
    title = (
        f"words and 144 dpi images of {77 * args.copies:,} pages,"
        f" {args.processes} processes per side"
    )
    bench.add("speed", title, {**rates, "ratio": ratio}, table(["", "pages/s"], rows))


def memory(bench: Bench, folder: Path, args: Any) -> None:
    """Measures the memory of all processes of an index job on a single long document."""
    (folder / "long").mkdir()
    long_document(folder / "long/all.pdf", args.pages)
    spec = {
        "index": str(folder / "index"),
        "source": {"name": "pages", "path": str(folder / "long")},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0,
            "num_tokens": 64,
            "dim": 32,
        },
        "representations": [{"compressor": "none"}],
        "unit_items": 16,
        "fragment_items": 64,
        "commit_items": 128,
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "jobs.index", str(folder / "spec.yaml")]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[tuple[float, int]] = []
    sampler = threading.Thread(target=_sample, args=(job, samples))
    sampler.start()
    if job.wait():
        raise RuntimeError("the index job failed; run it separately to see its output")
    sampler.join()
    history = commits(folder / "index")
    last = history[-1][1]
    figures: dict[int, float] = {}
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        when, num_pages = next(commit for commit in history if commit[1] >= share * last)
        # The peak within two seconds, because a single sample depends on chance.
        near = [held for at, held in samples if abs(at - when) <= 2]
        figures[num_pages] = max(near) / 2**20
    rows = [[f"{pages:,}", f"{held:,.0f}"] for pages, held in figures.items()]
    rows.append(["peak", f"{max(held for _, held in samples) / 2**20:,.0f}"])
    title = f"memory of the whole job over a PDF of {args.pages:,} pages"
    text = table(["pages indexed", "MiB of all processes"], rows)
    bench.add("memory", title, {"MiB": figures}, text)


def long_document(path: Path, num_pages: int) -> None:
    """Writes a PDF that repeats the shipped pages until it has `num_pages` pages."""
    document = pdfium.PdfDocument.new()
    for file in itertools.cycle(sorted(PDFS.glob("*.pdf"))):
        pages = pdfium.PdfDocument(file)
        missing = num_pages - len(document)
        document.import_pages(pages, list(range(min(len(pages), missing))))
        if len(document) == num_pages:
            break
    document.save(path)


def _sample(job: subprocess.Popen[bytes], samples: list[tuple[float, int]]) -> None:
    while job.poll() is None:
        samples.append(
            (time.time(), sum(map(proportional_bytes, (job.pid, *descendants(job.pid)))))
        )
        time.sleep(0.5)


FIGURES = {"speed": speed, "memory": memory}

"""Benchmark of the mteb components against mteb's own loop with the same encoder.

    python -m tests.bench mteb
    python -m tests.bench mteb --pages 200 --queries 50 --repeats 1 --out figures.json

The input is a snapshot in the layout of ViDoRe v1: pages of the shipped PDFs, each with a number
that makes it distinct, and queries from their texts. Both sides read it through mteb, encode pages
and queries with the small ColPali in the repository, score all pairs with MaxSim and compute the
scores of the task. One side is mteb's evaluation, the other an index job and an evaluation.
Memory is that of all processes of a side. Each side runs in a process of its own, and the sides
alternate.
"""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, ImageDraw

import jobs
from pipeline import extras
from pipeline.data.pages import Pages
from pipeline.schema import Item
from tests.bench.harness import Bench, Repeats, descendants, proportional_bytes, table
from tests.bench.pages import PDFS
from tests.bench.reading import decoded_items, listed_items

#: Task whose layout the snapshot has.
TASK = "VidoreDocVQARetrieval"
#: Words per query.
QUERY_WORDS = 12
SIDES = {"maxray": "index job and evaluation", "mteb": "mteb's evaluation"}
RATES = {
    "pages_per_second": "pages/s (reading and encoding)",
    "queries_per_second": "queries/s (encoding, ranking and scores)",
    "seconds": "s in total",
    "peak_mib": "MiB of all processes, peak",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--pages", type=jobs.positive, default=1000, help="pages of the snapshot")
    parser.add_argument("--queries", type=jobs.positive, default=400, help="queries")
    parser.add_argument("--dpi", type=jobs.positive, default=100, help="resolution of the pages")
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="repeats per side")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    extras.require("mteb")
    bench = Bench("mteb", arguments, args.out)
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        snapshot = Path(folder) / "snapshot"
        write_snapshot(snapshot, args.pages, args.queries, args.dpi)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for repeat in range(args.repeats):
            for side in list(SIDES)[:: 1 if repeat % 2 == 0 else -1]:
                runs[side].append(run_side(side, snapshot, Path(folder) / f"{side}-{repeat}"))
    figures = {
        side: {name: Repeats(tuple(run[name] for run in values)) for name in RATES}
        for side, values in runs.items()
    }
    rows = []
    for name, label in RATES.items():
        ours, theirs = figures["maxray"][name], figures["mteb"][name]
        rows.append([label, str(theirs), str(ours), f"**{ours.over(theirs)}**"])
    difference = max(
        abs(a["main_score"] - b["main_score"])
        for a, b in zip(runs["maxray"], runs["mteb"], strict=True)
    )
    rows.append(
        ["main score", *(f"{runs[s][0]['main_score']:.5f}" for s in ("mteb", "maxray")), ""]
    )
    title = f"{args.pages:,} pages and {args.queries:,} queries in the layout of ViDoRe v1"
    text = table(["", SIDES["mteb"], SIDES["maxray"], "ratio"], rows)
    bench.add("mteb", title, {**figures, "runs": runs, "difference": difference}, text)


def run_side(side: str, snapshot: Path, folder: Path) -> dict[str, Any]:
    """Runs one side in a process of its own and adds its peak memory to its result."""
    command = [sys.executable, "-m", "tests.bench.mteb_run", side, str(snapshot), str(folder)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        peak = 0
        while process.poll() is None:
            family = (process.pid, *descendants(process.pid))
            peak = max(peak, sum(map(proportional_bytes, family)))
            time.sleep(0.5)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        raise RuntimeError("\n".join(lines))
    return {**json.loads(lines[-1]), "peak_mib": peak / 2**20}


def write_snapshot(folder: Path, num_pages: int, num_queries: int, dpi: int) -> None:
    """Writes pages, queries and judgments as on the hub."""
    import datasets

    pages = list(_pages(dpi))
    images = [page.payload["image"] for page in pages]
    corpus = [
        {"corpus-id": number, "image": {"bytes": _page(page, number), "path": None}}
        for number, page in zip(range(num_pages), itertools.cycle(images), strict=False)
    ]
    words = [(page.text or "empty").split() for page in pages]
    queries, qrels = [], []
    for query in range(num_queries):
        page = query * num_pages // num_queries
        text = words[page % len(pages)]
        start = (7 * query) % max(1, len(text) - QUERY_WORDS)
        queries.append({"query-id": query, "query": " ".join(text[start : start + QUERY_WORDS])})
        qrels.append({"query-id": query, "corpus-id": page, "score": 1})
    configs = []
    for name, rows in (("corpus", corpus), ("queries", queries), ("qrels", qrels)):
        dataset = datasets.Dataset.from_list(rows)
        if name == "corpus":
            dataset = dataset.cast_column("image", datasets.Image())
        path = folder / name / "test-00000-of-00001.parquet"
        path.parent.mkdir(parents=True)
        dataset.to_parquet(str(path))
        files = [{"split": "test", "path": f"{name}/test-*"}]
        configs.append({"config_name": name, "data_files": files})
    header = yaml.safe_dump({"configs": configs}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{header}---\n")


def _pages(dpi: int) -> Iterator[Item]:
    source = Pages(Pages.Spec(path=str(PDFS), dpi=dpi), ("text", "image"))
    for shard in source.shards():
        yield from decoded_items(source, shard, listed_items(source, shard))


def _page(data: bytes, number: int) -> bytes:
    """Returns an image as JPEG with a number in its corner."""
    with Image.open(io.BytesIO(data)) as image:
        page = image.convert("RGB")
    ImageDraw.Draw(page).text((12, 12), f"{number:,}", fill="black", font_size=36)
    file = io.BytesIO()
    page.save(file, "JPEG", quality=85)
    return file.getvalue()

"""Benchmark of jobs.plan: predicted and actual time and size of index jobs.

    python -m tests.bench plan
    python -m tests.bench plan --sample 32 --repeats 3 --out figures.json

Each collection is planned from a random sample and then indexed, in processes of their own. The
actual time is that of the job without the start of Ray, until the last commit. Run it on an idle
machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import jobs
from pipeline.config import SpecError
from pipeline.index.reader import ITEMS, part_uri
from tests.bench.harness import Bench, Repeats, run_apart, table

ROOT = Path(jobs.__file__).parents[1]
DATA = ROOT / "jobs/data"
COLPALI = {
    "name": "colpali",
    "model": str(DATA / "models/shapes_colpali"),
    "dtype": "float32",
    "output_tokens": "visual",
    "query_prefix": "",
    "num_augmentation": 0,
}
REPRESENTATIONS = [
    {"compressor": "none"},
    {"compressor": {"name": "kcenter", "num_vectors": 32}, "codec": "int8"},
    {"compressor": {"name": "samer", "num_vectors": 32}},
]
#: Specs by collection, without the index.
SPECS: dict[str, dict[str, Any]] = {
    "texts": {"source": {"name": "text", "path": str(DATA / "cranfield")}},
    "pages": {"source": {"name": "pages", "path": str(DATA / "pages/pdf")}, "fragment_items": 16},
    "photos": {
        "source": {"name": "images", "path": str(DATA / "photos/images")},
        "encoder": COLPALI,
    },
    "clips": {
        "source": {"name": "video", "path": str(DATA / "clips"), "window_seconds": 1},
        "encoder": COLPALI,
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SPECS, help="collections (default: all)")
    parser.add_argument("--sample", type=jobs.positive, default=64, help="items of the trial")
    parser.add_argument("--repeats", type=jobs.positive, default=3)
    parser.add_argument("--resources", type=Path, default=ROOT / "cluster/profiles/laptop.yaml")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    if not args.resources.is_file():
        raise SpecError("--resources", str(args.resources), "the path of an existing YAML file")
    bench = Bench("plan", arguments, args.out)
    header = ["collection", "items", "planned, s", "actual, s", "planned / actual"]
    header += ["planned, MB", "actual, MB", "planned / actual"]
    rows, figures = [], {}
    for name in args.only or SPECS:
        runs = [measure(name, args) for _ in range(args.repeats)]
        columns = [Repeats(tuple(run[key] for run in runs)) for key in runs[0]]
        num_items, planned, actual, planned_bytes, actual_bytes = columns
        rows.append(
            [
                name,
                f"{num_items.median:,.0f}",
                planned,
                actual,
                planned.over(actual),
                *(Repeats(tuple(v / 1e6 for v in r.values)) for r in (planned_bytes, actual_bytes)),
                planned_bytes.over(actual_bytes),
            ]
        )
        figures[name] = {key: column.record() for key, column in zip(runs[0], columns, strict=True)}
    title = f"plans from a sample of {args.sample} items, and index jobs"
    bench.add("plan", title, figures, table(header, rows))


def measure(name: str, args: Any) -> dict[str, float]:
    """Plans and indexes a collection."""
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        index, spec = f"{folder}/index", f"{folder}/spec.yaml"
        fields = {"index": index, "representations": REPRESENTATIONS, **SPECS[name]}
        Path(spec).write_text(yaml.safe_dump(fields))
        resources = str(args.resources)
        options = ["--resources", resources, "--sample", str(args.sample)]
        command = [sys.executable, "-m", "jobs.plan", spec, *options, "--out", f"{folder}/plan"]
        subprocess.run(command, check=True, capture_output=True)
        plan = json.loads(Path(folder, "plan/plan.json").read_text())
        summary = run_apart("tests.bench.index_run", "ray", spec, resources)["summary"]
        data = Path(part_uri(index, ITEMS), "data")
        return {
            "items": summary["indexed"],
            "planned_s": plan["seconds"],
            "actual_s": summary["last_commit"] - summary["started"],
            "planned_bytes": plan["stored_bytes"] * plan["num_items"],
            "actual_bytes": sum(file.stat().st_size for file in data.iterdir()),
        }

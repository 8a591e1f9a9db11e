"""Benchmark of the index job: throughput against a plain loop, resuming, memory of the driver.

    python -m tests.bench pipeline
    python -m tests.bench pipeline --only minilm sleeping --repeats 5 --out figures.json

Each run has its own process and a temporary folder. Results are taken from the records of the jobs.
Run it on an idle machine.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import yaml

import jobs
from pipeline.config import SpecError
from pipeline.index.reader import ITEMS, part_uri
from tests import tiny
from tests.bench.commit_history import commits
from tests.bench.harness import Bench, Repeats, run_apart, table

CRANFIELD = Path(jobs.__file__).parent / "data/cranfield/corpus.jsonl"
LAPTOP = Path(jobs.__file__).parents[1] / "cluster/profiles/laptop.yaml"

#: Encoders that sleep: 10 ms for eight items of 264 kB, and no time for tiny items.
SLEEPING = {"class": tiny.SLEEPING, "seconds": 0.01, "batch_size": 8}
SMALL = {
    "class": tiny.SLEEPING,
    "seconds": 0.0,
    "batch_size": 64,
    "num_tokens": 4,
    "dim": 16,
}

#: Items per commit of tiny items.
SMALL_COMMIT_ITEMS = 1024

#: Beginning of the steady state, as a fraction of the items. At the first commit, the Ray job has
#: encoded more than it has committed, because its writer starts late. After a third, only one or
#: two units are queued.
STARTS = {"from the first commit": 0.0, "from a third on": 1 / 3}

#: Steps of resuming, until the first new items are encoded and written.
STEPS = ("import", "lease", "index ids", "list", "mark duplicates", "load encoder")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    items: int  # real texts, by MiniLM
    sleeping_items: int
    small_items: int  # rows of the index that is resumed
    commit_items: int  # steady state begins with the first commit
    repeats: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument("--items", type=jobs.positive, default=1536, help="texts for MiniLM")
    parser.add_argument("--sleeping-items", type=jobs.positive, default=4096)
    parser.add_argument(
        "--small-items", type=jobs.positive, default=100_000, help="items of `resume` and `memory`"
    )
    parser.add_argument("--commit-items", type=jobs.positive, default=256)
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="repeats per comparison")
    parser.add_argument(
        "--resources", type=Path, default=LAPTOP, help="resources profile; see cluster/profiles"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    sizes = Sizes(
        args.items, args.sleeping_items, args.small_items, args.commit_items, args.repeats
    )
    for option in ("items", "sleeping_items"):
        if getattr(sizes, option) <= sizes.commit_items:
            rule = f"more than commit_items ({sizes.commit_items}), two commits at least"
            raise SpecError(option, getattr(sizes, option), rule)
    bench = Bench("pipeline", arguments, args.out)
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        runs = Runs(Path(folder), args.resources.absolute())
        for name, figure in FIGURES.items():
            if not args.only or name in args.only:
                figure(bench, runs, sizes)


class Runs:
    """Runs index jobs in separate processes and keeps their output in one folder."""

    def __init__(self, folder: Path, resources: Path):
        self.folder, self.resources = folder, resources

    def corpus(self, name: str, records: Iterator[dict[str, Any]]) -> str:
        """Writes a JSON-lines corpus if it does not exist yet, and returns its path."""
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    def spec(self, name: str, **fields: Any) -> Path:
        """Writes a spec. By default, its index has the same name."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"index": str(self.folder / name), **fields}))
        return path

    def run(self, side: str, spec: Path) -> dict[str, Any]:
        """Runs one side. Returns the record of `index_run` and the time at which it was started."""
        started = time.time()
        result = run_apart("tests.bench.index_run", side, str(spec), str(self.resources))
        return {**result, "started": started}

    def remove(self, index: str) -> None:
        """Removes an index to free disk space."""
        shutil.rmtree(self.folder / index)


def cranfield(num_items: int) -> Iterator[dict[str, Any]]:
    """Yields the non-empty Cranfield abstracts repeatedly, with new ids in each repetition."""
    documents = [json.loads(line) for line in CRANFIELD.read_text().splitlines()]
    usable = [document for document in documents if document["text"].strip()]
    for i in range(num_items):
        document = usable[i % len(usable)]
        yield {**document, "_id": f"{document['_id']}.{i // len(usable)}"}


def numbered(num_items: int) -> Iterator[dict[str, Any]]:
    """Yields short texts. The sleeping encoder ignores their content."""
    for i in range(num_items):
        yield {"_id": f"item-{i:07d}", "text": f"content of item number {i} " * 3}


# -- against a plain loop ------------------------------------------------------------------------


def minilm(bench: Bench, runs: Runs, sizes: Sizes) -> None:
    """Measures the bundled encoder when all tokens and 32 vectors by SaMer are stored."""
    fields = {
        "source": {"name": "text", "path": runs.corpus("cranfield", cranfield(sizes.items))},
        "encoder": "minilm",
        "representations": [{"compressor": "none"}, _compressor("samer", 32)],
    }
    title = f"MiniLM on {sizes.items:,} abstracts: full tokens and samer_32"
    _compare(bench, runs, sizes, "minilm", title, fields)


def sleeping(bench: Bench, runs: Runs, sizes: Sizes) -> None:
    """Measures the overhead of the pipeline with a fast model: 10 ms for 8 items of 1030 x 128."""
    path = runs.corpus("numbered", numbered(sizes.sleeping_items))
    for method in ("spatial", "samer"):
        fields = {
            "source": {"name": "text", "path": path},
            "encoder": SLEEPING,
            "representations": [_compressor(method, 64)],
        }
        title = f"10 ms for 8 items of 264 kB, {sizes.sleeping_items:,} items, {method} to 64"
        _compare(bench, runs, sizes, f"sleeping_{method}", title, fields)


def _compressor(name: str, num_vectors: int) -> dict[str, Any]:
    return {"compressor": {"name": name, "num_vectors": num_vectors}}


def _compare(
    bench: Bench, runs: Runs, sizes: Sizes, name: str, title: str, fields: dict[str, Any]
) -> None:
    """Compares the items per second of both sides in the steady state, alternating their order."""
    cut = {"fragment_items": sizes.commit_items, "commit_items": sizes.commit_items}
    taken: dict[str, list[dict[str, Any]]] = {"ray": [], "bare": []}
    for repeat in range(sizes.repeats):
        for side in ("ray", "bare") if repeat % 2 == 0 else ("bare", "ray"):
            index = f"{name}-{side}-{repeat}"
            summary = runs.run(side, runs.spec(index, **fields, **cut))["summary"]
            history = commits(runs.folder / index)
            steady = {start: rate_after(share, history) for start, share in STARTS.items()}
            taken[side].append({**summary, "commits": history, "rates": steady})
            runs.remove(index)
    rates = {
        side: {
            start: Repeats(tuple(run["rates"][start] for run in taken[side])) for start in STARTS
        }
        for side in taken
    }
    ratios = {start: rates["ray"][start].over(rates["bare"][start]) for start in STARTS}
    stages = list(dict.fromkeys(s for run in taken["bare"] + taken["ray"] for s in run["seconds"]))
    rows = [
        [label, *rates[side].values(), *(_per_item(taken[side], stage) for stage in stages)]
        for side, label in (("bare", "plain loop"), ("ray", "Ray job"))
    ]
    rows.append(["**ratio**", *(f"**{ratio}**" for ratio in ratios.values()), *[""] * len(stages)])
    header = ["", *(f"items/s {start}" for start in STARTS), *(f"{s}, ms/item" for s in stages)]
    figures = {**rates, "ratio": ratios, "runs": taken}
    bench.add(name, title, figures, table(header, rows))


def rate_after(share: float, commits: Sequence[tuple[float, int]]) -> float:
    """Computes the items per second after the commit that completes a given share of the rows.

    Args:
        share: Share of all rows, from 0 (the first commit) to less than 1.
        commits: (time in seconds, number of rows after it) of each commit, in order.

    >>> rate_after(0.0, [(10.0, 5), (11.0, 15), (13.0, 25)])
    6.666666666666667
    >>> rate_after(0.5, [(10.0, 5), (11.0, 15), (13.0, 25)])
    5.0
    """
    last_time, last_rows = commits[-1]
    first_time, first_rows = next(commit for commit in commits if commit[1] >= share * last_rows)
    return (last_rows - first_rows) / (last_time - first_time)


def _per_item(summaries: list[dict[str, Any]], stage: str) -> str:
    spent = [1000 * s["seconds"][stage] / s["new"] for s in summaries if stage in s["seconds"]]
    return str(Repeats(tuple(spent))) if spent else "-"


# -- resuming, and memory of the driver ----------------------------------------------------------


def resume(bench: Bench, runs: Runs, sizes: Sizes) -> None:
    """Measures the time from the start of a resumed job to its first new items."""
    built = _build_small(runs, sizes.small_items)
    dataset = lance.dataset(part_uri(built["index"], ITEMS))
    whole = dataset.count_rows()
    # Restore an earlier commit, as left by a killed driver, including its lease.
    for version in reversed(dataset.versions()):
        num_rows = int(version["metadata"]["total_rows"])
        if num_rows <= 0.95 * whole:
            dataset.checkout_version(version["version"]).restore()
            break
    # With one unit per fragment, the first is reported immediately.
    fields = yaml.safe_load(built["spec"].read_text())
    spec = runs.spec("small-resumed", **{**fields, "fragment_items": 64})
    result = runs.run("ray", spec)
    summary, times = result["summary"], result["times"]
    spent = {"import": times["imported"] - result["started"], **summary["phases"]}
    steps = {step: spent[step] for step in STEPS}
    total = summary["first_written"] - result["started"] - times["ray_start"]
    steps["first unit"] = summary["first_written"] - summary["stream_started"]
    steps["other"] = total - sum(steps.values())
    rows = [[step, f"{seconds:.2f}"] for step, seconds in steps.items()]
    rows += [
        ["**total**", f"**{total:.2f}**"],
        ["start of Ray (not included)", f"{times['ray_start']:.2f}"],
    ]
    title = f"Resuming an index of {sizes.small_items:,} items with {whole - num_rows:,} missing"
    figures = {"seconds": total, "steps": steps, "ray_start": times["ray_start"], "run": summary}
    bench.add("resume", title, figures, table(["step", "seconds"], rows))


def memory(bench: Bench, runs: Runs, sizes: Sizes) -> None:
    """Measures the peak memory of the driver for indexes of two sizes."""
    rows, peaks = [], {}
    for num_items in (max(1, sizes.small_items // 10), sizes.small_items):
        result = _build_small(runs, num_items)
        peaks[num_items] = result["peak_bytes"]
        rate = result["summary"]["new"] / result["summary"]["phases"]["index"]
        rows.append([f"{num_items:,}", f"{result['peak_bytes'] / 2**20:,.0f}", f"{rate:,.0f}"])
    title = "Peak resident memory of the driver, without the processes of Ray"
    text = table(["items", "MiB", "items/s including start-up"], rows)
    bench.add("memory", title, {"peak_bytes": peaks}, text)


def _build_small(runs: Runs, num_items: int) -> dict[str, Any]:
    """Builds an index of small items, unless it has been built already.

    Returns the record of the run, its spec and the URI of the index.
    """
    record = runs.folder / f"small-{num_items}.json"
    if not record.exists():
        path = runs.corpus(f"numbered-{num_items}", numbered(num_items))
        spec = runs.spec(
            f"small-{num_items}",
            source={"name": "text", "path": path},
            encoder=SMALL,
            representations=[{"compressor": "none"}],
            fragment_items=SMALL_COMMIT_ITEMS,  # `resume` restores one of several commits
            commit_items=SMALL_COMMIT_ITEMS,
        )
        record.write_text(json.dumps(runs.run("ray", spec)))
    index = runs.folder / f"small-{num_items}"
    return {
        **json.loads(record.read_text()),
        "index": str(index),
        "spec": index.with_suffix(".yaml"),
    }


FIGURES = {"minilm": minilm, "sleeping": sleeping, "resume": resume, "memory": memory}

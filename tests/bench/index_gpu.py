"""Benchmark of the index job on one GPU: throughput, use of the GPU, recovery, recompression.

    python -m tests.bench index_gpu --family colpali
    python -m tests.bench index_gpu --family qwen2_5_omni --source clips --copies 40 --only fused

Models have published shapes and random weights. The source consists of hard links to the bundled
PDF pages or clips. Each job has its own process. The parts are:

- `bare`: a plain loop over units that are already read and prepared, which encodes and compresses
  them. The ratios of the jobs refer to it.
- `fused`, `halves`, `split`: the job with one actor on the GPU, with two actors on half a GPU each,
  and with an encoding and a compressing actor on half a GPU each.
- `kill`: the job of `fused`, whose actor on the GPU is killed once; its index must be identical.
- `recompress`: adds representations to the index of `fused` on the GPU.
- `plan`: the time that `jobs.plan` predicts for `fused`.

Rates are those after a third of the items. The share of the time in which the GPU is busy, and its
memory, are sampled over the same interval.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import torch
import yaml

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import JOBS, listing, unit_reader
from pipeline.index.columns import all_representations, encoder_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import ITEMS, part_uri
from pipeline.index.spec import IndexSpec
from pipeline.index.stage import Unit, run_stage
from pipeline.index.stages import Compress, Encode, Prepare, Represent, needs_preparing
from pipeline.index.units import UnitRange
from pipeline.registry import ENCODERS
from tests.bench import encode_models
from tests.bench.commit_history import commits
from tests.bench.harness import Bench, Repeats, run_apart, table
from tests.bench.pipeline import rate_after

DATA = Path(jobs.__file__).parent / "data"
SOURCES: dict[str, tuple[dict[str, Any], Path, str]] = {
    "pages": ({"name": "pages"}, DATA / "pages/pdf", "*.pdf"),
    "clips": ({"name": "video", "window_seconds": 2.0, "fps": 2.0}, DATA / "clips", "*.mp4"),
}
REPRESENTATIONS = [
    {"compressor": "none"},
    {"compressor": {"name": "kcenter", "num_vectors": 64}, "codec": "int8"},
    {"compressor": {"name": "samer", "num_vectors": 64}, "codec": "int8"},
]
ADDED = [{"compressor": {"name": name, "num_vectors": 32}} for name in ("kcenter", "spatial")]
#: Steady state begins after this share of the items.
START = 1 / 3
#: Commits that a rate needs.
MIN_COMMITS = 6
#: Interval at which the GPU is sampled, in seconds.
SAMPLE_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    cores = len(os.sched_getaffinity(0))
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--family", choices=encode_models.SHAPES, default="colpali")
    parser.add_argument("--source", choices=SOURCES, default="pages")
    parser.add_argument("--layers", type=jobs.positive, help="layers of the language model")
    parser.add_argument("--copies", type=jobs.positive, default=20, help="copies of the data")
    parser.add_argument("--batch", type=jobs.positive, default=8, help="pages per batch")
    parser.add_argument("--unit-items", type=jobs.positive, default=32)
    parser.add_argument("--readers", type=jobs.positive, default=max(1, cores // 4))
    parser.add_argument("--preparers", type=jobs.positive, default=max(1, cores // 2))
    parser.add_argument("--repeats", type=jobs.positive, default=1)
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints to reuse")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("device", "cuda", "a CUDA device", "is not available")
    bench = Bench("index_gpu", arguments, args.out)
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        runs = Runs(Path(folder), args)
        for name, figure in FIGURES.items():
            if name in args.only:
                figure(bench, runs)


class Runs:
    """Specs, indexes and results of one benchmark."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.args = folder, args
        self.bare: Repeats | None = None
        checkpoints = args.checkpoints or folder / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        device = args.device
        self.encoder = encode_models.spec(
            checkpoints / args.family, args.family, args.layers, device, args.batch
        )
        source, data, pattern = SOURCES[args.source]
        for copy in range(args.copies):
            (folder / f"data/{copy:03}").mkdir(parents=True)
            for file in sorted(data.glob(pattern)):
                os.link(file, folder / f"data/{copy:03}" / file.name)
        self.source = {**source, "path": str(folder / "data")}

    def spec(self, name: str, **fields: Any) -> Path:
        """Writes the spec of an index job and returns its path."""
        size = self.args.unit_items
        given = {
            "index": str(self.folder / name),
            "source": self.source,
            "encoder": self.encoder.model_dump(mode="json", exclude_defaults=True)
            | {"name": self.encoder.name},
            "representations": REPRESENTATIONS,
            "unit_items": size,
            "fragment_items": 2 * size,
            "commit_items": 2 * size,
            **fields,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(given))
        return path

    def profile(self, name: str) -> Path:
        """Writes the resources profile of a part and returns its path."""
        gpus = 1 if self.args.device == "cuda" else 0
        cpu = {"num_cpus": 1}
        whole, half = ({**cpu, "num_gpus": gpus * share, "num_threads": 2} for share in (1, 0.5))
        encode, compress = {
            "halves": ({**half, "min_actors": 2, "max_actors": 2}, None),
            "split": (half, half),
        }.get(name, (whole, None))
        given = {
            "read": {**cpu, "max_actors": self.args.readers},
            "prepare": {
                **cpu,
                "min_actors": self.args.preparers,
                "max_actors": self.args.preparers,
            },
            "encode": encode,
            "compress": compress,
            "write": cpu,
        }
        path = self.folder / f"{name}-resources.yaml"
        path.write_text(yaml.safe_dump(given))
        return path

    def run(self, name: str, kind: str) -> dict[str, Any]:
        """Runs an index job and returns its measurements."""
        spec, profile = self.spec(name), self.profile(kind)
        with gpu_samples() as samples:
            result = run_apart("tests.bench.index_run", "ray", str(spec), str(profile))
        history = commits(self.folder / name)
        rows = history[-1][1]
        if len(history) < MIN_COMMITS:
            raise SpecError("--copies", self.args.copies, "more, for a steady state")
        start = next(moment for moment, number in history if number >= START * rows)
        during = samples.between(start, history[-1][0])
        summary = result["summary"]
        return {
            "rate": rate_after(START, history),
            "items": rows,
            "seconds": summary["last_commit"] - summary["started"],
            "busy": during.busy,
            "gpu_bytes": during.peak_bytes,
            "driver_bytes": result["peak_bytes"],
            "summary": summary,
        }


@dataclass
class Samples:
    """Samples of the GPU's state.

    Attributes:
        use: Percentage of the preceding interval in which a kernel ran.
        memory: Memory in use, in bytes.
    """

    times: list[float] = field(default_factory=list)
    use: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def between(self, start: float, end: float) -> Samples:
        """Returns the samples of an interval."""
        indices = [i for i, moment in enumerate(self.times) if start <= moment <= end]
        times, use, memory = (
            [column[i] for i in indices] for column in (self.times, self.use, self.memory)
        )
        return Samples(times, use, [int(size) for size in memory])

    @property
    def busy(self) -> float:
        """Share of the time in which a kernel ran."""
        return sum(self.use) / (100 * len(self.use)) if self.use else float("nan")

    @property
    def peak_bytes(self) -> int:
        """Maximum memory in use."""
        return max(self.memory, default=0)


@contextlib.contextmanager
def gpu_samples() -> Iterator[Samples]:
    """Context manager that samples the first GPU in the background, if there is one."""
    samples, stop = Samples(), threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            samples.use.append(torch.cuda.utilization(0))
            samples.memory.append(torch.cuda.device_memory_used(0))
            samples.times.append(time.time())

    thread = threading.Thread(target=sample, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    yield samples
    stop.set()
    if thread.is_alive():
        thread.join()


# -- figures ---------------------------------------------------------------------------------------


def bare(bench: Bench, runs: Runs) -> None:
    """Measures a plain loop over prepared units."""
    spec = config.load(IndexSpec, str(runs.spec("bare")))
    units = list(_prepared_units(runs, spec))
    encoder_info = EncoderInfo.from_encoder(ENCODERS.build(spec.encoder), spec.encoder)
    fields = [f.name for f in encoder_fields(encoder_info, spec.keep_positions)]
    compress = Compress(encoder_info, all_representations(spec), {}, fields)
    stage = Represent(Encode(spec.encoder, encoder_info, prepare=False), compress).load()
    num_items = sum(unit.items.num_rows for unit in units)
    rates, peaks, shares = [], [], []
    for repeat in range(1 + max(3, runs.args.repeats)):
        started = time.perf_counter()
        finished = [run_stage(stage, unit) for unit in units]
        seconds = time.perf_counter() - started
        if repeat:  # after the warm-up
            rates.append(num_items / seconds)
            spent = sum(unit.seconds["compress"] for unit in finished)
            shares.append(spent / seconds)
        if torch.cuda.is_available():
            peaks.append(torch.cuda.max_memory_allocated())
    runs.bare = Repeats(tuple(rates))
    del stage
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    rows = [[num_items, runs.bare, Repeats(tuple(shares)), _gigabytes(max(peaks, default=0))]]
    header = ["items", "items/s", "share of compressing", "torch's peak GPU memory, GB"]
    title = f"{_title(runs)}: encoding and compressing prepared units in a plain loop"
    bench.add("bare", title, {"rate": runs.bare, "peak_bytes": peaks}, table(header, rows))


def _prepared_units(runs: Runs, spec: IndexSpec) -> Iterator[Unit]:
    """Yields prepared units of the first copies, about 100 items."""
    encoder = ENCODERS.load(spec.encoder.name)
    listing_job = ListingJob(
        part_uri(spec.index),
        part_uri(spec.index, JOBS, "bare"),
        spec.source,
        config.digest({}),
        wants=encoder.supported_inputs(spec.encoder),
        limits=spec.unit_limits,
    )
    prepare = None
    if needs_preparing(spec.encoder, ["content"]):
        prepare = Prepare(spec.encoder).load()
    listing.list_source(listing_job)
    num_items = 0
    for unit in unit_reader.read_units(listing_job, UnitRange(0)):
        if unit.items.num_rows == 0:
            continue
        yield run_stage(prepare, unit) if prepare else unit
        num_items += unit.items.num_rows
        if num_items >= 96:
            return


def job(name: str) -> Any:
    """Returns the figure of the index job with one profile."""

    def figure(bench: Bench, runs: Runs) -> None:
        results = [runs.run(f"{name}-{repeat}", name) for repeat in range(runs.args.repeats)]
        _report(bench, runs, name, results)

    return figure


def _report(bench: Bench, runs: Runs, name: str, results: list[dict[str, Any]]) -> None:
    rate = Repeats(tuple(result["rate"] for result in results))
    ratio = "-"
    if runs.bare is not None:
        ratio = str(Repeats(tuple(value / runs.bare.median for value in rate.values)))
    first = results[0]
    stages = first["summary"]["seconds"]
    rows = [
        [
            f"{first['items']:,}",
            rate,
            f"**{ratio}**",
            Repeats(tuple(result["busy"] for result in results)),
            Repeats(tuple(result["seconds"] for result in results)),
            _gigabytes(max(result["gpu_bytes"] for result in results)),
            *(1e3 * seconds / first["items"] for seconds in stages.values()),
        ]
    ]
    header = ["items", "items/s", "**of the plain loop**", "GPU busy", "s in all", "GPU memory, GB"]
    header += [f"{stage}, ms/item" for stage in stages]
    bench.add(name, f"{_title(runs)}: the job, {name}", {"runs": results}, table(header, rows))


def kill(bench: Bench, runs: Runs) -> None:
    """Kills the actor on the GPU once and compares the index with that of an undisturbed job."""
    if not (runs.folder / "fused-0").exists():
        runs.run("fused-0", "fused")
    spec, profile = runs.spec("killed"), runs.profile("fused")
    expected = lance.dataset(part_uri(str(runs.folder / "fused-0"), ITEMS)).count_rows()
    killed: list[tuple[int, int]] = []
    stop = threading.Event()

    def kill_actor() -> None:
        while not stop.wait(0.2):
            try:
                rows = lance.dataset(part_uri(str(runs.folder / "killed"), ITEMS)).count_rows()
            except ValueError:
                continue  # not written yet
            if rows >= START * expected:
                pid = gpu_process()
                os.kill(pid, signal.SIGKILL)
                killed.append((pid, rows))
                return

    thread = threading.Thread(target=kill_actor, daemon=True)
    thread.start()
    started = time.perf_counter()
    result = run_apart("tests.bench.index_run", "ray", str(spec), str(profile))
    seconds = time.perf_counter() - started
    stop.set()
    thread.join()
    is_identical = rows_of(runs.folder / "killed").equals(rows_of(runs.folder / "fused-0"))
    rows = [[len(killed), killed[0][1] if killed else "-", result["summary"]["indexed"]]]
    rows[0] += [f"{seconds:.1f}", "identical" if is_identical else "**different**"]
    header = ["killed actors", "items committed before", "items", "s in all", "index"]
    figures = {"killed": killed, "identical": is_identical, "run": result}
    bench.add("kill", f"{_title(runs)}: a killed actor", figures, table(header, rows))


def gpu_process() -> int:
    """Returns the process id of the actor that uses the most memory of the GPU."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = {int(pid): int(memory) for pid, memory in (line.split(",") for line in lines)}
    used.pop(os.getpid(), None)
    return max(used, key=lambda pid: used[pid])


def rows_of(index: Path) -> pa.Table:
    """Returns all rows of an index in the order of their ids."""
    return lance.dataset(part_uri(str(index), ITEMS)).to_table().sort_by("item_id").combine_chunks()


def recompress(bench: Bench, runs: Runs) -> None:
    """Measures the addition of representations to a stored index on the GPU."""
    if not (runs.folder / "fused-0").exists():
        runs.run("fused-0", "fused")
    spec = runs.folder / "recompress.yaml"
    index = str(runs.folder / "fused-0")
    spec.write_text(yaml.safe_dump({"index": index, "representations": ADDED}))
    profile = runs.folder / "recompress-resources.yaml"
    gpus = 1 if runs.args.device == "cuda" else 0
    profile.write_text(yaml.safe_dump({"compress": {"num_cpus": 2, "num_gpus": gpus}}))
    command = [sys.executable, "-m", "jobs.add", "representations", str(spec)]
    command += ["--resources", str(profile)]
    started = time.perf_counter()
    with gpu_samples() as samples:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    seconds = time.perf_counter() - started
    summaries = sorted((Path(index) / JOBS).glob("*/summary.json"), key=os.path.getmtime)
    summary = json.loads(summaries[-1].read_text())
    num_items = lance.dataset(part_uri(index, ITEMS)).count_rows()
    stages = summary["seconds"]
    rows = [[f"{num_items:,}", f"{seconds:.1f}", samples.peak_bytes / 1e9]]
    rows[0] += [1e3 * spent / num_items for spent in stages.values()]
    header = ["items", "s with the start of Ray", "GPU memory, GB"]
    header += [f"{stage}, ms/item" for stage in stages]
    title = f"{_title(runs)}: recompression to two representations"
    bench.add("recompress", title, {"summary": summary, "seconds": seconds}, table(header, rows))


def plan(bench: Bench, runs: Runs) -> None:
    """Compares the time that `jobs.plan` predicts with that of the job."""
    if (runs.folder / "fused-0").exists():
        summaries = (runs.folder / "fused-0" / JOBS).glob("*/summary.json")
        summary = json.loads(min(summaries, key=os.path.getmtime).read_text())
        actual = summary["last_commit"] - summary["started"]
    else:
        actual = runs.run("fused-0", "fused")["seconds"]
    folder = runs.folder / "plan"
    spec, profile = runs.spec("planned"), runs.profile("fused")
    command = [sys.executable, "-m", "jobs.plan", str(spec), "--resources", str(profile)]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    planned = json.loads((folder / "plan.json").read_text())
    rows = [[planned["seconds"], actual, f"**{planned['seconds'] / actual:.2f}**"]]
    header = ["planned, s", "actual, s", "**planned / actual**"]
    figures = {"plan": planned, "actual": actual}
    bench.add("plan", f"{_title(runs)}: the plan", figures, table(header, rows))


def _title(runs: Runs) -> str:
    return f"{runs.args.family}, {runs.args.source}, batches of {runs.args.batch}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}"


FIGURES = {
    "bare": bare,
    **{name: job(name) for name in ("fused", "halves", "split")},
    "kill": kill,
    "recompress": recompress,
    "plan": plan,
}

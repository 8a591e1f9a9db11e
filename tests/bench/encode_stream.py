"""Parts of `tests.bench encode` from files to vectors: JPEG pages, and the stages of the index job.

Neither needs Ray. The index job preprocesses units in actors ahead of the encoder and passes them
through shared memory; here, processes and files in memory take their place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import torch
from pyarrow import feather

import jobs
from pipeline.config import parse
from pipeline.data.base import Source, items_table
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.eval.planning.estimate import Pool, StageTime, estimate
from pipeline.index.columns import Representation, encoder_fields, required_taps
from pipeline.index.info import EncoderInfo
from pipeline.index.stage import Resources, Unit, run_stage
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.registry import ENCODERS, SOURCES
from pipeline.schema import Item
from tests.bench import encode_models
from tests.bench.harness import Bench, Repeats, table

DATA = Path(jobs.__file__).parent / "data"
#: Units that are preprocessed ahead, in addition to one per worker.
UNITS_AHEAD = 2
#: Bytes of a preprocessed page, rounded up.
PAGE_BYTES = 16 << 20
#: Collections of `stages`, with the packages that decode them.
SOURCE_SPECS: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "pages": ({"name": "pages", "path": str(DATA / "pages/pdf")}, ["pypdfium2"]),
    "photos": ({"name": "images", "path": str(DATA / "photos/images")}, []),
    "clips": (
        {"name": "video", "path": str(DATA / "clips"), "window_seconds": 1.0, "fps": 2.0},
        ["av", "decord"],
    ),
}
#: Every fourth unit of `stages` belongs to the trial that predicts the time of the others.
TRIAL_STEP = 4
STAGES = ("read", "prepare", "encode", "compress", "write")
REPRESENTATIONS = ({"name": "kcenter", "num_vectors": 64}, {"name": "sap", "num_vectors": 64})


def wait() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Appends the time of a block, including that of its work on the GPU."""
    wait()
    start = time.perf_counter()
    yield
    wait()
    seconds.append(time.perf_counter() - start)


@contextlib.contextmanager
def pass_times(encoder: SequenceEncoder[Any]) -> Iterator[Callable[[], list[float]]]:
    """Measures the forward passes of an encoder inside the context, including statistics.

    On a GPU, the times are those between CUDA events, from the copy of the inputs to the vectors.

    Yields:
        A function that returns the seconds of each pass.
    """
    marks: list[tuple[Any, Any]] = []
    run = encoder._run_pass

    def mark() -> Any:
        if encoder.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run_timed(*args: Any) -> dict[str, torch.Tensor]:
        start = mark()
        result = run(*args)
        marks.append((start, mark()))
        return result

    def seconds() -> list[float]:
        wait()
        if encoder.device.type == "cpu":
            return [end - start for start, end in marks]
        return [start.elapsed_time(end) / 1e3 for start, end in marks]

    with mock.patch.object(encoder, "_run_pass", run_timed):
        yield seconds


def encode(encoder: SequenceEncoder[Any], ready: pa.Table) -> int:
    """Encodes preprocessed items, copies the vectors to the CPU and returns their number."""
    return sum(len(batch.vectors.cpu()[batch.mask.cpu()]) for _, batch in encoder.encode(ready))


# -- pages -----------------------------------------------------------------------------------------


def pipeline(bench: Bench, family: str, encoder: SequenceEncoder[Any], args: Any) -> None:
    """Measures the model, the encoder on preprocessed pages, and the stream from JPEG files."""
    ready = encoder.preprocessor(encoder.spec)(encode_models.pages(2 * args.batch))
    num_pages = ready.num_rows
    with encode_models.Operations() as operations:  # warm-up
        num_tokens = encode(encoder, ready)
    teraflops = operations.count / num_pages / 1e12
    seconds: dict[str, list[float]] = {"model": [], "encoder": []}
    for _ in range(args.repeats):
        with pass_times(encoder) as passes, timed(seconds["encoder"]):
            encode(encoder, ready)
        seconds["model"].append(sum(passes()))
    rates = {name: Repeats(tuple(num_pages / s for s in each)) for name, each in seconds.items()}
    with tempfile.TemporaryDirectory(dir=_memory_folder(args)) as folder:
        streams = [_stream(encoder, args, Path(folder)) for _ in range(args.repeats)]
    busy, worker, rates["stream"] = (Repeats(values) for values in zip(*streams, strict=True))
    peak = _peak_rate(args.device) / 1e12
    labels = {
        "model": "forward passes",
        "encoder": "encoder on preprocessed pages",
        "stream": f"from JPEG files, {args.workers} workers",
    }
    rows = [
        [labels[name], rate, rate.median * teraflops, f"{rate.median * teraflops / peak:.1%}"]
        for name, rate in rates.items()
    ]
    head = ["stage", "pages/s", "TFLOP/s", f"MFU of {peak:.3g} TFLOP/s (bfloat16 product)"]
    what = f"{num_tokens / num_pages:.0f} tokens and {teraflops:.2f} TFLOP per page"
    what += f", batches of {args.batch}, {encoder.spec.dtype}"
    figures = {"rates": rates, "teraflops_per_page": teraflops, "matrix_teraflops": peak}
    bench.add(f"pipeline {family}", f"{family}: {what}", figures, table(head, rows))

    needed = rates["model"].median / worker.median
    row = [args.workers, worker, rates["stream"], busy, f"{needed:.1f}"]
    head = ["workers", "pages/s per worker", "pages/s", "share of time in passes", "workers needed"]
    what = f"{family}: {args.items} JPEG files of {encode_models.PAGE} pixels"
    figures = {"worker_rate": worker, "busy": busy, "workers_needed": needed}
    bench.add(f"stream {family}", what, figures, table(head, [row]))


@functools.cache
def _peak_rate(device: str) -> float:
    from tests.bench.train import matrix_rate  # workers need no libraries for training

    return matrix_rate(device)


@functools.cache
def _workers(number: int) -> ProcessPoolExecutor:
    """Starts processes for preprocessing, each with one thread."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, torch.set_num_threads, (1,))


@functools.cache
def _preprocessor(name: str, model: str, max_batch_tokens: int) -> Callable[[pa.Table], pa.Table]:
    encoder_class: Any = ENCODERS.load(name)
    fields = {"name": name, "model": model, "max_batch_tokens": max_batch_tokens}
    return encoder_class.preprocessor(parse(encoder_class.Spec, fields))


def _prepare(spec: Sequence[Any], items: pa.Table, path: Path) -> float:
    """Decodes and preprocesses a unit into a file, in a worker, and returns the seconds."""
    prepare = _preprocessor(*spec)
    start = time.perf_counter()
    ready = prepare(items)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, ready.schema) as writer:
        writer.write_table(ready)
    return time.perf_counter() - start


def _memory_folder(args: Any) -> str | None:
    """Returns the folder of shared memory if it has space for all units, otherwise None."""
    needed = (args.workers + UNITS_AHEAD + 1) * args.unit_items * PAGE_BYTES
    memory = Path("/dev/shm")
    has_space = memory.is_dir() and shutil.disk_usage(memory).free > needed
    return str(memory) if has_space else None


class Stream(NamedTuple):
    """Measurement of a stream of pages.

    Attributes:
        busy: Share of the time in which a forward pass runs.
        worker_rate: Pages/s of a worker while all are working.
        rate: Pages/s of the stream after the first unit is ready.
    """

    busy: float
    worker_rate: float
    rate: float


def _stream(encoder: SequenceEncoder[Any], args: Any, folder: Path) -> Stream:
    pool, unit = _workers(args.workers), encode_models.pages(args.unit_items)
    spec = (encoder.spec.name, encoder.spec.model, encoder.spec.max_batch_tokens)
    first = unit.slice(0, 1)
    # Loads libraries and the preprocessor.
    for loaded in [
        pool.submit(_prepare, spec, first, folder / f"warm-up {number}")
        for number in range(args.workers)
    ]:
        loaded.result()
    num_units = max(2, args.items // unit.num_rows)
    pending: deque[tuple[Path, Future[float]]] = deque()
    unread = iter(folder / str(number) for number in range(num_units))

    def submit(number: int) -> None:
        for path, _ in zip(unread, range(number), strict=False):
            pending.append((path, pool.submit(_prepare, spec, unit, path)))

    submit(args.workers + UNITS_AHEAD)
    pending[0][1].result()
    worker_seconds = []
    start = time.perf_counter()
    with pass_times(encoder) as passes:
        while pending:
            path, prepared = pending.popleft()
            worker_seconds.append(prepared.result())
            with pa.memory_map(str(path)) as file:
                encode(encoder, pa.ipc.open_file(file).read_all())
            path.unlink()
            submit(1)
        seconds = time.perf_counter() - start
    num_pages = num_units * unit.num_rows
    return Stream(sum(passes()) / seconds, num_pages / sum(worker_seconds), num_pages / seconds)


# -- stages of the index job -----------------------------------------------------------------------


class UnitTime(NamedTuple):
    """Time of a unit.

    Attributes:
        seconds: Time by stage.
    """

    num_items: int
    seconds: dict[str, float]
    total: float


def stages(bench: Bench, family: str, encoder: SequenceEncoder[Any], args: Any) -> None:
    """Runs the stages of the index job one after another over bundled pages, photos and clips.

    Separate processes decode PDF files and videos ahead, so that the time of reading is that of
    waiting for them.
    """
    for collection, (fields, packages) in SOURCE_SPECS.items():
        if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
            print(f"\n{collection}: omitted without {', '.join(missing)}")
            continue
        inputs = encoder.supported_inputs(encoder.spec)
        source = SOURCES.build(SOURCES.resolve(dict(fields)), inputs)
        times = _unit_times(encoder, source, args)[1:]  # without the warm-up
        trial = times[::TRIAL_STEP]
        rest = [time for number, time in enumerate(times) if number % TRIAL_STEP]
        if not rest:
            print(f"\n{collection}: omitted, because --items must be at least 3")
            continue
        num_items = sum(unit.num_items for unit in rest)
        total = sum(unit.total for unit in rest)
        rows = [
            [stage, num_items / seconds, f"{seconds / total:.1%}"]
            for stage in STAGES
            if (seconds := sum(unit.seconds.get(stage, 0.0) for unit in rest))
        ]
        rows.append(["**all stages**", f"**{num_items / total:.2f}**", ""])
        predicted = _predict(trial, num_items)
        what = f"{family}: {num_items} {collection}, measured {total:.2f} s"
        what += f", predicted {predicted:.2f} s from {sum(u.num_items for u in trial)} others"
        figures = {"units": [unit._asdict() for unit in times], "predicted": predicted}
        head = ["stage", "items/s", "share of time"]
        bench.add(f"stages {family} {collection}", what, figures, table(head, rows))


def _unit_times(encoder: SequenceEncoder[Any], source: Source, args: Any) -> list[UnitTime]:
    spec: Any = encoder.spec
    info = EncoderInfo.from_encoder(encoder, spec)
    representations = [
        parse(Representation, {"compressor": compressor}) for compressor in REPRESENTATIONS
    ]
    columns = [column.name for column in encoder_fields(info, keep_positions=True)]
    taps = required_taps(representations, info.num_layers)
    stage = Represent(
        Encode(spec, info, taps=taps).with_encoder(encoder),
        Compress(info, representations, {}, columns).load(),
    )
    times = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, items in enumerate(_units(source, args.items, args.batch)):
            reading = time.perf_counter() - start
            unit = run_stage(stage, Unit(str(number), items))
            for reject in unit.rejects.to_pylist():
                print(f"rejected {reject['item_id']}: {reject['reason']}, {reject['detail']}")
            writing = time.perf_counter()
            feather.write_feather(unit.items, f"{folder}/{number}", "uncompressed")
            end = time.perf_counter()
            seconds = {"read": reading, **unit.seconds, "write": end - writing}
            times.append(UnitTime(unit.items.num_rows, seconds, end - start))
            start = end
    return times


def _units(source: Source, max_items: int, max_unit_items: int) -> Iterator[pa.Table]:
    for shard in source.shards():
        entries = [
            (position, entry)
            for position, entry in enumerate(source.scan(shard))
            if isinstance(entry, Item)
        ][:max_items]
        max_items -= len(entries)
        unit_items = max(1, min(max_unit_items, len(entries) // (2 * TRIAL_STEP)))
        decoded = source.decode(shard, entries)
        while unit := [item for item in islice(decoded, unit_items) if isinstance(item, Item)]:
            yield items_table(unit, source.payload)


def _predict(trial: Sequence[UnitTime], num_items: int) -> float:
    """Predicts the time of items with the formula of `jobs.plan` for one process."""
    count = sum(unit.num_items for unit in trial)
    times = {
        stage: StageTime(sum(unit.seconds.get(stage, 0.0) for unit in trial) / count)
        for stage in STAGES
    }
    pools = [Pool(STAGES, Resources())]
    return estimate(num_items, trial[0].num_items, times, pools, None, 0.0).stream_seconds

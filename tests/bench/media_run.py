"""Reads media files with the source stage of the index job, or with plain loops.

    python -m tests.bench.media_run ray video FOLDER PROCESSES
    python -m tests.bench.media_run bare audio FOLDER PROCESSES
    python -m tests.bench.media_run held video FILE 1

The plain loop for video opens a file with decord in one thread and decodes the frames at the
sampled times, window by window. The plain loop for audio uses soundfile and soxr. Both run in the
given number of processes, without Ray, without a process that isolates crashes, and without blocks
for transport. The last line of the output is a JSON object with the amount of frames or seconds
read and the seconds from the first to the last result (for the plain loop: of reading). `held`
reads one file in this process and reports its memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import decord
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data
import soundfile
import soxr

import jobs
from pipeline.data.audio import Audio
from pipeline.data.base import items_table
from pipeline.data.video import Video
from pipeline.index.stage import Unit
from tests.bench.harness import descendants, peak_bytes
from tests.bench.loops import run_loops
from tests.bench.reading import decoded_items, listed_items

FPS, WINDOW_SECONDS, SAMPLE_RATE = 1.0, 30.0, 16_000


def main() -> None:
    """Runs one side and prints its result."""
    side, kind, path, processes = sys.argv[1:]
    run = {"ray": source_stage, "bare": bare_loops, "held": held}[side]
    print(json.dumps(run(kind, path, int(processes))))


def source_of(kind: str, path: str) -> Video | Audio:
    """Creates the source, with windows of 30 s and one frame per second or mono audio at 16 kHz."""
    if kind == "audio":
        return Audio(Audio.Spec(path=path, window_seconds=WINDOW_SECONDS), ("audio",))
    spec = Video.Spec(path=path, window_seconds=WINDOW_SECONDS, fps=FPS, num_frames=64)
    return Video(spec, ("frames",))


def source_stage(kind: str, path: str, processes: int) -> dict[str, Any]:
    """Measures the source stage of the index job without its start-up time."""
    from pipeline.index import listing, unit_reader
    from pipeline.index.ray_data import configure, rows_of, unit_dataset
    from pipeline.index.stage import Resources

    source = source_of(kind, path)
    with tempfile.TemporaryDirectory() as folder, jobs.cluster():
        listed = listing.ListingJob(
            f"{folder}/index", f"{folder}/job", source.spec, "", (), source.wants
        )
        ranges = [r for tally in listing.list_source(listed) for r in tally.ranges]
        configure()
        pool = Resources(num_cpus=1, max_actors=processes)
        # As in the index job, an actor receives the blocks.
        counted = unit_dataset(partial(unit_reader.read_units, listed), ranges, pool).map_batches(
            Count,
            fn_constructor_kwargs={"kind": kind},
            batch_size=1,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=0,
        )
        rows = [row for row in rows_of(counted) if row is not None]
    ends = sorted((row["when"], row["amount"]) for row in rows)
    amount = sum(amount for _, amount in ends[1:])
    return {"amount": amount, "seconds": ends[-1][0] - ends[0][0]}


class Count:
    """Counts the contents of the units and records the times at which they arrive."""

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, block: pa.Table) -> pa.Table:
        """Returns a row with the amount of media in a unit and the time at which it arrived."""
        items = Unit.unpack(block, 0).items
        return pa.table({"when": [time.time()], "amount": [_amount(self.kind, items)]})


def _amount(kind: str, items: pa.Table) -> float:
    if kind == "video":
        return float(pc.sum(pc.list_value_length(items["frames"])).as_py())
    samples = pc.struct_field(items["audio"], "samples")
    return pc.sum(pc.binary_length(samples)).as_py() / 4 / SAMPLE_RATE


def bare_loops(kind: str, path: str, processes: int) -> dict[str, Any]:
    """Runs plain loops over the files of a folder."""
    paths = sorted(str(file) for file in Path(path).rglob("*.*"))
    return run_loops(_read_bare, paths, kind, processes)


def _read_bare(path: str, kind: str) -> float:
    return sum({"video": _bare_frames, "audio": _bare_sound}[kind](path))


def _bare_frames(path: str) -> Iterator[float]:
    reader = decord.VideoReader(path, num_threads=1)
    shown = reader.get_frame_timestamp(range(len(reader)))
    for start in np.arange(0, shown[-1, 1], WINDOW_SECONDS):
        end = min(start + WINDOW_SECONDS, shown[-1, 1])
        times = np.arange(start, end, 1 / FPS)
        indices = np.unique(np.searchsorted(shown[:, 0], times + 1e-3, side="right") - 1)
        yield len(reader.get_batch(indices.tolist()).asnumpy())


def _bare_sound(path: str) -> Iterator[float]:
    with soundfile.SoundFile(path) as file:
        block = round(WINDOW_SECONDS * file.samplerate)
        for samples in file.blocks(block, dtype="float32", always_2d=True):
            mono = soxr.resample(samples.mean(axis=1), file.samplerate, SAMPLE_RATE)
            yield len(mono) / SAMPLE_RATE


def held(kind: str, path: str, processes: int) -> dict[str, Any]:
    """Measures the peak memory of a worker and its decoding process while they read one file."""
    source = source_of(kind, path)
    (shard,) = source.shards()
    amount = 0.0
    for item in decoded_items(source, shard, listed_items(source, shard)):
        amount += _amount(kind, items_table([item], source.payload))
    decoder = sum(map(peak_bytes, descendants(os.getpid())))
    return {"amount": amount, "worker": peak_bytes(), "decoder": decoder}


if __name__ == "__main__":
    main()

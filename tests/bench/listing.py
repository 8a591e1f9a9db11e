"""Benchmark of planning: time in which the driver receives the shards of a large source.

    python -m tests.bench listing
    python -m tests.bench listing --videos 125000 --latency 0.05 --repeats 1

The source is a folder of videos in a simulated object store, which answers each request after a
delay and lists at most 1,000 keys per request, as S3 does. A task walks through the store and sends
the shards to this process, as in the index job. The files have no content, and shards are not
listed. Without the delay, the time is that of the walk and of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import ray

import jobs
from pipeline.index import listing, tasks
from pipeline.index.listing import ListingJob
from pipeline.index.ray_data import WAITING_VALUES
from pipeline.registry import SOURCES
from tests.bench.harness import Bench, Repeats, cpu_seconds, peak_bytes, table

#: Maximum number of keys that an object store lists per request.
KEYS_PER_REQUEST = 1000
#: Size of each file, in bytes, which is that of a shard.
FILE_BYTES = 300_000_000


class SimulatedStore(fsspec.AbstractFileSystem):
    """Object store with folders of equally many videos, whose paths end in the numbers of both.

    Args:
        files: Number of files per folder.
        latency: Delay of a request, in seconds.
    """

    protocol = "simulated"

    def __init__(self, folders: int, files: int, latency: float, **options: Any):
        super().__init__(**options)
        self.folders, self.files, self.latency = folders, files, latency

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Lists a folder. Each 1,000 keys take one request."""
        path = path.rstrip("/")
        number = path.rpartition("/")[2]
        if number.isdigit():
            count, kind, suffix, size = self.files, "file", ".mp4", FILE_BYTES
        else:
            count, kind, suffix, size = self.folders, "directory", "", 0
        time.sleep(self.latency * -(-count // KEYS_PER_REQUEST))
        names = (f"{path}/{i:06d}{suffix}" for i in range(count))
        entries = [{"name": name, "size": size, "type": kind} for name in names]
        return entries if detail else [entry["name"] for entry in entries]

    def isdir(self, path: str) -> bool:
        """True for all paths without a suffix."""
        return "." not in path


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "--videos", type=jobs.positive, nargs="+", default=[10_000, 125_000, 1_250_000]
    )
    parser.add_argument("--files", type=jobs.positive, default=5000, help="files per folder")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds per request")
    parser.add_argument("--repeats", type=jobs.positive, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("listing", arguments, args.out)
    rows, figures = [], []
    with jobs.cluster(256 << 20):
        for videos in args.videos:
            folders = max(1, videos // args.files)
            for latency in (0.0, args.latency):
                runs = [_run(folders, args.files, latency) for _ in range(args.repeats)]
                columns = {key: Repeats(tuple(run[key] for run in runs)) for key in runs[0]}
                labels = [f"{runs[0]['shards']:,}", f"{folders * args.files:,}", f"{latency:g}"]
                rows.append([*labels, *list(columns.values())[1:]])
                figures.append({"latency": latency, **columns})
    header = ["shards", "videos", "delay, s", "s", "shards/s", "CPU of the driver, s", "peak, MiB"]
    title = f"Planning of folders of {args.files:,} videos in a simulated object store"
    bench.add("listing", title, {"runs": figures}, table(header, rows))


def _run(folders: int, files: int, latency: float) -> dict[str, float]:
    source = SOURCES.resolve({"name": "video", "path": "simulated://bucket/videos"})
    job = ListingJob("", "", source, "", wants=("frames",))
    options: dict[str, Any] = {"num_cpus": 0, "num_returns": "streaming"}
    options["_generator_backpressure_num_objects"] = WAITING_VALUES
    start, cpu_start = time.perf_counter(), cpu_seconds()
    messages: Any = _plan.options(**options).remote(job, folders, files, latency)
    num_shards = sum(len(ray.get(message)) for message in messages)
    seconds = time.perf_counter() - start
    return {
        "shards": num_shards,
        "seconds": seconds,
        "shards_per_s": num_shards / seconds,
        "driver_s": cpu_seconds() - cpu_start,
        "peak_mib": peak_bytes() / 2**20,
    }


@ray.remote
def _plan(
    job: ListingJob, folders: int, files: int, latency: float
) -> Iterator[list[dict[str, Any]]]:
    """Plans as `tasks.list_shards` does, in a process that knows the simulated store."""

    class Store(SimulatedStore):
        def __init__(self, **options: Any):
            super().__init__(folders, files, latency, **options)

    fsspec.register_implementation("simulated", Store, clobber=True)
    yield from listing.chunks(listing.plan(job), tasks.PLANNED_SHARDS)

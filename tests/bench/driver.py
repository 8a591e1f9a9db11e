"""Benchmark of the driver: units/s of the stream of the index job when the stages do nothing.

    python -m tests.bench driver
    python -m tests.bench driver --only sleeping --actors 1 2 4 8 16 --sleep 0.2

Units without items pass through the tasks and actors of the stream of the index job: read, encode,
write. The throughput is that of the scheduling by Ray Data in the driver. `sleeping` measures how
close actors that sleep come to the ideal, which is the number of actors divided by the time of a
unit. All actors have started before the first unit is read.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import ray

import jobs
from pipeline.index.executor import Stream
from pipeline.index.ray_data import OnRay
from pipeline.index.spec import IndexResources
from pipeline.index.stage import Processed, Resources, Stage, Unit
from pipeline.index.units import UnitRange
from pipeline.index.writer import open_or_create
from pipeline.schema import ITEM, Item
from tests.bench.harness import Bench, Repeats, cpu_seconds, table

#: CPUs that each process reserves, so that 16 actors fit on one CPU. Empty units need none.
RESERVED_CPUS = 0.01
#: Units per fragment.
FRAGMENT_UNITS = 8
#: Maximum size of a fragment, which these units do not reach.
FRAGMENT_BYTES = 1 << 30
#: Part of the results that is measured, without the beginning and the last units.
MEASURED = (0.1, 0.95)


@dataclass(frozen=True)
class Setting:
    """Setting of a stream.

    Attributes:
        shards: Number of shards, each read by one task.
        max_in_flight: Blocks per actor, or None for Ray's default.
        ratio: Backpressure ratio, or None for Ray's default.
        block_bytes: Size up to which units share a block.
        sleep_s: Time that an actor sleeps per unit, in seconds. 0: the units are empty.
    """

    shards: int = 16
    actors: int = 1
    max_in_flight: int | None = None
    ratio: float | None = None
    block_bytes: int = 1
    sleep_s: float = 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument("--units", type=jobs.positive, default=1600, help="units per measurement")
    parser.add_argument("--shards", type=jobs.positive, nargs="+", default=[1, 16, 400])
    parser.add_argument("--actors", type=jobs.positive, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--in-flight", type=jobs.positive, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 4.0, 10.0])
    parser.add_argument("--block-bytes", type=jobs.positive, nargs="+", default=[1, 8192, 65_536])
    parser.add_argument("--sleep", type=float, default=0.2, help="seconds per unit of `sleeping`")
    parser.add_argument("--repeats", type=jobs.positive, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("driver", arguments, args.out)
    with jobs.cluster(256 << 20), tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        for name, figure in FIGURES.items():
            if not args.only or name in args.only:
                figure(bench, args, folder)


def empty_units(bench: Bench, args: Any, folder: str) -> None:
    """Measures empty units against the numbers of shards, actors and blocks."""
    settings = [Setting(shards=shards) for shards in args.shards]
    settings += [Setting(actors=actors) for actors in args.actors if actors > 1]
    settings += [Setting(block_bytes=size) for size in args.block_bytes if size > 1]
    _measure(bench, args, folder, "empty", "Empty units", settings)


def scheduling(bench: Bench, args: Any, folder: str) -> None:
    """Measures empty units against the blocks in flight and the backpressure ratio."""
    actors = min(4, max(args.actors))
    settings = [Setting(actors=actors, max_in_flight=number) for number in args.in_flight]
    settings += [Setting(actors=actors, ratio=ratio) for ratio in args.ratios]
    _measure(bench, args, folder, "scheduling", "Blocks in flight and backpressure", settings)


def sleeping(bench: Bench, args: Any, folder: str) -> None:
    """Measures sleeping actors against their ideal throughput."""
    settings = [
        Setting(actors=actors, max_in_flight=number, sleep_s=args.sleep)
        for actors in args.actors
        for number in (None, 4)
    ]
    _measure(bench, args, folder, "sleeping", f"Actors that sleep {args.sleep:g} s", settings)


def _measure(
    bench: Bench, args: Any, folder: str, name: str, title: str, settings: Sequence[Setting]
) -> None:
    rows, figures = [], []
    for setting in settings:
        ideal = setting.actors / setting.sleep_s if setting.sleep_s else None
        # Sleeping actors are measured for about 15 s, and with several units each.
        num_units = args.units if ideal is None else max(8 * setting.actors, round(15 * ideal))
        runs = [_run(setting, num_units, f"{folder}/index") for _ in range(args.repeats)]
        rates = Repeats(tuple(run["units_per_s"] for run in runs))
        cpu = Repeats(tuple(run["driver_ms"] for run in runs))
        share = "-" if ideal is None else f"{rates.median / ideal:.2f}"
        columns = (setting.max_in_flight or "Ray's", setting.ratio or "Ray's", setting.block_bytes)
        rows.append([setting.shards, setting.actors, *columns, num_units, rates, cpu, share])
        figures.append({**vars(setting), "units": num_units, "rates": rates, "driver_ms": cpu})
        print(f"{setting}: {rates} units/s", flush=True)
    header = ["shards", "actors", "in flight", "ratio", "block bytes", "units", "units/s"]
    header += ["CPU of the driver, ms/unit", "of the ideal"]
    bench.add(name, title, {"runs": figures}, table(header, rows))


def _run(setting: Setting, num_units: int, index: str) -> dict[str, float]:
    open_or_create(index)
    ray.data.DataContext.get_current().wait_for_min_actors_s = 300
    pool = Resources(
        num_cpus=RESERVED_CPUS,
        min_actors=setting.actors,
        max_actors=setting.actors,
        max_in_flight=setting.max_in_flight,
    )
    shared = Resources(num_cpus=RESERVED_CPUS, max_actors=2)
    profile = IndexResources(
        read=shared,
        encode=pool,
        write=shared,
        block_bytes=setting.block_bytes,
        backpressure_ratio=setting.ratio,
    )
    read = partial(_read, num_units, setting.shards, bool(setting.sleep_s))
    ranges = [UnitRange(shard) for shard in range(setting.shards)]
    groups = [([_Sleep(setting.sleep_s)], pool)]
    stream = Stream(index, read, ranges, groups, ITEM.names, FRAGMENT_UNITS, FRAGMENT_BYTES)
    arrivals: list[tuple[float, float, int]] = []
    num_done = 0
    for written in OnRay().written(stream, profile):
        if written is not None:
            num_done += len(written.units)
            arrivals.append((time.perf_counter(), cpu_seconds(), num_done))
    first, last = (round(share * (len(arrivals) - 1)) for share in MEASURED)
    (start, cpu_start, done_start), (end, cpu_end, done_end) = arrivals[first], arrivals[last]
    num_measured = done_end - done_start
    return {
        "units_per_s": num_measured / (end - start),
        "driver_ms": 1e3 * (cpu_end - cpu_start) / num_measured,
    }


def _read(num_units: int, shards: int, has_item: bool, units: UnitRange) -> Iterator[Unit]:
    item = Item("item", "item", "bench", "text", "r1", text="text").row()
    items = pa.Table.from_pylist([item] if has_item else [], schema=ITEM)
    for number in range(units.shard, num_units, shards):
        yield Unit(f"{units.shard:06d}-{number:06d}", items, extra={"replaces": {}, "gone": 0})


@dataclass(frozen=True)
class _Sleep(Stage):
    """Stage that sleeps for each unit with items, and removes them so that nothing is written."""

    seconds: float

    name: ClassVar[str] = "encode"

    def process(self, items: pa.Table) -> Processed:
        time.sleep(self.seconds)
        return Processed(items.slice(0, 0), [])


FIGURES = {"empty": empty_units, "scheduling": scheduling, "sleeping": sleeping}

"""Arithmetic of a plan: from the times of single items to the time and cost of a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.eval.planning.spec import Prices
from pipeline.index.stage import Resources

#: Name of the limit that the CPU cores of all stages impose together.
CPU_CORES = "CPU cores"


class StageTime(NamedTuple):
    """Time of one item in a stage.

    Attributes:
        seconds: Time in one actor.
        core_seconds: CPU time on all cores, or None if it is unknown.
    """

    seconds: float
    core_seconds: float | None = None


class Pool(NamedTuple):
    """Stages that share actors.

    Attributes:
        stages: Names of the stages, in order.
    """

    stages: tuple[str, ...]
    resources: Resources

    @property
    def name(self) -> str:
        """Names of all stages."""
        return " + ".join(self.stages)


@dataclass(frozen=True)
class PoolPlan:
    """Work of the actors of a pool.

    Attributes:
        name: Names of the stages.
        actors: Number of actors that can work at the same time.
        rate: Items/s of one actor.
        capacity: Items/s of all actors.
        hours: Time for which actors are busy, summed over the actors, in hours.
        utilisation: Fraction of the streaming time for which the actors are busy.
        num_cpus: Reserved CPU cores of all actors.
        num_gpus: Reserved GPUs of all actors.
    """

    name: str
    actors: int
    rate: float
    capacity: float
    hours: float
    utilisation: float
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Estimate:
    """Time and resources of an index job.

    Attributes:
        pools: Actors of each stage.
        limit: Name of the pool that limits the rate, or `CPU_CORES`.
        rate: Items/s of the job while it streams.
        startup_seconds: Time until the first item is encoded.
        stream_seconds: Time from then on.
        cpu_hours: Reserved CPU cores times the total time.
        gpu_hours: Reserved GPUs times the total time.
    """

    pools: tuple[PoolPlan, ...]
    limit: str
    rate: float
    startup_seconds: float
    stream_seconds: float
    cpu_hours: float
    gpu_hours: float

    @property
    def seconds(self) -> float:
        """Total time of the job."""
        return self.startup_seconds + self.stream_seconds

    def price(self, prices: Prices) -> float:
        """Price of the reserved CPU cores and GPUs."""
        return self.cpu_hours * prices.cpu_hour + self.gpu_hours * prices.gpu_hour


def num_actors(pools: Sequence[Pool], num_items: int, unit_items: int) -> list[int]:
    """Returns the number of actors of each pool that can work at the same time."""
    num_units = max(1, -(-num_items // unit_items))
    return [min(pool.resources.max_actors, num_units) for pool in pools]


def startup(
    listing_seconds: float, loading_seconds: float, num_processes: int, num_cpus: float
) -> float:
    """Estimates the time until the actors of an index job have loaded their models.

    The job first lists the source in one process and loads the encoder in another. Then the
    processes of all stages start at the same time and load their libraries and models, for which
    each needs a core.

    Args:
        listing_seconds: Time of listing.
        loading_seconds: Time of starting a process and loading the encoder, while the source was
            listed.
        num_processes: Number of processes of all stages.
        num_cpus: CPU cores of the cluster.

    >>> startup(1.0, 4.0, num_processes=3, num_cpus=2)
    10.0
    """
    slowdown = max(1.0, num_processes / num_cpus) / max(1.0, 2 / num_cpus)
    return max(listing_seconds, loading_seconds) + slowdown * loading_seconds


def estimate(
    num_items: int,
    unit_items: int,
    times: Mapping[str, StageTime],
    pools: Sequence[Pool],
    num_cpus: float | None,
    startup_seconds: float,
) -> Estimate:
    """Estimates the time of an index job whose stages run concurrently.

    The pool with the lowest capacity limits the rate, unless all stages together need more CPU
    cores than there are. The first unit passes through the stages one after another before the
    pipeline is filled.
    """
    pool_seconds = [sum(times[stage].seconds for stage in pool.stages) for pool in pools]
    actors = num_actors(pools, num_items, unit_items)
    capacities = {
        pool.name: count / seconds
        for pool, count, seconds in zip(pools, actors, pool_seconds, strict=True)
    }
    core_seconds = sum(time.core_seconds or 0.0 for time in times.values())
    limits = dict(capacities)
    if num_cpus is not None and core_seconds:
        limits[CPU_CORES] = num_cpus / core_seconds
    limit = min(limits, key=limits.__getitem__)
    rate = limits[limit]
    filling = min(num_items, unit_items) * sum(pool_seconds)
    remaining = max(0, num_items - unit_items)
    stream_seconds = filling + remaining / rate
    hours = (startup_seconds + stream_seconds) / 3600
    plans = tuple(
        PoolPlan(
            name=pool.name,
            actors=count,
            rate=1 / seconds,
            capacity=capacities[pool.name],
            hours=num_items * seconds / 3600,
            utilisation=num_items * seconds / count / stream_seconds,
            num_cpus=count * pool.resources.num_cpus,
            num_gpus=count * pool.resources.num_gpus,
        )
        for pool, count, seconds in zip(pools, actors, pool_seconds, strict=True)
    )
    return Estimate(
        pools=plans,
        limit=limit,
        rate=rate,
        startup_seconds=startup_seconds,
        stream_seconds=stream_seconds,
        cpu_hours=hours * sum(plan.num_cpus for plan in plans),
        gpu_hours=hours * sum(plan.num_gpus for plan in plans),
    )

"""Arithmetic of plans against a simulation of the stages."""

import pytest

from pipeline.eval.planning.estimate import CPU_CORES, Pool, StageTime, estimate, startup
from pipeline.eval.planning.spec import Prices
from pipeline.index.stage import Resources


def pools(**actors: int) -> list[Pool]:
    return [Pool((name,), Resources(max_actors=count)) for name, count in actors.items()]


def simulate(num_items: int, unit_items: int, seconds: list[float], actors: list[int]) -> float:
    """Returns the time after which the last unit leaves the last pool, without queues' limits."""
    sizes = [min(unit_items, num_items - i) for i in range(0, num_items, unit_items)]
    ready = [0.0] * len(sizes)
    for stage_seconds, count in zip(seconds, actors, strict=True):
        free = [0.0] * count
        for unit in sorted(range(len(sizes)), key=ready.__getitem__):
            actor = free.index(min(free))
            free[actor] = ready[unit] = max(free[actor], ready[unit]) + sizes[unit] * stage_seconds
    return max(ready)


@pytest.mark.parametrize(
    "num_items, seconds, actors, limit",
    [
        (10_000, [0.001, 0.02, 0.0005], [1, 1, 1], "encode"),
        (10_000, [0.01, 0.02, 0.0005], [2, 8, 1], "read"),
        (10_000, [0.001, 0.02, 0.01], [1, 4, 1], "write"),
        (640, [0.001, 0.02, 0.0005], [1, 2, 1], "encode"),
        (50, [0.001, 0.02, 0.0005], [4, 4, 4], "encode"),
    ],
)
def test_equals_simulation(num_items, seconds, actors, limit):
    names = ["read", "encode", "write"]
    times = {name: StageTime(time) for name, time in zip(names, seconds, strict=True)}
    stages = pools(**dict(zip(names, actors, strict=True)))
    plan = estimate(num_items, 64, times, stages, None, startup_seconds=3.0)
    simulated = simulate(num_items, 64, seconds, actors)
    assert plan.stream_seconds == pytest.approx(simulated, rel=0.12)
    assert plan.seconds == plan.stream_seconds + 3
    assert plan.limit == limit


def test_cores_limit_the_rate():
    times = {"read": StageTime(0.01, 0.01), "encode": StageTime(0.02, 0.04)}
    plan = estimate(1000, 10, times, pools(read=1, encode=1), 2, startup_seconds=0.0)
    assert plan.limit == CPU_CORES
    assert plan.rate == pytest.approx(2 / 0.05)
    assert plan.stream_seconds == pytest.approx(10 * 0.03 + 990 / 40)
    plan = estimate(1000, 10, times, pools(read=1, encode=1), 4, startup_seconds=0.0)
    assert (plan.limit, plan.rate) == ("encode", pytest.approx(50))


@pytest.mark.parametrize(
    "listing, loading, num_processes, num_cpus, seconds",
    [
        (1, 4, 2, 2, 8),  # listing and loading need two cores, as the two processes do
        (10, 4, 2, 2, 14),
        (1, 4, 6, 2, 16),  # three processes per core
        (1, 4, 2, 1, 8),  # loading was as slow with listing beside it
        (1, 4, 64, 128, 8),
    ],
)
def test_startup(listing, loading, num_processes, num_cpus, seconds):
    assert startup(listing, loading, num_processes, num_cpus) == pytest.approx(seconds)


def test_reserved_resources_and_price():
    times = {"read": StageTime(0.5), "encode": StageTime(0.1)}
    stages = [
        Pool(("read",), Resources(num_cpus=1, max_actors=8)),
        Pool(("encode",), Resources(num_cpus=2, num_gpus=1, max_actors=2)),
    ]
    plan = estimate(36_000, 1, times, stages, None, startup_seconds=0.0)
    read, encode = plan.pools
    assert (read.capacity, encode.capacity, plan.limit) == (16, 20, "read")
    assert (read.num_cpus, encode.num_cpus, encode.num_gpus) == (8, 4, 2)
    assert (read.hours, encode.hours) == (pytest.approx(5), pytest.approx(1))
    assert (read.utilisation, encode.utilisation) == (
        pytest.approx(1, rel=1e-3),
        pytest.approx(0.8, rel=1e-3),
    )
    hours = plan.seconds / 3600
    assert hours == pytest.approx(36_000 / 16 / 3600, rel=1e-3)
    assert plan.cpu_hours == pytest.approx(12 * hours)
    assert plan.gpu_hours == pytest.approx(2 * hours)
    price = plan.price(Prices(cpu_hour=0.5, gpu_hour=3))
    assert price == pytest.approx(6 * hours + 6 * hours)


def test_no_more_actors_than_units():
    plan = estimate(20, 64, {"encode": StageTime(0.1)}, pools(encode=8), None, 0.0)
    assert plan.pools[0].actors == 1
    assert plan.stream_seconds == pytest.approx(2)

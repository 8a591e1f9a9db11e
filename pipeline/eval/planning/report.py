"""Tables, figure and files of a plan."""

from __future__ import annotations

import dataclasses
import json
import posixpath
from typing import Any

from matplotlib.figure import Figure

from pipeline.eval.planning.estimate import CPU_CORES
from pipeline.eval.planning.run import Plan
from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, to_png
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table, percentage

STORED = "index on disk"


def duration(seconds: float) -> str:
    """Formats a time with the unit that fits.

    >>> duration(12.34), duration(600), duration(86_400), duration(8_640_000)
    ('12.3 s', '10.0 min', '24.0 h', '100.0 days')
    """
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 259_200)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:,.1f} days"


def size(num_bytes: float) -> str:
    """Formats a number of bytes with a decimal unit.

    >>> size(999), size(1e9), size(25.6e12)
    ('999 B', '1.0 GB', '25.6 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError


def stage_table(plan: Plan) -> Table:
    """Returns the table of the stages. The stage that limits the rate is marked."""
    header = ["", "stage", "rates", "actors", "items/s/actor", "items/s", "busy", "actor-hours"]
    cells = Table([[*header, "CPUs", "GPUs"]])
    for pool in plan.estimate.pools:
        origins = dict.fromkeys(plan.origins[stage] for stage in pool.name.split(" + "))
        cells.append(
            [
                "*" if pool.name == plan.estimate.limit else "",
                pool.name,
                ", ".join(origins),
                f"{pool.actors:,}",
                _rate(pool.rate),
                _rate(pool.capacity),
                percentage(pool.utilisation),
                f"{pool.hours:,.2f}",
                f"{pool.num_cpus:,g}",
                f"{pool.num_gpus:,g}",
            ]
        )
    return cells


def storage_table(plan: Plan) -> Table:
    """Returns the table of the token columns and of the whole index."""
    cells = Table([["column", "bytes/item", "total"]])
    for name, num_bytes in {**plan.column_bytes, STORED: plan.stored_bytes}.items():
        cells.append([name, f"{num_bytes:,.0f}", size(num_bytes * plan.num_items)])
    return cells


def summary(plan: Plan) -> list[str]:
    """Returns the totals, one per line."""
    estimate, prices = plan.estimate, plan.prices
    limit = (
        "the CPU cores together" if estimate.limit == CPU_CORES else f"the stage {estimate.limit}"
    )
    lines = [
        f"{plan.num_items:,} items with {plan.tokens:,.0f} token vectors each",
        f"time: {duration(estimate.seconds)} ({duration(estimate.startup_seconds)} to start, then"
        f" {_rate(estimate.rate)} items/s), limited by {limit}",
        f"reserved: {estimate.cpu_hours:,.1f} CPU-hours, {estimate.gpu_hours:,.1f} GPU-hours",
        "network: " + ", ".join(_transfers(plan)),
    ]
    if prices.cpu_hour or prices.gpu_hour:
        lines.append(f"price of the job: {estimate.price(prices):,.2f}")
    if prices.gb_month:
        lines.append(f"price of the storage: {plan.storage_price:,.2f} per month")
    if plan.trial is not None and plan.trial.unfitted:
        names = ", ".join(plan.trial.unfitted)
        lines.append(f"not included, because they must be fitted first: {names}")
    if plan.trial is not None and plan.trial.warning:
        lines.append(f"warning: {plan.trial.warning}")
    return lines


def _transfers(plan: Plan) -> list[str]:
    steps = {
        "read from the source": plan.source_bytes,
        "passed to the encoder": plan.payload_bytes,
        "written to the index": plan.stored_bytes,
    }
    return [
        f"{size(num_bytes * plan.num_items)} {step}"
        for step, num_bytes in steps.items()
        if num_bytes is not None
    ]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def figure(plan: Plan) -> Figure:
    """Draws the throughput of the stages and the size of the columns."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rates, sizes = figure.subplots(1, 2)
    pools = plan.estimate.pools[::-1]
    colors = [COLORS[1] if pool.name == plan.estimate.limit else COLORS[0] for pool in pools]
    rates.barh([pool.name for pool in pools], [pool.capacity for pool in pools], color=colors)
    rates.axvline(plan.estimate.rate, color=REFERENCE, linestyle="dashed", label="the job")
    rates.set_xscale("log")
    rates.set_xlabel("items/s of all actors")
    rates.legend()
    columns = {**plan.column_bytes, STORED: plan.stored_bytes}
    names = list(columns)[::-1]
    sizes.barh(names, [columns[name] * plan.num_items / 1e9 for name in names], color=COLORS[2])
    sizes.set_xlabel("GB")
    for axes in (rates, sizes):
        apply_style(axes)
    return figure


def write(plan: Plan, folder: str) -> list[str]:
    """Writes all files of a plan and returns their paths."""
    files: dict[str, str | bytes] = {
        "stages.csv": Table(row[1:] for row in stage_table(plan)).csv(),
        "storage.csv": storage_table(plan).csv(),
        "plan.json": json.dumps(as_json(plan), indent=2) + "\n",
        "plan.png": to_png(figure(plan)),
    }
    paths = [posixpath.join(folder, name) for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        write_atomic(path, data)
    return paths


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns all numbers of a plan as JSON values."""
    values = dataclasses.asdict(plan) | {"prices": plan.prices.model_dump()}
    values["seconds"] = plan.estimate.seconds
    values["price"] = plan.estimate.price(plan.prices)
    values["storage_price"] = plan.storage_price
    if plan.trial is not None:
        values["trial"]["times"] = {n: t._asdict() for n, t in plan.trial.times.items()}
    return values

"""Reports the bytes, quality and query latency of trained EDJEs by their number of tokens."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from examples.papers.studies.study import Row, Run, StudySpec, rows_of, runs_of, spread, with_spread
from pipeline import config
from pipeline.config import MissingField, SpecError
from pipeline.encoders.edje.model import METADATA, load_joint, read_metadata
from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, legend_below, to_png
from pipeline.runtime.atomic import write_atomic
from tests.bench.harness import Bench, table
from tests.bench.rerank_run import median_p95, milliseconds, random_candidates, scores_on_cpu

#: Metrics of a row, and the prefix of those of its first stage.
MEASURES = ("R@1", "R@5", "item to text R@1", "item to text R@5")
FIRST = "first stage "


def study(bench: Bench, args: Any) -> None:
    """Reports the tokens, quality and query latency of each row of a study.

    Latency is measured on random tokens with the joint encoder of the first seed of each row. The
    rows are measured in turn.
    """
    spec = config.load(StudySpec, args.study, role="study")
    runs = [run for run in runs_of(spec) if (_model(run) / METADATA).is_file()]  # finished runs
    if not runs:
        rule = "the spec of a study of EDJEs that jobs.train has run"
        raise SpecError("study", args.study, rule, "has no trained EDJE")
    rows = {row.name: row for row in rows_of(runs)}
    folders = {run.row: _model(run) for run in reversed(runs)}
    joints = {name: load_joint(folders[name], "study") for name in rows}
    tokens = {name: _num_tokens(folders[name], args) for name in rows}
    taken: dict[str, dict[int, list[float]]] = {name: {} for name in rows}
    for depth in args.rerank_depth:
        sides = {}
        for name, joint in joints.items():
            given = random_candidates(joint, tokens[name], args.text_tokens, 1, depth)
            sides[name] = functools.partial(scores_on_cpu, joint, *given)
        with torch.inference_mode():
            for name, times in milliseconds(sides, args.calls).items():
                taken[name][depth] = times
    cells, figures = [], {}
    for name, row in rows.items():
        item_bytes = 2 * tokens[name] * joints[name].dim
        figures[name] = {
            "tokens": tokens[name],
            "bytes": item_bytes,
            "seeds": len(row.after["R@1"]),
            **{m: {"mean": row.after[m].mean(), "sd": spread(row.after[m])} for m in MEASURES},
            **{f"{FIRST}{m}": row.after[FIRST + m].mean() for m in MEASURES},
            "milliseconds": {str(depth): times for depth, times in taken[name].items()},
        }
        found = [with_spread(row.after[measure]) for measure in MEASURES]
        waits = [median_p95(times) for times in taken[name].values()]
        shown = [f"{median:.3g} ({p95:.3g})" for median, p95 in waits]
        cells.append(
            [
                name,
                str(figures[name]["seeds"]),
                str(tokens[name]),
                f"{item_bytes:,}",
                *found,
                *shown,
            ]
        )
    first = next(iter(rows.values()))
    before = [f"{first.after[FIRST + measure].mean():.3f}" for measure in MEASURES]
    cells.insert(0, ["first stage", "", "", "", *before, *("" for _ in args.rerank_depth)])
    header = ["row", "seeds", "tokens", "bytes per item", *MEASURES]
    header += [f"depth {depth}: median ms (p95)" for depth in args.rerank_depth]
    title = f"{spec.name}, {args.device}, {args.text_tokens} text tokens, {args.calls} calls each"
    bench.add("study", title, figures, table(header, cells))
    if args.plot:
        write_atomic(str(args.plot), to_png(drawn(rows, tokens, taken)))
        print(f"plot: {args.plot}")


def drawn(
    rows: dict[str, Row], tokens: dict[str, int], taken: dict[str, dict[int, list[float]]]
) -> Figure:
    """Plots quality and latency by the number of tokens per item."""
    names = sorted(rows, key=lambda name: tokens[name])
    places = [tokens[name] for name in names]
    figure = Figure(figsize=(8.8, 4.2), layout="constrained")
    quality, latency = panels = figure.subplots(1, 2)
    colors = itertools.cycle(COLORS)
    for measure in ("R@1", "item to text R@1"):
        color = next(colors)
        means = [rows[name].after[measure].mean() for name in names]
        spreads = [spread(rows[name].after[measure]) for name in names]
        label = measure if measure.startswith("item") else f"text to item {measure}"
        quality.errorbar(places, means, spreads, fmt="o-", color=color, capsize=3, label=label)
        before = rows[names[0]].after[FIRST + measure].mean()
        quality.axhline(before, color=color, dashes=(4, 3), linewidth=1, label="first stage")
    for depth in next(iter(taken.values())):
        medians = [median_p95(taken[name][depth])[0] for name in names]
        latency.plot(places, medians, "s-", color=next(colors), label=f"depth {depth}, ms")
    quality.set_ylabel("recall")
    latency.set_ylabel("ms per query")
    latency.set_ylim(bottom=0)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [str(place) for place in places])
        panel.set_xlabel("tokens per item")
        panel.tick_params(which="minor", bottom=False, color=REFERENCE)
        apply_style(panel)
    legend_below(figure, panels)
    return figure


def _model(run: Run) -> Path:
    return Path(run.spec.output) / "model"


def _num_tokens(folder: Path, args: Any) -> int:
    """Returns the number of tokens per item of one frame.

    For the local variant, the user sets it.
    """
    adapter = read_metadata(folder, "study")["adapter"]
    if adapter["kind"] == "compressed":
        return adapter["num_tokens"]
    if args.tokens is None:
        raise MissingField("tokens", None, "the number of tokens per item in the local variant")
    return args.tokens[0]

"""Table, figure and files of a recommendation."""

from __future__ import annotations

import dataclasses
import json
import posixpath
from typing import Any

import yaml
from matplotlib.figure import Figure

from pipeline.config import absolute
from pipeline.eval.recommend.choose import Row
from pipeline.eval.recommend.queries import MEASURE
from pipeline.eval.recommend.run import Recommendation
from pipeline.eval.recommend.validation import Regret
from pipeline.eval.report.plot import REFERENCE, STYLES, apply_style, legend_below, to_png
from pipeline.index.columns import codec_name
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table, decimal, percentage

#: Name of the file with the spec of `maxray add representations`.
SPEC = "recompress.yaml"
CAVEAT = (
    "The interval does not include the difference between pseudo-queries and real queries; use "
    "--queries to measure it."
)
#: Reason why a candidate does not meet a requirement, by the name of the requirement.
LIMITS = {
    "retain": "the lower bound of its retained quality is below the required fraction",
    "max_bytes": "it needs more bytes per item than allowed",
    "max_milliseconds": "it takes longer per query than allowed",
}


def table(recommendation: Recommendation) -> Table:
    """Returns the table of all candidates in order of size. The recommended row is marked."""
    header = ["", "candidate", "codec", "vectors", "bytes", "ms/query", "retained"]
    cells = Table([[*header, "95 % interval", "mean distance", "radius"]])
    for row in recommendation.rows:
        name = row.method if row.num_vectors is None else f"{row.method} {row.num_vectors}"
        cells.append(
            [
                "*" if row is recommendation.choice.row else "",
                name,
                codec_name(row.codec),
                f"{row.vectors_per_item:.1f}",
                f"{row.bytes_per_item:,.0f}",
                f"{row.milliseconds:.2f}",
                percentage(row.retained),
                f"{percentage(row.low)} to {percentage(row.high)}",
                decimal(row.mean_distance),
                decimal(row.max_distance),
            ]
        )
    return cells


def regret_table(recommendation: Recommendation) -> Table:
    """Returns the table of the validation."""
    header = ["estimate", "recommended", "retained", "shortfall", "best", "bytes / best"]
    cells = Table([[*header, "correlation", "coverage"]])
    for regret in recommendation.regrets:
        cells.append(
            [
                regret.estimate,
                regret.recommended,
                percentage(regret.retained),
                percentage(regret.shortfall),
                regret.best,
                f"{regret.size_ratio:.2f}",
                decimal(regret.correlation),
                percentage(regret.coverage),
            ]
        )
    return cells


def reason(recommendation: Recommendation) -> str:
    """Explains the choice in at most four sentences."""
    spec, choice = recommendation.spec, recommendation.choice
    row = choice.row
    measure = MEASURE if recommendation.is_judged else f"the {MEASURE} of pseudo-queries"
    expected = (
        f"it retains {percentage(row.retained)} of {measure} (95 % interval {percentage(row.low)} "
        f"to {percentage(row.high)}) with {row.bytes_per_item:,.0f} bytes per item and "
        f"{row.milliseconds:.2f} ms per query"
    )
    caveat = "" if recommendation.is_judged else f" {CAVEAT}"
    if better := recommendation.better:
        caveat += (
            f" The uncompressed vectors are significantly worse than {better[0].name}, which "
            f"retains {percentage(better[0].retained)}."
        )
    if not choice.violations:
        return (
            f"{row.name} is the smallest candidate that retains at least "
            f"{percentage(spec.retain)} within the limits: {expected}.{caveat}"
        )
    problems = " and ".join(f"{LIMITS[name]} ({name})" for name in choice.violations)
    return (
        f"No candidate meets all requirements. The closest is {row.name}: {expected}, but "
        f"{problems}.{caveat}"
    )


def recompress_spec(recommendation: Recommendation) -> dict[str, Any] | None:
    """Returns the spec of `maxray add representations`, or None if the index stores it."""
    spec, row = recommendation.spec, recommendation.choice.row
    if recommendation.stored_as is not None:
        return None
    compressor = {"name": row.method, "num_vectors": row.num_vectors}
    representation: dict[str, Any] = {
        "compressor": {name: value for name, value in compressor.items() if value is not None},
        "codec": row.codec,
    }
    if recommendation.field != "content":
        representation["field"] = recommendation.field
    return {
        "index": absolute(spec.index),
        "source": spec.representation,
        "representations": [representation],
    }


def write(recommendation: Recommendation, folder: str) -> list[str]:
    """Writes all files of a recommendation and returns their paths."""
    files: dict[str, str | bytes] = {
        "candidates.csv": _full_table(recommendation).csv(),
        "recommendation.json": json.dumps(_as_json(recommendation), indent=2) + "\n",
        "recommendation.png": to_png(figure(recommendation)),
    }
    if spec := recompress_spec(recommendation):
        files[SPEC] = yaml.safe_dump(spec, sort_keys=False)
    if recommendation.regrets:
        files["validation.csv"] = Table([Regret._fields, *recommendation.regrets]).csv()
    paths = [posixpath.join(folder, name) for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        write_atomic(path, data)
    return paths


def _full_table(recommendation: Recommendation) -> Table:
    names = [field.name for field in dataclasses.fields(Row) if field.name != "codec"]
    rows = recommendation.rows
    values = [[getattr(row, name) for name in names] + [codec_name(row.codec)] for row in rows]
    return Table([[*names, "codec"], *values])


def _as_json(recommendation: Recommendation) -> dict[str, Any]:
    choice = recommendation.choice
    return {
        "spec": recommendation.spec.model_dump(mode="json"),
        "recommended": choice.row.name,
        "violations": choice.violations,
        "reason": reason(recommendation),
        "stored_as": recommendation.stored_as,
        "recompress": recompress_spec(recommendation),
        "measure": MEASURE,
        "is_judged": recommendation.is_judged,
        "uncompressed_quality": recommendation.quality,
        "better": [row.name for row in recommendation.better],
        "num_items": recommendation.num_items,
        "num_sampled": recommendation.num_sampled,
        "num_queries": recommendation.num_queries,
        "left_out": recommendation.left_out,
        "candidates": [dataclasses.asdict(row) for row in recommendation.rows],
    }


def figure(recommendation: Recommendation) -> Figure:
    """Plots the retained quality of all candidates against their bytes per item."""
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    panel = figure.subplots()
    lines: dict[str, list[Row]] = {}
    for row in recommendation.rows:
        lines.setdefault(f"{row.method} {codec_name(row.codec)}", []).append(row)
    for number, (name, rows) in enumerate(lines.items()):
        sizes, retained = [row.bytes_per_item for row in rows], [row.retained for row in rows]
        errors = [
            [max(0.0, row.retained - row.low) for row in rows],
            [max(0.0, row.high - row.retained) for row in rows],
        ]
        style = STYLES[number % len(STYLES)]
        panel.errorbar(sizes, retained, errors, **style, capsize=2, alpha=0.8, label=name)
    row = recommendation.choice.row
    panel.plot(
        [row.bytes_per_item],
        [row.retained],
        "o",
        markersize=16,
        markerfacecolor="none",
        markeredgecolor=REFERENCE,
        label="closest" if recommendation.choice.violations else "recommended",
    )
    spec = recommendation.spec
    panel.axhline(spec.retain, color=REFERENCE, linewidth=1, dashes=(6, 3), zorder=0)
    if spec.max_bytes is not None:
        panel.axvline(spec.max_bytes, color=REFERENCE, linewidth=1, dashes=(6, 3), zorder=0)
    panel.set_xscale("log")
    panel.set_xlabel("vector bytes per item")
    panel.set_ylabel(f"{MEASURE} relative to uncompressed")
    apply_style(panel)
    legend_below(figure, [panel])
    return figure

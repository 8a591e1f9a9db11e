"""Tables of binding accuracy with one row per encoder, like tables 3 to 5 of the SMART paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from examples.papers.synthetic.binding import MIN_SIDE, PANELS, SIDE, Pair
from examples.papers.synthetic.binding_accuracy import SCORES, check_form, pair_scores
from examples.papers.synthetic.binding_data import Form
from pipeline import config
from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style, legend_below, to_png
from pipeline.eval.significance import bootstrap_interval
from pipeline.registry import ENCODERS, EncoderSpec
from pipeline.runtime.text import Table
from pipeline.train.data.quality import pairwise


class TableSpec(config.Spec):
    """Spec of a table."""

    title: str
    """Title of the plot."""
    form: Form = "text"
    """Form of the reports: "text" has one sentence per panel. "rendered" is an image."""
    side: int = Field(SIDE, ge=MIN_SIDE)
    """Width and height of rendered reports, in pixels."""
    rows: dict[str, Annotated[list[EncoderSpec], Field(min_length=1)]] = Field(min_length=1)
    """Encoders of each row by name. Several encoders that differ only in the seed of their training
    are averaged."""


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        correct: By score, 1 if the report scores higher than its hard negative for each seed, pair
            and query, (S, P, 25) float64.
    """

    name: str
    correct: dict[str, np.ndarray]

    def mean(self, score: str) -> float:
        """Returns the mean accuracy over seeds."""
        return float(self.correct[score].mean())

    def interval(self, score: str) -> tuple[float, float]:
        """Returns the 95 % bootstrap confidence interval of the mean over pairs."""
        return bootstrap_interval(self.correct[score].mean(axis=(0, 2)))

    def spread(self, score: str) -> float:
        """Returns the standard deviation over seeds, or NaN for a single seed."""
        means_S = self.correct[score].mean(axis=(1, 2))
        return float(means_S.std(ddof=1)) if len(means_S) > 1 else np.nan

    @property
    def num_seeds(self) -> int:
        """Number of seeds."""
        return len(next(iter(self.correct.values())))


def check(spec: TableSpec) -> None:
    """Raises `SpecError` if an encoder is unavailable or does not support the form."""
    for name, encoders in spec.rows.items():
        for number, encoder in enumerate(encoders):
            with config.within(f"rows.{name}[{number}]"):
                ENCODERS.load(encoder.name).check(encoder)
                check_form(encoder, spec.form, "form")


def measure(spec: TableSpec, pairs: Sequence[Pair], report: Callable[[str], None]) -> list[Row]:
    """Measures the accuracy of all encoders by all scores that they support."""
    rows = []
    for name, encoders in spec.rows.items():
        results: dict[str, list[np.ndarray]] = {}
        for encoder in encoders:
            scores = pair_scores(ENCODERS.build(encoder), pairs, spec.form, spec.side)
            for score, scores_PQ2 in scores.items():
                correct = pairwise(*scores_PQ2.unbind(dim=2)).reshape(len(pairs), PANELS)
                results.setdefault(score, []).append(correct)
        rows.append(Row(name, {score: np.stack(seeds) for score, seeds in results.items()}))
        means = (f"{score} {rows[-1].mean(score):.3f}" for score in rows[-1].correct)
        report(f"{name}: {', '.join(means)}")
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Formats the rows. Accuracies are shown with confidence intervals."""
    scores = [score for score in SCORES if any(score in row.correct for row in rows)]
    cells = Table([["encoder", "seeds", *scores]])
    for row in rows:
        values = []
        for score in scores:
            if score not in row.correct:
                values.append("-")
                continue
            spread = f" ± {row.spread(score):.3f}" if row.num_seeds > 1 else ""
            low, high = row.interval(score)
            values.append(f"{row.mean(score):.3f}{spread} [{low:.3f}, {high:.3f}]")
        cells.append([row.name, str(row.num_seeds), *values])
    return cells


def full_table(rows: Sequence[Row]) -> Table:
    """Returns the numbers, with one line per row and score."""
    lines = Table([["encoder", "seeds", "score", "accuracy", "low", "high", "sd"]])
    for row in rows:
        for score in row.correct:
            values = (row.mean(score), *row.interval(score), row.spread(score))
            cells = ["" if np.isnan(value) else round(value, 4) for value in values]
            lines.append([row.name, row.num_seeds, score, *cells])
    return lines


def plot(rows: Sequence[Row], title: str) -> bytes:
    """Plots the accuracies with confidence intervals and the chance level as a PNG."""
    figure = Figure(figsize=(6.4, 1.3 + 0.4 * len(rows)), layout="constrained")
    panel = figure.subplots()
    apply_style(panel)
    positions = np.arange(len(rows))[::-1]
    for number, score in enumerate(SCORES):
        points = [(row, y) for row, y in zip(rows, positions, strict=True) if score in row.correct]
        if not points:
            continue
        mean = np.array([row.mean(score) for row, _ in points])
        low, high = np.array([row.interval(score) for row, _ in points]).T
        height = np.array([y for _, y in points]) + 0.22 * (1 - number)
        errors = [mean - low, high - mean]
        panel.errorbar(mean, height, xerr=errors, fmt="o", ms=4, color=COLORS[number], label=score)
    panel.axvline(0.5, color=REFERENCE, linewidth=1, linestyle="dashed")
    panel.set_yticks(positions, [row.name for row in rows])
    panel.set_xlabel("pairwise accuracy")
    panel.set_title(title, fontsize=10)
    legend_below(figure, [panel])
    return to_png(figure)

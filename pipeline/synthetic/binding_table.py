"""Tables of encoders on local bindings, in the form of SMART's Tables 3 to 5: a row an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from pipeline import config
from pipeline.eval.significance import bootstrap_interval
from pipeline.registry import ENCODERS, EncoderSpec
from pipeline.report.plot import COLORS, REFERENCE, legend_below, plain, to_png
from pipeline.synthetic.binding import PANELS, SIDE, SMALLEST_SIDE, Pair
from pipeline.synthetic.binding_accuracy import SCORES, check_form, pair_scores
from pipeline.synthetic.binding_data import Form
from pipeline.training_data.quality import pairwise


class TableSpec(config.Spec):
    """A table.

    Attributes:
        title: of the plot.
        form: `text`, a sentence a panel; or `rendered`, a picture of `side` pixels.
        rows: by name an encoder; or several that differ in the seed of their training alone, of
            which the row has the mean.
    """

    title: str
    form: Form = "text"
    side: int = Field(SIDE, ge=SMALLEST_SIDE)
    rows: dict[str, Annotated[list[EncoderSpec], Field(min_length=1)]] = Field(min_length=1)


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        right: by score, (S, P, 25) float64 for each seed, pair and query: 1 where the report scores
            higher than its hard negative.
    """

    name: str
    right: dict[str, np.ndarray]

    def mean(self, score: str) -> float:
        """The accuracy, over all seeds."""
        return float(self.right[score].mean())

    def interval(self, score: str) -> tuple[float, float]:
        """95 % of the means of as many pairs drawn anew lie between these."""
        return bootstrap_interval(self.right[score].mean(axis=(0, 2)))

    def spread(self, score: str) -> float:
        """The standard deviation of the seeds' means; NaN of one seed."""
        means_S = self.right[score].mean(axis=(1, 2))
        return float(means_S.std(ddof=1)) if len(means_S) > 1 else np.nan

    @property
    def num_seeds(self) -> int:
        """S."""
        return len(next(iter(self.right.values())))


def check(spec: TableSpec) -> None:
    """Raises `SpecError` if an encoder cannot be built here or reads no such reports."""
    for name, encoders in spec.rows.items():
        for number, encoder in enumerate(encoders):
            with config.within(f"rows.{name}.{number}"):
                ENCODERS.load(encoder.name).check(encoder)
                check_form(encoder, spec.form, "form")


def measure(spec: TableSpec, pairs: Sequence[Pair], say: Callable[[str], None]) -> list[Row]:
    """Measures every encoder by each score that it has."""
    rows = []
    for name, encoders in spec.rows.items():
        of_seeds: dict[str, list[np.ndarray]] = {}
        for encoder in encoders:
            scores = pair_scores(ENCODERS.build(encoder), pairs, spec.form, spec.side)
            for score, scores_PQ2 in scores.items():
                right = pairwise(*scores_PQ2.unbind(dim=2)).reshape(len(pairs), PANELS)
                of_seeds.setdefault(score, []).append(right)
        rows.append(Row(name, {score: np.stack(own) for score, own in of_seeds.items()}))
        said = (f"{score} {rows[-1].mean(score):.3f}" for score in rows[-1].right)
        say(f"{name}: {', '.join(said)}")
    return rows


def table(rows: Sequence[Row]) -> list[list[str]]:
    """The rows as cells, the header first: accuracies with their intervals."""
    scores = [score for score in SCORES if any(score in row.right for row in rows)]
    cells = [["encoder", "seeds", *scores]]
    for row in rows:
        shown = []
        for score in scores:
            if score not in row.right:
                shown.append("-")
                continue
            spread = f" ± {row.spread(score):.3f}" if row.num_seeds > 1 else ""
            low, high = row.interval(score)
            shown.append(f"{row.mean(score):.3f}{spread} [{low:.3f}, {high:.3f}]")
        cells.append([row.name, str(row.num_seeds), *shown])
    return cells


def numbers(rows: Sequence[Row]) -> list[list[str | float | int]]:
    """The same for a file: a line a row and score."""
    lines: list[list[str | float | int]] = [
        ["encoder", "seeds", "score", "accuracy", "low", "high", "sd"]
    ]
    for row in rows:
        for score in row.right:
            figures = (row.mean(score), *row.interval(score), row.spread(score))
            shown = ["" if np.isnan(figure) else round(figure, 4) for figure in figures]
            lines.append([row.name, row.num_seeds, score, *shown])
    return lines


def drawn(rows: Sequence[Row], title: str) -> bytes:
    """A dot with its interval for each row and score, and the line of guessing; a PNG."""
    figure = Figure(figsize=(6.4, 1.3 + 0.4 * len(rows)), layout="constrained")
    panel = figure.subplots()
    plain(panel)
    places = np.arange(len(rows))[::-1]
    for number, score in enumerate(SCORES):
        own = [(row, place) for row, place in zip(rows, places, strict=True) if score in row.right]
        if not own:
            continue
        mean = np.array([row.mean(score) for row, _ in own])
        low, high = np.array([row.interval(score) for row, _ in own]).T
        height = np.array([place for _, place in own]) + 0.22 * (1 - number)
        off = [mean - low, high - mean]
        panel.errorbar(mean, height, xerr=off, fmt="o", ms=4, color=COLORS[number], label=score)
    panel.axvline(0.5, color=REFERENCE, linewidth=1, linestyle="dashed")
    panel.set_yticks(places, [row.name for row in rows])
    panel.set_xlabel("pairwise accuracy")
    panel.set_title(title, fontsize=10)
    legend_below(figure, [panel])
    return to_png(figure)

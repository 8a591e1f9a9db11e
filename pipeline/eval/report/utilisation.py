"""Plot of how stored vectors are matched by position (AGC paper, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from pipeline.eval.report.plot import COLORS, REFERENCE, apply_style

#: Maximum number of columns.
MAX_COLUMNS = 5


class Profile(NamedTuple):
    """Use of the stored vectors of a representation.

    Attributes:
        num_positions: Number of vectors of the longest item.
        strengths: Matching strength of each position, or of runs of adjacent positions.
        similarity: (R, R) mean cosine between positions, or between runs of adjacent positions.
    """

    name: str
    num_positions: int
    strengths: Sequence[float]
    similarity: np.ndarray


def utilisation_figure(profiles: Sequence[Profile], lowest: float | None = None) -> Figure:
    """Draws the matching strength above the similarity between positions, by representation."""
    lowest = lowest_similarity(profiles) if lowest is None else lowest
    columns = max(1, min(len(profiles), MAX_COLUMNS))
    lines = max(1, math.ceil(len(profiles) / columns))
    figure = Figure(figsize=(3.2 * columns, 4.4 * lines), layout="constrained")
    parts = figure.subfigures(lines, columns, squeeze=False).flat
    for part, profile in zip(parts, profiles, strict=False):  # the last line may be incomplete
        _draw(part, profile, lowest)
    return figure


def lowest_similarity(profiles: Sequence[Profile]) -> float:
    """Returns the lower limit of the colour scale, which is 0 unless a similarity is negative."""
    return min([0.0, *(float(np.min(p.similarity)) for p in profiles if p.similarity.size)])


def _draw(figure: FigureBase, profile: Profile, lowest: float) -> None:
    bars, heat = figure.subplots(2, 1, height_ratios=(1, 1.5))
    strengths, end = np.array(profile.strengths), profile.num_positions
    width = end / max(1, len(strengths))
    bars.bar(np.arange(len(strengths)) * width, strengths, width, align="edge", color=COLORS[0])
    bars.set_xlim(0, max(1, end))
    bars.set_title(profile.name, fontsize=10)
    bars.set_ylabel("strength", fontsize=8)
    image = heat.imshow(
        profile.similarity, vmin=lowest, vmax=1, cmap="viridis", extent=(0, end, end, 0)
    )
    heat.set_xlabel("position", fontsize=8)
    bar = figure.colorbar(image, ax=heat, shrink=0.8)
    bar.outline.set_edgecolor(REFERENCE)
    for panel in (bars, heat, bar.ax):
        apply_style(panel)
        panel.grid(False)
        panel.tick_params(labelsize=7)
    for axis in (bars.xaxis, heat.xaxis, heat.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))

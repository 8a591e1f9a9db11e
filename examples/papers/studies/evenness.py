"""Plot of retrieval quality against the evenness of matching (AGC paper, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from pipeline.eval.report.plot import STYLES, apply_style, legend_below, to_png


class Point(NamedTuple):
    """A row of a study.

    Attributes:
        evenness: Values of the metrics of the x axes, one per panel.
    """

    method: str
    quality: float
    evenness: tuple[float, ...]


def evenness_png(points: Sequence[Point], axes: Sequence[str], quality: str) -> bytes:
    """Draws one panel per metric of evenness, with a colour per method, as a PNG."""
    figure = Figure(figsize=(3.6 * len(axes), 3.4), layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for number, method in enumerate(dict.fromkeys(point.method for point in points)):
        style = STYLES[number % len(STYLES)] | {"linestyle": "none"}
        found = [point for point in points if point.method == method]
        for column, panel in enumerate(panels):
            values = [point.evenness[column] for point in found]
            panel.plot(values, [point.quality for point in found], **style, label=method)
    for panel, name in zip(panels, axes, strict=True):
        panel.set_xlabel(name)
        apply_style(panel)
    panels[0].set_ylabel(quality)
    legend_below(figure, panels)
    return to_png(figure)

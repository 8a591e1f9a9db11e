"""Style and output formats of all figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.eval.results import Evaluation, method_name
from pipeline.eval.views import codec_names, layer_scans, line_name, scanned_rows
from pipeline.index.columns import codec_name

#: Arguments of `Axes.plot`.
Style = dict[str, Any]
#: Colour-blind palette. The second eight styles are dashed.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D4A9C", "#7F5B3A")
STYLES: tuple[Style, ...] = tuple(
    {"color": color, "marker": marker, "linestyle": dashes}
    for dashes, markers in (("solid", "os^DvPX*"), ("dashed", "<>phd8H."))
    for color, marker in zip(COLORS, markers, strict=True)
)
REFERENCE = "#555555"


def to_file(figure: Figure, format: str) -> bytes:
    """Returns a figure as the content of a file in the format `png`, `svg` or `pdf`."""
    file = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # Publishers accept TrueType fonts only, and the ids of SVG elements would be random.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "maxray"}):
        figure.savefig(
            file, format=format, dpi=150, bbox_inches="tight", metadata=dates.get(format)
        )
    return file.getvalue()


def to_png(figure: Figure) -> bytes:
    """Returns a figure as PNG."""
    return to_file(figure, "png")


def to_svg(figure: Figure, name: str) -> str:
    """Returns a figure as an `<svg>` element, with grey replaced by the text colour of the page.

    The prefix `name` makes element ids unique on the page.
    """
    svg = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            svg, format="svg", transparent=True, metadata=no_metadata, bbox_inches="tight"
        )
    text = svg.getvalue()
    return text[text.index("<svg") :].replace(REFERENCE, "currentColor")


def styles(evaluation: Evaluation) -> dict[str, Style]:
    """Assigns a style to each line that is the same in all figures.

    If there are several codecs, colours distinguish codecs and markers distinguish methods.
    """
    scanned = scanned_rows(evaluation)
    rows = [r for r in evaluation.results if r.is_compressed and r.name not in scanned]
    lines = {line_name(evaluation, row): row for row in rows}
    scans = [scan.name for scan in layer_scans(evaluation)]
    names = dict.fromkeys([*sorted(lines), *scans])
    line_styles = {name: STYLES[i % len(STYLES)] for i, name in enumerate(names)}
    codecs = codec_names(evaluation)
    if len(codecs) > 1:
        methods = sorted({method_name(row.compressor) for row in rows})
        for name, row in lines.items():
            style = STYLES[methods.index(method_name(row.compressor)) % len(STYLES)]
            color = COLORS[codecs.index(codec_name(row.codec)) % len(COLORS)]
            line_styles[name] = {**style, "color": color}
    return line_styles


def apply_style(panel: Axes) -> None:
    """Applies the common style to axes."""
    panel.grid(color=REFERENCE, alpha=0.15, linewidth=0.8)
    panel.tick_params(which="both", color=REFERENCE, labelcolor=REFERENCE)
    for label in (panel.xaxis.label, panel.yaxis.label, panel.title):
        label.set_color(REFERENCE)
    panel.spines[:].set_color(REFERENCE)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """Adds one legend below all panels and enlarges the figure for it."""
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if not handles:
        return
    columns = min(len(handles), 2 * len(panels))
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, rows - 3))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=REFERENCE,
    )

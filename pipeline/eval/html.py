"""The report of evaluations as one HTML page, which needs neither a network nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline.eval import figures, plot
from pipeline.eval.compare import Comparison
from pipeline.eval.examples import MARKS, Example
from pipeline.eval.report import (
    against_bm25,
    budget,
    decimal,
    explained,
    first_diagnostics,
    fittings,
    method,
    of_category,
    of_kind,
    p_equals,
    p_value,
    second_columns,
    second_diagnostics,
    share,
    size_parts,
    sizes,
    spread,
    summary,
)
from pipeline.eval.results import ALPHA, OSR, Evaluation
from pipeline.eval.views import correlations, in_scans


@dataclass(frozen=True)
class Section:
    """One benchmark of a report."""

    evaluation: Evaluation
    examples: Sequence[Example]


def report(sections: Sequence[Section]) -> str:
    """The page of one or several evaluations, one section each."""
    return _render("report.html.j2", sections=sections, alpha=ALPHA, osr=OSR)


def comparison(compared: Comparison) -> str:
    """The page that compares two evaluations."""
    return _render("compare.html.j2", compared=compared, alpha=ALPHA)


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "against_bm25": against_bm25,
        "budget": budget,
        "decimal": decimal,
        "correlations": lambda evaluation: list(correlations(evaluation)),
        "drawings": figures.drawings,
        "first_diagnostics": first_diagnostics,
        "in_scans": in_scans,
        "method": method,
        "of_kind": of_kind,
        "marked": marked,
        "p_equals": p_equals,
        "p_value": p_value,
        "panels": plot.panels,
        "plot": lambda evaluation, panel: Markup(plot.quality_bytes_svg(evaluation, panel)),
        "explained": explained,
        "fittings": fittings,
        "of_category": of_category,
        "size_parts": size_parts,
        "second_columns": second_columns,
        "second_diagnostics": second_diagnostics,
        "share": share,
        "sizes": sizes,
        "spread": spread,
        "svgs": lambda drawing: map(Markup, drawing.svgs()),
        "summary": summary,
        "yaml": lambda spec: yaml.safe_dump(spec, sort_keys=False, allow_unicode=True),
    }
    return environment.get_template(template).render(**values)


def marked(snippet: str) -> Markup:
    """A snippet with its marked words as HTML marks, and all else escaped.

    >>> marked("<b> \\x02wing\\x03")
    Markup('&lt;b&gt; <mark>wing</mark>')
    """
    start, end = MARKS
    shown = str(escape(snippet)).replace(start, "<mark>").replace(end, "</mark>")
    return Markup(shown)

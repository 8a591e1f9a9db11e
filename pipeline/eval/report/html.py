"""HTML pages of evaluations and comparisons, which are self-contained and use no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline.eval.compare import Comparison
from pipeline.eval.examples import HIGHLIGHT_DELIMITERS, Example
from pipeline.eval.report import figures, quality_bytes
from pipeline.eval.report.summary import against_bm25, fitting_samples, measure_description, summary
from pipeline.eval.report.tables import (
    budget,
    candidates_table,
    category_quality,
    comparisons_table,
    diagnostic_cells,
    diagnostic_columns,
    document_category_metrics,
    method,
    rerank_table,
    size_parts,
    sizes,
    spread,
    summary_diagnostics,
)
from pipeline.eval.results import ALPHA, OSR, Evaluation
from pipeline.eval.views import correlations, scanned_rows
from pipeline.runtime.text import decimal, p_equals, p_value, percentage

#: Scores of rows that the side-by-side view can show. Unequal weights are not among them.
SHOWN_SCORES = ("maxsim", "hybrid", "fused")


def report(evaluations: Sequence[Evaluation]) -> str:
    """Returns the page of one or several evaluations, with one section per evaluation."""
    return _render("report.html.j2", evaluations=evaluations, alpha=ALPHA, osr=OSR)


def comparison(compared: Comparison) -> str:
    """Returns the page that compares two evaluations."""
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
        "candidates_table": candidates_table,
        "rerank_table": rerank_table,
        "comparisons_table": comparisons_table,
        "decimal": decimal,
        "correlations": lambda evaluation: list(correlations(evaluation)),
        "figures": figures.figures,
        "summary_diagnostics": summary_diagnostics,
        "scanned_rows": scanned_rows,
        "method": method,
        "document_category_metrics": document_category_metrics,
        "highest_mean": lambda evaluation, name: max(r.means[name] for r in evaluation.results),
        "highlight": highlight,
        "p_equals": p_equals,
        "p_value": p_value,
        "panels": quality_bytes.panels,
        "plot": lambda evaluation, panel: Markup(
            quality_bytes.quality_bytes_svg(evaluation, panel)
        ),
        "measure_description": measure_description,
        "fitting_samples": fitting_samples,
        "category_quality": category_quality,
        "size_parts": size_parts,
        "side_by_side": side_by_side,
        "diagnostic_columns": diagnostic_columns,
        "diagnostic_cells": diagnostic_cells,
        "percentage": percentage,
        "sizes": sizes,
        "spread": spread,
        "svgs": lambda figure: map(Markup, figure.svgs()),
        "summary": summary,
        "yaml": lambda spec: yaml.safe_dump(spec, sort_keys=False, allow_unicode=True),
    }
    return environment.get_template(template).render(**values)


def highlight(snippet: str) -> Markup:
    r"""Returns a snippet as HTML, with matched words in `<mark>` and everything else escaped.

    >>> highlight("<b> \x02wing\x03")
    Markup('&lt;b&gt; <mark>wing</mark>')
    """
    start, end = HIGHLIGHT_DELIMITERS
    return Markup(str(escape(snippet)).replace(start, "<mark>").replace(end, "</mark>"))


def side_by_side(evaluation: Evaluation, example: Example) -> str | None:
    """Returns the URL that shows a query with both rows of an example in the search page.

    Returns None if the evaluation has no `search_page`, or if a row has another score than MaxSim,
    hybrid with equal weights, or fused. The fields are those of `pipeline/serve/page/state.js`.
    """
    page = evaluation.spec.get("search_page")
    rows = [evaluation.row(name) for name in example.hits]
    if not page or any(row.label not in SHOWN_SCORES for row in rows):
        return None
    left, right = (rows * 2)[:2]
    fields = {"view": "compare", "q": example.query, "rep": left.representation}
    fields["rep2"] = right.representation
    if left.score != "maxsim":
        fields["score"] = left.score
    if right.score != left.score:
        fields["score2"] = right.score
    parts = urlsplit(page)
    query = urlencode([*parse_qsl(parts.query), *fields.items()])
    return urlunsplit(parts._replace(query=query))

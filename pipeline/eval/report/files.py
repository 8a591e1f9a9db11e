"""Report files of an evaluation, of a comparison and of pooled evaluations."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

import yaml

from pipeline.eval.compare import Comparison
from pipeline.eval.report import html
from pipeline.eval.report.compare import full_table
from pipeline.eval.report.figures import figures
from pipeline.eval.report.quality_bytes import quality_bytes_file
from pipeline.eval.report.tables import (
    candidates_table,
    comparisons_table,
    document_categories_csv,
    metrics_csv,
    paper_csv,
    paper_table,
    per_query_csv,
    query_categories_csv,
    rerank_table,
    table,
)
from pipeline.eval.results import RESULTS, Evaluation
from pipeline.eval.views import candidates_scans
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table, tex


def write(evaluation: Evaluation, folder: str) -> list[str]:
    """Writes the report of an evaluation, its results and its spec, and returns their paths."""
    plots = _format(evaluation)
    files: dict[str, str | bytes] = {
        "report.html": html.report([evaluation]),
        "metrics.csv": metrics_csv(evaluation),
        "per_query.csv": per_query_csv(evaluation),
        **_category_tables(evaluation),
        **_candidates_tables(evaluation),
        **_rerank_tables(evaluation),
        **_comparisons_tables(evaluation),
        "table.md": table(evaluation).markdown(),
        "table.csv": paper_csv(evaluation),
        "table.tex": paper_table(evaluation),
        f"quality_bytes.{plots}": quality_bytes_file(evaluation, plots),
        **_figures(evaluation),
        RESULTS: evaluation.to_json(),
        "spec.yaml": yaml.safe_dump(evaluation.spec, sort_keys=False, allow_unicode=True),
    }
    return _write(files, folder)


def write_comparison(compared: Comparison, folder: str) -> list[str]:
    """Writes the page and the table of a comparison, and returns their paths."""
    files = {
        "compare.html": html.comparison(compared),
        "compare.csv": full_table(compared).csv(),
    }
    return _write(files, folder)


def write_pooled(pooled: Evaluation, table: Table, folder: str) -> list[str]:
    """Writes the table and the figures of pooled evaluations, and returns their paths."""
    tables = {"table.md": table.markdown(), "pooled.csv": table.csv()}
    return _write({**tables, **_figures(pooled)}, folder)


def _category_tables(evaluation: Evaluation) -> dict[str, str]:
    tables = {}
    if evaluation.document_categories:
        tables["document_categories.csv"] = document_categories_csv(evaluation)
    if evaluation.query_categories:
        tables["query_categories.csv"] = query_categories_csv(evaluation)
    return tables


def _candidates_tables(evaluation: Evaluation) -> dict[str, str]:
    if not candidates_scans(evaluation):
        return {}
    table = candidates_table(evaluation)
    return {"candidates.csv": table.csv(), "candidates.md": table.markdown()}


def _rerank_tables(evaluation: Evaluation) -> dict[str, str]:
    if not any(result.rerank for result in evaluation.results):
        return {}
    table = rerank_table(evaluation)
    return {"reranking.csv": table.csv(), "reranking.md": table.markdown()}


def _comparisons_tables(evaluation: Evaluation) -> dict[str, str]:
    if not evaluation.planned_comparisons:
        return {}
    table = comparisons_table(evaluation)
    latex = Table([tex(cell) for cell in row] for row in table).latex()
    return {
        "comparisons.csv": table.csv(),
        "comparisons.md": table.markdown(),
        "comparisons.tex": latex,
    }


def _figures(evaluation: Evaluation) -> dict[str, bytes]:
    plots = _format(evaluation)
    return {f"{figure.name}.{plots}": figure.file(plots) for figure in figures(evaluation)}


def _format(evaluation: Evaluation) -> str:
    """Returns the format of the plots."""
    return evaluation.spec.get("plots", "png")


def _write(files: Mapping[str, str | bytes], folder: str) -> list[str]:
    paths = [posixpath.join(folder, name) for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        write_atomic(path, data)
    return paths

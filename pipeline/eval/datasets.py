"""Helpers of the benchmarks that read published data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import PositiveInt

from pipeline.config import ComponentSpec, SpecError
from pipeline.eval import JudgedQueries
from pipeline.schema import is_blank
from pipeline.sources.completeness import check_number


class DatasetSpec(ComponentSpec):
    """Options of all benchmarks that read published data sets."""

    num_queries: PositiveInt | None = None
    """Expected number of judged queries; another number is an error. Null to accept any."""


def judged_queries(
    spec: DatasetSpec,
    location: str,
    texts: Mapping[str, str],
    qrels: Mapping[str, dict[str, int]],
    **fields: Any,
) -> JudgedQueries:
    """Returns the queries that have a judgment.

    Args:
        spec: Spec of the benchmark.
        location: File of the queries, for errors.
        texts: Texts of all queries.
        qrels: Grades by document id, by query id.
        fields: Other fields of `JudgedQueries`.

    Raises:
        SpecError: No query is judged, or their number is not the expected one.
    """
    queries = {query_id: text for query_id, text in texts.items() if query_id in qrels}
    if not queries:
        rule = "a benchmark with a judged query"
        raise SpecError("benchmark", location, rule, "has no judged queries")
    expected = spec.num_queries
    check_number("benchmark.num_queries", expected, len(queries), "judged queries")
    return JudgedQueries(
        queries,
        {query_id: qrels[query_id] for query_id in queries},
        num_unjudged=len(texts) - len(queries),
        num_without_text=len(qrels.keys() - texts.keys()),
        **fields,
    )


def check_texts(texts: Mapping[str, str], query_ids: Iterable[str], location: str) -> None:
    """Raises `SpecError` if the text of a query is blank."""
    for query_id in query_ids:
        if is_blank(texts[query_id]):
            rule = "a text with at least one word"
            raise SpecError("benchmark", texts[query_id], rule, note=f" ({query_id} of {location})")

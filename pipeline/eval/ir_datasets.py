"""Benchmarks of text collections that the package ir_datasets reads."""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config import SpecError, within
from pipeline.eval import Benchmark, JudgedQueries
from pipeline.schema import is_blank
from pipeline.sources.ir_datasets import DatasetSpec, open_dataset, reading


class IrDatasets(Benchmark["IrDatasets.Spec"]):
    """Queries and judgments of a dataset of the package ir_datasets.

    The documents of the dataset are indexed with the source `ir_datasets`.
    """

    class Spec(DatasetSpec):
        """Options of the ir_datasets benchmark."""

        name: Literal["ir_datasets"] = "ir_datasets"
        query_field: str | None = None
        """Field of the queries with the text, such as title, description or narrative. Defaults to
        the package's default text."""
        ignore_identical_ids: bool = True
        """Removes the document that has the id of a query from the ranking of this query, unless it
        is judged relevant, as in BEIR's evaluation: queries of ArguAna and Quora are documents
        themselves. False if query ids and document ids coincide by chance."""

    def load(self) -> JudgedQueries:
        """Loads the judged queries."""
        spec, texts = self.spec, {}
        with within("benchmark"):
            dataset = open_dataset(spec, "queries", "qrels")
            with reading(spec):
                for query in dataset.queries_iter():
                    texts[query.query_id] = _text(query, spec.query_field)
                qrels = dataset.qrels_dict()
            texts = {query_id: text for query_id, text in texts.items() if not is_blank(text)}
            judged = {query_id: text for query_id, text in texts.items() if query_id in qrels}
            if not judged:
                rule = "a dataset with a judged query"
                raise SpecError("dataset", spec.dataset, rule, "has no judged queries")
        return JudgedQueries(
            judged,
            {query_id: dict(qrels[query_id]) for query_id in judged},
            num_unjudged=len(texts) - len(judged),
            num_without_text=len(qrels) - len(judged),
            ignore_query_id=spec.ignore_identical_ids,
        )


def _text(query: Any, field: str | None) -> str:
    """Returns the text of a query, or an empty string for a null.

    Raises:
        SpecError: The query has no such field, or it is not a text.
    """
    if field is None and hasattr(query, "default_text"):
        text = query.default_text()
    elif field is not None and field in query._fields:
        text = getattr(query, field)
    else:
        names = [name for name in query._fields if name != "query_id"]
        raise SpecError.unknown_name("query_field", str(field), names)
    if not isinstance(text, str | None):
        problem = f"has a {type(text).__name__} in the query {query.query_id}"
        raise SpecError("query_field", field, "a field with texts", problem)
    return text or ""

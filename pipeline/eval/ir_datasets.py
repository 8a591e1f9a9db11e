"""Benchmarks of text collections that the package ir_datasets reads."""

from __future__ import annotations

from typing import Literal

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

    def load(self) -> JudgedQueries:
        """Loads the judged queries."""
        spec, texts = self.spec, {}
        with within("benchmark"):
            dataset = open_dataset(spec, "queries", "qrels")
            with reading(spec):
                for query in dataset.queries_iter():
                    if spec.query_field is None:
                        texts[query.query_id] = query.default_text()
                    elif spec.query_field in query._fields:
                        texts[query.query_id] = getattr(query, spec.query_field)
                    else:
                        names = [name for name in query._fields if name != "query_id"]
                        raise SpecError.unknown_name("query_field", spec.query_field, names)
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
        )

"""BEIR's format: a folder with `corpus.jsonl`, `queries.jsonl` and `qrels/<split>.tsv`.

The documents are indexed with the source `text`, whose `path` is the corpus.
"""

from __future__ import annotations

import posixpath
from typing import Any, Literal

from pipeline.config import ComponentSpec, absolute
from pipeline.datasets.queries import CollectionQueries
from pipeline.eval.topics import read_categories, read_qrels, read_queries


class Queries(CollectionQueries["Queries.Spec"]):
    """Benchmark in a folder with `queries.jsonl` (`_id`, `text`) and `qrels/<split>.tsv`.

    All other fields of the queries are used as categories, see `read_categories`.
    """

    class Spec(ComponentSpec):
        """Benchmark in BEIR format."""

        name: Literal["beir"] = "beir"
        path: str
        """Folder of the benchmark."""
        split: str = "test"
        """Split of the judgments."""
        ignore_identical_ids: bool = True
        """Removes the document that has the id of a query from the ranking of this query, unless it
        is judged relevant, as in BEIR's evaluation: queries of ArguAna and Quora are documents
        themselves. False if query ids and document ids coincide by chance."""

    def _file(self, *names: str) -> str:
        return posixpath.join(absolute(self.spec.path), *names)

    def queries(self) -> dict[str, str]:
        """Reads the texts of the queries of all splits."""
        return read_queries(self._file("queries.jsonl"), "path")

    def judgments(self) -> dict[str, dict[str, int]]:
        """Reads the judgments of the split."""
        return read_qrels(self._file("qrels", f"{self.spec.split}.tsv"), "split")

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Groups the queries by the other fields of their lines."""
        return read_categories(self._file("queries.jsonl"), query_ids)

    def options(self) -> dict[str, Any]:
        """Returns whether documents with the id of the query are removed."""
        return {"ignore_query_id": self.spec.ignore_identical_ids}

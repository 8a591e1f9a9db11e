"""Benchmarks in the format of BEIR: a folder with queries.jsonl and qrels/<split>.tsv."""

from __future__ import annotations

import posixpath
from typing import Literal

from pipeline.config import ComponentSpec, SpecError, absolute
from pipeline.eval import Benchmark, JudgedQueries
from pipeline.eval.topics import read_categories, read_lines, read_queries


class Beir(Benchmark["Beir.Spec"]):
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

    def load(self) -> JudgedQueries:
        """Loads the queries of the split and their judgments."""
        folder = absolute(self.spec.path)
        path = posixpath.join(folder, "queries.jsonl")
        texts = read_queries(path, "benchmark.path")
        qrels = read_qrels(posixpath.join(folder, "qrels", f"{self.spec.split}.tsv"))
        queries = {query_id: text for query_id, text in texts.items() if query_id in qrels}
        if not queries:
            rule = "a benchmark with a judged query"
            raise SpecError("benchmark.path", self.spec.path, rule, "has no judged queries")
        return JudgedQueries(
            queries,
            {query_id: qrels[query_id] for query_id in queries},
            num_unjudged=len(texts) - len(queries),
            num_without_text=len(qrels) - len(queries),
            categories=read_categories(path, queries),
            ignore_query_id=self.spec.ignore_identical_ids,
        )


#: Largest absolute grade: grades are 32-bit integers.
MAX_GRADE = 2**31 - 1


def read_qrels(path: str, field: str = "benchmark.split") -> dict[str, dict[str, int]]:
    """Reads grades by document id and query id.

    The lines are `query-id<TAB>corpus-id<TAB>score`, as in BEIR, or
    `query-id iteration document-id grade`, as in TREC.

    Negative grades are returned unchanged. All metrics treat them as 0, which means that a document
    was judged and is not relevant.

    Args:
        path: Path or URI of the file.
        field: Spec field that errors name.

    Raises:
        SpecError: The file is missing or malformed.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path, field):
        columns = line.split("\t") if "\t" in line else line.split()
        if number == 1 and columns[-1].strip() == "score":
            continue
        if len(columns) == 4:
            del columns[1]
        try:
            query_id, document_id, grade = map(str.strip, columns)
            if not query_id or not document_id or abs(int(grade)) > MAX_GRADE:
                raise ValueError
            graded = qrels.setdefault(query_id, {}).setdefault(document_id, int(grade))
        except ValueError:
            rule = "a line query-id<TAB>corpus-id<TAB>32-bit integer or a line in TREC format"
            note = f" (line {number} of {path})"
            raise SpecError(field, line[:80], rule, note=note) from None
        if graded != int(grade):
            rule, note = "the only grade of its document", f" (line {number} of {path})"
            raise SpecError(field, line[:80], rule, "differs from another", note)
    return qrels

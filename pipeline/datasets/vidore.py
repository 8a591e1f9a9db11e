"""ViDoRe: pages with queries, and in version 3 with bounding boxes.

The folders `queries`, `qrels` and `corpus` of a data set contain Parquet files. The columns of ids
are `query-id` and `corpus-id` (version 2 and the BEIR configurations of version 1) or `query_id`
and `corpus_id` (version 3). The pages are indexed with the source `images`.
"""

from __future__ import annotations

import functools
import io
import posixpath
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from PIL import Image

from pipeline.config import SpecError, Uri, reading, within
from pipeline.datasets.files import check_text, read_table
from pipeline.datasets.queries import CollectionQueries, QueriesSpec
from pipeline.eval import Box, Phrase
from pipeline.eval.boxes import normalise_box
from pipeline.eval.topics import group_categories


class Judgment(NamedTuple):
    """Judgment of a page for a query.

    Attributes:
        boxes: `bounding_boxes` of the parts that answer the query, with corners x1 y1 x2 y2.
    """

    query_id: str
    page: str
    grade: int
    boxes: list[dict[str, Any]]


def read_queries(folder: str, language: str | None) -> dict[str, dict[str, Any]]:
    """Reads the rows of the queries of a language, or of all, by id."""
    queries: dict[str, dict[str, Any]] = {}
    languages: set[str] = set()
    for location, row in read_table(posixpath.join(folder, "queries"), (), "path"):
        query_id = _id(row, "query", location)
        check_text(row.get("query"), "path", location)
        languages.add(str(row.get("language")))
        if language is None or row.get("language") == language:
            if query_id in queries:
                raise SpecError("path", query_id, "a unique query id", "occurs twice")
            queries[query_id] = row
    if not queries:
        raise SpecError.unknown_name("language", language or "", sorted(languages))
    return queries


def read_judgments(folder: str) -> Iterator[Judgment]:
    """Yields the judgments of all queries."""
    for location, row in read_table(posixpath.join(folder, "qrels"), ("score",), "path"):
        grade = row["score"]
        if not isinstance(grade, int | float) or grade != int(grade):
            raise SpecError("path", grade, "an integer score", note=f" (qrels of {folder})")
        ids = _id(row, "query", location), _id(row, "corpus", location)
        yield Judgment(*ids, int(grade), row.get("bounding_boxes") or [])


def read_page_sizes(folder: str, pages: set[str]) -> dict[str, tuple[float, float]]:
    """Returns the width and height of the images of pages, in pixels."""
    sizes: dict[str, tuple[float, float]] = {}
    corpus = posixpath.join(folder, "corpus")
    for location, row in read_table(corpus, ("image",), "path", images=True):
        page = _id(row, "corpus", location)
        if page not in pages:
            continue
        rule, problem = "a page with an image", "has an unreadable image"
        with reading("path", location, rule, TypeError, problem=problem):
            image = Image.open(io.BytesIO(row["image"]["bytes"]))  # reads only the header
            sizes[page] = image.size
    for page in sorted(pages - sizes.keys()):
        raise SpecError("path", page, f"the id of a page of {corpus}", "is judged but has no page")
    return sizes


def _id(row: dict[str, Any], kind: str, location: str) -> str:
    """Returns the id of a query or a page, which has an underscore or a hyphen in its name."""
    value = row.get(f"{kind}_id", row.get(f"{kind}-id"))
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise SpecError("path", value, f"a row with {kind}_id or {kind}-id", note=f" ({location})")
    return str(value)


class Queries(CollectionQueries["Queries.Spec"]):
    """Queries and judgments of a ViDoRe data set, from a snapshot of its repository.

    `path` contains the folders `queries`, `qrels` and `corpus` with Parquet files. Other fields of
    the queries than ids and texts are query categories.

    The pages are indexed with the source `images`, with `path: <path>/corpus` and `id_field:
    corpus_id` or `corpus-id`.

    **Grounding.** In version 3, annotators marked the parts of a page that answer the query
    (`bounding_boxes`). `grounding: benchmark` measures the relevance map of the query on each
    relevant page with boxes. The region is the union of the boxes of all annotators.
    """

    class Spec(QueriesSpec):
        """Options of the ViDoRe benchmark."""

        name: Literal["vidore"] = "vidore"
        path: Uri
        """Folder of the data set."""
        language: str | None = None
        """Language of the queries, such as english, or null for all."""
        box_size: tuple[float, float] | None = None
        """Width and height of a page in the unit of the boxes, or null for pixels of its image."""
        measure: str = "nDCG@10"
        """Main metric: nDCG@10 for version 3, nDCG@5 for versions 1 and 2."""
        instruction: str | None = None
        """Instruction in the query template of encoders that have one, or null."""

    @functools.cached_property
    def _rows(self) -> dict[str, dict[str, Any]]:
        return read_queries(self.spec.path, self.spec.language)

    @functools.cached_property
    def _judgments(self) -> list[Judgment]:
        return [j for j in read_judgments(self.spec.path) if j.query_id in self._rows]

    def queries(self) -> dict[str, str]:
        """Returns the queries of the language."""
        return {query_id: row["query"] for query_id, row in self._rows.items()}

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns the grades of the pages."""
        qrels: dict[str, dict[str, int]] = {}
        for query_id, page, grade, _ in self._judgments:
            qrels.setdefault(query_id, {})[page] = grade
        return qrels

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Groups the queries by their other fields."""
        fields: dict[str, dict[str, Any]] = {}
        for query_id, row in self._rows.items():
            for name in row.keys() - {"query", "query_id", "query-id", "answer"}:
                fields.setdefault(name, {})[query_id] = row[name]
        return group_categories(fields, query_ids)

    def options(self) -> dict[str, Any]:
        """Returns the main metric and the instruction."""
        return {"measure": self.spec.measure, "instruction": self.spec.instruction}

    def phrases(self) -> list[Phrase]:
        """Loads the queries with the boxes of their relevant pages."""
        path, size = self.spec.path, self.spec.box_size
        with within("benchmark"):
            found = [j for j in self._judgments if j.boxes and j.grade > 0]
            if not found:
                rule = "a data set whose qrels have bounding_boxes, such as version 3"
                raise SpecError("path", path, rule, "has no relevant page with boxes")
            pages = {judgment.page for judgment in found}
            sizes = dict.fromkeys(pages, size) if size else read_page_sizes(path, pages)
            return [
                Phrase(page, self._rows[query_id]["query"], self._boxes(boxes, page, sizes[page]))
                for query_id, page, _, boxes in found
            ]

    def _boxes(
        self, boxes: list[dict[str, Any]], page: str, size: tuple[float, float]
    ) -> list[Box]:
        """Returns the boxes of a page as fractions of its size."""
        location = f"page {page} of {self.spec.path}"
        found: list[Box] = []
        for box in boxes:
            corners = [box[name] for name in ("x1", "y1", "x2", "y2")]
            if corners[0] >= corners[2] or corners[1] >= corners[3]:
                rule = "bounding_boxes with x1 < x2 and y1 < y2"
                raise SpecError("path", corners, rule, note=f" ({location})")
            found.append(normalise_box(corners, *size, "box_size", location).tolist())
        return found

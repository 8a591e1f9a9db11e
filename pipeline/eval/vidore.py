"""The benchmark ViDoRe, whose version 3 contains bounding boxes."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Iterator
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError

from pipeline.config import SpecError, Uri, within
from pipeline.eval import Benchmark, JudgedQueries, Phrase
from pipeline.eval.boxes import normalise_box
from pipeline.eval.datasets import DatasetSpec, judged_queries
from pipeline.eval.topics import group_categories
from pipeline.schema import is_blank
from pipeline.sources.annotations import read_table


class Vidore(Benchmark["Vidore.Spec"]):
    """Queries and judgments of a ViDoRe data set, from a snapshot of its repository.

    `path` contains the folders `queries`, `qrels` and `corpus` with Parquet files. The columns of
    ids are `query-id` and `corpus-id` (version 2 and the BEIR configurations of version 1) or
    `query_id` and `corpus_id` (version 3). Other fields of the queries are query categories.

    The pages are indexed with the source `images`, with `path: <path>/corpus` and `id_field:
    corpus_id` or `corpus-id`.

    **Grounding.** In version 3, annotators marked the parts of a page that answer the query
    (`bounding_boxes`). `grounding: benchmark` measures the relevance map of the query on each
    relevant page with boxes. The region is the union of the boxes of all annotators.
    """

    class Spec(DatasetSpec):
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

    def load(self) -> JudgedQueries:
        """Loads the queries of the language and their judgments."""
        with within("benchmark"):
            rows = self._queries()
            qrels: dict[str, dict[str, int]] = {}
            for query_id, page, row in self._judgments():
                if query_id in rows:
                    qrels.setdefault(query_id, {})[page] = _grade(row, self.spec.path)
        fields: dict[str, dict[str, Any]] = {}
        for query_id, row in rows.items():
            if query_id in qrels:
                for name, value in row.items():
                    if name not in ("query", "query_id", "query-id", "answer"):
                        fields.setdefault(name, {})[query_id] = value
        return judged_queries(
            self.spec,
            self.spec.path,
            {query_id: row["query"] for query_id, row in rows.items()},
            qrels,
            categories=group_categories(fields, set(qrels)),
            measure=self.spec.measure,
            instruction=self.spec.instruction,
        )

    def phrases(self) -> list[Phrase]:
        """Loads the queries with the boxes of their relevant pages."""
        with within("benchmark"):
            rows = self._queries()
            found: list[tuple[str, str, list[dict[str, Any]]]] = []
            for query_id, page, row in self._judgments():
                boxes = row.get("bounding_boxes")
                if query_id in rows and boxes and _grade(row, self.spec.path) > 0:
                    found.append((rows[query_id]["query"], page, boxes))
            if not found:
                rule = "a data set whose qrels have bounding_boxes, such as version 3"
                raise SpecError("path", self.spec.path, rule, "has no relevant page with boxes")
            sizes = self._page_sizes({page for _, page, _ in found})
            return [
                Phrase(page, text, [self._box(box, page, sizes[page]) for box in boxes])
                for text, page, boxes in found
            ]

    def _box(self, box: dict[str, Any], page: str, size: tuple[float, float]) -> list[float]:
        location = f"page {page} of {self.spec.path}"
        corners = [box[name] for name in ("x1", "y1", "x2", "y2")]
        if corners[0] >= corners[2] or corners[1] >= corners[3]:
            rule = "bounding_boxes with x1 < x2 and y1 < y2"
            raise SpecError("path", corners, rule, note=f" ({location})")
        return normalise_box(corners, *size, "box_size", location).tolist()

    def _page_sizes(self, pages: set[str]) -> dict[str, tuple[float, float]]:
        """Returns the width and height of pages in the unit of the boxes."""
        if self.spec.box_size is not None:
            return dict.fromkeys(pages, self.spec.box_size)
        sizes: dict[str, tuple[float, float]] = {}
        folder = posixpath.join(self.spec.path, "corpus")
        for location, row in read_table(folder, ("image",), "path", images=True):
            page = _id(row, "corpus", location)
            if page not in pages:
                continue
            try:  # reads only the header
                with Image.open(io.BytesIO(row["image"]["bytes"])) as image:
                    sizes[page] = image.size
            except (UnidentifiedImageError, OSError, TypeError) as error:
                problem = f"has an unreadable image ({error})"
                raise SpecError("path", location, "a page with an image", problem) from None
        for page in sorted(pages - sizes.keys()):
            rule = f"the id of a page of {folder}"
            raise SpecError("path", page, rule, "is judged but has no page")
        return sizes

    def _queries(self) -> dict[str, dict[str, Any]]:
        """Reads the rows of the queries of the language by id."""
        queries: dict[str, dict[str, Any]] = {}
        languages: set[str] = set()
        for location, row in read_table(posixpath.join(self.spec.path, "queries"), (), "path"):
            query_id, text = _id(row, "query", location), row.get("query")
            if not isinstance(text, str) or is_blank(text):
                raise SpecError("path", text, "a query with a text", note=f" ({location})")
            languages.add(str(row.get("language")))
            if self.spec.language is None or row.get("language") == self.spec.language:
                if query_id in queries:
                    raise SpecError("path", query_id, "a unique query id", "occurs twice")
                queries[query_id] = row
        if not queries:
            raise SpecError.unknown_name("language", self.spec.language or "", sorted(languages))
        return queries

    def _judgments(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yields the query id, the page id and the row of each judgment."""
        for location, row in read_table(
            posixpath.join(self.spec.path, "qrels"), ("score",), "path"
        ):
            yield _id(row, "query", location), _id(row, "corpus", location), row


def _id(row: dict[str, Any], kind: str, location: str) -> str:
    """Returns the id of a query or a page, which has an underscore or a hyphen in its name."""
    value = row.get(f"{kind}_id", row.get(f"{kind}-id"))
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise SpecError("path", value, f"a row with {kind}_id or {kind}-id", note=f" ({location})")
    return str(value)


def _grade(row: dict[str, Any], path: str) -> int:
    value = row["score"]
    if not isinstance(value, int | float) or value != int(value):
        raise SpecError("path", value, "an integer score", note=f" (qrels of {path})")
    return int(value)

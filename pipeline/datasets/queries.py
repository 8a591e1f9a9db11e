"""Base of the benchmarks of published collections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from pipeline.config import ComponentSpec, ComponentSpecT, SpecError, reading, within
from pipeline.datasets.files import check_number
from pipeline.eval import Benchmark, JudgedQueries
from pipeline.paths import open_file

#: Maximum size of a query image, in bytes.
MAX_IMAGE_BYTES = 64 << 20


class QueriesSpec(ComponentSpec):
    """Base of the specs of benchmarks that check the number of their queries."""

    num_queries: PositiveInt | None = None
    """Expected number of judged queries; another number is an error. Null to accept any."""


class CollectionQueries(Benchmark[ComponentSpecT]):
    """Base class of the benchmarks of published collections."""

    location_field: ClassVar[str] = "path"
    """The field of the spec that errors about the queries name."""
    measure: ClassVar[str | None] = None
    """Main metric, by its ir-measures name, or None for the default."""

    @abstractmethod
    def queries(self) -> Mapping[str, str]:
        """Returns the texts of all queries by id. The text of an image is empty."""

    @abstractmethod
    def judgments(self) -> Mapping[str, dict[str, int]]:
        """Returns grades by document id, by query id. Some queries may be missing."""

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Returns the ids of the judged queries of each category, by field."""
        return {}

    def options(self) -> dict[str, Any]:
        """Returns other fields of `JudgedQueries`, such as `pools`."""
        return {}

    def load(self) -> JudgedQueries:
        """Loads the judged queries."""
        with within("benchmark"):
            texts, qrels = self.queries(), self.judgments()
            queries = {query_id: text for query_id, text in texts.items() if query_id in qrels}
            if not queries:
                value = getattr(self.spec, self.location_field)
                rule = "a benchmark with a judged query"
                raise SpecError(self.location_field, value, rule, "has no judged queries")
            if isinstance(self.spec, QueriesSpec):
                expected = self.spec.num_queries
                check_number("num_queries", expected, len(queries), "judged queries")
            return JudgedQueries(
                queries,
                {query_id: dict(qrels[query_id]) for query_id in queries},
                num_unjudged=len(texts) - len(queries),
                num_without_text=len(qrels.keys() - texts.keys()),
                categories=self.categories(set(queries)),
                **{"measure": self.measure, **self.options()},
            )


class ImageFiles(Mapping[str, bytes]):
    """Image files by query id. Each is read when it is needed."""

    def __init__(self, uris: Mapping[str, str]):
        self._uris = uris

    def __getitem__(self, query_id: str) -> bytes:
        uri = self._uris[query_id]
        rule = f"a benchmark with all query images, each of at most {MAX_IMAGE_BYTES:,} bytes"
        # KeyError: not a member of the archive
        with reading("benchmark", uri, rule, KeyError), open_file(uri) as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            raise SpecError("benchmark", uri, rule, "is larger")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._uris)

    def __len__(self) -> int:
        return len(self._uris)

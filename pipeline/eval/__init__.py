"""Evaluation of indexes with benchmarks, metrics, significance tests and diagnostics."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

import numpy as np

from pipeline.config import ComponentSpec, ComponentSpecT, SpecError
from pipeline.eval.moments import Moments, Span
from pipeline.schema import Composed, compose

if TYPE_CHECKING:
    from pipeline.index.reader import IndexReader

Box = Sequence[float]


class Phrase(NamedTuple):
    """Phrase in an item, and its boxes x0 y0 x1 y1 in [0, 1]."""

    item_id: str
    text: str
    boxes: list[Box]


@dataclass(frozen=True)
class JudgedQueries:
    """Queries of a benchmark with their relevance judgments.

    Attributes:
        queries: Text by query id, in the order of the benchmark. Each query has a judgment. The
            texts are empty if the benchmark contains only vectors.
        qrels: Grades by document id, by query id. Grade 0 means judged not relevant. Documents are
            items or parents, as the spec says.
        num_without_text: Number of judged query ids left out because they have no text or vectors.
        categories: Query ids of each category, by field of the queries, such as `language`.
        vectors: Token vectors (M_i, D) by query id, or None to encode the texts.
        media: Files of the queries by query id, by part: "image", "audio" and "video". A query may
            have several parts and a text. See `datasets.queries.ImageFiles` for files that are read
            when they are needed.
        pools: Candidate pools: ids of the documents that are ranked, by query id, or None to rank
            all documents. See `pools`.
        instruction: Instruction of the task, for encoders whose query template contains one.
        measure: Main metric, by its ir-measures name, or None for the default.
        ignore_query_id: Whether the document with the id of a query is the query itself and is
            removed from its ranking. A document that is judged relevant is not removed.
        skip_first: Whether the first document of each ranking is removed. It is the query itself.
        moments: Relevant time ranges, from which `located` derives judgments of items, or None.
    """

    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    num_unjudged: int
    num_without_text: int
    categories: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] | None = None
    media: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    pools: Mapping[str, Sequence[str]] | None = None
    instruction: str | None = None
    measure: str | None = None
    ignore_query_id: bool = False
    skip_first: bool = False
    moments: Moments | None = None

    @property
    def has_texts(self) -> bool:
        """True if the queries have texts."""
        return any(self.queries.values())

    @property
    def spans(self) -> Mapping[str, Span]:
        """Time ranges of the items by id, for queries with moments."""
        return {} if self.moments is None else self.moments.spans

    def inputs(self, query_ids: Iterable[str]) -> Iterator[str | bytes | Composed]:
        """Yields the inputs of the query encoder for some of the queries. Files are read."""
        for query_id in query_ids:
            files = {
                part: found[query_id] for part, found in self.media.items() if query_id in found
            }
            yield compose(self.queries[query_id], files)

    @property
    def num_removed(self) -> int:
        """Maximum number of documents that `remove_queries` removes from a ranking."""
        return self.ignore_query_id + self.skip_first

    def is_query(self, query_id: str, document_id: str) -> bool:
        """Checks by its id whether a document is the query itself."""
        is_same = self.ignore_query_id and document_id == query_id
        return is_same and self.qrels.get(query_id, {}).get(document_id, 0) <= 0

    def remove_queries(
        self, query_id: str, scores: Mapping[str, float], k: int | None = None
    ) -> dict[str, float]:
        """Returns the k best documents other than the query itself, of `k + num_removed` scores."""
        documents = list(scores)[self.skip_first :]
        others = [d for d in documents if not self.is_query(query_id, d)]
        return {d: scores[d] for d in others[:k]}

    def located(self, indexes: Iterable[IndexReader], filter: str | None) -> JudgedQueries:
        """Returns the queries with judgments of the items of indexes, if they have moments."""
        if self.moments is None:
            return self
        moments = self.moments.locate(indexes, filter)
        qrels, pools = moments.qrels(), moments.pools()
        return replace(
            self,
            moments=moments,
            qrels={query_id: qrels[query_id] for query_id in self.queries},
            pools={q: pools[q] for q in self.queries} if moments.are_in_video else None,
        )

    def options(self) -> dict[str, Any]:
        """Returns everything besides texts and judgments that affects rankings, for cache keys."""
        options: dict[str, Any] = {
            "pools": self.pools,
            "instruction": self.instruction,
            "ignore_identical_ids": self.ignore_query_id,
            "skip_first_result": self.skip_first,
            "moments": self.moments and self.moments.ranges,
        }
        for part, files in self.media.items():
            hashes = {q: hashlib.blake2b(data).hexdigest() for q, data in files.items()}
            options[f"{part}s"] = hashes
        return {name: value for name, value in options.items() if value}


@dataclass(frozen=True)
class BenchmarkRow:
    """Rankings of one row of an evaluation.

    Attributes:
        rankings: Scores by document id, best first, by query id.
        spans: Time ranges of the items by id, for queries with moments.
    """

    name: str
    fingerprint: str
    rankings: Mapping[str, Mapping[str, float]]
    k: int
    seconds: float
    spans: Mapping[str, Span] = field(default_factory=dict)


class Benchmark(ABC, Generic[ComponentSpecT]):
    """Base class of benchmarks. Subclasses have a nested `Spec` whose `name` is a literal."""

    Spec: ClassVar[type[ComponentSpec]]

    def __init__(self, spec: ComponentSpecT):
        self.spec = spec

    @abstractmethod
    def load(self) -> JudgedQueries:
        """Loads the queries and judgments."""

    def phrases(self) -> list[Phrase]:
        """Loads phrases with bounding boxes, which measure grounding."""
        rule = "a file of phrases or a mapping to generate them"
        problem = f"needs boxes, which the benchmark {self.spec.name} does not contain"
        raise SpecError("grounding", "benchmark", rule, problem)

    def write_result(self, folder: str, row: BenchmarkRow) -> str | None:
        """Writes a row in the official format of the benchmark, if any, and returns the path."""
        return None

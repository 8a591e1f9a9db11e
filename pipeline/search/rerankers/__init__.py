"""Rerankers, which score a query together with each of the best items of a search.

A search applies one reranker, or several in a row: each reorders the best items of the one before.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from pydantic import Field

from pipeline.config import ComponentSpec, SpecError, within
from pipeline.encoders import Encoder
from pipeline.index.reader import IndexReader
from pipeline.registry import RERANKERS
from pipeline.schema import DEFAULT_RERANK_DEPTH
from pipeline.search.query import AnyQueries, readable_queries
from pipeline.search.rerankers.contents import NO_TEXT
from pipeline.search.results import RerankScore
from pipeline.search.score import Ranking

#: Number of queries whose candidates are scored per batch.
QUERY_BATCH = 64
#: Fields of all rerankers that do not affect the score of a pair.
OPTIONS = ("top", "add_first_stage", "label")
#: Interval between lines of progress, in seconds.
PROGRESS_SECONDS = 10.0


class RerankerSpec(ComponentSpec):
    """Base of the specs of rerankers."""

    top: int = Field(DEFAULT_RERANK_DEPTH, ge=1, le=10_000)
    """Number of items that are reranked, the best of the first stage or of the reranker before.
    Items below keep their ranks."""
    add_first_stage: bool = False
    """Add the score of the first stage, or of the reranker before."""
    label: str = Field("", pattern=r"^[\w.-]*$")
    """Name of the reranker in requests and of its row in tables. If empty, it is `name` in
    requests, and a generated one such as edje_10 in tables."""

    @property
    def title(self) -> str:
        """Name in requests."""
        return self.label or self.name


RerankerSpecT = TypeVar("RerankerSpecT", bound=RerankerSpec)


class Source(Protocol):
    """Index whose items are reranked, and its query encoders, such as a `Searcher`."""

    index: IndexReader

    def encoder(self, representation: str) -> Encoder:
        """Returns the query encoder of a representation."""


class Sources(ABC):
    """Several indexes whose items are reranked together, such as those of a federation."""

    @abstractmethod
    def score(
        self,
        reranker: Reranker[Any],
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Scores candidates, each by its content in one of the indexes. See `Reranker.score`."""


@dataclass
class Usage:
    """Cost of reranking so far.

    Attributes:
        pairs: Number of pairs of a query and an item that were scored.
        unread: Number of items that could not be read and kept their ranks.
        requests: Number of HTTP requests.
    """

    queries: int = 0
    pairs: int = 0
    unread: int = 0
    requests: int = 0
    seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        names = [field.name for field in fields(Usage)]
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Reranker(ABC, Generic[RerankerSpecT]):
    """Base class of rerankers.

    Attributes:
        query_kinds: Types of the queries that are supported.
        columns: Columns of the index that determine the scores.
        fingerprint: Hash of everything else that determines the scores.
        num_parameters: Number of parameters that score a pair, or None if it is unknown.
        usage: Cost of the calls of `rerank`.
        report: Function that reports a line of progress, if any.
    """

    query_kinds: ClassVar[tuple[type, ...]] = (str,)
    columns: ClassVar[tuple[str, ...]] = ("item_id", "revision", "text", "caption")

    fingerprint: str
    num_parameters: int | None = None
    report: Callable[[str], None] | None = None

    def __init__(self, spec: RerankerSpecT):
        self.spec = spec
        self.usage = Usage()

    @classmethod
    def check_spec(cls, spec: Any) -> None:
        """Checks that the model exists and is of the right type. Weights are not loaded.

        Raises:
            SpecError: The model is missing or of another type.
        """

    def with_options(self, **changes: Any) -> Self:
        """Returns a reranker with another `top`, `add_first_stage` or `label`, and this model."""
        other = copy.copy(self)
        other.spec = self.spec.model_copy(update=changes)
        other.usage = Usage()
        return other

    def check(self, index: IndexReader, queries: AnyQueries) -> Sequence[str | bytes]:
        """Checks that the reranker supports the queries and the index, and returns the queries.

        Raises:
            SpecError: A query is not of a supported type, or the index lacks what is read.
        """
        readable = readable_queries(queries, self.spec.title)
        if any(not isinstance(query, self.query_kinds) for query in readable):
            rule = f"a text to be reranked by {self.spec.title}"
            raise SpecError("query", "an image", rule)
        return readable

    @abstractmethod
    def score(
        self,
        source: Source,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Scores candidates. Those that cannot be read are omitted, or have a `problem`.

        Args:
            source: Index of the items, with its query encoders.
            queries: Either texts or images.
            candidates: Item ids per query.

        Returns:
            Scores by item id, per query.

        Raises:
            SpecError: A query is too long, or the model is not available.
        """

    def missing(self, query: str | bytes) -> str:
        """Returns the reason why candidates that `score` omits cannot be read."""
        return NO_TEXT

    def rerank(
        self,
        source: Source | Sources,
        queries: Sequence[str | bytes],
        rankings: Sequence[Ranking],
        k: int,
    ) -> list[Ranking]:
        """Reranks the results of each query and returns the k best items.

        Args:
            source: Index of the items, with its query encoders, or several.
            queries: Either texts or images.
            rankings: Rankings of the stage before with at least `top` items each, if the index has
                that many.
            k: Maximum number of items per query.
        """
        start = reported = time.perf_counter()
        top = self.spec.top
        candidates = [ranking.item_ids[:top] for ranking in rankings]
        scores: list[dict[str, RerankScore]] = []
        for first in range(0, len(queries), QUERY_BATCH):
            batch = slice(first, first + QUERY_BATCH)
            if isinstance(source, Sources):
                scores += source.score(self, queries[batch], candidates[batch])
            else:
                scores += self.score(source, queries[batch], candidates[batch])
            is_last, now = len(scores) == len(queries), time.perf_counter()
            if self.report is not None and not is_last and now - reported > PROGRESS_SECONDS:
                reported = now
                rate = f"{len(scores) / (now - start):,.1f} queries/s"
                progress = f"{len(scores):,} of {len(queries):,} queries, {rate}"
                self.report(f"{self.spec.title}: {progress}")
        reranked = [
            reorder(self.missing(query), ranking, found, self.spec, k)
            for query, ranking, found in zip(queries, rankings, scores, strict=True)
        ]
        pairs = sum(score.score is not None for found in scores for score in found.values())
        self.usage.queries += len(queries)
        self.usage.pairs += pairs
        self.usage.unread += sum(map(len, candidates)) - pairs
        self.usage.seconds += time.perf_counter() - start
        return reranked


#: A reranker, its spec, or a mapping with the fields of its spec.
AnyReranker = Reranker[Any] | RerankerSpec | Mapping[str, Any]


def load_rerankers(
    values: AnyReranker | Sequence[AnyReranker],
    models: MutableMapping[RerankerSpec, Reranker[Any]] | None = None,
) -> list[Reranker[Any]]:
    """Loads the rerankers of a search: one, or several that are applied in the given order.

    Args:
        models: Rerankers that were loaded before, to which new ones are added. Rerankers that
            differ only in `top`, `add_first_stage` and `label` share one model.

    Raises:
        SpecError: A field is invalid, or a model cannot be loaded.
    """
    models = {} if models is None else models
    several = isinstance(values, list | tuple)
    listed: Any = values if several else [values]
    rerankers = []
    for number, value in enumerate(listed):
        with within(f"rerank[{number}]" if several else "rerank"):
            if isinstance(value, Reranker):
                rerankers.append(value)
                continue
            spec: Any = RERANKERS.resolve(value)
            options = {name: getattr(spec, name) for name in OPTIONS}
            key = spec.model_copy(update=dict.fromkeys(OPTIONS))
            if key not in models:
                models[key] = RERANKERS.build(spec)
            rerankers.append(models[key].with_options(**options))
    return rerankers


def rerank_in_turn(
    rerankers: Sequence[Reranker[Any]],
    source: Source | Sources,
    queries: Sequence[str | bytes],
    rankings: Sequence[Ranking],
    k: int,
) -> list[Ranking]:
    """Applies rerankers one after another and returns the k best items of each query."""
    reranked = list(rankings)
    for number, reranker in enumerate(rerankers):
        depth = max([k, *(later.spec.top for later in rerankers[number + 1 :])])
        reranked = reranker.rerank(source, queries, reranked, depth)
    return [ranking.take(range(min(k, len(ranking.item_ids)))) for ranking in reranked]


def usage_fields(rerankers: Sequence[Reranker[Any]]) -> dict[str, float]:
    """Returns the usage of rerankers that were applied in turn, and resets it."""
    total = Usage()
    for reranker in rerankers:
        total += reranker.usage
        reranker.usage = Usage()
    return {name: float(value) for name, value in asdict(total).items()}


def reorder(
    problem: str,
    ranking: Ranking,
    found: Mapping[str, RerankScore],
    spec: RerankerSpec,
    k: int,
) -> Ranking:
    """Returns the k best items of a ranking after reordering the candidates by their new scores.

    Candidates without a score keep their ranks.

    Args:
        problem: Reason of candidates that are missing in `found`.
    """
    scores = list(ranking.scores)
    records = list(ranking.rerank or [RerankScore()] * len(scores))
    is_scored = [False] * len(scores)
    for i, (item_id, before) in enumerate(zip(ranking.item_ids, ranking.scores, strict=True)):
        if i < spec.top:
            records[i] = found.get(item_id, RerankScore(problem=problem))
            if (score := records[i].score) is not None:
                scores[i] = score + before if spec.add_first_stage else score
                is_scored[i] = True
    order = list(range(len(scores)))
    slots = [i for i in order if is_scored[i]]
    best = sorted(slots, key=lambda i: -scores[i])  # stable: ties keep their order
    for slot, i in zip(slots, best, strict=True):
        order[slot] = i
    first_stage = ranking.first_stage or ranking.ranks()
    reranked = replace(ranking, scores=scores, first_stage=first_stage, rerank=tuple(records))
    return reranked.take(order[:k])

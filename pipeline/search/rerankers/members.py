"""Hits of a federation as candidates of rerankers, which read them in the indexes of its members.

A hit is read in the index of the member that describes it or, if that lacks what a reranker reads,
of the first other member that has it. There, it is the item that was joined or, if the member has
not found it, the item of the same id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.search.federation import Joined
from pipeline.search.query import AnyQueries, readable_queries
from pipeline.search.rerankers import Reranker, Source, Sources
from pipeline.search.rerankers.contents import has_content
from pipeline.search.results import RerankScore
from pipeline.search.score import Ranking

#: Scores of candidates, per query.
Scores = list[dict[str, RerankScore]]
#: Item ids by candidate, per query.
ItemIds = list[dict[str, str]]
RULE = "a reranker of content that a member has"


class MemberError(Exception):
    """Error of a member whose index cannot be read.

    Attributes:
        name: Name of the member.
        error: Error that names the field `index`.
    """

    def __init__(self, name: str, error: SpecError):
        super().__init__(name)
        self.name, self.error = name, error


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except SpecError as error:
        if error.field != "index":
            raise
        raise MemberError(name, error) from None


class MemberHits(Sources):
    """Joined hits of queries as candidates, whose ids are unique among all queries.

    Args:
        indexes: Indexes of the members, in their order.
        joined: Hits of each query.
        sources: Indexes with their query encoders, for `score`.
    """

    def __init__(
        self,
        indexes: Mapping[str, IndexReader],
        joined: Sequence[Sequence[Joined]],
        sources: Mapping[str, Source] | None = None,
    ):
        self._indexes, self._joined, self._sources = indexes, joined, sources or {}
        self._hits = {
            f"{query}/{position}": hit
            for query, hits in enumerate(joined)
            for position, hit in enumerate(hits)
        }

    def rankings(self) -> list[Ranking]:
        """Returns the candidates of each query as a ranking, whose rows are their positions."""
        return [
            Ranking(
                [f"{query}/{position}" for position in range(len(hits))],
                [hit.shown.parent_id for hit in hits],
                [hit.score for hit in hits],
                np.arange(len(hits)),
            )
            for query, hits in enumerate(self._joined)
        ]

    def reranked(self, rankings: Sequence[Ranking]) -> list[list[Joined]]:
        """Returns the hits of reranked candidates."""
        return [
            [
                self._hits[candidate]._replace(
                    score=ranking.scores[i],
                    first_stage=ranking.first_stage[i] if ranking.first_stage else None,
                    rerank=ranking.rerank[i] if ranking.rerank else None,
                )
                for i, candidate in enumerate(ranking.item_ids)
            ]
            for ranking in rankings
        ]

    def turns(
        self, candidates: Sequence[Sequence[str]], scores: Scores, names: Collection[str]
    ) -> Iterator[dict[str, ItemIds]]:
        """Yields what is read at the same time: the item ids of the candidates by member.

        Args:
            candidates: Ids per query.
            scores: Scores so far, to which the caller adds those of each turn by `add_scores`.
                Candidates with a score are not read again.
            names: Members whose indexes can be read.
        """
        places = self._places([i for ids in candidates for i in ids], names)
        for turn in range(len(names)):
            by_member: dict[str, ItemIds] = {}
            for query, ids in enumerate(candidates):
                for candidate in ids:
                    record = scores[query].get(candidate)
                    if turn < len(places[candidate]) and (record is None or record.score is None):
                        name, item_id = places[candidate][turn]
                        queries = by_member.setdefault(name, [{} for _ in candidates])
                        queries[query][candidate] = item_id
            if by_member:
                yield by_member

    def _places(
        self, candidates: Sequence[str], names: Collection[str]
    ) -> dict[str, list[tuple[str, str]]]:
        """Returns the members that have a candidate, with its item id, in the order of reading."""
        wanted = sorted({self._hits[candidate].shown.item_id for candidate in candidates})
        places: dict[str, list[tuple[str, str]]] = {candidate: [] for candidate in candidates}
        for name, index in self._indexes.items():
            if name not in names:
                continue
            with _reading(name):
                stored = index.items(wanted, ["item_id"])["item_id"] if wanted else pa.array([])
            known = set(stored.to_pylist())
            for candidate, read in places.items():
                hit = self._hits[candidate]
                item_id = hit.found[name].item_id if name in hit.found else hit.shown.item_id
                if name in hit.found or item_id in known:
                    position = 0 if name == hit.shown.member else len(read)
                    read.insert(position, (name, item_id))
        return places

    def score(
        self,
        reranker: Reranker[Any],
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> Scores:
        """Scores candidates by the content in the indexes of the members.

        Raises:
            SpecError: No member has content that the reranker reads.
            MemberError: The index of a member cannot be read.
        """
        scores: Scores = [{} for _ in queries]
        names = readable_members(reranker, self._indexes, queries)
        for by_member in self.turns(candidates, scores, names):
            for name, item_ids in by_member.items():
                rows = [row for row, ids in enumerate(item_ids) if ids]
                selected = [list(dict.fromkeys(item_ids[row].values())) for row in rows]
                with _reading(name):
                    found = reranker.score(
                        self._sources[name], [queries[row] for row in rows], selected
                    )
                add_scores([scores[row] for row in rows], [item_ids[row] for row in rows], found)
        if queries:
            self.check_content(scores, reranker.spec.title, reranker.missing(queries[0]))
        return scores

    def check_content(self, scores: Scores, title: str, problem: str) -> None:
        """Raises `SpecError` if nothing was read because no member has any such content.

        Args:
            title: Name of the reranker.
            problem: Reason why items cannot be read, such as `NO_TEXT`.
        """
        is_read = any(record.score is not None for read in scores for record in read.values())
        indexes = self._indexes.values()
        if not is_read and self._hits and not any(has_content(i, problem) for i in indexes):
            note = f" ({problem.replace('has no', 'no member has a')})"
            raise SpecError("rerank", title, RULE, note=note)


def check_rerankers(
    rerankers: Sequence[Reranker[Any]], indexes: Mapping[str, IndexReader], queries: AnyQueries
) -> Sequence[str | bytes]:
    """Returns the queries, if all rerankers support them and one of the members."""
    readable = readable_queries(queries, rerankers[0].spec.title)
    for reranker in rerankers:
        readable_members(reranker, indexes, readable)
    return readable


def readable_members(
    reranker: Reranker[Any], indexes: Mapping[str, IndexReader], queries: AnyQueries
) -> list[str]:
    """Returns the members that a reranker supports.

    Raises:
        SpecError: It supports none of them, or not the queries.
    """
    errors: dict[str, SpecError] = {}
    for name, index in indexes.items():
        try:
            reranker.check(index, queries)
        except SpecError as error:
            if error.field == "query":
                raise
            errors[name] = error
    if len(errors) == len(indexes):
        notes = "; ".join(f"member {name}: {error}" for name, error in errors.items())
        raise SpecError("rerank", reranker.spec.title, RULE, note=f" ({notes})")
    return [name for name in indexes if name not in errors]


def add_scores(
    scores: Scores, item_ids: ItemIds, found: Sequence[Mapping[str, RerankScore]]
) -> None:
    """Adds the scores of items to those of the candidates. The first problem is kept."""
    for known, ids, read in zip(scores, item_ids, found, strict=True):
        for candidate, item_id in ids.items():
            if item_id in read and (read[item_id].score is not None or candidate not in known):
                known[candidate] = read[item_id]

"""Rankings -> hits: what is stored about the best items, and how they match the query."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index
from pipeline.schema import Hit, Match, Parts, Passage, Place
from pipeline.search.explain import (
    NO_SPAN,
    contributions,
    find_passages,
    input_tokens,
    merge,
    outputs_of,
    place_of,
)
from pipeline.search.query import Queries
from pipeline.search.score import Ranking

#: Hits that are described between two pauses.
SLICE_HITS = 64

#: Returns the vectors (N, D) float32 of the items of a representation at some positions.
ItemVectors = Callable[[str, np.ndarray], list[torch.Tensor]]


def describe_in_slices(
    rankings: Sequence[Ranking],
    queries: Queries,
    index: Index,
    representation: str,
    item_vectors: ItemVectors | None,
) -> Generator[None, None, list[list[Hit]]]:
    """Returns the hits of each query, and yields after each fraction of a second of work.

    Args:
        rankings: Rankings of the queries.
        queries: Queries transformed for the representation.
        index: Index of the ranked items.
        representation: Name of the representation.
        item_vectors: Reads the vectors that `matches` and `passages` compare; None for hits
            without them.
    """
    info = index.representation(representation)
    rows = _stored_rows(rankings, index, info, explain=item_vectors is not None)
    hits: list[list[Hit]] = []
    num_described = 0
    for query, ranking in enumerate(rankings):
        vectors = item_vectors(representation, ranking.rows) if item_vectors else None
        hits.append([])
        for i, item_id in enumerate(ranking.item_ids):
            if num_described and num_described % SLICE_HITS == 0:
                yield
            num_described += 1
            row = rows[item_id]
            text = row.get(info.text_column)
            matches: tuple[Match, ...] = ()
            passages: tuple[Passage, ...] = ()
            if vectors and len(vectors[i]):  # else only its pooled vector was compared
                tokens = _InputTokens.from_row(row, info)
                sim_MN = (queries.tokens[query] @ vectors[i].T).numpy()
                matches = tokens.matches(queries.token_texts[query], sim_MN)
                passages = tokens.passages(queries.token_texts[query], sim_MN, text)
            hit = Hit(
                rank=i + 1,
                score=ranking.scores[i],
                item_id=item_id,
                parent_id=ranking.parent_ids[i],
                title=row.get("title"),
                text=text,
                span=row.get("span"),
                matches=matches,
                passages=passages,
                parts=_parts(ranking, i, len(queries.tokens[query])),
                reranked=ranking.reranked[i] if ranking.reranked else None,
            )
            hits[-1].append(hit)
    return hits


def _stored_rows(
    rankings: Sequence[Ranking], index: Index, info: RepresentationInfo, *, explain: bool
) -> dict[str, dict[str, Any]]:
    """Returns the columns of the ranked items that hits show, or are explained by, by item id."""
    columns = ["title", info.text_column, "span"]
    if explain:
        columns += info.token_columns
    stored = [column for column in columns if column in index.schema.names]
    item_ids = sorted({item_id for ranking in rankings for item_id in ranking.item_ids})
    table = index.items(item_ids, stored) if item_ids else pa.table({"item_id": []})
    return {row["item_id"]: row for row in table.to_pylist()}


def _parts(ranking: Ranking, place: int, num_tokens: int) -> Parts:
    late = None if ranking.late is None else float(ranking.late[place])
    single = None if ranking.single is None else float(ranking.single[place])
    return Parts(late, None if late is None else late / max(num_tokens, 1), single)


@dataclass(frozen=True)
class _InputTokens:
    """The T input tokens of an item: their locations and their assignment to vectors.

    Attributes:
        spans, extents, confidence: Lists of T; None if they are not stored.
        support: Stored assignment of input tokens to vectors, see `explain.input_tokens`; None if
            it is not stored.
        form: Form of the support; "identity" if each input token has its own vector.
    """

    spans: list[Sequence[int]] | None
    extents: list[Sequence[float]] | None
    confidence: list[float] | None
    support: Sequence[int] | None
    form: str

    @classmethod
    def from_row(cls, row: dict[str, Any], info: RepresentationInfo) -> _InputTokens:
        """Reads the input tokens of a stored row."""
        spans, extents, confidence = (
            row.get(info.positions.get(name, "")) for name in ("spans", "extents", "confidence")
        )
        if info.is_uncompressed:
            return cls(spans, extents, confidence, None, "identity")
        support = row.get(info.support_column or "")
        return cls(spans, extents, confidence, support, info.support_form or "")

    def matches(self, query_tokens: Sequence[str], sim_MN: np.ndarray) -> tuple[Match, ...]:
        """Returns the best vector of the item for each query token."""
        best_M, contribution_M = sim_MN.argmax(axis=1).tolist(), contributions(sim_MN).tolist()
        matches = []
        for text, sim_N, best, contribution in zip(
            query_tokens, sim_MN, best_M, contribution_M, strict=True
        ):
            inputs = self._inputs(best)
            spans = merge(self.spans[i] for i in inputs) if self.spans else ()
            places = self._places(inputs)
            matches.append(Match(text, float(sim_N[best]), best, spans, places, contribution))
        return tuple(matches)

    def passages(
        self, query_tokens: Sequence[str], sim_MN: np.ndarray, text: str | None
    ) -> tuple[Passage, ...]:
        """Returns the passages that match best, see `find_passages`."""
        num_tokens = len(self.spans or self.extents or ())
        if not num_tokens:
            return ()
        if self.form == "identity":
            output_T = np.arange(num_tokens)
        elif self.support is not None:
            output_T = outputs_of(self.support, self.form, num_tokens)
        else:
            return ()
        spans = None if self.spans is None else np.array(self.spans)
        extents = None if self.extents is None else np.array(self.extents, float)
        confidence = None if self.confidence is None else np.array(self.confidence, float)
        return find_passages(query_tokens, sim_MN, output_T, spans, extents, text, confidence)

    def _inputs(self, vector: int) -> Sequence[int]:
        """Returns the input tokens that are assigned to a vector, as far as that is stored."""
        if self.form == "identity":
            return [vector]
        return [] if self.support is None else input_tokens(vector, self.support, self.form)

    def _places(self, inputs: Sequence[int]) -> tuple[Place, ...]:
        """Returns the regions and times of input tokens, in the order of the text."""
        if not self.extents:
            return ()
        spans = self.spans or [NO_SPAN] * len(self.extents)
        confidence = self.confidence or [math.nan] * len(self.extents)
        found = (place_of(spans[i], self.extents[i], confidence[i]) for i in inputs)
        places = dict.fromkeys(place for place in found if place)
        return tuple(sorted(places, key=lambda place: place.span))

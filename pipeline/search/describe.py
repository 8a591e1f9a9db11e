"""Converts rankings to hits, with stored fields, matches and passages of the best items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.search.explain import (
    NO_SPAN,
    assigned_vectors,
    contributions,
    find_passages,
    input_tokens,
    merge,
    prefix_assignment,
    token_location,
)
from pipeline.search.pauses import pause
from pipeline.search.query import Queries
from pipeline.search.results import Hit, Location, Match, Passage, ScoreParts
from pipeline.search.score import Ranking
from pipeline.search.stored_items import token_representation, token_vectors

#: Number of hits that are described between pauses.
SLICE_HITS = 64

#: Function that returns the vectors (N, D) float32 of a representation for some items.
ItemVectors = Callable[[str, np.ndarray], list[torch.Tensor]]


def describe(
    rankings: Sequence[Ranking],
    queries: Queries,
    index: IndexReader,
    representation: str,
    item_vectors: ItemVectors | None,
) -> list[list[Hit]]:
    """Builds the hits of each query.

    Args:
        item_vectors: Function that reads the vectors for `matches` and `passages`. If None, both
            are omitted.
    """
    info = index.representation(representation)
    rows = _stored_rows(rankings, index, info, explain=item_vectors is not None)
    hits: list[list[Hit]] = []
    uncompressed = token_representation(index, info)
    num_described, num_tokens = 0, queries.num_tokens
    for query, ranking in enumerate(rankings):
        vectors = item_vectors(info.column, ranking.rows) if item_vectors else None
        hits.append([])
        for i, item_id in enumerate(ranking.item_ids):
            if num_described and num_described % SLICE_HITS == 0:
                pause()
            if vectors and i % SLICE_HITS == 0:
                item_ids = ranking.item_ids[i : i + SLICE_HITS]
                vectors_of_tokens = token_vectors(index, uncompressed, item_ids)
            num_described += 1
            row = rows[item_id]
            text = row.get(info.text_column)
            matches: tuple[Match, ...] | None = None if vectors is None else ()
            passages: tuple[Passage, ...] | None = None if vectors is None else ()
            if vectors and len(vectors[i]):  # otherwise only the pooled vectors were compared
                tokens = _InputTokens.from_row(row, info, vectors[i].numpy())
                sim_MN = (queries.tokens[query] @ vectors[i][: info.max_vectors].T).numpy()
                texts = queries.token_texts[query]
                matches = tokens.matches(texts, sim_MN)
                sim_MT = None
                if item_id in vectors_of_tokens:
                    tokens_TD = torch.from_numpy(vectors_of_tokens[item_id])
                    sim_MT = (queries.tokens[query] @ tokens_TD.T).numpy()
                passages = tokens.passages(texts, sim_MN, text, sim_MT)
            hit = Hit(
                rank=i + 1,
                score=ranking.scores[i],
                item_id=item_id,
                parent_id=ranking.parent_ids[i],
                title=row.get("title"),
                text=text,
                span=row.get("span"),
                modality=row.get("modality"),
                source=row.get("source"),
                representation=representation,
                parts=_parts(ranking, i, num_tokens[query]),
                first_stage=ranking.first_stage[i] if ranking.first_stage else None,
                rerank=ranking.rerank[i] if ranking.rerank else None,
                matches=matches,
                passages=passages,
            )
            hits[-1].append(hit)
    return hits


def _stored_rows(
    rankings: Sequence[Ranking], index: IndexReader, info: RepresentationInfo, *, explain: bool
) -> dict[str, dict[str, Any]]:
    columns = ["source", "modality", "title", info.text_column, "span"]
    if explain:
        columns += info.token_columns
    stored = [column for column in columns if column in index.schema.names]
    item_ids = sorted({item_id for ranking in rankings for item_id in ranking.item_ids})
    table = index.items(item_ids, stored) if item_ids else pa.table({"item_id": []})
    return {row["item_id"]: row for row in table.to_pylist()}


def _parts(ranking: Ranking, i: int, num_tokens: float) -> ScoreParts:
    parts = {name: float(scores[i]) for name, scores in ranking.components().items()}
    if ranking.negative is not None:
        parts["negative"] = float(ranking.negative[i])
    mean = {"maxsim_mean": parts["maxsim"] / num_tokens} if "maxsim" in parts else {}
    return ScoreParts(**parts, **mean)


@dataclass(frozen=True)
class _InputTokens:
    """Locations of the T input tokens of an item and their vectors; None if not stored."""

    spans: list[Sequence[int]] | None
    extents: list[Sequence[float]] | None
    confidence: list[float] | None
    assignment: Sequence[int] | None
    form: str

    @classmethod
    def from_row(
        cls, row: dict[str, Any], info: RepresentationInfo, vectors_ND: np.ndarray
    ) -> _InputTokens:
        """Creates the input tokens of a stored row. The vectors are all those of its column."""
        spans, extents, confidence = (
            row.get(info.positions.get(name, "")) for name in ("spans", "extents", "confidence")
        )
        if info.is_uncompressed:
            return cls(spans, extents, confidence, None, "identity")
        assignment, form = row.get(info.assignment_column or ""), info.assignment_form or ""
        if assignment is not None:
            assignment = prefix_assignment(assignment, form, vectors_ND, info.max_vectors)
        return cls(spans, extents, confidence, assignment, form)

    def matches(self, query_tokens: Sequence[str], sim_MN: np.ndarray) -> tuple[Match, ...]:
        best_M = sim_MN.argmax(axis=1).tolist()
        contribution_M = contributions(sim_MN).tolist()
        matches = []
        for text, sim_N, best, contribution in zip(
            query_tokens, sim_MN, best_M, contribution_M, strict=True
        ):
            inputs = self._inputs(best)
            match = Match(
                query_token=text,
                similarity=float(sim_N[best]),
                contribution=contribution,
                document_token=best,
                spans=merge(self.spans[i] for i in inputs) if self.spans else (),
                locations=self._locations(inputs),
            )
            matches.append(match)
        return tuple(matches)

    def passages(
        self,
        query_tokens: Sequence[str],
        sim_MN: np.ndarray,
        text: str | None,
        sim_MT: np.ndarray | None = None,
    ) -> tuple[Passage, ...]:
        """Finds the passages that match the query best, see `find_passages`."""
        num_tokens = len(self.spans or self.extents or ())
        if not num_tokens:
            return ()
        if sim_MT is not None and sim_MT.shape[1] == num_tokens:
            sim_MN, output_T = sim_MT, np.arange(num_tokens)
        elif self.form == "identity":
            output_T = np.arange(num_tokens)
        elif self.assignment is not None:
            output_T = assigned_vectors(self.assignment, self.form, num_tokens)
        else:
            return ()
        spans = None if self.spans is None else np.array(self.spans)
        extents = None if self.extents is None else np.array(self.extents, float)
        confidence = None if self.confidence is None else np.array(self.confidence, float)
        return find_passages(query_tokens, sim_MN, output_T, spans, extents, text, confidence)

    def _inputs(self, vector: int) -> Sequence[int]:
        if self.form == "identity":
            return [vector]
        return [] if self.assignment is None else input_tokens(vector, self.assignment, self.form)

    def _locations(self, inputs: Sequence[int]) -> tuple[Location, ...]:
        if not self.extents:
            return ()
        spans = self.spans or [NO_SPAN] * len(self.extents)
        confidence = self.confidence or [math.nan] * len(self.extents)
        locations = (token_location(spans[i], self.extents[i], confidence[i]) for i in inputs)
        distinct = dict.fromkeys(location for location in locations if location)
        return tuple(sorted(distinct, key=lambda location: location.span))

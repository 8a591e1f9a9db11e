"""Diagnoses the representations of an index on judged queries, each in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from pipeline.codecs import Codec
from pipeline.encoders import EncodedQueries
from pipeline.eval import JudgedQueries
from pipeline.eval.diagnostics import (
    Diagnosis,
    Matches,
    coefficient_of_variation,
    gini,
    inter_token_similarity,
    match_pairs,
    matching_strength,
    profile,
    used_vectors,
)
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index
from pipeline.registry import CODECS
from pipeline.search.searcher import Searcher

#: Codecs of full tokens that are an oracle before others, the first before all: the default, so
#: that what was diagnosed stays when a more exact column is added.
BEST = ("float16", "float32", "int8")


def full_tokens_of(index: Index, name: str) -> str | None:
    """The representation that holds every token of what this one is made of; None without one.

    And none for vectors that queries are transformed for, or whose codec keeps no scores, such as
    bits: their scores are no share of a cosine.
    """
    info = index.representation(name)
    if info.encoder.dim != info.dim or not _codec(info).keeps_scores:
        return None
    same = [
        (BEST.index(codec) if (codec := its.codec["name"]) in BEST else len(BEST), other)
        for other, its in index.representations().items()
        if its.is_uncompressed
        and (its.encoder.fingerprint, its.field) == (info.encoder.fingerprint, info.field)
        and _codec(its).keeps_scores
    ]
    return min(same, key=lambda entry: entry[0], default=(0, None))[1]


def _codec(info: RepresentationInfo) -> type[Codec]:
    return CODECS.load(info.codec["name"])


class Diagnoser:
    """Diagnoses one representation after the other, with what they share computed once.

    A judged parent is represented by one item, the best of its items for the query under the full
    tokens, so that every representation of an encoder is held against the same pairs; without full
    tokens it is the best under the representation itself.

    Args:
        queries_of: the judged queries as vectors, for a representation.
    """

    def __init__(
        self,
        searcher: Searcher,
        judged: JudgedQueries,
        by: Literal["parent", "item"],
        filter: str | None,
        queries_of: Callable[[str], EncodedQueries | list[np.ndarray]],
    ):
        self._searcher, self._judged, self._by, self._filter = searcher, judged, by, filter
        self._queries_of = queries_of
        self._chosen: dict[str, list[np.ndarray]] = {}
        self._whole: dict[str, list[np.ndarray]] = {}
        self._rows, self._relevant = self._items()

    def diagnose(self, name: str) -> Diagnosis:
        """Everything that can be said of one representation."""
        full = full_tokens_of(self._searcher.index, name)
        chosen = self._pairs(full or name)
        packed, queries = self._searcher.packed(name), self._queries(name)
        there = [rows[packed.lengths[rows].numpy() > 0] for rows in chosen]
        matches = match_pairs(queries, packed, there)
        used_T = used_vectors(queries, packed, self._rows)
        items = np.unique(np.concatenate([np.empty(0, np.int64), *there]))
        lengths = packed.lengths[items].numpy()
        strength = matching_strength(matches, int(lengths.max(initial=0)))
        likeness = inter_token_similarity(packed, self._rows)
        num_vectors = int(packed.lengths[self._rows].sum())
        return Diagnosis(
            full=full or "",
            pairs={} if full is None else self._scores(matches, there, full),
            num_missing=sum(map(len, chosen)) - sum(map(len, there)),
            used=_share(used_T.sum(), num_vectors),
            used_relevant=_share(np.unique(matches.vectors).size, lengths.sum()),
            cv=coefficient_of_variation(strength),
            gini=gini(strength),
            num_positions=len(strength),
            strengths=profile(strength),
            similarity=likeness.map.round(4).tolist(),
            similarity_mean=likeness.mean,
            num_sampled=likeness.num_items,
        )

    def _scores(
        self, matches: Matches, there: list[np.ndarray], full: str
    ) -> dict[str, list[list[float]]]:
        """The scores of each query's pairs with the representation, and with the full tokens."""
        chosen = self._pairs(full)
        ends = np.cumsum([len(rows) for rows in chosen])[:-1]
        if full not in self._whole:
            whole = match_pairs(self._queries(full), self._searcher.packed(full), chosen)
            self._whole[full] = np.split(whole.scores, ends)
        whole_scores = [
            scores[np.isin(rows, own)]
            for scores, rows, own in zip(self._whole[full], chosen, there, strict=True)
        ]
        pairs = np.stack([matches.scores, np.concatenate([np.empty(0), *whole_scores])], axis=1)
        ends = np.cumsum([len(rows) for rows in there])[:-1]
        by_query = zip(self._judged.queries, np.split(pairs, ends), strict=True)
        return {query_id: own.tolist() for query_id, own in by_query if len(own)}

    def _pairs(self, reference: str) -> list[np.ndarray]:
        """(P,) for each query the ascending rows of the items that stand for what is relevant."""
        if reference not in self._chosen:
            packed = self._searcher.packed(reference)
            candidates = []
            for documents in self._relevant:
                rows = np.array(sorted({row for own in documents for row in own}), np.int64)
                candidates.append(rows[packed.lengths[rows].numpy() > 0])
            scores = match_pairs(self._queries(reference), packed, candidates).scores
            ends = np.cumsum([len(rows) for rows in candidates])[:-1]
            self._chosen[reference] = [
                _best(documents, dict(zip(rows.tolist(), own.tolist(), strict=True)))
                for documents, rows, own in zip(
                    self._relevant, candidates, np.split(scores, ends), strict=True
                )
            ]
        return self._chosen[reference]

    def _queries(self, name: str) -> list[torch.Tensor]:
        return self._searcher.queries(self._queries_of(name), name).tokens

    def _items(self) -> tuple[np.ndarray, list[list[list[int]]]]:
        """The rows that take part; for each query and relevant document the rows of its items."""
        relevant = [
            [document for document, grade in self._judged.qrels[query_id].items() if grade > 0]
            for query_id in self._judged.queries
        ]
        index, column = self._searcher.index, f"{self._by}_id"
        taking_part = None
        if self._filter is not None:
            ids = [
                b["item_id"].to_pylist() for b in index.batches(["item_id"], filter=self._filter)
            ]
            taking_part = {item_id for batch in ids for item_id in batch}
        wanted = {document for documents in relevant for document in documents}
        rows: list[int] = []
        rows_of: dict[str, list[int]] = {}
        row = 0
        for batch in index.batches(list(dict.fromkeys(["item_id", column]))):
            names = batch["item_id"].to_pylist(), batch[column].to_pylist()
            for item_id, document in zip(*names, strict=True):
                if taking_part is None or item_id in taking_part:
                    rows.append(row)
                    if document in wanted:
                        rows_of.setdefault(document, []).append(row)
                row += 1
        found = [[rows_of[d] for d in documents if d in rows_of] for documents in relevant]
        return np.array(rows, np.int64), found


def _best(documents: list[list[int]], scores: dict[int, float]) -> np.ndarray:
    """The row of each document's best item, ascending; documents without scores are left out."""
    scored = [[row for row in rows if row in scores] for rows in documents]
    return np.array(sorted(max(rows, key=scores.__getitem__) for rows in scored if rows), np.int64)


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None

"""Diagnoses of the representations of an index, computed on judged queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

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
    strength_profile,
    used_vectors,
)
from pipeline.index.reader import IndexReader
from pipeline.registry import CODECS
from pipeline.search.searcher import Searcher

#: Codecs of the uncompressed reference, by preference. The default codec is first, so that adding a
#: more exact column does not change diagnoses.
CODEC_PREFERENCE = ("float16", "float32", "int8")


def uncompressed_representation(index: IndexReader, name: str) -> str | None:
    """Returns the uncompressed representation of the same encoder and field, or None.

    The result is also None for representations that transform queries, whose scores cannot be
    compared with cosine similarities.
    """
    info = index.representation(name)
    if info.encoder.dim != info.dim:
        return None
    candidates = [
        other_name
        for other_name, other in index.representations().items()
        if other.is_uncompressed
        and (other.encoder.fingerprint, other.field) == (info.encoder.fingerprint, info.field)
        and other.codec["name"] in CODECS.names()  # its package may not be installed
    ]

    def rank(candidate: str) -> int:
        codec = index.representation(candidate).codec["name"]
        return CODEC_PREFERENCE.index(codec) if codec in CODEC_PREFERENCE else len(CODEC_PREFERENCE)

    return min(candidates, key=rank, default=None)


class Diagnoser:
    """Diagnoses representations one after another and shares computations between them.

    A judged parent is represented by the item that is best for the query under the uncompressed
    representation. All representations of an encoder are therefore compared on the same pairs. The
    best item under the diagnosed representation is used if no representation is uncompressed.
    """

    def __init__(
        self,
        searcher: Searcher,
        judged: JudgedQueries,
        level: Literal["parent", "item"],
        filter: str | None,
        encode: Callable[[str], EncodedQueries | list[np.ndarray]],
    ):
        self._searcher, self._judged, self._level, self._filter = searcher, judged, level, filter
        self._encode = encode
        self._pair_rows: dict[str, list[np.ndarray]] = {}
        self._full_scores: dict[str, list[np.ndarray]] = {}
        self._rows, self._relevant = self._list_rows()

    def diagnose(self, name: str) -> Diagnosis:
        """Returns the diagnosis of one representation."""
        full = uncompressed_representation(self._searcher.index, name)
        candidates = self._pairs(full or name)
        packed, queries = self._searcher.packed(name), self._queries(name)
        pair_rows = [rows[packed.lengths[rows].numpy() > 0] for rows in candidates]
        matches = match_pairs(queries, packed, pair_rows)
        used_T = used_vectors(queries, packed, self._rows)
        items = np.unique(np.concatenate([np.empty(0, np.int64), *pair_rows]))
        lengths = packed.lengths[items].numpy()
        strength = matching_strength(matches, int(lengths.max(initial=0)))
        similarity = inter_token_similarity(packed, self._rows)
        num_vectors = int(packed.lengths[self._rows].sum())
        return Diagnosis(
            full=full or "",
            pairs={} if full is None else self._scores(matches, pair_rows, full),
            num_missing=sum(map(len, candidates)) - sum(map(len, pair_rows)),
            used=_share(used_T.sum(), num_vectors),
            used_relevant=_share(np.unique(matches.vectors).size, lengths.sum()),
            cv=coefficient_of_variation(strength),
            gini=gini(strength),
            num_positions=len(strength),
            strengths=strength_profile(strength),
            similarity=similarity.map.round(4).tolist(),
            similarity_mean=similarity.mean,
            num_sampled=similarity.num_items,
        )

    def _scores(
        self, matches: Matches, pair_rows: list[np.ndarray], full: str
    ) -> dict[str, list[list[float]]]:
        """Returns the pairs of each query with their scores and their uncompressed scores."""
        full_rows = self._pairs(full)
        ends = np.cumsum([len(rows) for rows in full_rows])[:-1]
        if full not in self._full_scores:
            full_matches = match_pairs(self._queries(full), self._searcher.packed(full), full_rows)
            self._full_scores[full] = np.split(full_matches.scores, ends)
        full_scores = [
            scores[np.isin(rows, selected)]
            for scores, rows, selected in zip(
                self._full_scores[full], full_rows, pair_rows, strict=True
            )
        ]
        pairs = np.stack([matches.scores, np.concatenate([np.empty(0), *full_scores])], axis=1)
        ends = np.cumsum([len(rows) for rows in pair_rows])[:-1]
        by_query = zip(self._judged.queries, np.split(pairs, ends), strict=True)
        return {query_id: scores.tolist() for query_id, scores in by_query if len(scores)}

    def _pairs(self, reference: str) -> list[np.ndarray]:
        """Returns per query the ascending rows (P,) of the items of relevant documents."""
        if reference not in self._pair_rows:
            packed = self._searcher.packed(reference)
            candidates = []
            for documents in self._relevant:
                rows = np.array(sorted({row for items in documents for row in items}), np.int64)
                candidates.append(rows[packed.lengths[rows].numpy() > 0])
            scores = match_pairs(self._queries(reference), packed, candidates).scores
            ends = np.cumsum([len(rows) for rows in candidates])[:-1]
            self._pair_rows[reference] = [
                _best_items(documents, dict(zip(rows.tolist(), values.tolist(), strict=True)))
                for documents, rows, values in zip(
                    self._relevant, candidates, np.split(scores, ends), strict=True
                )
            ]
        return self._pair_rows[reference]

    def _queries(self, name: str) -> list[torch.Tensor]:
        return self._searcher.queries(self._encode(name), name).tokens

    def _list_rows(self) -> tuple[np.ndarray, list[list[list[int]]]]:
        """Returns the evaluated rows, and the item rows of each relevant document per query."""
        relevant = [
            [document for document, grade in self._judged.qrels[query_id].items() if grade > 0]
            for query_id in self._judged.queries
        ]
        index, column = self._searcher.index, f"{self._level}_id"
        selected = None
        if self._filter is not None:
            ids = [
                b["item_id"].to_pylist() for b in index.batches(["item_id"], filter=self._filter)
            ]
            selected = {item_id for batch in ids for item_id in batch}
        wanted = {document for documents in relevant for document in documents}
        rows: list[int] = []
        rows_of: dict[str, list[int]] = {}
        row = 0
        for batch in index.batches(list(dict.fromkeys(["item_id", column]))):
            names = batch["item_id"].to_pylist(), batch[column].to_pylist()
            for item_id, document in zip(*names, strict=True):
                if selected is None or item_id in selected:
                    rows.append(row)
                    if document in wanted:
                        rows_of.setdefault(document, []).append(row)
                row += 1
        found = [[rows_of[d] for d in documents if d in rows_of] for documents in relevant]
        return np.array(rows, np.int64), found


def _best_items(documents: list[list[int]], scores: dict[int, float]) -> np.ndarray:
    """Returns the rows of the best items in ascending order. Items without a score are skipped."""
    scored = [[row for row in rows if row in scores] for rows in documents]
    return np.array(sorted(max(rows, key=scores.__getitem__) for rows in scored if rows), np.int64)


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None

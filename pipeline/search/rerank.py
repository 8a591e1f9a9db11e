"""Reranks the best items of a search with EDJE's joint encoder.

A text query is read with the items' cached tokens (the column `rerank_tokens`). An image query is
encoded as the index job encodes an item, and its tokens are read with the items' texts or, for
items without a text, their captions.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError, absolute
from pipeline.encoders import Encoder
from pipeline.encoders.images import open_query_image
from pipeline.index.columns import RERANK_TOKENS
from pipeline.index.reader import Index
from pipeline.registry import ENCODERS
from pipeline.rerank.adapter import Adapter
from pipeline.rerank.edje import (
    check_adapter,
    computed_in,
    load_adapter,
    load_joint,
    read_metadata,
)
from pipeline.schema import DEFAULT_RERANK_DEPTH, Precision, Reranked
from pipeline.search.options import check_count
from pipeline.search.query import AnyQueries
from pipeline.search.score import Ranking
from pipeline.tokens import flat_from_arrow, pad

#: Queries whose candidates are loaded and scored together.
QUERIES_AT_ONCE = 64

NO_TOKENS = "has no rerank_tokens"
NO_TEXT = "has no text"


class QueryEncoderSource(Protocol):
    """The index whose items are reranked and its query encoders, as a `Searcher` has them."""

    index: Index

    def encoder(self, representation: str) -> Encoder:
        """Returns the query encoder of a representation."""


class Reranker:
    """Reranks the best items of each query; the other items keep their ranks.

    The score of a reranked item is the joint encoder's logit, plus the score of the first stage if
    requested. An item that cannot be read (it has no tokens or, for an image query, no text) keeps
    its rank of the first stage, and its `Reranked.problem` says why.

    Args:
        folder: Folder of an EDJE.
        rerank_depth: Maximum number of first-stage items that are reranked per query.
        add_first_stage: Whether the score of the first stage is added.
        precision: Precision of the joint encoder; None for that of the folder.
        changes: Other fields of the joint encoder's spec: `attention`, `max_batch_tokens`.

    Raises:
        SpecError: The folder is not that of an EDJE or is corrupted, or the depth is not positive.
    """

    def __init__(
        self,
        folder: str,
        rerank_depth: int = DEFAULT_RERANK_DEPTH,
        add_first_stage: bool = False,
        precision: Precision | None = None,
        **changes: Any,
    ):
        check_count("rerank_depth", rerank_depth)
        self.folder = absolute(folder)
        self.rerank_depth, self.add_first_stage = rerank_depth, add_first_stage
        self.metadata = read_metadata(self.folder, "rerank")
        self.joint = load_joint(self.folder, "rerank", **computed_in(precision), **changes)
        self._vision: Encoder | None = None

    def with_depth(self, rerank_depth: int, add_first_stage: bool) -> Reranker:
        """Returns a reranker with other options that shares the loaded joint encoder."""
        other = copy.copy(self)
        other.rerank_depth, other.add_first_stage = rerank_depth, add_first_stage
        return other

    def check(self, index: Index, queries: AnyQueries) -> Sequence[str | bytes]:
        """Returns the queries if the joint encoder can read them and the items.

        Raises:
            SpecError: A query is neither a text nor an image, or the index lacks tokens of this
                EDJE.
        """
        given = queries if isinstance(queries, Sequence) else [queries]
        readable = [query for query in given if isinstance(query, str | bytes)]
        if len(readable) < len(given):
            rule = "null unless every query is a text or an image"
            raise SpecError("rerank", self.folder, rule, "reads the query itself")
        if any(isinstance(query, str) for query in readable):
            check_stored(self.metadata, self.folder, index)
        return readable

    def rerank(
        self,
        source: QueryEncoderSource,
        queries: Sequence[str | bytes],
        rankings: Sequence[Ranking],
        k: int,
    ) -> list[Ranking]:
        """Returns the k best items of each query after reranking.

        Args:
            source: Index and query encoders of the items.
            queries: All texts or all images.
            rankings: Rankings of the first stage, at least `rerank_depth` long if there are as many
                items.
            k: Maximum number of items per query.
        """
        candidates = [ranking.item_ids[: self.rerank_depth] for ranking in rankings]
        return [
            reorder(query, ranking, readings, self.rerank_depth, self.add_first_stage, k)
            for query, ranking, readings in zip(
                queries, rankings, self.read(source, queries, candidates), strict=True
            )
        ]

    def read(
        self,
        source: QueryEncoderSource,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, Reading]]:
        """Returns the reading of each candidate by item id; one that cannot be read has none.

        Args:
            source: Index and query encoders of the items.
            queries: All texts or all images.
            candidates: Item ids per query.
        """
        done: list[dict[str, Reading]] = []
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            part = slice(first, first + QUERIES_AT_ONCE)
            if texts := [query for query in queries[part] if isinstance(query, str)]:
                done += self._read_texts(source, texts, candidates[part])
            else:
                images = [query for query in queries[part] if isinstance(query, bytes)]
                done += self._read_images(source, images, candidates[part])
        return done

    def _read_texts(
        self, source: QueryEncoderSource, texts: Sequence[str], candidates: Sequence[list[str]]
    ) -> list[dict[str, Reading]]:
        """Returns the readings of each text with its candidates that have tokens."""
        stored = _stored(source.index, candidates, [RERANK_TOKENS])
        dim = self.metadata["dim"]
        flat, lengths = flat_from_arrow(stored[RERANK_TOKENS])
        tokens_BVD, mask_BV = pad(flat.reshape(-1, dim), lengths)
        ids = stored["item_id"].to_pylist()
        row_of = {ids[row]: row for row in np.flatnonzero(lengths).tolist()}
        read = self.joint.read(texts)
        pairs = _pairs(candidates, row_of)
        scores = self.joint.scores(read, tokens_BVD, mask_BV, pairs).tolist()
        cuts = [int(read.num_cut[text]) for text, _ in pairs.tolist()]
        return _by_query(candidates, row_of, zip(scores, cuts, strict=True))

    def _read_images(
        self, source: QueryEncoderSource, images: Sequence[bytes], candidates: Sequence[list[str]]
    ) -> list[dict[str, Reading]]:
        """Returns the readings of each image with its candidates that have a text."""
        stored = _stored(source.index, candidates, ["text", "caption"])
        texts = [row.get("text") or row.get("caption") for row in stored.to_pylist()]
        ids = stored["item_id"].to_pylist()
        with_text = [i for i, text in enumerate(texts) if text and text.strip()]
        row_of = {ids[place]: row for row, place in enumerate(with_text)}
        tokens_QVD, mask_QV = self.image_tokens(source, images)
        read = self.joint.read([texts[place] for place in with_text])
        pairs = _pairs(candidates, row_of)
        scores = self.joint.scores(read, tokens_QVD, mask_QV, pairs.flip(1)).tolist()
        cuts = [int(read.num_cut[text]) for _, text in pairs.tolist()]
        return _by_query(candidates, row_of, zip(scores, cuts, strict=True))

    def image_tokens(
        self, source: QueryEncoderSource, images: Sequence[bytes]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes query images as the index job encodes items.

        Returns:
            The adapter's tokens (Q, V, dim) float16 and their mask (Q, V).

        Raises:
            SpecError: An image cannot be decoded, or the EDJE's encoder cannot be loaded here.
        """
        encoder = self._encoder(source)
        tokens_of_image: list[torch.Tensor] = []
        for image in images:
            file = io.BytesIO()
            open_query_image(image).save(file, "PNG")
            items = pa.table({"item_id": ["query"], "image": [file.getvalue()]})
            for _, batch in encoder.encode(encoder.preprocessor(encoder.spec)(items)):
                tokens, mask = self._adapter.cached(batch)
                tokens_of_image.append(tokens[mask].cpu())
        lengths = np.array([len(tokens) for tokens in tokens_of_image])
        return pad(torch.cat(tokens_of_image), lengths)

    def _encoder(self, source: QueryEncoderSource) -> Encoder:
        """Returns the EDJE's vision encoder; shares that of the index if it is the same."""
        if self._vision is None:
            wanted = self.metadata["vision"]["fingerprint"]
            infos = source.index.representations().values()
            same = next((info for info in infos if info.encoder.fingerprint == wanted), None)
            self._vision = source.encoder(same.name) if same else self._own_encoder()
        return self._vision

    def _own_encoder(self) -> Encoder:
        encoder = ENCODERS.build(ENCODERS.resolve(self.metadata["vision"]["spec"]))
        if encoder.fingerprint != self.metadata["vision"]["fingerprint"]:
            rule = "an EDJE trained on the index's encoder"
            raise SpecError("rerank", self.folder, rule, "was trained on other weights")
        return encoder

    @functools.cached_property
    def _adapter(self) -> Adapter:
        return load_adapter(self.folder, "rerank")


#: Logit of the joint encoder, and the number of truncated tokens of the text.
Reading = tuple[float, int]


def check_stored(
    metadata: Mapping[str, Any], folder: str, index: Index, field: str = "rerank"
) -> None:
    """Checks that an index has the tokens of an EDJE's adapter.

    Args:
        metadata: Metadata of the EDJE's folder, as `read_metadata` returns it.
        folder: Folder of the EDJE.
        index: Index of the items.
        field: Option that names the folder, for error messages.

    Raises:
        SpecError: The index has no tokens, or those of another adapter.
    """
    columns = index.rerank_columns
    if RERANK_TOKENS not in columns:
        note = f"; add them with `python -m jobs.backfill SPEC.yaml rerank={folder}`"
        raise SpecError(field, folder, "null for an index without rerank_tokens", note=note)
    check_adapter(metadata, folder, columns[RERANK_TOKENS].adapter, field)


def reorder(
    query: str | bytes,
    ranking: Ranking,
    read: Mapping[str, Reading],
    rerank_depth: int,
    add_first_stage: bool,
    k: int,
) -> Ranking:
    """Returns the k best items after the items that were read are sorted by their new scores.

    Args:
        query: Text or image.
        ranking: Ranking of the first stage.
        read: Readings of the candidates, by item id.
        rerank_depth: Number of candidates; those without a reading are flagged.
        add_first_stage: Whether the score of the first stage is added.
        k: Maximum number of items.
    """
    scores = list(ranking.scores)
    records: list[Reranked] = []
    problem = NO_TOKENS if isinstance(query, str) else NO_TEXT
    for place, (item_id, first) in enumerate(zip(ranking.item_ids, ranking.scores, strict=True)):
        joint, num_cut = read.get(item_id, (None, 0))
        is_flagged = place < rerank_depth and joint is None
        records.append(Reranked(place + 1, first, joint, num_cut, problem * is_flagged))
        if joint is not None:
            scores[place] = joint + first if add_first_stage else joint
    order = list(range(len(scores)))
    slots = [place for place in order if records[place].joint is not None]
    best = sorted(slots, key=lambda place: -scores[place])  # stable: of equal ones the first
    for slot, place in zip(slots, best, strict=True):
        order[slot] = place
    order = order[:k]
    best_items = replace(ranking, scores=scores).take(order)
    return replace(best_items, reranked=tuple(records[place] for place in order))


def _stored(index: Index, candidates: Sequence[list[str]], columns: list[str]) -> pa.Table:
    """Returns the rows of all candidates, each once."""
    item_ids = sorted({item_id for item_ids in candidates for item_id in item_ids})
    stored = [name for name in columns if name in index.schema.names]
    if item_ids:
        return index.items(item_ids, stored)
    fields = [index.schema.field(name) for name in ("item_id", *stored)]
    return pa.schema(fields).empty_table()


def _pairs(candidates: Sequence[list[str]], row_of: Mapping[str, int]) -> torch.Tensor:
    """Returns (P, 2) int64: each query with the rows of its candidates that have one."""
    pairs = [[q, row_of[i]] for q, ids in enumerate(candidates) for i in ids if i in row_of]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def _by_query(
    candidates: Sequence[list[str]], row_of: Mapping[str, int], readings: Iterator[Reading]
) -> list[dict[str, Reading]]:
    """Groups readings, in the order of `_pairs`, by query and item."""
    return [{i: next(readings) for i in ids if i in row_of} for ids in candidates]

"""The second stage: EDJE's joint encoder reads a query with the best items of the first.

For a text the items' cached tokens are read, the column `rerank_tokens`. For a picture the items'
texts (where an item has none: its captions) are the candidates, and the tokens are the picture's,
made on the way as the index job makes an item's.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Mapping, Sequence
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
from pipeline.rerank.edje import (
    about_of,
    check_adapter,
    computed_in,
    load_adapter,
    load_joint,
)
from pipeline.schema import POOL, Precision, Reranked
from pipeline.search.options import check_count
from pipeline.search.query import AnyQueries
from pipeline.search.score import Ranking
from pipeline.tokens import flat_from_arrow, pad

#: Queries whose candidates are read, and go through the joint encoder, together.
QUERIES_AT_ONCE = 64

NO_TOKENS = "has no rerank_tokens"
NO_TEXT = "has no text"


class QueryEncoderSource(Protocol):
    """The index whose items are reranked and its query encoders, as a `Searcher` has them."""

    index: Index

    def encoder(self, representation: str) -> Encoder:
        """Returns the query encoder of a representation."""


class Reranker:
    """Reranks the `pool` best items of each query; those behind them stay as they are.

    A reranked item's score is the joint encoder's logit, with the first stage's added if that is
    asked for. An item that cannot be read (it has no tokens, or for a picture no text) keeps its
    place of the first stage, and says so.

    Args:
        folder: of an EDJE.
        pool: how many items of the first stage are reranked, as far as there are so many.
        add_first_stage: whether its score counts too.
        precision: in which the joint encoder computes; None: as its folder says.
        changes: of the joint encoder's spec: its attention or max_batch_tokens.

    Raises:
        SpecError: the folder is no EDJE's, or is damaged; the pool is none.
    """

    def __init__(
        self,
        folder: str,
        pool: int = POOL,
        add_first_stage: bool = False,
        precision: Precision | None = None,
        **changes: Any,
    ):
        check_count("pool", pool)
        self.folder, self.pool, self.add_first_stage = absolute(folder), pool, add_first_stage
        self.about = about_of(self.folder, "rerank")
        self.joint = load_joint(self.folder, "rerank", **computed_in(precision), **changes)
        self._vision: Encoder | None = None

    def with_pool(self, pool: int, add_first_stage: bool) -> Reranker:
        """The same joint encoder, which is in memory once, with another pool."""
        other = copy.copy(self)
        other.pool, other.add_first_stage = pool, add_first_stage
        return other

    def check(self, index: Index, queries: AnyQueries) -> Sequence[str | bytes]:
        """Returns the queries; raises `SpecError` if they, or the items, cannot be read."""
        given = queries if isinstance(queries, Sequence) else [queries]
        readable = [query for query in given if isinstance(query, str | bytes)]
        if len(readable) < len(given):
            rule = "null unless every query is a text or an image"
            raise SpecError("rerank", self.folder, rule, "reads the query itself")
        if any(isinstance(query, str) for query in readable):
            check_stored(self.about, self.folder, index)
        return readable

    def rerank(
        self,
        source: QueryEncoderSource,
        queries: Sequence[str | bytes],
        rankings: Sequence[Ranking],
        k: int,
    ) -> list[Ranking]:
        """Rankings of the first stage, at least as deep as the pool -> the k best of each."""
        read = self.read(source, queries, [ranking.item_ids[: self.pool] for ranking in rankings])
        return [
            reordered(query, ranking, of_items, self.pool, self.add_first_stage, k)
            for query, ranking, of_items in zip(queries, rankings, read, strict=True)
        ]

    def read(
        self,
        source: QueryEncoderSource,
        queries: Sequence[str | bytes],
        pools: Sequence[list[str]],
    ) -> list[dict[str, Reading]]:
        """What the joint encoder says of each query's items, but of those that cannot be read."""
        done: list[dict[str, Reading]] = []
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            part = slice(first, first + QUERIES_AT_ONCE)
            if texts := [query for query in queries[part] if isinstance(query, str)]:
                done += self._of_texts(source, texts, pools[part])
            else:
                images = [query for query in queries[part] if isinstance(query, bytes)]
                done += self._of_pictures(source, images, pools[part])
        return done

    def _of_texts(
        self, source: QueryEncoderSource, texts: Sequence[str], pools: Sequence[list[str]]
    ) -> list[dict[str, Reading]]:
        """What the joint encoder says of each text's items that have tokens."""
        stored = _stored(source.index, pools, [RERANK_TOKENS])
        dim = self.about["dim"]
        flat, lengths = flat_from_arrow(stored[RERANK_TOKENS])
        tokens_BVD, mask_BV = pad(flat.reshape(-1, dim), lengths)
        ids = stored["item_id"].to_pylist()
        row_of = {ids[row]: row for row in np.flatnonzero(lengths).tolist()}
        read = self.joint.read(texts)
        pairs = _pairs(pools, row_of)
        scores = self.joint.scores(read, tokens_BVD, mask_BV, pairs).tolist()
        cuts = [int(read.num_cut[text]) for text, _ in pairs.tolist()]
        return _by_query(pools, row_of, zip(scores, cuts, strict=True))

    def _of_pictures(
        self, source: QueryEncoderSource, pictures: Sequence[bytes], pools: Sequence[list[str]]
    ) -> list[dict[str, Reading]]:
        """What the joint encoder says of each picture's items that have a text."""
        stored = _stored(source.index, pools, ["text", "caption"])
        texts = [row.get("text") or row.get("caption") for row in stored.to_pylist()]
        ids = stored["item_id"].to_pylist()
        with_text = [i for i, text in enumerate(texts) if text and text.strip()]
        row_of = {ids[place]: row for row, place in enumerate(with_text)}
        tokens_QVD, mask_QV = self.tokens_of(source, pictures)
        read = self.joint.read([texts[place] for place in with_text])
        pairs = _pairs(pools, row_of)
        scores = self.joint.scores(read, tokens_QVD, mask_QV, pairs.flip(1)).tolist()
        cuts = [int(read.num_cut[text]) for _, text in pairs.tolist()]
        return _by_query(pools, row_of, zip(scores, cuts, strict=True))

    def tokens_of(
        self, source: QueryEncoderSource, pictures: Sequence[bytes]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The adapter's tokens (Q, V, dim) float16 of query pictures, read as items, and a mask.

        Raises:
            SpecError: one is no picture, or the EDJE's encoder cannot be had here.
        """
        encoder, kept = self._encoder(source), []
        for picture in pictures:
            file = io.BytesIO()
            open_query_image(picture).save(file, "PNG")
            items = pa.table({"item_id": ["query"], "image": [file.getvalue()]})
            for _, batch in encoder.encode(encoder.preparer(encoder.spec)(items)):
                tokens, mask = self._adapter.cached(batch)
                kept.append(tokens[mask].cpu())
        return pad(torch.cat(kept), np.array([len(tokens) for tokens in kept]))

    def _encoder(self, source: QueryEncoderSource) -> Encoder:
        """The EDJE's vision encoder, had once: that of the index, if it is the same."""
        if self._vision is None:
            wanted = self.about["vision"]["fingerprint"]
            infos = source.index.representations().values()
            same = next((info for info in infos if info.encoder.fingerprint == wanted), None)
            self._vision = source.encoder(same.name) if same else self._own_encoder()
        return self._vision

    def _own_encoder(self) -> Encoder:
        encoder = ENCODERS.build(ENCODERS.resolve(self.about["vision"]["spec"]))
        if encoder.fingerprint != self.about["vision"]["fingerprint"]:
            rule = "an EDJE trained on the index's encoder"
            raise SpecError("rerank", self.folder, rule, "was trained on other weights")
        return encoder

    @functools.cached_property
    def _adapter(self) -> Any:
        return load_adapter(self.folder, "rerank")


#: A joint encoder's logit, and how many tokens of the text it did not read.
Reading = tuple[float, int]


def check_stored(
    about: Mapping[str, Any], folder: str, index: Index, field: str = "rerank"
) -> None:
    """Raises `SpecError` if an index has no tokens, or those of another adapter than an EDJE's.

    Args:
        about: what `about_of` gives of the EDJE's folder.
        field: what the user names the folder by.
    """
    there = index.rerank_columns
    if RERANK_TOKENS not in there:
        note = f"; add them with `python -m jobs.backfill SPEC.yaml rerank={folder}`"
        raise SpecError(field, folder, "null for an index without rerank_tokens", note=note)
    check_adapter(about, folder, there[RERANK_TOKENS].adapter, field)


def reordered(
    query: str | bytes,
    ranking: Ranking,
    read: Mapping[str, Reading],
    pool: int,
    add_first_stage: bool,
    k: int,
) -> Ranking:
    """The k best of a ranking with those that were read in the order of their new scores."""
    scores, about = list(ranking.scores), []
    problem = NO_TOKENS if isinstance(query, str) else NO_TEXT
    for place, (item_id, first) in enumerate(zip(ranking.item_ids, ranking.scores, strict=True)):
        joint, num_cut = read.get(item_id, (None, 0))
        is_flagged = place < pool and joint is None
        about.append(Reranked(place + 1, first, joint, num_cut, problem * is_flagged))
        if joint is not None:
            scores[place] = joint + first if add_first_stage else joint
    order = list(range(len(scores)))
    slots = [place for place in order if about[place].joint is not None]
    best = sorted(slots, key=lambda place: -scores[place])  # stable: of equal ones the first
    for slot, place in zip(slots, best, strict=True):
        order[slot] = place
    order = order[:k]
    kept = replace(ranking, scores=scores).take(order)
    return replace(kept, reranked=tuple(about[place] for place in order))


def _stored(index: Index, pools: Sequence[list[str]], columns: list[str]) -> pa.Table:
    """The rows of all pools, each once."""
    item_ids = sorted({item_id for pool in pools for item_id in pool})
    there = [name for name in columns if name in index.schema.names]
    if item_ids:
        return index.items(item_ids, there)
    fields = [index.schema.field(name) for name in ("item_id", *there)]
    return pa.schema(fields).empty_table()


def _pairs(pools: Sequence[list[str]], row_of: dict[str, int]) -> torch.Tensor:
    """(P, 2) int64: each query with the row of each item of its pool that has one."""
    pairs = [[q, row_of[i]] for q, pool in enumerate(pools) for i in pool if i in row_of]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def _by_query(
    pools: Sequence[list[str]], row_of: dict[str, int], readings: Any
) -> list[dict[str, Reading]]:
    """Readings in the order of `_pairs`, by query and item."""
    return [{i: next(readings) for i in pool if i in row_of} for pool in pools]

"""Reranking of search results with EDJE's joint encoder.

The joint encoder scores a text query together with the cached tokens of an item (the column
`rerank_tokens`). An image query is encoded like an item by the index job, and its tokens are scored
together with the text of an item or, if it has no text, its caption.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import SpecError, absolute
from pipeline.encoders import Encoder
from pipeline.encoders.edje.adapter import Adapter
from pipeline.encoders.edje.model import (
    check_adapter,
    load_adapter,
    load_joint,
    precision_fields,
    read_metadata,
)
from pipeline.encoders.images import open_query_image, png_file
from pipeline.index.columns import RERANK_TOKENS
from pipeline.index.reader import IndexReader
from pipeline.registry import ENCODERS
from pipeline.schema import DEFAULT_RERANK_DEPTH, Precision
from pipeline.search.options import check_count
from pipeline.search.query import AnyQueries, readable_queries
from pipeline.search.results import JointScore
from pipeline.search.score import Ranking
from pipeline.tokens import flat_from_arrow, pad

#: Number of queries whose candidates are loaded and scored per batch.
QUERY_BATCH = 64

NO_TOKENS = "has no rerank_tokens"
NO_TEXT = "has no text"


class QueryEncoderSource(Protocol):
    """Index whose items are reranked, and its query encoders, such as a `Searcher`."""

    index: IndexReader

    def encoder(self, representation: str) -> Encoder:
        """Returns the query encoder of a representation."""


class Reranker:
    """Reranks the best items of each query.

    The score of a reranked item is the logit of the joint encoder, optionally plus the score of the
    first stage. Items below the rerank depth keep their ranks. Items without tokens or, for an
    image query, without text also keep their ranks, and `JointScore.problem` contains the reason.

    Args:
        folder: Folder of a trained EDJE model.
        rerank_depth: Maximum number of first-stage items to rerank per query, at least 1.
        add_first_stage: Whether to add the score of the first stage.
        precision: Precision of the joint encoder, or None for the precision saved in the folder.
        changes: Other fields of the joint encoder's spec to override, such as `max_batch_tokens`.

    Raises:
        SpecError: The folder does not contain a valid EDJE model, or the depth is invalid.
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
        self.joint = load_joint(self.folder, "rerank", **precision_fields(precision), **changes)
        self._vision: Encoder | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the joint encoder, which scores pairs."""
        return sum(parameter.numel() for parameter in self.joint.parameters())

    def with_depth(self, rerank_depth: int, add_first_stage: bool) -> Reranker:
        """Returns a reranker with other options, which shares the loaded joint encoder."""
        other = copy.copy(self)
        other.rerank_depth, other.add_first_stage = rerank_depth, add_first_stage
        return other

    def check(self, index: IndexReader, queries: AnyQueries) -> Sequence[str | bytes]:
        """Checks that the joint encoder supports the queries and that the index has its tokens.

        Raises:
            SpecError: A query is neither a text nor an image, or the index lacks tokens of this
                EDJE model.
        """
        readable = readable_queries(queries, self.folder)
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
        """Reranks the results of each query and returns the k best items.

        Args:
            source: Index of the items, with its query encoders.
            queries: Either texts or images.
            rankings: Rankings of the first stage with at least `rerank_depth` items each, if the
                index has that many.
            k: Maximum number of items per query.
        """
        candidates = [ranking.item_ids[: self.rerank_depth] for ranking in rankings]
        scores = self.score(source, queries, candidates)
        return [
            reorder(query, ranking, joint_scores, self.rerank_depth, self.add_first_stage, k)
            for query, ranking, joint_scores in zip(queries, rankings, scores, strict=True)
        ]

    def score(
        self,
        source: QueryEncoderSource,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, JointScore]]:
        """Scores candidates with the joint encoder. Candidates without tokens or text are omitted.

        Args:
            source: Index of the items, with its query encoders.
            queries: Either texts or images.
            candidates: Item ids per query.

        Returns:
            Joint scores by item id, per query.
        """
        scores: list[dict[str, JointScore]] = []
        for first in range(0, len(queries), QUERY_BATCH):
            batch = slice(first, first + QUERY_BATCH)
            if texts := [query for query in queries[batch] if isinstance(query, str)]:
                scores += self._score_texts(source, texts, candidates[batch])
            else:
                images = [query for query in queries[batch] if isinstance(query, bytes)]
                scores += self._score_images(source, images, candidates[batch])
        return scores

    def _score_texts(
        self, source: QueryEncoderSource, texts: Sequence[str], candidates: Sequence[list[str]]
    ) -> list[dict[str, JointScore]]:
        stored = _stored(source.index, candidates, [RERANK_TOKENS])
        dim = self.metadata["dim"]
        flat, lengths = flat_from_arrow(stored[RERANK_TOKENS])
        tokens_BVD, mask_BV = pad(flat.reshape(-1, dim), lengths)
        ids = stored["item_id"].to_pylist()
        row_of = {ids[row]: row for row in np.flatnonzero(lengths).tolist()}
        tokenised = self.joint.tokenise(texts)
        pairs = _pairs(candidates, row_of)
        scores = self.joint.scores(tokenised, tokens_BVD, mask_BV, pairs).tolist()
        truncated = [int(tokenised.num_truncated[text]) for text, _ in pairs.tolist()]
        return _by_query(candidates, row_of, map(_joint_score, scores, truncated))

    def _score_images(
        self, source: QueryEncoderSource, images: Sequence[bytes], candidates: Sequence[list[str]]
    ) -> list[dict[str, JointScore]]:
        stored = _stored(source.index, candidates, ["text", "caption"])
        texts = [row.get("text") or row.get("caption") for row in stored.to_pylist()]
        ids = stored["item_id"].to_pylist()
        with_text = [i for i, text in enumerate(texts) if text and text.strip()]
        row_of = {ids[i]: row for row, i in enumerate(with_text)}
        tokens_QVD, mask_QV = self.image_tokens(source, images)
        tokenised = self.joint.tokenise([texts[i] for i in with_text])
        pairs = _pairs(candidates, row_of)
        scores = self.joint.scores(tokenised, tokens_QVD, mask_QV, pairs.flip(1)).tolist()
        truncated = [int(tokenised.num_truncated[text]) for _, text in pairs.tolist()]
        return _by_query(candidates, row_of, map(_joint_score, scores, truncated))

    def image_tokens(
        self, source: QueryEncoderSource, images: Sequence[bytes]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes query images in the same way as the index job encodes items.

        Returns:
            Tokens of the adapter (Q, V, dim) float16 and their mask (Q, V).

        Raises:
            SpecError: An image cannot be decoded, or the vision encoder of the EDJE model is not
                available.
        """
        encoder = self._encoder(source)
        tokens_of_image: list[torch.Tensor] = []
        for image in images:
            png = png_file(open_query_image(image))
            items = pa.table({"item_id": ["query"], "image": [png]})
            for _, batch in encoder.encode(encoder.preprocessor(encoder.spec)(items)):
                tokens, mask = self._adapter.cache_tokens(batch)
                tokens_of_image.append(tokens[mask].cpu())
        lengths = np.array([len(tokens) for tokens in tokens_of_image])
        return pad(torch.cat(tokens_of_image), lengths)

    def _encoder(self, source: QueryEncoderSource) -> Encoder:
        if self._vision is None:
            fingerprint = self.metadata["vision"]["fingerprint"]
            infos = source.index.representations().values()
            same = next((info for info in infos if info.encoder.fingerprint == fingerprint), None)
            self._vision = source.encoder(same.name) if same else self._build_encoder()
        return self._vision

    def _build_encoder(self) -> Encoder:
        encoder = ENCODERS.build(ENCODERS.resolve(self.metadata["vision"]["spec"]))
        if encoder.fingerprint != self.metadata["vision"]["fingerprint"]:
            rule = "an EDJE model trained on the installed weights of its vision encoder"
            raise SpecError("rerank", self.folder, rule, "was trained on other weights")
        return encoder

    @functools.cached_property
    def _adapter(self) -> Adapter:
        return load_adapter(self.folder, "rerank")


def check_stored(
    metadata: Mapping[str, Any], folder: str, index: IndexReader, field: str = "rerank"
) -> None:
    """Checks that an index contains tokens from the adapter of an EDJE model."""
    columns = index.rerank_columns
    if RERANK_TOKENS not in columns:
        note = f"; add them with `maxray add tokens SPEC.yaml rerank={folder}`"
        raise SpecError(field, folder, "null for an index without rerank_tokens", note=note)
    check_adapter(metadata, folder, columns[RERANK_TOKENS].adapter, field)


def reorder(
    query: str | bytes,
    ranking: Ranking,
    joint_scores: Mapping[str, JointScore],
    rerank_depth: int,
    add_first_stage: bool,
    k: int,
) -> Ranking:
    """Returns the k best items of a ranking after reordering the candidates by their new scores.

    Candidates without a joint score keep their ranks.

    Args:
        rerank_depth: Number of candidates. Candidates without a joint score are flagged.
    """
    scores = list(ranking.scores)
    records: list[JointScore] = []
    problem = JointScore(problem=NO_TOKENS if isinstance(query, str) else NO_TEXT)
    for i, (item_id, first) in enumerate(zip(ranking.item_ids, ranking.scores, strict=True)):
        record = joint_scores.get(item_id, problem if i < rerank_depth else JointScore())
        records.append(record)
        if record.logit is not None:
            scores[i] = record.logit + first if add_first_stage else record.logit
    order = list(range(len(scores)))
    slots = [i for i in order if records[i].logit is not None]
    best = sorted(slots, key=lambda i: -scores[i])  # stable: ties keep their order
    for slot, i in zip(slots, best, strict=True):
        order[slot] = i
    order = order[:k]
    reranked = replace(ranking, scores=scores, first_stage=ranking.ranks(), edje=tuple(records))
    return reranked.take(order)


def _stored(index: IndexReader, candidates: Sequence[list[str]], columns: list[str]) -> pa.Table:
    item_ids = sorted({item_id for item_ids in candidates for item_id in item_ids})
    stored = [name for name in columns if name in index.schema.names]
    if item_ids:
        return index.items(item_ids, stored)
    fields = [index.schema.field(name) for name in ("item_id", *stored)]
    return pa.schema(fields).empty_table()


def _pairs(candidates: Sequence[list[str]], row_of: Mapping[str, int]) -> torch.Tensor:
    pairs = [[q, row_of[i]] for q, ids in enumerate(candidates) for i in ids if i in row_of]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def _joint_score(logit: float, num_truncated: int) -> JointScore:
    return JointScore(logit=logit, num_truncated_tokens=num_truncated)


def _by_query(
    candidates: Sequence[list[str]], row_of: Mapping[str, int], scores: Iterator[JointScore]
) -> list[dict[str, JointScore]]:
    """Groups scores by query and item id. The scores have the order of `_pairs`."""
    return [{i: next(scores) for i in ids if i in row_of} for ids in candidates]

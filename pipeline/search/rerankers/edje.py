"""Reranking with EDJE's joint encoder.

The joint encoder scores a text query together with the cached tokens of an item (the column
`rerank_tokens`). An image query is encoded like an item by the index job, and its tokens are scored
together with the text of an item or, if it has no text, its caption.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from pipeline.config import SpecError, Uri, digest
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
from pipeline.schema import Precision
from pipeline.search.query import AnyQueries
from pipeline.search.rerankers import Reranker, RerankerSpec, Source
from pipeline.search.rerankers.contents import NO_TEXT
from pipeline.search.results import RerankScore
from pipeline.tokens import flat_from_arrow, pad

NO_TOKENS = "has no rerank_tokens"


class Edje(Reranker["Edje.Spec"]):
    """Reranker that applies EDJE's joint encoder.

    The score is the logit of the joint encoder. Items without tokens or, for an image query,
    without text keep their ranks.
    """

    class Spec(RerankerSpec):
        """Trained EDJE and its precision."""

        name: Literal["edje"] = "edje"
        model: Uri
        """Folder of a trained EDJE, whose tokens the index must contain."""
        precision: Precision | None = None
        """Precision of the joint encoder: float32, bfloat16, float16 or (CPU only) int8; null: the
        precision stored with the model."""
        max_batch_tokens: int | None = Field(None, ge=1)
        """Maximum number of padded tokens per forward pass; null: as stored with the model."""

    query_kinds = (str, bytes)
    columns = (RERANK_TOKENS, "text", "caption")

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.metadata = read_metadata(spec.model, "model")
        changes = precision_fields(spec.precision)
        if spec.max_batch_tokens is not None:
            changes["max_batch_tokens"] = spec.max_batch_tokens
        self.joint = load_joint(spec.model, "model", **changes)
        self.num_parameters = sum(parameter.numel() for parameter in self.joint.parameters())
        self.fingerprint = digest([self.metadata["fingerprints"], spec.precision])
        self._vision: Encoder | None = None

    @classmethod
    def check_spec(cls, spec: Spec) -> None:
        """Checks the files of the EDJE."""
        read_metadata(spec.model, "model")

    def check(self, index: IndexReader, queries: AnyQueries) -> Sequence[str | bytes]:
        """Checks that the joint encoder supports the queries and that the index has its tokens.

        Raises:
            SpecError: A query is neither a text nor an image, or the index lacks tokens of this
                EDJE model.
        """
        readable = super().check(index, queries)
        if any(isinstance(query, str) for query in readable):
            check_stored(self.metadata, self.spec.model, index)
        return readable

    def missing(self, query: str | bytes) -> str:
        """Returns the reason why an item cannot be read, which depends on the type of the query."""
        return NO_TOKENS if isinstance(query, str) else NO_TEXT

    def score(
        self,
        source: Source,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Returns logits by item id per query, omitting items without tokens or text."""
        if texts := [query for query in queries if isinstance(query, str)]:
            return self._score_texts(source, texts, candidates)
        images = [query for query in queries if isinstance(query, bytes)]
        return self._score_images(source, images, candidates)

    def _score_texts(
        self, source: Source, texts: Sequence[str], candidates: Sequence[list[str]]
    ) -> list[dict[str, RerankScore]]:
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
        self, source: Source, images: Sequence[bytes], candidates: Sequence[list[str]]
    ) -> list[dict[str, RerankScore]]:
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
        self, source: Source, images: Sequence[bytes]
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

    def _encoder(self, source: Source) -> Encoder:
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
            raise SpecError("rerank.model", self.spec.model, rule, "was trained on other weights")
        return encoder

    @functools.cached_property
    def _adapter(self) -> Adapter:
        return load_adapter(self.spec.model, "rerank.model")


def check_stored(
    metadata: Mapping[str, Any], folder: str, index: IndexReader, field: str = "rerank.model"
) -> None:
    """Checks that an index contains tokens from the adapter of an EDJE model."""
    columns = index.rerank_columns
    if RERANK_TOKENS not in columns:
        note = f"; add them with `maxray add tokens SPEC.yaml rerank={folder}`"
        raise SpecError(field, folder, "an EDJE whose rerank_tokens the index has", note=note)
    check_adapter(metadata, folder, columns[RERANK_TOKENS].adapter, field)


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


def _joint_score(logit: float, num_truncated: int) -> RerankScore:
    return RerankScore(score=logit, num_truncated_tokens=num_truncated)


def _by_query(
    candidates: Sequence[list[str]], row_of: Mapping[str, int], scores: Iterator[RerankScore]
) -> list[dict[str, RerankScore]]:
    """Groups scores by query and item id. The scores have the order of `_pairs`."""
    return [{i: next(scores) for i in ids if i in row_of} for ids in candidates]

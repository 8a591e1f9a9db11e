"""Encoding of queries, and the transformation that each representation of an index requires."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch

from pipeline.compression import Compressor
from pipeline.config import SpecError, digest
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.batching import concatenate
from pipeline.encoders.shared import Encoders, load_encoder, shared_encoders
from pipeline.index.artefacts import load_artefact
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.index.reader import IndexReader
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.schema import SURROGATES, Composed, is_blank
from pipeline.search.media import MAX_SECONDS, Unencoded, read_content
from pipeline.tokens import unit_vectors


@dataclass(frozen=True)
class Queries:
    """A batch of encoded queries.

    Attributes:
        tokens: Token vectors (M_i, D) float32 per query.
        pooled: Pooled vectors (num_queries, P) float32, or None.
        token_texts: Texts of the tokens per query, for explanations.
        texts: Texts of the queries, for BM25, or None if a query has no text.
        negatives: Queries whose scores are subtracted from those of the queries, one each, or None.
    """

    tokens: list[torch.Tensor]
    pooled: torch.Tensor | None
    token_texts: list[list[str]]
    texts: list[str] | None = None
    negatives: Queries | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, end: int) -> Queries:
        """Selects the queries in the range [first, end)."""
        pooled = None if self.pooled is None else self.pooled[first:end]
        texts = None if self.texts is None else self.texts[first:end]
        negatives = None if self.negatives is None else self.negatives.part(first, end)
        return Queries(
            self.tokens[first:end], pooled, self.token_texts[first:end], texts, negatives
        )

    def split(self) -> list[Queries]:
        """Returns one batch per query."""
        return [self.part(i, i + 1) for i in range(len(self))]

    @classmethod
    def join(cls, parts: Sequence[Queries]) -> Queries:
        """Joins batches.

        The result has pooled vectors, texts, and negatives, if all batches have them.
        """
        pooled = [part.pooled for part in parts if part.pooled is not None]
        with_texts = [part.texts for part in parts if part.texts is not None]
        negatives = [part.negatives for part in parts if part.negatives is not None]
        return cls(
            [tokens for part in parts for tokens in part.tokens],
            torch.cat(pooled) if len(pooled) == len(parts) else None,
            [texts for part in parts for texts in part.token_texts],
            [text for texts in with_texts for text in texts]
            if len(with_texts) == len(parts)
            else None,
            cls.join(negatives) if negatives and len(negatives) == len(parts) else None,
        )

    @property
    def num_tokens(self) -> list[float]:
        """Number of tokens per query, at least 1, by which a mean over the tokens divides."""
        return [float(max(len(tokens), 1)) for tokens in self.tokens]

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy arrays pickle several times faster than tensors.
        pooled = None if self.pooled is None else self.pooled.numpy()
        tokens = [array.numpy() for array in self.tokens]
        return _unpickle, (tokens, pooled, self.token_texts, self.texts, self.negatives)

    def minus(self, negative: Queries) -> Queries:
        """Returns the queries with one negative query, which all of them share."""
        return replace(self, negatives=Queries.join([negative] * len(self)))

    def with_texts(self, texts: Sequence[str | None]) -> Queries:
        """Adds the texts of the encoded queries if all of them have one."""
        known = [text for text in texts if text is not None]
        return replace(self, texts=known) if len(known) == len(texts) else self

    @classmethod
    def from_encoded(cls, encoded: EncodedQueries) -> Queries:
        """Creates queries from the output of an encoder, normalised and without masked vectors."""
        vectors = unit_vectors(encoded.tokens)
        tokens = [row[mask] for row, mask in zip(vectors, encoded.tokens.mask, strict=True)]
        pooled = encoded.tokens.pooled
        queries = cls(tokens, None if pooled is None else pooled.float(), encoded.token_texts)
        return queries.with_texts(encoded.texts or [None])

    @classmethod
    def from_vectors(cls, queries: Sequence[object]) -> Queries:
        """Creates queries from token vectors (M_i, D), which are normalised to unit length.

        Zero vectors stay zero and do not contribute to scores. The text of a token is its number.

        Raises:
            SpecError: A query is not a finite matrix with at least one non-zero row.
        """
        tokens = []
        for number, query in enumerate(queries):
            array = np.asarray(query)
            if array.ndim != 2 or not len(array) or array.dtype.kind not in "fiu":
                rule = "a numeric array of shape (query tokens, dim)"
                raise query_error(f"an array of shape {array.shape}", rule, number, len(queries))
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
            if not np.isfinite(array).all():
                value = "NaN or infinity"
                raise query_error(value, "finite in float32", number, len(queries))
            # Norms of float32 vectors neither overflow nor underflow in float64.
            norms = np.linalg.norm(array.astype(np.float64), axis=1, keepdims=True)
            if not norms.any():
                rule = "an array with at least one non-zero vector"
                raise query_error("only zeros", rule, number, len(queries))
            unit = array / np.where(norms > 0, norms, 1)
            tokens.append(torch.from_numpy(unit.astype(np.float32)))
        texts = [[f"#{i}" for i in range(len(query))] for query in tokens]
        return cls(tokens, None, texts)


def _unpickle(
    tokens: list[np.ndarray],
    pooled: np.ndarray | None,
    token_texts: list[list[str]],
    texts: list[str] | None,
    negatives: Queries | None,
) -> Queries:
    return Queries(
        [torch.from_numpy(array) for array in tokens],
        None if pooled is None else torch.from_numpy(pooled),
        token_texts,
        texts,
        negatives,
    )


AnyQuery = Unencoded | np.ndarray
AnyQueries = Sequence[AnyQuery] | EncodedQueries | Queries

#: Maximum number of images in memory at the same time.
IMAGES_PER_BATCH = 32


class QueryEncoders:
    """Encodes and transforms queries for an index. Models are loaded on first use."""

    def __init__(self, index: IndexReader, encoders: Encoders | None = None):
        self._index = index
        self._shared = encoders
        self._encoders: dict[str, Encoder] = {}
        self._compressors: dict[str, Compressor] = {}

    def encoder(self, representation: str) -> Encoder:
        """Returns the query encoder, which must equal the one that encoded the representation."""
        info = self._index.representation(representation).encoder
        key = digest(info.spec)
        if key not in self._encoders:
            with shared_encoders(self._shared):
                self._encoders[key] = query_encoder(info)
        check_fingerprint(self._encoders[key], representation, info)
        return self._encoders[key]

    def encode(
        self,
        queries: AnyQueries,
        representation: str,
        encoded_before: dict[str, EncodedQueries] | None = None,
    ) -> Queries:
        """Encodes and transforms queries for a representation.

        `Queries` are not transformed again.

        Args:
            encoded_before: Encoded forms of the same texts or images by encoder, which are used and
                completed.
        """
        if isinstance(queries, Queries):
            return queries
        if isinstance(queries, EncodedQueries):
            encoded = Queries.from_encoded(queries)
        elif _is_encodable_batch(queries):
            texts = [
                query.text or None if isinstance(query, Composed) else query for query in queries
            ]
            check_texts([text for text in texts if isinstance(text, str)])
            info = self._index.representation(representation).encoder
            forms = {} if encoded_before is None else encoded_before
            key = digest([info.spec, info.fingerprint])
            if key not in forms:
                forms[key] = encode(self.encoder(representation), queries)
            encoded = Queries.from_encoded(forms[key])
        else:
            encoded = Queries.from_vectors(queries)
        return self.transform(encoded, representation)

    def transform(self, queries: Queries, representation: str) -> Queries:
        """Transforms query vectors with the compressor and the codec of a representation."""
        info = self._index.representation(representation)
        dim = info.encoder.dim
        for number, tokens_MD in enumerate(queries.tokens):
            if tokens_MD.shape[1] != dim:
                value = f"vectors of dimension {tokens_MD.shape[1]}"
                raise query_error(value, f"vectors of dimension {dim}", number, len(queries))
        compressor, codec = self._compressor(info), self._index.codec(representation)
        tokens = [codec.transform_queries(compressor.transform_queries(t)) for t in queries.tokens]
        negatives = queries.negatives and self.transform(queries.negatives, representation)
        return replace(queries, tokens=tokens, negatives=negatives)

    def _compressor(self, info: RepresentationInfo) -> Compressor:
        key = digest([info.compressor, info.artefact])
        if key not in self._compressors:
            artefact = info.artefact and load_artefact(
                self._index.uri, info.artefact, info.compressor_fit
            )
            spec = COMPRESSORS.resolve(info.compressor)
            self._compressors[key] = COMPRESSORS.build(spec, artefact)
        return self._compressors[key]


def query_encoder(info: EncoderInfo) -> Encoder:
    """Builds the encoder of an index for queries."""
    spec = ENCODERS.resolve(info.spec)
    encoder_class: type[Encoder] = ENCODERS.load(info.name)
    encoder_class.check_queries(spec)
    return load_encoder(spec)


def check_fingerprint(encoder: Encoder, representation: str, info: EncoderInfo) -> None:
    """Raises `SpecError` if another encoder computed the representation."""
    if encoder.fingerprint != info.fingerprint:
        problem = (
            f"was built with another encoder (fingerprint {info.fingerprint}, "
            f"expected {encoder.fingerprint})"
        )
        rule = f"a representation built with the loaded encoder {info.name}"
        raise SpecError("representation", representation, rule, problem)


def encode(
    encoder: Encoder, queries: Iterable[Unencoded], max_seconds: float = MAX_SECONDS
) -> EncodedQueries:
    """Encodes queries of any kinds, in order. There must be at least one.

    Consecutive texts are encoded in one batch, images in batches of `IMAGES_PER_BATCH`, and audio
    and videos, which must not be longer than `max_seconds`, one at a time.
    """
    parts: list[EncodedQueries] = []
    batch: list[dict[str, Any]] = []
    for query in queries:
        content: dict[str, Any] = {"text": query}
        if not isinstance(query, str):
            content = read_content(query, encoder, max_seconds)
        is_full = len(batch) == IMAGES_PER_BATCH and content.keys() != {"text"}
        is_new = batch and (content.keys() == {"text"}) != (batch[0].keys() == {"text"})
        if batch and (is_full or is_new or "span" in content):
            parts.append(_encode_batch(encoder, batch))
            batch = []
        batch.append(content)
    parts.append(_encode_batch(encoder, batch))
    if len(parts) == 1:
        return parts[0]
    return EncodedQueries(
        concatenate([part.tokens for part in parts]),
        [names for part in parts for names in part.token_texts],
        [text for part in parts for text in part.texts or ()],
    )


def _encode_batch(encoder: Encoder, batch: Sequence[dict[str, Any]]) -> EncodedQueries:
    texts = [content.get("text") for content in batch]
    if batch and batch[0].keys() != {"text"}:
        encoded = encoder.encode_media(batch)
    else:
        encoded = encoder.encode_queries([str(text) for text in texts])
    return replace(encoded, texts=encoded.texts or texts)


def _is_encodable_batch(queries: Sequence[AnyQuery]) -> TypeGuard[Sequence[Unencoded]]:
    """Checks whether queries must be encoded, so that none of them are vectors."""
    return len(queries) > 0 and all(isinstance(query, Unencoded) for query in queries)


@contextlib.contextmanager
def reading_negative() -> Iterator[None]:
    """Converts errors about the query inside the block to errors about the negative query."""
    try:
        yield
    except SpecError as error:
        field, *part = error.field.split(".")
        raise error.at(".".join(["negative", *part]) if field == "query" else error.field) from None


def check_texts(texts: Sequence[str]) -> None:
    """Raises `SpecError` if a text is blank or cannot be encoded in UTF-8."""
    for number, text in enumerate(texts):
        if is_blank(text):
            raise query_error(text, "a text with at least one word", number, len(texts))
        if SURROGATES.search(text):
            raise query_error(text, "valid UTF-8 text", number, len(texts))


def readable_queries(queries: AnyQueries, name: str) -> list[str | bytes]:
    """Returns the queries of a reranker that reads texts and images, or raises `SpecError`."""
    inputs = queries if isinstance(queries, Sequence) else [queries]
    readable = [query for query in inputs if isinstance(query, str | bytes)]
    if len(readable) < len(inputs):
        rule = "null unless every query is a text or an image"
        raise SpecError("rerank", name, rule, "does not support other queries")
    return readable


def query_error(value: object, rule: str, number: int, num_queries: int) -> SpecError:
    """Builds the error for an invalid query, with its number if there are several queries."""
    note = f" (query {number + 1} of {num_queries})" if num_queries > 1 else ""
    return SpecError("query", value, rule, note=note)

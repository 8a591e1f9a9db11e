"""Encoding of queries, and the transformation that each representation of an index requires."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, get_args

import numpy as np
import torch

from pipeline.compression import Compressor
from pipeline.config import SpecError, digest
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.index.artefacts import load_artefact
from pipeline.index.info import EncoderInfo, RepresentationInfo
from pipeline.index.reader import Index
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.schema import Composed, is_blank
from pipeline.search.token_weights import TokenFrequencies, config_key, token_frequencies
from pipeline.tokens import unit_vectors


@dataclass(frozen=True)
class Queries:
    """A batch of encoded queries.

    Attributes:
        tokens: Token vectors (M_i, D) float32 per query.
        pooled: Pooled vectors (num_queries, P) float32, or None.
        token_texts: Texts of the tokens per query, for explanations.
        texts: Texts of the queries, for BM25, or None if a query has no text.
        weights: Weights (M_i,) float32 per query, at least 0, or None if all are 1. The MaxSim
            score is the sum over the tokens of the weight times the maximum similarity.
    """

    tokens: list[torch.Tensor]
    pooled: torch.Tensor | None
    token_texts: list[list[str]]
    texts: list[str] | None = None
    weights: list[torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, end: int) -> Queries:
        """Selects the queries in the range [first, end)."""
        pooled = None if self.pooled is None else self.pooled[first:end]
        texts = None if self.texts is None else self.texts[first:end]
        weights = None if self.weights is None else self.weights[first:end]
        tokens, token_texts = self.tokens[first:end], self.token_texts[first:end]
        return Queries(tokens, pooled, token_texts, texts, weights)

    def split(self) -> list[Queries]:
        """Returns one batch per query."""
        return [self.part(i, i + 1) for i in range(len(self))]

    @classmethod
    def join(cls, parts: Sequence[Queries]) -> Queries:
        """Joins batches.

        The result has pooled vectors, and texts, if all batches have them, and weights if any batch
        has them.
        """
        weights = [weights_M for part in parts for weights_M in part.token_weights]
        pooled = [part.pooled for part in parts if part.pooled is not None]
        with_texts = [part.texts for part in parts if part.texts is not None]
        return cls(
            [tokens for part in parts for tokens in part.tokens],
            torch.cat(pooled) if len(pooled) == len(parts) else None,
            [texts for part in parts for texts in part.token_texts],
            [text for texts in with_texts for text in texts]
            if len(with_texts) == len(parts)
            else None,
            weights if any(part.weights is not None for part in parts) else None,
        )

    @property
    def token_weights(self) -> list[torch.Tensor]:
        """Weights (M_i,) of the tokens per query, which are 1 by default."""
        return self.weights or [torch.ones(len(tokens)) for tokens in self.tokens]

    @property
    def total_weights(self) -> list[float]:
        """Sum of the weights of the tokens per query, by which a mean over the tokens divides."""
        if self.weights is None:
            return [float(max(len(tokens), 1)) for tokens in self.tokens]
        return [float(weights.sum()) for weights in self.weights]

    @property
    def weighted_tokens(self) -> list[torch.Tensor]:
        """Tokens multiplied by their weights, whose MaxSim scores are the weighted sums.

        A weight w >= 0 satisfies max_j <w q, d_j> = w max_j <q, d_j>, so that all codecs and
        kernels support weights. A kernel that quantises queries has a scale per token.
        """
        if self.weights is None:
            return self.tokens
        pairs = zip(self.tokens, self.weights, strict=True)
        return [tokens_MD * weights_M.unsqueeze(1) for tokens_MD, weights_M in pairs]

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy arrays pickle several times faster than tensors.
        pooled = None if self.pooled is None else self.pooled.numpy()
        weights = None if self.weights is None else [array.numpy() for array in self.weights]
        tokens = [array.numpy() for array in self.tokens]
        return _unpickle, (tokens, pooled, self.token_texts, self.texts, weights)

    def with_texts(self, queries: Sequence[object]) -> Queries:
        """Adds the texts of the encoded queries if all of them have one."""
        texts = [query.text if isinstance(query, Composed) else query for query in queries]
        if not all(isinstance(text, str) for text in texts):
            return self
        return replace(self, texts=[str(text) for text in texts])

    @classmethod
    def from_encoded(cls, encoded: EncodedQueries) -> Queries:
        """Creates queries from the output of an encoder.

        Vectors are normalised, masked ones removed.
        """
        vectors = unit_vectors(encoded.tokens)
        tokens = [row[mask] for row, mask in zip(vectors, encoded.tokens.mask, strict=True)]
        pooled = encoded.tokens.pooled
        return cls(tokens, None if pooled is None else pooled.float(), encoded.token_texts)

    @classmethod
    def from_vectors(
        cls, queries: Sequence[object], weights: Sequence[object] | None = None
    ) -> Queries:
        """Creates queries from token vectors (M_i, D), which are normalised to unit length.

        Zero vectors stay zero and do not contribute to scores. The text of a token is its number.

        Args:
            queries: Token vectors of each query.
            weights: Weights (M_i,) of the tokens of each query, or None if all are 1.

        Raises:
            SpecError: A query is not a finite matrix with at least one non-zero row, or weights are
                invalid.
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
        encoded = cls(tokens, None, texts)
        return encoded if weights is None else encoded.with_weights(weights)

    def with_weights(self, weights: Sequence[object]) -> Queries:
        """Returns the queries with weights of their tokens.

        Args:
            weights: Weights (M_i,) of the tokens of each query.

        Raises:
            SpecError: The weights of a query are not M_i finite, non-negative numbers with at least
                one positive number.
        """
        if len(weights) != len(self):
            raise SpecError("weights", f"{len(weights)} lists", f"a list for each of {len(self)}")
        tensors = []
        for number, (tokens_MD, given) in enumerate(zip(self.tokens, weights, strict=True)):
            try:
                array = np.asarray(given)
            except ValueError:  # lists of different lengths
                array = np.array(None)
            is_valid = array.shape == (len(tokens_MD),) and array.dtype.kind in "fiu"
            with np.errstate(over="ignore"):
                array = array.astype(np.float32) if is_valid else array
            if not is_valid or not np.isfinite(array).all() or (array < 0).any() or not array.any():
                count = len(tokens_MD)
                rule = f"{count} finite numbers >= 0 with at least one > 0, one per query token"
                raise query_error(given, rule, number, len(self), "weights")
            tensors.append(torch.from_numpy(array))
        return replace(self, weights=tensors)


def _unpickle(
    tokens: list[np.ndarray],
    pooled: np.ndarray | None,
    token_texts: list[list[str]],
    texts: list[str] | None,
    weights: list[np.ndarray] | None,
) -> Queries:
    return Queries(
        [torch.from_numpy(array) for array in tokens],
        None if pooled is None else torch.from_numpy(pooled),
        token_texts,
        texts,
        None if weights is None else [torch.from_numpy(array) for array in weights],
    )


#: Input of a query encoder: a text, the bytes of an image file, or both.
Unencoded = str | bytes | Composed
AnyQuery = Unencoded | np.ndarray
AnyQueries = Sequence[AnyQuery] | EncodedQueries | Queries


class QueryEncoders:
    """Encodes and transforms queries for the representations of an index.

    Encoders and compressors are loaded on first use.
    """

    def __init__(self, index: Index):
        self._index = index
        self._encoders: dict[str, Encoder] = {}
        self._compressors: dict[str, Compressor] = {}
        self._frequencies: dict[str, TokenFrequencies] = {}

    def encoder(self, representation: str) -> Encoder:
        """Returns the query encoder of a representation.

        Raises:
            SpecError: The encoder is not available, or differs from the one that encoded the
                representation.
        """
        info = self._index.representation(representation).encoder
        key = digest(info.spec)
        if key not in self._encoders:
            self._encoders[key] = query_encoder(info)
        check_fingerprint(self._encoders[key], representation, info)
        return self._encoders[key]

    def encode(
        self, queries: AnyQueries, representation: str, idf_power: float | None = None
    ) -> Queries:
        """Encodes and transforms queries for a representation. `Queries` are not transformed again.

        Args:
            queries: Queries.
            representation: Name of the representation.
            idf_power: See `SearchOptions`.

        Raises:
            SpecError: A query is empty or zero, has another dimension than the representation, or
                is not supported by the encoder.
        """
        if isinstance(queries, Queries):
            return self.weigh(queries, representation, idf_power)
        if isinstance(queries, EncodedQueries):
            encoded = Queries.from_encoded(queries)
        elif _is_encodable_batch(queries):
            texts = [query.text if isinstance(query, Composed) else query for query in queries]
            check_texts([text for text in texts if isinstance(text, str)])
            encoded = Queries.from_encoded(encode(self.encoder(representation), queries))
            encoded = encoded.with_texts(queries)
        else:
            encoded = Queries.from_vectors(queries)
        if idf_power is not None and not (
            isinstance(queries, EncodedQueries) or all(isinstance(q, str) for q in queries)
        ):
            raise SpecError("idf_power", idf_power, "null for queries other than texts")
        return self.transform(encoded, representation, idf_power)

    def weigh(self, queries: Queries, representation: str, idf_power: float | None) -> Queries:
        """Weights the tokens of texts by their inverse document frequency.

        Args:
            queries: Encoded texts.
            representation: Name of the representation.
            idf_power: See `SearchOptions`. If None, the queries are returned unchanged.

        Raises:
            SpecError: The queries have weights, or the index has no token frequencies.
        """
        if idf_power is None:
            return queries
        if queries.weights is not None:
            raise SpecError("idf_power", idf_power, "null for queries with weights")
        info = self._index.representation(representation)
        key = config_key(info)
        if key not in self._frequencies:
            self._frequencies[key] = token_frequencies(self._index, info, idf_power)
        frequencies = self._frequencies[key]
        weights = [frequencies.weights(texts, idf_power) for texts in queries.token_texts]
        return replace(queries, weights=weights)

    def transform(
        self, queries: Queries, representation: str, idf_power: float | None = None
    ) -> Queries:
        """Transforms unit query vectors with the compressor and the codec of a representation.

        Args:
            queries: Encoded queries.
            representation: Name of the representation.
            idf_power: See `weigh`.

        Raises:
            SpecError: The vectors have another dimension than the representation, or the tokens
                cannot be weighted.
        """
        info = self._index.representation(representation)
        dim = info.encoder.dim
        for number, tokens_MD in enumerate(queries.tokens):
            if tokens_MD.shape[1] != dim:
                value = f"vectors of dimension {tokens_MD.shape[1]}"
                raise query_error(value, f"vectors of dimension {dim}", number, len(queries))
        compressor, codec = self._compressor(info), self._index.codec(representation)
        tokens = [codec.transform_queries(compressor.transform_queries(t)) for t in queries.tokens]
        return self.weigh(replace(queries, tokens=tokens), representation, idf_power)

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
    """Builds the encoder of an index for queries.

    Raises:
        SpecError: The encoder is not available.
    """
    spec = ENCODERS.resolve(info.spec)
    encoder_class: type[Encoder] = ENCODERS.load(info.name)
    encoder_class.check_queries(spec)
    return ENCODERS.build(spec)


def check_fingerprint(encoder: Encoder, representation: str, info: EncoderInfo) -> None:
    """Raises `SpecError` if another encoder computed the representation."""
    if encoder.fingerprint != info.fingerprint:
        problem = (
            f"was built with another encoder (fingerprint {info.fingerprint}, "
            f"expected {encoder.fingerprint})"
        )
        rule = f"a representation built with the loaded encoder {info.name}"
        raise SpecError("representation", representation, rule, problem)


def encode(encoder: Encoder, queries: Sequence[Unencoded]) -> EncodedQueries:
    """Encodes a batch of texts, images or composed queries. The batch must not be empty.

    Raises:
        SpecError: A query is invalid, or the encoder does not support this type of query.
    """
    if texts := [query for query in queries if isinstance(query, str)]:
        return encoder.encode_queries(texts)
    if images := [query for query in queries if isinstance(query, bytes)]:
        return encoder.encode_images(images)
    composed = [query for query in queries if isinstance(query, Composed)]
    return encoder.encode_composed([q.text for q in composed], [q.image for q in composed])


def _is_encodable_batch(queries: Sequence[AnyQuery]) -> TypeGuard[Sequence[Unencoded]]:
    """Checks whether queries are all of the same type, so that they can be encoded in one batch."""
    classes = get_args(Unencoded)
    return len(queries) > 0 and any(all(isinstance(q, c) for q in queries) for c in classes)


def check_texts(texts: Sequence[str]) -> None:
    """Raises `SpecError` if a text is blank or cannot be encoded in UTF-8."""
    for number, text in enumerate(texts):
        if is_blank(text):
            raise query_error(text, "a text with at least one word", number, len(texts))
        if re.search("[\ud800-\udfff]", text):
            raise query_error(text, "valid UTF-8 text", number, len(texts))


def query_error(
    value: object, rule: str, number: int, num_queries: int, field: str = "query"
) -> SpecError:
    """Builds the error for an invalid query.

    If there are several queries, it contains the number.
    """
    note = f" (query {number + 1} of {num_queries})" if num_queries > 1 else ""
    return SpecError(field, value, rule, note=note)

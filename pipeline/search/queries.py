"""Queries as vectors, whoever made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.schema import Composed
from pipeline.tokens import unit_vectors

#: A query that an encoder reads: a text, a picture's file, or both together.
Unencoded = str | bytes | Composed


@dataclass(frozen=True)
class Queries:
    """Query vectors ready to be scored.

    Attributes:
        tokens: (M_i, D) float32 for each query.
        pooled: (num_queries, P) float32, or None.
        token_texts: the text of each query token, for explanations.
    """

    tokens: list[torch.Tensor]
    pooled: torch.Tensor | None
    token_texts: list[list[str]]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of_encoded(cls, encoded: EncodedQueries) -> Queries:
        """What an encoder gave, masked tokens left out, of unit length."""
        vectors = unit_vectors(encoded.tokens)
        tokens = [row[mask] for row, mask in zip(vectors, encoded.tokens.mask, strict=True)]
        pooled = encoded.tokens.pooled
        return cls(tokens, None if pooled is None else pooled.float(), encoded.token_texts)

    @classmethod
    def of_vectors(cls, queries: Sequence[np.ndarray]) -> Queries:
        """Token vectors (M_i, D), brought to unit length; a token's text is its number.

        A token of zeros stays zero: it counts for nothing. A query of zeros alone, by which all
        items would be equal, is no query.

        Raises:
            SpecError: a query is not a finite matrix of at least one row that is not zero.
        """
        tokens = []
        for place, query in enumerate(queries):
            array = np.asarray(query)
            if array.ndim != 2 or not len(array) or array.dtype.kind not in "fiu":
                legal = "a matrix of numbers of shape (query tokens, dim)"
                raise bad_query(f"an array of shape {array.shape}", legal, place, len(queries))
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
            if not np.isfinite(array).all():
                raise bad_query("NaN or infinity", "finite float32 numbers", place, len(queries))
            # In float64 no float32 is too long or too short to have a length.
            norms = np.linalg.norm(array.astype(np.float64), axis=1, keepdims=True)
            if not norms.any():
                raise bad_query("zeros", "a vector with a direction", place, len(queries))
            unit = array / np.where(norms > 0, norms, 1)
            tokens.append(torch.from_numpy(unit.astype(np.float32)))
        return cls(tokens, None, [[f"#{i}" for i in range(len(query))] for query in tokens])


def encoded_by(encoder: Encoder, queries: Sequence[Unencoded]) -> EncodedQueries:
    """Queries by an encoder, at least one, all of one kind.

    Raises:
        SpecError: one is not legal, or the encoder does not read this kind.
    """
    if isinstance(queries[0], str):
        return encoder.encode_queries(list(queries))
    if isinstance(queries[0], bytes):
        return encoder.encode_pictures(list(queries))
    texts, pictures = [q.text for q in queries], [q.picture for q in queries]
    return encoder.encode_composed(texts, pictures)


def bad_query(value: str, legal: str, place: int, num_queries: int) -> SpecError:
    """The error of a query, which says which of several it is."""
    which = f" (query {place + 1} of {num_queries})" if num_queries > 1 else ""
    return SpecError("query", value, legal, f"is not legal{which}")

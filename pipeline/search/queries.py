"""Queries as vectors, whoever made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries
from pipeline.tokens import normalise, unit_vectors


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

        Raises:
            SpecError: a query is not a finite matrix of at least one row.
        """
        tokens = []
        for query in queries:
            array = np.asarray(query)
            if array.ndim != 2 or not len(array) or array.dtype.kind not in "fiu":
                legal = "a matrix of numbers of shape (query tokens, dim)"
                raise SpecError("query", f"shape {array.shape}", legal)
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
            if not np.isfinite(array).all():
                raise SpecError("query", "NaN or infinity", "finite float32 numbers")
            tokens.append(normalise(torch.from_numpy(array)))
        return cls(tokens, None, [[f"#{i}" for i in range(len(query))] for query in tokens])

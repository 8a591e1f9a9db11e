"""Vectors that the user's own model made: the items carry them, and so must the queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries, Encoder, batches_by_size
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, flat_from_arrow, normalise, pad


class Precomputed(Encoder["Precomputed.Spec"]):
    """Hands on the vectors in the items' column `vectors`; an item with none has no token."""

    class Spec(config.ComponentSpec):
        """What the vectors are.

        Attributes:
            dim: numbers in each vector.
            label: the user's own name for the model that made them. It stands for the weights in
                the fingerprint: vectors of different models need different labels.
            normalise: bring items' and queries' vectors to unit length. Without it they are handed
                on as they are, and a method that works on unit vectors makes them so by itself.
            max_batch_tokens: padded vectors of one batch.
        """

        name: Literal["precomputed"] = "precomputed"
        dim: int = Field(ge=1)
        label: str = Field(min_length=1)
        normalise: bool = True
        max_batch_tokens: int = Field(65536, ge=1)

    needs = ("vectors",)
    pooled_dim = None
    has_spans = False
    has_extents = False

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dim = spec.dim
        self.normalised = spec.normalise
        self.fingerprint = config.digest(config.dump(spec) | {"max_batch_tokens": None})

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Nothing can be wrong here: the widths are checked where the vectors are."""

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """None: queries are vectors."""
        return ()

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Pads the column `vectors`, `list<fixed_size_list<float>[dim]>`; null is no vector.

        Raises:
            ValueError: the vectors have another width, or one of an item's vectors is null.
        """
        column = items["vectors"]
        if not _is_list_of_vectors(column.type, self.dim):
            rule = f"list<fixed_size_list<float>[{self.dim}]> (dim={self.dim})"
            raise SpecError("vectors", str(column.type), rule)
        flat, lengths = flat_from_arrow(column)
        if len(flat) != lengths.sum():
            raise SpecError("vectors", None, "lists without null vectors")
        ends = np.cumsum(lengths)
        for rows in batches_by_size(lengths, self.spec.max_batch_tokens):
            parts = [flat[ends[row] - lengths[row] : ends[row]] for row in rows]
            yield rows, self._batch(np.concatenate(parts), lengths[rows])

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Always an error: the model that made the vectors is not here.

        Raises:
            SpecError: always.
        """
        problem = "cannot be encoded (the index was built from precomputed vectors)"
        raise SpecError("query", texts[0] if len(texts) else "", "query vectors", problem)

    def _batch(self, flat_TD: np.ndarray, lengths: np.ndarray) -> TokenBatch:
        vectors_BND, mask_BN = pad(flat_TD.astype(np.float32), lengths)
        if self.normalised:
            vectors_BND = normalise(vectors_BND)
        return TokenBatch(vectors_BND, mask_BN, normalised=self.normalised)


def _is_list_of_vectors(type: pa.DataType, dim: int) -> bool:
    if not (pa.types.is_list(type) or pa.types.is_large_list(type)):
        return False
    vector = type.value_type
    return (
        pa.types.is_fixed_size_list(vector)
        and vector.list_size == dim
        and pa.types.is_floating(vector.value_type)
    )

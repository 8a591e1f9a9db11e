"""Encoder for precomputed vectors. Items contain them, and queries must be vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline import config
from pipeline.config import MissingField, SpecError
from pipeline.encoders import EncodedQueries, Encoder, batches_by_size
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, flat_from_arrow, normalise, pad


class Precomputed(Encoder["Precomputed.Spec"]):
    """Encoder that returns the vectors in the items' column `vectors`. Null means no tokens."""

    class Spec(config.ComponentSpec):
        """Width, origin and normalisation of the vectors."""

        name: Literal["precomputed"] = "precomputed"
        dim: int | None = Field(None, ge=1)
        """Width of the vectors, or null for that of the .npy file of the source."""
        label: str = Field(min_length=1)
        """User-defined name of the model that computed the vectors. It replaces the weights in the
        fingerprint, so vectors of different models need different labels.
        """
        normalise: bool = True
        """Normalise the vectors of items and queries to unit length. Otherwise they are used
        unchanged, and compressors that need unit vectors normalise them.
        """
        max_batch_tokens: int = Field(65536, ge=1)
        """Maximum number of padded vectors per batch."""

    default_query_kinds = ()
    default_inputs = ("vectors",)
    pooled_dim = None
    has_spans = False
    has_extents = False

    def __init__(self, spec: Spec):
        self.check(spec)
        self.spec = spec
        self.dim = spec.dim or 0
        self.normalised = spec.normalise
        self.fingerprint = config.digest(config.dump(spec) | {"max_batch_tokens": None})

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the width is unknown. `encode` checks that of the vectors."""
        if spec.dim is None:
            raise MissingField("dim", None, "an integer >= 1 unless the source reads .npy files")

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Batches the column `vectors`, `list<fixed_size_list<float>[dim]>`, or null."""
        column = items["vectors"]
        if not _is_list_of_vectors(column.type, self.dim):
            rule = f"list<fixed_size_list<float>[{self.dim}]> (dim={self.dim})"
            raise SpecError("vectors", str(column.type), rule)
        flat, lengths = flat_from_arrow(column)
        if len(flat) != lengths.sum():
            raise SpecError("vectors", None, "lists without null vectors")
        ends = np.cumsum(lengths)
        for rows in batches_by_size(lengths, self.spec.max_batch_tokens):
            vectors = [flat[ends[row] - lengths[row] : ends[row]] for row in rows]
            yield rows, self._batch(np.concatenate(vectors), lengths[rows])

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Raises an error, because the model that computed the vectors is not available."""
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

"""Codecs, which quantise token vectors for storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import ComponentSpec, ComponentSpecT
from pipeline.tokens import TokenBatch, flat_from_arrow, flat_rows, lists_of

#: T quantised vectors, as named tensors of shape (T, width).
Parts = Mapping[str, torch.Tensor]


class Codec(ABC, Generic[ComponentSpecT]):
    """Base class of codecs, which convert vectors (T, D) to named parts with T rows and back.

    Subclasses define a nested `Spec` whose first field is `name: Literal["..."]` and implement
    `parts`, `quantise` and `dequantise`. Each vector must be quantised independently of the others.
    In an Arrow column, the parts of a token are stored as one byte string. In packed files and
    during scoring, each part is a separate array.

    The similarity of a query token and a stored vector is defined as the dot product of the outputs
    of `transform_queries` and `dequantise`. All optimised kernels are tested against this
    definition.

    Args:
        spec: Options of the codec.
        artefact: Result of `fit`, for codecs with `needs_fit`. A codec that needs fitting cannot
            quantise or dequantise vectors without its artefact.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    #: Whether the codec must be fitted to a sample of the corpus before it can be used.
    needs_fit: bool = False
    #: Maximum number of vectors that are passed to `fit`.
    num_fit_tokens: int = 0

    def __init__(self, spec: ComponentSpecT, artefact: dict[str, np.ndarray] | None = None):
        self.spec, self.artefact = spec, artefact

    @property
    def fitted(self) -> dict[str, np.ndarray]:
        """Artefact of a fitted codec. Raises an error if the codec was constructed without one."""
        assert self.artefact is not None, "fit first"
        return self.artefact

    @classmethod
    def fit(
        cls, spec: ComponentSpecT, sample_TD: np.ndarray, seed: int = 0
    ) -> dict[str, np.ndarray]:
        """Fits the codec to a sample of token vectors.

        Args:
            spec: Options of the codec.
            sample_TD: Vectors (T, D) float32 drawn from the corpus.
            seed: Random seed.

        Returns:
            The artefact, which is stored in the index together with its hash.

        Raises:
            SpecError: The sample is too small for the options.
        """
        raise AssertionError(f"{cls.__name__} sets needs_fit but does not implement fit")

    @abstractmethod
    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the dtype and width of each part of a vector, in storage order."""

    @abstractmethod
    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantises finite vectors (T, D) float32 to parts (T, width) on the same device."""

    @abstractmethod
    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Restores vectors (T, D) float32 from their parts, on the same device."""

    def factors(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Factorises the dequantised vectors into values and scales.

        Kernels use the factors to apply the scales after the dot products.

        Returns:
            Values (T, D) of any dtype, and scales (T, 1), or None if all scales are 1.
        """
        return self.dequantise(parts, dim), None

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Transforms query tokens (Q, D) float32 for comparison with dequantised vectors."""
        return tokens_QD

    def token_bytes(self, dim: int) -> int:
        """Returns the number of bytes per stored vector."""
        return sum(dtype.itemsize * width for dtype, width in self.parts(dim).values())

    # -- columns -------------------------------------------------------------------------------

    def column_type(self, dim: int) -> pa.DataType:
        """Returns the Arrow type of a column of multi-vectors."""
        return pa.list_(pa.list_(pa.uint8(), self.token_bytes(dim)))

    def encode(self, batch: TokenBatch) -> pa.Array:
        """Quantises the tokens that the mask selects and returns a column of type `column_type`."""
        return self.encode_rows(*flat_rows(batch.vectors, batch.mask))

    def encode_rows(self, vectors_TD: torch.Tensor, lengths: np.ndarray) -> pa.Array:
        """Quantises vectors (T, D) of items with the given numbers of vectors (B,)."""
        parts = self.quantise(vectors_TD.float())
        part_bytes = [part.contiguous().view(torch.uint8) for part in parts.values()]
        return lists_of(torch.cat(part_bytes, dim=1).cpu().numpy(), lengths)

    def unpack(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Splits a column into its parts (T, width) without dequantising them.

        Also returns the number of tokens per item (B,) int64, 0 for null.
        """
        stored, lengths = flat_from_arrow(column)
        parts, offset = {}, 0
        for name, (dtype, width) in self.parts(dim).items():
            size = dtype.itemsize * width
            part_bytes = stored[:, offset : offset + size].copy()  # aligns even a single row
            parts[name] = part_bytes.view(torch.empty(0, dtype=dtype).numpy().dtype)
            offset += size
        return parts, lengths

    def decode(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Dequantises a column. Also returns the number of tokens per item (B,) int64.

        Vectors (T, D) are float32, or in the stored precision of floating-point codecs.
        """
        parts, lengths = self.unpack(column, dim)
        tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
        return self.dequantise(tensors, dim).numpy(), lengths

"""How token vectors are stored: bits per token, beside the compressor's tokens per item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import ComponentSpec, ComponentSpecT
from pipeline.tokens import TokenBatch, flat_from_arrow, flat_rows, lists_of

#: What a codec makes of T vectors: named arrays (T, width).
Parts = Mapping[str, torch.Tensor]


class Codec(ABC, Generic[ComponentSpecT]):
    """Turns T vectors of D numbers into named parts of T rows, and back.

    Subclasses carry a nested `Spec` whose first field is `name: Literal["..."]`, and write `parts`,
    `quantise` and `dequantise`. A vector's parts do not depend on the other vectors. In a column
    the parts of a token lie side by side as bytes; in a packed file, and where tokens are scored,
    each part is an array of its own.

    The score of a stored vector is the product of the query, as `transform_queries` gives it, with
    what `dequantise` gives: the definition that every fast path is tested against.

    Args:
        spec: its settings.
        artefact: what `fit` returned, for those that need it. Without it a codec can describe
            itself, and neither quantise nor dequantise.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    needs_fit: bool = False
    num_fit_tokens: int = 0  # so many vectors `fit` is given at most, if it is needed
    #: Whether similarities are those of the vectors but for an error, and not on another scale.
    keeps_scores: bool = True

    def __init__(self, spec: ComponentSpecT, artefact: dict[str, np.ndarray] | None = None):
        self.spec, self.artefact = spec, artefact

    @property
    def fitted(self) -> dict[str, np.ndarray]:
        """The artefact of a codec that `needs_fit`, which must have been given."""
        assert self.artefact is not None, "fit first"
        return self.artefact

    @classmethod
    def fit(
        cls, spec: ComponentSpecT, sample_TD: np.ndarray, seed: int = 0
    ) -> dict[str, np.ndarray]:
        """Learns from the token vectors (T, D) float32 of a sample; stored with a hash.

        Raises:
            SpecError: the sample is too small for the settings.
        """
        raise AssertionError(f"{cls.__name__} declares needs_fit and has no fit")

    @abstractmethod
    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """The parts of a vector of `dim` numbers, in the order they are stored: (type, width)."""

    @abstractmethod
    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Float32 vectors (T, D), finite -> their parts (T, width), on the same device."""

    @abstractmethod
    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """The vectors (T, D) float32 that parts stand for; whatever device they lie on."""

    def numbers(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`dequantise` in two factors: numbers (T, D) of any type, scales (T, 1) or None for 1."""
        return self.dequantise(parts, dim), None

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Query tokens (Q, D) float32 as they are compared with this codec's vectors."""
        return tokens_QD

    def token_bytes(self, dim: int) -> int:
        """Bytes of one stored vector."""
        return sum(dtype.itemsize * width for dtype, width in self.parts(dim).values())

    # -- columns -------------------------------------------------------------------------------

    def column_type(self, dim: int) -> pa.DataType:
        """The Arrow type of a column of such vectors."""
        return pa.list_(pa.list_(pa.uint8(), self.token_bytes(dim)))

    def encode(self, batch: TokenBatch) -> pa.Array:
        """The rows under the mask as a column of `column_type`."""
        vectors_TD, lengths = flat_rows(batch.vectors, batch.mask)
        parts = self.quantise(vectors_TD.float())
        as_bytes = [part.contiguous().view(torch.uint8) for part in parts.values()]
        return lists_of(torch.cat(as_bytes, dim=1).cpu().numpy(), lengths)

    def unpack(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """A column -> its parts, each (T, width), and lengths (B,) int64; 0 where null."""
        stored, lengths = flat_from_arrow(column)
        parts, place = {}, 0
        for name, (dtype, width) in self.parts(dim).items():
            size = dtype.itemsize * width
            chosen = stored[:, place : place + size].copy()  # aligned, also of a single row
            parts[name] = chosen.view(torch.empty(0, dtype=dtype).numpy().dtype)
            place += size
        return parts, lengths

    def decode(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A column -> (vectors (T, D) float32, or as stored if floats; lengths (B,) int64)."""
        parts, lengths = self.unpack(column, dim)
        tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
        return self.dequantise(tensors, dim).numpy(), lengths

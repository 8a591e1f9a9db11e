"""IEEE floats: half precision, 2 bytes a number, is the default; single precision takes 4."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch

from pipeline import config
from pipeline.codecs import Codec, Parts
from pipeline.schema import vectors_type
from pipeline.tokens import TokenBatch, flat_from_arrow, ragged_to_arrow


class Floats(Codec[config.ComponentSpec]):
    """A part `values` (T, D); where tokens are scored it may be of any float type.

    Columns hold numbers and not bytes: others can read them.
    """

    dtype: ClassVar[torch.dtype]
    arrow: ClassVar[pa.DataType]

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the dtype and width of `values`."""
        return {"values": (self.dtype, dim)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns (T, D) vectors in the codec's precision."""
        return {"values": vectors_TD.to(self.dtype)}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the (T, D) vectors in float32."""
        return parts["values"].float()

    def numbers(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the (T, D) values as stored, and None for scales of 1."""
        return parts["values"], None

    def column_type(self, dim: int) -> pa.DataType:
        """Returns the Arrow type of a column of lists of `dim` floats."""
        return vectors_type(dim, self.arrow)

    def encode(self, batch: TokenBatch) -> pa.Array:
        """Returns the rows under the mask as a column of `column_type`."""
        return ragged_to_arrow(batch.vectors, batch.mask, self.arrow)

    def unpack(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the (T, D) `values` of a column and the (B,) number of vectors per row."""
        values, lengths = flat_from_arrow(column)
        return {"values": values.reshape(-1, dim)}, lengths

    def decode(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the (T, D) vectors of a column and the (B,) number of vectors per row."""
        return flat_from_arrow(column)


class Float16(Floats):
    """Half precision: no loss that a benchmark shows."""

    class Spec(config.ComponentSpec):
        """Settings of the codec."""

        name: Literal["float16"] = "float16"

    dtype, arrow = torch.float16, pa.float16()


class Float32(Floats):
    """Single precision: the vectors as they were computed."""

    class Spec(config.ComponentSpec):
        """Settings of the codec."""

        name: Literal["float32"] = "float32"

    dtype, arrow = torch.float32, pa.float32()

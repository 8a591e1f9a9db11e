"""Floating-point codecs in half precision, which is the default, and in single precision."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch

from pipeline import config
from pipeline.compression.codecs import Codec, Parts
from pipeline.schema import vectors_type
from pipeline.tokens import TokenBatch, flat_from_arrow, ragged_to_arrow


class Floats(Codec[config.ComponentSpec]):
    """Base class of floating-point codecs, which store the part `values` (T, D).

    Columns contain floating-point numbers instead of bytes, so that other programs can read them.
    During scoring, the part may have any floating-point dtype.
    """

    dtype: ClassVar[torch.dtype]
    arrow: ClassVar[pa.DataType]

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the part `values`."""
        return {"values": (self.dtype, dim)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Converts vectors to the precision of this codec."""
        return {"values": vectors_TD.to(self.dtype)}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Converts values to float32."""
        return parts["values"].float()

    def factors(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the stored values without converting them."""
        return parts["values"], None

    def column_type(self, dim: int) -> pa.DataType:
        """Returns the Arrow type of a column of multi-vectors."""
        return vectors_type(dim, self.arrow)

    def encode(self, batch: TokenBatch) -> pa.Array:
        """Converts the tokens that the mask selects to a column."""
        return ragged_to_arrow(batch.vectors, batch.mask, self.arrow)

    def unpack(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the values (T, D) of a column and the number of tokens per item (B,)."""
        values, lengths = flat_from_arrow(column)
        return {"values": values.reshape(-1, dim)}, lengths

    def decode(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the vectors (T, D) of a column and the number of tokens per item (B,)."""
        return flat_from_arrow(column)


class Float16(Floats):
    """Half precision. In the benchmarks, it does not measurably reduce retrieval quality."""

    class Spec(config.ComponentSpec):
        """Options of `Float16`. There are none apart from the name."""

        name: Literal["float16"] = "float16"

    dtype, arrow = torch.float16, pa.float16()


class Float32(Floats):
    """Single precision, which stores the vectors exactly as the encoder returns them."""

    class Spec(config.ComponentSpec):
        """Options of `Float32`. There are none apart from the name."""

        name: Literal["float32"] = "float32"

    dtype, arrow = torch.float32, pa.float32()

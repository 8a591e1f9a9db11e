"""Floating-point codecs: half precision (the default) and single precision."""

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
    """Base class of floating-point codecs, which store the part `values` (T, D).

    During scoring, the part may have any floating-point dtype. Columns store numbers instead of
    bytes, so that other programs can read them.
    """

    dtype: ClassVar[torch.dtype]
    arrow: ClassVar[pa.DataType]

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the part `values`."""
        return {"values": (self.dtype, dim)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Converts vectors to the precision of the codec."""
        return {"values": vectors_TD.to(self.dtype)}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Converts values to float32."""
        return parts["values"].float()

    def factors(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the stored values without conversion."""
        return parts["values"], None

    def column_type(self, dim: int) -> pa.DataType:
        """Returns the Arrow type of a column of multi-vectors."""
        return vectors_type(dim, self.arrow)

    def encode(self, batch: TokenBatch) -> pa.Array:
        """Converts the tokens under the mask to a column."""
        return ragged_to_arrow(batch.vectors, batch.mask, self.arrow)

    def unpack(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the values (T, D) and the number of tokens per item (B,)."""
        values, lengths = flat_from_arrow(column)
        return {"values": values.reshape(-1, dim)}, lengths

    def decode(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the vectors (T, D) and the number of tokens per item (B,)."""
        return flat_from_arrow(column)


class Float16(Floats):
    """Half precision, without measurable loss of retrieval quality in the benchmarks."""

    class Spec(config.ComponentSpec):
        """Spec of `Float16`, which has no options."""

        name: Literal["float16"] = "float16"

    dtype, arrow = torch.float16, pa.float16()


class Float32(Floats):
    """Single precision, which stores the vectors of the encoder unchanged."""

    class Spec(config.ComponentSpec):
        """Spec of `Float32`, which has no options."""

        name: Literal["float32"] = "float32"

    dtype, arrow = torch.float32, pa.float32()

"""IEEE half precision: 2 bytes a number, the default."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from pipeline import config
from pipeline.codecs import Codec, Parts
from pipeline.schema import vectors_type
from pipeline.tokens import TokenBatch, flat_from_arrow, ragged_to_arrow


class Float16(Codec):
    """A part `values` (T, D) float16; where tokens are scored it may be of any float type."""

    class Spec(config.Spec):
        name: Literal["float16"] = "float16"

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"values": (torch.float16, dim)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"values": vectors_TD.half()}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        return parts["values"].float()

    def numbers(self, parts: Parts, dim: int) -> torch.Tensor:
        return parts["values"]  # made float32 where it is copied to

    # Columns hold numbers and not bytes: others can read them.

    def column_type(self, dim: int) -> pa.DataType:
        return vectors_type(dim, pa.float16())

    def encode(self, batch: TokenBatch) -> pa.Array:
        return ragged_to_arrow(batch.vectors, batch.mask, pa.float16())

    def unpack(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        values, lengths = flat_from_arrow(column)
        return {"values": values.reshape(-1, dim)}, lengths

    def decode(
        self, column: pa.ListArray | pa.ChunkedArray, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return flat_from_arrow(column)

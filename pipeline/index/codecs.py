"""How token vectors are stored: float16 now; quantised codecs join it behind the same two verbs."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa

from pipeline.config import Spec
from pipeline.schema import vectors_type
from pipeline.tokens import TokenBatch, flat_from_arrow, ragged_to_arrow


class Float16:
    """IEEE half precision: 2 bytes a number, no state."""

    class Spec(Spec):
        name: Literal["float16"] = "float16"

    def __init__(self, spec: Spec):
        self.spec = spec

    def column_type(self, dim: int) -> pa.DataType:
        """The Arrow type of a column of such representations."""
        return vectors_type(dim, pa.float16())

    def encode(self, batch: TokenBatch) -> pa.Array:
        """The rows under the mask as a column of `column_type`."""
        return ragged_to_arrow(batch.vectors, batch.mask, pa.float16())

    def decode(self, column: pa.ListArray | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        """A column -> (vectors (T, D) float16, lengths (B,) int64)."""
        return flat_from_arrow(column)

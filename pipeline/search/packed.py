"""The vectors of all items in memory: flat, float16, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch


@dataclass(frozen=True)
class PackedVectors:
    """The vectors of every item of an index, one item after the other.

    Attributes:
        tokens_TD: float16.
        starts: (B,) int64, where each item's vectors begin.
        lengths: (B,) int64; 0 where the item has none.
    """

    tokens_TD: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, blocks: list[tuple[np.ndarray, np.ndarray]], dim: int) -> PackedVectors:
        """Packs blocks of (vectors (T, D), lengths (B,)); empties the list to save memory."""
        lengths = np.concatenate([np.empty(0, np.int64), *(lengths for _, lengths in blocks)])
        tokens_TD = np.empty((int(lengths.sum()), dim), np.float16)
        end = len(tokens_TD)
        while blocks:
            vectors, _ = blocks.pop()
            tokens_TD[end - len(vectors) : end] = vectors
            end -= len(vectors)
        starts = np.cumsum(lengths) - lengths
        return cls(*map(torch.from_numpy, (tokens_TD, starts, lengths)))

    def item(self, row: int) -> torch.Tensor:
        """The vectors (N, D) of one item."""
        start = int(self.starts[row])
        return self.tokens_TD[start : start + int(self.lengths[row])]


def single_vectors(column: pa.FixedSizeListArray) -> tuple[np.ndarray, np.ndarray]:
    """A column of single vectors -> (vectors (T, P), lengths (B,) of 1, or 0 for null)."""
    lengths = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, column.type.list_size), lengths

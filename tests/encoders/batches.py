"""How tests look at what encoders give."""

from __future__ import annotations

import torch


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors of unit length."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    """Asserts that tensors are equal but for rounding."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def of_items(encoder, items, taps=()):
    """By row, the batch of that item alone."""
    return {
        int(row): batch.take(slice(i, i + 1))
        for rows, batch in encoder.encode(items, taps)
        for i, row in enumerate(rows)
    }

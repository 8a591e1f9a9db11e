"""Helpers to compare the outputs of encoders."""

from __future__ import annotations

import torch


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Normalises vectors to unit length."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    """Asserts that tensors are equal up to rounding."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def encode_items(encoder, items, taps=()):
    """Returns the tokens of each item, by row."""
    return {
        int(row): batch.take(slice(i, i + 1))
        for rows, batch in encoder.encode(items, taps)
        for i, row in enumerate(rows)
    }

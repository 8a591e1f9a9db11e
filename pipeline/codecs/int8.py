"""Bytes with a scale for each token: a quarter of float32, and the product of integers."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline import config
from pipeline.codecs import Codec, Parts

#: Integers lie in [-LARGEST, LARGEST]: symmetric, so that a vector and its negative round alike.
LARGEST = 127


class Int8(Codec["Int8.Spec"]):
    """Parts `values` (T, D) int8 and `scales` (T, 1) float32, the product of which is the vector.

    The scale is that with which the largest number becomes 127, and numbers are rounded to the
    nearest integer, halves to the even one: none is off by more than half a scale. A zero vector
    stays zero.

    Query tokens are rounded onto the same grid, each on a scale of its own, so that a similarity is
    a product of integers and two scales.

    >>> codec = Int8(Int8.Spec())
    >>> parts = codec.quantise(torch.tensor([[0.5, -1.0, 0.25]]))
    >>> parts["values"].tolist(), round(parts["scales"].item() * 127, 6)
    ([[64, -127, 32]], 1.0)
    """

    class Spec(config.ComponentSpec):
        """Settings of the codec."""

        name: Literal["int8"] = "int8"

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the dtypes and widths of `values` and `scales`."""
        return {"values": (torch.int8, dim), "scales": (torch.float32, 1)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounds (T, D) vectors to integers on a scale per vector."""
        # The smallest normal number as the scale of a zero vector: nothing is divided by zero.
        scales_T1 = (vectors_TD.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        return {"values": (vectors_TD / scales_T1).round().to(torch.int8), "scales": scales_T1}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the (T, D) products of values and scales in float32."""
        return parts["values"].float() * parts["scales"]

    def numbers(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the (T, D) int8 values and their (T, 1) scales."""
        return parts["values"], parts["scales"]

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Query tokens rounded onto the grid; what lies on it already stays there."""
        return self.dequantise(self.quantise(tokens_QD.float()), tokens_QD.shape[1])

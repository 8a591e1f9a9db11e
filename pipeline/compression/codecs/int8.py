"""8-bit integer codec with one scale per token, which needs about 1/4 of the memory of float32."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from pipeline import config
from pipeline.compression.codecs import Codec, Parts

#: Values are in [-MAX_VALUE, MAX_VALUE]. The range is symmetric, so that -x is stored as -values.
MAX_VALUE = 127


class Int8(Codec["Int8.Spec"]):
    """Stores each vector as the product of `values` (T, D) int8 and `scales` (T, 1) float32.

    The scale of a vector maps its element of largest magnitude to 127. Elements are rounded to the
    nearest integer, and halves to the nearest even integer, so that the rounding error is at most
    half the scale. Zero vectors remain zero.

    Query tokens are quantised in the same way with a scale of their own. Similarities can therefore
    be computed as integer dot products.

    >>> codec = Int8(Int8.Spec())
    >>> parts = codec.quantise(torch.tensor([[0.5, -1.0, 0.25]]))
    >>> parts["values"].tolist(), round(parts["scales"].item() * 127, 6)
    ([[64, -127, 32]], 1.0)
    """

    class Spec(config.ComponentSpec):
        """Options of `Int8`. There are none apart from the name."""

        name: Literal["int8"] = "int8"

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the parts `values` and `scales`."""
        return {"values": (torch.int8, dim), "scales": (torch.float32, 1)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantises vectors with one scale per token."""
        # Zero vectors get the smallest normal number as their scale to avoid a division by zero.
        scales_T1 = (vectors_TD.abs().amax(dim=1, keepdim=True) / MAX_VALUE).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        return {"values": round_(vectors_TD / scales_T1).to(torch.int8), "scales": scales_T1}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Multiplies the values by their scales."""
        return parts["values"].float() * parts["scales"]

    def factors(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the values and the scales as they are stored."""
        return parts["values"], parts["scales"]

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Rounds query tokens to the quantisation grid. Doing so twice has no further effect."""
        return self.dequantise(self.quantise(tokens_QD.float()), tokens_QD.shape[1])


def round_(values: torch.Tensor) -> torch.Tensor:
    """Rounds in place; on a CPU, in the calling thread.

    Torch starts threads for 2,048 values, which afterwards wait actively on the cores of a search.
    """
    if not values.is_cpu:
        return values.round_()
    array = values.detach().numpy()
    np.rint(array, out=array)
    return values

"""One bit a number, its sign: a thirty-second of float32, scored by signs or Hamming distance."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline import config
from pipeline.codecs import Codec, Parts
from pipeline.codecs.packing import look_up, pack, packed_width


class Binary(Codec["Binary.Spec"]):
    """A part `bits` (T, ceil(D / 8)) uint8: bit j of byte i says whether number 8 i + j is > 0.

    The vector that bits stand for has 1 / sqrt(D) where they are 1 and -1 / sqrt(D) where they are
    0: unit length. The bits that fill up the last byte are 0 and mean nothing.

    A query is compared as it is (`query: float`), or by its own signs (`query: binary`): then the
    similarity of two tokens is `1 - 2 Hamming / D`. Either is another scale than that of cosines.

    >>> codec = Binary(Binary.Spec())
    >>> parts = codec.quantise(torch.tensor([[0.3, -0.2, 0.0, 0.1]]))
    >>> parts["bits"].tolist(), codec.dequantise(parts, 4).tolist()
    ([[9]], [[0.5, -0.5, -0.5, 0.5]])
    """

    class Spec(config.ComponentSpec):
        """Settings of the codec."""

        name: Literal["binary"] = "binary"
        query: Literal["float", "binary"] = "float"
        """Form of the query tokens: as they are, or their signs."""

    keeps_scores = False

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the dtype and width of `bits`, one bit per dimension."""
        return {"bits": (torch.uint8, packed_width(dim, 1))}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the signs of (T, D) vectors, packed to bytes."""
        return {"bits": pack((vectors_TD > 0).to(torch.uint8), 1)}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the (T, D) vectors of unit length with the stored signs."""
        signs = torch.tensor([-1.0, 1.0], device=parts["bits"].device) / dim**0.5
        return look_up(parts["bits"], signs, dim)

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Query tokens as they are, or with `query: binary` their signs."""
        if self.spec.query == "float":
            return tokens_QD
        return self.dequantise(self.quantise(tokens_QD), tokens_QD.shape[1])

"""Binary codec, which stores one bit per dimension and needs 1/32 of the memory of float32."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline import config
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.packing import look_up, pack, packed_width


class Binary(Codec["Binary.Spec"]):
    """Stores the sign of each dimension in the part `bits` (T, ceil(D / 8)) uint8.

    Bit j of byte i is `x[8 i + j] > 0`. Padding bits of the last byte are 0 and are ignored.
    Dequantisation maps the bits 1 and 0 to 1 / sqrt(D) and -1 / sqrt(D), which yields unit vectors.
    The resulting similarities are on a different scale than cosine similarities.

    >>> codec = Binary(Binary.Spec())
    >>> parts = codec.quantise(torch.tensor([[0.3, -0.2, 0.0, 0.1]]))
    >>> parts["bits"].tolist(), codec.dequantise(parts, 4).tolist()
    ([[9]], [[0.5, -0.5, -0.5, 0.5]])
    """

    class Spec(config.ComponentSpec):
        """Options of `Binary`."""

        name: Literal["binary"] = "binary"
        query: Literal["float", "binary"] = "float"
        """Representation of the query tokens. "float" leaves them unchanged. "binary" uses their
        signs, so that the similarity of two tokens is `1 - 2 Hamming / D`.
        """

    keeps_scores = False

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the part `bits`."""
        return {"bits": (torch.uint8, packed_width(dim, 1))}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stores the signs of the vectors as bits."""
        return {"bits": pack((vectors_TD > 0).to(torch.uint8), 1)}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Converts each bit to 1 / sqrt(D) or -1 / sqrt(D)."""
        signs = torch.tensor([-1.0, 1.0], device=parts["bits"].device) / dim**0.5
        return look_up(parts["bits"], signs, dim)

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Replaces the query tokens by their signs if the option `query` is "binary"."""
        if self.spec.query == "float":
            return tokens_QD
        return self.dequantise(self.quantise(tokens_QD), tokens_QD.shape[1])

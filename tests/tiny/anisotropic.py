"""Encoder whose vectors share a direction, as those of some models."""

from __future__ import annotations

import zlib

import torch

from pipeline.tokens import normalise
from tests.tiny.sleeping import Sleeping

#: Import path of the encoder, and the mean cosine of its vectors.
ANISOTROPIC, MEAN_COSINE = "tests.tiny.anisotropic:Anisotropic", 0.95


class Anisotropic(Sleeping):
    """Returns one vector per word of an item id, whose words are separated by `_`, or of a query.

    Equal words have equal vectors.
    """

    class Spec(Sleeping.Spec):
        """Options of `Sleeping`."""

        name: str = ANISOTROPIC

    def _rolled(self, name: str) -> torch.Tensor:
        words = name.split("_")
        generators = [torch.Generator().manual_seed(zlib.crc32(word.encode())) for word in words]
        random_ND = normalise(
            torch.stack([torch.randn(self.dim, generator=generator) for generator in generators])
        )
        shared_D = torch.ones(self.dim) / self.dim**0.5
        return normalise(MEAN_COSINE**0.5 * shared_D + (1 - MEAN_COSINE) ** 0.5 * random_ND).half()

"""Candidate generator that replaces each vector by its codes of the codec bits."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from pipeline import config
from pipeline.compression.codecs.bits import Bits
from pipeline.config import SpecError
from pipeline.search.generators import Generator, Sample


class BitVectors(Generator["BitVectors.Spec"]):
    """Scores items by the MaxSim of the query over their vectors with few bits per dimension.

    A vector of 128 dimensions takes 20 bytes with one bit, see the codec `bits`. Scores are much
    closer to the exact ones than those of `lemur`, and read a seventh of the bytes of int8 vectors.
    The generator is therefore the second step after one that scores all items faster, as in
    `lemur:bits`. It is not needed for representations that have the codec `bits`.
    """

    class Spec(config.ComponentSpec):
        """Options of `BitVectors`."""

        name: Literal["bits"] = "bits"
        bits: Literal[1, 2, 4] = 1
        """Number of bits per dimension."""
        seed: int = Field(0, ge=0)
        """Seed of the random rotation."""

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray]):
        super().__init__(spec, artefact)
        self._codec = Bits(Bits.Spec(bits=spec.bits), artefact)

    @classmethod
    def fit(cls, spec: Spec, sample: Sample) -> dict[str, np.ndarray]:
        """Computes `rotation` (D, D) float32, whose first row is the mean direction."""
        if not len(sample.vectors_TD):
            raise SpecError("name", spec.name, "used with a sample that has vectors")
        return Bits.fit(Bits.Spec(bits=spec.bits), sample.vectors_TD.numpy(), spec.seed)

    @property
    def codec(self) -> Bits:
        """Codec of the vectors."""
        return self._codec

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return len(self.artefact["rotation"])

    def encode(
        self, vectors_TD: torch.Tensor, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the vectors unchanged."""
        return vectors_TD, lengths_B

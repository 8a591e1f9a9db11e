"""Codec of int8 vectors with a sketch of one bit per dimension, for searches in two steps."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from pipeline import config
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.int8 import Int8

#: Prefix of the names of the parts of the sketch.
SKETCH = "sketch_"


class Sketched(Codec["Sketched.Spec"]):
    """Stores the parts of `int8`, and those of `bits` with names that begin with `sketch_`.

    Vectors are those of `int8`. A search reads the sketches of all vectors, a seventh of the bytes,
    and the vectors of the best ones only.

    Candidate generators use this codec, which is not registered.

    Args:
        spec: Options of the codec.
        artefact: That of `Bits`.
    """

    class Spec(config.ComponentSpec):
        """Options of `Sketched`. There are none apart from the name."""

        name: Literal["sketched"] = "sketched"

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.vectors, self.sketches = Int8(Int8.Spec()), Bits(Bits.Spec(), artefact)

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the parts of both codecs."""
        sketch = self.sketches.parts(dim)
        return self.vectors.parts(dim) | {SKETCH + name: part for name, part in sketch.items()}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantises vectors with both codecs."""
        sketch = self.sketches.quantise(vectors_TD)
        return self.vectors.quantise(vectors_TD) | {SKETCH + n: part for n, part in sketch.items()}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Restores the int8 vectors."""
        return self.vectors.dequantise(parts, dim)

    def factors(self, parts: Parts, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the values and the scales of the int8 vectors."""
        return self.vectors.factors(parts, dim)

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Rounds query tokens like `int8`."""
        return self.vectors.transform_queries(tokens_QD)

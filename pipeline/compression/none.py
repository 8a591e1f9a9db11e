"""Identity compressor, which is the reference for all budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pipeline import config
from pipeline.compression import Compressor
from pipeline.tokens import TokenBatch, unit_vectors


class Uncompressed(Compressor["Uncompressed.Spec"]):
    """Keeps all tokens, normalised to unit length, without an `assignment`: it is the identity."""

    class Spec(config.ComponentSpec):
        """Options of `Uncompressed`. There are none apart from the name."""

        name: Literal["none"] = "none"

    assignment_form = "indices"

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        return replace(
            batch, vectors=unit_vectors(batch), normalised=True, assignment=None, taps={}
        )

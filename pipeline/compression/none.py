"""No compression: the full tokens, the reference that every budget is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pipeline import config
from pipeline.compression import Compressor
from pipeline.tokens import TokenBatch, unit_vectors


class Uncompressed(Compressor["Uncompressed.Spec"]):
    """Keeps every token, at unit length, with its positions.

    There is no `support`: the output holds the item's tokens in order, so it would only count up.
    """

    class Spec(config.ComponentSpec):
        """Settings of the compressor."""

        name: Literal["none"] = "none"

    support_form = "indices"

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        return replace(batch, vectors=unit_vectors(batch), normalised=True, support=None, taps={})

"""Spatial pruning: tokens at uniform distances, a baseline of SaMer (its table 7)."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.compression import select
from pipeline.compression.samer import Geometry, places
from pipeline.compression.seeds import (
    Seeded,
    SeededCompressor,
    farthest_positions,
    lattice_positions,
    uniform_positions,
)
from pipeline.tokens import TokenBatch


class Spatial(SeededCompressor):
    """Keeps K tokens that are spread over the item: seeds that nothing is merged around.

    By default they are uniformly spaced in the token order. The tokens of a grid come in its raster
    order (t, then y, then x), so for them this is uniform over the flattened grid; for text and
    audio it is uniform over the sequence. `seeds: farthest` samples positions in space and time,
    not features; the position of tokens of items without extents is their rank.
    """

    class Spec(Seeded):
        """Settings of the compressor."""

        name: Literal["spatial"] = "spatial"

    support_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        if self.spec.seeds == "paper":
            return select(batch, *uniform_positions(batch.lengths, budgets_B))
        places_BNA = places(batch, ("t", "y", "x"))
        if self.spec.seeds == "lattice":
            return select(batch, *lattice_positions(places_BNA, batch.mask, budgets_B))
        rank_N = torch.arange(batch.mask.shape[1], device=batch.mask.device)
        rank_BN1 = (rank_N / batch.lengths.clamp_min(1).unsqueeze(1)).unsqueeze(2)
        has_place_B = (~places_BNA.isnan()).flatten(1).any(dim=1)
        rank_BN1 = rank_BN1.masked_fill(has_place_B.reshape(-1, 1, 1), torch.nan)
        geometry = Geometry(torch.cat([places_BNA, rank_BN1], dim=2), batch.mask, gamma=1.0)
        apart = geometry.apart(batch.vectors[..., :0].float())
        return select(batch, *farthest_positions(apart, batch.mask, budgets_B))

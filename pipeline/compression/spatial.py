"""Spatial pruning, a baseline of the SaMer paper (table 7)."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.compression import select
from pipeline.compression.geometry import Geometry, token_coordinates
from pipeline.compression.seeds import (
    SeededBudget,
    SeededCompressor,
    farthest_positions,
    lattice_positions,
    uniform_positions,
)
from pipeline.tokens import TokenBatch


class Spatial(SeededCompressor):
    """Keeps K tokens spread over the item.

    By default, the tokens are uniformly spaced in token order. For grids, token order is raster
    order (t, then y, then x); for text and audio, it is the order of the sequence.
    `seeds: farthest` samples by position in space and time and ignores features. For items without
    extents, the position of a token is its rank in the sequence.
    """

    class Spec(SeededBudget):
        """Options of `Spatial`."""

        name: Literal["spatial"] = "spatial"

    assignment_form = "indices"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        if self.spec.seeds == "paper":
            return select(batch, *uniform_positions(batch.lengths, budgets_B))
        coords_BNA = token_coordinates(batch, ("t", "y", "x"))
        if self.spec.seeds == "lattice":
            return select(batch, *lattice_positions(coords_BNA, batch.mask, budgets_B))
        rank_N = torch.arange(batch.mask.shape[1], device=batch.mask.device)
        rank_BN1 = (rank_N / batch.lengths.clamp_min(1).unsqueeze(1)).unsqueeze(2)
        has_coords_B = (~coords_BNA.isnan()).flatten(1).any(dim=1)
        has_rank_BN = batch.mask & ~has_coords_B.unsqueeze(1)
        rank_BN1 = rank_BN1.masked_fill(~has_rank_BN.unsqueeze(2), torch.nan)
        coords_BNA = torch.cat([coords_BNA, rank_BN1], dim=2)
        no_features_BN0 = batch.vectors[..., :0].float()
        geometry = Geometry(no_features_BN0, coords_BNA, batch.mask, gamma=1.0)
        return select(batch, *farthest_positions(geometry.seed_distance, batch.mask, budgets_B))

"""SaMer without training: feature-spatial soft merging (SaMer paper, sections 4.1 and 4.2)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, memberships
from pipeline.compression.spatial import uniform_positions
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: The distance of a representative that an item's budget does not reach.
FAR = 1e4


class SaMer(Budgeted):
    """Merges the tokens into K centroids by soft assignment over features and positions.

    K seeds, uniform in the token order, become centroids by `num_iterations` rounds of hard
    k-means under the distance of eq. 2; then eq. 3 gives each representative as a softly weighted
    mean. The paper names no values for the options; the defaults are those of its public code.

    The position of a token is the centre (x, y) of its box; where that is NaN, the axis is left
    out for this token. Times are left out: they have no place in the paper's unit square, and its
    code repeats the square for each frame. So for text and audio without boxes only the feature
    term remains: soft spherical k-means, with the token order in the seeds alone.

    Gradients flow through the tokens and the soft weights, not through seeds and k-means.
    """

    class Spec(Budget):
        name: Literal["samer"] = "samer"
        gamma: float = Field(0.1, ge=0, allow_inf_nan=False)
        tau_s: float = Field(0.07, gt=0, allow_inf_nan=False)
        num_iterations: int = Field(3, ge=0)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        spec = self.spec
        num_tokens = batch.mask.shape[1]
        tokens_BND = unit_vectors(batch)
        own_BN = torch.arange(num_tokens, device=batch.mask.device).expand_as(batch.mask)
        if torch.equal(budgets_B, batch.lengths):
            return TokenBatch(tokens_BND, batch.mask, True, pooled=batch.pooled, support=own_BN)

        # Items of at most K tokens go through the arithmetic and get their own tokens back at the
        # end.
        places_BNA = box_centres(batch)
        centroids = cluster(
            tokens_BND, places_BNA, batch, budgets_B, spec.gamma, spec.num_iterations
        )
        num_outputs = int(budgets_B.max())
        is_slot_B1K = (torch.arange(num_outputs) < budgets_B.unsqueeze(1)).unsqueeze(1)
        distance_BNK = distance(tokens_BND, places_BNA, *centroids, spec.gamma)
        distance_BNK = distance_BNK.masked_fill(~is_slot_B1K, FAR)
        merged_BKD = soft_centroids(tokens_BND, batch.mask, distance_BNK, spec.tau_s)

        is_long = (batch.lengths > budgets_B).unsqueeze(1)
        own_BKD = tokens_BND[:, :num_outputs]
        return TokenBatch(
            vectors=torch.where(is_long.unsqueeze(2), merged_BKD, own_BKD),
            mask=is_slot_B1K.squeeze(1),
            normalised=True,
            pooled=batch.pooled,
            support=torch.where(is_long, nearest(distance_BNK), own_BN),
        )


def box_centres(batch: TokenBatch) -> torch.Tensor:
    """(B, N, 2) centres x, y of the tokens' boxes, NaN without meaning; (B, N, 0) without boxes."""
    if batch.extents is None:
        return batch.vectors.new_zeros((*batch.mask.shape, 0), dtype=torch.float32)
    centres = (batch.extents[..., 0:2] + batch.extents[..., 2:4]).float() / 2
    return centres.masked_fill(~batch.mask.unsqueeze(-1), torch.nan)


def distance(
    tokens_BND: torch.Tensor,
    places_BNA: torch.Tensor,
    features_BKD: torch.Tensor,
    sites_BKA: torch.Tensor,
    gamma: float,
) -> torch.Tensor:
    """(B, N, K): `1 - v_i . mu_k + gamma * |p_i - s_k|^2` (eq. 2), NaN axes left out."""
    result = 1 - tokens_BND @ features_BKD.mT
    for place_BN, site_BK in zip(places_BNA.unbind(-1), sites_BKA.unbind(-1), strict=True):
        apart = place_BN.unsqueeze(2) - site_BK.unsqueeze(1)
        result = result + gamma * apart.square().nan_to_num(nan=0.0)
    return result


def nearest(distance_BNK: torch.Tensor) -> torch.Tensor:
    """(B, N): the nearest representative of each token, the first among equals.

    Equal tokens make equal representatives, whose distances differ by rounding alone, and that
    depends on the batch's shape. So what lies within 1e-5 of the minimum counts as equal.
    """
    ties_BNK = distance_BNK <= distance_BNK.amin(dim=2, keepdim=True) + 1e-5
    return ties_BNK.to(torch.uint8).argmax(dim=2)  # of equal maxima argmax gives the first


@torch.no_grad()
def cluster(
    tokens_BND: torch.Tensor,
    places_BNA: torch.Tensor,
    batch: TokenBatch,
    budgets_B: torch.Tensor,
    gamma: float,
    num_iterations: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The feature centroids mu (B, K, D), unit length, and spatial centroids s (B, K, A) of eq. 2.

    Each iteration assigns every token to its nearest centroid and moves the centroid to the mean
    of its tokens; one without tokens stays. An axis on which no member has a position is NaN.
    """
    seeds_BK, slot_mask_BK = uniform_positions(batch.lengths, budgets_B)
    seeds_BK1, num_outputs = seeds_BK.unsqueeze(2), seeds_BK.shape[1]
    features_BKD = tokens_BND.gather(1, seeds_BK1.expand(-1, -1, tokens_BND.shape[2]))
    sites_BKA = places_BNA.gather(1, seeds_BK1.expand(-1, -1, places_BNA.shape[2]))
    for _ in range(num_iterations):
        distance_BNK = distance(tokens_BND, places_BNA, features_BKD, sites_BKA, gamma)
        nearest_BN = nearest(distance_BNK.masked_fill(~slot_mask_BK.unsqueeze(1), FAR))
        members_BKN = memberships(nearest_BN.masked_fill(~batch.mask, -1), num_outputs).mT
        has_tokens = members_BKN.any(dim=2).unsqueeze(2)
        features_BKD = torch.where(has_tokens, normalise(members_BKN @ tokens_BND), features_BKD)
        num_placed = members_BKN @ (~places_BNA.isnan()).float()
        means_BKA = members_BKN @ places_BNA.nan_to_num(nan=0.0) / num_placed  # 0 / 0 is NaN
        sites_BKA = torch.where(has_tokens, means_BKA, sites_BKA)
    return features_BKD, sites_BKA


def soft_centroids(
    tokens_BND: torch.Tensor, mask_BN: torch.Tensor, distance_BNK: torch.Tensor, tau: float
) -> torch.Tensor:
    """(B, K, D): the representatives r_k of eq. 3; with a penalty in `distance_BNK`, of eq. 6.

    The weights a_ik are a softmax over k. Each r_k divides by their sum over the tokens, so that
    too is a softmax, over i, of log a_ik: no weight underflows however far a representative is.
    """
    log_weights = (-distance_BNK / tau).log_softmax(dim=2)
    lowest = torch.finfo(log_weights.dtype).min
    log_weights = log_weights.masked_fill(~mask_BN.unsqueeze(2), lowest)
    return normalise(log_weights.softmax(dim=1).mT @ tokens_BND)

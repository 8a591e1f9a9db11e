"""Attention-guided clustering in its training-free variant (AGC paper, section 5)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch

from pipeline.compression import (
    Budget,
    Budgeted,
    blocks,
    concatenate,
    first_minimum,
    group_sums,
    largest,
    pack_outputs,
    top_positions,
)
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, masked_vectors, normalise, unit_vectors


class AttentionClustering(Budgeted["AttentionClustering.Spec"]):
    """Assigns every token to the most similar of the K most salient tokens (training-free variant).

    The K tokens with the highest saliency alpha serve as centroids (section 5.1). Every token is
    assigned to the centroid with the highest cosine similarity, or to the first of several equally
    similar centroids (section 5.2). The output vector of a centroid is the mean of its tokens,
    weighted by alpha (section 5.3) and normalised to unit length as in the reference
    implementation. A centroid that equals an earlier one receives no tokens and yields no vector.
    The output vectors have the same order as their centroids.

    In the paper, alpha is the attention of universal query tokens that are trained together with
    the encoder. This variant uses an attention statistic of an unmodified encoder instead. Its
    results should be considered a baseline for the trained method.
    """

    class Spec(Budget):
        """Options of `AttentionClustering`."""

        name: Literal["attention_clustering"] = "attention_clustering"
        saliency: TapName = "pooled_row/mean/last"
        """Attention statistic that is used as the saliency, see `pipeline.taps`."""
        reading: Literal["paper", "code"] = "paper"
        """Computation of alpha. "code" follows the reference implementation, which applies a second
        softmax to the attention and thereby makes alpha almost uniform.
        """

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistic that is used as the saliency."""
        return (Tap.parse(self.spec.saliency),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        alpha_BN = self._saliency(batch)
        return weighted_clusters(batch, alpha_BN, *largest(alpha_BN, batch.mask, budgets_B))

    def reduce_uniform(self, batch: TokenBatch, budget: int) -> TokenBatch:
        """Compresses a batch without padding with the same budget for all items."""
        alpha_BN = self._saliency(batch)
        return weighted_clusters(batch, alpha_BN, top_positions(alpha_BN, budget))

    def _saliency(self, batch: TokenBatch) -> torch.Tensor:
        alpha_BN = batch.taps[self.needs_taps[0].name].float()
        if self.spec.reading == "code" and alpha_BN.numel():
            return alpha_BN.masked_fill(~batch.mask, -torch.inf).softmax(dim=1)
        return alpha_BN


def weighted_clusters(
    batch: TokenBatch,
    weights_BN: torch.Tensor,
    centroids_BK: torch.Tensor,
    slot_mask_BK: torch.Tensor | None = None,
) -> TokenBatch:
    """Assigns tokens to their nearest centroids and returns the weighted means of the clusters.

    Gradients flow to the vectors and the weights; the assignment is constant. Centroids to which no
    token is assigned yield no vector. Weights are not negative; a cluster whose weights are all 0
    yields the unweighted mean. `slot_mask_BK` is None without padding.
    """
    weights_BN = weights_BN.clamp_min(1e-12)
    if not batch.is_full:
        weights_BN = weights_BN.masked_fill(~batch.mask, 0.0)
    (num_tokens, dim), num_outputs = batch.vectors.shape[1:], centroids_BK.shape[1]
    parts = []
    for block in blocks(batch.mask, num_tokens * max(num_outputs, dim)):
        items = batch.take(block)
        block_mask_BK = None if slot_mask_BK is None else slot_mask_BK[block]
        groups_BN = nearest_centroids(items, centroids_BK[block], block_mask_BK)
        # Vectors of encoders without normalisation are weighted by their length as well.
        sums_BKD = group_sums(masked_vectors(items), groups_BN, num_outputs, weights_BN[block])
        parts.append((normalise(sums_BKD), groups_BN))  # the sum of the weights cancels
    vectors_BKD, groups_BN = (concatenate(part) for part in zip(*parts, strict=True))
    mask_BK = vectors_BKD.any(dim=2)
    if slot_mask_BK is not None:
        mask_BK &= slot_mask_BK
    vectors_BKD, mask_BK, assignment_BN = pack_outputs(vectors_BKD, mask_BK, groups_BN)
    return TokenBatch(vectors_BKD, mask_BK, True, pooled=batch.pooled, assignment=assignment_BN)


@torch.no_grad()
def nearest_centroids(
    batch: TokenBatch, centroids_BK: torch.Tensor, slot_mask_BK: torch.Tensor | None
) -> torch.Tensor:
    """Returns the centroid (B, N) of highest cosine similarity to each token, -1 at padding."""
    tokens_BND = unit_vectors(batch)
    if not centroids_BK.shape[1]:
        return torch.full_like(batch.mask, -1, dtype=torch.int64)
    if slot_mask_BK is not None:
        # Unused slots repeat the first centroid. Of equal centroids, the first is the nearest.
        centroids_BK = torch.where(slot_mask_BK, centroids_BK, centroids_BK[:, :1])
    index = centroids_BK.unsqueeze(2).expand(-1, -1, tokens_BND.shape[2])
    # Reductions over k are vectorised over the tokens, which are in the last dimension.
    distance_BKN = tokens_BND.gather(1, index).neg() @ tokens_BND.mT
    nearest_BN = first_minimum(distance_BKN, dim=1)
    return nearest_BN if batch.is_full else nearest_BN.masked_fill(~batch.mask, -1)


def nearest(
    distance_BKN: torch.Tensor, slot_mask_BK: torch.Tensor, mask_BN: torch.Tensor
) -> torch.Tensor:
    """Returns the centroid (B, N) int64 with the smallest distance to each token, -1 at padding."""
    if not distance_BKN.shape[1]:
        return torch.full_like(mask_BN, -1, dtype=torch.int64)
    if not bool(slot_mask_BK.all()):
        distance_BKN = distance_BKN.masked_fill(~slot_mask_BK.unsqueeze(2), torch.inf)
    return first_minimum(distance_BKN, dim=1).masked_fill(~mask_BN, -1)

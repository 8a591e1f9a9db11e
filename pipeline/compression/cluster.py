"""Semantic clustering (SAP paper, appendix C.3, eq. 12): k-means of the projected tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, blocks, first_minimum, group_sizes, group_sums
from pipeline.compression.hpool import cosine_distances, linked
from pipeline.compression.random import mix, random_draws
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: Squared distances up to this are 0: `first_minimum` cannot tell the two apart.
EQUAL = 1e-5


class SemanticCluster(Budgeted["SemanticCluster.Spec"]):
    """Partitions the tokens into K clusters and keeps the centroid of each.

    Tokens are brought to unit length first. `algorithm: kmeans`, the default, is the paper's: it
    minimises `sum_k sum_{v in C_k} |v - mu_k|^2` (eq. 12) by Lloyd's iterations. The paper's public
    code runs an agglomerative clustering with average linkage on `1 - cos` instead, cut at K
    clusters: "average".

    The centroids are the means themselves, as in the paper and its code, and shorter than 1:
    a maximum over them favours tight clusters. `normalise` gives them unit length. Clusters are
    ordered by their first token; there are fewer than K where an item has fewer distinct tokens.

    The paper names neither seeds nor iterations. Seeds are those of k-means++, with draws that are
    a hash of the item and of nothing else, so that no result depends on a generator's state. On
    token vectors of all-MiniLM-L6-v2 (30 Cranfield abstracts of about 480 tokens, K = 64) they
    end in a sum of squares 5 % below that of seeds uniform in the token order, and never in a
    larger one on pages made of clusters. 10 iterations are the default: 90 more lower the sum by
    less than 0.5 %. It stops earlier where nothing changes any more.
    """

    class Spec(Budget):
        """Settings of the compressor."""

        name: Literal["cluster"] = "cluster"
        algorithm: Literal["kmeans", "average"] = "kmeans"
        """Clustering algorithm: k-means, or average linkage."""
        num_iterations: int = Field(10, ge=1)
        """Maximum number of iterations of k-means."""
        normalise: bool = False
        """Scales the means to unit length."""

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.normalised = spec.normalise

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        tokens_BND = unit_vectors(batch)
        num_outputs = int(budgets_B.max()) if len(batch) else 0
        own_BN = torch.arange(batch.mask.shape[1], device=batch.mask.device).expand_as(batch.mask)
        if torch.equal(budgets_B, batch.lengths):
            support_BN = own_BN
        elif self.spec.algorithm == "average":
            support_BN = linked(tokens_BND, batch.lengths, budgets_B, cosine_distances, "average")
        else:
            seeds_BK, slot_mask_BK = plus_plus(tokens_BND, random_draws(batch, 0), batch, budgets_B)
            support_BN = lloyd(
                tokens_BND, batch.mask, seeds_BK, slot_mask_BK, self.spec.num_iterations
            )
            is_long = (batch.lengths > budgets_B).unsqueeze(1)
            support_BN = by_first(torch.where(is_long, support_BN, own_BN), batch.mask, num_outputs)
        support_BN = support_BN.masked_fill(~batch.mask, -1)
        sizes_BK = group_sizes(support_BN, num_outputs)
        sums_BKD = group_sums(tokens_BND, support_BN, num_outputs)
        means_BKD = sums_BKD / sizes_BK.clamp_min(1).unsqueeze(2)
        return TokenBatch(
            vectors=normalise(means_BKD) if self.spec.normalise else means_BKD,
            mask=sizes_BK > 0,
            normalised=self.spec.normalise,
            pooled=batch.pooled,
            support=support_BN,
        )


@torch.no_grad()
def plus_plus(
    tokens_BND: torch.Tensor, draws_BN: torch.Tensor, batch: TokenBatch, budgets_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples the seeds of k-means++, with probabilities proportional to squared distances.

    The first seed is uniform; for the others the distance is that to the nearest seed so far. A
    draw is a race: the token with the least `-log(u_n) / w_n` wins, `u_n` uniform and fresh for
    each seed, which happens with probability `w_n / sum w`. Unlike a search in running sums it does
    not turn on the last digits of the weights, hence not on the shape of the batch.

    Args:
        tokens_BND: Token vectors of unit length.
        draws_BN: Random draws of `random_draws`.
        batch: The items, real tokens first in each row.
        budgets_B: Maximum number of seeds per item.

    Returns:
        (B, K) int64 positions and their mask, which ends where the budget or the distinct tokens
        of an item do.
    """
    num_seeds = int(budgets_B.max())
    rows = torch.arange(len(batch), device=draws_BN.device)
    squares_BN = tokens_BND.square().sum(dim=2)
    weight_BN = batch.mask.double()
    seeds, masks = [], []
    for number in range(num_seeds):
        salt = mix(torch.tensor(number + 1, device=draws_BN.device))
        uniform_BN = (mix(draws_BN ^ salt).double() + 0.5) / 2**32
        seed_B = (-uniform_BN.log() / weight_BN).argmin(dim=1)
        seeds.append(seed_B)
        masks.append((weight_BN > 0).any(dim=1) & (number < budgets_B))
        chosen_BD1 = tokens_BND[rows, seed_B].unsqueeze(2)
        apart_BN = (
            squares_BN
            + squares_BN[rows, seed_B].unsqueeze(1)
            - 2 * (tokens_BND @ chosen_BD1).squeeze(2)
        )
        apart_BN = apart_BN.masked_fill(apart_BN <= EQUAL, 0.0).double()
        weight_BN = apart_BN * batch.mask if number == 0 else torch.minimum(weight_BN, apart_BN)
    return torch.stack(seeds, dim=1), torch.stack(masks, dim=1)


@torch.no_grad()
def lloyd(
    tokens_BND: torch.Tensor,
    mask_BN: torch.Tensor,
    seeds_BK: torch.Tensor,
    slot_mask_BK: torch.Tensor,
    num_iterations: int,
) -> torch.Tensor:
    """(B, N) int64: the cluster of each token by Lloyd's iterations.

    Each moves the centroids to the means of their tokens and assigns every token to the nearest
    centroid, but for the first, in which the seeds are the centroids. One without tokens stays
    where it is. The centroids of eq. 12 are the means of what comes out.

    Returns:
        Cluster numbers; at padding they have no meaning.
    """
    num_outputs, dim = seeds_BK.shape[1], tokens_BND.shape[2]
    assigned = []
    for rows in blocks(tokens_BND, tokens_BND.shape[1] * max(num_outputs, dim)):
        tokens, mask = tokens_BND[rows], mask_BN[rows]
        centres_BKD = tokens.gather(1, seeds_BK[rows].unsqueeze(2).expand(-1, -1, dim))
        closed_B1K = ~slot_mask_BK[rows].unsqueeze(1)
        nearest_BN: torch.Tensor | None = None
        for _ in range(num_iterations):
            if nearest_BN is not None:
                sums_BKD = group_sums(tokens, nearest_BN, num_outputs)
                sizes_BK1 = group_sizes(nearest_BN, num_outputs).unsqueeze(2)
                centres_BKD = torch.where(sizes_BK1 > 0, sums_BKD / sizes_BK1, centres_BKD)
            # Less |x|^2, which is the same for every centroid.
            lengths_B1K = centres_BKD.square().sum(dim=2).unsqueeze(1)
            distance_BNK = torch.baddbmm(lengths_B1K, tokens, centres_BKD.mT, alpha=-2)
            before = nearest_BN
            nearest_BN = first_minimum(distance_BNK.masked_fill(closed_B1K, torch.inf), dim=2)
            nearest_BN = nearest_BN.masked_fill(~mask, -1)
            if before is not None and torch.equal(before, nearest_BN):
                break
        assert nearest_BN is not None  # num_iterations >= 1
        assigned.append(nearest_BN)
    return torch.cat(assigned)


def by_first(groups_BN: torch.Tensor, mask_BN: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Numbers the groups of each item anew, in the order of their first tokens.

    >>> by_first(torch.tensor([[4, 1, 4, 0]]), torch.ones(1, 4, dtype=torch.bool), 5).tolist()
    [[0, 1, 0, 2]]
    """
    num_tokens = mask_BN.shape[1]
    position_BN = torch.arange(num_tokens, device=mask_BN.device).expand_as(mask_BN)
    position_BN = position_BN.masked_fill(~mask_BN, num_tokens)
    groups_BN = groups_BN.masked_fill(~mask_BN, 0)
    first_BK = position_BN.new_full((len(mask_BN), num_groups), num_tokens)
    first_BK = first_BK.scatter_reduce(1, groups_BN, position_BN, "amin")
    return first_BK.argsort(dim=1).argsort(dim=1).gather(1, groups_BN)

"""H-Pool: hierarchical pooling with Ward linkage (AGC paper, section 4.3)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform

from pipeline.compression import Budget, Budgeted, memberships
from pipeline.tokens import TokenBatch, normalise, unit_vectors

Linkage = Literal["vectors", "rows", "condensed"]


class HPool(Budgeted):
    """Groups similar tokens by agglomerative clustering and keeps each group's mean.

    Tokens are brought to unit length first, means after. Linkage runs on the CPU in float64, an
    item at a time; it gives up to K groups, fewer where merges tie at the cut (for example when an
    item has fewer than K distinct tokens). Groups are ordered by their first token.

    `linkage` is what Ward sees. The paper writes the increase in squared error of the token
    vectors: "vectors", the default. Its public code, like colpali-engine, takes the rows of the
    cosine distance matrix for observations: "rows". A third reading takes the cosine distances
    for Ward's distances: "condensed".

    `num_protected` is the paper's m': the first m' tokens stay alone. It names no value; 1 is that
    of its code. A budget of K protects at most K - 1 tokens, so that the others have a group.
    """

    class Spec(Budget):
        name: Literal["hpool"] = "hpool"
        linkage: Linkage = "vectors"
        num_protected: int = Field(1, ge=0)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        spec = self.spec
        tokens_BND = unit_vectors(batch)
        items = tokens_BND.detach().double().cpu().numpy()
        support = np.full(batch.mask.shape, -1, dtype=np.int64)
        sizes = zip(batch.lengths.tolist(), budgets_B.tolist(), strict=True)
        for row, (length, budget) in enumerate(sizes):
            support[row, :length] = ward_groups(
                items[row, :length], budget, spec.num_protected, spec.linkage
            )
        support_BN = torch.from_numpy(support).to(batch.vectors.device)

        num_outputs = int(budgets_B.max()) if len(batch) else 0
        members_BNK = memberships(support_BN, num_outputs)
        return TokenBatch(
            vectors=normalise(members_BNK.mT @ tokens_BND),  # of sums: their length cancels
            mask=members_BNK.any(dim=1),
            normalised=True,
            pooled=batch.pooled,
            support=support_BN,
        )


def ward_groups(
    tokens: np.ndarray, num_groups: int, num_protected: int, linkage: Linkage
) -> np.ndarray:
    """The group of each token, numbered by first member.

    Args:
        tokens: (n, D) float64 of unit length.
        num_groups: at most so many groups, the protected tokens included.
        num_protected: the first so many tokens are groups of their own, at most `num_groups` - 1.
        linkage: see `HPool`.

    >>> tokens = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    >>> ward_groups(tokens, 2, num_protected=0, linkage="vectors").tolist()
    [0, 1, 0, 1]
    """
    if len(tokens) <= num_groups:
        return np.arange(len(tokens))
    num_protected = min(num_protected, num_groups - 1)
    free = tokens[num_protected:]
    tree = hierarchy.linkage(ward_distances(free, linkage), method="ward")
    labels = hierarchy.fcluster(tree, num_groups - num_protected, criterion="maxclust")
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return np.concatenate([np.arange(num_protected), num_protected + rank[labels]])


def ward_distances(tokens: np.ndarray, linkage: Linkage) -> np.ndarray:
    """The distances that Ward starts from, in scipy's condensed form (n (n - 1) / 2,)."""
    if linkage == "vectors":
        return pdist(tokens)
    cosine = (1.0 - tokens @ tokens.T).clip(min=0.0)
    np.fill_diagonal(cosine, 0.0)
    return pdist(cosine) if linkage == "rows" else squareform(cosine, checks=False)

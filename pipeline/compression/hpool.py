"""H-Pool: hierarchical pooling with Ward linkage (AGC paper, section 4.3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import fastcluster
import numpy as np
import torch
from pydantic import Field
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform
from threadpoolctl import threadpool_limits

from pipeline.compression import Budget, Budgeted, group_sizes, group_sums
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: Of a squared distance, relative to the squared lengths: what is less is subtracted once more.
LOST = 1e-10

#: (n, D) float64 tokens of unit length -> their distances in scipy's condensed form (n (n - 1) / 2)
Distances = Callable[[np.ndarray], np.ndarray]


class HPool(Budgeted["HPool.Spec"]):
    """Groups similar tokens by agglomerative clustering and keeps each group's mean.

    Tokens are brought to unit length first, means after. Linkage runs on the CPU in float64, as
    many items at a time as torch has threads; it gives up to K groups, fewer where merges tie at
    the cut (for example when an item has fewer than K distinct tokens). Groups are ordered by their
    first token.

    `linkage` is what Ward sees. The paper writes the increase in squared error of the token
    vectors: "vectors", the default. Its public code, like colpali-engine, takes the rows of the
    cosine distance matrix for observations: "rows". A third reading takes the cosine distances
    for Ward's distances: "condensed".

    `num_protected` is the paper's m': the first m' tokens stay alone. It names no value; 1 is that
    of its code. A budget of K protects at most K - 1 tokens, so that the others have a group.
    """

    class Spec(Budget):
        """Settings of the compressor."""

        name: Literal["hpool"] = "hpool"
        linkage: Literal["vectors", "rows", "condensed"] = "vectors"
        """Observations or distances of the Ward linkage, see `HPool`."""
        num_protected: int = Field(1, ge=0)
        """Number of leading tokens that are never merged, the paper's m'."""

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        distances = DISTANCES[self.spec.linkage]
        tokens_BND = unit_vectors(batch)
        support_BN = linked(
            tokens_BND, batch.lengths, budgets_B, distances, "ward", self.spec.num_protected
        )
        return group_means(batch, tokens_BND, support_BN, budgets_B)


def group_means(
    batch: TokenBatch, tokens_BND: torch.Tensor, support_BN: torch.Tensor, budgets_B: torch.Tensor
) -> TokenBatch:
    """The mean of each group of an item's unit vectors, at unit length."""
    num_outputs = int(budgets_B.max()) if len(batch) else 0
    sums_BKD = group_sums(tokens_BND, support_BN, num_outputs)
    return TokenBatch(
        vectors=normalise(sums_BKD),  # dividing by the counts would change no direction
        mask=group_sizes(support_BN, num_outputs) > 0,
        normalised=True,
        pooled=batch.pooled,
        support=support_BN,
    )


def linked(
    tokens_BND: torch.Tensor,
    lengths_B: torch.Tensor,
    budgets_B: torch.Tensor,
    distances: Distances,
    method: Literal["ward", "average"],
    num_protected: int = 0,
) -> torch.Tensor:
    """Groups tokens by agglomerative clustering.

    Args:
        tokens_BND: Token vectors, real tokens first in each row.
        lengths_B: Number of tokens per item.
        budgets_B: Maximum number of groups per item, including the protected tokens.
        distances: Computes the distances of the linkage.
        method: Linkage method.
        num_protected: Number of leading tokens that are groups of their own, at most the budget
            less 1.

    Returns:
        (B, N) int64 group of each token, -1 at padding.
    """

    def groups_of(vectors: np.ndarray, length: int, budget: int) -> np.ndarray:
        groups = np.arange(length)
        if length > budget:
            alone = min(num_protected, budget - 1)
            tokens = vectors[alone:length].astype(np.float64)
            tokens /= np.linalg.norm(tokens, axis=1, keepdims=True).clip(min=1e-12)
            groups[alone:] = alone + cut(distances(tokens), budget - alone, method)
        return groups

    support = np.full(tokens_BND.shape[:2], -1, dtype=np.int64)
    found = of_each(groups_of, tokens_BND, lengths_B.tolist(), budgets_B.tolist())
    for row, groups in zip(support, found, strict=True):
        row[: len(groups)] = groups
    return torch.from_numpy(support).to(tokens_BND.device)


def merge_costs(tokens_BND: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """(B, N) float64: what each of Ward's merges adds to the squared error, largest first.

    An item of n tokens has n - 1 merges; -1 behind them. Cutting after the first k - 1 of them
    leaves k groups, whose squared error is the sum of the others.
    """

    def costs_of(vectors: np.ndarray, length: int) -> np.ndarray:
        if length < 2:
            return np.empty(0)
        apart = vector_distances(vectors[:length].astype(np.float64))
        heights = fastcluster.linkage(apart, "ward", preserve_input=False)[:, 2]
        return np.sort(heights**2 / 2)[::-1]

    costs = np.full(tokens_BND.shape[:2], -1.0)
    for row, found in zip(costs, of_each(costs_of, tokens_BND, lengths_B.tolist()), strict=True):
        row[: len(found)] = found
    return torch.from_numpy(costs).to(tokens_BND.device)


def of_each(
    compute: Callable[..., np.ndarray], tokens_BND: torch.Tensor, *arguments: Sequence[int]
) -> list[np.ndarray]:
    """What `compute` gives for each item, as many items at a time as torch has threads."""
    vectors = tokens_BND.detach().cpu().numpy()
    # An item a thread, as products and linkages leave the interpreter free. Products that are
    # spread over threads besides would wait for each other, many times longer than they take.
    with (
        _ALONE,
        threadpool_limits(1, "blas"),
        ThreadPoolExecutor(torch.get_num_threads()) as pool,
    ):
        return list(pool.map(compute, vectors, *arguments))


#: The limit on BLAS threads is the process's: two callers would restore each other's.
_ALONE = threading.Lock()


def cut(apart: np.ndarray, num_groups: int, method: Literal["ward", "average"]) -> np.ndarray:
    """Cuts a linkage tree into groups.

    Args:
        apart: Distances of n tokens in scipy's condensed form; overwritten.
        num_groups: Maximum number of groups.
        method: Linkage method.

    Returns:
        (n,) group of each token, numbered by first member.

    >>> cut(np.array([2.0, 0.0, 2.0, 2.0, 1.0, 2.0]), 2, "average").tolist()  # 01 02 03 12 13 23
    [0, 1, 0, 1]
    """
    tree = fastcluster.linkage(apart, method, preserve_input=False)
    labels = hierarchy.fcluster(tree, num_groups, criterion="maxclust")
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[labels]


def vector_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """`|x_i - x_j|`, condensed."""
    return euclidean(tokens_ND, tokens_ND)


def row_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """`|R_i - R_j|` of the rows of the cosine distances `R = 1 - X X^T`, condensed.

    `R_i - R_j = -X (x_i - x_j)`, so its length is that of `S^(1/2) (x_i - x_j)` with `S = X^T X`:
    the distance of D numbers, not of N.
    """
    num_tokens, dim = tokens_ND.shape
    if dim >= num_tokens:
        return euclidean(tokens_ND @ tokens_ND.T, tokens_ND)
    values_D, axes_DD = np.linalg.eigh(tokens_ND.T @ tokens_ND)
    return euclidean(tokens_ND @ (axes_DD * np.sqrt(values_D.clip(min=0.0))), tokens_ND)


def cosine_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """`1 - x_i . x_j = |x_i - x_j|^2 / 2`, condensed."""
    apart = vector_distances(tokens_ND)
    apart *= apart
    apart /= 2
    return apart


DISTANCES: dict[str, Distances] = {
    "vectors": vector_distances,
    "rows": row_distances,
    "condensed": cosine_distances,
}


def euclidean(points_NP: np.ndarray, tokens_ND: np.ndarray) -> np.ndarray:
    """The distances of points, condensed, by `|a - b|^2 = |a|^2 + |b|^2 - 2 a.b`.

    That loses digits where a and b are close. Equal tokens above all must be exactly 0 apart, or
    their merges no longer tie. So where any two points of an item are that close, all of its
    points are subtracted one from the other, which takes several times as long.

    Args:
        points_NP: float64, one for each token, the same for equal tokens but for rounding.
        tokens_ND: the tokens.

    >>> points = np.array([[0.0, 3.0], [4.0, 0.0], [0.0, 3.0]])
    >>> euclidean(points, points)
    array([5., 0., 5.])
    """
    apart_NN = points_NP @ points_NP.T
    squares_N = apart_NN.diagonal().copy()
    apart_NN *= -2
    apart_NN += squares_N
    apart_NN += squares_N[:, np.newaxis]
    apart = squareform(apart_NN, checks=False)
    if apart.min() > LOST * squares_N.max():
        return np.sqrt(apart, out=apart)
    _, first, inverse = np.unique(tokens_ND, axis=0, return_index=True, return_inverse=True)
    return pdist(points_NP[first[inverse]])

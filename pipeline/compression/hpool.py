"""Hierarchical pooling (H-Pool) with Ward linkage (AGC paper, section 4.3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import fastcluster
import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform
from threadpoolctl import threadpool_limits

from pipeline.compression import Budget, Budgeted, group_means
from pipeline.tokens import TokenBatch, masked_vectors, unit_vectors

#: If a squared distance is below this fraction of the squared norms, it is recomputed by
#: subtraction to avoid cancellation.
CANCELLATION_LIMIT = 1e-10

#: Maximum number of tokens whose distances are computed together, which takes 0.8 GB in float64.
MAX_LINKED = 8192
#: Maximum number of tokens per block of longer items.
BLOCK_TOKENS = 4096

#: Type of functions that map unit vectors (n, D) float64 to distances in the condensed form of
#: SciPy, (n (n - 1) / 2,).
Distances = Callable[[np.ndarray], np.ndarray]


class HPool(Budgeted["HPool.Spec"]):
    """Groups similar tokens by agglomerative clustering and stores the mean of each group.

    Tokens are normalised to unit length before clustering, and means are normalised afterwards. The
    linkage is computed on the CPU in float64. Items are processed in parallel by as many threads as
    torch uses. An item yields up to K groups. It yields fewer if merges are tied at the cut, for
    example because it has fewer than K distinct tokens. Groups are ordered by their first token.

    All pairs of tokens are compared only in items of up to 8,192 tokens. Longer items are first
    merged in blocks of up to 4,096 adjacent tokens, to max(K, 4096) groups in total, and then the
    means of these groups to K. The second linkage treats each mean as one token.
    """

    class Spec(Budget):
        """Options of `HPool`."""

        name: Literal["hpool"] = "hpool"
        linkage: Literal["vectors", "rows", "condensed"] = "vectors"
        """Observations or distances to which Ward linkage is applied.

        - "vectors": The token vectors, so that each merge minimises the increase in squared error,
          as in the paper.
        - "rows": The rows of the cosine distance matrix, as in the reference implementation and in
          colpali-engine.
        - "condensed": The cosine distances themselves, in place of Euclidean distances.
        """
        num_protected: int = Field(1, ge=0)
        """Number m' of tokens at the beginning of an item that are never merged. The paper
        specifies no value, and the default follows the reference implementation. At most K - 1
        tokens are protected, so that at least one group remains for the other tokens.
        """
        average: Literal["unit", "raw"] = "unit"
        """Vectors that are averaged: "unit" vectors, or the "raw" vectors of an encoder with
        `normalise: false`, as in the paper. Groups are those of the unit vectors in both cases.
        """

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        distances = DISTANCES[self.spec.linkage]
        tokens_BND = unit_vectors(batch)
        assignment_BN = hierarchical_groups(
            tokens_BND, batch.lengths, budgets_B, distances, "ward", self.spec.num_protected
        )
        if self.spec.average == "raw":
            tokens_BND = masked_vectors(batch)
        return group_means(batch, tokens_BND, assignment_BN, budgets_B)


def hierarchical_groups(
    tokens_BND: torch.Tensor,
    lengths_B: torch.Tensor,
    budgets_B: torch.Tensor,
    distances: Distances,
    method: Literal["ward", "average"],
    num_protected: int = 0,
) -> torch.Tensor:
    """Returns the groups (B, N) of agglomerative clustering of each item, -1 at padding.

    Budgets include the groups of protected tokens: the first `num_protected` tokens of an item, at
    most its budget minus 1, form groups of size 1. `distances` computes those of the linkage.
    """

    def group_item(vectors: np.ndarray, length: int, budget: int) -> np.ndarray:
        groups = np.arange(length)
        if length > budget:
            first = min(num_protected, budget - 1)
            tokens = vectors[first:length].astype(np.float64)
            tokens /= np.linalg.norm(tokens, axis=1, keepdims=True).clip(min=1e-12)
            groups[first:] = first + group_tokens(tokens, budget - first, distances, method)
        return groups

    assignment = np.full(tokens_BND.shape[:2], -1, dtype=np.int64)
    results = map_items(group_item, tokens_BND, lengths_B.tolist(), budgets_B.tolist())
    for row, groups in zip(assignment, results, strict=True):
        row[: len(groups)] = groups
    return torch.from_numpy(assignment).to(tokens_BND.device)


def map_items(
    function: Callable[..., np.ndarray], tokens_BND: torch.Tensor, *arguments: Sequence[int]
) -> list[np.ndarray]:
    """Applies a function to the vectors (N, D) and arguments of each item, in parallel threads.

    The number of threads is the one that torch uses, or less if the items have many tokens.
    """
    vectors = tokens_BND.detach().cpu().numpy()
    # The memory of a thread grows with the square of the number of tokens.
    size = max(1, min(tokens_BND.shape[1], MAX_LINKED))
    num_threads = min(torch.get_num_threads(), max(1, 4 * MAX_LINKED**2 // size**2))
    # Matrix products and linkages release the GIL, so one thread per item scales well. BLAS is
    # limited to one thread, because nested threads would compete for the cores and be many times
    # slower.
    with (
        _BLAS_LOCK,
        threadpool_limits(1, "blas"),
        ThreadPoolExecutor(num_threads) as pool,
    ):
        return list(pool.map(function, vectors, *arguments))


#: The limit on BLAS threads affects the whole process, so only one caller may change it at a time.
_BLAS_LOCK = threading.Lock()


def group_tokens(
    tokens_ND: np.ndarray,
    num_groups: int,
    distances: Distances,
    method: Literal["ward", "average"],
) -> np.ndarray:
    """Groups unit vectors by agglomerative clustering, in blocks if there are many.

    Groups are numbered in the order of their first members.
    """
    if len(tokens_ND) <= MAX_LINKED:
        return cut_linkage(distances(tokens_ND), num_groups, method)
    groups_N = block_groups(tokens_ND, max(num_groups, BLOCK_TOKENS), distances, method)
    if num_groups >= BLOCK_TOKENS:
        return groups_N
    centres_GD = group_centres(tokens_ND, groups_N)
    return cut_linkage(distances(centres_GD), num_groups, method)[groups_N]


def block_groups(
    tokens_ND: np.ndarray,
    num_groups: int,
    distances: Distances,
    method: Literal["ward", "average"],
) -> np.ndarray:
    """Groups the tokens of each block of `BLOCK_TOKENS` tokens, see `group_tokens`.

    Blocks have groups in proportion to their tokens.
    """
    num_blocks = -(-len(tokens_ND) // BLOCK_TOKENS)
    shares = np.diff(np.linspace(0, num_groups, num_blocks + 1).astype(int)).tolist()
    parts: list[np.ndarray] = []
    for block_ND, share in zip(np.array_split(tokens_ND, num_blocks), shares, strict=True):
        first = parts[-1].max() + 1 if parts else 0
        parts.append(first + cut_linkage(distances(block_ND), share, method))
    return np.concatenate(parts)


def group_centres(tokens_ND: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Returns the mean (G, D) of each group. That of equal tokens equals them exactly.

    >>> group_centres(np.array([[0.1, 0.0], [0.6, 0.8], [0.1, 0.0]]), np.array([0, 1, 0])).tolist()
    [[0.1, 0.0], [0.6, 0.8]]
    """
    _, first_G, sizes_G = np.unique(groups_N, return_index=True, return_counts=True)
    first_GD = tokens_ND[first_G]
    member_GN = sparse.csr_array((np.ones(len(groups_N)), (groups_N, np.arange(len(groups_N)))))
    return first_GD + member_GN @ (tokens_ND - first_GD[groups_N]) / sizes_G[:, np.newaxis]


def cut_linkage(
    distances: np.ndarray, num_groups: int, method: Literal["ward", "average"]
) -> np.ndarray:
    """Merges tokens into at most `num_groups` groups and returns the group of each token.

    Groups are numbered in the order of their first members. The distances, in the condensed form of
    SciPy, are overwritten.

    >>> distances = np.array([2.0, 0.0, 2.0, 2.0, 1.0, 2.0])  # 01 02 03 12 13 23
    >>> cut_linkage(distances, 2, "average").tolist()
    [0, 1, 0, 1]
    """
    tree = fastcluster.linkage(distances, method, preserve_input=False)
    labels = hierarchy.fcluster(tree, num_groups, criterion="maxclust")
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[labels]


def vector_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """Computes the distances `|x_i - x_j|` in condensed form."""
    return euclidean_distances(tokens_ND, tokens_ND)


def row_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """Computes the distances `|R_i - R_j|` of the rows of `R = 1 - X X^T` in condensed form.

    Because `R_i - R_j = -X (x_i - x_j)`, the distance equals `|S^(1/2) (x_i - x_j)|` with `S = X^T
    X`. This reduces the dimension of the points from N to D.
    """
    num_tokens, dim = tokens_ND.shape
    if dim >= num_tokens:
        return euclidean_distances(tokens_ND @ tokens_ND.T, tokens_ND)
    values_D, axes_DD = np.linalg.eigh(tokens_ND.T @ tokens_ND)
    points_ND = tokens_ND @ (axes_DD * np.sqrt(values_D.clip(min=0.0)))
    return euclidean_distances(points_ND, tokens_ND)


def cosine_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """Computes the distances `1 - x_i . x_j = |x_i - x_j|^2 / 2` in condensed form."""
    distances = vector_distances(tokens_ND)
    distances *= distances
    distances /= 2
    return distances


DISTANCES: dict[str, Distances] = {
    "vectors": vector_distances,
    "rows": row_distances,
    "condensed": cosine_distances,
}


def euclidean_distances(points_NP: np.ndarray, tokens_ND: np.ndarray) -> np.ndarray:
    """Computes Euclidean distances in condensed form by `|a - b|^2 = |a|^2 + |b|^2 - 2 a.b`.

    The formula suffers from cancellation if two points are close to each other. In particular, the
    distance of equal tokens must be exactly 0, because otherwise their merges are not tied. If any
    two points of an item are too close, all distances of the item are computed by subtraction,
    which is several times slower. Equal points, which may differ by rounding errors, are identified
    by their tokens.

    >>> points = np.array([[0.0, 3.0], [4.0, 0.0], [0.0, 3.0]])
    >>> euclidean_distances(points, points)
    array([5., 0., 5.])
    """
    squared_NN = points_NP @ points_NP.T
    squares_N = squared_NN.diagonal().copy()
    squared_NN *= -2
    squared_NN += squares_N
    squared_NN += squares_N[:, np.newaxis]
    distances = squareform(squared_NN, checks=False)
    if distances.min() > CANCELLATION_LIMIT * squares_N.max():
        return np.sqrt(distances, out=distances)
    _, first, inverse = np.unique(tokens_ND, axis=0, return_index=True, return_inverse=True)
    return pdist(points_NP[first[inverse]])

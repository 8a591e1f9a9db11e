"""The pool of candidates that is reranked, and the ranking that comes of it."""

from __future__ import annotations

import torch


def pairs_of(first_QB: torch.Tensor, size: int) -> torch.Tensor:
    """(P, 2) int64: each query with its `size` best candidates of the first stage.

    >>> pairs_of(torch.tensor([[0.1, 0.9, 0.5]]), 2).tolist()
    [[0, 1], [0, 2]]
    """
    # As a ranking has them: of equal scores the first.
    best_QK = first_QB.argsort(dim=1, descending=True, stable=True)[:, :size]
    query_QK = torch.arange(len(first_QB), device=first_QB.device).unsqueeze(1).expand_as(best_QK)
    return torch.stack([query_QK, best_QK], dim=2).reshape(-1, 2)


def reranked(
    first_QB: torch.Tensor, pairs_P2: torch.Tensor, scores_P: torch.Tensor, add_first: bool = False
) -> torch.Tensor:
    """(Q, B) float64: a query's pool by the joint encoder's scores, and all others below.

    Args:
        add_first: whether the score of the first stage is added to the joint encoder's.

    >>> first = torch.tensor([[0.1, 0.9, 0.5]])
    >>> both = reranked(first, pairs_of(first, 2), torch.tensor([-1.0, 2.0]))
    >>> both.argsort(descending=True).tolist()
    [[2, 1, 0]]
    """
    query_P, candidate_P = pairs_P2.unbind(1)
    first_QB, scores_P = first_QB.double(), scores_P.double()
    if add_first:
        scores_P = scores_P + first_QB[query_P, candidate_P]
    if not len(scores_P):
        return first_QB
    above = first_QB.max() + 1 - scores_P.min()
    return first_QB.index_put((query_P, candidate_P), scores_P + above)

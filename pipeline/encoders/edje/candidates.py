"""Selects candidates for reranking and merges their new scores into the ranking."""

from __future__ import annotations

import torch


def candidate_pairs(first_QB: torch.Tensor, rerank_depth: int) -> torch.Tensor:
    """Returns pairs (query, candidate), (P, 2) int64, of each query's best candidates, best first.

    >>> candidate_pairs(torch.tensor([[0.1, 0.9, 0.5]]), 2).tolist()
    [[0, 1], [0, 2]]
    """
    # A stable sort keeps ties in order, like the search.
    order_QB = first_QB.argsort(dim=1, descending=True, stable=True)
    best_QK = order_QB[:, :rerank_depth]
    query_QK = torch.arange(len(first_QB), device=first_QB.device).unsqueeze(1).expand_as(best_QK)
    return torch.stack([query_QK, best_QK], dim=2).reshape(-1, 2)


def rerank_scores(
    first_QB: torch.Tensor, pairs_P2: torch.Tensor, scores_P: torch.Tensor, add_first: bool = False
) -> torch.Tensor:
    """Shifts scores, (Q, B) float64, such that the reranked candidates are above all others.

    The others keep the order of the first stage. `add_first` adds its scores to those of the joint
    encoder, `scores_P`.

    >>> first = torch.tensor([[0.1, 0.9, 0.5]])
    >>> both = rerank_scores(first, candidate_pairs(first, 2), torch.tensor([-1.0, 2.0]))
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

"""Training losses over scores, and differentiable MaxSim scores.

Shapes: Q queries of M tokens, B documents of N tokens, vectors of D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from pipeline.runtime.kernels import triton_module

#: Aggregation of the similarities of a query's tokens.
Reduction = Literal["mean", "sum"]
#: Target of the contrastive loss for several positives per query.
Positives = Literal["any", "all"]

#: Maximum number of similarities in memory at once, by device type.
BLOCK_NUMBERS = {"cpu": 1 << 22}
BLOCK_NUMBERS_ELSEWHERE = 1 << 28
#: The similarity of a padding position: beyond every cosine, and finite in half precision.
LOWEST = -1e4


def late_scores(
    queries_QMD: torch.Tensor,
    query_mask_QM: torch.Tensor,
    docs_BND: torch.Tensor,
    doc_mask_BN: torch.Tensor,
    *,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Computes MaxSim of each query with each document, by default as the mean over query tokens.

        s_late(q, d) = 1/|q| * sum over i of max over j of <q_i, d_j>          (SMART, eq. 4)

    The reduction `sum` leaves out the factor 1/|q| (ColBERT).

    The gradient of a maximum is that of the first maximal token, so the backward pass stores no
    tensor of size Q x M x B x N, and the forward pass computes it in blocks. Documents and queries
    without tokens score 0.

    Args:
        queries_QMD: Query token vectors.
        query_mask_QM: bool, valid query tokens.
        docs_BND: Document token vectors.
        doc_mask_BN: bool, valid document tokens.
        reduction: Aggregation over the query's tokens.

    Returns:
        (Q, B) float32 scores.

    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> docs = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    >>> mask = torch.ones(1, 2, dtype=torch.bool)
    >>> late_scores(queries, mask, docs, mask).tolist()
    [[0.75]]
    >>> late_scores(queries, mask, docs, mask, reduction="sum").tolist()
    [[1.5]]
    """
    with torch.autocast(queries_QMD.device.type, enabled=False):
        best_QMB = _best(queries_QMD, docs_BND, doc_mask_BN)
    best_QMB = best_QMB.masked_fill(~doc_mask_BN.any(dim=1), 0.0)
    best_QMB = best_QMB.masked_fill(~query_mask_QM.unsqueeze(2), 0.0)
    scores_QB = best_QMB.sum(dim=1)
    if reduction == "sum":
        return scores_QB
    return scores_QB / query_mask_QM.sum(dim=1, keepdim=True).clamp_min(1)


def _best(
    queries_QMD: torch.Tensor, docs_BND: torch.Tensor, doc_mask_BN: torch.Tensor
) -> torch.Tensor:
    """Returns the (Q, M, B) similarity of each query token with the best token of each document."""
    num_queries, num_tokens, dim = queries_QMD.shape
    flat_TD = queries_QMD.reshape(-1, dim)
    if {flat_TD.dtype, docs_BND.dtype} != {torch.bfloat16}:
        flat_TD, docs_BND = flat_TD.float(), docs_BND.float()
    kernels = triton_module("pipeline.train.triton_kernels", flat_TD.device)
    if kernels and dim <= kernels.MAX_DIM and flat_TD.numel() and docs_BND.numel():
        best_TB = kernels.Best.apply(flat_TD, docs_BND, doc_mask_BN, LOWEST)
    else:
        best_TB = _Best.apply(flat_TD.float(), docs_BND.float(), doc_mask_BN)
    return best_TB.reshape(num_queries, num_tokens, len(docs_BND))


class _Best(torch.autograd.Function):
    """(T, B) similarity of each query token with its most similar token of each document."""

    @staticmethod
    def forward(ctx, flat_TD, docs_BND, doc_mask_BN):
        num_docs, num_tokens, _ = docs_BND.shape
        best = flat_TD.new_full((len(flat_TD), num_docs), LOWEST)
        winner = torch.zeros(best.shape, dtype=torch.int64, device=best.device)
        if num_docs and num_tokens:
            for rows in _blocks(flat_TD, num_docs * num_tokens):
                sim_TBN = flat_TD[rows] @ docs_BND.reshape(-1, docs_BND.shape[2]).T
                sim_TBN = sim_TBN.reshape(-1, num_docs, num_tokens)
                sim_TBN.masked_fill_(~doc_mask_BN, LOWEST)
                torch.max(sim_TBN, dim=2, out=(best[rows], winner[rows]))
        ctx.save_for_backward(flat_TD, docs_BND, winner)
        return best

    @staticmethod
    def backward(ctx, grad_TB):
        flat_TD, docs_BND, winner_TB = ctx.saved_tensors
        num_docs, num_tokens, dim = docs_BND.shape
        docs_LD = docs_BND.reshape(-1, dim)
        grad_queries, grad_LD = torch.zeros_like(flat_TD), docs_LD.new_zeros(docs_LD.shape)
        for rows in _blocks(flat_TD, num_docs * num_tokens):
            # With one nonzero per query token and document, two matrix products are the whole
            # gradient and deterministic, unlike the sums of an atomic scatter.
            chosen_TBN = flat_TD.new_zeros(len(grad_TB[rows]), num_docs, num_tokens)
            chosen_TBN.scatter_(2, winner_TB[rows].unsqueeze(2), grad_TB[rows].unsqueeze(2))
            chosen_TL = chosen_TBN.reshape(len(chosen_TBN), -1)
            grad_queries[rows] = chosen_TL @ docs_LD
            grad_LD.addmm_(chosen_TL.T, flat_TD[rows])
        return grad_queries, grad_LD.reshape(docs_BND.shape), None


def _blocks(rows: torch.Tensor, numbers_per_row: int) -> Iterator[slice]:
    """Yields slices of rows that fit into a block. Each slice contains at least one row."""
    budget = BLOCK_NUMBERS.get(rows.device.type, BLOCK_NUMBERS_ELSEWHERE)
    size = max(1, budget // max(1, numbers_per_row))
    for start in range(0, len(rows), size):
        yield slice(start, min(start + size, len(rows)))


def info_nce(
    scores_QB: torch.Tensor,
    positive_QB: torch.Tensor,
    temperature: float | torch.Tensor,
    positives: Positives = "any",
) -> torch.Tensor:
    """Computes the contrastive loss of each query with a positive.

    With one positive per query, this is InfoNCE (SMART, eq. 1). Several positives are alternatives
    ("any"; SaMer, eq. 7), or share the target probability equally ("all"):

        any: -log( sum over positives exp(s / tau) / sum over the batch exp(s / tau) )
        all: -mean over positives of log( exp(s / tau) / sum over the batch exp(s / tau) )

    Args:
        scores_QB: Scores of each query with each document of the batch.
        positive_QB: bool, relevance of each document to each query.
        temperature: Temperature tau.
        positives: Target of queries with several positives.

    Returns:
        Losses (A,) of the queries that have a positive, in order.

    >>> scores, positive = torch.tensor([[2.0, 0.0]]), torch.tensor([[True, False]])
    >>> round(info_nce(scores, positive, 1.0).item(), 4)
    0.1269
    >>> both = torch.tensor([[True, True]])
    >>> round(info_nce(scores, both, 1.0, "all").item(), 4)
    1.1269
    """
    log_p_QB = (scores_QB.float() / temperature).log_softmax(dim=1)
    if positives == "any":
        log_positive_Q = log_p_QB.masked_fill(~positive_QB, -torch.inf).logsumexp(dim=1)
    else:
        num_positives_Q = positive_QB.sum(dim=1).clamp_min(1)
        log_positive_Q = log_p_QB.masked_fill(~positive_QB, 0.0).sum(dim=1) / num_positives_Q
    # An infinity that is masked afterwards would still make its gradient NaN.
    return -log_positive_Q[positive_QB.any(dim=1)]


def kl_divergence(
    scores_QB: torch.Tensor, teacher_QB: torch.Tensor, temperature: float | torch.Tensor
) -> torch.Tensor:
    """Computes KL(teacher || student) of each query over the documents that the teacher scored.

    Args:
        scores_QB: Scores of the student.
        teacher_QB: Scores of the teacher on the scale of `scores / temperature`, NaN where there
            are none.
        temperature: Temperature of the student's scores.

    Returns:
        Divergences (A,) of the queries with at least two scored documents, in order.

    >>> same = torch.tensor([[1.0, 2.0, 0.0]])
    >>> round(kl_divergence(same, same, 1.0).item(), 6)
    0.0
    """
    is_scored_QB = ~teacher_QB.isnan()
    is_compared_Q = is_scored_QB.sum(dim=1) > 1
    is_scored, teacher = is_scored_QB[is_compared_Q], teacher_QB[is_compared_Q]
    lowest = torch.finfo(torch.float32).min
    student = (scores_QB[is_compared_Q].float() / temperature).masked_fill(~is_scored, lowest)
    teacher = teacher.float().masked_fill(~is_scored, lowest)
    student, teacher = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    return (teacher.exp() * (teacher - student)).sum(dim=1)


def margin_mse(
    scores_QB: torch.Tensor, teacher_QB: torch.Tensor, positive_QB: torch.Tensor
) -> torch.Tensor:
    """Computes MarginMSE (Hofstätter et al., 2020) between student and teacher margins.

        ((s_p - s_n) - (t_p - t_n))^2

    Args:
        scores_QB: Scores of the student.
        teacher_QB: Scores of the teacher, NaN where there are none.
        positive_QB: bool, relevance of each document to each query.

    Returns:
        Squared errors (P,) of all scored pairs (p, n) of a positive and another document.

    >>> teacher, positive = torch.tensor([[3.0, 1.0]]), torch.tensor([[True, False]])
    >>> margin_mse(torch.tensor([[5.0, 4.0]]), teacher, positive).item()
    1.0
    """
    is_scored_QB = ~teacher_QB.isnan()
    is_pair_QBB = (positive_QB & is_scored_QB).unsqueeze(2) & (~positive_QB & is_scored_QB)[:, None]
    off_QB = scores_QB.float() - teacher_QB.nan_to_num(nan=0.0)
    off_QBB = off_QB.unsqueeze(2) - off_QB.unsqueeze(1)
    return off_QBB[is_pair_QBB].square()

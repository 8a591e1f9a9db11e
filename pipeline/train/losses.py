"""Objectives over scores, and the scores themselves with their gradients.

Shapes: Q queries of M tokens, B documents of N tokens, D numbers each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Numbers of the largest tensor of similarities that is held at once, by kind of device.
BLOCK_NUMBERS = {"cpu": 1 << 22}
BLOCK_NUMBERS_ELSEWHERE = 1 << 28
#: The similarity of a padding position: beyond every cosine, and finite in half precision.
LOWEST = -1e4


def late_scores(
    queries_QMD: torch.Tensor,
    query_mask_QM: torch.Tensor,
    docs_BND: torch.Tensor,
    doc_mask_BN: torch.Tensor,
) -> torch.Tensor:
    """(Q, B) float32: MaxSim of each query with each document, the mean over the query's tokens.

        s_late(q, d) = 1/|q| * sum over i of max over j of <q_i, d_j>          (SMART, eq. 4)

    The gradient of a maximum is that of its winner; of equal ones the first. So nothing of size
    Q x M x B x N is kept for the backward pass, and block by block is never there as a whole.
    A document without tokens scores 0, as does a query without.

    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> docs = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    >>> every = torch.ones(1, 2, dtype=torch.bool)
    >>> late_scores(queries, every, docs, every).tolist()
    [[0.75]]
    """
    with torch.autocast(queries_QMD.device.type, enabled=False):
        best_QMB = _Best.apply(queries_QMD.float(), docs_BND.float(), doc_mask_BN)
    best_QMB = best_QMB.masked_fill(~doc_mask_BN.any(dim=1), 0.0)
    best_QMB = best_QMB.masked_fill(~query_mask_QM.unsqueeze(2), 0.0)
    return best_QMB.sum(dim=1) / query_mask_QM.sum(dim=1, keepdim=True).clamp_min(1)


class _Best(torch.autograd.Function):
    """(Q, M, B): the similarity of each query token with its best token of each document."""

    @staticmethod
    def forward(ctx, queries_QMD, docs_BND, doc_mask_BN):
        flat_TD = queries_QMD.reshape(-1, queries_QMD.shape[2])
        num_docs, num_tokens, _ = docs_BND.shape
        best = flat_TD.new_full((len(flat_TD), num_docs), LOWEST)
        winner = torch.zeros(best.shape, dtype=torch.int64, device=best.device)
        if num_docs and num_tokens:
            for rows in _blocks(flat_TD, num_docs * num_tokens):
                sim_TBN = flat_TD[rows] @ docs_BND.reshape(-1, docs_BND.shape[2]).T
                sim_TBN = sim_TBN.reshape(-1, num_docs, num_tokens)
                sim_TBN.masked_fill_(~doc_mask_BN, LOWEST)
                torch.max(sim_TBN, dim=2, out=(best[rows], winner[rows]))
        ctx.save_for_backward(queries_QMD, docs_BND, winner)
        return best.reshape(*queries_QMD.shape[:2], num_docs)

    @staticmethod
    def backward(ctx, grad_QMB):
        queries_QMD, docs_BND, winner_TB = ctx.saved_tensors
        flat_TD = queries_QMD.reshape(-1, queries_QMD.shape[2])
        grad_TB = grad_QMB.reshape(winner_TB.shape)
        num_docs, num_tokens, dim = docs_BND.shape
        grad_queries, grad_docs = torch.zeros_like(flat_TD), torch.zeros_like(docs_BND)
        docs_LD, grad_LD = docs_BND.reshape(-1, dim), grad_docs.reshape(-1, dim)
        for rows in _blocks(flat_TD, num_docs * num_tokens):
            # As a matrix with one number a query token and document, two products are the whole
            # gradient, in one order: the sums of an atomic scatter would differ by run.
            chosen_TBN = flat_TD.new_zeros(len(grad_TB[rows]), num_docs, num_tokens)
            chosen_TBN.scatter_(2, winner_TB[rows].unsqueeze(2), grad_TB[rows].unsqueeze(2))
            chosen_TL = chosen_TBN.reshape(len(chosen_TBN), -1)
            grad_queries[rows] = chosen_TL @ docs_LD
            grad_LD.addmm_(chosen_TL.T, flat_TD[rows])
        return grad_queries.reshape(queries_QMD.shape), grad_docs, None


def _blocks(rows: torch.Tensor, numbers_a_row: int) -> Iterator[slice]:
    """Slices of the rows, so that each has at most a block's numbers, or is one row."""
    budget = BLOCK_NUMBERS.get(rows.device.type, BLOCK_NUMBERS_ELSEWHERE)
    size = max(1, budget // max(1, numbers_a_row))
    for start in range(0, len(rows), size):
        yield slice(start, min(start + size, len(rows)))


def info_nce(
    scores_QB: torch.Tensor, positive_QB: torch.Tensor, temperature: float | torch.Tensor
) -> torch.Tensor:
    """The mean over queries of the contrastive loss with several positives (SaMer, eq. 7):

        -log( sum over positives exp(s / tau) / sum over the batch exp(s / tau) )

    With one positive a query that is InfoNCE (SMART, eq. 1). Queries without a positive have no
    loss and do not count.

    Args:
        positive_QB: bool, which documents of the batch are relevant to which query.

    >>> scores, positive = torch.tensor([[2.0, 0.0]]), torch.tensor([[True, False]])
    >>> round(info_nce(scores, positive, 1.0).item(), 4)
    0.1269
    """
    losses_A = info_nce_each(scores_QB, positive_QB, temperature)
    return losses_A.sum() / max(1, len(losses_A))


def info_nce_each(
    scores_QB: torch.Tensor, positive_QB: torch.Tensor, temperature: float | torch.Tensor
) -> torch.Tensor:
    """(A,) the loss of `info_nce` of each query that has a positive."""
    log_p_QB = (scores_QB.float() / temperature).log_softmax(dim=1)
    of_positives_Q = log_p_QB.masked_fill(~positive_QB, -torch.inf).logsumexp(dim=1)
    # An infinity that is masked afterwards would still make its gradient NaN.
    return -of_positives_Q[positive_QB.any(dim=1)]


def kl_divergence(
    scores_QB: torch.Tensor, teacher_QB: torch.Tensor, temperature: float | torch.Tensor
) -> torch.Tensor:
    """The mean over queries of KL(teacher || student), over the documents that the teacher scored.

    Args:
        teacher_QB: the teacher's scores on the scale of `scores / temperature`; NaN: not scored.

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
    return (teacher.exp() * (teacher - student)).sum() / is_compared_Q.sum().clamp_min(1)


def margin_mse(
    scores_QB: torch.Tensor, teacher_QB: torch.Tensor, positive_QB: torch.Tensor
) -> torch.Tensor:
    """MarginMSE (Hofstätter et al., 2020): margins of positives over negatives as the teacher's.

        mean over scored pairs (p, n) of ((s_p - s_n) - (t_p - t_n))^2

    Args:
        teacher_QB: the teacher's scores; NaN: not scored.

    >>> teacher, positive = torch.tensor([[3.0, 1.0]]), torch.tensor([[True, False]])
    >>> margin_mse(torch.tensor([[5.0, 4.0]]), teacher, positive).item()
    1.0
    """
    is_scored_QB = ~teacher_QB.isnan()
    is_pair_QBB = (positive_QB & is_scored_QB).unsqueeze(2) & (~positive_QB & is_scored_QB)[:, None]
    off_QB = scores_QB.float() - teacher_QB.nan_to_num(nan=0.0)
    off_QBB = off_QB.unsqueeze(2) - off_QB.unsqueeze(1)
    squares = off_QBB.square().masked_fill(~is_pair_QBB, 0.0)
    return squares.sum() / is_pair_QBB.sum().clamp_min(1)

"""Training losses of EDJE (section 4) and sampling of hard negatives.

Shapes: Q texts of L tokens, B items, P pairs.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def matching_loss(logits_P: torch.Tensor, is_match_P: torch.Tensor) -> torch.Tensor:
    """Computes the image-text matching loss (P,), the binary cross-entropy of each pair.

    >>> matching_loss(torch.tensor([0.0]), torch.tensor([True])).tolist()
    [0.6931471824645996]
    """
    target_P = is_match_P.float()
    return functional.binary_cross_entropy_with_logits(logits_P.float(), target_P, reduction="none")


def distillation_loss(student_P: torch.Tensor, teacher_P: torch.Tensor) -> torch.Tensor:
    """Computes the local-to-compressed distillation loss (P,) from the logits of each pair.

    -[y_t log(y_s) + (1 - y_t) log(1 - y_s)], y = sigmoid(logit)            (section 4)
    """
    target_P = teacher_P.float().sigmoid()
    return functional.binary_cross_entropy_with_logits(
        student_P.float(), target_P, reduction="none"
    )


def recovery_loss(predicted_QP: torch.Tensor, target_QP: torch.Tensor) -> torch.Tensor:
    """Computes the text-embedding recovery loss (Q,).

        1 - cos(f(t), g(t))                                                     (section 4)

    >>> recovery_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])).tolist()
    [0.0]
    """
    return 1 - functional.cosine_similarity(predicted_QP.float(), target_QP.float(), dim=-1)


def mask_words(
    ids_QL: torch.Tensor, is_word_QL: torch.Tensor, mask_id: int, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks words of texts with probability `share`. Also returns the masked positions (Q, L)."""
    # Sampled on the CPU, because checkpoints contain the state of its generator.
    is_sampled_QL = (torch.rand(ids_QL.shape) < share).to(ids_QL.device)
    is_masked_QL = is_sampled_QL & is_word_QL
    return ids_QL.masked_fill(is_masked_QL, mask_id), is_masked_QL


def masked_language_loss(logits_TW: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Computes the masked language modelling loss (T,), the cross-entropy of each masked token."""
    return functional.cross_entropy(logits_TW.float(), ids_T, reduction="none")


def hard_negatives(
    similarity_AB: torch.Tensor,
    allowed_AB: torch.Tensor,
    count: int,
    temperature: float | None = None,
    top_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects K hard negatives (A, K) for each anchor, and returns their validity (A, K).

    Args:
        similarity_AB: Similarities computed by the embedding model.
        allowed_AB: True for candidates that are not relevant to the anchor.
        count: Number K of negatives per anchor.
        temperature: If None, the K most similar candidates are selected. Otherwise K are sampled
            without replacement with probabilities softmax(similarity / temperature).
        top_k: Number of most similar candidates to sample from, or None for all.

    >>> similarity = torch.tensor([[0.9, 0.1, 0.5]])
    >>> rows, valid = hard_negatives(similarity, torch.tensor([[False, True, True]]), 3)
    >>> rows.tolist(), valid.tolist()
    ([[2, 1, 0]], [[True, True, False]])
    """
    num_candidates = similarity_AB.shape[1]
    key_AB = similarity_AB.double().masked_fill(~allowed_AB, -torch.inf)
    if temperature is not None:
        best_AT = key_AB.topk(min(top_k or num_candidates, num_candidates), dim=1).indices
        is_best_AB = torch.zeros_like(allowed_AB).scatter(1, best_AT, True)
        # The top K logits with Gumbel noise are a sample without replacement (Vieira, 2014).
        noise_AB = -torch.empty(key_AB.shape, dtype=torch.float64).exponential_().log()
        key_AB = key_AB / temperature + noise_AB.to(key_AB.device)
        key_AB = key_AB.masked_fill(~is_best_AB, -torch.inf)
    key_AK, row_AK = key_AB.topk(min(count, num_candidates), dim=1)
    return row_AK, key_AK > -torch.inf

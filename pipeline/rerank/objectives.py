"""Training objectives of EDJE (section 4): matching, masked words, recovery, distillation.

Shapes: Q texts of L tokens, B items, P pairs.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def matching(logits_P: torch.Tensor, is_match_P: torch.Tensor) -> torch.Tensor:
    """Returns the image-text matching loss (P,): the binary cross-entropy of each pair.

    >>> matching(torch.tensor([0.0]), torch.tensor([True])).tolist()
    [0.6931471824645996]
    """
    target_P = is_match_P.float()
    return functional.binary_cross_entropy_with_logits(logits_P.float(), target_P, reduction="none")


def distillation(student_P: torch.Tensor, teacher_P: torch.Tensor) -> torch.Tensor:
    """Returns the local-to-compressed distillation loss (P,) of the logits of each pair.

    -[y_t log(y_s) + (1 - y_t) log(1 - y_s)], y = sigmoid(logit)            (section 4)
    """
    target_P = teacher_P.float().sigmoid()
    return functional.binary_cross_entropy_with_logits(
        student_P.float(), target_P, reduction="none"
    )


def recovery(made_QP: torch.Tensor, embedding_QP: torch.Tensor) -> torch.Tensor:
    """Returns the text-embedding recovery loss (Q,).

        1 - cos(f(t), g(t))                                                     (section 4)

    >>> recovery(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])).tolist()
    [0.0]
    """
    return 1 - functional.cosine_similarity(made_QP.float(), embedding_QP.float(), dim=-1)


def masked(
    ids_QL: torch.Tensor, is_word_QL: torch.Tensor, mask_id: int, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks random words of texts.

    Args:
        ids_QL: int64, token ids.
        is_word_QL: bool, the tokens that may be masked: neither padding nor special tokens.
        mask_id: Token id of the mask.
        share: Probability that a word is masked.

    Returns:
        The token ids with the mask, and the masked positions (Q, L) bool.
    """
    # On the CPU, because checkpoints hold the state of its generator.
    is_chosen_QL = (torch.rand(ids_QL.shape) < share).to(ids_QL.device)
    is_masked_QL = is_chosen_QL & is_word_QL
    return ids_QL.masked_fill(is_masked_QL, mask_id), is_masked_QL


def masked_words(logits_TW: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Returns the masked language modelling loss (T,): the cross-entropy of each masked word."""
    return functional.cross_entropy(logits_TW.float(), ids_T, reduction="none")


def hard_negatives(
    similarity_AB: torch.Tensor,
    allowed_AB: torch.Tensor,
    count: int,
    temperature: float | None = None,
    top_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the negatives of each anchor, int64 (A, K), and which of them exist, bool (A, K).

    Args:
        similarity_AB: Similarities computed by the embedding model.
        allowed_AB: bool, the candidates that are not relevant to the anchor.
        count: K. An anchor with fewer candidates gets all of them.
        temperature: None takes the K most similar candidates. A number draws K without
            replacement, each with probability softmax(similarity / temperature) among the rest.
        top_k: Restricts the draw to the most similar candidates; None allows all.

    >>> similarity = torch.tensor([[0.9, 0.1, 0.5]])
    >>> rows, there = hard_negatives(similarity, torch.tensor([[False, True, True]]), 3)
    >>> rows.tolist(), there.tolist()
    ([[2, 1, 0]], [[True, True, False]])
    """
    num_candidates = similarity_AB.shape[1]
    key_AB = similarity_AB.double().masked_fill(~allowed_AB, -torch.inf)
    if temperature is not None:
        best_AT = key_AB.topk(min(top_k or num_candidates, num_candidates), dim=1).indices
        is_best_AB = torch.zeros_like(allowed_AB).scatter(1, best_AT, True)
        # The largest of logits with Gumbel noise are a draw without replacement (Vieira, 2014).
        noise_AB = -torch.empty(key_AB.shape, dtype=torch.float64).exponential_().log()
        key_AB = key_AB / temperature + noise_AB.to(key_AB.device)
        key_AB = key_AB.masked_fill(~is_best_AB, -torch.inf)
    key_AK, row_AK = key_AB.topk(min(count, num_candidates), dim=1)
    return row_AK, key_AK > -torch.inf

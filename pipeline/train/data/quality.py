"""Validation metrics that are computed during training, for retrieval and grounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.tokens import TokenBatch

if TYPE_CHECKING:
    from pipeline.eval.diagnostics import Matches
    from pipeline.search.packed import PackedVectors

#: Cutoff of nDCG.
CUTOFF = 10


#: Metrics by name, with one value per validation query or phrase. Higher is better.
Quality = dict[str, np.ndarray]


def ranking(scores_QB: torch.Tensor, positive_QB: torch.Tensor) -> Quality:
    """Computes R@1, R@5, R@10 (success) and nDCG@10 of each query.

    Queries without a relevant document are omitted. Ties are ranked in the order of the documents.

    >>> scores = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.2, 0.0]])
    >>> relevant = torch.tensor([[True, False, False], [True, False, False]])
    >>> {name: values.round(3).tolist() for name, values in ranking(scores, relevant).items()}
    {'R@1': [0.0, 1.0], 'R@5': [1.0, 1.0], 'R@10': [1.0, 1.0], 'nDCG@10': [0.631, 1.0]}
    """
    judged_Q = positive_QB.any(dim=1)
    scores_QB, positive_QB = scores_QB[judged_Q], positive_QB[judged_Q]
    order_QB = scores_QB.argsort(dim=1, descending=True, stable=True)[:, :CUTOFF]
    found_QK = positive_QB.gather(1, order_QB).double()
    quality = {f"R@{k}": found_QK[:, :k].amax(dim=1) for k in (1, 5, 10)}
    gains_K = 1 / torch.arange(2, CUTOFF + 2, device=scores_QB.device).double().log2()
    ideal_Q = gains_K.cumsum(0)[positive_QB.sum(dim=1).clamp(max=CUTOFF) - 1]
    gained_Q = (found_QK * gains_K[: found_QK.shape[1]]).sum(dim=1)
    quality["nDCG@10"] = gained_Q / ideal_Q
    return {name: values.cpu().numpy() for name, values in quality.items()}


def pairwise(positive_Q: torch.Tensor, negative_Q: torch.Tensor) -> np.ndarray:
    """Computes pairwise accuracy (Q,): 1 if the positive scores above the hard negative, else 0.

    Ties count as 0 (SMART, appendix A).

    >>> pairwise(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0.2, 0.5, 0.3])).tolist()
    [1.0, 0.0, 0.0]
    """
    return (positive_Q > negative_Q).double().cpu().numpy()


def means(quality: Quality) -> dict[str, float]:
    """Returns the mean of each metric."""
    return {name: float(values.mean()) for name, values in quality.items()}


def utilisation(
    queries: TokenBatch, documents: TokenBatch, positive_QB: torch.Tensor
) -> dict[str, np.ndarray]:
    """Computes how evenly the vectors of relevant documents are matched (AGC, section 6.5).

    Returns one value each: `CV`, the coefficient of variation of the matching strengths in percent;
    `Gini`, their Gini coefficient; and `Used`, the fraction of the vectors of relevant documents
    that are the best match of a token of a relevant query.
    """
    from pipeline.eval.diagnostics import coefficient_of_variation, gini, matching_strength

    matches, _ = relevant_matches(queries, documents, positive_QB)
    if not len(matches.document):
        return {}
    strength = matching_strength(matches, documents.mask.shape[1])
    relevant_B = positive_QB.any(dim=0).to(documents.mask.device)
    num_vectors = int(documents.mask[relevant_B].sum())
    values = {
        "CV": coefficient_of_variation(strength),
        "Gini": gini(strength),
        "Used": len(np.unique(matches.vectors)) / max(1, num_vectors),
    }
    return {name: np.array([value]) for name, value in values.items() if value is not None}


def relevant_matches(
    queries: TokenBatch, documents: TokenBatch, positive_QB: torch.Tensor
) -> tuple[Matches, PackedVectors]:
    """Returns the match records of queries and their relevant documents, and the packed documents.

    Documents without vectors have no records.
    """
    from pipeline.eval.diagnostics import match_pairs
    from pipeline.search.packed import PackedVectors

    mask_BN = documents.mask.cpu()
    packed = PackedVectors.from_values(documents.vectors.cpu().float()[mask_BN], mask_BN.sum(dim=1))
    query_vectors = [
        tokens_MD[mask_M]
        for tokens_MD, mask_M in zip(queries.vectors.cpu().float(), queries.mask.cpu(), strict=True)
    ]
    positive_QB = positive_QB.cpu() & mask_BN.any(dim=1)
    rows = [positive_B.nonzero().flatten().numpy() for positive_B in positive_QB]
    return match_pairs(query_vectors, packed, rows), packed


def grounding(
    phrases: TokenBatch, documents: TokenBatch, locations: TokenBatch, boxes: Sequence[np.ndarray]
) -> Quality:
    """Computes BoxMass, RegionHit and CoverageIoU of phrases in their documents (SaMer, eq. 8-10).

    The relevance of an input token is the mean similarity between the tokens of the phrase and the
    vector to which the input token is assigned. Rows are phrases: `documents` have assignments,
    `locations` the extents of the input tokens, and `boxes` are (M, 4).
    """
    from pipeline.eval.relevance_maps import grounding_metrics, region_mask, relevance_map

    weight_PM1 = phrases.mask.unsqueeze(2) / phrases.mask.sum(dim=1)[:, None, None]
    sim_PK = (phrases.vectors.float() @ documents.vectors.float().mT * weight_PM1).sum(dim=1)
    assignment_PN = documents.assignment
    if assignment_PN is None:  # uncompressed: each token is its own vector
        assignment_PN = torch.arange(locations.mask.shape[1], device=sim_PK.device)
        assignment_PN = assignment_PN.expand_as(locations.mask).masked_fill(~locations.mask, -1)
    sim_PN = sim_PK.gather(1, assignment_PN.clamp_min(0)).masked_fill(assignment_PN < 0, torch.nan)
    similarity_PN = sim_PN.double().cpu().numpy()
    assert locations.extents is not None
    extents_PN4 = locations.extents[..., :4].double().cpu().numpy()
    found = [
        grounding_metrics(relevance_map(similarity_N, extents_N4), region_mask(boxes_M4.tolist()))
        for similarity_N, extents_N4, boxes_M4 in zip(
            similarity_PN, extents_PN4, boxes, strict=True
        )
    ]
    names = ("BoxMass", "RegionHit", "CoverageIoU")
    return dict(zip(names, np.array(found, np.float64).T, strict=True))

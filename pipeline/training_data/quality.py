"""Validation metrics during training: rankings of documents, and grounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.tokens import TokenBatch

CUTOFF = 10  # of nDCG


#: Metrics by name, with one value per validation query or phrase; higher is better.
Quality = dict[str, np.ndarray]


def ranking(scores_QB: torch.Tensor, positive_QB: torch.Tensor) -> Quality:
    """Whether a relevant document is among the best 1, 5 and 10 of each query, and nDCG@10.

    Queries without a relevant document are left out; of equal scores the first are the best.

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
    """(Q,) 1 where a query's positive scores higher than its hard negative (SMART, appendix A).

    Equal scores count as wrong: neither is the higher one.

    >>> pairwise(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0.2, 0.5, 0.3])).tolist()
    [1.0, 0.0, 0.0]
    """
    return (positive_Q > negative_Q).double().cpu().numpy()


def means(quality: Quality) -> dict[str, float]:
    """The mean of each measure."""
    return {name: float(values.mean()) for name, values in quality.items()}


def grounding(
    phrases: TokenBatch, documents: TokenBatch, places: TokenBatch, boxes: Sequence[np.ndarray]
) -> Quality:
    """BoxMass, RegionHit and CoverageIoU of phrases, each in its own document (SaMer, eq. 8-10).

    An input token is as relevant as the vector that stands for it: the mean over the phrase's
    tokens of its similarities.

    Args:
        phrases: P phrases.
        documents: of each phrase the document as it is searched, with its support.
        places: the same documents' input tokens, with their extents.
        boxes: of each phrase (M, 4).
    """
    from pipeline.eval.grounding import measure, region, relevance_map

    weight_PM1 = phrases.mask.unsqueeze(2) / phrases.mask.sum(dim=1)[:, None, None]
    sim_PK = (phrases.vectors.float() @ documents.vectors.float().mT * weight_PM1).sum(dim=1)
    support_PN = documents.support
    if support_PN is None:  # each token stands for itself
        support_PN = torch.arange(places.mask.shape[1], device=sim_PK.device)
        support_PN = support_PN.expand_as(places.mask).masked_fill(~places.mask, -1)
    sim_PN = sim_PK.gather(1, support_PN.clamp_min(0)).masked_fill(support_PN < 0, torch.nan)
    similarity_PN = sim_PN.double().cpu().numpy()
    assert places.extents is not None
    extents_PN4 = places.extents[..., :4].double().cpu().numpy()
    found = [
        measure(relevance_map(similarity_N, extents_N4), region(own.tolist()))
        for similarity_N, extents_N4, own in zip(similarity_PN, extents_PN4, boxes, strict=True)
    ]
    names = ("BoxMass", "RegionHit", "CoverageIoU")
    return dict(zip(names, np.array(found, np.float64).T, strict=True))

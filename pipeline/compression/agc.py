"""AGC without training: attention-guided clustering, a borrowed saliency (AGC paper, sec. 5)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch

from pipeline.compression import (
    Budget,
    Budgeted,
    blocks,
    close_ranks,
    first_minimum,
    group_sums,
    largest,
)
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, normalise, unit_vectors


class Agc(Budgeted["Agc.Spec"]):
    """The training-free form: the K most salient tokens gather the others around them.

    Tokens of the highest saliency alpha are the centroids (sec. 5.1), every token goes to the
    centroid of the highest cosine, the first of equal ones (sec. 5.2), and each group becomes its
    mean weighted by alpha (sec. 5.3), brought to unit length as in the paper's code. A centroid
    whose tokens all go to an equal one before it gives no vector. Outputs stand in the order of
    their centroids in the item.

    The paper's alpha is the attention of universal query tokens that are trained with the encoder.
    Here it is a statistic of an encoder as it is: of its pooled vector, of the end of the sequence,
    or SAP's column sums. So this is a baseline for the learned method, not the method.

    Its public code takes a softmax over an item's tokens of the attention, which is one already:
    alpha is then almost uniform. `reading: code` does the same.
    """

    class Spec(Budget):
        """Where the saliency comes from.

        Attributes:
            saliency: an attention statistic, see `pipeline.taps`.
            reading: the paper's equations, or those of its public code.
        """

        name: Literal["agc"] = "agc"
        saliency: TapName = "pooled_row/mean/last"
        reading: Literal["paper", "code"] = "paper"

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """The saliency."""
        return (Tap.parse(self.spec.saliency),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        alpha_BN = batch.taps[self.needs_taps[0].name].float()
        if self.spec.reading == "code" and alpha_BN.numel():
            alpha_BN = alpha_BN.masked_fill(~batch.mask, -torch.inf).softmax(dim=1)
        # A group whose attention is 0 to the last bit has the plain mean.
        alpha_BN = alpha_BN.clamp_min(1e-12).masked_fill(~batch.mask, 0.0)
        centroids_BK, slot_mask_BK = largest(alpha_BN, batch.mask, budgets_B)
        num_items, num_tokens, dim = batch.vectors.shape
        num_outputs = centroids_BK.shape[1]
        groups_BN = torch.full_like(batch.mask, -1, dtype=torch.int64)
        vectors_BKD = batch.vectors.new_zeros((num_items, num_outputs, dim), dtype=torch.float32)
        for block in blocks(batch.mask, num_tokens * max(num_outputs, dim)):
            items = batch.take(block)
            groups_BN[block] = nearest_centroids(items, centroids_BK[block], slot_mask_BK[block])
            # Lengths count here, as far as the encoder left any.
            states_BND = unit_vectors(items) if batch.normalised else raw_vectors(items)
            weighted_BND = states_BND * alpha_BN[block].unsqueeze(2)
            sums_BKD = group_sums(weighted_BND, groups_BN[block], num_outputs)
            vectors_BKD[block] = normalise(sums_BKD)  # the weights' sum cancels
        mask_BK = slot_mask_BK & vectors_BKD.any(dim=2)
        vectors_BKD, mask_BK, support_BN = close_ranks(vectors_BKD, mask_BK, groups_BN)
        return TokenBatch(vectors_BKD, mask_BK, True, pooled=batch.pooled, support=support_BN)


def nearest_centroids(
    batch: TokenBatch, centroids_BK: torch.Tensor, slot_mask_BK: torch.Tensor
) -> torch.Tensor:
    """Returns the (B, N) int64 centroid of highest cosine per token, -1 at padding.

    Args:
        batch: The items.
        centroids_BK: Positions of the tokens that are centroids.
        slot_mask_BK: bool, valid centroids.
    """
    if not centroids_BK.shape[1]:
        return torch.full_like(batch.mask, -1, dtype=torch.int64)
    tokens_BND = unit_vectors(batch)
    index = centroids_BK.unsqueeze(2).expand(-1, -1, tokens_BND.shape[2])
    # Tokens last: reductions over k run over whole vectors of tokens at once.
    apart_BKN = tokens_BND.gather(1, index).neg() @ tokens_BND.mT
    if not bool(slot_mask_BK.all()):
        apart_BKN.masked_fill_(~slot_mask_BK.unsqueeze(2), torch.inf)
    return first_minimum(apart_BKN, dim=1).masked_fill(~batch.mask, -1)


def raw_vectors(batch: TokenBatch) -> torch.Tensor:
    """(B, N, D) float32 vectors as the encoder gave them under the mask and zero elsewhere."""
    return batch.vectors.float().masked_fill(~batch.mask.unsqueeze(2), 0.0)

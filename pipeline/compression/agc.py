"""AGC, attention-guided clustering (AGC paper, section 5)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, largest, select, top_positions
from pipeline.compression.attention_clustering import weighted_clusters
from pipeline.compression.random import random_draws
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: Attention statistic that is the saliency, by reading.
SALIENCY = {"paper": Tap("appended_rows"), "code": Tap("appended_softmax")}


class AGC(Budgeted["AGC.Spec"]):
    """Assigns every token to the most similar of the K tokens with the highest learned saliency.

    The saliency alpha of a token is the attention that it receives in the last layer from the
    tokens that the encoder appends to the item, the universal queries, averaged over them and over
    heads (section 5.1). The K tokens with the highest saliency are the centroids; of equal ones,
    the earlier tokens. Every token is assigned to the centroid with the highest cosine similarity,
    or to the first of several (section 5.2). The output of each centroid is the mean of its tokens
    weighted by alpha (section 5.3), normalised to unit length as in the reference implementation. A
    centroid that equals an earlier one has no tokens and yields no vector.

    The method has no parameters of its own. The appended tokens and the encoder are trained with
    it: gradients flow to the vectors and to alpha, and centroids and assignments are constants. The
    budget of a trained encoder can be changed.
    """

    class Spec(Budget):
        """Options of `AGC`."""

        name: Literal["agc"] = "agc"
        reading: Literal["paper", "code"] = "paper"
        """Computation of alpha. "code" follows the reference implementation, which applies a
        softmax over the tokens to the attention of each universal query."""
        weights: Literal["saliency", "uniform"] = "saliency"
        """Weights of the tokens in the means; "uniform" is "w/o Attn Weight" of Table 9."""
        centroids: Literal["salient", "random"] = "salient"
        """Choice of the centroids; "random" is "w/o Attn Select" of Table 9. It draws them by a
        hash of the item, independently of the batch."""
        assignment: Literal["cluster", "none"] = "cluster"
        """Whether the other tokens are assigned to the centroids; "none" is "w/o Cluster" of Table
        9, in which the centroids themselves are the outputs."""
        seed: int = Field(0, ge=0, lt=2**32)
        """Random seed of random centroids."""

    needs_appended = True

    @property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistic that is the saliency."""
        return (SALIENCY[self.spec.reading],)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        return self._merge(batch, *largest(self._scores(batch), batch.mask, budgets_B))

    def reduce_uniform(self, batch: TokenBatch, budget: int) -> TokenBatch:
        """Compresses a batch without padding with the same budget for all items."""
        return self._merge(batch, top_positions(self._scores(batch), budget), None)

    def _saliency(self, batch: TokenBatch) -> torch.Tensor:
        return batch.taps[self.needs_taps[0].name].float()

    def _scores(self, batch: TokenBatch) -> torch.Tensor:
        """Returns the scores (B, N) whose largest values select the centroids."""
        if self.spec.centroids == "random":
            return -random_draws(batch, self.spec.seed).double()
        return self._saliency(batch).detach()

    def _merge(
        self, batch: TokenBatch, centroids_BK: torch.Tensor, slot_mask_BK: torch.Tensor | None
    ) -> TokenBatch:
        """Returns the vectors of the centroids; `slot_mask_BK` is None without padding."""
        if self.spec.assignment == "none":
            if slot_mask_BK is None:
                slot_mask_BK = torch.ones_like(centroids_BK, dtype=torch.bool)
            return select(batch, centroids_BK, slot_mask_BK)
        weights_BN = self._saliency(batch)
        if self.spec.weights == "uniform":
            weights_BN = torch.ones_like(weights_BN)
        return weighted_clusters(batch, weights_BN, centroids_BK, slot_mask_BK)

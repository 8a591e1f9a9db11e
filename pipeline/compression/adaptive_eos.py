"""Pruning by EOS attention with a threshold per item (SAP, appendix C, eq. 13-14)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from pipeline import config
from pipeline.compression import Compressor, pack_left, select
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

TAP = Tap("eos_row")


class AdaptiveEos(Compressor["AdaptiveEos.Spec"]):
    """Keeps the tokens whose EOS attention exceeds `mu + k sigma` of their item (eq. 13).

    k is the `1 - ratio` quantile of the z-scores of all tokens in a sample (eq. 14). The method
    therefore keeps a fraction `ratio` of the tokens of the corpus, while the fraction of individual
    items varies. If no token of an item exceeds the threshold, the token with the highest score is
    kept.

    The paper does not define the standard deviation. This implementation follows the reference
    implementation, which divides by N - 1 and adds 1e-8. The paper calibrates k on 128 separate
    documents. Here, the sample of the job is used, or that of `fit.source` or `fit_index`.
    """

    class Spec(config.ComponentSpec):
        """Options of `AdaptiveEos`."""

        name: Literal["adaptive_eos"] = "adaptive_eos"
        ratio: float = Field(gt=0, lt=1)
        """Fraction of all tokens of the corpus to keep."""

    needs_fit = True
    needs_taps = (TAP,)
    assignment_form = "indices"

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Computes k, the quantile in equation 14, by interpolation, as `{"k": (1,) float64}`."""
        scores = []
        for batch in sample:
            packed, _ = pack_left(batch)
            scores.append(z_scores(packed)[packed.mask].double().cpu().numpy())
        return {"k": np.quantile(np.concatenate(scores), 1 - spec.ratio, keepdims=True)}

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        z_BN = z_scores(batch)
        if not z_BN.numel():
            return select(batch, batch.mask.long(), batch.mask)
        is_best_BN = z_BN == z_BN.amax(dim=1, keepdim=True)
        is_best_BN &= is_best_BN.cumsum(dim=1) == 1  # the first of several equal scores
        keep_BN = ((z_BN > float(self.fitted["k"][0])) | is_best_BN) & batch.mask
        lengths = keep_BN.sum(dim=1)
        # Move the selected tokens to the front without changing their order.
        index_BN = (~keep_BN).to(torch.int8).argsort(dim=1, stable=True)[:, : int(lengths.max())]
        slots = torch.arange(index_BN.shape[1], device=index_BN.device)
        return select(batch, index_BN, slots < lengths.unsqueeze(1))


def z_scores(batch: TokenBatch) -> torch.Tensor:
    """Returns the z-scores (B, N) float32 of the EOS attention of each item, -inf at padding."""
    scores_BN = batch.taps[TAP.name].float().masked_fill(~batch.mask, 0.0)
    lengths_B1 = batch.lengths.unsqueeze(1)
    mean_B1 = scores_BN.sum(dim=1, keepdim=True) / lengths_B1.clamp_min(1)
    centred_BN = (scores_BN - mean_B1).masked_fill(~batch.mask, 0.0)
    variance_B1 = centred_BN.square().sum(dim=1, keepdim=True) / (lengths_B1 - 1).clamp_min(1)
    z_BN = centred_BN / (variance_B1.sqrt() + 1e-8)
    return z_BN.masked_fill(~batch.mask, -torch.inf)

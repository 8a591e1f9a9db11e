"""HPC-ColPali, which combines a codebook, attention-guided pruning and binary codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, blocks, first_minimum, largest
from pipeline.compression.cluster import order_by_first
from pipeline.compression.codecs.kmeans import kmeans
from pipeline.compression.random import sample_tokens
from pipeline.config import SpecError
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: Number of tokens per centroid to which the codebook is fitted. Additional tokens are not used.
TOKENS_PER_CENTROID = 256


class HPC(Budgeted["HPC.Spec"]):
    """Keeps the most salient tokens of an item and replaces each by the nearest of C centroids.

    The method consists of three steps (HPC-ColPali, Bach 2025):

    1. `fit` runs k-means on the tokens of a sample of the corpus.
    2. Attention-guided pruning keeps the tokens with the highest saliency. It keeps either a
       fraction p of the tokens of an item (`ratio`) or a fixed number (`num_vectors`).
    3. Each remaining token is replaced by its nearest centroid. Tokens of an item that have the
       same code share one vector.

    Items that are within their budget are not pruned, but their tokens are quantised as well.

    This implementation uses spherical k-means: centroids have unit length, and tokens are assigned
    by cosine similarity. The similarities of quantised vectors are therefore cosines as well. The
    codebook is fitted to at most 256 tokens per centroid, which are drawn uniformly. If the sample
    has fewer than `num_centroids` tokens, each token becomes a centroid.
    """

    class Spec(Budget):
        """Options of `HPC`."""

        name: Literal["hpc"] = "hpc"
        saliency: TapName = "eos_row/mean/last"
        """Attention statistic that is used as the saliency, see `pipeline.taps`."""
        num_centroids: int = Field(256, ge=1, le=65536)
        """Number of centroids C."""
        seed: int = Field(0, ge=0, lt=2**31)
        """Random seed for sampling tokens and for k-means."""
        num_iterations: int = Field(20, ge=1)
        """Number of k-means iterations."""
        binary: bool = False
        """Whether to store the index of a centroid as b = ceil(log2 C) bits, which are compared by
        Hamming distance. The bits are stored as 1 / sqrt(b) and -1 / sqrt(b), so that the dot
        product of two vectors is `1 - 2 Hamming / b`. Query tokens are replaced by the bits of
        their nearest centroids. The order of the centroid indices has no meaning, so only a
        distance of 0 implies that two tokens are similar.
        """

    needs_fit = True
    keeps_tokens = False

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.num_bits = max(1, (spec.num_centroids - 1).bit_length())

    @property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistic that is used as the saliency."""
        return (Tap.parse(self.spec.saliency),)

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """Fits the codebook and returns it as `{"codebook": (C, D) float32}`.

        The centroids have unit length. The result does not depend on how the sample is batched.
        """
        tokens = sample_tokens(sample, spec.seed, TOKENS_PER_CENTROID * spec.num_centroids)
        if not len(tokens):
            raise SpecError("sample", "0 tokens", "at least one token")
        centroids_CD = kmeans(
            tokens,
            min(spec.num_centroids, len(tokens)),
            iterations=spec.num_iterations,
            seed=spec.seed,
            spherical=True,
            max_per_centroid=len(tokens),
        )
        return {"codebook": centroids_CD}

    def output_dim(self, dim: int) -> int:
        """Returns the number of bits of a code if `binary` is set, otherwise `dim`."""
        return self.num_bits if self.spec.binary else dim

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Replaces query tokens by the bits of their nearest centroids if `binary` is set."""
        if not self.spec.binary:
            return tokens_QD
        codebook_CD = self._codebook(tokens_QD.device)
        codes_1Q = nearest_codes(normalise(tokens_QD.float()).unsqueeze(0), codebook_CD)
        return code_signs(codes_1Q.squeeze(0), self.num_bits)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        saliency_BN = batch.taps[self.needs_taps[0].name].float()
        index_BK, slot_mask_BK = largest(saliency_BN, batch.mask, budgets_B)
        tokens_BND = unit_vectors(batch)
        selected_BKD = tokens_BND.gather(
            1, index_BK.unsqueeze(2).expand(-1, -1, tokens_BND.shape[2])
        )
        codebook_CD = self._codebook(batch.vectors.device)
        codes_BK = nearest_codes(selected_BKD, codebook_CD)

        # Tokens with equal codes share one output. Masked slots are written to an additional
        # column, which is dropped at the end.
        num_tokens, num_slots = batch.mask.shape[1], index_BK.shape[1]
        outputs_BK = order_by_first(codes_BK, slot_mask_BK, len(codebook_CD))
        slots_BK = outputs_BK.masked_fill(~slot_mask_BK, num_slots)
        code_BK = codes_BK.new_full((len(batch), num_slots + 1), -1).scatter(1, slots_BK, codes_BK)
        code_BK = code_BK[:, :num_slots]
        assignment_BN = codes_BK.new_full((len(batch), num_tokens + 1), -1)
        assignment_BN.scatter_(1, index_BK.masked_fill(~slot_mask_BK, num_tokens), outputs_BK)
        index_BK = code_BK.clamp_min(0)
        vectors_BKD = (
            code_signs(index_BK, self.num_bits) if self.spec.binary else codebook_CD[index_BK]
        )
        return TokenBatch(
            vectors=vectors_BKD,
            mask=code_BK >= 0,
            normalised=True,
            pooled=batch.pooled,
            assignment=assignment_BN[:, :num_tokens],
        )

    def _codebook(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.fitted["codebook"], device=device)


def nearest_codes(tokens_BKD: torch.Tensor, codebook_CD: torch.Tensor) -> torch.Tensor:
    """Returns the first centroid (B, K) int64 with the highest cosine similarity to each token.

    >>> tokens = torch.tensor([[[0.8, 0.6], [0.0, -1.0]]])
    >>> nearest_codes(tokens, torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    tensor([[1, 0]])
    """
    parts = [torch.zeros(0, tokens_BKD.shape[1], dtype=torch.int64, device=tokens_BKD.device)]
    for rows in blocks(tokens_BKD, tokens_BKD.shape[1] * len(codebook_CD)):
        parts.append(first_minimum(-(tokens_BKD[rows] @ codebook_CD.T), dim=2))
    return torch.cat(parts)


def code_signs(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Converts codes to unit vectors (..., b) float32 that represent their bits.

    The least significant bit comes first. The bits 1 and 0 become 1 / sqrt(b) and -1 / sqrt(b).

    >>> code_signs(torch.tensor([1, 2]), 4).tolist()
    [[0.5, -0.5, -0.5, -0.5], [-0.5, 0.5, -0.5, -0.5]]
    """
    shifts = torch.arange(num_bits, device=codes.device)
    return ((codes.unsqueeze(-1) >> shifts & 1).float() * 2 - 1) / num_bits**0.5

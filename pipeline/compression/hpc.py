"""HPC-ColPali: a codebook of token vectors, pruning by attention, and codes as bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from pipeline.compression import Budget, Budgeted, blocks, first_minimum, largest
from pipeline.compression.cluster import by_first
from pipeline.compression.random import drawn
from pipeline.config import SpecError
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: Tokens that a codebook is learned from, for each of its centroids.
TOKENS_PER_CENTROID = 256


class HPC(Budgeted["HPC.Spec"]):
    """Keeps the most salient tokens and puts the nearest of C centroids in place of each.

    The three steps of HPC-ColPali (Bach 2025): k-means over the tokens of the corpus, of which
    `fit` takes a sample; attention-guided pruning, which keeps the top p of an item's tokens by
    `saliency`, a tap's name: `ratio` is that p, `num_vectors` a fixed number instead; and the
    number of the nearest centroid in place of each kept token. Equal codes of an item are one
    vector. An item within its budget keeps all tokens and is quantised all the same.

    k-means is spherical: centroids have unit length and the nearest is that of the largest cosine,
    so that a stored vector's score is a cosine like any other's. It is seeded, runs
    `num_iterations` rounds, and sees at most 256 tokens a centroid, drawn uniformly by a hash of
    their item. Where the sample has fewer than `num_centroids` tokens, each of them is a centroid.

    `binary` stores the number of the centroid as b = ceil(log2 num_centroids) bits, for a score of
    Hamming distances. A bit is 1 / sqrt(b) or -1 / sqrt(b), so vectors have unit length and the dot
    product of two is `1 - 2 Hamming / b`; each query token becomes the bits of its own nearest
    centroid. Only distance 0 says for certain that two tokens are alike: the numbers of centroids
    have no order, in this form of the method too.
    """

    class Spec(Budget):
        """Settings of the compressor."""

        name: Literal["hpc"] = "hpc"
        saliency: TapName = "eos_row/mean/last"
        """Attention statistic that ranks the tokens."""
        num_centroids: int = Field(256, ge=1, le=65536)
        """Number of centroids of the codebook."""
        seed: int = Field(0, ge=0, lt=2**31)
        """Seed of the clustering."""
        num_iterations: int = Field(20, ge=1)
        """Number of iterations of k-means."""
        binary: bool = False
        """Stores the bits of the centroid's number instead of the centroid."""

    needs_fit = True
    keeps_tokens = False

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.num_bits = max(1, (spec.num_centroids - 1).bit_length())

    @property
    def needs_taps(self) -> tuple[Tap, ...]:
        """The saliency of the spec."""
        return (Tap.parse(self.spec.saliency),)

    @classmethod
    def fit(cls, spec: Spec, sample: Iterable[TokenBatch]) -> dict[str, np.ndarray]:
        """The codebook: `{"codebook": (C, D) float32}` of unit length.

        The same tokens make the same codebook, however they are batched.

        Raises:
            SpecError: the sample holds no token.
        """
        import faiss  # of no use to what only compresses or searches

        tokens = drawn(sample, spec.seed, TOKENS_PER_CENTROID * spec.num_centroids)
        if not len(tokens):
            raise SpecError("sample", "0 tokens", "at least one token")
        kmeans = faiss.Kmeans(
            tokens.shape[1],
            min(spec.num_centroids, len(tokens)),
            niter=spec.num_iterations,
            seed=spec.seed,
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=len(tokens),
        )
        kmeans.train(tokens)
        assert kmeans.centroids is not None  # set by train
        return {"codebook": kmeans.centroids.reshape(-1, tokens.shape[1])}

    def output_dim(self, dim: int) -> int:
        """The width of the vectors it makes of vectors of width `dim`."""
        return self.num_bits if self.spec.binary else dim

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Query tokens as they are; with `binary` the bits of the centroids nearest to them."""
        if not self.spec.binary:
            return tokens_QD
        codebook_CD = self._codebook(tokens_QD.device)
        codes_1Q = codes(normalise(tokens_QD.float()).unsqueeze(0), codebook_CD)
        return bits(codes_1Q.squeeze(0), self.num_bits)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        saliency_BN = batch.taps[self.needs_taps[0].name].float()
        index_BK, slot_mask_BK = largest(saliency_BN, batch.mask, budgets_B)
        tokens_BND = unit_vectors(batch)
        kept_BKD = tokens_BND.gather(1, index_BK.unsqueeze(2).expand(-1, -1, tokens_BND.shape[2]))
        codebook_CD = self._codebook(batch.vectors.device)
        codes_BK = codes(kept_BKD, codebook_CD)

        # Equal codes are one output; what is not kept goes to a spare column that is cut off.
        num_tokens, num_slots = batch.mask.shape[1], index_BK.shape[1]
        outputs_BK = by_first(codes_BK, slot_mask_BK, len(codebook_CD))
        slots_BK = outputs_BK.masked_fill(~slot_mask_BK, num_slots)
        code_BK = codes_BK.new_full((len(batch), num_slots + 1), -1).scatter(1, slots_BK, codes_BK)
        code_BK = code_BK[:, :num_slots]
        support_BN = codes_BK.new_full((len(batch), num_tokens + 1), -1)
        support_BN.scatter_(1, index_BK.masked_fill(~slot_mask_BK, num_tokens), outputs_BK)
        found_BK = code_BK.clamp_min(0)
        return TokenBatch(
            vectors=bits(found_BK, self.num_bits) if self.spec.binary else codebook_CD[found_BK],
            mask=code_BK >= 0,
            normalised=True,
            pooled=batch.pooled,
            support=support_BN[:, :num_tokens],
        )

    def _codebook(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.fitted["codebook"], device=device)


def codes(tokens_BKD: torch.Tensor, codebook_CD: torch.Tensor) -> torch.Tensor:
    """(B, K) int64: the centroid of the largest cosine, the first among equals.

    >>> codes(torch.tensor([[[0.8, 0.6], [0.0, -1.0]]]), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    tensor([[1, 0]])
    """
    found = [torch.zeros(0, tokens_BKD.shape[1], dtype=torch.int64, device=tokens_BKD.device)]
    for rows in blocks(tokens_BKD, tokens_BKD.shape[1] * len(codebook_CD)):
        found.append(first_minimum(-(tokens_BKD[rows] @ codebook_CD.T), dim=2))
    return torch.cat(found)


def bits(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """(..., b) float32 of unit length: the bits of each code, lowest first, as plus and minus.

    >>> bits(torch.tensor([1, 2]), 4).tolist()
    [[0.5, -0.5, -0.5, -0.5], [-0.5, 0.5, -0.5, -0.5]]
    """
    places = torch.arange(num_bits, device=codes.device)
    return ((codes.unsqueeze(-1) >> places & 1).float() * 2 - 1) / num_bits**0.5

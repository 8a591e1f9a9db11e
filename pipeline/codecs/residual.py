"""Centroids and small residuals (ColBERTv2): the number of a centroid, and 2 or 4 bits a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from pipeline import config
from pipeline.codecs import Codec, Parts
from pipeline.codecs.packing import look_up, pack, packed_width
from pipeline.config import SpecError
from pipeline.tokens import normalise

#: Tokens that centroids are learned from, for each of them, and rounds of k-means.
TOKENS_PER_CENTROID, NUM_ITERATIONS = 256, 20
#: Tokens whose residuals the buckets are learned from, at most.
TOKENS_OF_BUCKETS = 1 << 16
#: Numbers of working memory of a block: 32 MiB of float32.
BLOCK_NUMBERS = 1 << 23
#: How far from 1 the lengths of vectors may be that were stored as unit vectors, and rounded.
TOLERANCE = 0.01


class Residual(Codec["Residual.Spec"]):
    """Parts `centroids` (T, 1) int32 and `residuals` (T, ceil(D bits / 8)) uint8.

    As in ColBERTv2 (Santhanam et al. 2022, sec. 3.3): a vector is the nearest of C centroids and
    its difference to it, of which each number is one of 2^bits buckets. The cutoffs between buckets
    are the quantiles i / 2^bits of the residuals of the sample, all numbers together, and what a
    bucket stands for is its middle quantile, (i + 1/2) / 2^bits. Codes are packed with the first
    number in the lowest bits.

    The nearest centroid is that of the smallest Euclidean distance, which makes residuals smallest;
    ColBERTv2's, of the largest product, is the same where all centroids are equally long.

    Where the sample consists of unit vectors the sum is brought to unit length, as in ColBERTv2;
    `fit` sees that by their lengths, which may be 1 % off if they were rounded before.
    """

    class Spec(config.ComponentSpec):
        """Settings of the codec."""

        name: Literal["residual"] = "residual"
        bits: Literal[2, 4] = 4
        """Bits per dimension of the residual."""
        num_centroids: int = Field(256, ge=1, le=65536)
        """Number of centroids."""

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.num_fit_tokens = TOKENS_PER_CENTROID * spec.num_centroids
        self._codebooks: dict[torch.device, Codebook] = {}

    @classmethod
    def fit(cls, spec: Spec, sample_TD: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
        """The codebook: `centroids` (C, D), `cutoffs` (2^bits - 1,), `weights` (2^bits,) float32.

        And `normalised`, whether the vectors had unit length. Equal samples make equal codebooks.

        Raises:
            SpecError: the sample has fewer tokens than there are to be centroids.
        """
        import faiss  # of no use to what only stores or searches

        if len(sample_TD) < spec.num_centroids:
            rule = f"at most {len(sample_TD)}, the number of vectors in the sample to fit on"
            raise SpecError("codec.num_centroids", spec.num_centroids, rule)
        sample_TD = np.ascontiguousarray(sample_TD, dtype=np.float32)
        kmeans = faiss.Kmeans(
            sample_TD.shape[1],
            spec.num_centroids,
            niter=NUM_ITERATIONS,
            seed=seed % 2**31,  # what faiss takes
            min_points_per_centroid=1,
            max_points_per_centroid=TOKENS_PER_CENTROID,
        )
        kmeans.train(sample_TD)
        assert kmeans.centroids is not None  # set by train
        centroids_CD = torch.from_numpy(kmeans.centroids.reshape(spec.num_centroids, -1).copy())

        step = -(-len(sample_TD) // TOKENS_OF_BUCKETS)
        tokens_TD = torch.from_numpy(sample_TD[::step])
        residuals_TD = (tokens_TD - centroids_CD[nearest(tokens_TD, centroids_CD)]).numpy()
        num_buckets = 1 << spec.bits
        places = np.arange(1, 2 * num_buckets) / (2 * num_buckets)
        quantiles = np.quantile(residuals_TD, places).astype(np.float32)
        lengths_T = np.linalg.norm(sample_TD, axis=1)
        lengths_T = lengths_T[lengths_T > 0]
        is_unit = len(lengths_T) > 0 and bool((np.abs(lengths_T - 1) < TOLERANCE).all())
        return {
            "centroids": centroids_CD.numpy(),
            "cutoffs": quantiles[1::2],
            "weights": quantiles[::2],
            "normalised": np.array(is_unit),
        }

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the dtypes and widths of `centroids` and `residuals`."""
        width = packed_width(dim, self.spec.bits)
        return {"centroids": (torch.int32, 1), "residuals": (torch.uint8, width)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the nearest centroids of (T, D) vectors, and the packed residuals."""
        learned = self.codebook(vectors_TD.device)
        index_T = nearest(vectors_TD, learned.centroids_CD)
        residuals = vectors_TD.new_empty(
            len(vectors_TD), packed_width(vectors_TD.shape[1], self.spec.bits), dtype=torch.uint8
        )
        for rows in _blocks(len(vectors_TD), vectors_TD.shape[1]):
            residual_tD = vectors_TD[rows] - learned.centroids_CD[index_T[rows]]
            buckets_tD = torch.bucketize(residual_tD, learned.cutoffs, out_int32=True)
            residuals[rows] = pack(buckets_tD.to(torch.uint8), self.spec.bits)
        return {"centroids": index_T.int().unsqueeze(1), "residuals": residuals}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the (T, D) sums of centroids and residuals in float32."""
        learned = self.codebook(parts["residuals"].device)
        vectors_TD = look_up(parts["residuals"], learned.weights, dim)
        vectors_TD = vectors_TD + learned.centroids_CD[parts["centroids"].squeeze(1)]
        return normalise(vectors_TD) if learned.normalised else vectors_TD

    def codebook(self, device: torch.device) -> Codebook:
        """What `fit` learned, once on each device."""
        if device not in self._codebooks:
            names = ("centroids", "cutoffs", "weights")
            tensors = {name: torch.tensor(self.fitted[name], device=device) for name in names}
            is_unit = bool(self.fitted["normalised"])
            self._codebooks[device] = Codebook(
                tensors["centroids"], tensors["cutoffs"], tensors["weights"], is_unit
            )
        return self._codebooks[device]


class Codebook(NamedTuple):
    """What `fit` learned: centroids (C, D), cutoffs, what each bucket stands for, float32.

    And whether a sum of centroid and residual is brought to unit length.
    """

    centroids_CD: torch.Tensor
    cutoffs: torch.Tensor
    weights: torch.Tensor
    normalised: bool


def nearest(vectors_TD: torch.Tensor, centroids_CD: torch.Tensor) -> torch.Tensor:
    """(T,) int64: the centroid of the smallest Euclidean distance to each vector.

    >>> nearest(torch.tensor([[0.9, 0.2], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    tensor([1, 0])
    """
    half_squares_C = centroids_CD.square().sum(dim=1) / 2
    index_T = torch.empty(len(vectors_TD), dtype=torch.int64, device=vectors_TD.device)
    for rows in _blocks(len(vectors_TD), len(centroids_CD)):
        index_T[rows] = (vectors_TD[rows] @ centroids_CD.T).sub_(half_squares_C).argmax(dim=1)
    return index_T


def _blocks(num_tokens: int, numbers_a_token: int) -> Iterator[slice]:
    size = max(1, BLOCK_NUMBERS // numbers_a_token)
    return (slice(first, first + size) for first in range(0, num_tokens, size))

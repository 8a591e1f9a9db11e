"""Residual codec of ColBERTv2, with a centroid and 2 or 4 bits of residual per dimension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from pipeline import config
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.kmeans import kmeans
from pipeline.compression.codecs.packing import look_up, pack, packed_width
from pipeline.config import within
from pipeline.tokens import normalise

#: Number of tokens per centroid and number of iterations of k-means.
TOKENS_PER_CENTROID, NUM_ITERATIONS = 256, 20
#: Maximum number of tokens from which the buckets of the residuals are computed.
MAX_BUCKET_TOKENS = 1 << 16
#: Maximum number of elements of an intermediate tensor, which corresponds to 32 MiB of float32.
MAX_BLOCK_ELEMENTS = 1 << 23
#: Tolerance for the norms of unit vectors that have been rounded to a lower precision.
NORM_TOLERANCE = 0.01


class Residual(Codec["Residual.Spec"]):
    """Stores the parts `centroids` (T, 1) int32 and `residuals` (T, ceil(D bits / 8)) uint8.

    As in ColBERTv2 (Santhanam et al. 2022, section 3.3), a vector is represented by the nearest of
    C centroids and a quantised residual with 2^bits buckets per dimension. The boundaries of the
    buckets are the quantiles i / 2^bits of the residuals in the sample, pooled over all dimensions.
    Dequantisation maps a bucket to its median, which is the quantile (i + 1/2) / 2^bits. Codes are
    packed such that the first dimension is in the least significant bits.

    The nearest centroid is the one with the smallest Euclidean distance, which minimises the
    residual. ColBERTv2 uses the largest dot product. Both criteria are equivalent if all centroids
    have the same norm.

    If the codec was fitted to unit vectors, dequantised vectors are normalised, as in ColBERTv2.
    `fit` recognises unit vectors by their norms and tolerates a deviation of 1 %, because vectors
    may have been rounded.
    """

    class Spec(config.ComponentSpec):
        """Options of `Residual`."""

        name: Literal["residual"] = "residual"
        bits: Literal[2, 4] = 4
        """Number of bits per dimension of the residual."""
        num_centroids: int = Field(256, ge=1, le=65536)
        """Number of centroids C."""

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.num_fit_tokens = TOKENS_PER_CENTROID * spec.num_centroids
        self._codebooks: dict[torch.device, Codebook] = {}

    @classmethod
    def fit(cls, spec: Spec, sample_TD: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
        """Fits the codebook by k-means. The result depends only on the sample and the seed.

        Returns:
            The arrays `centroids` (C, D), `cutoffs` (2^bits - 1,) and `weights` (2^bits,) of type
            float32, and the flag `normalised`, which is True if the sample consists of unit
            vectors.
        """
        rule = f"at most {len(sample_TD)}, the number of vectors in the sample to fit on"
        with within("codec"):
            spec.require(len(sample_TD) >= spec.num_centroids, "num_centroids", rule)
        sample_TD = np.ascontiguousarray(sample_TD, dtype=np.float32)
        centroids = kmeans(
            sample_TD,
            spec.num_centroids,
            iterations=NUM_ITERATIONS,
            seed=seed,
            max_per_centroid=TOKENS_PER_CENTROID,
        )
        centroids_CD = torch.from_numpy(centroids)

        step = -(-len(sample_TD) // MAX_BUCKET_TOKENS)
        tokens_TD = torch.from_numpy(sample_TD[::step])
        residuals_TD = (tokens_TD - centroids_CD[nearest(tokens_TD, centroids_CD)]).numpy()
        num_buckets = 1 << spec.bits
        levels = np.arange(1, 2 * num_buckets) / (2 * num_buckets)
        quantiles = np.quantile(residuals_TD, levels).astype(np.float32)
        return {
            "centroids": centroids_CD.numpy(),
            "cutoffs": quantiles[1::2],
            "weights": quantiles[::2],
            "normalised": np.array(is_normalised(sample_TD)),
        }

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the parts `centroids` and `residuals`."""
        width = packed_width(dim, self.spec.bits)
        return {"centroids": (torch.int32, 1), "residuals": (torch.uint8, width)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Assigns each vector to its nearest centroid and quantises the residual."""
        codebook = self.codebook(vectors_TD.device)
        index_T = nearest(vectors_TD, codebook.centroids_CD)
        residuals = vectors_TD.new_empty(
            len(vectors_TD), packed_width(vectors_TD.shape[1], self.spec.bits), dtype=torch.uint8
        )
        for rows in blocks(len(vectors_TD), vectors_TD.shape[1]):
            residual_tD = vectors_TD[rows] - codebook.centroids_CD[index_T[rows]]
            buckets_tD = torch.bucketize(residual_tD, codebook.cutoffs, out_int32=True)
            residuals[rows] = pack(buckets_tD.to(torch.uint8), self.spec.bits)
        return {"centroids": index_T.int().unsqueeze(1), "residuals": residuals}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Adds the residuals to the centroids. Normalises the sums if the sample was normalised."""
        codebook = self.codebook(parts["residuals"].device)
        vectors_TD = look_up(parts["residuals"], codebook.weights, dim)
        vectors_TD = vectors_TD + codebook.centroids_CD[parts["centroids"].squeeze(1)]
        return normalise(vectors_TD) if codebook.normalised else vectors_TD

    def codebook(self, device: torch.device) -> Codebook:
        """Returns the codebook on the given device. Codebooks are cached per device."""
        if device not in self._codebooks:
            names = ("centroids", "cutoffs", "weights")
            tensors = {name: torch.tensor(self.fitted[name], device=device) for name in names}
            is_unit = bool(self.fitted["normalised"])
            self._codebooks[device] = Codebook(
                tensors["centroids"], tensors["cutoffs"], tensors["weights"], is_unit
            )
        return self._codebooks[device]


class Codebook(NamedTuple):
    """Codebook of a fitted `Residual` codec.

    Attributes:
        centroids_CD: Centroids of the token vectors.
        cutoffs: Boundaries between neighbouring buckets, (2^bits - 1,).
        weights: The value to which each bucket is dequantised, (2^bits,).
        normalised: Whether dequantised vectors are normalised to unit length.
    """

    centroids_CD: torch.Tensor
    cutoffs: torch.Tensor
    weights: torch.Tensor
    normalised: bool


def is_normalised(vectors_TD: np.ndarray) -> bool:
    """Returns whether the vectors have unit length, apart from rounding and zero vectors.

    >>> is_normalised(np.array([[0.6, 0.8], [0.0, 0.0]])), is_normalised(np.array([[3.0, 4.0]]))
    (True, False)
    """
    norms_T = np.linalg.norm(vectors_TD, axis=1)
    norms_T = norms_T[norms_T > 0]
    return len(norms_T) > 0 and bool((np.abs(norms_T - 1) < NORM_TOLERANCE).all())


def nearest(vectors_TD: torch.Tensor, centroids_CD: torch.Tensor) -> torch.Tensor:
    """Returns the centroid (T,) int64 with the smallest Euclidean distance to each vector.

    >>> nearest(torch.tensor([[0.9, 0.2], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    tensor([1, 0])
    """
    half_squares_C = centroids_CD.square().sum(dim=1) / 2
    index_T = torch.empty(len(vectors_TD), dtype=torch.int64, device=vectors_TD.device)
    for rows in blocks(len(vectors_TD), len(centroids_CD)):
        index_T[rows] = (vectors_TD[rows] @ centroids_CD.T).sub_(half_squares_C).argmax(dim=1)
    return index_T


def blocks(num_tokens: int, elements_per_token: int) -> Iterator[slice]:
    """Yields ranges of tokens whose intermediate tensor has at most `MAX_BLOCK_ELEMENTS`."""
    size = max(1, MAX_BLOCK_ELEMENTS // elements_per_token)
    return (slice(first, first + size) for first in range(0, num_tokens, size))

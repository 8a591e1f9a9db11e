"""Candidate generator that replaces each vector by its nearest centroid, as in PLAID."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from pipeline import config
from pipeline.compression.codecs.centroid_codes import CentroidCodes
from pipeline.compression.codecs.kmeans import kmeans
from pipeline.compression.codecs.residual import is_normalised
from pipeline.config import SpecError
from pipeline.search.generators import Generator, Sample

#: Default number of centroids, and minimum number of vectors in the sample per default centroid.
MAX_DEFAULT_CENTROIDS, VECTORS_PER_CENTROID = 16_384, 32
#: Minimum share of distinct centroids among the vectors of an item. In a reproduction study (arXiv
#: 2604.09982), 32 vectors per item with 12 to 20 distinct centroids lost 20 % of MRR@10.
MIN_DISTINCT = 0.7
#: Number of bits of a code.
CODE_BITS = 16


class Centroids(Generator["Centroids.Spec"]):
    """Scores items by the MaxSim of the query over the nearest centroids of their vectors.

    This is the centroid interaction of PLAID (Santhanam et al. 2022) without pruning. The code of
    an item has the number of one centroid per vector, which occupies two bytes.

    If the sample consists of unit vectors, k-means is spherical: centroids are normalised, and the
    nearest centroid is the one with the largest inner product. Otherwise, it is the one with the
    smallest Euclidean distance.

    Items whose vectors share few centroids are hard to distinguish. `distinct` measures this.
    """

    class Spec(config.ComponentSpec):
        """Options of `Centroids`."""

        name: Literal["centroids"] = "centroids"
        num_centroids: int | None = Field(None, ge=1, le=1 << CODE_BITS)
        """Number of centroids C. The default is 16,384, or 1/32 of the number of vectors in the
        sample if this is smaller."""
        iterations: int = Field(10, ge=1)
        """Number of iterations of k-means."""
        seed: int = Field(0, ge=0)
        """Random seed of k-means."""

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray]):
        super().__init__(spec, artefact)
        self._codec = CentroidCodes(CentroidCodes.Spec(), artefact)

    @classmethod
    def fit(cls, spec: Spec, sample: Sample) -> dict[str, np.ndarray]:
        """Fits `centroids` (C, D) float32 to the vectors of the sample by k-means."""
        vectors_TD = np.ascontiguousarray(sample.vectors_TD.numpy(), dtype=np.float32)
        num_centroids = spec.num_centroids
        if num_centroids is None:
            num_centroids = min(len(vectors_TD) // VECTORS_PER_CENTROID, MAX_DEFAULT_CENTROIDS)
            num_centroids = max(num_centroids, 1)
        if len(vectors_TD) < num_centroids:
            rule = f"at most {len(vectors_TD)}, the number of vectors in the sample to fit on"
            raise SpecError("num_centroids", num_centroids, rule)
        centroids_CD = kmeans(
            vectors_TD,
            num_centroids,
            iterations=spec.iterations,
            seed=spec.seed,
            spherical=is_normalised(vectors_TD),
        )
        return {"centroids": centroids_CD}

    @property
    def codec(self) -> CentroidCodes:
        """Codec of the vectors, which assigns them to centroids."""
        return self._codec

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return self.artefact["centroids"].shape[1]

    def encode(
        self, vectors_TD: torch.Tensor, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the vectors unchanged. `codec` assigns them to centroids."""
        return vectors_TD, lengths_B

    def remarks(self, codes: pa.ChunkedArray) -> list[str]:
        """Reports the number of distinct centroids per item, with a warning if they are few."""
        parts, lengths_B = self.codec.unpack(codes, self.dim)
        num_items, num_vectors = int((lengths_B > 0).sum()), len(parts["codes"])
        if not num_items:
            return []
        num_distinct = distinct(torch.from_numpy(parts["codes"]), torch.from_numpy(lengths_B))
        per_item = num_vectors / num_items
        sentence = f"{num_distinct:.1f} distinct centroids per item with {per_item:.1f} vectors"
        if num_distinct < MIN_DISTINCT * per_item:
            sentence += (
                "; the generator may miss many results: set generator.num_centroids to a larger"
                " number, or use lemur"
            )
        return [sentence]


def distinct(codes: torch.Tensor, lengths_B: torch.Tensor) -> float:
    """Returns the mean number of distinct centroids per item that has vectors.

    If an item has far fewer distinct centroids than vectors, its approximate score ignores most of
    its vectors, and more centroids are necessary.

    >>> distinct(torch.tensor([[7], [7], [3], [5]]), torch.tensor([3, 0, 1]))
    1.5
    """
    item_T = torch.repeat_interleave(lengths_B)
    pairs_T = (item_T << CODE_BITS) | codes.squeeze(1).long()
    return len(pairs_T.unique()) / max(int((lengths_B > 0).sum()), 1)

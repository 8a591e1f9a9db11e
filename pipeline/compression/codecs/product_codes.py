"""Codec that stores the numbers of the nearest centroids of the parts of each vector."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import torch

from pipeline import config, extras
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.residual import nearest

#: Maximum number of centroids per sub-vector.
MAX_CENTROIDS = 256
#: Coordinate of centroids that are farther from all vectors than the others.
DISTANT = 1e9


class ProductCodes(Codec["ProductCodes.Spec"]):
    """Stores the part `codes` (T, P) uint8, the nearest centroids of P sub-vectors of each vector.

    This is product quantisation (Jégou et al. 2011). A vector is divided into P sub-vectors of
    equal dimensions, padded with zeros if necessary. Each has centroids of its own. The nearest
    centroid is the one with the smallest Euclidean distance.

    Candidate generators use this codec, which is not registered.

    Args:
        spec: Options of the codec.
        artefact: The array `centroids` (P, C, S) float32 of the centroids of sub-vectors of
            dimension S, with at most 256 centroids C.

    >>> centroids = np.array([[[0.0], [1.0]], [[0.0], [-1.0]]], dtype=np.float32)
    >>> codec = ProductCodes(ProductCodes.Spec(), {"centroids": centroids})
    >>> parts = codec.quantise(torch.tensor([[0.6, 0.8], [0.1, -0.9]]))
    >>> parts["codes"].tolist(), codec.dequantise(parts, 2).tolist()
    ([[1, 0], [0, 1]], [[1.0, 0.0], [0.0, -1.0]])
    """

    class Spec(config.ComponentSpec):
        """Options of `ProductCodes`. There are none apart from the name."""

        name: Literal["product_codes"] = "product_codes"

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self._centroids: dict[torch.device, torch.Tensor] = {}

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the part `codes`."""
        return {"codes": (torch.uint8, len(self.fitted["centroids"]))}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Assigns each sub-vector to its nearest centroid."""
        centroids_PCS = self.centroids(vectors_TD.device)
        sub_TPS = split(vectors_TD, centroids_PCS)
        if vectors_TD.is_cpu:  # faiss takes a fifth of the time of torch
            codes = self._quantizer.compute_codes(sub_TPS.flatten(1).numpy())
            return {"codes": torch.from_numpy(codes)}
        codes = [
            nearest(sub_TPS[:, p], centroids_CS) for p, centroids_CS in enumerate(centroids_PCS)
        ]
        return {"codes": torch.stack(codes, dim=1).to(torch.uint8)}

    @functools.cached_property
    def _quantizer(self) -> Any:
        """Quantiser of faiss, which has 256 centroids. The distant ones are never selected."""
        extras.require("faiss")
        import faiss

        centroids_PCS = self.fitted["centroids"]
        num_parts, num_centroids, size = centroids_PCS.shape
        padded = np.full((num_parts, MAX_CENTROIDS, size), DISTANT, np.float32)
        padded[:, :num_centroids] = centroids_PCS
        quantizer = faiss.ProductQuantizer(num_parts * size, num_parts, 8)
        faiss.copy_array_to_vector(padded.ravel(), quantizer.centroids)
        return quantizer

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the concatenated centroids that the codes select."""
        codes_TP = parts["codes"].int()
        centroids_PCS = self.centroids(codes_TP.device)
        numbers_P = torch.arange(len(centroids_PCS), device=codes_TP.device)
        return centroids_PCS[numbers_P, codes_TP].flatten(1)[:, :dim]

    def centroids(self, device: torch.device) -> torch.Tensor:
        """Returns the centroids (P, C, S) on the given device. They are cached per device."""
        if device not in self._centroids:
            self._centroids[device] = torch.tensor(self.fitted["centroids"], device=device)
        return self._centroids[device]


def split(vectors_TD: torch.Tensor, centroids_PCS: torch.Tensor) -> torch.Tensor:
    """Divides vectors into sub-vectors (T, P, S), padded with zeros."""
    num_parts, _, size = centroids_PCS.shape
    padded = torch.nn.functional.pad(vectors_TD, (0, num_parts * size - vectors_TD.shape[1]))
    return padded.view(len(vectors_TD), num_parts, size)

"""Codec that stores the number of the nearest centroid of each vector."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from pipeline import config
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.residual import nearest


class CentroidCodes(Codec["CentroidCodes.Spec"]):
    """Stores the part `codes` (T, 1) uint16, which are the numbers of the nearest centroids.

    Candidate generators use this codec. It is too coarse for representations and therefore not
    registered.

    The nearest centroid is the one with the smallest Euclidean distance, which is the one with the
    largest inner product if the centroids have unit length. Ties resolve to the lowest number.
    Similarities are those of the centroids.

    Args:
        spec: Options of the codec.
        artefact: The array `centroids` (C, D) float32 with at most 65,536 centroids.

    >>> centroids = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    >>> codec = CentroidCodes(CentroidCodes.Spec(), {"centroids": centroids})
    >>> parts = codec.quantise(torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
    >>> parts["codes"].tolist(), codec.dequantise(parts, 2).tolist()
    ([[1], [0]], [[0.0, 1.0], [1.0, 0.0]])
    """

    class Spec(config.ComponentSpec):
        """Options of `CentroidCodes`. There are none apart from the name."""

        name: Literal["centroid_codes"] = "centroid_codes"

    needs_fit = True

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self._centroids: dict[torch.device, torch.Tensor] = {}

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the part `codes`."""
        return {"codes": (torch.uint16, 1)}

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Assigns each vector to its nearest centroid."""
        codes_T = nearest(vectors_TD, self.centroids(vectors_TD.device))
        return {"codes": codes_T.to(torch.uint16).unsqueeze(1)}

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Returns the centroids that the codes select."""
        codes_T = parts["codes"].squeeze(1)
        return self.centroids(codes_T.device)[codes_T.int()]

    def centroids(self, device: torch.device) -> torch.Tensor:
        """Returns the centroids (C, D) on the given device. They are cached per device."""
        if device not in self._centroids:
            self._centroids[device] = torch.tensor(self.fitted["centroids"], device=device)
        return self._centroids[device]

"""Codec of 1, 2 or 4 bits per dimension, which stores the mean direction of all vectors apart."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from pipeline import config
from pipeline.compression.codecs import Codec, Parts
from pipeline.compression.codecs.int8 import MAX_VALUE, round_
from pipeline.compression.codecs.packing import look_up, pack, packed_width
from pipeline.compression.codecs.residual import blocks

#: Largest values of a vector that are compared, relative to the largest grid value. Larger ones are
#: clipped. Two bits use most of them, because a vector of 2,048 dimensions has few large values.
CLIPPING = (1.0, 1.15, 1.3, 1.5, 1.7, 1.9, 2.15, 2.4)
#: Smallest scale of a query token, relative to its projection, and of any query token.
MIN_RATIO, TINY = 1e-12, torch.finfo(torch.float32).tiny
#: Largest number of float16.
MAX_HALF = torch.finfo(torch.float16).max


class Bits(Codec["Bits.Spec"]):
    """Stores the parts `bits` (T, ceil(D bits / 8)) uint8, `scales` and `projections` (T, 1).

    Vectors are multiplied by an orthogonal matrix whose first row is the mean direction of the
    vectors in the sample and whose other rows are random. The first component of the product, the
    projection, is stored in float16: token vectors of some models have a mean cosine of 0.95, so
    that an error in this direction would exceed the differences between vectors.

    The vector r of the other components is quantised to odd integers c in [1 - 2^bits, 2^bits - 1],
    the signs with one bit. The scale is <r, r> / <r, c> in float16, as in RaBitQ (Gao and Long
    2024, arXiv 2405.12497): scale c - r is orthogonal to r, and its direction is random. The
    product of a query and scale c is therefore an unbiased estimate of its product with r. The
    integers are those of the largest cosine with r among several quantiser steps. Code 0 of the
    first component is not used.

    Query tokens are transformed in the same way with 8 bits per component, so that similarities are
    integer products.

    Args:
        spec: Options of the codec.
        artefact: The array `rotation` (D, D) float32.

    >>> codec = Bits(Bits.Spec(), {"rotation": np.eye(3, dtype=np.float32)})
    >>> parts = codec.quantise(torch.tensor([[0.5, -0.75, 0.25]]))
    >>> parts["bits"].tolist(), parts["projections"].item(), parts["scales"].item()
    ([[5]], 0.5, 0.625)
    >>> codec.dequantise(parts, 3).tolist()
    [[0.5, -0.625, 0.625]]
    """

    class Spec(config.ComponentSpec):
        """Options of `Bits`."""

        name: Literal["bits"] = "bits"
        bits: Literal[1, 2, 4] = 1
        """Number of bits per dimension."""

    needs_fit = True
    num_fit_tokens = 1 << 14

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self._rotations: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def fit(cls, spec: Spec, sample_TD: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
        """Computes `rotation` (D, D) float32. Its other rows depend only on the first and the seed.

        The first row is random, too, if the mean of the vectors is zero.
        """
        dim = sample_TD.shape[1]
        columns_DD = np.random.default_rng(seed).standard_normal((dim, dim))
        direction_D = mean_direction(sample_TD)
        if direction_D.any():
            columns_DD[:, 0] = direction_D
        # A tenth of the time of NumPy.
        rotation_DD, triangle_DD = torch.linalg.qr(torch.from_numpy(columns_DD))
        rotation_DD *= torch.where(triangle_DD.diagonal() < 0, -1, 1)
        return {"rotation": rotation_DD.T.float().contiguous().numpy()}

    def parts(self, dim: int) -> dict[str, tuple[torch.dtype, int]]:
        """Returns the parts `bits`, `scales` and `projections`."""
        width = packed_width(dim, self.spec.bits)
        return {
            "bits": (torch.uint8, width),
            "scales": (torch.float16, 1),
            "projections": (torch.float16, 1),
        }

    def quantise(self, vectors_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rotates the vectors and quantises their components."""
        rotation_DD = self._rotation(vectors_TD.device)
        packed, scales, projections = [], [], []
        for rows in blocks(max(len(vectors_TD), 1), vectors_TD.shape[1]):
            rotated_tD = (vectors_TD[rows].double() @ rotation_DD.T).float()
            projections.append(rotated_tD[:, :1].clone())
            rotated_tD[:, 0] = 0
            codes_tD, scales_t1 = self._nearest(rotated_tD)
            packed.append(pack(codes_tD, self.spec.bits))
            scales.append(scales_t1)
        return {
            "bits": torch.cat(packed),
            "scales": _half(torch.cat(scales)),
            "projections": _half(torch.cat(projections)),
        }

    def _nearest(self, rest_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the codes (T, D) uint8 and scales (T, 1) of vectors, whose first value is 0."""
        top = 2**self.spec.bits - 1
        norms_T1 = rest_TD.square().sum(dim=1, keepdim=True, dtype=torch.float64)
        if top == 1:  # a third of the time of the general case, with equal results
            products_T1 = rest_TD.abs().sum(dim=1, keepdim=True, dtype=torch.float64)
            scales_T1 = norms_T1 / torch.where(norms_T1 > 0, products_T1, 1)
            return (rest_TD >= 0).to(torch.uint8), scales_T1
        largest_T1 = rest_TD.abs().amax(dim=1, keepdim=True).clamp_min(TINY)
        codes_TD = torch.zeros_like(rest_TD, dtype=torch.uint8)
        products_T1, best_T1 = torch.zeros_like(norms_T1), torch.full_like(norms_T1, -1)
        for clipping in CLIPPING:
            steps_TD = (rest_TD / largest_T1 * (top * clipping)).clamp_(-top, top)
            grid_TD = torch.floor(steps_TD / 2) * 2 + 1
            # In float64, so that the sums do not depend on other vectors.
            product_T1 = (rest_TD * grid_TD).sum(dim=1, keepdim=True, dtype=torch.float64)
            squares_TD = grid_TD[:, 1:].square()
            square_T1 = squares_TD.sum(dim=1, keepdim=True, dtype=torch.float64)
            gain_T1 = product_T1 / square_T1.clamp_min(1).sqrt()
            is_better_T1 = gain_T1 > best_T1
            best_T1 = gain_T1.maximum(best_T1)
            codes_TD = torch.where(is_better_T1, ((grid_TD + top) / 2).to(torch.uint8), codes_TD)
            products_T1 = torch.where(is_better_T1, product_T1, products_T1)
        # <r, c> is at least the largest value of r, and 0 only if r is 0.
        scales_T1 = norms_T1 / torch.where(norms_T1 > 0, products_T1, 1)
        return codes_TD, scales_T1

    def dequantise(self, parts: Parts, dim: int) -> torch.Tensor:
        """Multiplies the integers by the scales, adds the projections and rotates back."""
        rotated_TD = look_up(parts["bits"], self._grid(parts["bits"].device), dim)
        rotated_TD = rotated_TD * parts["scales"]
        rotated_TD[:, :1] = parts["projections"]
        return self._rotate_back(rotated_TD)

    def transform_queries(self, tokens_QD: torch.Tensor) -> torch.Tensor:
        """Rounds the rotated query tokens. Doing so twice has no further effect."""
        query = self.split_queries(tokens_QD)
        rotated_QD = query.values_QD * query.scales_Q[:, None]
        rotated_QD[:, 0] = query.projections_Q
        return self._rotate_back(rotated_QD)

    def split_queries(self, tokens_QD: torch.Tensor) -> RotatedQueries:
        """Returns the rounded components of rotated query tokens (Q, D)."""
        rotated_QD = (tokens_QD.double() @ self._rotation(tokens_QD.device).T).float()
        projections_Q = rotated_QD[:, 0].clone()
        rotated_QD[:, 0] = 0
        scales_Q = rotated_QD.abs().amax(dim=1) / MAX_VALUE
        scales_Q = scales_Q.maximum(projections_Q.abs() * MIN_RATIO).clamp_min(TINY)
        return RotatedQueries(round_(rotated_QD / scales_Q[:, None]), scales_Q, projections_Q)

    def _grid(self, device: torch.device) -> torch.Tensor:
        """Returns the integers (2^bits,) float32 of the codes."""
        top = 2**self.spec.bits - 1
        return torch.arange(-top, top + 1, 2, dtype=torch.float32, device=device)

    def _rotate_back(self, rotated_TD: torch.Tensor) -> torch.Tensor:
        vectors_TD = torch.empty_like(rotated_TD)
        rotation_DD = self._rotation(rotated_TD.device)
        for rows in blocks(len(rotated_TD), rotated_TD.shape[1]):
            vectors_TD[rows] = (rotated_TD[rows].double() @ rotation_DD).float()
        return vectors_TD

    def _rotation(self, device: torch.device) -> torch.Tensor:
        """Returns the matrix in float64, so that products do not depend on other vectors."""
        if device not in self._rotations:
            self._rotations[device] = torch.tensor(self.fitted["rotation"], device=device).double()
        return self._rotations[device]


class RotatedQueries(NamedTuple):
    """Query tokens of `Bits`.

    Attributes:
        values_QD: Integers in [-127, 127], float32. The first is 0.
        scales_Q: Scale of the integers.
        projections_Q: Component along the mean direction.
    """

    values_QD: torch.Tensor
    scales_Q: torch.Tensor
    projections_Q: torch.Tensor


def mean_direction(vectors_TD: np.ndarray) -> np.ndarray:
    """Returns the unit vector (D,) float64 of the mean of normalised vectors, or 0 if it is 0.

    >>> mean_direction(np.array([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])).round(3).tolist()
    [0.707, 0.707]
    """
    norms_T = np.linalg.norm(vectors_TD.astype(np.float64), axis=1)
    is_used_T = norms_T > 0
    total_D = (1 / norms_T[is_used_T]) @ vectors_TD[is_used_T].astype(np.float64)
    norm = np.linalg.norm(total_D)
    return total_D / norm if norm > 0 else total_D


def _half(values_T1: torch.Tensor) -> torch.Tensor:
    return values_T1.clamp(-MAX_HALF, MAX_HALF).to(torch.float16)

"""Positions of tokens, and the distance of SaMer that combines them with features (eq. 2)."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.compression import first_minimum, group_sums, kernel_module
from pipeline.config import SpecError
from pipeline.tokens import TokenBatch, normalise

Axis = Literal["x", "y", "t"]


def token_coordinates(
    batch: TokenBatch, axes: tuple[Axis, ...] = ("x", "y"), seconds_per_unit: float | None = None
) -> torch.Tensor:
    """Returns the coordinates p_i (B, N, A) float32 of the tokens on the given axes.

    x and y are the centre of a token's box. t is the centre of its time interval relative to the
    item's first t0, in units of `seconds_per_unit`, by default the duration of the item; 0 if that
    is zero or undefined. Other undefined coordinates are NaN. Without extents, A is 0.
    """
    if batch.extents is None or not axes or not batch.mask.shape[1]:
        return batch.vectors.new_zeros((*batch.mask.shape, 0), dtype=torch.float32)
    extents = batch.extents.float()
    if not batch.is_full:
        extents = extents.masked_fill(~batch.mask.unsqueeze(2), torch.nan)
    x_BN, y_BN = ((extents[..., :2] + extents[..., 2:4]) / 2).unbind(2)
    columns = {"x": x_BN, "y": y_BN}
    if "t" in axes:
        starts_BN, ends_BN = extents[..., 4], extents[..., 5]
        first_B1 = starts_BN.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
        last_B1 = ends_BN.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
        duration_B1 = last_B1 - first_B1
        unit = seconds_per_unit or torch.where(duration_B1 > 0, duration_B1, torch.inf)
        # Subtracting first preserves the float32 precision late in long recordings.
        columns["t"] = ((starts_BN - first_B1) + (ends_BN - first_B1)) / 2 / unit
    return torch.stack([columns[axis] for axis in axes], dim=2)


def object_labels(
    coords_BN2: torch.Tensor, boxes_BM4: torch.Tensor, box_mask_BM: torch.Tensor
) -> torch.Tensor:
    """Returns the index of the box that contains each token (section 4.2).

    Indices start from 1, and 0 is the background. Boxes include their edges. Tokens in several
    boxes are assigned to the smallest box, or to the first if areas differ by less than 1e-5.
    Tokens without coordinates are background. Annotations often exceed the image slightly, so boxes
    are clipped to the image. Boxes that exceed the image by more than its width or height are
    rejected, because they are most likely in pixels.

    Raises:
        SpecError: A box in `boxes` is not finite, has no area, or is outside or far beyond the
            image.

    >>> coords_BN2 = torch.tensor([[[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]]])
    >>> boxes = torch.tensor([[[0.0, 0.0, 0.6, 0.6], [0.4, 0.4, 0.6, 0.6]]])
    >>> object_labels(coords_BN2, boxes, torch.ones(1, 2, dtype=torch.bool)).tolist()
    [[1, 2, 0]]
    """
    low_BM2, high_BM2 = boxes_BM4[..., :2], boxes_BM4[..., 2:]
    problems = {
        "is not finite": ~boxes_BM4.isfinite().all(dim=2),
        "is reversed": (high_BM2 < low_BM2).any(dim=2),
        "has no area": (high_BM2 == low_BM2).any(dim=2),
        "extends far beyond the image": ((low_BM2 < -1) | (high_BM2 > 2)).any(dim=2),
        "is outside the image": ((high_BM2 <= 0) | (low_BM2 >= 1)).any(dim=2),
    }
    for problem, is_so_BM in problems.items():
        bad = (is_so_BM & box_mask_BM).nonzero()
        if len(bad):
            row, box = bad[0].tolist()
            rule = "[x0, y0, x1, y1] relative to the image, x0 < x1 and y0 < y1, overlapping it"
            value = [round(number, 4) for number in boxes_BM4[row, box].tolist()]
            raise SpecError("boxes", value, rule, problem, f" (box {box} of item {row})")
    if boxes_BM4.shape[1] == 0:
        return torch.zeros(coords_BN2.shape[:2], dtype=torch.int64, device=coords_BN2.device)
    low_BM2, high_BM2 = low_BM2.clamp(0, 1), high_BM2.clamp(0, 1)
    coords_BN12 = coords_BN2.unsqueeze(2)
    is_in_BNM2 = (coords_BN12 >= low_BM2.unsqueeze(1)) & (coords_BN12 <= high_BM2.unsqueeze(1))
    is_in_BNM = is_in_BNM2.all(dim=3) & box_mask_BM.unsqueeze(1)
    areas_B1M = (high_BM2 - low_BM2).prod(dim=2).unsqueeze(1)
    smallest_BN = first_minimum(torch.where(is_in_BNM, areas_B1M, torch.inf), dim=2)
    return torch.where(is_in_BNM.any(dim=2), smallest_BN + 1, 0)


class Geometry:
    """Tokens of a block of items as points whose matrix products yield the distance of eq. 2.

    The columns of the points are the features v_i; for each axis, the position p_i, p_i^2, and 1
    where the position is defined; and 1 for tokens. They are 0 at padding, and undefined positions
    are 0. Coordinates are multiplied by the square root of gamma.

    Centroids are represented by the sum of the points of their tokens, which determines their
    features, positions and sizes.

    Args:
        tokens_BND: Features v_i of the tokens, zero at padding.
        coords_BNA: Coordinates of the tokens on A >= 0 axes, NaN if undefined and at padding.
        mask_BN: True for tokens and False for padding.
        gamma: Weight of the spatial term.
    """

    def __init__(
        self,
        tokens_BND: torch.Tensor,
        coords_BNA: torch.Tensor,
        mask_BN: torch.Tensor,
        gamma: float,
    ):
        num_dims, num_axes = tokens_BND.shape[2], coords_BNA.shape[2]
        # Products of rows that start at multiples of 16 bytes are faster on GPUs.
        num_ones = 1 + -(num_dims + 3 * num_axes + 1) % 4
        self._widths = [num_dims, num_axes, num_axes, num_axes, num_ones]
        self._coords_BNA = coords_BNA * gamma**0.5
        filled_BNA = self._coords_BNA.nan_to_num(nan=0.0)
        squares_BNA = filled_BNA.square()
        is_known_BNA = (~self._coords_BNA.isnan()).float()
        ones_BNC = mask_BN.unsqueeze(2).float().expand(-1, -1, num_ones)
        parts = [tokens_BND, filled_BNA, squares_BNA, is_known_BNA, ones_BNC]
        self.points_BNE = torch.cat(parts, dim=2)
        # For large coordinates (times in small units), p^2 - 2ps + s^2 loses too many digits.
        self._is_small = not squares_BNA.numel() or float(squares_BNA.amax()) <= 1

    def distance(self, sums_BKE: torch.Tensor, offsets_BK: torch.Tensor) -> torch.Tensor:
        """Computes `-v_i . mu_k + gamma * |p_i - s_k|^2` (B, K, N) without undefined axes.

        The constant 1 of eq. 2 is omitted, because it affects neither minimum nor softmax and would
        cost a pass over all distances. With tokens as the last dimension, reductions over k are
        vectorised over tokens. Distances are undefined at padded tokens. `sums_BKE` are the sums of
        the points of the centroids, and `offsets_BK` is 0, or a large value for padding.
        """
        result_BKN = self._coefficients(sums_BKE, offsets_BK) @ self.points_BNE.mT
        if not self._is_small:
            _, sums_BKA, _, counts_BKA, _ = sums_BKE.split(self._widths, dim=2)
            sites_BKA = sums_BKA / counts_BKA  # 0 / 0 is NaN
            for axis in range(self._coords_BNA.shape[2]):
                coord_B1N, site_BK1 = self._coords_BNA[:, None, :, axis], sites_BKA[..., axis, None]
                offset_BKN = (coord_B1N - site_BK1).nan_to_num(nan=0.0)
                result_BKN.addcmul_(offset_BKN, offset_BKN)
        return result_BKN

    def _coefficients(self, sums_BKE: torch.Tensor, offsets_BK: torch.Tensor) -> torch.Tensor:
        """Returns the vectors (B, K, E) whose products with the points are the distances."""
        num_dims, num_axes = self._widths[:2]
        if not sums_BKE.requires_grad and (kernels := kernel_module(sums_BKE)):
            has_sites = self._is_small and num_axes > 0
            return kernels.coefficients(sums_BKE, offsets_BK, num_dims, num_axes, has_sites)
        features_BKD, sums_BKA, _, counts_BKA, ones_BKC = sums_BKE.split(self._widths, dim=2)
        if self._is_small:
            sites_BKA = sums_BKA / counts_BKA.clamp_min(1)
            terms = [sites_BKA * -2, counts_BKA.clamp_max(1), sites_BKA.square()]
        else:  # `distance` adds the spatial term
            terms = [torch.zeros_like(sums_BKA)] * 3
        offsets_BKC = offsets_BK.unsqueeze(2).expand_as(ones_BKC)
        return torch.cat([normalise(features_BKD).neg(), *terms, offsets_BKC], dim=2)

    def take(self, positions_BK: torch.Tensor) -> torch.Tensor:
        """Returns the points (B, K, E) of the tokens at the given positions."""
        index_BKE = positions_BK.unsqueeze(2).expand(-1, -1, self.points_BNE.shape[2])
        return self.points_BNE.gather(1, index_BKE)

    @torch.no_grad()
    def cluster(
        self, seeds_BK: torch.Tensor, offsets_BK: torch.Tensor, num_iterations: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs k-means with the distance of eq. 2.

        Each iteration assigns every token to its nearest centroid and moves the centroids to the
        mean of their tokens. Centroids without tokens are not moved. Seeds are positions of tokens,
        and offsets those of `distance`.

        Returns:
            Sums of the points of each centroid (B, K, E), and the assignment (B, N) of the last
            iteration (of the seeds if there were no iterations).
        """
        sums_BKE = self.take(seeds_BK)
        nearest_BN = first_minimum(self.distance(sums_BKE, offsets_BK), dim=1)
        for iteration in range(num_iterations):
            if iteration:
                nearest_BN = first_minimum(self.distance(sums_BKE, offsets_BK), dim=1)
            new_BKE = group_sums(self.points_BNE, nearest_BN, offsets_BK.shape[1])
            sizes_BK1 = new_BKE[..., -1:]
            sums_BKE = torch.where(sizes_BK1 > 0, new_BKE, sums_BKE)
        return sums_BKE, nearest_BN

    def seed_distance(self, positions_B: torch.Tensor | None) -> torch.Tensor:
        """Returns the distances (B, N) for `farthest_positions`.

        The centre has the normalised mean of the features and the mean position.
        """
        if positions_B is None:
            sums_B1E = self.points_BNE.sum(dim=1, keepdim=True)
        else:
            sums_B1E = self.take(positions_B.unsqueeze(1))
        return self.distance(sums_B1E, torch.zeros_like(sums_B1E[..., 0])).squeeze(1)

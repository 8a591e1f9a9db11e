"""SaMer, feature-spatial soft merging with an object-aware prior (SaMer paper, section 4)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from pipeline.compression import (
    LARGE,
    blocks,
    concatenate,
    first_minimum,
    group_sums,
    kernel_module,
    large_parts,
    memberships,
    pack_outputs,
)
from pipeline.compression.seeds import (
    Placement,
    SeededBudget,
    SeededCompressor,
    farthest_positions,
    lattice_positions,
    uniform_positions,
)
from pipeline.config import SpecError
from pipeline.tokens import TokenBatch, normalise, unit_vectors

Axis = Literal["x", "y", "t"]

#: Distance of representatives beyond the budget of an item.
MASKED_DISTANCE = 1e20
#: Epsilon of eq. 5. The paper specifies no value. This is the one of the reference implementation.
EPSILON = 1e-6


class SaMer(SeededCompressor):
    """Merges the tokens into K centroids by soft assignment over features and positions.

    K seeds are refined to centroids by `num_iterations` iterations of hard k-means under the
    distance of eq. 2. Each representative is then a softly weighted mean of tokens (eq. 3). The
    paper does not specify the hyperparameters. The defaults are those of the reference
    implementation. For items without boxes, only the feature term remains, which is soft spherical
    k-means.

    Gradients flow through the tokens and the soft weights, but not through seeds, k-means and hard
    assignments.
    """

    class Spec(SeededBudget):
        """Options of `SaMer`.

        With `seeds: farthest`, seeds are sampled by the distance of eq. 2, which includes features
        and the positions on `axes`.
        """

        name: Literal["samer"] = "samer"
        gamma: float = Field(0.1, ge=0, allow_inf_nan=False)
        """Weight of the spatial term in eq. 2."""
        tau_s: float = Field(0.07, gt=0, allow_inf_nan=False)
        """Temperature of the soft assignment."""
        num_iterations: int = Field(3, ge=0)
        """Number of k-means iterations."""
        axes: tuple[Axis, ...] = ("x", "y")
        """Coordinates in the spatial term: the centre of a token's box (x, y) and time interval
        (t). Undefined coordinates of a token are ignored. The default matches the paper; the
        reference implementation treats each frame of a video as the same unit square."""
        seconds_per_unit: float | None = Field(None, gt=0, allow_inf_nan=False)
        """Number of seconds on axis t that correspond to the width of the image. Defaults to the
        duration of the item, from its first t0 to its last t1."""
        centroid: Literal["soft", "mean", "normalised", "medoid", "object_weighted"] = "soft"
        """Representative of a group (appendix A).

        "soft" is the soft mean of eq. 3 (or eq. 6). The other values use the tokens whose nearest
        centroid is the given one. Centroids without tokens yield no vector.

        - "mean": Mean of the tokens. Only this variant has vectors that are not of unit length.
        - "normalised": Mean of the tokens, normalised to unit length.
        - "medoid": Token nearest to the centroid by eq. 2.
        - "object_weighted": Like "normalised", but tokens inside annotated objects have weight
          `object_weight`.
        """
        object_weight: float = Field(2.0, ge=1, allow_inf_nan=False)
        """Weight of tokens inside objects with `centroid: object_weighted`. The paper specifies no
        value."""
        object_prior: bool = False
        """Whether to add the penalty of eq. 5 to the distance (eq. 6). Only affects batches with
        annotated objects, which occur in training."""
        penalty_assignment: Literal["final", "previous"] = "final"
        """Hard assignment c_i in eq. 5. "final" uses the distance of eq. 6, as in the paper.
        "previous" is the assignment before the last update of the centroids, as in the reference
        implementation."""

        @model_validator(mode="after")
        def _check_combination(self) -> Self:
            if len(set(self.axes)) < len(self.axes):
                raise SpecError("axes", list(self.axes), "a list of different axes")
            if self.seconds_per_unit is not None and "t" not in self.axes:
                rule = "null unless t is among the axes"
                raise SpecError("seconds_per_unit", self.seconds_per_unit, rule)
            if self.object_prior and self.centroid != "soft":
                raise SpecError("object_prior", True, "false unless centroid is soft")
            return self

    def __init__(self, spec: Spec, artefact: None = None):
        super().__init__(spec, artefact)
        self.normalised = spec.centroid != "mean"
        self.uses_objects = spec.object_prior or spec.centroid == "object_weighted"

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        excess_B = batch.lengths - budgets_B
        num_outputs = min_excess = max_excess = 0
        if len(batch):  # a single transfer, see `pack_left`
            extremes = budgets_B.amax(), *excess_B.aminmax()
            num_outputs, min_excess, max_excess = torch.stack(extremes).tolist()
        return self._reduce(batch, budgets_B, num_outputs, min_excess, max_excess)

    def reduce_uniform(self, batch: TokenBatch, budget: int) -> TokenBatch:
        """Compresses a batch without padding with the same budget for all items."""
        excess = batch.mask.shape[1] - budget
        return self._reduce(batch, None, budget, excess, excess)

    def _reduce(
        self,
        batch: TokenBatch,
        budgets_B: torch.Tensor | None,
        num_outputs: int,
        min_excess: int,
        max_excess: int,
    ) -> TokenBatch:
        """Compresses each item to its budget.

        Args:
            batch: Items to compress.
            budgets_B: Budgets of the items. None without padding, if all are `num_outputs`.
            num_outputs: Largest budget.
            min_excess: Minimum number of tokens of an item beyond its budget.
            max_excess: Maximum number of tokens of an item beyond its budget.
        """
        num_tokens = batch.mask.shape[1]
        if max_excess == 0:
            identity_N = torch.arange(num_tokens, device=batch.mask.device)
            identity_BN = identity_N.repeat(len(batch), 1)
            tokens_BND = unit_vectors(batch)
            return TokenBatch(
                tokens_BND, batch.mask, self.normalised, pooled=batch.pooled, assignment=identity_BN
            )
        parts = []
        for block in blocks(batch.mask, num_tokens * max(num_outputs, batch.vectors.shape[2])):
            block_budgets_B = None if budgets_B is None else budgets_B[block]
            items = batch.take(block)
            parts.append(
                self._reduce_block(items, block_budgets_B, num_outputs, has_short=min_excess == 0)
            )
        vectors_BKD, mask_BK, assignment_BN = (concatenate(p) for p in zip(*parts, strict=True))
        return TokenBatch(
            vectors_BKD, mask_BK, self.normalised, pooled=batch.pooled, assignment=assignment_BN
        )

    def _reduce_block(
        self,
        batch: TokenBatch,
        budgets_B: torch.Tensor | None,
        num_outputs: int,
        *,
        has_short: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the vectors (B, K, D), mask (B, K) and assignment (B, N) of a block of items.

        `has_short` must be True if there are items within their budget. See `_reduce` for the other
        arguments.
        """
        spec = self.spec
        tokens_BND = unit_vectors(batch)
        if budgets_B is None:
            slot_mask_BK = batch.mask[:, :num_outputs]
            offsets_BK = torch.zeros_like(slot_mask_BK, dtype=torch.float32)
        else:
            slots_K = torch.arange(num_outputs, device=budgets_B.device)
            slot_mask_BK = slots_K < budgets_B.unsqueeze(1)
            offsets_BK = (~slot_mask_BK).float() * MASKED_DISTANCE
        coords_BNA = token_coordinates(batch, spec.axes, spec.seconds_per_unit)
        geometry = Geometry(tokens_BND, coords_BNA, batch.mask, spec.gamma)
        seeds_BK = seed_positions(spec.seeds, batch, budgets_B, num_outputs, geometry)
        sums_BKE, previous_BN = cluster(geometry, seeds_BK, offsets_BK, spec.num_iterations)
        distance_BKN = geometry.distance(sums_BKE, offsets_BK)
        nearest_BN = first_minimum(distance_BKN.detach(), dim=1)
        if spec.centroid == "soft":
            if spec.object_prior and batch.objects is not None:
                assigned_BN = nearest_BN if spec.penalty_assignment == "final" else previous_BN
                distance_BKN += penalty(batch.objects, batch.mask, assigned_BN, num_outputs)
            merged_BKD = soft_centroids(
                tokens_BND, None if batch.is_full else batch.mask, distance_BKN, spec.tau_s
            )
            has_tokens_BK = slot_mask_BK
        else:
            merged_BKD, has_tokens_BK = self._hard_centroids(
                tokens_BND, batch, nearest_BN, distance_BKN.detach()
            )

        vectors_BKD, mask_BK, assignment_BN = merged_BKD, has_tokens_BK, nearest_BN
        if has_short and budgets_B is not None:  # items within their budget keep their tokens
            is_long_B1 = (batch.lengths > budgets_B).unsqueeze(1)
            identity_N = torch.arange(batch.mask.shape[1], device=batch.mask.device)
            kept_BKD = tokens_BND[:, :num_outputs]
            vectors_BKD = torch.where(is_long_B1.unsqueeze(2), merged_BKD, kept_BKD)
            mask_BK = torch.where(is_long_B1, has_tokens_BK, slot_mask_BK)
            assignment_BN = torch.where(is_long_B1, nearest_BN, identity_N)
        if spec.centroid == "soft":
            return vectors_BKD, mask_BK, assignment_BN
        # At padding, the identity exceeds the number of outputs.
        return pack_outputs(vectors_BKD, mask_BK, assignment_BN.clamp_max(num_outputs - 1))

    def _hard_centroids(
        self,
        tokens_BND: torch.Tensor,
        batch: TokenBatch,
        nearest_BN: torch.Tensor,
        distance_BKN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hard representatives (B, K, D) of appendix A and their mask (B, K)."""
        kind, num_outputs = self.spec.centroid, distance_BKN.shape[1]
        weights_BN = batch.mask.float()
        has_tokens_BK = group_sums(weights_BN.unsqueeze(2), nearest_BN, num_outputs)[..., 0] > 0
        if kind == "medoid":
            is_member_BKN = memberships(nearest_BN.masked_fill(~batch.mask, -1), num_outputs).mT > 0
            medoids_BK = first_minimum(distance_BKN.masked_fill(~is_member_BKN, torch.inf), dim=2)
            index_BKD = medoids_BK.unsqueeze(2).expand(-1, -1, tokens_BND.shape[2])
            return tokens_BND.gather(1, index_BKD), has_tokens_BK
        weighted_BND = tokens_BND
        if kind == "object_weighted" and batch.objects is not None:
            weights_BN = torch.where(batch.objects > 0, self.spec.object_weight, weights_BN)
            weighted_BND = tokens_BND * weights_BN.unsqueeze(2)
        sums_BKD = group_sums(weighted_BND, nearest_BN, num_outputs)
        if kind == "mean":
            sizes_BK1 = group_sums(weights_BN.unsqueeze(2), nearest_BN, num_outputs)
            return sums_BKD / sizes_BK1.clamp_min(1), has_tokens_BK
        return normalise(sums_BKD), has_tokens_BK  # the sum of the weights cancels


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
        ones_BNC = mask_BN.unsqueeze(2).float().expand(-1, -1, num_ones)
        parts = [tokens_BND, ones_BNC]
        # For large coordinates (times in small units), p^2 - 2ps + s^2 loses too many digits.
        self._is_small = True
        if num_axes:
            self._coords_BNA = coords_BNA * gamma**0.5
            is_known_BNA = self._coords_BNA == self._coords_BNA  # not NaN
            filled_BNA = self._coords_BNA.nan_to_num(nan=0.0)
            squares_BNA = filled_BNA.square()
            parts[1:1] = [filled_BNA, squares_BNA, is_known_BNA.float()]
            self._is_small = not squares_BNA.numel() or float(squares_BNA.amax()) <= 1
        self.points_BNE = torch.cat(parts, dim=2)

    def distance(self, sums_BKE: torch.Tensor, offsets_BK: torch.Tensor) -> torch.Tensor:
        """Computes `-v_i . mu_k + gamma * |p_i - s_k|^2` without undefined axes.

        The constant 1 of eq. 2 is omitted, because it affects neither minimum nor softmax and would
        cost a pass over all distances.

        Args:
            sums_BKE: Sum of the points of each centroid.
            offsets_BK: Offset of the distances of each centroid: 0, or `MASKED_DISTANCE` for
                padding.

        Returns:
            Distances (B, K, N), undefined at padded tokens. With tokens as the last dimension,
            reductions over k are vectorised over tokens.
        """
        result_BKN = self._coefficients(sums_BKE, offsets_BK) @ self.points_BNE.mT
        if not self._is_small:
            _, sums_BKA, _, counts_BKA, _ = sums_BKE.split(self._widths, dim=2)
            sites_BKA = sums_BKA / counts_BKA  # 0 / 0 is NaN
            for coord_BN, site_BK in zip(
                self._coords_BNA.unbind(2), sites_BKA.unbind(2), strict=True
            ):
                offset_BKN = (coord_BN.unsqueeze(1) - site_BK.unsqueeze(2)).nan_to_num(nan=0.0)
                result_BKN.addcmul_(offset_BKN, offset_BKN)
        return result_BKN

    def _coefficients(self, sums_BKE: torch.Tensor, offsets_BK: torch.Tensor) -> torch.Tensor:
        """Returns the vectors (B, K, E) whose products with the points are the distances."""
        num_dims, num_axes = self._widths[:2]
        if not sums_BKE.requires_grad and (kernels := kernel_module(sums_BKE)):
            has_sites = self._is_small and num_axes > 0
            return kernels.coefficients(sums_BKE, offsets_BK, num_dims, num_axes, has_sites)
        features_BKD, sums_BKA, _, counts_BKA, ones_BKC = sums_BKE.split(self._widths, dim=2)
        terms = [normalise(features_BKD).neg()]
        if num_axes and self._is_small:
            sites_BKA = sums_BKA / counts_BKA.clamp_min(1)
            terms += [sites_BKA * -2, counts_BKA.clamp_max(1), sites_BKA.square()]
        elif num_axes:
            terms.append(torch.zeros_like(sums_BKE[..., : 3 * num_axes]))
        terms.append(offsets_BK.unsqueeze(2).expand_as(ones_BKC))
        return torch.cat(terms, dim=2)

    def sums(self, nearest_BN: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """Returns the sum (B, K, E) of the points of each group."""
        return group_sums(self.points_BNE, nearest_BN, num_outputs)

    def take(self, positions_BK: torch.Tensor) -> torch.Tensor:
        """Returns the points (B, K, E) of the tokens at the given positions."""
        index_BKE = positions_BK.unsqueeze(2).expand(-1, -1, self.points_BNE.shape[2])
        return self.points_BNE.gather(1, index_BKE)

    def sizes(self, sums_BKE: torch.Tensor) -> torch.Tensor:
        """Returns the number of tokens (B, K, 1) of each centroid."""
        return sums_BKE[..., -1:]

    def seed_distance(self, positions_B: torch.Tensor | None) -> torch.Tensor:
        """Returns the distances (B, N) for `farthest_positions`.

        The centre has the normalised mean of the features and the mean position.
        """
        if positions_B is None:
            sums_B1E = self.points_BNE.sum(dim=1, keepdim=True)
        else:
            sums_B1E = self.take(positions_B.unsqueeze(1))
        return self.distance(sums_B1E, torch.zeros_like(sums_B1E[..., 0])).squeeze(1)


def token_coordinates(
    batch: TokenBatch, axes: tuple[Axis, ...] = ("x", "y"), seconds_per_unit: float | None = None
) -> torch.Tensor:
    """Returns the coordinates p_i of the tokens on the given axes.

    x and y are the centre of a token's box. t is the centre of its time interval relative to the
    item's first t0.

    Args:
        batch: Items with or without extents.
        axes: Axes of the result.
        seconds_per_unit: Unit of t, in seconds. Defaults to the duration of the item. If that is
            zero or undefined, t is 0 for all tokens.

    Returns:
        Coordinates (B, N, A) float32, NaN if undefined; (B, N, 0) without extents.
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
        unit: torch.Tensor | float = torch.where(duration_B1 > 0, duration_B1, torch.inf)
        if seconds_per_unit is not None:
            unit = seconds_per_unit
        # Subtracting first preserves the float32 precision late in long recordings.
        columns["t"] = ((starts_BN - first_B1) + (ends_BN - first_B1)) / 2 / unit
    return torch.stack([columns[axis] for axis in axes], dim=2)


def seed_positions(
    seeds: Placement,
    batch: TokenBatch,
    budgets_B: torch.Tensor | None,
    num_outputs: int,
    geometry: Geometry,
) -> torch.Tensor:
    """Returns the positions (B, K) int64 of the seed tokens, or 0 beyond the budget of an item.

    `budgets_B` is None for a batch without padding in which all budgets are `num_outputs`.
    """
    if budgets_B is None and seeds == "paper":
        size_1, budget_1 = torch.tensor([[batch.mask.shape[1]], [num_outputs]])
        positions_1K = uniform_positions(size_1, budget_1, num_outputs)[0]
        return positions_1K.to(batch.mask.device, non_blocking=True).expand(len(batch), -1)
    if budgets_B is None:
        budgets_B = batch.lengths.clamp(max=num_outputs)
    if seeds == "paper":
        return uniform_positions(batch.lengths, budgets_B, num_outputs)[0]
    if seeds == "lattice":
        coords_BNA = token_coordinates(batch, ("t", "y", "x"))
        positions_BK = lattice_positions(coords_BNA, batch.mask, budgets_B)[0]
    else:
        positions_BK = farthest_positions(geometry.seed_distance, batch.mask, budgets_B)[0]
    missing = num_outputs - positions_BK.shape[1]  # items of other blocks may have larger budgets
    return torch.nn.functional.pad(positions_BK, (0, missing))


@torch.no_grad()
def cluster(
    geometry: Geometry, seeds_BK: torch.Tensor, offsets_BK: torch.Tensor, num_iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs k-means with the distance of eq. 2.

    Each iteration assigns every token to its nearest centroid and moves the centroids to the mean
    of their tokens. Centroids without tokens are not moved.

    Args:
        geometry: Features and positions of the tokens.
        seeds_BK: Positions of the tokens that are the initial centroids.
        offsets_BK: Offset of the distances of each centroid, see `Geometry.distance`.
        num_iterations: Number of iterations.

    Returns:
        Sums of the points of each centroid (B, K, E), see `Geometry`, and the assignment (B, N) of
        the last iteration (of the seeds if there were no iterations).
    """
    sums_BKE = geometry.take(seeds_BK)
    nearest_BN = first_minimum(geometry.distance(sums_BKE, offsets_BK), dim=1)
    for iteration in range(num_iterations):
        if iteration:
            nearest_BN = first_minimum(geometry.distance(sums_BKE, offsets_BK), dim=1)
        new_BKE = geometry.sums(nearest_BN, offsets_BK.shape[1])
        sums_BKE = torch.where(geometry.sizes(new_BKE) > 0, new_BKE, sums_BKE)
    return sums_BKE, nearest_BN


def soft_centroids(
    tokens_BND: torch.Tensor, mask_BN: torch.Tensor | None, distance_BKN: torch.Tensor, tau: float
) -> torch.Tensor:
    """Returns the representatives r_k (B, K, D) of eq. 3, or of eq. 6 if distances have a penalty.

    The weights a_ik are a softmax over k, and r_k divides by their sum over the tokens. The latter
    is computed as a softmax over i of log a_ik, so that weights of distant representatives do not
    underflow. `mask_BN` is True for tokens, or None without padding. Large distances are
    overwritten.
    """
    if distance_BKN.numel() > LARGE and not distance_BKN.requires_grad:
        for part in large_parts(distance_BKN.mul_(-1 / tau), dim=2):
            part.copy_(part.log_softmax(dim=1))
        if mask_BN is not None:
            distance_BKN.masked_fill_(~mask_BN.unsqueeze(1), torch.finfo(distance_BKN.dtype).min)
        for part in large_parts(distance_BKN, dim=1):
            part.copy_(part.softmax(dim=2))
        return normalise(distance_BKN @ tokens_BND)
    kernels = None if distance_BKN.requires_grad else kernel_module(distance_BKN)
    if kernels and distance_BKN.shape[1] <= kernels.MAX_CLASSES:
        log_weights_BKN = kernels.log_softmax(distance_BKN, -1 / tau)
    else:
        log_weights_BKN = (distance_BKN * (-1 / tau)).log_softmax(dim=1)
    if mask_BN is not None:
        lowest = torch.finfo(log_weights_BKN.dtype).min
        log_weights_BKN = log_weights_BKN.masked_fill(~mask_BN.unsqueeze(1), lowest)
    return normalise(log_weights_BKN.softmax(dim=2) @ tokens_BND)


@torch.no_grad()
def penalty(
    objects_BN: torch.Tensor, mask_BN: torch.Tensor, assigned_BN: torch.Tensor, num_outputs: int
) -> torch.Tensor:
    """Computes the penalty `P_inst(i, k) = 1 - P_k(b_i)` (eq. 5).

    Background (0) is treated like an object. Representatives without tokens have penalty 1.

    Args:
        objects_BN: Object b_i of each token.
        mask_BN: True for tokens and False for padding.
        assigned_BN: Hard assignment c_i of each token.
        num_outputs: Number of representatives K.

    Returns:
        Penalties (B, K, N).

    >>> objects, assigned = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 0, 0]])
    >>> penalty(objects, objects >= 0, assigned, num_outputs=2).round(decimals=3).tolist()
    [[[0.3330000042915344, 0.3330000042915344, 0.6669999957084656], [1.0, 1.0, 1.0]]]
    """
    labels, label_BN = objects_BN.masked_fill(~mask_BN, 0).unique(return_inverse=True)
    has_label_BNL = memberships(label_BN, len(labels)) * mask_BN.unsqueeze(2)
    counts_BKL = group_sums(has_label_BNL, assigned_BN, num_outputs)
    shares_BKL = counts_BKL / (counts_BKL.sum(dim=2, keepdim=True) + EPSILON)
    return 1 - shares_BKL.gather(2, label_BN.unsqueeze(1).expand(-1, num_outputs, -1))


def object_labels(
    coords_BN2: torch.Tensor, boxes_BM4: torch.Tensor, box_mask_BM: torch.Tensor
) -> torch.Tensor:
    """Returns the index of the box that contains each token (section 4.2).

    Indices start from 1, and 0 is the background. Boxes include their edges. Tokens in several
    boxes are assigned to the smallest box, or to the first if areas differ by less than 1e-5.
    Tokens without coordinates are background. Annotations often exceed the image slightly, so boxes
    are clipped to the image. Boxes that exceed the image by more than its width or height are
    rejected, because they are most likely in pixels.

    Args:
        coords_BN2: Coordinates x and y of the tokens in [0, 1], NaN if undefined.
        boxes_BM4: Boxes x0, y0, x1, y1 relative to the width and height of the image.
        box_mask_BM: True at real boxes. M may be 0.

    Returns:
        Box indices (B, N) int64.

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

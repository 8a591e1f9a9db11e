"""SaMer, feature-spatial soft merging with an object-aware prior (SaMer paper, section 4)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from pipeline.compression import (
    blocks,
    concatenate,
    first_minimum,
    group_sizes,
    group_sums,
    in_parts,
    kernel_module,
    memberships,
    pack_outputs,
)
from pipeline.compression.geometry import Axis, Geometry, token_coordinates
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
        # A single transfer, because reading values from a GPU waits for all preceding kernels.
        lengths_B, budgets_B = torch.stack([batch.lengths, budgets_B]).cpu()
        return self._reduce(batch, lengths_B, budgets_B)

    def reduce_uniform(self, batch: TokenBatch, budget: int) -> TokenBatch:
        """Compresses a batch without padding with the same budget for all items."""
        lengths_B = torch.full((len(batch),), batch.mask.shape[1])
        return self._reduce(batch, lengths_B, lengths_B.clamp(max=budget))

    def _reduce(
        self, batch: TokenBatch, lengths_B: torch.Tensor, budgets_B: torch.Tensor
    ) -> TokenBatch:
        """Compresses each item to its budget. Lengths and budgets are on the CPU."""
        num_tokens, dim = batch.vectors.shape[1:]
        if torch.equal(lengths_B, budgets_B):
            vectors_BKD, mask_BK = unit_vectors(batch), batch.mask
            identity_N = torch.arange(num_tokens, device=batch.mask.device)
            assignment_BN = identity_N.repeat(len(batch), 1)
        else:
            num_outputs = int(budgets_B.max())
            parts = [
                self._reduce_block(batch.take(rows), lengths_B[rows], budgets_B[rows], num_outputs)
                for rows in blocks(batch.mask, num_tokens * max(num_outputs, dim))
            ]
            vectors_BKD, mask_BK, assignment_BN = map(concatenate, zip(*parts, strict=True))
        return TokenBatch(
            vectors_BKD, mask_BK, self.normalised, pooled=batch.pooled, assignment=assignment_BN
        )

    def _reduce_block(
        self,
        batch: TokenBatch,
        lengths_B: torch.Tensor,
        budgets_B: torch.Tensor,
        num_outputs: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the vectors (B, K, D), mask (B, K) and assignment (B, N) of a block of items."""
        spec, device = self.spec, batch.mask.device
        tokens_BND = unit_vectors(batch)
        is_slot_BK = torch.arange(num_outputs) < budgets_B.unsqueeze(1)
        offsets_BK = torch.where(is_slot_BK, 0.0, MASKED_DISTANCE).to(device, non_blocking=True)
        is_slot_BK = is_slot_BK.to(device, non_blocking=True)
        coords_BNA = token_coordinates(batch, spec.axes, spec.seconds_per_unit)
        geometry = Geometry(tokens_BND, coords_BNA, batch.mask, spec.gamma)
        seeds_BK = seed_positions(spec.seeds, batch, lengths_B, budgets_B, num_outputs, geometry)
        sums_BKE, previous_BN = geometry.cluster(seeds_BK, offsets_BK, spec.num_iterations)
        distance_BKN = geometry.distance(sums_BKE, offsets_BK)
        nearest_BN = first_minimum(distance_BKN.detach(), dim=1)
        if spec.centroid == "soft":
            if spec.object_prior and batch.objects is not None:
                assigned_BN = nearest_BN if spec.penalty_assignment == "final" else previous_BN
                distance_BKN += penalty(batch.objects, batch.mask, assigned_BN, num_outputs)
            mask_BN = None if batch.is_full else batch.mask
            vectors_BKD = soft_centroids(tokens_BND, mask_BN, distance_BKN, spec.tau_s)
            mask_BK = is_slot_BK
        else:
            vectors_BKD, mask_BK = self._hard_centroids(
                tokens_BND, batch, nearest_BN, distance_BKN.detach()
            )
        is_long_B1 = (lengths_B > budgets_B).unsqueeze(1)
        if not is_long_B1.all():  # items within their budget keep their tokens
            is_long_B1 = is_long_B1.to(device, non_blocking=True)
            identity_N = torch.arange(batch.mask.shape[1], device=device)
            kept_BKD = tokens_BND[:, :num_outputs]
            vectors_BKD = torch.where(is_long_B1.unsqueeze(2), vectors_BKD, kept_BKD)
            mask_BK = torch.where(is_long_B1, mask_BK, is_slot_BK)
            nearest_BN = torch.where(is_long_B1, nearest_BN, identity_N)
        if spec.centroid == "soft":
            return vectors_BKD, mask_BK, nearest_BN
        # At padding, the identity exceeds the number of outputs.
        return pack_outputs(vectors_BKD, mask_BK, nearest_BN.clamp_max(num_outputs - 1))

    def _hard_centroids(
        self,
        tokens_BND: torch.Tensor,
        batch: TokenBatch,
        nearest_BN: torch.Tensor,
        distance_BKN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hard representatives (B, K, D) of appendix A and their mask (B, K)."""
        kind, num_outputs = self.spec.centroid, distance_BKN.shape[1]
        groups_BN = nearest_BN.masked_fill(~batch.mask, -1)
        sizes_BK = group_sizes(groups_BN, num_outputs)
        if kind == "medoid":
            is_member_BKN = memberships(groups_BN, num_outputs).mT > 0
            medoids_BK = first_minimum(distance_BKN.masked_fill(~is_member_BKN, torch.inf), dim=2)
            index_BKD = medoids_BK.unsqueeze(2).expand(-1, -1, tokens_BND.shape[2])
            return tokens_BND.gather(1, index_BKD), sizes_BK > 0
        if kind == "object_weighted" and batch.objects is not None:
            weights_BN = torch.where(batch.objects > 0, self.spec.object_weight, 1.0)
            tokens_BND = tokens_BND * weights_BN.unsqueeze(2)
        sums_BKD = group_sums(tokens_BND, groups_BN, num_outputs)
        if kind == "mean":
            return sums_BKD / sizes_BK.clamp_min(1).unsqueeze(2), sizes_BK > 0
        return normalise(sums_BKD), sizes_BK > 0  # the sum of the weights cancels


def seed_positions(
    seeds: Placement,
    batch: TokenBatch,
    lengths_B: torch.Tensor,
    budgets_B: torch.Tensor,
    num_outputs: int,
    geometry: Geometry,
) -> torch.Tensor:
    """Returns the positions (B, K) int64 of the seed tokens, or 0 beyond the budget of an item.

    `lengths_B` and `budgets_B` are on the CPU.
    """
    device = batch.mask.device
    if seeds == "paper":
        positions_BK = uniform_positions(lengths_B, budgets_B, num_outputs)[0]
        return positions_BK.to(device, non_blocking=True)
    budgets_B = budgets_B.to(device, non_blocking=True)
    if seeds == "lattice":
        coords_BNA = token_coordinates(batch, ("t", "y", "x"))
        positions_BK = lattice_positions(coords_BNA, batch.mask, budgets_B)[0]
    else:
        positions_BK = farthest_positions(geometry.seed_distance, batch.mask, budgets_B)[0]
    missing = num_outputs - positions_BK.shape[1]  # items of other blocks may have larger budgets
    return torch.nn.functional.pad(positions_BK, (0, missing))


def soft_centroids(
    tokens_BND: torch.Tensor, mask_BN: torch.Tensor | None, distance_BKN: torch.Tensor, tau: float
) -> torch.Tensor:
    """Returns the representatives r_k (B, K, D) of eq. 3, or of eq. 6 if distances have a penalty.

    The weights a_ik are a softmax over k, and r_k divides by their sum over the tokens. The latter
    is computed as a softmax over i of log a_ik, so that weights of distant representatives do not
    underflow. `mask_BN` is True for tokens, or None without padding. Large distances are
    overwritten.
    """

    def log_assignment(distance_BKN: torch.Tensor) -> torch.Tensor:
        kernels = None if distance_BKN.requires_grad else kernel_module(distance_BKN)
        if kernels and distance_BKN.shape[1] <= kernels.MAX_CLASSES:
            return kernels.log_softmax(distance_BKN, -1 / tau)
        return (distance_BKN * (-1 / tau)).log_softmax(dim=1)

    def token_weights(log_weights_BKN: torch.Tensor) -> torch.Tensor:
        if mask_BN is not None:
            lowest = torch.finfo(log_weights_BKN.dtype).min
            log_weights_BKN = log_weights_BKN.masked_fill(~mask_BN.unsqueeze(1), lowest)
        return log_weights_BKN.softmax(dim=2)

    log_weights_BKN = in_parts(log_assignment, distance_BKN, dim=2)
    return normalise(in_parts(token_weights, log_weights_BKN, dim=1) @ tokens_BND)


@torch.no_grad()
def penalty(
    objects_BN: torch.Tensor, mask_BN: torch.Tensor, assigned_BN: torch.Tensor, num_outputs: int
) -> torch.Tensor:
    """Computes the penalty `P_inst(i, k) = 1 - P_k(b_i)` (B, K, N) (eq. 5).

    `objects_BN` is b_i, `assigned_BN` the hard assignment c_i. Background (0) is treated like an
    object. Representatives without tokens have penalty 1.

    >>> objects, assigned = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 0, 0]])
    >>> penalty(objects, objects >= 0, assigned, num_outputs=2).round(decimals=3).tolist()
    [[[0.3330000042915344, 0.3330000042915344, 0.6669999957084656], [1.0, 1.0, 1.0]]]
    """
    labels, label_BN = objects_BN.masked_fill(~mask_BN, 0).unique(return_inverse=True)
    has_label_BNL = memberships(label_BN, len(labels)) * mask_BN.unsqueeze(2)
    counts_BKL = group_sums(has_label_BNL, assigned_BN, num_outputs)
    shares_BKL = counts_BKL / (counts_BKL.sum(dim=2, keepdim=True) + EPSILON)
    return 1 - shares_BKL.gather(2, label_BN.unsqueeze(1).expand(-1, num_outputs, -1))

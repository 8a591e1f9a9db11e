"""SaMer: feature-spatial soft merging, with an object-aware prior (SaMer paper, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from pipeline.compression import (
    blocks,
    close_ranks,
    first_minimum,
    group_sums,
    memberships,
)
from pipeline.compression.seeds import (
    Placement,
    Seeded,
    SeededCompressor,
    farthest_positions,
    lattice_positions,
    uniform_positions,
)
from pipeline.config import SpecError
from pipeline.tokens import TokenBatch, normalise, unit_vectors

Axis = Literal["x", "y", "t"]

#: The distance of a representative that an item's budget does not reach.
FAR = 1e20
#: Of eq. 5. The paper names no value; that of its public code.
EPSILON = 1e-6


class SaMer(SeededCompressor):
    """Merges the tokens into K centroids by soft assignment over features and positions.

    K seeds, by default uniform in the token order, become centroids by `num_iterations` rounds of
    hard k-means under the distance of eq. 2; then eq. 3 gives each representative as a softly
    weighted mean. The paper names no values for the options; the defaults are those of its
    public code.

    Gradients flow through the tokens and the soft weights, not through seeds, k-means and hard
    assignments.
    """

    class Spec(Seeded):
        """Options of SaMer.

        Attributes:
            seeds: see `Seeded`. "farthest" samples by the distance of eq. 2, thus by features and
                by the positions on `axes`, in space-time if `t` is among them.
            gamma: the weight of the spatial term of eq. 2.
            tau_s: the temperature of the soft assignment.
            num_iterations: rounds of k-means.
            axes: which coordinates make up the position of a token, the centre of its box and of
                its time; where one is NaN it is left out for this token. Of the paper's unit
                square and its code, which repeats the square for each frame, x and y is the
                default. Without boxes only the feature term remains: soft spherical k-means, with
                the token order in the seeds alone.
            seconds_per_unit: how many seconds of `t` weigh as much as the width of the picture;
                None: as many as the item lasts, from its first t0 to its last t1.
            centroid: what stands for a group (appendix A). "soft" is eq. 3, or eq. 6. The others
                take the tokens whose nearest centroid it is, and give nothing where there are none:
                "mean" their mean as it is, hence the only one that is *not* of unit length;
                "normalised" the same at unit length; "medoid" that token of them which is nearest
                to the centroid by eq. 2; "object_weighted" the mean in which tokens of objects
                (`TokenBatch.objects`) count `object_weight` times, at unit length: "normalised"
                for a batch without objects.
            object_weight: see there; the paper names no value.
            object_prior: adds the penalty of eq. 5 to the distance (eq. 6) for batches that bring
                `objects`. That is in training only, so for others it makes no difference.
            penalty_assignment: the hard assignment c_i of eq. 5. "final" takes it by the distance
                that eq. 6 uses, as the paper says; "previous" is the one from before the last
                update of the centroids (the same if there was none), as its public code does.
        """

        name: Literal["samer"] = "samer"
        gamma: float = Field(0.1, ge=0, allow_inf_nan=False)
        tau_s: float = Field(0.07, gt=0, allow_inf_nan=False)
        num_iterations: int = Field(3, ge=0)
        axes: tuple[Axis, ...] = ("x", "y")
        seconds_per_unit: float | None = Field(None, gt=0, allow_inf_nan=False)
        centroid: Literal["soft", "mean", "normalised", "medoid", "object_weighted"] = "soft"
        object_weight: float = Field(2.0, ge=1, allow_inf_nan=False)
        object_prior: bool = False
        penalty_assignment: Literal["final", "previous"] = "final"

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
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

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        num_tokens = batch.mask.shape[1]
        if torch.equal(budgets_B, batch.lengths):
            own_BN = torch.arange(num_tokens, device=batch.mask.device).expand_as(batch.mask)
            tokens_BND = unit_vectors(batch)
            return TokenBatch(
                tokens_BND, batch.mask, self.normalised, pooled=batch.pooled, support=own_BN
            )
        num_outputs = int(budgets_B.max())
        largest_tensor = num_tokens * max(num_outputs, batch.vectors.shape[2])
        parts = []
        for block in blocks(batch.mask, largest_tensor):
            parts.append(self._reduce_block(batch.take(block), budgets_B[block], num_outputs))
        vectors_BKD, mask_BK, support_BN = (torch.cat(p) for p in zip(*parts, strict=True))
        return TokenBatch(
            vectors_BKD, mask_BK, self.normalised, pooled=batch.pooled, support=support_BN
        )

    def _reduce_block(
        self, batch: TokenBatch, budgets_B: torch.Tensor, num_outputs: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The vectors (B, K, D), mask (B, K) and support (B, N) of a few items."""
        spec = self.spec
        tokens_BND = unit_vectors(batch)
        slots_K = torch.arange(num_outputs, device=budgets_B.device)
        slot_mask_BK = slots_K < budgets_B.unsqueeze(1)
        places_BNA = places(batch, spec.axes, spec.seconds_per_unit)
        geometry = Geometry(places_BNA, batch.mask, spec.gamma)
        seeds_BK = seed_positions(spec.seeds, tokens_BND, batch, budgets_B, geometry)
        features_BKD, sites_BKA, previous_BN = cluster(
            tokens_BND, seeds_BK, slot_mask_BK, geometry, spec.num_iterations
        )
        distance_BKN = geometry.distance(tokens_BND, features_BKD, sites_BKA, slot_mask_BK)
        nearest_BN = first_minimum(distance_BKN.detach(), dim=1)
        if spec.centroid == "soft":
            if spec.object_prior and batch.objects is not None:
                assigned_BN = nearest_BN if spec.penalty_assignment == "final" else previous_BN
                distance_BKN += penalty(batch.objects, batch.mask, assigned_BN, num_outputs)
            merged_BKD = soft_centroids(tokens_BND, batch.mask, distance_BKN, spec.tau_s)
            has_tokens_BK = slot_mask_BK
        else:
            merged_BKD, has_tokens_BK = self._hard_centroids(
                tokens_BND, batch, nearest_BN, distance_BKN.detach()
            )

        # Items within their budget went through the arithmetic and get their own tokens back.
        is_long_B1 = (batch.lengths > budgets_B).unsqueeze(1)
        own_N = torch.arange(batch.mask.shape[1], device=batch.mask.device)
        own_BKD = tokens_BND[:, :num_outputs]
        vectors_BKD = torch.where(is_long_B1.unsqueeze(2), merged_BKD, own_BKD)
        mask_BK = torch.where(is_long_B1, has_tokens_BK, slot_mask_BK)
        support_BN = torch.where(is_long_B1, nearest_BN, own_N)
        if spec.centroid == "soft":
            return vectors_BKD, mask_BK, support_BN
        # Positions at padding count up beyond the outputs; they have no meaning.
        return close_ranks(vectors_BKD, mask_BK, support_BN.clamp_max(num_outputs - 1))

    def _hard_centroids(
        self,
        tokens_BND: torch.Tensor,
        batch: TokenBatch,
        nearest_BN: torch.Tensor,
        distance_BKN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The representatives (B, K, D) of appendix A's other variants, and which have tokens."""
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
        return normalise(sums_BKD), has_tokens_BK  # of weighted sums: the weights' sum cancels


class Geometry:
    """Positions p_i of the tokens of a block, and the distance of eq. 2 that they give.

    Args:
        places_BNA: (B, N, A), NaN where a token has no such coordinate; A may be 0.
        mask_BN: which tokens are real.
        gamma: the weight of the spatial term.
    """

    def __init__(self, places_BNA: torch.Tensor, mask_BN: torch.Tensor, gamma: float):
        self.places_BNA, self.gamma = places_BNA, gamma
        is_known_BNA = ~places_BNA.isnan() & mask_BN.unsqueeze(2)
        known_BNA, filled_BNA = is_known_BNA.float(), places_BNA.masked_fill(~is_known_BNA, 0.0)
        self._counted = torch.cat([mask_BN.unsqueeze(2).float(), known_BNA, filled_BNA], dim=2)
        squares_BNA = filled_BNA.square()
        self._moments = torch.cat([squares_BNA, filled_BNA, known_BNA], dim=2)
        # Else the digits that cancel in p^2 - 2ps + s^2 would be missed (times in small units).
        self._is_small = bool((gamma * squares_BNA <= 1).all())

    def distance(
        self,
        tokens_BND: torch.Tensor,
        features_BKD: torch.Tensor,
        sites_BKA: torch.Tensor,
        slot_mask_BK: torch.Tensor,
    ) -> torch.Tensor:
        """(B, K, N): `-v_i . mu_k + gamma * |p_i - s_k|^2`, NaN axes left out.

        That is eq. 2 without its 1, which changes no minimum and no softmax, and would cost a pass
        over all distances. `FAR` where there is no slot. Laid out with the tokens last: reductions
        over k then run over whole vectors of tokens at once.
        """
        result_BKN = features_BKD.neg() @ tokens_BND.mT
        if self._is_small:
            is_known_BKA, filled_BKA = ~sites_BKA.isnan(), sites_BKA.nan_to_num(nan=0.0)
            moments = torch.cat([is_known_BKA, -2 * filled_BKA, filled_BKA.square()], dim=2)
            result_BKN.baddbmm_(self.gamma * moments, self._moments.mT)
        else:
            for place_BN, site_BK in zip(
                self.places_BNA.unbind(2), sites_BKA.unbind(2), strict=True
            ):
                apart_BKN = (place_BN.unsqueeze(1) - site_BK.unsqueeze(2)).nan_to_num(nan=0.0)
                result_BKN.addcmul_(apart_BKN, apart_BKN, value=self.gamma)
        if not bool(slot_mask_BK.all()):
            result_BKN.masked_fill_(~slot_mask_BK.unsqueeze(2), FAR)
        return result_BKN

    def sites(
        self, nearest_BN: torch.Tensor, num_outputs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tokens each group has, (B, K, 1), and their mean position, (B, K, A).

        NaN on axes that no member has.
        """
        num_axes = self.places_BNA.shape[2]
        sums = group_sums(self._counted, nearest_BN, num_outputs)
        sizes_BK1, num_placed_BKA, sums_BKA = sums.split([1, num_axes, num_axes], dim=2)
        return sizes_BK1, sums_BKA / num_placed_BKA  # 0 / 0 is NaN

    def apart(self, tokens_BND: torch.Tensor) -> Callable[[torch.Tensor | None], torch.Tensor]:
        """A function of the distances (B, N) from tokens, as `farthest_positions` takes it.

        The centre is the unit mean of the features, at the mean position.
        """

        def distance(positions_B: torch.Tensor | None) -> torch.Tensor:
            if positions_B is None:
                features_B1D = normalise(tokens_BND.sum(dim=1, keepdim=True))
                all_BN = tokens_BND.new_zeros(tokens_BND.shape[:2], dtype=torch.int64)
                sites_B1A = self.sites(all_BN, 1)[1]
            else:
                rows = torch.arange(len(positions_B), device=positions_B.device)
                features_B1D = tokens_BND[rows, positions_B].unsqueeze(1)
                sites_B1A = self.places_BNA[rows, positions_B].unsqueeze(1)
            slots_B1 = torch.ones(len(tokens_BND), 1, dtype=torch.bool, device=tokens_BND.device)
            return self.distance(tokens_BND, features_B1D, sites_B1A, slots_B1).squeeze(1)

        return distance


def places(
    batch: TokenBatch, axes: tuple[Axis, ...] = ("x", "y"), seconds_per_unit: float | None = None
) -> torch.Tensor:
    """(B, N, A) positions p_i of the tokens on the given axes, NaN without meaning.

    x and y are the centre of a token's box. t is the middle of its time, counted from the item's
    first t0 in units of `seconds_per_unit`, or of the item's duration if that is None: 0 for all if
    it has none. Without extents there are no axes: (B, N, 0).
    """
    if batch.extents is None or not axes or not batch.mask.shape[1]:
        return batch.vectors.new_zeros((*batch.mask.shape, 0), dtype=torch.float32)
    extents = batch.extents.float().masked_fill(~batch.mask.unsqueeze(2), torch.nan)
    columns = {"x": (extents[..., 0] + extents[..., 2]) / 2}
    columns["y"] = (extents[..., 1] + extents[..., 3]) / 2
    if "t" in axes:
        starts_BN, ends_BN = extents[..., 4], extents[..., 5]
        first_B1 = starts_BN.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
        last_B1 = ends_BN.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
        duration_B1 = last_B1 - first_B1
        unit: torch.Tensor | float = torch.where(duration_B1 > 0, duration_B1, torch.inf)
        if seconds_per_unit is not None:
            unit = seconds_per_unit
        # Differences first: late in a long recording float32 has no digits to spare.
        columns["t"] = ((starts_BN - first_B1) + (ends_BN - first_B1)) / 2 / unit
    return torch.stack([columns[axis] for axis in axes], dim=2)


def seed_positions(
    seeds: Placement,
    tokens_BND: torch.Tensor,
    batch: TokenBatch,
    budgets_B: torch.Tensor,
    geometry: Geometry,
) -> torch.Tensor:
    """Positions (B, K) int64 of the first centroids; 0 beyond an item's budget."""
    if seeds == "lattice":
        places_BNA = places(batch, ("t", "y", "x"))
        return lattice_positions(places_BNA, batch.mask, budgets_B)[0]
    if seeds == "farthest":
        return farthest_positions(geometry.apart(tokens_BND), batch.mask, budgets_B)[0]
    return uniform_positions(batch.lengths, budgets_B)[0]


@torch.no_grad()
def cluster(
    tokens_BND: torch.Tensor,
    seeds_BK: torch.Tensor,
    slot_mask_BK: torch.Tensor,
    geometry: Geometry,
    num_iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the centroids of eq. 2 by k-means.

    Each iteration assigns every token to its nearest centroid and moves the centroid to the mean
    of its tokens; one without tokens stays.

    Args:
        tokens_BND: Token vectors of unit length, zero at padding.
        seeds_BK: Positions of the tokens that are the initial centroids.
        slot_mask_BK: bool, valid centroids.
        geometry: Positions of the tokens, and the distance of eq. 2.
        num_iterations: Number of iterations.

    Returns:
        Centroids mu (B, K, D) of unit length, their positions s (B, K, A), and the last assignment
        (B, N) that moved them; without an iteration, the first one.
    """
    num_outputs = slot_mask_BK.shape[1]
    missing = num_outputs - seeds_BK.shape[1]  # other items of the batch have larger budgets
    seeds_BK1 = torch.nn.functional.pad(seeds_BK, (0, missing)).unsqueeze(2)
    features_BKD = tokens_BND.gather(1, seeds_BK1.expand(-1, -1, tokens_BND.shape[2]))
    sites_BKA = geometry.places_BNA.gather(
        1, seeds_BK1.expand(-1, -1, geometry.places_BNA.shape[2])
    )

    def nearest() -> torch.Tensor:
        distance_BKN = geometry.distance(tokens_BND, features_BKD, sites_BKA, slot_mask_BK)
        return first_minimum(distance_BKN, dim=1)

    if num_iterations == 0:
        return features_BKD, sites_BKA, nearest()
    for _ in range(num_iterations):
        nearest_BN = nearest()
        sizes_BK1, means_BKA = geometry.sites(nearest_BN, num_outputs)
        means_BKD = normalise(group_sums(tokens_BND, nearest_BN, num_outputs))
        features_BKD = torch.where(sizes_BK1 > 0, means_BKD, features_BKD)
        sites_BKA = torch.where(sizes_BK1 > 0, means_BKA, sites_BKA)
    return features_BKD, sites_BKA, nearest_BN


def soft_centroids(
    tokens_BND: torch.Tensor, mask_BN: torch.Tensor, distance_BKN: torch.Tensor, tau: float
) -> torch.Tensor:
    """(B, K, D): the representatives r_k of eq. 3; with a penalty in `distance_BKN`, of eq. 6.

    The weights a_ik are a softmax over k. Each r_k divides by their sum over the tokens, so that
    too is a softmax, over i, of log a_ik: no weight underflows however far a representative is.
    """
    log_weights_BKN = (distance_BKN * (-1 / tau)).log_softmax(dim=1)
    if not bool(mask_BN.all()):
        lowest = torch.finfo(log_weights_BKN.dtype).min
        log_weights_BKN = log_weights_BKN.masked_fill(~mask_BN.unsqueeze(1), lowest)
    return normalise(log_weights_BKN.softmax(dim=2) @ tokens_BND)


@torch.no_grad()
def penalty(
    objects_BN: torch.Tensor, mask_BN: torch.Tensor, assigned_BN: torch.Tensor, num_outputs: int
) -> torch.Tensor:
    """(B, K, N): `P_inst(i, k) = 1 - P_k(b_i)` (eq. 5), the objects b_i, c_i the assignment.

    Background (0) is an object like any other; a representative without tokens has penalty 1.

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
    places_BN2: torch.Tensor, boxes_BM4: torch.Tensor, box_mask_BM: torch.Tensor
) -> torch.Tensor:
    """(B, N) int64: the box that each token lies in, from 1; 0 is background (section 4.2).

    Edges belong to a box. A token in several boxes has the smallest; of those whose areas differ by
    less than 1e-5 of the picture, the first. A token without a position is background. Annotations
    often overhang the picture by a little, so a box is cut off at the edges, and its area is that
    of what remains. One that reaches further out than the picture is wide or high is not in shares
    of the picture, most likely in pixels.

    Args:
        places_BN2: x, y of the tokens in [0, 1], see `places`; NaN without meaning.
        boxes_BM4: x0, y0, x1, y1 of the boxes as shares of the picture.
        box_mask_BM: which boxes are real; M may be 0.

    Raises:
        SpecError: for `boxes`: one is not finite, has no area, lies outside the picture, or reaches
            too far out.

    >>> places_BN2 = torch.tensor([[[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]]])
    >>> boxes = torch.tensor([[[0.0, 0.0, 0.6, 0.6], [0.4, 0.4, 0.6, 0.6]]])
    >>> object_labels(places_BN2, boxes, torch.ones(1, 2, dtype=torch.bool)).tolist()
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
        return torch.zeros(places_BN2.shape[:2], dtype=torch.int64, device=places_BN2.device)
    low_BM2, high_BM2 = low_BM2.clamp(0, 1), high_BM2.clamp(0, 1)
    places_BN12 = places_BN2.unsqueeze(2)
    is_in_BNM2 = (places_BN12 >= low_BM2.unsqueeze(1)) & (places_BN12 <= high_BM2.unsqueeze(1))
    is_in_BNM = is_in_BNM2.all(dim=3) & box_mask_BM.unsqueeze(1)
    areas_B1M = (high_BM2 - low_BM2).prod(dim=2).unsqueeze(1)
    smallest_BN = first_minimum(torch.where(is_in_BNM, areas_B1M, torch.inf), dim=2)
    return torch.where(is_in_BNM.any(dim=2), smallest_BN + 1, 0)

"""K-centre merging: farthest-point clustering of the tokens (Gonzalez, 1985)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline.compression import (
    TIE_TOLERANCE,
    Budget,
    Budgeted,
    blocks,
    first_minimum,
    group_sizes,
    group_sums,
    kernel_module,
    pack_outputs,
)
from pipeline.compression.attention_clustering import nearest
from pipeline.compression.seeds import farthest_order
from pipeline.taps import Tap, TapName
from pipeline.tokens import TokenBatch, normalise, unit_vectors

#: Maximum number of centres whose groups are merged. The costs of merges are quadratic in it.
MAX_MERGED = 2048
DEFAULT_OVERSAMPLING = 1.5
#: Ratio of the budgets for which `output: progressive` computes means.
LEVEL_RATIO = 4


class KCenter(Budgeted["KCenter.Spec"]):
    """Groups the tokens around centres that cover them, and stores the mean of each group.

    The centres are selected by farthest-point sampling: the first is the token most similar to the
    mean of all unit vectors, and each further centre is the token with the largest distance
    `1 - cos` to its nearest centre. Ties within 1e-5 are broken in favour of the first token. Each
    token is assigned to its nearest centre. The time is O(N K D) per item.

    If `oversampling` is larger than 1, more centres than vectors are selected, and their groups are
    merged by Ward's criterion until K remain. Otherwise, outliers occupy centres of their own,
    which costs quality on text.

    Let r be the covering radius, the largest Euclidean distance of a unit token vector to its
    nearest centre. For a query token of unit length, the maximum similarity to the centres is at
    most r smaller than the maximum similarity to the tokens (Cauchy-Schwarz inequality). If groups
    are not merged, the mean of a group, before normalisation, is at most 2r away from its tokens.

    With the output "progressive", the first k vectors of an item are a representation with the
    budget k.
    """

    class Spec(Budget):
        """Options of `KCenter`."""

        name: Literal["kcenter"] = "kcenter"
        output: Literal["mean", "progressive"] = "mean"
        """Vector of a group.

        - "mean": The normalised mean of its unit vectors.
        - "progressive": The normalised sum of two unit vectors: the mean of the group, and the mean
          of the group that the same centre has among the first 1, 4, 16, 64, ... centres, whichever
          number is the first to include the centre. The former is specific, and the latter covers
          all tokens if only a prefix of the vectors is used.
        """
        oversampling: float = Field(DEFAULT_OVERSAMPLING, ge=1, le=64, allow_inf_nan=False)
        """Number of centres selected per vector. The surplus is merged. `max_radius` and the output
        "progressive" merge no groups; other values than the default are rejected.
        """
        start: Literal["mean", "first", "outlier"] = "mean"
        """First centre: the token most similar to the mean, the first token of the item, or the
        token least similar to the mean.
        """
        saliency: TapName | None = None
        """Attention statistic whose values weight the distances in the selection of centres and
        the tokens in the means, see `pipeline.taps`.
        """
        max_radius: float | None = Field(None, gt=0, le=2)
        """Covering radius at which no more centres are selected, so that items of little content
        have fewer vectors. Without `num_vectors` and `ratio`, it is the only limit.
        """

        @model_validator(mode="after")
        def _check_oversampling(self) -> Self:
            is_valid = self.merges or self.oversampling in (1, DEFAULT_OVERSAMPLING)
            cause = "max_radius" if self.output == "mean" else f"output: {self.output}"
            self.require(is_valid, "oversampling", f"omitted with {cause}")
            return self

        @property
        def merges(self) -> bool:
            """True if groups are merged, for which more centres than vectors are selected."""
            return self.output == "mean" and self.max_radius is None

        @property
        def requires_budget(self) -> bool:
            """True if `num_vectors` or `ratio` must be set."""
            return self.max_radius is None

        def budgets(self, lengths: torch.Tensor) -> torch.Tensor:
            """Computes the vector budget of items, without the limit by `max_radius`."""
            return lengths if self.num_vectors is self.ratio is None else super().budgets(lengths)

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray] | None = None):
        super().__init__(spec, artefact)
        self.keeps_tokens = not self.is_nested  # the nested order is not that of the tokens

    @property
    def is_nested(self) -> bool:
        """True if the first k vectors of an item form a representation with budget k."""
        return self.spec.output == "progressive"

    @cached_property
    def needs_taps(self) -> tuple[Tap, ...]:
        """Attention statistic that weights the tokens, if any."""
        return () if self.spec.saliency is None else (Tap.parse(self.spec.saliency),)

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """Compresses each item to its budget."""
        dim, num_outputs = batch.vectors.shape[2], int(budgets_B.max()) if len(batch) else 0
        if num_outputs == 0:
            vectors_BKD = batch.vectors.new_zeros((len(batch), 0, dim), dtype=torch.float32)
            groups_BN = torch.full_like(batch.mask, -1, dtype=torch.int64)
            mask_BK = batch.mask[:, :0]
            return TokenBatch(vectors_BKD, mask_BK, True, pooled=batch.pooled, assignment=groups_BN)
        num_groups = int(self._num_centres(budgets_B, batch.lengths).max())
        is_merged = num_groups > num_outputs
        size = num_groups * (max(num_groups, dim) if is_merged else dim)
        parts = [
            self._reduce_block(batch.take(rows), budgets_B[rows], num_outputs, num_groups)
            for rows in blocks(batch.mask, size)
        ]
        vectors_BKD, mask_BK, groups_BN = (torch.cat(part) for part in zip(*parts, strict=True))
        return TokenBatch(vectors_BKD, mask_BK, True, pooled=batch.pooled, assignment=groups_BN)

    def _reduce_block(
        self, batch: TokenBatch, budgets_B: torch.Tensor, num_outputs: int, num_groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns vectors (B, num_outputs, D), their mask, and the assignment (B, N).

        Tokens are grouped in smaller blocks, because the tokens of a block have to fit into the
        cache. A merge takes little time per item, so it is faster for many items at once.
        """
        num_tokens, dim = batch.vectors.shape[1:]
        parts = [
            self._group(batch.take(rows), budgets_B[rows], num_groups)
            for rows in blocks(
                batch.mask, num_tokens * max(num_groups, dim, self._num_pairs(batch))
            )
        ]
        vectors_BMD, sums_BMD, groups_BN, budgets_B = (
            torch.cat(part) for part in zip(*parts, strict=True)
        )
        sizes_BM = group_sizes(groups_BN, num_groups)
        if self.is_nested:
            return pack_outputs(vectors_BMD, sizes_BM > 0, groups_BN)
        merged_BM = merge_groups(sums_BMD, sizes_BM, budgets_B)
        vectors_BKD = normalise(group_sums(vectors_BMD, merged_BM, num_outputs))
        num_merged_B1 = 1 + merged_BM.amax(dim=1, keepdim=True)
        mask_BK = torch.arange(num_outputs, device=merged_BM.device) < num_merged_B1
        return vectors_BKD, mask_BK, renumber(groups_BN, merged_BM)

    def _group(
        self, batch: TokenBatch, budgets_B: torch.Tensor, num_groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Groups the tokens around at most `num_groups` (M) centres per item.

        Returns:
            Weighted sums of the groups (B, M, D), or the output vectors if they are nested;
            unweighted sums (B, M, D), arbitrary if the output is nested; group of each token
            (B, N), -1 at padding; budget of each item (B,).
        """
        tokens_BND = unit_vectors(batch)
        batch = replace(batch, vectors=tokens_BND, normalised=True)
        weights_BN = self._weights(batch)
        num_centres_B = self._num_centres(budgets_B, batch.lengths)
        num_centres = max(1, int(num_centres_B.max()))
        radii_BM, distance_BMN = self._centres(batch, weights_BN, num_centres)
        if self._max_distance is not None:
            budgets_B = torch.minimum(budgets_B, enough_centres(radii_BM, self._max_distance))
            num_centres_B = budgets_B
        ranks_M = torch.arange(distance_BMN.shape[1], device=budgets_B.device)
        slot_mask_BM = ranks_M < num_centres_B.unsqueeze(1)
        groups_BN = nearest(distance_BMN, slot_mask_BM, batch.mask)
        if self.is_nested:
            vectors_BMD = progressive_vectors(
                batch, distance_BMN, slot_mask_BM, groups_BN, weights_BN
            )
            missing = num_groups - vectors_BMD.shape[1]
            vectors_BMD = torch.nn.functional.pad(vectors_BMD, (0, 0, 0, missing))
            return vectors_BMD, vectors_BMD, groups_BN, budgets_B
        is_kept_B1 = (batch.lengths <= budgets_B).unsqueeze(1)
        positions_N = torch.arange(batch.mask.shape[1], device=groups_BN.device)
        groups_BN = torch.where(is_kept_B1 & batch.mask, positions_N, groups_BN)
        sums_BMD = group_sums(tokens_BND, groups_BN, num_groups)
        if weights_BN is None:
            return sums_BMD, sums_BMD, groups_BN, budgets_B
        weighted_BND = tokens_BND * weights_BN.unsqueeze(2)
        weighted_BMD = group_sums(weighted_BND, groups_BN, num_groups)
        return weighted_BMD, sums_BMD, groups_BN, budgets_B

    def _num_pairs(self, batch: TokenBatch) -> int:
        """Returns the number of distances per token that `_centres` computes at once."""
        kernels, num_tokens = kernel_module(batch.vectors), batch.mask.shape[1]
        is_used = kernels and num_tokens <= kernels.MAX_TOKENS and self._max_distance is None
        return num_tokens if is_used else 1

    @torch.no_grad()
    def _centres(
        self, batch: TokenBatch, weights_BN: torch.Tensor | None, num_centres: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selects M centres by farthest-point sampling of weighted distances (`farthest_order`).

        Returns covering radii (B, M), and distances of the tokens from the centres (B, M, N).
        """
        tokens_BND, max_distance = batch.vectors, self._max_distance
        distances: list[torch.Tensor] = []  # (B, N) from each centre
        distance = seed_distance(tokens_BND, batch.mask, self.spec.start, distances)
        kernels = kernel_module(tokens_BND)
        if kernels and self._num_pairs(batch) > 1:
            first_B = first_minimum(distance(None).masked_fill(~batch.mask, torch.inf), dim=1)
            distance_BNN = (tokens_BND @ tokens_BND.mT).neg_().add_(1.0)
            centres_BM, radii_BM = kernels.farthest_order(
                distance_BNN, first_B, batch.lengths, num_centres, weights_BN, TIE_TOLERANCE
            )
            index_BMN = centres_BM.unsqueeze(2).expand(-1, -1, distance_BNN.shape[2])
            return radii_BM, distance_BNN.gather(1, index_BMN)
        radii_BM = farthest_order(distance, batch.mask, num_centres, weights_BN, max_distance)[1]
        return radii_BM, torch.stack(distances, dim=1)

    @property
    def _max_distance(self) -> float | None:
        """Maximum distance `1 - cos` of a token to its centre, if there is one."""
        radius = self.spec.max_radius
        # |x - c|^2 = 2 (1 - cos); the tolerance covers rounding errors of equal tokens.
        return None if radius is None else radius**2 / 2 + 1e-6

    def _num_centres(self, budgets_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Returns the number of centres per item before groups are merged."""
        if not self.spec.merges:
            return budgets_B
        wanted_B = (budgets_B.double() * self.spec.oversampling).ceil().long().clamp(max=MAX_MERGED)
        return torch.minimum(torch.maximum(wanted_B, budgets_B), lengths_B)

    def _weights(self, batch: TokenBatch) -> torch.Tensor | None:
        """Returns the weights (B, N) of the tokens, 0 at padding, or None if all are equal."""
        if self.spec.saliency is None:
            return None
        weights_BN = batch.taps[self.spec.saliency].float()
        return weights_BN.clamp_min(1e-12).masked_fill(~batch.mask, 0.0)


def seed_distance(
    tokens_BND: torch.Tensor,
    mask_BN: torch.Tensor,
    start: Literal["mean", "first", "outlier"],
    distances: list[torch.Tensor] | None = None,
) -> Callable[[torch.Tensor | None], torch.Tensor]:
    """Returns the cosine distance function for `farthest_order`.

    Args:
        tokens_BND: Unit vectors, zero at padding.
        mask_BN: True for tokens, which come first in each row.
        start: First centre, see `KCenter.Spec.start`.
        distances: List to which the distances (B, N) from each centre are appended.
    """
    # On a CPU, products of a row vector with a contiguous matrix are 2 times as fast as with a
    # transposed view, and 8 times as fast as products of a matrix with a column vector.
    tokens_BDN = tokens_BND.detach().mT.contiguous()

    def distance(positions_B: torch.Tensor | None) -> torch.Tensor:
        if positions_B is None and start == "first":
            return torch.arange(mask_BN.shape[1], device=mask_BN.device).float().expand_as(mask_BN)
        if positions_B is None:
            features_BD = normalise(tokens_BND.sum(dim=1))
            sign = -1.0 if start == "outlier" else 1.0
        else:
            rows_B = torch.arange(len(mask_BN), device=mask_BN.device)
            features_BD = tokens_BND[rows_B, positions_B]
            sign = 1.0
        scaled_BD = features_BD if sign < 0 else features_BD.neg()
        distance_BN = (scaled_BD.unsqueeze(1) @ tokens_BDN).squeeze(1).add_(1.0)
        if distances is not None and positions_B is not None:
            distances.append(distance_BN)
        return distance_BN

    return distance


@torch.no_grad()
def covering_radii(batch: TokenBatch, max_centres: int) -> torch.Tensor:
    """Returns the covering radius (B, K) float32 of each prefix of the centres of an item.

    It is the largest distance `1 - cos` of a token to its nearest centre, in descending order, and
    -1 beyond the length of an item. K is at most `max_centres` and the length of the longest item.
    """
    num_centres = min(max_centres, batch.mask.shape[1])
    ranks_K = torch.arange(num_centres, device=batch.mask.device)
    radii_BK = torch.full((len(batch), num_centres), -1.0, device=batch.mask.device)
    for rows in blocks(batch.mask, batch.mask.shape[1] * batch.vectors.shape[2]):
        items = batch.take(rows)
        distance = seed_distance(unit_vectors(items), items.mask, "mean")
        found_BK = farthest_order(distance, items.mask, num_centres)[1]
        is_slot_BK = ranks_K < items.lengths.unsqueeze(1)
        radii_BK[rows] = torch.where(is_slot_BK, found_BK.clamp_min(0), -1.0)
    return radii_BK


def enough_centres(radii_BK: torch.Tensor, max_distance: float) -> torch.Tensor:
    """Returns the smallest number of centres whose covering radius is within the maximum.

    >>> enough_centres(torch.tensor([[0.5, 0.02, 0.0], [0.005, 0.0, 0.0]]), 0.02).tolist()
    [2, 1]
    """
    return 1 + (radii_BK[:, :-1] > max_distance).sum(dim=1)


def progressive_vectors(
    batch: TokenBatch,
    distance_BKN: torch.Tensor,
    slot_mask_BK: torch.Tensor,
    groups_BN: torch.Tensor,
    weights_BN: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the vectors (B, K, D) of the output "progressive", see `KCenter.Spec.output`.

    `groups_BN` is the nearest centre of each token, -1 at padding.
    """
    tokens_BND, num_outputs = batch.vectors, distance_BKN.shape[1]
    means_BKD = weighted_means(tokens_BND, weights_BN, groups_BN, num_outputs)
    parts, level, done = [], 1, 0
    while level < num_outputs:
        level_BN = nearest(distance_BKN[:, :level], slot_mask_BK[:, :level], batch.mask)
        level_means = weighted_means(tokens_BND, weights_BN, level_BN, level)
        parts.append(level_means[:, done:])
        level, done = level * LEVEL_RATIO, level
    parts.append(means_BKD[:, done:])  # the groups of the last level are the final ones
    return normalise(means_BKD + torch.cat(parts, dim=1))


def weighted_means(
    tokens_BND: torch.Tensor,
    weights_BN: torch.Tensor | None,
    groups_BN: torch.Tensor,
    num_groups: int,
) -> torch.Tensor:
    """Returns the normalised weighted mean (B, K, D) of each group, or 0 for empty groups."""
    weighted_BND = tokens_BND if weights_BN is None else tokens_BND * weights_BN.unsqueeze(2)
    return normalise(group_sums(weighted_BND, groups_BN, num_groups))


@torch.no_grad()
def merge_groups(
    sums_BMD: torch.Tensor, sizes_BM: torch.Tensor, budgets_B: torch.Tensor
) -> torch.Tensor:
    """Merges groups of tokens by Ward's criterion until each item is within its budget.

    Each step merges the pair with the smallest increase in squared error,
    `n_a n_b / (n_a + n_b) |mu_a - mu_b|^2`. Ties within 1e-5 are broken in favour of the first
    group and then of its first partner. `sums_BMD` are sums of unit vectors.

    Returns:
        New number of each group (B, M), -1 for empty groups. The numbers are in the order of the
        first of the merged groups.
    """
    num_groups = sizes_BM.shape[1]
    is_empty_BM = sizes_BM == 0
    kernels = kernel_module(sizes_BM)
    if kernels and num_groups <= kernels.MAX_GROUPS:
        costs_BMM = merge_cost(sums_BMD, sizes_BM)
        target_BM = kernels.merge_groups(costs_BMM, sizes_BM, budgets_B, TIE_TOLERANCE)
    else:
        target_BM = _merge_targets(sums_BMD, sizes_BM, budgets_B)
    is_used_BM = group_sizes(target_BM.masked_fill(is_empty_BM, -1), num_groups) > 0
    number_BM = is_used_BM.long().cumsum(dim=1) - 1
    return number_BM.gather(1, target_BM).masked_fill(is_empty_BM, -1)


def _merge_targets(
    sums_BMD: torch.Tensor, sizes_BM: torch.Tensor, budgets_B: torch.Tensor
) -> torch.Tensor:
    """Returns the group (B, M) into which each group is merged, see `merge_groups`."""
    num_groups = sizes_BM.shape[1]
    num_left_B = (sizes_BM > 0).sum(dim=1)
    num_merges = int((num_left_B - budgets_B).max()) if len(sizes_BM) else 0
    target_BM = torch.arange(num_groups, device=sizes_BM.device).repeat(len(sizes_BM), 1)
    if num_merges > 0:
        costs_BMM, sizes_BM = merge_cost(sums_BMD, sizes_BM), sizes_BM.clone()
        lowest_BM = costs_BMM.amin(dim=2)
        for _ in range(num_merges):
            rows_R = (num_left_B > budgets_B).nonzero().squeeze(1)
            group_R = first_minimum(lowest_BM[rows_R], dim=1)
            partner_R = first_minimum(costs_BMM[rows_R, group_R], dim=1)
            kept_R = torch.minimum(group_R, partner_R)
            merged_R = torch.maximum(group_R, partner_R)
            # The lowest cost of another group has to be found again if it was that of a merge with
            # one of the pair.
            is_stale_RM = costs_BMM[rows_R, kept_R] <= lowest_BM[rows_R]
            is_stale_RM |= costs_BMM[rows_R, merged_R] <= lowest_BM[rows_R]
            is_stale_RM &= sizes_BM[rows_R] > 0
            is_stale_RM.scatter_(1, torch.stack([kept_R, merged_R], dim=1), True)
            update_costs(costs_BMM, sizes_BM, rows_R, kept_R, merged_R)
            lowest_BM[rows_R] = torch.minimum(lowest_BM[rows_R], costs_BMM[rows_R, kept_R])
            row_S, group_S = is_stale_RM.nonzero(as_tuple=True)
            item_S = rows_R[row_S]
            lowest_BM[item_S, group_S] = costs_BMM[item_S, group_S].amin(dim=1)
            target_RM = target_BM[rows_R]
            target_BM[rows_R] = torch.where(
                target_RM == merged_R.unsqueeze(1), kept_R.unsqueeze(1), target_RM
            )
            num_left_B[rows_R] -= 1
    return target_BM


def renumber(groups_BN: torch.Tensor, numbers_BM: torch.Tensor) -> torch.Tensor:
    """Replaces the group of each token by its new number, and -1 by -1.

    >>> renumber(torch.tensor([[0, 2, -1]]), torch.tensor([[0, -1, 1]])).tolist()
    [[0, 1, -1]]
    """
    return numbers_BM.gather(1, groups_BN.clamp_min(0)).masked_fill(groups_BN < 0, -1)


def merge_cost(sums_BMD: torch.Tensor, sizes_BM: torch.Tensor) -> torch.Tensor:
    """Returns the increase in squared error (B, M, M) by merging two groups of summed vectors.

    It is infinite for empty groups, whose size is 0, and on the diagonal.
    """
    means_BMD = sums_BMD / sizes_BM.clamp_min(1).unsqueeze(2)
    squares_BM = means_BMD.square().sum(dim=2)
    distances_BMM = squares_BM.unsqueeze(1) + squares_BM.unsqueeze(2)
    distances_BMM.baddbmm_(means_BMD, means_BMD.mT, alpha=-2).clamp_min_(0)
    harmonic_BMM = sizes_BM.unsqueeze(1) * sizes_BM.unsqueeze(2)
    harmonic_BMM /= (sizes_BM.unsqueeze(1) + sizes_BM.unsqueeze(2)).clamp_min(1)
    is_empty_BM = sizes_BM == 0
    costs_BMM = distances_BMM.mul_(harmonic_BMM)
    costs_BMM.masked_fill_(is_empty_BM.unsqueeze(1) | is_empty_BM.unsqueeze(2), torch.inf)
    costs_BMM.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return costs_BMM


def update_costs(
    costs_BMM: torch.Tensor,
    sizes_BM: torch.Tensor,
    rows_R: torch.Tensor,
    kept_R: torch.Tensor,
    merged_R: torch.Tensor,
) -> None:
    """Updates costs and sizes in place after a merge in each of R items.

    The costs of the merged group follow from those of its parts (Lance and Williams, 1967).
    `kept_R` receives the tokens of `merged_R`, which becomes empty.
    """
    kept_R1, merged_R1 = sizes_BM[rows_R, kept_R, None], sizes_BM[rows_R, merged_R, None]
    sizes_RM, cost_R1 = sizes_BM[rows_R], costs_BMM[rows_R, kept_R, merged_R, None]
    costs_RM = (kept_R1 + sizes_RM) * costs_BMM[rows_R, kept_R]
    costs_RM += (merged_R1 + sizes_RM) * costs_BMM[rows_R, merged_R]
    costs_RM = (costs_RM - sizes_RM * cost_R1) / (kept_R1 + merged_R1 + sizes_RM)
    costs_BMM[rows_R, kept_R] = costs_RM
    costs_BMM[rows_R, :, kept_R] = costs_RM
    costs_BMM[rows_R, merged_R] = torch.inf
    costs_BMM[rows_R, :, merged_R] = torch.inf
    costs_BMM[rows_R, kept_R, kept_R] = torch.inf
    sizes_BM[rows_R, kept_R] += sizes_BM[rows_R, merged_R]
    sizes_BM[rows_R, merged_R] = 0

"""Seed placement: selection of K tokens per item as initial centroids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from pipeline.compression import Budget, Budgeted, first_minimum, group_sums

Placement = Literal["paper", "lattice", "farthest"]

#: Squared distances that differ by less are considered equal, because of float32 rounding errors.
TIE_TOLERANCE = 1e-6
#: Minimum budget for the degeneracy check: fewer seeds cannot cover the rows and columns of a grid.
MIN_SEEDS = 4


class SeededBudget(Budget):
    """Base class of the specs of compressors that select seeds."""

    seeds: Placement = "paper"
    """Placement of the seeds.

    - "paper": Uniform in token order. On a grid whose width nearly divides the distance between
      seeds, all seeds fall into a few columns.
    - "lattice": Near-square lattice over the token positions, with time as the first axis for
      videos. Equals "paper" for items without positions.
    - "farthest": Farthest-point sampling.
    """


class SeededCompressor(Budgeted):
    """Base class of compressors that select seeds."""

    def remark(self, extents_N6: np.ndarray) -> str | None:
        """Returns a warning if the placement "paper" is degenerate for the item, else None."""
        budget = int(self.spec.budgets(torch.tensor([len(extents_N6)])))
        if self.spec.seeds != "paper" or not (problem := degenerate_placement(extents_N6, budget)):
            return None
        return f"{problem}; set seeds to lattice or farthest, or choose another budget"


def uniform_positions(
    lengths: torch.Tensor, budgets_B: torch.Tensor, num_positions: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions `linspace(0, length - 1, budget).round()` (B, K), and their mask.

    Halves are rounded to even. Integer arithmetic makes the positions exact on all devices. They
    are distinct: before rounding, neighbours are at least 1 apart, and exactly 1 apart only if all
    of them are integers. A budget is at most the length, and K defaults to the largest budget.

    >>> positions, mask = uniform_positions(torch.tensor([6, 2]), torch.tensor([3, 2]))
    >>> positions.tolist(), mask.tolist()
    ([[0, 2, 5], [0, 1, 0]], [[True, True, True], [True, True, False]])
    """
    if num_positions is None:
        num_positions = int(budgets_B.max()) if len(lengths) else 0
    rank = torch.arange(num_positions, device=lengths.device)
    nums = budgets_B.unsqueeze(1)
    mask = rank < nums
    # The quotient rank * (length - 1) / steps, rounded half up, and decremented if it is odd and
    # exact in halves.
    steps = (nums - 1).clamp_min(1)
    doubled = rank * (lengths - 1).unsqueeze(1) * 2 + steps
    nearest = doubled // (2 * steps)
    excess = (nearest * (2 * steps) == doubled) & nearest
    return (nearest - excess) * mask, mask


@torch.no_grad()
def lattice_positions(
    coords_BN3: torch.Tensor, mask_BN: torch.Tensor, budgets_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions of the tokens nearest to the centres of K equally populated cells.

    The cells form a lattice for any arrangement of tokens, including words on a page. The tokens
    are split along t into about K^(1/3) slabs (one if all have the same time or none), each slab
    along y into about sqrt(k) rows for k seeds in the slab, and each row along x. Splits are by
    rank and proportional to the number of seeds; tokens without a coordinate rank last. Items
    without any coordinates use `uniform_positions`.

    Args:
        coords_BN3: Coordinates t, y and x of the tokens, NaN if undefined. Real tokens come first
            in each row. The last dimension may be 0.
        mask_BN: True for tokens and False for padding.
        budgets_B: Number of seeds per item, at most its length.

    Returns:
        Positions (B, K) int64 in ascending order and their mask.
    """
    lengths_B = mask_BN.sum(dim=1)
    even_BK, slot_mask_BK = uniform_positions(lengths_B, budgets_B)
    if 0 in (coords_BN3.shape[2], *even_BK.shape):
        return even_BK, slot_mask_BK
    num_tokens, num_seeds = mask_BN.shape[1], even_BK.shape[1]
    is_known_BN3 = ~coords_BN3.isnan() & mask_BN.unsqueeze(2)
    ranked_BN3 = torch.where(is_known_BN3, coords_BN3, torch.inf)
    # For the group of each token in the last split: rank of its first token, number of tokens,
    # number of seeds in preceding groups, number of seeds. Padding is a separate, last group.
    start_BN = torch.where(mask_BN, 0, num_tokens)
    size_BN = torch.where(mask_BN, lengths_B.unsqueeze(1), 1)
    before_BN = torch.zeros_like(start_BN)
    seeds_BN = torch.where(mask_BN, budgets_B.unsqueeze(1), 1)
    for axis in range(3):
        order_BN = ranked_BN3[..., axis].argsort(dim=1, stable=True)
        by_group_BN = start_BN.gather(1, order_BN).argsort(dim=1, stable=True)
        rank_BN = order_BN.gather(1, by_group_BN).argsort(dim=1) - start_BN
        rank_BN = torch.where(mask_BN, rank_BN, 0)
        if axis == 0:
            times_BN = ranked_BN3[..., 0].sort(dim=1).values
            is_new_BN = times_BN[:, 1:] > times_BN[:, :-1]
            num_times_B = 1 + (is_new_BN & times_BN[:, 1:].isfinite()).sum(dim=1)
            parts_BN = seeds_BN.double().pow(1 / 3).round().long()
            parts_BN = torch.minimum(parts_BN, num_times_B.unsqueeze(1))
        else:
            parts_BN = seeds_BN if axis == 2 else seeds_BN.double().sqrt().round().long()
        parts_BN = parts_BN.clamp_min(1)
        part_BN = ((rank_BN * seeds_BN // size_BN + 1) * parts_BN - 1) // seeds_BN
        low_BN, high_BN = part_BN * seeds_BN // parts_BN, (part_BN + 1) * seeds_BN // parts_BN
        first_BN = -(-low_BN * size_BN // seeds_BN)  # rounded up
        size_BN = -(-high_BN * size_BN // seeds_BN) - first_BN
        start_BN, before_BN, seeds_BN = start_BN + first_BN, before_BN + low_BN, high_BN - low_BN
    cell_BN = before_BN.masked_fill(~mask_BN, num_seeds)

    known_BN3, filled_BN3 = is_known_BN3.float(), coords_BN3.masked_fill(~is_known_BN3, 0.0)
    sums_BK6 = group_sums(torch.cat([filled_BN3, known_BN3], dim=2), cell_BN, num_seeds + 1)
    centres_BK3 = sums_BK6[..., :3] / sums_BK6[..., 3:].clamp_min(1)
    centre_BN3 = centres_BK3.gather(1, cell_BN.unsqueeze(2).expand(-1, -1, 3))
    squared_BN = ((filled_BN3 - centre_BN3) * known_BN3).square().sum(dim=2)
    nearest_BK = squared_BN.new_full((len(mask_BN), num_seeds + 1), torch.inf)
    nearest_BK = nearest_BK.scatter_reduce(1, cell_BN, squared_BN, "amin")
    is_nearest_BN = squared_BN <= nearest_BK.gather(1, cell_BN) + TIE_TOLERANCE
    position_BN = torch.arange(num_tokens, device=mask_BN.device).expand_as(mask_BN)
    position_BN = position_BN.masked_fill(~is_nearest_BN, num_tokens)
    first_BK = torch.full_like(nearest_BK, num_tokens, dtype=torch.int64)
    first_BK = first_BK.scatter_reduce(1, cell_BN, position_BN, "amin")[:, :num_seeds]
    has_coords_B1 = is_known_BN3.any(dim=2).any(dim=1, keepdim=True)
    return sort_positions(torch.where(has_coords_B1, first_BK, even_BK), slot_mask_BK)


@torch.no_grad()
def farthest_positions(
    distance: Callable[[torch.Tensor | None], torch.Tensor],
    mask_BN: torch.Tensor,
    budgets_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions (B, K) int64 of farthest-point sampling, ascending, and their mask.

    See `farthest_order` for the arguments. Budgets are at most the length of the item. The seeds
    of a smaller budget are a subset of the seeds of a larger budget.
    """
    num_seeds = int(budgets_B.max()) if len(budgets_B) else 0
    slot_mask_BK = torch.arange(num_seeds, device=mask_BN.device) < budgets_B.unsqueeze(1)
    order_BK = farthest_order(distance, mask_BN, num_seeds)[0]
    return sort_positions(order_BK, slot_mask_BK)


@torch.no_grad()
def farthest_order(
    distance: Callable[[torch.Tensor | None], torch.Tensor],
    mask_BN: torch.Tensor,
    num_seeds: int,
    weights_BN: torch.Tensor | None = None,
    max_radius: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orders tokens by farthest-point sampling (Gonzalez, 1985).

    The first seed is the token nearest to the centre of all tokens. Each further seed is the token
    with the largest distance to its nearest seed. Ties within 1e-5 are broken in favour of the
    first token.

    Args:
        distance: Function that returns the distances (B, N) float32 of all tokens from the tokens
            at positions (B,), or from the centre for None, up to a global constant.
        mask_BN: True for tokens, which come first in each row.
        num_seeds: Number of seeds K, at most N.
        weights_BN: Factors of the distances in the selection of a seed. They require distances
            without a constant.
        max_radius: Covering radius at which to stop, if all items have reached it.

    Returns:
        Positions (B, K) int64 in the order of selection, arbitrary beyond the length of an item,
        and covering radii (B, K) float32: the largest distance of another token to its nearest
        seed for each prefix of the seeds, or -inf without another token.
    """
    if num_seeds == 0:
        radii_B0 = mask_BN.new_zeros((len(mask_BN), 0), dtype=torch.float32)
        return radii_B0.long(), radii_B0
    num_tokens = mask_BN.shape[1]
    ranks_N = torch.arange(num_tokens, 0, -1, dtype=torch.float32, device=mask_BN.device)
    seeds = [first_minimum(distance(None).masked_fill(~mask_BN, torch.inf), dim=1)]
    nearest_BN = distance(seeds[0]).masked_fill(~mask_BN, -torch.inf)
    # Seeds are excluded like padding. Their own distance is 0 and does not change the radius.
    nearest_BN.scatter_(1, seeds[0].unsqueeze(1), -torch.inf)
    radii = [nearest_BN.amax(dim=1)]
    is_farthest_BN = torch.empty_like(nearest_BN)
    for _ in range(1, num_seeds):
        if max_radius is not None and bool((radii[-1] <= max_radius).all()):
            break
        scores_BN, best_B = nearest_BN, radii[-1]
        if weights_BN is not None:
            scores_BN = (nearest_BN * weights_BN).masked_fill_(~mask_BN, -torch.inf)
            best_B = scores_BN.amax(dim=1)
        # `first_minimum(-scores_BN)` in fewer passes; the maximum is also the radius
        torch.ge(scores_BN, best_B.sub(1e-5).unsqueeze(1), out=is_farthest_BN)
        seeds.append(num_tokens - is_farthest_BN.mul_(ranks_N).amax(dim=1).long())
        torch.minimum(nearest_BN, distance(seeds[-1]), out=nearest_BN)
        nearest_BN.scatter_(1, seeds[-1].unsqueeze(1), -torch.inf)
        radii.append(nearest_BN.amax(dim=1))
    return torch.stack(seeds, dim=1), torch.stack(radii, dim=1)


def sort_positions(
    positions_BK: torch.Tensor, slot_mask_BK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts the positions under the mask in ascending order and sets the others to 0.

    >>> sort_positions(torch.tensor([[5, 2, 9]]), torch.tensor([[True, True, False]]))[0].tolist()
    [[2, 5, 0]]
    """
    last = torch.iinfo(positions_BK.dtype).max
    sorted_BK = positions_BK.masked_fill(~slot_mask_BK, last).sort(dim=1).values
    return sorted_BK.masked_fill(~slot_mask_BK, 0), slot_mask_BK


def degenerate_placement(extents_N6: np.ndarray, budget: int) -> str | None:
    """Describes a uniform placement that leaves over half of a grid's rows or columns empty.

    Always None if the tokens do not form a grid and for fewer than 4 seeds.

    >>> rows, columns = np.divmod(np.arange(196), 14)
    >>> nan = np.full(196, np.nan)
    >>> grid = np.stack([columns, rows, columns + 1, rows + 1, nan, nan], axis=1) / 14
    >>> degenerate_placement(grid, 8)
    'all 8 seeds are in 2 of the 14 columns of the 14 x 14 tokens'
    >>> degenerate_placement(grid, 9) is None
    True
    """
    num_tokens = len(extents_N6)
    if not MIN_SEEDS <= budget < num_tokens:
        return None
    x0, y0, x1, y1, t0, t1 = extents_N6.T
    is_known_N = ~np.isnan(x0 + x1 + y0 + y1)
    centres = np.nan_to_num(t0 + t1), y0 + y1, x0 + x1
    rounded = [np.round(values_N[is_known_N] * 1e4) for values_N in centres]
    numbers = [np.unique(values_N, return_inverse=True)[1] for values_N in rounded]
    shape = [number_N.max(initial=-1) + 1 for number_N in numbers]
    if np.prod(shape) != is_known_N.sum():
        return None
    seeds_K = uniform_positions(torch.tensor([num_tokens]), torch.tensor([budget]))[0][0].numpy()
    is_seed_N = np.isin(np.arange(num_tokens), seeds_K)[is_known_N]
    for axis, name in ((1, "rows"), (2, "columns")):
        occupied = np.unique(numbers[axis][is_seed_N])
        largest_gap = np.diff([-1, *occupied, shape[axis]]).max() - 1
        if 2 * largest_gap > shape[axis]:
            grid = " x ".join(map(str, shape if shape[0] > 1 else shape[1:]))
            region = f"{len(occupied)} of the {shape[axis]} {name} of the {grid} tokens"
            return f"all {budget} seeds are in {region}"
    return None

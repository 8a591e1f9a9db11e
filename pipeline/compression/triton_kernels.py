"""Kernels of compressors for CUDA devices with Triton.

This module is imported if tensors are on a CUDA device and Triton is installed. Otherwise, torch
computes the same results with more passes over the memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Size of the tile of a program.
TILE_ROWS, TILE_COLUMNS = 16, 128
#: Maximum number of tokens of `farthest_order`, whose distances need memory for N x N values.
MAX_TOKENS = 4096
#: Maximum number of groups of `merge_groups`, whose costs are in registers.
MAX_GROUPS = 128
#: Maximum size of the dimension of `log_softmax`, and the number of values of a program.
MAX_CLASSES, MAX_CLASS_VALUES = 512, 1 << 13


@triton.jit
def _first_minimum(
    values_OSC,
    result_OC,
    size,
    num_columns,
    TOLERANCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    outer = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = column_C < num_columns
    values_SC = values_OSC + outer * size * num_columns + column_C[None, :]
    minimum_C = tl.full((COLUMNS,), float("inf"), tl.float32)
    for start in range(0, size, ROWS):
        row_R1 = (start + tl.arange(0, ROWS))[:, None]
        is_value_RC = (row_R1 < size) & is_column_C[None, :]
        values_RC = tl.load(values_SC + row_R1 * num_columns, is_value_RC, float("inf"))
        minimum_C = tl.minimum(minimum_C, tl.min(values_RC, axis=0))
    bound_C = minimum_C + TOLERANCE
    first_C = tl.zeros((COLUMNS,), tl.int32) + size
    for start in range(0, size, ROWS):  # the values are in the cache
        row_R1 = (start + tl.arange(0, ROWS))[:, None]
        is_value_RC = (row_R1 < size) & is_column_C[None, :]
        values_RC = tl.load(values_SC + row_R1 * num_columns, is_value_RC, float("inf"))
        is_minimum_RC = is_value_RC & (values_RC <= bound_C[None, :])
        first_C = tl.minimum(first_C, tl.min(tl.where(is_minimum_RC, row_R1, size), axis=0))
    tl.store(result_OC + outer * num_columns + column_C, first_C.to(tl.int64), is_column_C)


def first_minimum(values: torch.Tensor, dim: int, tolerance: float) -> torch.Tensor:
    """Computes `compression.first_minimum` in one pass over contiguous float32 values.

    `dim` is neither negative nor the last dimension.
    """
    shape, size = values.shape, values.shape[dim]
    num_columns = shape[dim + 1 :].numel()
    result = torch.empty((*shape[:dim], *shape[dim + 1 :]), dtype=torch.int64, device=values.device)
    num_outer = shape[:dim].numel()
    if result.numel():
        grid = (num_outer, triton.cdiv(num_columns, TILE_COLUMNS))
        constants = {"TOLERANCE": tolerance, "ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS}
        _first_minimum[grid](values, result, size, num_columns, **constants)
    return result


@triton.jit
def _farthest_order(
    distances_BNN,
    first_B,
    lengths_B,
    weights_BN,
    positions_BK,
    radii_BK,
    num_tokens,
    num_seeds,
    TOLERANCE: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    N: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    rank_N = tl.arange(0, N)
    is_token_N = rank_N < tl.load(lengths_B + item)
    distances_NN = distances_BNN + item * num_tokens * num_tokens
    position = tl.load(first_B + item).to(tl.int32)
    nearest_N = tl.load(distances_NN + position * num_tokens + rank_N, is_token_N, -float("inf"))
    nearest_N = tl.where(rank_N == position, -float("inf"), nearest_N)
    best = tl.max(nearest_N, axis=0)
    tl.store(positions_BK + item * num_seeds, position.to(tl.int64))
    tl.store(radii_BK + item * num_seeds, best)
    if IS_WEIGHTED:
        weights_N = tl.load(weights_BN + item * num_tokens + rank_N, is_token_N, 1.0)
    for k in range(1, num_seeds):
        scores_N = nearest_N
        if IS_WEIGHTED:
            scores_N = nearest_N * weights_N
            best = tl.max(scores_N, axis=0)
        position = tl.min(tl.where(scores_N >= best - TOLERANCE, rank_N, N), axis=0)
        row_N = tl.load(distances_NN + position * num_tokens + rank_N, is_token_N, -float("inf"))
        nearest_N = tl.where(rank_N == position, -float("inf"), tl.minimum(nearest_N, row_N))
        best = tl.max(nearest_N, axis=0)
        tl.store(positions_BK + item * num_seeds + k, position.to(tl.int64))
        tl.store(radii_BK + item * num_seeds + k, best)


def farthest_order(
    distances_BNN: torch.Tensor,
    first_B: torch.Tensor,
    lengths_B: torch.Tensor,
    num_seeds: int,
    weights_BN: torch.Tensor | None,
    tolerance: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `seeds.farthest_order` for given contiguous float32 distances between all tokens.

    Padding is at the end of each row, and weights are positive.
    """
    num_items, num_tokens, _ = distances_BNN.shape
    positions_BK = lengths_B.new_empty((num_items, num_seeds), dtype=torch.int64)
    radii_BK = distances_BNN.new_empty((num_items, num_seeds))
    width = triton.next_power_of_2(num_tokens)
    _farthest_order[(num_items,)](
        distances_BNN,
        first_B,
        lengths_B,
        distances_BNN if weights_BN is None else weights_BN.contiguous(),
        positions_BK,
        radii_BK,
        num_tokens,
        num_seeds,
        TOLERANCE=tolerance,
        IS_WEIGHTED=weights_BN is not None,
        N=width,
        num_warps=min(16, max(1, width // 256)),
    )
    return positions_BK, radii_BK


@triton.jit
def _merge_groups(
    costs_BMM,
    sizes_BM,
    budgets_B,
    targets_BM,
    num_groups,
    TOLERANCE: tl.constexpr,
    M: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    group_M = tl.arange(0, M)
    row_M1, column_1M = group_M[:, None], group_M[None, :]
    costs_MM = tl.load(
        costs_BMM + (item * num_groups + row_M1) * num_groups + column_1M,
        (row_M1 < num_groups) & (column_1M < num_groups),
        float("inf"),
    )
    sizes_M = tl.load(sizes_BM + item * num_groups + group_M, group_M < num_groups, 0.0)
    target_M = group_M
    num_left = tl.sum((sizes_M > 0).to(tl.int32), axis=0)
    num_merges = num_left - tl.load(budgets_B + item).to(tl.int32)
    for _ in range(0, num_merges):
        lowest_M = tl.min(costs_MM, axis=1)
        bound = tl.min(lowest_M, axis=0) + TOLERANCE
        group = tl.min(tl.where(lowest_M <= bound, group_M, M), axis=0)
        row_M = tl.min(tl.where(row_M1 == group, costs_MM, float("inf")), axis=0)
        bound = tl.min(row_M, axis=0) + TOLERANCE
        partner = tl.min(tl.where(row_M <= bound, group_M, M), axis=0)
        cost = tl.min(tl.where(group_M == partner, row_M, float("inf")), axis=0)
        first, second = tl.minimum(group, partner), tl.maximum(group, partner)
        first_M = tl.min(tl.where(row_M1 == first, costs_MM, float("inf")), axis=0)
        second_M = tl.min(tl.where(row_M1 == second, costs_MM, float("inf")), axis=0)
        first_size = tl.sum(tl.where(group_M == first, sizes_M, 0.0), axis=0)
        second_size = tl.sum(tl.where(group_M == second, sizes_M, 0.0), axis=0)
        # The costs of the merged group follow from those of its parts (Lance and Williams, 1967).
        new_M = (first_size + sizes_M) * first_M + (second_size + sizes_M) * second_M
        new_M = (new_M - sizes_M * cost) / (first_size + second_size + sizes_M)
        costs_MM = tl.where(row_M1 == first, new_M[None, :], costs_MM)
        costs_MM = tl.where(column_1M == first, new_M[:, None], costs_MM)
        costs_MM = tl.where((row_M1 == second) | (column_1M == second), float("inf"), costs_MM)
        sizes_M = tl.where(group_M == first, first_size + second_size, sizes_M)
        sizes_M = tl.where(group_M == second, 0.0, sizes_M)
        target_M = tl.where(target_M == second, first, target_M)
    tl.store(targets_BM + item * num_groups + group_M, target_M.to(tl.int64), group_M < num_groups)


def merge_groups(
    costs_BMM: torch.Tensor, sizes_BM: torch.Tensor, budgets_B: torch.Tensor, tolerance: float
) -> torch.Tensor:
    """Returns the group (B, M) int64 into which each has been merged, the first of the merged ones.

    Costs are those of `kcenter.merge_cost`, for at most `MAX_GROUPS` groups. Sizes are float32,
    and 0 for empty groups.
    """
    num_items, num_groups = sizes_BM.shape
    targets_BM = budgets_B.new_empty((num_items, num_groups), dtype=torch.int64)
    _merge_groups[(num_items,)](
        costs_BMM.contiguous(),
        sizes_BM.contiguous(),
        budgets_B,
        targets_BM,
        num_groups,
        TOLERANCE=tolerance,
        M=max(16, triton.next_power_of_2(num_groups)),
        num_warps=8,
    )
    return targets_BM


@triton.jit
def _coefficients(
    sums_RE,
    offsets_R,
    result_RE,
    num_rows,
    num_columns,
    DIMS: tl.constexpr,
    AXES: tl.constexpr,
    HAS_SITES: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
):
    row_R1 = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column_1E = tl.arange(0, E)[None, :]
    is_row_R1 = row_R1 < num_rows
    is_feature_RE = is_row_R1 & (column_1E < DIMS)
    start_R1 = row_R1 * num_columns
    features_RE = tl.load(sums_RE + start_R1 + column_1E, is_feature_RE, 0.0)
    norm_R = tl.sqrt_rn(tl.sum(features_RE * features_RE, axis=1))
    result = -features_RE / tl.maximum(norm_R, 1e-12)[:, None]
    if HAS_SITES:
        # The positions, their squares and the numbers of tokens with positions of each axis.
        section_1E = (column_1E - DIMS) // AXES
        axis_1E = (column_1E - DIMS) % AXES
        is_site_RE = is_row_R1 & (column_1E >= DIMS) & (column_1E < DIMS + 3 * AXES)
        site_sums_RE = tl.load(sums_RE + start_R1 + DIMS + axis_1E, is_site_RE, 0.0)
        counts_RE = tl.load(sums_RE + start_R1 + DIMS + 2 * AXES + axis_1E, is_site_RE, 0.0)
        sites_RE = site_sums_RE / tl.maximum(counts_RE, 1.0)
        squares_RE = tl.where(section_1E == 2, sites_RE * sites_RE, tl.minimum(counts_RE, 1.0))
        terms_RE = tl.where(section_1E == 0, -2.0 * sites_RE, squares_RE)
        result = tl.where(is_site_RE, terms_RE, result)
    offset_R1 = tl.load(offsets_R + row_R1, is_row_R1, 0.0)
    result = tl.where(column_1E >= DIMS + 3 * AXES, offset_R1, result)
    tl.store(result_RE + start_R1 + column_1E, result, is_row_R1 & (column_1E < num_columns))


def coefficients(
    sums_BKE: torch.Tensor,
    offsets_BK: torch.Tensor,
    num_dims: int,
    num_axes: int,
    has_sites: bool,
) -> torch.Tensor:
    """Computes the vectors whose products with points are distances, see `geometry.Geometry`.

    Without `has_sites`, the columns of the positions are 0.
    """
    sums_BKE, offsets_BK = sums_BKE.contiguous(), offsets_BK.contiguous()
    result_BKE = torch.empty_like(sums_BKE)
    num_rows, num_columns = offsets_BK.numel(), sums_BKE.shape[2]
    if num_rows:
        width = triton.next_power_of_2(num_columns)
        rows = max(1, 1024 // width)
        _coefficients[(triton.cdiv(num_rows, rows),)](
            sums_BKE,
            offsets_BK,
            result_BKE,
            num_rows,
            num_columns,
            DIMS=num_dims,
            AXES=num_axes,
            HAS_SITES=has_sites,
            ROWS=rows,
            E=width,
        )
    return result_BKE


@triton.jit
def _log_softmax(
    values_BKN,
    result_BKN,
    num_classes,
    num_columns,
    scale,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    class_K1 = tl.arange(0, K)[:, None]
    column_1N = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_value_KN = (class_K1 < num_classes) & (column_1N < num_columns)
    index_KN = (item * num_classes + class_K1) * num_columns + column_1N
    # A finite value, because differences of infinite values are NaN.
    values_KN = tl.load(values_BKN + index_KN, is_value_KN, 0.0) * scale
    values_KN = tl.where(class_K1 < num_classes, values_KN, -3.0e38)
    shifted_KN = values_KN - tl.max(values_KN, axis=0)[None, :]
    result_KN = shifted_KN - tl.log(tl.sum(tl.exp(shifted_KN), axis=0))[None, :]
    tl.store(result_BKN + index_KN, result_KN, is_value_KN)


def log_softmax(values_BKN: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes `(values_BKN * scale).log_softmax(dim=1)` in one pass over float32 values."""
    values_BKN = values_BKN.contiguous()
    num_items, num_classes, num_columns = values_BKN.shape
    if num_classes == 1:  # reductions of a tile with one row return inf on an H100 (Triton 3.6)
        return torch.zeros_like(values_BKN)
    result_BKN = torch.empty_like(values_BKN)
    if result_BKN.numel():
        size = triton.next_power_of_2(num_classes)
        columns = max(16, min(TILE_COLUMNS, MAX_CLASS_VALUES // size))
        grid = (num_items, triton.cdiv(num_columns, columns))
        _log_softmax[grid](
            values_BKN,
            result_BKN,
            num_classes,
            num_columns,
            scale,
            K=size,
            COLUMNS=columns,
            num_warps=8,
        )
    return result_BKN

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

    Args:
        values: Values with at least one dimension after `dim`.
        dim: Dimension of the minimum, not negative.
        tolerance: Maximum difference of a value that is considered equal to the minimum.
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

"""Layer normalisation on CUDA devices, imported only if Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Rows per program. The layer norm of torch has one, which uses a third of the memory bandwidth for
#: rows of 384 elements.
ROWS = 8


@triton.jit
def _kernel(
    states,
    bias,
    weight,
    norm_bias,
    num_rows,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row_M = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_H = tl.arange(0, BLOCK_H)
    is_column_H = column_H < WIDTH
    at_MH = states + row_M[:, None] * WIDTH + column_H[None, :]
    mask_MH = (row_M < num_rows)[:, None] & is_column_H[None, :]
    bias_H = tl.load(bias + column_H, mask=is_column_H, other=0).to(tl.float32)
    value_MH = tl.load(at_MH, mask=mask_MH, other=0).to(tl.float32) + bias_H[None, :]
    mean_M = tl.sum(value_MH, axis=1) / WIDTH
    offset_MH = tl.where(mask_MH, value_MH - mean_M[:, None], 0)
    variance_M = tl.sum(offset_MH * offset_MH, axis=1) / WIDTH
    weight_H = tl.load(weight + column_H, mask=is_column_H, other=0).to(tl.float32)
    shift_H = tl.load(norm_bias + column_H, mask=is_column_H, other=0).to(tl.float32)
    result_MH = offset_MH * tl.rsqrt(variance_M + epsilon)[:, None] * weight_H[None, :]
    result_MH += shift_H[None, :]
    tl.store(at_MH, result_MH.to(states.dtype.element_ty), mask=mask_MH)


def add_bias_and_normalise(
    states_MH: torch.Tensor, bias_H: torch.Tensor, norm: torch.nn.LayerNorm
) -> torch.Tensor:
    """Replaces contiguous states by the layer norm of `states + bias` and returns them."""
    num_rows, width = states_MH.shape
    _kernel[(triton.cdiv(num_rows, ROWS),)](
        states_MH,
        bias_H,
        norm.weight,
        norm.bias,
        num_rows,
        norm.eps,
        WIDTH=width,
        BLOCK_H=triton.next_power_of_2(width),
        BLOCK_M=ROWS,
        num_warps=4,
    )
    return states_MH

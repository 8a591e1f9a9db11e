"""Kernels of attention statistics for CUDA devices with Triton.

This module is imported if tensors are on a CUDA device and Triton is installed. Otherwise, torch
computes the same results with more passes over the memory.

The sums need the whole attention matrix, which is computed twice in tiles that stay in registers:
the first kernel reduces it to the log-sum-exp of each row, as flash attention does, and the second
to the sums of each column. Memory is linear in the number of tokens, except for a mask per row,
which is packed into bits. There are no atomics, and the size of the tiles depends only on the
device, so results are deterministic. Nothing is copied to the host, which would delay the launch of
the following layers.
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl

#: Maximum width of a head, for which the tiles fit into shared memory.
MAX_HEAD_WIDTH = 256
#: Size of the tile that stays in shared memory, and number of warps. A device whose shared memory
#: is too small for the first uses the second.
TILES = ((128, 8), (64, 4))
#: Size of the tile that each step of the loop loads: the number of bits of a word of `_pack_mask`.
STEP = 64
NUM_STAGES = 2

#: Mask of a kernel: none, one byte per column for all rows, or one bit per row and column.
_NO_MASK, _COLUMN_MASK, _FULL_MASK = range(3)


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_mask(
    mask_BNN,
    words_BWN,
    num_tokens,
    mask_item,
    mask_row,
    mask_column,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    step = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    row_R, bit_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    column_C = step * STEP + bit_C
    is_row_R, is_column_C = row_R < num_tokens, column_C < num_tokens
    at_R = mask_BNN + item * mask_item + row_R.to(tl.int64) * mask_row
    at_RC = at_R[:, None] + (column_C.to(tl.int64) * mask_column)[None, :]
    mask_RC = tl.load(at_RC, mask=is_row_R[:, None] & is_column_C[None, :], other=0)
    bits_RC = (mask_RC != 0).to(tl.int64) << bit_C.to(tl.int64)[None, :]
    words_N = words_BWN + (item * tl.num_programs(1) + step) * num_tokens
    tl.store(words_N + row_R, tl.sum(bits_RC, axis=1), mask=is_row_R)


@triton.jit(do_not_specialize=["num_tokens"])
def _row_log_sums(
    query_BHND,
    key_BGND,
    mask,
    weights_SBN,
    log_sums_BHN,
    scale,
    num_weightings,
    num_items,
    num_heads,
    group_heads,
    num_tokens,
    query_item,
    query_head,
    query_row,
    key_item,
    key_head,
    key_row,
    mask_item,
    mask_step,
    WIDTH: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
):
    # With causal attention the last rows take longest and therefore start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    item = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    row_R, dim_D = first + tl.arange(0, ROWS), tl.arange(0, D)
    is_row_R, is_dim_1D = row_R < num_tokens, (dim_D < WIDTH)[None, :]
    key_ND = key_BGND + item * key_item + head // group_heads * key_head
    query_ND = query_BHND + item * query_item + head * query_head
    at_RD = query_ND + row_R[:, None] * query_row + dim_D[None, :]
    query_RD = tl.load(at_RD, mask=is_row_R[:, None] & is_dim_1D, other=0.0)
    num_weights_R = tl.zeros((ROWS,), tl.int32)
    for weighting in range(0, num_weightings):
        weights_N = weights_SBN + (weighting * num_items + item) * num_tokens
        num_weights_R += (tl.load(weights_N + row_R, mask=is_row_R, other=0.0) != 0).to(tl.int32)
    end = num_tokens
    if IS_CAUSAL:
        end = tl.minimum(end, first + ROWS)
    end = tl.where(tl.max(num_weights_R, axis=0) > 0, end, 0)
    maximum_R = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_R = tl.zeros((ROWS,), tl.float32)
    for start in range(0, end, COLUMNS):
        column_C = start + tl.arange(0, COLUMNS)
        is_column_C = column_C < num_tokens
        at_CD = key_ND + column_C[:, None] * key_row + dim_D[None, :]
        key_CD = tl.load(at_CD, mask=is_column_C[:, None] & is_dim_1D, other=0.0)
        logits_RC = tl.dot(query_RD, tl.trans(key_CD)) * scale
        is_allowed_RC = is_column_C[None, :]
        if IS_CAUSAL:
            is_allowed_RC = is_allowed_RC & (column_C[None, :] <= row_R[:, None])
        if MASK == 1:
            mask_C = tl.load(
                mask + item * mask_item + column_C * mask_step, mask=is_column_C, other=0
            )
            is_allowed_RC = is_allowed_RC & (mask_C != 0)[None, :]
        if MASK == 2:
            at_R = mask + item * mask_item + start // COLUMNS * mask_step + row_R
            word_R = tl.load(at_R, mask=is_row_R, other=0)
            bit_C = tl.arange(0, COLUMNS).to(tl.int64)
            is_allowed_RC = is_allowed_RC & ((word_R[:, None] >> bit_C[None, :]) & 1 != 0)
        logits_RC = tl.where(is_allowed_RC, logits_RC, float("-inf"))
        new_R = tl.maximum(maximum_R, tl.max(logits_RC, axis=1))
        # -inf - -inf would be NaN before the first allowed column of a row.
        finite_R = tl.where(new_R == float("-inf"), 0.0, new_R)
        sum_R *= tl.exp2(maximum_R - finite_R)
        sum_R += tl.sum(tl.exp2(logits_RC - finite_R[:, None]), axis=1)
        maximum_R = new_R
    # inf makes all probabilities of a row without allowed columns 0.
    log_sum_R = tl.where(sum_R > 0, maximum_R + tl.log2(sum_R), float("inf"))
    log_sums_N = log_sums_BHN + (item * num_heads + head) * num_tokens
    tl.store(log_sums_N + row_R, log_sum_R, mask=is_row_R)


@triton.jit(do_not_specialize=["num_tokens"])
def _column_sums(
    query_BHND,
    key_BGND,
    mask,
    weights_SBN,
    log_sums_BHN,
    first_rows_SB,
    end_rows_SB,
    sums_SBHN,
    scale,
    num_items,
    num_heads,
    group_heads,
    num_tokens,
    query_item,
    query_head,
    query_row,
    key_item,
    key_head,
    key_row,
    mask_item,
    mask_step,
    WIDTH: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
):
    first_column = tl.program_id(0) * COLUMNS
    item = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    weighted_item = tl.program_id(2) * num_items + item
    column_C, dim_D = first_column + tl.arange(0, COLUMNS), tl.arange(0, D)
    is_column_C, is_dim_1D = column_C < num_tokens, (dim_D < WIDTH)[None, :]
    query_ND = query_BHND + item * query_item + head * query_head
    key_ND = key_BGND + item * key_item + head // group_heads * key_head
    at_CD = key_ND + column_C[:, None] * key_row + dim_D[None, :]
    key_CD = tl.load(at_CD, mask=is_column_C[:, None] & is_dim_1D, other=0.0)
    weights_N = weights_SBN + weighted_item * num_tokens
    log_sums_N = log_sums_BHN + (item * num_heads + head) * num_tokens
    first_row = tl.load(first_rows_SB + weighted_item).to(tl.int32)
    end_row = tl.load(end_rows_SB + weighted_item).to(tl.int32)
    if IS_CAUSAL:
        first_row = tl.maximum(first_row, first_column)
    if MASK == 1:
        mask_C = tl.load(mask + item * mask_item + column_C * mask_step, mask=is_column_C, other=0)
    sum_C = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first_row // ROWS * ROWS, end_row, ROWS):
        row_R = start + tl.arange(0, ROWS)
        is_row_R = row_R < num_tokens
        at_RD = query_ND + row_R[:, None] * query_row + dim_D[None, :]
        query_RD = tl.load(at_RD, mask=is_row_R[:, None] & is_dim_1D, other=0.0)
        weight_R = tl.load(weights_N + row_R, mask=is_row_R, other=0.0)
        log_sum_R = tl.load(log_sums_N + row_R, mask=is_row_R, other=0.0)
        logits_CR = tl.dot(key_CD, tl.trans(query_RD)) * scale
        probabilities_CR = tl.exp2(logits_CR - log_sum_R[None, :])
        # Rows without weight may be padding, whose queries may be NaN.
        is_allowed_CR = (weight_R != 0)[None, :]
        if IS_CAUSAL:
            is_allowed_CR = is_allowed_CR & (column_C[:, None] <= row_R[None, :])
        if MASK == 1:
            is_allowed_CR = is_allowed_CR & (mask_C != 0)[:, None]
        if MASK == 2:
            at_C = mask + item * mask_item + start // ROWS * mask_step + column_C
            word_C = tl.load(at_C, mask=is_column_C, other=0)
            bit_R = tl.arange(0, ROWS).to(tl.int64)
            is_allowed_CR = is_allowed_CR & ((word_C[:, None] >> bit_R[None, :]) & 1 != 0)
        weighted_CR = tl.where(is_allowed_CR, weight_R[None, :] * probabilities_CR, 0.0)
        sum_C += tl.sum(weighted_CR, axis=1)
    sums_N = sums_SBHN + (weighted_item * num_heads + head) * num_tokens
    tl.store(sums_N + column_C, sum_C, mask=is_column_C)


def _packed(mask_BNN: torch.Tensor) -> torch.Tensor:
    """Packs a uint8 mask into words (B, W, N) int64; bit j of word w is column w * STEP + j.

    The words fit into the registers of the thread that needs them, whereas a tile of bytes would
    have to be exchanged between threads. They are read by all heads.
    """
    num_items, num_tokens, _ = mask_BNN.shape
    num_words = triton.cdiv(num_tokens, STEP)
    words_BWN = torch.empty(
        (num_items, num_words, num_tokens), dtype=torch.int64, device=mask_BNN.device
    )
    num_programs = (triton.cdiv(num_tokens, STEP), num_words, num_items)
    _pack_mask[num_programs](
        mask_BNN, words_BWN, num_tokens, *mask_BNN.stride(), ROWS=STEP, STEP=STEP, num_warps=4
    )
    return words_BWN


def can_sum(query_BHND: torch.Tensor, key_BGND: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Checks whether `weighted_rows` supports the inputs of an attention layer.

    They must be float16 or bfloat16 with heads of at most `MAX_HEAD_WIDTH`. The mask must be
    boolean and equal for all heads.
    """
    num_items, _, num_tokens, width = query_BHND.shape
    return (
        query_BHND.dtype in (torch.float16, torch.bfloat16)
        and key_BGND.dtype == query_BHND.dtype
        and key_BGND.shape[2] == num_tokens
        and width <= MAX_HEAD_WIDTH
        and (
            mask is None
            or (
                mask.dtype == torch.bool
                and mask.ndim == 4
                and mask.shape[0] in (1, num_items)
                and mask.shape[1] == 1
                and mask.shape[2] in (1, num_tokens)
                and mask.shape[3] == num_tokens
            )
        )
    )


def weighted_rows(
    query_BHND: torch.Tensor,
    key_BGND: torch.Tensor,
    mask: torch.Tensor | None,
    weights_SBN: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool,
) -> torch.Tensor:
    """Computes `attention.weighted_rows` for inputs that `can_sum` supports.

    The probabilities of a row without allowed columns are 0. Rows outside the range of the non-zero
    weights of an item are skipped.
    """
    num_items, num_heads, num_tokens, width = query_BHND.shape
    device = query_BHND.device
    weights_SBN = weights_SBN.to(device, torch.float32).contiguous()
    log_sums_BHN = weights_SBN.new_empty((num_items, num_heads, num_tokens))
    sums_SBHN = weights_SBN.new_empty((len(weights_SBN), *log_sums_BHN.shape))
    if not sums_SBHN.numel():
        return sums_SBHN
    position_N = torch.arange(num_tokens, device=device)
    has_weight_SBN = weights_SBN != 0
    first_rows_SB = torch.where(has_weight_SBN, position_N, num_tokens).amin(dim=2)
    end_rows_SB = torch.where(has_weight_SBN, position_N + 1, 0).amax(dim=2)
    query_BHND, key_BGND = (
        tensor if tensor.stride(3) == 1 else tensor.contiguous()
        for tensor in (query_BHND, key_BGND)
    )
    scale = scaling * math.log2(math.e)  # because the kernels use powers of two
    sizes = (num_items, num_heads, num_heads // key_BGND.shape[1], num_tokens)
    strides = (*query_BHND.stride()[:3], *key_BGND.stride()[:3])

    def run(tile: int, num_warps: int) -> None:
        num_programs = (triton.cdiv(num_tokens, tile), num_items * num_heads)
        launch = {"num_warps": num_warps, "num_stages": NUM_STAGES}
        _row_log_sums[num_programs](
            query_BHND,
            key_BGND,
            row_mask,
            weights_SBN,
            log_sums_BHN,
            scale,
            len(weights_SBN),
            *sizes,
            *strides,
            *mask_strides,
            ROWS=tile,
            COLUMNS=STEP,
            **constants,
            **launch,
        )
        _column_sums[(*num_programs, len(weights_SBN))](
            query_BHND,
            key_BGND,
            column_mask,
            weights_SBN,
            log_sums_BHN,
            first_rows_SB,
            end_rows_SB,
            sums_SBHN,
            scale,
            *sizes,
            *strides,
            *mask_strides,
            ROWS=STEP,
            COLUMNS=tile,
            **constants,
            **launch,
        )

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kind, row_mask, column_mask = _NO_MASK, query_BHND, query_BHND
        mask_strides: tuple[int, ...] = (0, 0)
        if mask is not None and mask.shape[2] == 1:
            kind, row_mask = _COLUMN_MASK, mask[:, 0, 0].view(torch.uint8).expand(num_items, -1)
            column_mask, mask_strides = row_mask, row_mask.stride()
        elif mask is not None:
            mask_BNN = mask[:, 0].view(torch.uint8)
            kind, row_mask, column_mask = _FULL_MASK, _packed(mask_BNN), _packed(mask_BNN.mT)
            mask_strides = row_mask.expand(num_items, -1, -1).stride()[:2]
        constants = {
            "WIDTH": width,
            "IS_CAUSAL": is_causal,
            "MASK": kind,
            "D": max(16, triton.next_power_of_2(width)),
        }
        try:
            run(*TILES[0])
        except triton.runtime.errors.OutOfResources:
            run(*TILES[1])
    return sums_SBHN

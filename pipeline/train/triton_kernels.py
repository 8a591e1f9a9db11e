"""Kernels of MaxSim in training for CUDA devices with Triton.

This module is imported if tensors are on a CUDA device and Triton is installed. Otherwise, torch
computes the same maxima block by block, see `pipeline.train.losses`.

Similarities stay in registers: the memory is linear in the number of pairs of a query token and a
document. There are no atomics, so results are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Maximum dimension of vectors, for which the tiles fit into shared memory.
MAX_DIM = 512
#: Numbers in a tile of vectors. Products of float32 need four times the memory of bfloat16.
TILE_NUMBERS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 12}
#: Query tokens per program of the queries' gradient, which gathers a vector for each.
GATHERED_ROWS = 16


@triton.jit
def _best(
    queries_TD,
    docs_BND,
    mask_BN,
    best_BT,
    winner_BT,
    num_rows,
    num_tokens,
    lowest,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Successive programs read the same document, which stays in the L2 cache.
    row_R, dim_D = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    doc = tl.program_id(1).to(tl.int64)
    is_row_R, is_dim_1D = row_R < num_rows, (dim_D < WIDTH)[None, :]
    at_RD = row_R.to(tl.int64)[:, None] * WIDTH + dim_D[None, :]
    query_RD = tl.load(queries_TD + at_RD, mask=is_row_R[:, None] & is_dim_1D, other=0.0)
    docs_ND, mask_N = docs_BND + doc * num_tokens * WIDTH, mask_BN + doc * num_tokens
    best_RS = tl.full((ROWS, STEP), float("-inf"), tl.float32)
    start_RS = tl.zeros((ROWS, STEP), tl.int32)
    for start in range(0, num_tokens, STEP):
        token_S = start + tl.arange(0, STEP)
        is_token_S = token_S < num_tokens
        at_SD = token_S[:, None] * WIDTH + dim_D[None, :]
        doc_SD = tl.load(docs_ND + at_SD, mask=is_token_S[:, None] & is_dim_1D, other=0.0)
        is_valid_S = tl.load(mask_N + token_S, mask=is_token_S, other=0) != 0
        sim_RS = tl.dot(query_RD, tl.trans(doc_SD), input_precision=PRECISION)
        sim_RS = tl.where(is_valid_S[None, :], sim_RS, lowest)
        is_better_RS = sim_RS > best_RS
        best_RS = tl.where(is_better_RS, sim_RS, best_RS)
        start_RS = tl.where(is_better_RS, start, start_RS)
    best_R = tl.max(best_RS, axis=1)
    token_RS = start_RS + tl.arange(0, STEP)[None, :]
    winner_R = tl.min(tl.where(best_RS == best_R[:, None], token_RS, num_tokens - 1), axis=1)
    out_R = doc * num_rows + row_R
    tl.store(best_BT + out_R, best_R, mask=is_row_R)
    tl.store(winner_BT + out_R, winner_R, mask=is_row_R)


@triton.jit
def _query_gradients(
    grad_BT,
    winner_BT,
    docs_BND,
    out_TD,
    num_rows,
    num_docs,
    num_tokens,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    row_R, dim_D = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    is_row_R = row_R < num_rows
    is_out_RD = is_row_R[:, None] & (dim_D < WIDTH)[None, :]
    sum_RD = tl.zeros((ROWS, D), tl.float32)
    for doc in range(0, num_docs):
        at_R = tl.cast(doc, tl.int64) * num_rows + row_R
        grad_R = tl.load(grad_BT + at_R, mask=is_row_R, other=0.0)
        winner_R = tl.load(winner_BT + at_R, mask=is_row_R, other=0)
        vector_R = tl.cast(doc, tl.int64) * num_tokens + winner_R
        at_RD = vector_R[:, None] * WIDTH + dim_D[None, :]
        doc_RD = tl.load(docs_BND + at_RD, mask=is_out_RD, other=0.0)
        sum_RD += grad_R[:, None] * doc_RD.to(tl.float32)
    out_RD = out_TD + row_R.to(tl.int64)[:, None] * WIDTH + dim_D[None, :]
    tl.store(out_RD, sum_RD.to(out_TD.dtype.element_ty), mask=is_out_RD)


@triton.jit
def _doc_gradients(
    grad_BT,
    winner_BT,
    queries_TD,
    out_BND,
    num_rows,
    num_tokens,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A matrix with the gradient of each maximum in the row of its token is built in registers. Its
    # product with the queries is the whole gradient.
    token_S, dim_D = tl.program_id(0) * STEP + tl.arange(0, STEP), tl.arange(0, D)
    doc = tl.program_id(1).to(tl.int64)
    is_dim_1D = (dim_D < WIDTH)[None, :]
    sum_SD = tl.zeros((STEP, D), tl.float32)
    for start in range(0, num_rows, ROWS):
        row_R = start + tl.arange(0, ROWS)
        is_row_R = row_R < num_rows
        at_R = doc * num_rows + row_R
        grad_R = tl.load(grad_BT + at_R, mask=is_row_R, other=0.0)
        winner_R = tl.load(winner_BT + at_R, mask=is_row_R, other=-1)
        at_RD = row_R[:, None] * WIDTH + dim_D[None, :]
        query_RD = tl.load(queries_TD + at_RD, mask=is_row_R[:, None] & is_dim_1D, other=0.0)
        chosen_SR = tl.where(winner_R[None, :] == token_S[:, None], grad_R[None, :], 0.0)
        sum_SD = tl.dot(chosen_SR.to(query_RD.dtype), query_RD, sum_SD, input_precision=PRECISION)
    out_SD = out_BND + (doc * num_tokens + token_S)[:, None] * WIDTH + dim_D[None, :]
    is_out_SD = (token_S < num_tokens)[:, None] & is_dim_1D
    tl.store(out_SD, sum_SD.to(out_BND.dtype.element_ty), mask=is_out_SD)


class Best(torch.autograd.Function):
    """(T, B) similarity of each query token with its most similar token of each document.

    Args:
        queries_TD: bfloat16 or float32.
        docs_BND: As the queries, with N > 0 and D <= `MAX_DIM`.
        doc_mask_BN: bool, valid document tokens.
        lowest: Similarity with a document without valid tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries_TD: torch.Tensor,
        docs_BND: torch.Tensor,
        doc_mask_BN: torch.Tensor,
        lowest: float,
    ) -> torch.Tensor:
        """Launches the kernel of the maxima."""
        queries_TD, docs_BND = queries_TD.contiguous(), docs_BND.contiguous()
        num_rows = len(queries_TD)
        num_docs, num_tokens, _ = docs_BND.shape
        best_BT = queries_TD.new_empty(num_docs, num_rows, dtype=torch.float32)
        winner_BT = torch.empty_like(best_BT, dtype=torch.int32)
        tiles = _tiles(queries_TD)
        _best[triton.cdiv(num_rows, tiles["ROWS"]), num_docs](
            queries_TD,
            docs_BND,
            doc_mask_BN.contiguous().view(torch.uint8),
            best_BT,
            winner_BT,
            num_rows,
            num_tokens,
            lowest,
            **tiles,
        )
        ctx.save_for_backward(queries_TD, docs_BND, winner_BT)
        return best_BT.T

    @staticmethod
    def backward(ctx: Any, grad_TB: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Launches the kernels of both gradients."""
        queries_TD, docs_BND, winner_BT = ctx.saved_tensors
        num_docs, num_tokens, dim = docs_BND.shape
        num_rows = len(queries_TD)
        grad_BT = grad_TB.T.contiguous()
        grad_queries, grad_docs = torch.empty_like(queries_TD), torch.empty_like(docs_BND)
        tiles = _tiles(queries_TD)
        _query_gradients[triton.cdiv(num_rows, GATHERED_ROWS),](
            grad_BT,
            winner_BT,
            docs_BND,
            grad_queries,
            num_rows,
            num_docs,
            num_tokens,
            WIDTH=dim,
            ROWS=GATHERED_ROWS,
            D=tiles["D"],
        )
        tiles["STEP"] = tiles["ROWS"]  # each program reads all queries
        _doc_gradients[triton.cdiv(num_tokens, tiles["STEP"]), num_docs](
            grad_BT, winner_BT, queries_TD, grad_docs, num_rows, num_tokens, **tiles
        )
        return grad_queries, grad_docs, None, None


def _tiles(vectors_TD: torch.Tensor) -> dict[str, Any]:
    """Returns the constants of a kernel: sizes of tiles, precision and launch options."""
    dim = vectors_TD.shape[1]
    width = max(triton.next_power_of_2(dim), 16)
    size = max(16, min(128, TILE_NUMBERS[vectors_TD.dtype] // width))
    return {
        "WIDTH": dim,
        "D": width,
        "ROWS": size,
        "STEP": min(size, 64),
        # Three products of TensorFloat-32 represent one of float32 on tensor cores.
        "PRECISION": "tf32x3" if vectors_TD.dtype == torch.float32 else "ieee",
        "num_warps": 8 if size == 128 else 4,
        "num_stages": 2,
    }

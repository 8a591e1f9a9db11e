"""MaxSim on CUDA devices with a fused Triton kernel.

This module is imported if the vectors are on a CUDA device and Triton is installed. Otherwise torch
computes the scores.

- Each program processes a panel of 64 to 256 query tokens and a group of documents. Maxima stay in
  registers, and only one score per query and document is written, so similarities never reach
  global memory and the working memory depends only on the queries. A query that fits in one panel
  reads each document once. Programs of the same documents run concurrently, so that further panels
  read them from the cache.
- Documents are read in place by start and length. Several short documents share a tile, which has
  slots of 16 to 128 tokens. Maxima and dot products do not depend on the position in a tile, and
  there are no atomics, so equal documents have bit-identical scores.
- Several queries are packed into a panel, each padded to a multiple of four tokens. Queries longer
  than a panel are processed in several launches whose scores are added. Maxima are summed in
  float64, so the score of a query does not depend on the other queries.
- Query tokens are divided by a scale, rounded to the data type of the product and accumulated in
  float32. float16 is used for float16 and residual vectors. It changes the similarity of unit
  vectors of 128 dimensions by 2e-5 (at most 7e-5; residuals, which are rounded too, 3e-5 and 9e-5).
  The error would be eight times larger for bfloat16, which therefore uses pairs, high + low.
  float32 uses three tf32 products, and int8 and bits use int8. Vectors of bits and residuals are
  decoded right before the product.

late-interaction-kernels 0.4.5 supports ragged documents and residual vectors, but not int8 or
vectors of bits, and starts a program per pair of query and document, so each query reads all
documents. flash-maxsim 0.3.0 supports ragged documents for one float16 query at a time and int8
only with padding, but not residuals or vectors of bits. Neither returns the best tokens of ragged
documents.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pipeline.compression.codecs import Codec
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.residual import Residual
from pipeline.search.packed import PackedVectors, Segment

#: Target number of document tokens per program, which amortises loading its queries.
PROGRAM_TOKENS = 2048
#: Target number of programs per multiprocessor, which balances documents of different lengths.
PROGRAMS = 8
#: Maximum number of queries per panel, because maxima are summed for each of them separately.
PANEL_QUERIES = 16
#: Queries in a panel are padded to a multiple of this number of tokens.
ALIGN = 4
#: Candidates (num_warps, num_stages) for autotuning, by panel size. The first is the default.
SCHEDULES = {
    64: ((4, 3), (4, 2), (8, 3)),
    128: ((4, 3), (8, 3), (8, 2)),
    256: ((8, 3), (8, 2), (8, 4)),
}

_NUMBERS, _INT8, _BITS, _RESIDUAL = range(4)
_UNSUPPORTED = -1
_CODEC_KINDS = {"int8": _INT8, "bits": _BITS, "residual": _RESIDUAL}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Whether Triton interprets the kernel on the CPU, which is slow and used only in tests.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _decode(
    values,
    codes,
    centroids,
    weights,
    row_N,
    valid_N,
    first,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loads and decodes BLOCK_D dimensions of N document tokens. Masked values are 0."""
    dim_d = first + tl.arange(0, BLOCK_D)
    if DIM % BLOCK_D == 0:
        in_range_Nd = valid_N[:, None]
    else:
        in_range_Nd = valid_N[:, None] & (dim_d < DIM)[None, :]
    if BITS == 0:
        at_Nd = values + row_N[:, None] * DIM + dim_d[None, :]
        doc_Nd = tl.load(at_Nd, mask=in_range_Nd, other=0)
    else:
        # Each byte is loaded once and unpacked into its 8 / BITS values.
        PER_BYTE: tl.constexpr = 8 // BITS
        byte_b = first // PER_BYTE + tl.arange(0, BLOCK_D // PER_BYTE)
        at_Nb = values + row_N[:, None] * ROW + byte_b[None, :]
        packed_Nb = tl.load(at_Nb, mask=valid_N[:, None] & (byte_b < ROW)[None, :], other=0)
        shift_p = tl.arange(0, PER_BYTE) * BITS
        bucket_Nbp = (packed_Nb.to(tl.int32)[:, :, None] >> shift_p[None, None, :]) & (2**BITS - 1)
        bucket_Nd = tl.reshape(bucket_Nbp, (BLOCK_N, BLOCK_D))
        if KIND == 2:  # values beyond D are arbitrary, because the queries are 0 there
            doc_Nd = (2 * bucket_Nd - (2**BITS - 1)).to(tl.int8)
        else:
            code_N = tl.load(codes + row_N, mask=valid_N, other=0).to(tl.int64)
            at_Nd = centroids + code_N[:, None] * DIM + dim_d[None, :]
            centroid_Nd = tl.load(at_Nd, mask=in_range_Nd, other=0).to(tl.float32)
            doc_Nd = centroid_Nd + tl.load(weights + bucket_Nd, mask=in_range_Nd, other=0)
    return doc_Nd


@triton.jit
def _similarities(
    query_MD,
    low_MD,
    queries,
    half,
    token_M,
    offset_M,
    values,
    scales,
    projections,
    codes,
    centroids,
    weights,
    row_N,
    valid_N,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    NORMALISED: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Multiplies a panel by document tokens, (M, N). The scales of the queries are not applied."""
    WIDTH: tl.constexpr = BLOCK_D * NUM_BLOCKS
    sim_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if KIND == 1 or KIND == 2 else tl.float32)
    square_N = tl.zeros((BLOCK_N,), tl.float64)
    for block in range(NUM_BLOCKS):
        first = block * BLOCK_D
        doc_Nd = _decode(
            values, codes, centroids, weights, row_N, valid_N, first,
            DIM, ROW, KIND, BITS, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if KIND == 3:
            if NORMALISED:
                # In float64, so that the sum does not depend on the layout of the tile.
                wide_Nd = doc_Nd.to(tl.float64)
                square_N += tl.sum(wide_Nd * wide_Nd, axis=1)
            doc_Nd = doc_Nd.to(tl.float16)
        if NUM_BLOCKS == 1:
            part_Md, low_Md = query_MD, low_MD
        else:
            dim_d = first + tl.arange(0, BLOCK_D)
            at_Md = queries + token_M[:, None] * WIDTH + dim_d[None, :]
            part_Md = tl.load(at_Md)
            low_Md = tl.load(at_Md + half) if PAIR else part_Md
        if KIND == 1 or KIND == 2:
            sim_MN = tl.dot(part_Md, tl.trans(doc_Nd), sim_MN, out_dtype=tl.int32)
        elif part_Md.dtype == tl.float32:
            sim_MN = tl.dot(part_Md, tl.trans(doc_Nd), sim_MN, input_precision="tf32x3")
        else:
            if PAIR:
                sim_MN = tl.dot(low_Md, tl.trans(doc_Nd), sim_MN)
            sim_MN = tl.dot(part_Md, tl.trans(doc_Nd), sim_MN)
    sim_MN = sim_MN.to(tl.float32)
    if KIND == 1 or KIND == 2:
        sim_MN *= tl.load(scales + row_N, mask=valid_N, other=0).to(tl.float32)[None, :]
    if KIND == 2:
        projection_N = tl.load(projections + row_N, mask=valid_N, other=0).to(tl.float32)
        sim_MN += offset_M[:, None] * projection_N[None, :]
    if NORMALISED:
        sim_MN /= tl.maximum(tl.sqrt(square_N.to(tl.float32)), 1e-12)[None, :]
    return sim_MN


@triton.jit
def _kernel(
    queries,
    query_scales,
    query_offsets,
    quad_queries,
    panel_queries,
    values,
    scales,
    projections,
    codes,
    centroids,
    weights,
    documents,
    starts,
    lengths,
    out,
    index,
    num_docs,
    num_panels,
    group,
    half,
    out_stride,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    NORMALISED: tl.constexpr,
    PAIR: tl.constexpr,
    SELECTED: tl.constexpr,
    SHORT: tl.constexpr,
    BEST: tl.constexpr,
    ADD: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Scores a group of documents for a panel or, with BEST, finds the best document tokens.

    Args:
        queries: (2 if PAIR else 1, panels x M, BLOCK_D x NUM_BLOCKS), 0 beyond D.
        query_scales: (panels x M) float32.
        query_offsets: (panels x M) float32, read for bits.
        quad_queries: (panels x M / 4) int32, query of each group of four tokens, as an index in
            the panel.
        panel_queries: (panels, 16) int32, row in `out` per query of a panel, or -1 for none.
        values: (T, ROW) values, residuals or bits of the document tokens.
        scales: (T, 1) float32 for int8, float16 for bits.
        projections: (T, 1) float16, read for bits.
        codes: (T, 1) int32, centroid per token, read for residuals.
        centroids: (C, D) float16, read for residuals.
        weights: (2^BITS,) float32, value per residual bucket.
        documents: (B,) int64, read if SELECTED.
        starts: (S,) int64, first token per document.
        lengths: (S,) int64, number of tokens per document.
        out: Scores (Q, B) with row stride `out_stride`, or similarities (B, M) with BEST.
        index: (B, M) int32 best tokens, written with BEST.
        group: Number of documents per program.
        half: Offset from the high to the low part of a query token, in elements.
        out_stride: Stride between the rows of `out`, in elements.
        ROW: Width of a row of `values`.
        BITS: Bits per dimension of vectors of bits and residuals, else 0.
        NORMALISED: Whether decoded residuals are scaled to unit length.
        PAIR: Whether a query token is a pair of bfloat16, high + low.
        SELECTED: Whether `documents` selects some of the documents.
        SHORT: Whether every document fits in a slot.
        BEST: Whether to write best tokens instead of scores.
        ADD: Whether to add scores to those in `out`.
        QUERIES: Maximum number of queries per panel, a power of two.
        BLOCK_M: Number M of query tokens per panel.
        SLOT: Number of document tokens per slot.
        SLOTS: Number of slots per tile.
        BLOCK_D: Number of dimensions per block.
        NUM_BLOCKS: Number of blocks of dimensions.
    """
    BLOCK_N: tl.constexpr = SLOT * SLOTS
    # Adjacent programs process the same documents, which they share through the cache.
    panel = tl.program_id(0) % num_panels
    first_doc = tl.program_id(0) // num_panels * group
    end_doc = tl.minimum(first_doc + group, num_docs)
    token_M = (panel * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    # Loaded once and used if all dimensions fit in one block.
    at_MD = queries + token_M[:, None] * (BLOCK_D * NUM_BLOCKS) + tl.arange(0, BLOCK_D)[None, :]
    query_MD = tl.load(at_MD)
    low_MD = tl.load(at_MD + half) if PAIR else query_MD
    scale_M = tl.load(query_scales + token_M)
    offset_M = tl.load(query_offsets + token_M)
    slot_N = tl.arange(0, BLOCK_N) // SLOT
    token_N = tl.arange(0, BLOCK_N) % SLOT
    for doc in range(first_doc, end_doc, SLOTS):
        is_doc_N = doc + slot_N < end_doc
        doc_N = (doc + slot_N).to(tl.int64)
        if SELECTED:
            doc_N = tl.load(documents + doc_N, mask=is_doc_N, other=0)
        start_N = tl.load(starts + doc_N, mask=is_doc_N, other=0)
        length_N = tl.load(lengths + doc_N, mask=is_doc_N, other=0)
        best_Ms = tl.full((BLOCK_M, SLOTS), float("-inf"), tl.float32)
        token_Ms = tl.full((BLOCK_M, SLOTS), -1, tl.int32)
        # A constant bound lets the compiler overlap the loads of the next documents.
        end = 1 if SHORT else tl.max(length_N, axis=0).to(tl.int32)
        for first in range(0, end, SLOT):
            # Beyond the end, the last token is repeated, which does not change the maximum. Masking
            # all similarities would cost more.
            position_N = tl.minimum(first + token_N, length_N - 1)
            sim_MN = _similarities(
                query_MD, low_MD, queries, half, token_M, offset_M, values, scales, projections,
                codes, centroids, weights, start_N + position_N, length_N > 0,
                DIM, ROW, KIND, BITS, NORMALISED, PAIR, BLOCK_M, BLOCK_N, BLOCK_D, NUM_BLOCKS,
            )  # fmt: skip
            sim_Mst = tl.reshape(sim_MN, (BLOCK_M, SLOTS, SLOT))
            if BEST:
                max_Ms, at_Ms = tl.max(
                    sim_Mst, axis=2, return_indices=True, return_indices_tie_break_left=True
                )
                token_Ms = tl.where(max_Ms > best_Ms, first + at_Ms, token_Ms)
                best_Ms = tl.maximum(max_Ms, best_Ms)
            else:
                best_Ms = tl.maximum(tl.max(sim_Mst, axis=2), best_Ms)
        best_Ms *= scale_M[:, None]
        position_s = (doc + tl.arange(0, SLOTS)).to(tl.int64)
        is_doc_s = position_s < end_doc
        document_s = position_s
        if SELECTED:
            document_s = tl.load(documents + position_s, mask=is_doc_s, other=0)
        length_s = tl.load(lengths + document_s, mask=is_doc_s, other=0)
        if BEST:
            at_Ms = position_s[None, :] * out_stride + token_M[:, None]
            mask_Ms = is_doc_s[None, :] & (token_M < out_stride)[:, None]
            best_Ms = tl.where(length_s[None, :] > 0, best_Ms, float("-inf"))
            last_s = length_s.to(tl.int32) - 1  # -1 without tokens
            tl.store(out + at_Ms, best_Ms, mask=mask_Ms)
            tl.store(index + at_Ms, tl.minimum(token_Ms, last_s[None, :]), mask=mask_Ms)
        else:
            # In float64, so that the sum does not depend on the position of a query in the panel.
            quad_fs = tl.sum(tl.reshape(best_Ms.to(tl.float64), (BLOCK_M // 4, 4, SLOTS)), axis=1)
            index_f = panel * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
            query_f = tl.load(quad_queries + index_f)
            is_query_qf = query_f[None, :] == tl.arange(0, QUERIES)[:, None]
            sum_qs = tl.sum(tl.where(is_query_qf[:, :, None], quad_fs[None, :, :], 0.0), axis=1)
            score_qs = tl.where(length_s[None, :] > 0, sum_qs.to(tl.float32), float("-inf"))
            row_q = tl.load(panel_queries + panel * 16 + tl.arange(0, QUERIES)).to(tl.int64)
            at_qs = row_q[:, None] * out_stride + position_s[None, :]
            mask_qs = (row_q >= 0)[:, None] & is_doc_s[None, :]
            if ADD:
                score_qs += tl.load(out + at_qs, mask=mask_qs, other=0)
            tl.store(out + at_qs, score_qs, mask=mask_qs)


@dataclass(frozen=True)
class _Panels:
    """Query tokens that are packed into panels of equal size for the kernel.

    Attributes:
        tokens: (1 or 2, panels x M, width), in the data type of the product.
        scales: (panels x M) float32, scale per token.
        offsets: (panels x M) float32, projection per token divided by the scale, for bits.
        quad_queries: (panels x M / 4) int32, see `_kernel`.
        queries: (panels, 16) int32, see `panel_queries` of `_kernel`.
        size: Number M of tokens per panel.
        max_queries: Maximum number of queries per panel.
    """

    tokens: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    quad_queries: torch.Tensor
    queries: torch.Tensor
    size: int
    max_queries: int

    @classmethod
    def pack(
        cls, query_MD: torch.Tensor, pieces: tuple[np.ndarray, ...], layout: _Layout
    ) -> _Panels:
        """Packs chunks, given as score row, first token and number of tokens (P,) int64 each."""
        rows_P, firsts_P, counts_P = pieces
        size, device = layout.panel, query_MD.device
        aligned_P = -(-counts_P // ALIGN) * ALIGN
        ends_P = aligned_P.cumsum()
        bounds = [0]  # first chunk of each panel
        while bounds[-1] < len(ends_P):
            start = bounds[-1]
            full = int(np.searchsorted(ends_P, ends_P[start] - aligned_P[start] + size, "right"))
            bounds.append(min(full, start + PANEL_QUERIES))
        per_panel = np.diff(bounds)
        panel_P = np.repeat(np.arange(len(per_panel)), per_panel)
        number_P = np.arange(len(rows_P)) - np.repeat(bounds[:-1], per_panel)
        before_P = ends_P - aligned_P
        start_P = panel_P * size + before_P - before_P[bounds[:-1]][panel_P]
        queries = np.full((len(per_panel), PANEL_QUERIES), -1, np.int32)
        queries[panel_P, number_P] = rows_P
        quads = np.full(len(per_panel) * (size // ALIGN), -1, np.int32)
        quads[_runs(start_P // ALIGN, aligned_P // ALIGN)] = np.repeat(number_P, aligned_P // ALIGN)
        source, target = (
            torch.from_numpy(_runs(starts, counts_P)).to(device) for starts in (firsts_P, start_P)
        )
        rows_MD = torch.zeros(len(per_panel) * size, query_MD.shape[1], device=device)
        rows_MD[target] = query_MD[source]
        tokens, scales, offsets = layout.quantise(rows_MD)
        return cls(
            tokens,
            scales,
            offsets,
            torch.from_numpy(quads).to(device),
            torch.from_numpy(queries).to(device),
            size,
            int(per_panel.max()),
        )


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenates the ranges of `count` integers from each start.

    >>> _runs(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = counts.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


@dataclass(frozen=True)
class _Layout:
    codec: Codec
    kind: int
    dim: int
    dtype: torch.dtype
    panel: int
    tile: int
    block: int
    num_blocks: int

    @classmethod
    def choose(cls, segment: Segment, num_tokens: int) -> _Layout:
        kind, values = _kind(segment), _values(segment)
        dtype = {_BITS: torch.int8, _RESIDUAL: torch.float16}.get(kind, values.dtype)
        decoded = kind in (_BITS, _RESIDUAL)
        padded = max(triton.next_power_of_2(segment.dim), 32)
        # The queries of a program stay in shared memory if they fit.
        block = padded if padded * dtype.itemsize <= (256 if decoded else 512) else 64
        small = padded * dtype.itemsize <= 256 and dtype not in (torch.bfloat16, torch.int8)
        max_panel = 64 if dtype == torch.float32 else 256 if small else 128
        panel = min(max(triton.next_power_of_2(num_tokens), 64), max_panel)
        tile = 64 if decoded or panel == 256 or dtype == torch.float32 else 128
        num_blocks = -(-segment.dim // block)
        return cls(segment.codec, kind, segment.dim, dtype, panel, tile, block, num_blocks)

    def quantise(self, rows_MD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Converts query tokens (M, D) float32.

        Returns:
            Values (1 or 2, M, width), scales (M,) and offsets (M,), which are 0 except for bits.
        """
        padding = self.block * self.num_blocks - self.dim
        if isinstance(self.codec, Bits):
            query = self.codec.split_queries(rows_MD)
            values_MD = torch.nn.functional.pad(query.values_QD, (0, padding)).to(self.dtype)
            return values_MD.unsqueeze(0), query.scales_Q, query.projections_Q / query.scales_Q
        rows_MD = torch.nn.functional.pad(rows_MD, (0, padding))
        largest_M = rows_MD.abs().amax(dim=1)
        offset_M = torch.zeros_like(largest_M)
        if self.kind == _INT8:
            scale_M = largest_M / 127
        else:  # division by a power of two is exact
            scale_M = torch.ldexp(torch.ones_like(largest_M), largest_M.frexp().exponent)
        scale_M[scale_M == 0] = 1
        rows_MD = rows_MD / scale_M[:, None]
        if self.kind == _INT8:
            rows_MD.round_()
        high_MD = rows_MD.to(self.dtype)
        if self.dtype != torch.bfloat16:
            return high_MD.unsqueeze(0), scale_M, offset_M
        return torch.stack([high_MD, (rows_MD - high_MD.float()).bfloat16()]), scale_M, offset_M


def _kind(segment: Segment) -> int:
    """Returns the number that the kernel uses for the codec of a segment, or `_UNSUPPORTED`."""
    values = segment.parts.get("values")
    if values is not None and values.dtype in _FLOATS:
        return _NUMBERS
    return _CODEC_KINDS.get(segment.codec.spec.name, _UNSUPPORTED)


def _values(segment: Segment) -> torch.Tensor:
    parts = segment.parts
    return next(parts[name] for name in ("values", "residuals", "bits") if name in parts)


def available() -> tuple[str, ...]:
    """Returns the names of the backends of this module."""
    return ("triton",)


def can_score(segment: Segment) -> bool:
    """Checks whether the kernel supports the codec, device and memory layout of a segment."""
    return (
        _kind(segment) != _UNSUPPORTED
        and (segment.lengths.is_cuda or _INTERPRETED)
        and all(part.is_contiguous() for part in segment.parts.values())
    )


def score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    packed: PackedVectors,
    rows: torch.Tensor | None,
    out_QB: torch.Tensor,
    level: str,
) -> None:
    """Writes the MaxSim scores of Q queries. Documents without tokens have the score -inf."""
    assert level == "triton"
    counts = query_lengths.tolist()
    aligned = sum(-(-count // ALIGN) * ALIGN for count in counts)
    launches: dict[_Layout, list[_Panels]] = {}  # usually one layout for all segments
    first = 0
    for segment, documents in packed.select(rows):
        last = first + (len(segment.lengths) if documents is None else len(documents))
        layout = _Layout.choose(segment, aligned)
        if layout not in launches:
            launches[layout] = _pack(query_MD, counts, layout)
        for i, panels in enumerate(launches[layout]):
            _launch(panels, layout, segment, documents, out_QB[:, first:last], add=i > 0)
        first = last


def _pack(query_MD: torch.Tensor, counts: list[int], layout: _Layout) -> list[_Panels]:
    """Packs queries into panels, one element per launch.

    A launch has the next piece, of at most a panel, of each query that has one left.
    """
    counts_Q = np.array(counts, dtype=np.int64)
    rows_P, firsts_P, counts_P = np.arange(len(counts)), counts_Q.cumsum() - counts_Q, counts_Q
    launches = []
    while len(rows_P):
        current_P = np.minimum(counts_P, layout.panel)
        launches.append(_Panels.pack(query_MD, (rows_P, firsts_P, current_P), layout))
        is_longer_P = counts_P > layout.panel
        rows_P = rows_P[is_longer_P]
        firsts_P = firsts_P[is_longer_P] + layout.panel
        counts_P = counts_P[is_longer_P] - layout.panel
    return launches


def best(
    query_MD: torch.Tensor, packed: PackedVectors, rows: torch.Tensor, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the document token that matches each query token best, for every document.

    Returns:
        Similarities (R, M) float32 and indices (R, M) int32 of the best tokens in their document.
        Ties resolve to the first token. Documents without tokens have -inf and -1.
    """
    assert level == "triton"
    num_tokens = len(query_MD)
    best_RM = torch.empty(len(rows), num_tokens, device=query_MD.device)
    index_RM = torch.empty(best_RM.shape, dtype=torch.int32, device=query_MD.device)
    last = 0
    for segment, documents in packed.select(rows):
        assert documents is not None  # because rows are given
        first, last = last, last + len(documents)
        if first == last:
            continue
        layout = _Layout.choose(segment, num_tokens)
        firsts_P = np.arange(0, num_tokens, layout.panel)
        counts_P = np.minimum(num_tokens - firsts_P, layout.panel)
        panels = _Panels.pack(query_MD, (np.zeros_like(firsts_P), firsts_P, counts_P), layout)
        outputs = best_RM[first:last], index_RM[first:last]
        _launch(panels, layout, segment, documents, *outputs)
    return best_RM, index_RM


def _launch(
    panels: _Panels,
    layout: _Layout,
    segment: Segment,
    documents: torch.Tensor | None,
    out: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    add: bool = False,
) -> None:
    num_docs = len(segment.lengths) if documents is None else len(documents)
    if not num_docs:
        return
    parts, codec, device = segment.parts, segment.codec, out.device
    values, num_panels = _values(segment), len(panels.queries)
    codes = centroids = weights = values  # read only for residuals
    bits, normalised = codec.spec.bits if isinstance(codec, Bits) else 0, False
    if isinstance(codec, Residual):
        codebook = codec.codebook(values.device)
        # float16 halves the gathered bytes. Decoded vectors are rounded to float16 anyway.
        codes, centroids = parts["centroids"], codebook.centroids_CD.half()
        weights, bits, normalised = codebook.weights, codec.spec.bits, codebook.normalised
    mean = max(-(-segment.num_vectors // len(segment.lengths)), 1)
    slot = min(max(triton.next_power_of_2(mean), 16), layout.tile)
    slots = layout.tile // slot
    programs = PROGRAMS * _multiprocessors(device)
    group = min(PROGRAM_TOKENS // mean, -(-num_docs * num_panels // programs))
    group = max(-(-group // slots), 1) * slots
    constants = {
        "DIM": layout.dim,
        "ROW": values.shape[1],
        "KIND": layout.kind,
        "BITS": bits,
        "NORMALISED": normalised,
        "PAIR": len(panels.tokens) == 2,
        "SELECTED": documents is not None,
        "SHORT": segment.longest <= slot,
        "BEST": index is not None,
        "ADD": add,
        "QUERIES": triton.next_power_of_2(panels.max_queries),
        "BLOCK_M": panels.size,
        "SLOT": slot,
        "SLOTS": slots,
        "BLOCK_D": layout.block,
        "NUM_BLOCKS": layout.num_blocks,
    }

    def run(schedule: tuple[int, int], num_groups: int) -> None:
        num_warps, num_stages = schedule
        _kernel[(num_groups * num_panels,)](
            panels.tokens,
            panels.scales,
            panels.offsets,
            panels.quad_queries,
            panels.queries,
            values,
            parts.get("scales", values),
            parts.get("projections", values),
            codes,
            centroids,
            weights,
            segment.starts if documents is None else documents,
            segment.starts,
            segment.lengths,
            out,
            out if index is None else index,
            num_docs,
            num_panels,
            group,
            panels.tokens.stride(0),
            out.stride(0),
            **constants,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    num_groups = -(-num_docs // group)
    num_timed = -(-programs // num_panels)  # enough groups to fill the device
    if _INTERPRETED:
        run(SCHEDULES[panels.size][0], num_groups)
        return
    with torch.cuda.device(device):
        # Launches that add to the scores are not timed, because they are not idempotent.
        key = (device, values.dtype, *(constants | {"ADD": False}).values())
        if key not in _fastest and num_groups >= num_timed and not add:
            schedules = SCHEDULES[panels.size]
            _fastest[key] = _autotune(schedules, lambda schedule: run(schedule, num_timed))
        candidates = [_fastest[key]] if key in _fastest else list(SCHEDULES[panels.size])
        _run_first(candidates, lambda schedule: run(schedule, num_groups))


#: Fastest schedule by device, data type and constants of the kernel.
_fastest: dict[tuple[Any, ...], tuple[int, int]] = {}


def _run_first(
    schedules: Sequence[tuple[int, int]], run: Callable[[tuple[int, int]], None]
) -> None:
    """Runs the first schedule whose shared memory the device has."""
    for schedule in schedules[:-1]:
        try:
            return run(schedule)
        except triton.runtime.errors.OutOfResources:
            continue
    run(schedules[-1])


def _autotune(
    schedules: Sequence[tuple[int, int]], run: Callable[[tuple[int, int]], None]
) -> tuple[int, int]:
    """Returns the fastest schedule. The scores that it writes are overwritten later."""
    seconds = {}
    for schedule in schedules:
        try:
            run(schedule)  # compiles the kernel
        except triton.runtime.errors.OutOfResources:
            continue
        seconds[schedule] = triton.testing.do_bench(
            functools.partial(run, schedule), warmup=5, rep=20, return_mode="median"
        )
    return min(seconds, key=seconds.__getitem__)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

"""MaxSim on CUDA devices: one Triton kernel that multiplies, takes maxima and sums them.

It is imported where the vectors lie on such a device and Triton is installed; else torch scores.

- A program holds a panel of 64 to 256 query tokens and walks over a group of documents. It keeps
  the maxima in registers and writes one score a query and document: no similarity ever reaches
  memory, and what is needed beside the scores grows with the queries alone. A query that fits one
  panel reads each document once; programs of the same documents run side by side, so that many
  panels read them from the cache.
- Documents are read where they lie, by start and length. Short ones share a tile: it has as many
  slots of 16 to 128 tokens as fit. A maximum and a product of two tokens do not depend on the
  place in a tile, and there are no atomics: equal documents have equal scores, bit by bit.
- Whole queries are packed into a panel, each to a multiple of four tokens; of a longer one than
  a panel, launch after launch adds its pieces. Maxima are added as float64, so that a query's score
  is the same in whatever company it is asked.
- A query token is divided by a scale and rounded to the type it is multiplied in, with sums of
  float32: float16 for float16, bits and residuals, which moves a similarity of unit vectors of 128
  numbers by 2e-5 (7e-5 at most; residuals, rounded themselves, 3e-5 and 9e-5). For bfloat16, where
  that would be eight times as much, it is a pair, high + low; for float32, three products of tf32;
  for int8, as int8. Bits and residuals are decoded on the way to the multiplication.

late-interaction-kernels 0.4.5 takes ragged documents and residuals, but neither int8 nor bits, and
starts a program for each pair of a query and a document, so that each query reads all documents;
flash-maxsim 0.3.0 takes ragged documents for one query of float16 at a time, int8 only padded, and
neither residuals nor bits. Neither gives the best tokens of ragged documents to its caller.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pipeline.codecs.residual import Residual
from pipeline.search.packed import Segment

#: Tokens that a program should read at least, so that loading its queries does not count.
PROGRAM_TOKENS = 2048
#: Programs a multiprocessor that there should be, so that ragged documents even out.
PROGRAMS = 8
#: Queries of one panel: each document's maxima are summed for every one of them.
PANEL_QUERIES = 16
#: Tokens to which a query is filled up in its panel.
ALIGN = 4
#: What is tried, (num_warps, num_stages), by the tokens of a panel; the first where nothing is.
SCHEDULES = {
    64: ((4, 3), (4, 2), (8, 3)),
    128: ((4, 3), (8, 3), (8, 2)),
    256: ((8, 3), (8, 2), (8, 4)),
}

_NUMBERS, _INT8, _BINARY, _RESIDUAL = range(4)
_UNSUPPORTED = -1
_OF_CODEC = {"int8": _INT8, "binary": _BINARY, "residual": _RESIDUAL}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Whether the kernel is interpreted, on the CPU: slow, to test it.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _decode(
    values,
    codes,
    centroids,
    weights,
    row_N,
    there_N,
    first,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Numbers from `first` on, (N, BLOCK_D), of document tokens; 0 where there is none."""
    number_d = first + tl.arange(0, BLOCK_D)
    if DIM % BLOCK_D == 0:
        inside_Nd = there_N[:, None]
    else:
        inside_Nd = there_N[:, None] & (number_d < DIM)[None, :]
    if BITS == 0:
        at_Nd = values + row_N[:, None] * DIM + number_d[None, :]
        doc_Nd = tl.load(at_Nd, mask=inside_Nd, other=0)
    else:
        # Each byte is read once, and spread over the numbers that it holds.
        PER_BYTE: tl.constexpr = 8 // BITS
        byte_b = first // PER_BYTE + tl.arange(0, BLOCK_D // PER_BYTE)
        at_Nb = values + row_N[:, None] * ROW + byte_b[None, :]
        packed_Nb = tl.load(at_Nb, mask=there_N[:, None] & (byte_b < ROW)[None, :], other=0)
        shift_p = tl.arange(0, PER_BYTE) * BITS
        bucket_Nbp = (packed_Nb.to(tl.int32)[:, :, None] >> shift_p[None, None, :]) & (2**BITS - 1)
        bucket_Nd = tl.reshape(bucket_Nbp, (BLOCK_N, BLOCK_D))
        if KIND == 2:  # beyond D the queries are 0
            doc_Nd = (2 * bucket_Nd - 1).to(tl.float16)
        else:
            code_N = tl.load(codes + row_N, mask=there_N, other=0).to(tl.int64)
            at_Nd = centroids + code_N[:, None] * DIM + number_d[None, :]
            centroid_Nd = tl.load(at_Nd, mask=inside_Nd, other=0).to(tl.float32)
            doc_Nd = centroid_Nd + tl.load(weights + bucket_Nd, mask=inside_Nd, other=0)
    return doc_Nd


@triton.jit
def _similarities(
    query_MD,
    low_MD,
    queries,
    half,
    token_M,
    values,
    scales,
    codes,
    centroids,
    weights,
    row_N,
    there_N,
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
    """Products (M, N) of a panel with document tokens, without the queries' scales."""
    WIDTH: tl.constexpr = BLOCK_D * NUM_BLOCKS
    sim_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if KIND == 1 else tl.float32)
    square_N = tl.zeros((BLOCK_N,), tl.float32)
    for block in range(NUM_BLOCKS):
        first = block * BLOCK_D
        doc_Nd = _decode(
            values, codes, centroids, weights, row_N, there_N, first,
            DIM, ROW, KIND, BITS, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if KIND == 3:
            if NORMALISED:
                square_N += tl.sum(doc_Nd * doc_Nd, axis=1)
            doc_Nd = doc_Nd.to(tl.float16)
        if NUM_BLOCKS == 1:
            part_Md, low_Md = query_MD, low_MD
        else:
            number_d = first + tl.arange(0, BLOCK_D)
            at_Md = queries + token_M[:, None] * WIDTH + number_d[None, :]
            part_Md = tl.load(at_Md)
            low_Md = tl.load(at_Md + half) if PAIR else part_Md
        if KIND == 1:
            sim_MN = tl.dot(part_Md, tl.trans(doc_Nd), sim_MN, out_dtype=tl.int32)
        elif part_Md.dtype == tl.float32:
            sim_MN = tl.dot(part_Md, tl.trans(doc_Nd), sim_MN, input_precision="tf32x3")
        else:
            if PAIR:
                sim_MN = tl.dot(low_Md, tl.trans(doc_Nd), sim_MN)
            sim_MN = tl.dot(part_Md, tl.trans(doc_Nd), sim_MN)
    sim_MN = sim_MN.to(tl.float32)
    if KIND == 1:
        sim_MN *= tl.load(scales + row_N, mask=there_N, other=0)[None, :]
    if NORMALISED:
        sim_MN /= tl.maximum(tl.sqrt(square_N), 1e-12)[None, :]
    return tl.where(there_N[None, :], sim_MN, float("-inf"))


@triton.jit
def _kernel(
    queries,
    query_scales,
    query_of_fours,
    panel_queries,
    values,
    scales,
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
    CHOSEN: tl.constexpr,
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
    """Scores a group of documents for a panel; or, with BEST, finds the panel's best tokens.

    Args:
        queries: (2 if PAIR else 1, panels x M, BLOCK_D x NUM_BLOCKS), 0 beyond D.
        query_scales: (panels x M) float32.
        query_of_fours: (panels x M / 4) int32, index in its panel of the query of four tokens.
        panel_queries: (panels, 16) int32, row of `out` of each query of a panel, or -1.
        values: (T, ROW), the numbers, residuals or bits of the document tokens.
        scales: (T, 1) float32, read for int8.
        codes: (T, 1) int32, centroid of each token, read for residuals.
        centroids: (C, D) float16, read for residuals.
        weights: (2^BITS,) float32, value of each residual bucket.
        documents: (B,) int64, read if CHOSEN.
        starts: (S,) int64, first token of each document.
        lengths: (S,) int64, number of tokens of each document.
        out: Scores (Q, B) with rows `out_stride` apart, or similarities (B, M) with BEST.
        index: (B, M) int32 best tokens, written with BEST.
        num_docs: B, number of documents to score.
        num_panels: Number of panels.
        group: Number of documents per program.
        half: Distance from the high to the low part of a query token, in numbers.
        out_stride: Distance between the rows of `out`, in numbers.
        DIM: D, dimension of the vectors.
        ROW: Width of a row of `values`.
        KIND: Number of the codec, see `_kind`.
        BITS: Bits per dimension of bits and residuals.
        NORMALISED: Whether decoded residuals are scaled to unit length.
        PAIR: Whether a query token is a pair of bfloat16, high + low.
        CHOSEN: Whether `documents` selects some of the documents.
        SHORT: Whether no document has more tokens than a slot.
        BEST: Whether best tokens are written instead of scores.
        ADD: Whether scores are added to those in `out`.
        QUERIES: Maximum number of queries per panel, a power of two.
        BLOCK_M: M, number of query tokens per panel.
        SLOT: Number of document tokens per slot.
        SLOTS: Number of slots per tile.
        BLOCK_D: Number of dimensions per block.
        NUM_BLOCKS: Number of blocks of dimensions.
    """
    BLOCK_N: tl.constexpr = SLOT * SLOTS
    # The panels of the same documents run side by side: the documents come from the cache.
    panel = tl.program_id(0) % num_panels
    first_doc = tl.program_id(0) // num_panels * group
    end_doc = tl.minimum(first_doc + group, num_docs)
    token_M = (panel * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    # Used if they are all numbers of a query: they are then loaded once.
    at_MD = queries + token_M[:, None] * (BLOCK_D * NUM_BLOCKS) + tl.arange(0, BLOCK_D)[None, :]
    query_MD = tl.load(at_MD)
    low_MD = tl.load(at_MD + half) if PAIR else query_MD
    scale_M = tl.load(query_scales + token_M)
    slot_N = tl.arange(0, BLOCK_N) // SLOT
    token_N = tl.arange(0, BLOCK_N) % SLOT
    for doc in range(first_doc, end_doc, SLOTS):
        asked_N = doc + slot_N < end_doc
        doc_N = (doc + slot_N).to(tl.int64)
        if CHOSEN:
            doc_N = tl.load(documents + doc_N, mask=asked_N, other=0)
        start_N = tl.load(starts + doc_N, mask=asked_N, other=0)
        length_N = tl.load(lengths + doc_N, mask=asked_N, other=0)
        best_Ms = tl.full((BLOCK_M, SLOTS), float("-inf"), tl.float32)
        token_Ms = tl.full((BLOCK_M, SLOTS), -1, tl.int32)
        # A loop that runs once could not be overlapped with the next document's loads.
        end = 1 if SHORT else tl.max(length_N, axis=0).to(tl.int32)
        for first in range(0, end, SLOT):
            sim_MN = _similarities(
                query_MD, low_MD, queries, half, token_M, values, scales, codes, centroids, weights,
                start_N + first + token_N, first + token_N < length_N,
                DIM, ROW, KIND, BITS, NORMALISED, PAIR, BLOCK_M, BLOCK_N, BLOCK_D, NUM_BLOCKS,
            )  # fmt: skip
            sim_Mst = tl.reshape(sim_MN, (BLOCK_M, SLOTS, SLOT))
            if BEST:
                found_Ms, at_Ms = tl.max(
                    sim_Mst, axis=2, return_indices=True, return_indices_tie_break_left=True
                )
                token_Ms = tl.where(found_Ms > best_Ms, first + at_Ms, token_Ms)
                best_Ms = tl.maximum(found_Ms, best_Ms)
            else:
                best_Ms = tl.maximum(tl.max(sim_Mst, axis=2), best_Ms)
        best_Ms *= scale_M[:, None]
        place_s = (doc + tl.arange(0, SLOTS)).to(tl.int64)
        asked_s = place_s < end_doc
        if BEST:
            at_Ms = place_s[None, :] * out_stride + token_M[:, None]
            there_Ms = asked_s[None, :] & (token_M < out_stride)[:, None]
            tl.store(out + at_Ms, best_Ms, mask=there_Ms)
            tl.store(index + at_Ms, token_Ms, mask=there_Ms)
        else:
            # float64: the sum of a query does not show where in the panel it stands.
            four_fs = tl.sum(tl.reshape(best_Ms.to(tl.float64), (BLOCK_M // 4, 4, SLOTS)), axis=1)
            own_f = panel * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
            query_f = tl.load(query_of_fours + own_f)
            is_own_qf = query_f[None, :] == tl.arange(0, QUERIES)[:, None]
            sum_qs = tl.sum(tl.where(is_own_qf[:, :, None], four_fs[None, :, :], 0.0), axis=1)
            document_s = place_s
            if CHOSEN:
                document_s = tl.load(documents + place_s, mask=asked_s, other=0)
            length_s = tl.load(lengths + document_s, mask=asked_s, other=0)
            score_qs = tl.where(length_s[None, :] == 0, float("-inf"), sum_qs.to(tl.float32))
            row_q = tl.load(panel_queries + panel * 16 + tl.arange(0, QUERIES)).to(tl.int64)
            at_qs = row_q[:, None] * out_stride + place_s[None, :]
            there_qs = (row_q >= 0)[:, None] & asked_s[None, :]
            if ADD:
                score_qs += tl.load(out + at_qs, mask=there_qs, other=0)
            tl.store(out + at_qs, score_qs, mask=there_qs)


@dataclass(frozen=True)
class _Panels:
    """Query tokens as the kernel reads them, in panels of as many tokens.

    Attributes:
        numbers: (1 or 2, panels x M, width), of the type that is multiplied.
        scales: (panels x M) float32.
        query_of_fours: (panels x M / 4) int32.
        queries: (panels, 16) int32.
        size: M.
        most_queries: that a panel has.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    query_of_fours: torch.Tensor
    queries: torch.Tensor
    size: int
    most_queries: int

    @classmethod
    def of(
        cls, query_MD: torch.Tensor, pieces: Sequence[tuple[int, int, int]], layout: _Layout
    ) -> _Panels:
        """Packs pieces of queries, (row of the scores, first token, tokens), in their order."""
        size, device = layout.panel, query_MD.device
        begins: list[int] = []
        fours: list[list[int]] = []
        queries: list[list[int]] = []
        used = size
        for row, _, count in pieces:
            aligned = -(-count // ALIGN) * ALIGN
            if used + aligned > size or len(queries[-1]) == PANEL_QUERIES:
                queries.append([])
                fours.append([])
                used = 0
            begins.append((len(queries) - 1) * size + used)
            fours[-1] += [len(queries[-1])] * (aligned // ALIGN)
            queries[-1].append(row)
            used += aligned
        _, firsts, counts = torch.tensor(pieces).T
        # Token t lies `shift` of its piece behind t, in the queries and in the panels.
        ends = counts.cumsum(0)
        token = torch.arange(int(ends[-1]))
        shift = torch.stack([firsts, torch.tensor(begins)]) - (ends - counts)
        source, place = (token + torch.repeat_interleave(shift, counts, dim=1)).to(device)
        rows_MD = torch.zeros(len(queries) * size, query_MD.shape[1], device=device)
        rows_MD[place] = query_MD[source]
        numbers, scales = layout.packed(rows_MD)
        return cls(
            numbers,
            scales,
            _filled(fours, size // ALIGN).to(device),
            _filled(queries, PANEL_QUERIES).to(device),
            size,
            max(map(len, queries)),
        )


def _filled(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


@dataclass(frozen=True)
class _Layout:
    """Number formats and block sizes of a launch."""

    kind: int
    dim: int
    dtype: torch.dtype
    panel: int
    tile: int
    block: int
    num_blocks: int

    @classmethod
    def of(cls, segment: Segment, num_tokens: int) -> _Layout:
        """Returns the layout for a segment and the number of tokens of all queries."""
        kind, values = _kind(segment), _values(segment)
        dtype = values.dtype if kind in (_NUMBERS, _INT8) else torch.float16
        decoded = kind in (_BINARY, _RESIDUAL)
        padded = max(triton.next_power_of_2(segment.dim), 32)
        # The queries of a program stay in shared memory if they have room there.
        block = padded if padded * dtype.itemsize <= (256 if decoded else 512) else 64
        small = padded * dtype.itemsize <= 256 and dtype != torch.bfloat16
        most = 64 if dtype == torch.float32 else 256 if small else 128
        panel = min(max(triton.next_power_of_2(num_tokens), 64), most)
        tile = 64 if decoded or panel == 256 or dtype == torch.float32 else 128
        num_blocks = -(-segment.dim // block)
        return cls(kind, segment.dim, dtype, panel, tile, block, num_blocks)

    def packed(self, rows_MD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns query tokens (M, D) float32 as numbers (1 or 2, M, width) and scales (M,)."""
        padding = self.block * self.num_blocks - self.dim
        rows_MD = torch.nn.functional.pad(rows_MD, (0, padding))
        largest_M = rows_MD.abs().amax(dim=1)
        if self.kind == _INT8:
            scale_M = largest_M / 127
        elif self.kind == _BINARY:  # so that queries that are signs themselves stay exact
            scale_M = largest_M
        else:  # a power of two, which rounds nothing
            scale_M = torch.ldexp(torch.ones_like(largest_M), largest_M.frexp().exponent)
        scale_M[scale_M == 0] = 1
        rows_MD = rows_MD / scale_M[:, None]
        if self.kind == _INT8:
            rows_MD.round_()
        if self.kind == _BINARY:
            scale_M /= self.dim**0.5
        high_MD = rows_MD.to(self.dtype)
        if self.dtype != torch.bfloat16:
            return high_MD.unsqueeze(0), scale_M
        return torch.stack([high_MD, (rows_MD - high_MD.float()).bfloat16()]), scale_M


def _kind(segment: Segment) -> int:
    """Returns the kernel's number of a segment's codec, or `_UNSUPPORTED`."""
    values = segment.parts.get("values")
    if values is not None and values.dtype in _FLOATS:
        return _NUMBERS
    return _OF_CODEC.get(segment.codec.spec.name, _UNSUPPORTED)


def _values(segment: Segment) -> torch.Tensor:
    """Returns the part with the numbers of each dimension."""
    parts = segment.parts
    return next(parts[name] for name in ("values", "residuals", "bits") if name in parts)


def available() -> tuple[str, ...]:
    """Returns the names of the backends of this module."""
    return ("triton",)


def can_score(segment: Segment) -> bool:
    """Returns whether the kernel supports a segment's codec, device and memory layout."""
    return (
        _kind(segment) != _UNSUPPORTED
        and (segment.lengths.is_cuda or _INTERPRETED)
        and all(part.is_contiguous() for part in segment.parts.values())
    )


def score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    chosen: Sequence[tuple[Segment, torch.Tensor | None]],
    out_QB: torch.Tensor,
    level: str,
) -> None:
    """Writes the sums of maxima of Q queries for the documents, -inf for those without tokens.

    Args:
        query_MD: float32, the tokens of all queries.
        query_lengths: (Q,) int64, number of tokens per query.
        chosen: Segments with their documents, ascending; None for all documents.
        out_QB: float32, contiguous along B.
        level: "triton".
    """
    assert level == "triton"
    counts = query_lengths.tolist()
    aligned = sum(-(-count // ALIGN) * ALIGN for count in counts)
    packed: dict[_Layout, list[_Panels]] = {}  # once, if all segments are of one kind
    first = 0
    for segment, documents in chosen:
        last = first + (len(segment.lengths) if documents is None else len(documents))
        layout = _Layout.of(segment, aligned)
        if layout not in packed:
            packed[layout] = _packed(query_MD, counts, layout)
        for i, panels in enumerate(packed[layout]):
            _launch(panels, layout, segment, documents, out_QB[:, first:last], add=i > 0)
        first = last


def _packed(query_MD: torch.Tensor, counts: list[int], layout: _Layout) -> list[_Panels]:
    """Packs the first panel of tokens of all queries, then the next pieces of longer queries."""
    firsts = itertools.accumulate(counts, initial=0)
    pieces = [
        (row, first, count) for row, (first, count) in enumerate(zip(firsts, counts, strict=False))
    ]
    layers = []
    while pieces:
        now = [(row, first, min(count, layout.panel)) for row, first, count in pieces]
        layers.append(_Panels.of(query_MD, now, layout))
        rest = ((row, first + layout.panel, count - layout.panel) for row, first, count in pieces)
        pieces = [piece for piece in rest if piece[2] > 0]
    return layers


def best(
    query_MD: torch.Tensor, segment: Segment, documents: torch.Tensor | None, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the best token of each document for each query token.

    Returns:
        Similarities (B, M) float32 and tokens (B, M) int32, counted from the start of the document,
        the first of equals; -inf and -1 for a document without tokens.
    """
    assert level == "triton"
    num_tokens = len(query_MD)
    num_docs = len(segment.lengths) if documents is None else len(documents)
    layout = _Layout.of(segment, num_tokens)
    firsts = range(0, num_tokens, layout.panel)
    pieces = [(0, first, min(layout.panel, num_tokens - first)) for first in firsts]
    best_BM = torch.empty(num_docs, num_tokens, device=query_MD.device)
    index_BM = torch.empty(best_BM.shape, dtype=torch.int32, device=query_MD.device)
    _launch(_Panels.of(query_MD, pieces, layout), layout, segment, documents, best_BM, index_BM)
    return best_BM, index_BM


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
    """Runs the kernel for some panels and documents."""
    num_docs = len(segment.lengths) if documents is None else len(documents)
    if not num_docs:
        return
    parts, codec, device = segment.parts, segment.codec, out.device
    values, num_panels = _values(segment), len(panels.queries)
    codes = centroids = weights = values  # of other kinds than residuals, not read
    bits, normalised = int(layout.kind == _BINARY), False
    if isinstance(codec, Residual):
        learned = codec.codebook(values.device)
        # float16 halves what is gathered; their sum with the weights is rounded to it in any case.
        codes, centroids = parts["centroids"], learned.centroids_CD.half()
        weights, bits, normalised = learned.weights, codec.spec.bits, learned.normalised
    mean = max(-(-len(values) // len(segment.lengths)), 1)
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
        "PAIR": len(panels.numbers) == 2,
        "CHOSEN": documents is not None,
        "SHORT": segment.longest <= slot,
        "BEST": index is not None,
        "ADD": add,
        "QUERIES": triton.next_power_of_2(panels.most_queries),
        "BLOCK_M": panels.size,
        "SLOT": slot,
        "SLOTS": slots,
        "BLOCK_D": layout.block,
        "NUM_BLOCKS": layout.num_blocks,
    }

    def run(schedule: tuple[int, int], num_groups: int) -> None:
        num_warps, num_stages = schedule
        _kernel[(num_groups * num_panels,)](
            panels.numbers,
            panels.scales,
            panels.query_of_fours,
            panels.queries,
            values,
            parts.get("scales", values),
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
            panels.numbers.stride(0),
            out.stride(0),
            **constants,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    num_groups = -(-num_docs // group)
    enough = -(-programs // num_panels)  # groups that fill the device a few times
    if _INTERPRETED:
        run(SCHEDULES[panels.size][0], num_groups)
        return
    with torch.cuda.device(device):
        # What adds is never timed: it would add again.
        key = (device, values.dtype, *(constants | {"ADD": False}).values())
        if key not in _fastest and num_groups >= enough and not add:
            _fastest[key] = _quickest(SCHEDULES[panels.size], lambda tried: run(tried, enough))
        run(_fastest.get(key, SCHEDULES[panels.size][0]), num_groups)


#: The schedule that was the fastest for a device, a type and constants of the kernel.
_fastest: dict[tuple[Any, ...], tuple[int, int]] = {}


def _quickest(
    schedules: Sequence[tuple[int, int]], run: Callable[[tuple[int, int]], None]
) -> tuple[int, int]:
    """Times each schedule on some of the documents, for their scores are written again later."""
    seconds = {}
    for schedule in schedules:
        try:
            run(schedule)  # compiles it
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

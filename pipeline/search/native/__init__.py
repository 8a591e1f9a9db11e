"""MaxSim on CPUs with a C++ library that uses the widest instruction set of the machine.

The library is built with the package if a compiler is available. Without it, `available()` is empty
and torch computes the scores. The library (`maxsim.cpp`) scores a list of documents in the calling
thread. This module packs the queries and distributes the documents over threads.

- Blocks of 32 document tokens from one or several documents are multiplied by panels of 32 query
  tokens. The maxima stay in registers and the L1 cache. Documents are not padded, and similarities
  are never written to main memory.
- int8 vectors are multiplied as int8 (AMX tiles or VNNI), or as int16 with AVX2, with a scale per
  token for queries and documents.
- With AMX, float16 and residual vectors are multiplied as pairs of bfloat16, x = high + low, in
  three products. A float16 value is exactly such a pair. A float32 query value loses 2^-18 of its
  magnitude, a hundredth of the error of rounding documents to float16. bfloat16 vectors are
  multiplied by three parts of the query value, whose sum is exactly the float32 value.
- Vectors of the codec bits are expanded to integers of one byte, 32 rows at a time, and multiplied
  like int8 vectors. The product of the projections is added to each similarity.
- Without AMX they are decoded to float32, 32 rows at a time. float32 documents are multiplied in
  float32 on all machines to preserve their precision.
- Queries of one token, such as the single vector of a hybrid search, are not packed into panels, of
  which they would use a 32nd. int8 vectors are multiplied by int16 values of the query.
- Centroid codes index a table of the similarities of all centroids and query tokens. The table has
  one row per centroid, so that the maxima of an item are taken over whole rows without gathering.
  Its values are int16 with a scale per query token, which loses 2^-16 of the largest similarity.
  For 100,000 items of 32 codes and 16,384 centroids, int16 takes 2.5 ms on one core and float32
  5.4 ms. Product codes index a table for each sub-vector, whose rows are added.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.compression.codecs import Codec
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.centroid_codes import CentroidCodes
from pipeline.compression.codecs.product_codes import MAX_CENTROIDS, ProductCodes, split
from pipeline.search.native.documents import (
    BITS,
    CODES,
    DENSE_KINDS,
    FLOAT_KINDS,
    INT8,
    PRODUCT,
    Documents,
    kind_of,
)
from pipeline.search.packed import PackedVectors, Segment

#: Instruction sets that the library supports, widest last.
LEVELS = ("generic", "avx2", "avx512", "amx")
#: Bytes of packed queries per call: they are reread for every 32 document tokens and should stay in
#: the L2 cache.
QUERY_BYTES = 1 << 19
#: Bytes of packed queries after which the pending tasks run, which bounds the memory of tables.
MAX_PACKED_BYTES = 1 << 26
#: Minimum number of (document token, query token) pairs per task.
TASK_PAIRS = 1 << 18
#: Tasks per thread: with several, a preempted thread delays the others only briefly.
TASKS = 8

#: Largest value of a table of similarities, and the smallest scale that is divided by.
MAX_INT16, TINY = torch.iinfo(torch.int16).max, torch.finfo(torch.float32).tiny

_pointer = ctypes.c_void_p


class _QueriesArgument(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("packed", "scales", "offsets", "bounds")),
        *((name, ctypes.c_int64) for name in ("count", "tokens", "padded", "one_token")),
    ]


class _Output(ctypes.Structure):
    _fields_ = [
        ("scores", _pointer),
        ("stride", ctypes.c_int64),
        ("best", _pointer),
        ("index", _pointer),
    ]

    def after(self, num_documents: int, num_tokens: int) -> _Output:
        scores = self.scores and self.scores + 4 * num_documents
        pointers = (p and p + 4 * num_documents * num_tokens for p in (self.best, self.index))
        return _Output(scores, self.stride, *pointers)


@functools.cache
def _library() -> ctypes.CDLL | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_maxsim{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # built for another machine
                return None
            library.maxray_score.argtypes = [
                _pointer,
                ctypes.c_int64,
                ctypes.POINTER(_QueriesArgument),
                ctypes.POINTER(_Output),
                ctypes.c_int,
            ]
            library.maxray_level()  # requests AMX tiles from the kernel for all threads
            return library
    return None


@functools.cache
def available() -> tuple[str, ...]:
    """Returns the supported levels, widest last. There are none without the library."""
    library = _library()
    return LEVELS[: library.maxray_level() + 1] if library else ()


@functools.cache
def _threads(num_threads: int, pid: int) -> ThreadPoolExecutor:
    """Returns the executor of a process: threads of the parent do not survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="maxsim")


def _level(kind: int, level: str) -> int:
    """Returns the widest level up to `level` that supports a kind of vectors, as a number."""
    number = LEVELS.index(level)
    return min(number, LEVELS.index("avx512")) if kind == FLOAT_KINDS[torch.float32] else number


def can_score(segment: Segment) -> bool:
    """Checks whether the library supports the codec, device and memory layout of a segment."""
    return (
        kind_of(segment) is not None
        and segment.lengths.is_cpu
        and all(part.is_contiguous() for part in segment.parts.values())
    )


def score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    packed: PackedVectors,
    rows: torch.Tensor | None,
    out_QR: torch.Tensor,
    level: str,
) -> None:
    """Writes the MaxSim scores of Q queries. Documents without tokens have the score -inf.

    Queries of one token are scored by a function of their own, also in a batch with others, so that
    scores do not depend on the batch.
    """
    documents = Documents.select(packed, rows)
    has_one_token = query_lengths == 1
    if documents.kind not in DENSE_KINDS or not has_one_token.any():
        _score(query_MD, query_lengths, documents, out_QR, level, one_token=False)
        return
    if has_one_token.all():
        _score(query_MD, query_lengths, documents, out_QR, level, one_token=True)
        return
    query_of_M = torch.repeat_interleave(query_lengths)
    for subset, one_token in ((has_one_token, True), (~has_one_token, False)):
        part_qR = torch.empty(int(subset.sum()), out_QR.shape[1])
        tokens_mD = query_MD[subset[query_of_M]]
        _score(tokens_mD, query_lengths[subset], documents, part_qR, level, one_token=one_token)
        out_QR[subset] = part_qR


def _score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    documents: Documents,
    out_QR: torch.Tensor,
    level: str,
    *,
    one_token: bool,
) -> None:
    """Writes the scores of queries that all have one token, or that are packed into panels."""
    number = _level(documents.kind, level)
    tasks: list[Callable[[], None]] = []
    num_packed_bytes = 0
    max_tokens = _max_tokens(documents.kind, number, query_MD.shape[1])
    for first, bounds in _groups(query_lengths, max_tokens):
        tokens_MD = query_MD[bounds[0] : bounds[-1]]
        if one_token:
            queries = _Queries.rows(tokens_MD, documents.kind)
        else:
            queries = _Queries.pack(
                tokens_MD, documents.codec, documents.kind, number, bounds - bounds[0]
            )
        address = out_QR.data_ptr() + 4 * first * out_QR.stride(0)
        output = _Output(address, out_QR.stride(0), None, None)
        tasks += _tasks(documents, queries, output, number)
        num_packed_bytes += queries.packed.nbytes
        if num_packed_bytes >= MAX_PACKED_BYTES:
            _run(tasks)
            tasks, num_packed_bytes = [], 0
    _run(tasks)


def best(
    query_MD: torch.Tensor, packed: PackedVectors, rows: torch.Tensor, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the document token that matches each query token best, for every document.

    Returns:
        Similarities (R, M) float32 and indices (R, M) int32 of the best tokens in their document.
        Ties resolve to the first token. Documents without tokens have -inf and -1.
    """
    documents = Documents.select(packed, rows)
    number = _level(documents.kind, level)
    bounds = np.array([0, len(query_MD)])
    queries = _Queries.pack(query_MD, documents.codec, documents.kind, number, bounds)
    best_RM = torch.empty(len(documents), len(query_MD))
    index_RM = torch.empty(best_RM.shape, dtype=torch.int32)
    output = _Output(None, 0, best_RM.data_ptr(), index_RM.data_ptr())
    _run(list(_tasks(documents, queries, output, number)))
    return best_RM, index_RM


def _groups(query_lengths: torch.Tensor, max_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields runs of whole queries as the first query and the token offsets of the queries."""
    bounds = np.concatenate([[0], query_lengths.numpy()]).cumsum()
    first = 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max_tokens, side="right")) - 1
        last = max(last, first + 1)
        yield first, bounds[first : last + 1]
        first = last


@dataclass(frozen=True)
class _Queries:
    """Query tokens in the layout that a level of the library reads.

    Attributes:
        packed: Panels of 32 tokens; the table of similarities (C, tokens with padding) int16 for
            centroid codes, and (256 P, tokens with padding) for product codes; or rows (Q, D) for
            queries of one token.
        bounds: (Q + 1,) int64, first token of each query.
        one_token: Whether each query has one token, and `packed` contains rows.
        offsets: Projections of the tokens divided by their scales, for bits, else None.
    """

    packed: torch.Tensor
    scales: torch.Tensor | None
    bounds: np.ndarray
    num_tokens: int
    one_token: bool = False
    offsets: torch.Tensor | None = None

    def argument(self) -> _QueriesArgument:
        return _QueriesArgument(
            packed=self.packed.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            offsets=None if self.offsets is None else self.offsets.data_ptr(),
            bounds=self.bounds.ctypes.data,
            count=len(self.bounds) - 1,
            tokens=self.num_tokens,
            padded=-(-self.num_tokens // 32) * 32,
            one_token=self.one_token,
        )

    @classmethod
    def rows(cls, query_QD: torch.Tensor, kind: int) -> _Queries:
        num_queries, dim = query_QD.shape
        bounds = np.arange(num_queries + 1)
        if kind != INT8:
            return cls(query_QD.contiguous(), None, bounds, num_queries, one_token=True)
        # The sum of the products with int8 values must not exceed 31 bits.
        largest = min(MAX_INT16, torch.iinfo(torch.int32).max // (128 * dim))
        scales = (query_QD.abs().amax(dim=1) / largest).clamp_min(TINY)
        values = (query_QD / scales.unsqueeze(1)).round_().to(torch.int16)
        return cls(values, scales, bounds, num_queries, one_token=True)

    @classmethod
    def pack(
        cls, query_MD: torch.Tensor, codec: Codec, kind: int, level: int, bounds: np.ndarray
    ) -> _Queries:
        """Packs tokens (M, D), padded with zeros."""
        if isinstance(codec, CentroidCodes):
            return cls.tabulate(codec.centroids(query_MD.device) @ query_MD.T, bounds)
        if isinstance(codec, ProductCodes):
            return cls.tabulate_parts(query_MD, codec, bounds)
        if isinstance(codec, Bits):
            return cls.pack_bits(query_MD, codec, level, bounds)
        num_tokens, dim = query_MD.shape
        num_panels, width = -(-num_tokens // 32), -(-dim // 64) * 64
        padded = torch.zeros(num_panels * 32, width)
        padded[:num_tokens, :dim] = query_MD
        halves = padded.view(num_panels, 2, 16, width)
        if kind == INT8 and level >= LEVELS.index("avx2"):
            scales = padded.abs().amax(dim=1).div_(127)
            scales[scales == 0] = 1
            values = (padded / scales[:, None]).round_().to(torch.int8)
            return cls(_integer_panels(values, level), scales, bounds, num_tokens)
        if level == LEVELS.index("amx"):
            # Decoded rows interleave two registers of 16 values, see `split` in body.h.
            is_exact = kind == FLOAT_KINDS[torch.bfloat16]
            if not is_exact:
                halves = halves.view(num_panels, 2, 16, width // 32, 2, 16).transpose(4, 5)
            parts = []
            for _ in range(3 if is_exact else 2):
                parts.append(halves.bfloat16())
                halves = halves - parts[-1].float()
            pairs = torch.stack(parts).reshape(len(parts), num_panels, 2, 16, width // 2, 2)
            return cls(pairs.transpose(3, 4).contiguous(), None, bounds, num_tokens)
        panels = padded.view(num_panels, 32, width).transpose(1, 2).contiguous()
        return cls(panels, None, bounds, num_tokens)

    @classmethod
    def pack_bits(
        cls, query_MD: torch.Tensor, codec: Bits, level: int, bounds: np.ndarray
    ) -> _Queries:
        """Packs the integers of rotated tokens in the order of `expand` in body.h."""
        num_tokens, dim = query_MD.shape
        query = codec.split_queries(query_MD)
        num_padded, width = -(-num_tokens // 32) * 32, -(-dim // 64) * 64
        per_byte = 8 // codec.spec.bits
        num_bytes = -(-dim // per_byte)
        values_MD = torch.nn.functional.pad(query.values_QD, (0, num_bytes * per_byte - dim))
        planes_MD = values_MD.view(num_tokens, num_bytes, per_byte).transpose(1, 2).flatten(1)
        values = torch.zeros(num_padded, width, dtype=torch.int8)
        values[:num_tokens, : num_bytes * per_byte] = planes_MD
        scales, offsets = torch.zeros(2, num_padded)
        scales[:num_tokens] = query.scales_Q
        offsets[:num_tokens] = query.projections_Q / query.scales_Q
        if level >= LEVELS.index("avx2"):
            panels = _integer_panels(values, level)
        else:
            panels = values.float().view(-1, 32, width).transpose(1, 2).contiguous()
        return cls(panels, scales, bounds, num_tokens, offsets=offsets)

    @classmethod
    def tabulate(
        cls, sim_CM: torch.Tensor, bounds: np.ndarray, largest_M: torch.Tensor | None = None
    ) -> _Queries:
        """Quantises the similarities (C, M), which are overwritten, padded with zeros.

        `largest_M` defaults to the largest similarity per token.
        """
        num_tokens = sim_CM.shape[1]
        num_padded = -(-num_tokens // 32) * 32
        largest_M = sim_CM.abs().amax(dim=0) if largest_M is None else largest_M
        scales = torch.zeros(num_padded)
        scales[:num_tokens] = largest_M / MAX_INT16
        table = torch.zeros(len(sim_CM), num_padded, dtype=torch.int16)
        table[:, :num_tokens] = sim_CM.div_(scales[:num_tokens].clamp_min(TINY)).round_()
        return cls(table, scales, bounds, num_tokens)

    @classmethod
    def tabulate_parts(
        cls, query_MD: torch.Tensor, codec: ProductCodes, bounds: np.ndarray
    ) -> _Queries:
        """Quantises the similarities of sub-vector centroids. Sums of parts stay below 15 bits."""
        centroids_PCS = codec.centroids(query_MD.device)
        num_parts, num_centroids, _ = centroids_PCS.shape
        sim_PCM = centroids_PCS @ split(query_MD, centroids_PCS).permute(1, 2, 0)
        # Each term may be rounded up by half of the scale.
        limit = MAX_INT16 - num_parts
        largest_M = sim_PCM.abs().amax(dim=1).sum(dim=0) * (MAX_INT16 / limit)
        rows_PCM = torch.zeros(num_parts, MAX_CENTROIDS, len(query_MD))
        rows_PCM[:, :num_centroids] = sim_PCM
        return cls.tabulate(rows_PCM.flatten(0, 1), bounds, largest_M)


def _integer_panels(values_MD: torch.Tensor, level: int) -> torch.Tensor:
    """Returns panels of int8 tokens, whose number is a multiple of 32."""
    num_tokens, width = values_MD.shape
    if level >= LEVELS.index("avx512"):
        # Groups of four dimensions are interleaved over 16 tokens.
        return values_MD.view(num_tokens // 32, 2, 16, width // 4, 4).transpose(2, 3).contiguous()
    # Pairs of dimensions are interleaved over 32 tokens.
    return values_MD.short().view(num_tokens // 32, 32, width // 2, 2).transpose(1, 2).contiguous()


def _max_tokens(kind: int, level: int, dim: int) -> int:
    """Returns the maximum number of query tokens per call, unless a single query has more."""
    if kind in (CODES, PRODUCT):
        return 1  # One query per call: the rows of its table are short and fit in the cache best.
    bytes_per_value = 4
    if kind in (INT8, BITS) and level >= LEVELS.index("avx2"):
        bytes_per_value = 1 if level >= LEVELS.index("avx512") else 2
    return max(QUERY_BYTES // (bytes_per_value * dim), 1)


def _tasks(
    documents: Documents, queries: _Queries, output: _Output, level: int
) -> Iterator[Callable[[], None]]:
    """Yields calls of the library, one per run of documents."""
    library, num_threads = _library(), torch.get_num_threads()
    if library is None:
        raise RuntimeError("the MaxSim library is not built")
    min_tokens = max(TASK_PAIRS // max(queries.num_tokens, 32), 1)
    for begin, end in documents.runs(num_threads * TASKS if num_threads > 1 else 1, min_tokens):

        def task(begin: int = begin, end: int = end) -> None:
            groups = documents.groups(begin, end)
            run_output = output.after(begin, queries.num_tokens)
            address = groups.ctypes.data
            argument = queries.argument()
            if library.maxray_score(address, len(groups), argument, run_output, level):
                raise MemoryError("failed to allocate working memory for MaxSim")

        yield task


def _run(tasks: Sequence[Callable[[], None]]) -> None:
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(tasks) == 1:
        for task in tasks:
            task()
    else:
        list(_threads(num_threads, os.getpid()).map(lambda task: task(), tasks))

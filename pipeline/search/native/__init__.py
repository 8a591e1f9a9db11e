"""MaxSim on CPUs with a C++ library that uses the widest instruction set of the machine.

The library is built with the package if a compiler is available. Without it, `available()` is empty
and torch computes the scores. The library (`maxsim.cpp`) scores a list of documents in the calling
thread. This module packs the queries and distributes the documents over threads.

- Blocks of 32 document tokens from one or several documents are multiplied by panels of 32 query
  tokens. The maxima stay in registers and the L1 cache. Documents are not padded, and similarities
  are never written to main memory.
- int8 vectors are multiplied as int8 (AMX tiles or VNNI), with a scale per token for queries and
  documents.
- With AMX, float16, bfloat16, binary and residual vectors are multiplied as pairs of bfloat16,
  x = high + low, in three products. A float16 value is exactly such a pair. A float32 query value
  loses 2^-18 of its magnitude, a hundredth of the error of rounding documents to float16.
- Without AMX they are decoded to float32, 32 rows at a time. float32 documents are multiplied in
  float32 on all machines to preserve their precision.
- Centroid codes index a table of the similarities of all centroids and query tokens. The table has
  one row per centroid, so that the maxima of an item are taken over whole rows without gathering.
  Its values are int16 with a scale per query token, which loses 2^-16 of the largest similarity.
  For 100,000 items of 32 codes and 16,384 centroids, int16 takes 2.5 ms on one core and float32
  5.4 ms.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.codecs import Codec
from pipeline.codecs.centroid_codes import CentroidCodes
from pipeline.codecs.residual import Residual
from pipeline.search.packed import Segment

#: Instruction sets that the library supports, widest last.
LEVELS = ("generic", "avx2", "avx512", "amx")
#: Bytes of packed queries per call: they are reread for every 32 document tokens and should stay in
#: the L2 cache.
QUERY_BYTES = 1 << 19
#: Bytes of packed queries after which the pending tasks run, which bounds the memory of tables.
MAX_PACKED_BYTES = 1 << 26
#: Minimum number of (document token, query token) pairs per task.
TASK_PAIRS = 1 << 18
#: Tasks per thread and segment: with several, a preempted thread delays the others only briefly.
TASKS = 8

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT8, _BINARY, _RESIDUAL, _CODES, _UNSUPPORTED = 3, 4, 5, 6, -1
_FLOATS = ("float16", "float32")
_CODEC_KINDS = {
    "int8": _INT8,
    "binary": _BINARY,
    "residual": _RESIDUAL,
    "centroid_codes": _CODES,
}

#: Largest value of a table of similarities, and the smallest scale that is divided by.
MAX_INT16, TINY = torch.iinfo(torch.int16).max, torch.finfo(torch.float32).tiny

_pointer = ctypes.c_void_p


class _DocumentsArgument(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "dim")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "total")),
        *((name, _pointer) for name in ("values", "scales", "codes", "centroids", "weights")),
        *((name, ctypes.c_int32) for name in ("bits", "normalised")),
        *((name, _pointer) for name in ("starts", "lengths")),
        ("count", ctypes.c_int64),
    ]


class _QueriesArgument(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("packed", "scales", "bounds")),
        *((name, ctypes.c_int64) for name in ("count", "tokens", "padded")),
    ]


class _Output(ctypes.Structure):
    _fields_ = [
        ("scores", _pointer),
        ("stride", ctypes.c_int64),
        ("best", _pointer),
        ("index", _pointer),
    ]

    def after(self, num_documents: int, num_tokens: int) -> _Output:
        """Returns the part of the output that follows the first `num_documents` documents."""
        scores = self.scores and self.scores + 4 * num_documents
        pointers = (p and p + 4 * num_documents * num_tokens for p in (self.best, self.index))
        return _Output(scores, self.stride, *pointers)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Loads the library.

    Returns None if it was not built.
    """
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_maxsim{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # built for another machine
                return None
            library.maxray_score.argtypes = [
                ctypes.POINTER(_DocumentsArgument),
                ctypes.POINTER(_QueriesArgument),
                ctypes.POINTER(_Output),
                ctypes.c_int,
            ]
            library.maxray_level()  # requests AMX tiles from the kernel for all threads
            return library
    return None


def _built_library() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        RuntimeError: The library was not built.
    """
    library = _library()
    if library is None:
        raise RuntimeError("the MaxSim library is not built")
    return library


@functools.cache
def available() -> tuple[str, ...]:
    """Returns the supported levels, widest last. There are none without the library."""
    library = _library()
    return LEVELS[: library.maxray_level() + 1] if library else ()


@functools.cache
def _threads(num_threads: int, pid: int) -> ThreadPoolExecutor:
    """Returns the executor of a process.

    Threads of the parent do not survive a fork.
    """
    return ThreadPoolExecutor(num_threads, thread_name_prefix="maxsim")


def _kind(segment: Segment) -> int:
    """Returns the number that the library uses for the codec of a segment, or `_UNSUPPORTED`."""
    name = segment.codec.spec.name
    if name in _FLOATS:
        return _KINDS.get(segment.parts["values"].dtype, _UNSUPPORTED)
    return _CODEC_KINDS.get(name, _UNSUPPORTED)


def _level(kind: int, level: str) -> int:
    """Returns the widest level up to `level` that supports a kind of vectors, as a number."""
    number = LEVELS.index(level)
    return min(number, LEVELS.index("avx512")) if kind == _KINDS[torch.float32] else number


def can_score(segment: Segment) -> bool:
    """Checks whether the library supports the codec, device and memory layout of a segment."""
    return (
        _kind(segment) != _UNSUPPORTED
        and segment.lengths.is_cpu
        and all(part.is_contiguous() for part in segment.parts.values())
    )


def score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    selection: Sequence[tuple[Segment, torch.Tensor | None]],
    out_QB: torch.Tensor,
    level: str,
) -> None:
    """Writes the MaxSim scores of Q queries. Documents without tokens have the score -inf.

    Args:
        query_MD: float32, concatenated tokens of all queries.
        query_lengths: (Q,) int64, number of tokens per query.
        selection: Segments of one codec with the ascending indices of the documents to score, or
            None for all documents.
        out_QB: float32 output, contiguous along B, which ranges over the documents of all segments.
        level: One of `available()`.
    """
    codec, kind = selection[0][0].codec, _kind(selection[0][0])
    number = _level(kind, level)
    batches = [_Documents.select(segment, kind, documents) for segment, documents in selection]
    tasks: list[Callable[[], None]] = []
    num_packed_bytes = 0
    for queries, bounds in _groups(query_lengths, _max_tokens(kind, number, query_MD.shape[1])):
        tokens_MD = query_MD[bounds[0] : bounds[-1]]
        packed = _Queries.pack(tokens_MD, codec, kind, number, bounds - bounds[0])
        address = out_QB.data_ptr() + 4 * queries * out_QB.stride(0)
        for documents in batches:
            output = _Output(address, out_QB.stride(0), None, None)
            tasks += _tasks(documents, packed, output, number)
            address += 4 * len(documents)
        num_packed_bytes += packed.panels.nbytes
        if num_packed_bytes >= MAX_PACKED_BYTES:
            _run(tasks)
            tasks, num_packed_bytes = [], 0
    _run(tasks)


def best(
    query_MD: torch.Tensor, segment: Segment, documents: torch.Tensor | None, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the document token that matches each query token best, for every document.

    Returns:
        Similarities (B, M) float32 and indices (B, M) int32 of the best tokens in their document.
        Ties resolve to the first token. Documents without tokens have -inf and -1.
    """
    kind = _kind(segment)
    number = _level(kind, level)
    selected = _Documents.select(segment, kind, documents)
    bounds = np.array([0, len(query_MD)])
    packed = _Queries.pack(query_MD, segment.codec, kind, number, bounds)
    best_BM = torch.empty(len(selected), len(query_MD))
    index_BM = torch.empty(best_BM.shape, dtype=torch.int32)
    output = _Output(None, 0, best_BM.data_ptr(), index_BM.data_ptr())
    _run(list(_tasks(selected, packed, output, number)))
    return best_BM, index_BM


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
class _Documents:
    """Documents to score, described by their segment, first vectors and lengths."""

    segment: Segment
    kind: int
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def select(cls, segment: Segment, kind: int, documents: torch.Tensor | None) -> _Documents:
        """Selects documents of a segment by their indices. None selects all documents."""
        starts, lengths = segment.starts, segment.lengths
        if documents is not None:
            starts, lengths = starts[documents], lengths[documents]
        return cls(segment, kind, starts, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def runs(self, max_runs: int, min_tokens: int) -> Iterator[tuple[int, int]]:
        """Yields runs (first, last + 1) of documents with similar numbers of tokens."""
        ends = self.lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        num_runs = max(min(max_runs, total // min_tokens), 1)
        targets = torch.arange(1, num_runs) * (total // num_runs)
        bounds = [0, *torch.searchsorted(ends, targets).tolist(), len(ends)]
        yield from ((a, b) for a, b in itertools.pairwise(bounds) if a < b)

    def argument(self, begin: int, end: int) -> _DocumentsArgument:
        """Returns the C struct of a run of documents."""
        parts, dim = self.segment.parts, self.segment.dim
        names = {_BINARY: "bits", _RESIDUAL: "residuals", _CODES: "codes"}
        values = parts[names.get(self.kind, "values")]
        argument = _DocumentsArgument(
            kind=self.kind,
            dim=dim,
            row_bytes=values.shape[1] * values.element_size(),
            total=len(values),
            values=values.data_ptr(),
            starts=self.starts[begin:].data_ptr(),
            lengths=self.lengths[begin:].data_ptr(),
            count=end - begin,
        )
        if self.kind == _INT8:
            argument.scales = parts["scales"].data_ptr()
        codec = self.segment.codec
        if isinstance(codec, Residual):
            codebook = codec.codebook(values.device)  # the codec owns its memory
            argument.codes = parts["centroids"].data_ptr()
            argument.centroids = codebook.centroids_CD.data_ptr()
            argument.weights = codebook.weights.data_ptr()
            argument.bits, argument.normalised = codec.spec.bits, codebook.normalised
        return argument


@dataclass(frozen=True)
class _Queries:
    """Query tokens that are packed into panels of 32 for a level of the library.

    For centroid codes, `panels` is the table of similarities (C, tokens with padding) int16.
    """

    panels: torch.Tensor
    scales: torch.Tensor | None
    bounds: np.ndarray
    num_tokens: int

    def argument(self) -> _QueriesArgument:
        """Returns the C struct of the queries."""
        return _QueriesArgument(
            packed=self.panels.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            bounds=self.bounds.ctypes.data,
            count=len(self.bounds) - 1,
            tokens=self.num_tokens,
            padded=-(-self.num_tokens // 32) * 32,
        )

    @classmethod
    def pack(
        cls, query_MD: torch.Tensor, codec: Codec, kind: int, level: int, bounds: np.ndarray
    ) -> _Queries:
        """Packs tokens (M, D), padded with zeros."""
        if isinstance(codec, CentroidCodes):
            return cls.tabulate(query_MD, codec, bounds)
        num_tokens, dim = query_MD.shape
        num_panels, width = -(-num_tokens // 32), -(-dim // 64) * 64
        padded = torch.zeros(num_panels * 32, width)
        padded[:num_tokens, :dim] = query_MD
        halves = padded.view(num_panels, 2, 16, width)
        if kind == _INT8 and level >= LEVELS.index("avx512"):
            scales = padded.abs().amax(dim=1).div_(127)
            scales[scales == 0] = 1
            values = (padded / scales[:, None]).round_().to(torch.int8)
            # Groups of four dimensions are interleaved over 16 tokens.
            panels = values.view(num_panels, 2, 16, width // 4, 4).transpose(2, 3).contiguous()
            return cls(panels, scales, bounds, num_tokens)
        if level == LEVELS.index("amx"):
            # Decoded rows interleave two registers of 16 values, see `split` in body.h.
            if kind not in (_BINARY, _KINDS[torch.bfloat16]):
                halves = halves.view(num_panels, 2, 16, width // 32, 2, 16).transpose(4, 5)
            high = halves.bfloat16()
            low = (halves - high.float()).bfloat16()
            pairs = torch.stack([high, low]).reshape(2, num_panels, 2, 16, width // 2, 2)
            return cls(pairs.transpose(3, 4).contiguous(), None, bounds, num_tokens)
        panels = padded.view(num_panels, 32, width).transpose(1, 2).contiguous()
        return cls(panels, None, bounds, num_tokens)

    @classmethod
    def tabulate(cls, query_MD: torch.Tensor, codec: CentroidCodes, bounds: np.ndarray) -> _Queries:
        """Computes the similarities of all centroids and tokens (M, D), padded with zeros."""
        num_tokens, num_padded = len(query_MD), -(-len(query_MD) // 32) * 32
        sim_CM = codec.centroids(query_MD.device) @ query_MD.T
        scales = torch.zeros(num_padded)
        scales[:num_tokens] = sim_CM.abs().amax(dim=0) / MAX_INT16
        table = torch.zeros(len(sim_CM), num_padded, dtype=torch.int16)
        table[:, :num_tokens] = sim_CM.div_(scales[:num_tokens].clamp_min(TINY)).round_()
        return cls(table, scales, bounds, num_tokens)


def _max_tokens(kind: int, level: int, dim: int) -> int:
    """Returns the maximum number of query tokens per call, unless a single query has more."""
    if kind == _CODES:
        return 1  # One query per call: the rows of its table are short and fit in the cache best.
    packed_bytes = dim if kind == _INT8 and level >= LEVELS.index("avx512") else 4 * dim
    return max(QUERY_BYTES // packed_bytes, 1)


def _tasks(
    documents: _Documents, queries: _Queries, output: _Output, level: int
) -> Iterator[Callable[[], None]]:
    """Yields calls of the library, one per run of documents."""
    library, num_threads = _built_library(), torch.get_num_threads()
    min_tokens = max(TASK_PAIRS // max(queries.num_tokens, 32), 1)
    for begin, end in documents.runs(num_threads * TASKS if num_threads > 1 else 1, min_tokens):

        def task(begin: int = begin, end: int = end) -> None:
            documents.segment.verify(documents.starts[begin:end], documents.lengths[begin:end])
            run_output = output.after(begin, queries.num_tokens)
            argument = documents.argument(begin, end)
            if library.maxray_score(argument, queries.argument(), run_output, level):
                raise MemoryError("failed to allocate working memory for MaxSim")

        yield task


def _run(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs tasks in as many threads as torch uses."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(tasks) == 1:
        for task in tasks:
            task()
    else:
        list(_threads(num_threads, os.getpid()).map(lambda task: task(), tasks))

"""MaxSim on CPUs by a small C++ library, with the widest instructions that the machine has.

It is built where the package is installed, if there is a compiler; without it `available()` is
empty, and torch does the work. The library scores a list of documents in the thread that calls it
(`maxsim.cpp`); here queries are brought into the form it reads, and documents are dealt out to
threads. What it does, and why it is fast:

- Blocks of 32 document tokens, of one or of several documents, are multiplied with panels of 32
  query tokens; the maxima are kept in registers and in the nearest cache. Nothing is padded, and
  no similarity is ever written to memory.
- int8 is multiplied as int8 (AMX tiles, or VNNI), with a scale a token on both sides.
- With AMX, float16, bfloat16, bits and residuals are multiplied as pairs of bfloat16, x = high +
  low, in three products. A float16 is such a pair without any loss; of the query's float32, 2^-18
  of a number is lost, a hundredth of what rounding a document to float16 costs.
- Elsewhere they are decoded to float32, 32 rows at a time. float32 documents, which somebody keeps
  for their precision, are multiplied in float32 everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.search.packed import Segment

#: What the library can be told to use, the widest last.
LEVELS = ("generic", "avx2", "avx512", "amx")
#: Bytes of packed queries that are scored in one go: they are read again for each 32 tokens, and
#: stay in the second-level cache.
QUERY_BYTES = 1 << 19
#: Document tokens of a thread's task, at least.
TASK_TOKENS = 1 << 13
#: Tasks a thread, so that one that is interrupted does not keep the others waiting for long.
TASKS = 8

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT8, _BINARY, _RESIDUAL = 3, 4, 5
_OF_CODEC = {"int8": _INT8, "binary": _BINARY, "residual": _RESIDUAL}

_pointer = ctypes.c_void_p


class _Documents(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "dim")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "total")),
        *((name, _pointer) for name in ("values", "scales", "codes", "centroids", "weights")),
        *((name, ctypes.c_int32) for name in ("bits", "normalised")),
        *((name, _pointer) for name in ("starts", "lengths")),
        ("count", ctypes.c_int64),
    ]


class _Queries(ctypes.Structure):
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


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library, or None where it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_maxsim{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # built for another machine
                return None
            library.maxray_score.argtypes = [
                ctypes.POINTER(_Documents),
                ctypes.POINTER(_Queries),
                ctypes.POINTER(_Output),
                ctypes.c_int,
            ]
            library.maxray_level()  # asks the kernel for the tiles, once for all threads
            return library
    return None


@functools.cache
def available() -> tuple[str, ...]:
    """What this machine can use, the widest last; nothing where the library was not built."""
    library = _library()
    return LEVELS[: library.maxray_level() + 1] if library else ()


@functools.cache
def _pool(num_threads: int, pid: int) -> ThreadPoolExecutor:
    """Threads that stay; a process that was forked has none of its parent's."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="maxsim")


def _kind(segment: Segment) -> int | None:
    values = segment.parts.get("values")
    if values is not None and values.dtype in _KINDS:
        return _KINDS[values.dtype]
    return _OF_CODEC.get(segment.codec.spec.name)


def _level(kind: int, level: str) -> int:
    """The number of a level, or of the widest below it that can multiply this kind."""
    number = LEVELS.index(level)
    return min(number, LEVELS.index("avx512")) if kind == _KINDS[torch.float32] else number


def can_score(segment: Segment) -> bool:
    """Whether the library knows this codec, and the vectors lie where it can read them."""
    return (
        _kind(segment) is not None
        and segment.lengths.is_cpu
        and all(part.is_contiguous() for part in segment.parts.values())
    )


def score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    segment: Segment,
    documents: torch.Tensor | None,
    out_QB: torch.Tensor,
    level: str,
) -> None:
    """Writes the sums of maxima of Q queries for the documents, -inf for those without tokens.

    Args:
        query_MD: float32, the tokens of all queries.
        query_lengths: (Q,) int64.
        documents: ascending (B,) int64; None: all.
        out_QB: float32, dense along B.
        level: of `available()`.
    """
    kind = _kind(segment)
    level_number = _level(kind, level)
    places = _Places.of(segment, documents)
    bounds_Q = np.concatenate([[0], query_lengths.numpy()]).cumsum()
    num_queries = len(bounds_Q) - 1
    first = 0
    while first < num_queries:
        packed_bytes = _packed_bytes(kind, level_number, segment.dim)
        limit = bounds_Q[first] + max(QUERY_BYTES // packed_bytes, 1)
        last = max(int(np.searchsorted(bounds_Q, limit, side="right")) - 1, first + 1)
        own_MD = query_MD[bounds_Q[first] : bounds_Q[last]]
        bounds = np.ascontiguousarray(bounds_Q[first : last + 1] - bounds_Q[first])
        packed = _Packed.of(own_MD, kind, level_number, bounds)

        def task(begin: int, end: int, packed: _Packed = packed, first: int = first) -> None:
            place = first * out_QB.stride(0) + begin
            output = _Output(out_QB.data_ptr() + 4 * place, out_QB.stride(0), None, None)
            _call(_documents(segment, kind, places, begin, end), packed, output, level_number)

        _in_threads(task, segment, places)
        first = last


def best(
    query_MD: torch.Tensor, segment: Segment, documents: torch.Tensor | None, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each document and query token the best similarity and the token it is with.

    Returns:
        (B, M) float32 and (B, M) int32, counted in the document, the first of equals; -inf and -1
        for a document without tokens.
    """
    kind = _kind(segment)
    level_number = _level(kind, level)
    places = _Places.of(segment, documents)
    packed = _Packed.of(query_MD, kind, level_number, np.array([0, len(query_MD)]))
    best_BM = torch.empty(len(places.lengths), len(query_MD))
    index_BM = torch.empty(best_BM.shape, dtype=torch.int32)

    def task(begin: int, end: int) -> None:
        rows = best_BM[begin:], index_BM[begin:]
        output = _Output(None, 0, *(row.data_ptr() for row in rows))
        _call(_documents(segment, kind, places, begin, end), packed, output, level_number)

    _in_threads(task, segment, places)
    return best_BM, index_BM


@dataclass(frozen=True)
class _Places:
    """Where the documents lie that are to be scored."""

    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, segment: Segment, documents: torch.Tensor | None) -> _Places:
        if documents is None:
            return cls(segment.starts, segment.lengths)
        return cls(segment.starts[documents], segment.lengths[documents])

    def tasks(self, num_tasks: int) -> Iterator[tuple[int, int]]:
        """Runs of documents of about as many tokens each: (first, last + 1)."""
        ends = self.lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        num_tasks = max(min(num_tasks, total // TASK_TOKENS), 1)
        wanted = torch.arange(1, num_tasks) * (total // num_tasks)
        bounds = [0, *torch.searchsorted(ends, wanted).tolist(), len(ends)]
        yield from ((a, b) for a, b in itertools.pairwise(bounds) if a < b)


@dataclass(frozen=True)
class _Packed:
    """Query tokens in panels of 32, as a level of the library reads them."""

    panels: torch.Tensor
    scales: torch.Tensor | None
    bounds: np.ndarray
    num_tokens: int

    @property
    def padded(self) -> int:
        return -(-self.num_tokens // 32) * 32

    @classmethod
    def of(cls, query_MD: torch.Tensor, kind: int, level: int, bounds: np.ndarray) -> _Packed:
        """Packs tokens (M, D); padding tokens and numbers are 0."""
        num_tokens, dim = query_MD.shape
        num_panels, width = -(-num_tokens // 32), -(-dim // 64) * 64
        padded = torch.zeros(num_panels * 32, width)
        padded[:num_tokens, :dim] = query_MD
        halves = padded.view(num_panels, 2, 16, width)
        if kind == _INT8 and level >= LEVELS.index("avx512"):
            scales = padded.abs().amax(dim=1).div_(127)
            scales[scales == 0] = 1
            numbers = (padded / scales[:, None]).round_().to(torch.int8)
            # Of 16 tokens, four numbers each lie side by side.
            panels = numbers.view(num_panels, 2, 16, width // 4, 4).transpose(2, 3).contiguous()
            return cls(panels, scales, bounds, num_tokens)
        if level == LEVELS.index("amx"):
            high = halves.bfloat16()
            low = (halves - high.float()).bfloat16()
            pairs = torch.stack([high, low]).view(2, num_panels, 2, 16, width // 2, 2)
            return cls(pairs.transpose(3, 4).contiguous(), None, bounds, num_tokens)
        panels = padded.view(num_panels, 32, width).transpose(1, 2).contiguous()
        return cls(_aligned(panels), None, bounds, num_tokens)


def _packed_bytes(kind: int, level: int, dim: int) -> int:
    """Bytes of a packed query token."""
    return dim if kind == _INT8 and level >= LEVELS.index("avx512") else 4 * dim


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.data_ptr() % 64 == 0, "torch's memory begins at multiples of 64 bytes"
    return tensor


def _documents(segment: Segment, kind: int, places: _Places, begin: int, end: int) -> _Documents:
    """Some of the documents as the library reads them."""
    parts = segment.parts
    values = parts[{_BINARY: "bits", _RESIDUAL: "residuals"}.get(kind, "values")]
    documents = _Documents(
        kind=kind,
        dim=segment.dim,
        row_bytes=values.shape[1] * values.element_size(),
        total=len(values),
        values=values.data_ptr(),
        starts=places.starts[begin:].data_ptr(),
        lengths=places.lengths[begin:].data_ptr(),
        count=end - begin,
    )
    if kind == _INT8:
        documents.scales = parts["scales"].data_ptr()
    if kind == _RESIDUAL:
        learned = segment.codec.codebook(values.device)  # lives as long as the codec
        documents.codes = parts["centroids"].data_ptr()
        documents.centroids = learned.centroids_CD.data_ptr()
        documents.weights = learned.weights.data_ptr()
        documents.bits, documents.normalised = segment.codec.spec.bits, learned.normalised
    return documents


def _call(documents: _Documents, packed: _Packed, output: _Output, level: int) -> None:
    queries = _Queries(
        packed.panels.data_ptr(),
        packed.scales.data_ptr() if packed.scales is not None else None,
        packed.bounds.ctypes.data,
        len(packed.bounds) - 1,
        packed.num_tokens,
        packed.padded,
    )
    if _library().maxray_score(documents, queries, output, level):
        raise MemoryError("no memory to score in")


def _in_threads(task: Callable[[int, int], None], segment: Segment, places: _Places) -> None:
    """Runs a task for runs of documents, in as many threads as torch has."""
    num_threads = torch.get_num_threads()
    tasks = list(places.tasks(num_threads * TASKS if num_threads > 1 else 1))

    def run(begin: int, end: int) -> None:
        first, last = places.starts[begin], places.starts[end - 1] + places.lengths[end - 1]
        segment.touch(int(first), int(last))
        task(begin, end)

    if len(tasks) == 1:
        run(*tasks[0])
    else:
        list(_pool(num_threads, os.getpid()).map(run, *zip(*tasks, strict=True)))

"""MaxSim on CPUs with a small C++ library that uses the widest instructions of the machine.

The library is built with the package if there is a compiler; without it `available()` is empty and
torch computes the scores. It scores a list of documents in the calling thread (`maxsim.cpp`); this
module packs the queries and distributes the documents over threads. Why it is fast:

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.codecs.residual import Residual
from pipeline.search.packed import Segment

#: Instruction sets that the library can use, the widest last.
LEVELS = ("generic", "avx2", "avx512", "amx")
#: Bytes of packed queries that are scored in one go: they are read again for each 32 tokens, and
#: stay in the second-level cache.
QUERY_BYTES = 1 << 19
#: Minimum number of pairs of a document token and a query token per task of a thread.
TASK_PAIRS = 1 << 18
#: Tasks per thread and segment: an interrupted one delays the others only for a short time.
TASKS = 8

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT8, _BINARY, _RESIDUAL, _UNSUPPORTED = 3, 4, 5, -1
_FLOATS = ("float16", "float32")
_OF_CODEC = {"int8": _INT8, "binary": _BINARY, "residual": _RESIDUAL}

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
        """Returns the output of the documents after the first `num_documents`."""
        scores = self.scores and self.scores + 4 * num_documents
        places = (p and p + 4 * num_documents * num_tokens for p in (self.best, self.index))
        return _Output(scores, self.stride, *places)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Loads the library; returns None if it was not built."""
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
            library.maxray_level()  # asks the kernel for the tiles, once for all threads
            return library
    return None


def _built_library() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        RuntimeError: It was not built; `available()` is empty then.
    """
    library = _library()
    if library is None:
        raise RuntimeError("the MaxSim library is not built")
    return library


@functools.cache
def available() -> tuple[str, ...]:
    """Returns the levels that this machine supports, the widest last; none without the library."""
    library = _library()
    return LEVELS[: library.maxray_level() + 1] if library else ()


@functools.cache
def _threads(num_threads: int, pid: int) -> ThreadPoolExecutor:
    """Returns an executor per process: a forked process has no threads of its parent."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="maxsim")


def _kind(segment: Segment) -> int:
    """Returns the library's number of a segment's codec, or `_UNSUPPORTED`."""
    name = segment.codec.spec.name
    if name in _FLOATS:
        return _KINDS.get(segment.parts["values"].dtype, _UNSUPPORTED)
    return _OF_CODEC.get(name, _UNSUPPORTED)


def _level(kind: int, level: str) -> int:
    """Returns the number of a level, or of the widest below it that supports this kind."""
    number = LEVELS.index(level)
    return min(number, LEVELS.index("avx512")) if kind == _KINDS[torch.float32] else number


def can_score(segment: Segment) -> bool:
    """Returns whether the library supports a segment's codec, device and memory layout."""
    return (
        _kind(segment) != _UNSUPPORTED
        and segment.lengths.is_cpu
        and all(part.is_contiguous() for part in segment.parts.values())
    )


def score(
    query_MD: torch.Tensor,
    query_lengths: torch.Tensor,
    chosen: Sequence[tuple[Segment, torch.Tensor | None]],
    out_QB: torch.Tensor,
    level: str,
) -> None:
    """Writes the sums of maxima of Q queries for documents, -inf for those without tokens.

    Args:
        query_MD: float32, the tokens of all queries.
        query_lengths: (Q,) int64, number of tokens per query.
        chosen: Segments of one codec with their documents, ascending; None for all documents.
        out_QB: float32, contiguous along B, the documents of all segments.
        level: One of `available()`.
    """
    kind = _kind(chosen[0][0])
    number = _level(kind, level)
    batches = [_Documents.of(segment, kind, documents) for segment, documents in chosen]
    packed_bytes = _packed_bytes(kind, number, query_MD.shape[1])
    tasks: list[Callable[[], None]] = []
    for queries, bounds in _groups(query_lengths, max(QUERY_BYTES // packed_bytes, 1)):
        packed = _Queries.of(query_MD[bounds[0] : bounds[-1]], kind, number, bounds - bounds[0])
        place = out_QB.data_ptr() + 4 * queries * out_QB.stride(0)
        for documents in batches:
            output = _Output(place, out_QB.stride(0), None, None)
            tasks += _tasks(documents, packed, output, number)
            place += 4 * len(documents)
    _run(tasks)


def best(
    query_MD: torch.Tensor, segment: Segment, documents: torch.Tensor | None, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the best token of each document for each query token.

    Returns:
        Similarities (B, M) float32 and tokens (B, M) int32, counted from the start of the document,
        the first of equals; -inf and -1 for a document without tokens.
    """
    kind = _kind(segment)
    number = _level(kind, level)
    chosen = _Documents.of(segment, kind, documents)
    packed = _Queries.of(query_MD, kind, number, np.array([0, len(query_MD)]))
    best_BM = torch.empty(len(chosen), len(query_MD))
    index_BM = torch.empty(best_BM.shape, dtype=torch.int32)
    output = _Output(None, 0, best_BM.data_ptr(), index_BM.data_ptr())
    _run(list(_tasks(chosen, packed, output, number)))
    return best_BM, index_BM


def _groups(query_lengths: torch.Tensor, max_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields runs of whole queries: the first one, and the bounds of their tokens."""
    bounds = np.concatenate([[0], query_lengths.numpy()]).cumsum()
    first = 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max_tokens, side="right")) - 1
        last = max(last, first + 1)
        yield first, bounds[first : last + 1]
        first = last


@dataclass(frozen=True)
class _Documents:
    """Documents to be scored: their segment, first vectors and lengths."""

    segment: Segment
    kind: int
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, segment: Segment, kind: int, documents: torch.Tensor | None) -> _Documents:
        starts, lengths = segment.starts, segment.lengths
        if documents is not None:
            starts, lengths = starts[documents], lengths[documents]
        return cls(segment, kind, starts, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def runs(self, max_runs: int, least_tokens: int) -> Iterator[tuple[int, int]]:
        """Yields runs of documents with about equally many tokens: (first, last + 1)."""
        ends = self.lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        num_runs = max(min(max_runs, total // least_tokens), 1)
        wanted = torch.arange(1, num_runs) * (total // num_runs)
        bounds = [0, *torch.searchsorted(ends, wanted).tolist(), len(ends)]
        yield from ((a, b) for a, b in itertools.pairwise(bounds) if a < b)

    def argument(self, begin: int, end: int) -> _DocumentsArgument:
        """Returns a run in the form that the library reads."""
        parts, dim = self.segment.parts, self.segment.dim
        values = parts[{_BINARY: "bits", _RESIDUAL: "residuals"}.get(self.kind, "values")]
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
            learned = codec.codebook(values.device)  # lives as long as the codec
            argument.codes = parts["centroids"].data_ptr()
            argument.centroids = learned.centroids_CD.data_ptr()
            argument.weights = learned.weights.data_ptr()
            argument.bits, argument.normalised = codec.spec.bits, learned.normalised
        return argument


@dataclass(frozen=True)
class _Queries:
    """Query tokens in panels of 32, in the form that a level of the library reads."""

    panels: torch.Tensor
    scales: torch.Tensor | None
    bounds: np.ndarray
    num_tokens: int

    def argument(self) -> _QueriesArgument:
        """Returns the queries in the form that the library reads."""
        return _QueriesArgument(
            packed=self.panels.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            bounds=self.bounds.ctypes.data,
            count=len(self.bounds) - 1,
            tokens=self.num_tokens,
            padded=-(-self.num_tokens // 32) * 32,
        )

    @classmethod
    def of(cls, query_MD: torch.Tensor, kind: int, level: int, bounds: np.ndarray) -> _Queries:
        """Packs tokens (M, D); padding is 0."""
        num_tokens, dim = query_MD.shape
        num_panels, width = -(-num_tokens // 32), -(-dim // 64) * 64
        padded = torch.zeros(num_panels * 32, width)
        padded[:num_tokens, :dim] = query_MD
        halves = padded.view(num_panels, 2, 16, width)
        if kind == _INT8 and level >= LEVELS.index("avx512"):
            scales = padded.abs().amax(dim=1).div_(127)
            scales[scales == 0] = 1
            numbers = (padded / scales[:, None]).round_().to(torch.int8)
            # Four consecutive numbers of each of 16 tokens are adjacent.
            panels = numbers.view(num_panels, 2, 16, width // 4, 4).transpose(2, 3).contiguous()
            return cls(panels, scales, bounds, num_tokens)
        if level == LEVELS.index("amx"):
            if kind not in (_BINARY, _KINDS[torch.bfloat16]):  # two vectors of 16 are adjacent
                halves = halves.view(num_panels, 2, 16, width // 32, 2, 16).transpose(4, 5)
            high = halves.bfloat16()
            low = (halves - high.float()).bfloat16()
            pairs = torch.stack([high, low]).reshape(2, num_panels, 2, 16, width // 2, 2)
            return cls(pairs.transpose(3, 4).contiguous(), None, bounds, num_tokens)
        panels = padded.view(num_panels, 32, width).transpose(1, 2).contiguous()
        return cls(panels, None, bounds, num_tokens)


def _packed_bytes(kind: int, level: int, dim: int) -> int:
    """Returns the bytes of a packed query token."""
    return dim if kind == _INT8 and level >= LEVELS.index("avx512") else 4 * dim


def _tasks(
    documents: _Documents, queries: _Queries, output: _Output, level: int
) -> Iterator[Callable[[], None]]:
    """Yields calls of the library, one per run of documents."""
    library, num_threads = _built_library(), torch.get_num_threads()
    least = max(TASK_PAIRS // max(queries.num_tokens, 32), 1)
    for begin, end in documents.runs(num_threads * TASKS if num_threads > 1 else 1, least):

        def task(begin: int = begin, end: int = end) -> None:
            documents.segment.touch(documents.starts[begin:end], documents.lengths[begin:end])
            rest = output.after(begin, queries.num_tokens)
            argument = documents.argument(begin, end)
            if library.maxray_score(argument, queries.argument(), rest, level):
                raise MemoryError("no memory to score in")

        yield task


def _run(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs tasks in as many threads as torch has."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(tasks) == 1:
        for task in tasks:
            task()
    else:
        list(_threads(num_threads, os.getpid()).map(lambda task: task(), tasks))

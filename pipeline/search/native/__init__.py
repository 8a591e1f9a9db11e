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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.codecs.residual import Residual
from pipeline.search.packed import Segment

#: What the library can be told to use, the widest last.
LEVELS = ("generic", "avx2", "avx512", "amx")
#: Bytes of packed queries that are scored in one go: they are read again for each 32 tokens, and
#: stay in the second-level cache.
QUERY_BYTES = 1 << 19
#: Pairs of a document's and a query's token that are a task of a thread, at least.
TASK_PAIRS = 1 << 18
#: Tasks a thread for a segment: one that is interrupted keeps the others waiting for a short time.
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

    def behind(self, num_documents: int, num_tokens: int) -> _Output:
        """The output of the documents behind the first ones."""
        scores = self.scores and self.scores + 4 * num_documents
        places = (p and p + 4 * num_documents * num_tokens for p in (self.best, self.index))
        return _Output(scores, self.stride, *places)


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
    """What this machine can use, the widest last; nothing where the library was not built."""
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
    """The number of a level, or of the widest below it that can multiply this kind."""
    number = LEVELS.index(level)
    return min(number, LEVELS.index("avx512")) if kind == _KINDS[torch.float32] else number


def can_score(segment: Segment) -> bool:
    """Whether the library knows this codec, and the vectors lie where it can read them."""
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
        query_lengths: (Q,) int64.
        chosen: segments of one codec, and their documents, ascending; None: all.
        out_QB: float32, dense along B, the documents of all segments.
        level: of `available()`.
    """
    kind = _kind(chosen[0][0])
    number = _level(kind, level)
    every = [_Documents.of(segment, kind, documents) for segment, documents in chosen]
    packed_bytes = _packed_bytes(kind, number, query_MD.shape[1])
    tasks: list[Callable[[], None]] = []
    for queries, bounds in _groups(query_lengths, max(QUERY_BYTES // packed_bytes, 1)):
        packed = _Queries.of(query_MD[bounds[0] : bounds[-1]], kind, number, bounds - bounds[0])
        place = out_QB.data_ptr() + 4 * queries * out_QB.stride(0)
        for documents in every:
            output = _Output(place, out_QB.stride(0), None, None)
            tasks += _tasks(documents, packed, output, number)
            place += 4 * len(documents)
    _run(tasks)


def best(
    query_MD: torch.Tensor, segment: Segment, documents: torch.Tensor | None, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each document and query token the best similarity and the token it is with.

    Returns:
        (B, M) float32 and (B, M) int32, counted in the document, the first of equals; -inf and -1
        for a document without tokens.
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
    """Runs of whole queries: the first one, and where its tokens and those of the others begin."""
    bounds = np.concatenate([[0], query_lengths.numpy()]).cumsum()
    first = 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max_tokens, side="right")) - 1
        last = max(last, first + 1)
        yield first, bounds[first : last + 1]
        first = last


@dataclass(frozen=True)
class _Documents:
    """Documents to be scored: what they are a part of, where each begins, and how long it is."""

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
        """Runs of documents of about as many tokens each: (first, last + 1)."""
        ends = self.lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        num_runs = max(min(max_runs, total // least_tokens), 1)
        wanted = torch.arange(1, num_runs) * (total // num_runs)
        bounds = [0, *torch.searchsorted(ends, wanted).tolist(), len(ends)]
        yield from ((a, b) for a, b in itertools.pairwise(bounds) if a < b)

    def argument(self, begin: int, end: int) -> _DocumentsArgument:
        """A run as the library reads it."""
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
    """Query tokens in panels of 32, as a level of the library reads them."""

    panels: torch.Tensor
    scales: torch.Tensor | None
    bounds: np.ndarray
    num_tokens: int

    def argument(self) -> _QueriesArgument:
        """These queries as the library reads them."""
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
            if kind not in (_BINARY, _KINDS[torch.bfloat16]):  # two vectors of 16 side by side
                halves = halves.view(num_panels, 2, 16, width // 32, 2, 16).transpose(4, 5)
            high = halves.bfloat16()
            low = (halves - high.float()).bfloat16()
            pairs = torch.stack([high, low]).reshape(2, num_panels, 2, 16, width // 2, 2)
            return cls(pairs.transpose(3, 4).contiguous(), None, bounds, num_tokens)
        panels = padded.view(num_panels, 32, width).transpose(1, 2).contiguous()
        return cls(panels, None, bounds, num_tokens)


def _packed_bytes(kind: int, level: int, dim: int) -> int:
    """Bytes of a packed query token."""
    return dim if kind == _INT8 and level >= LEVELS.index("avx512") else 4 * dim


def _tasks(
    documents: _Documents, queries: _Queries, output: _Output, level: int
) -> Iterator[Callable[[], None]]:
    """Calls of the library that score all the documents, a run each."""
    library, num_threads = _built_library(), torch.get_num_threads()
    least = max(TASK_PAIRS // max(queries.num_tokens, 32), 1)
    for begin, end in documents.runs(num_threads * TASKS if num_threads > 1 else 1, least):

        def task(begin: int = begin, end: int = end) -> None:
            documents.segment.touch(documents.starts[begin:end], documents.lengths[begin:end])
            own = output.behind(begin, queries.num_tokens)
            argument = documents.argument(begin, end)
            if library.maxray_score(argument, queries.argument(), own, level):
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

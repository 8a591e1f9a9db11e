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
  which they would use a 32nd. int8 vectors are multiplied by int16 values of the query. To select
  the best of items of one int8 vector for a batch, panels have one query per column instead.
- The best items are selected while they are scored: chunks of scores, which stay in the L2 cache,
  are compared with a lower bound per query (`select`).
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
from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional

from pipeline.compression.codecs import Codec
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.int8 import round_
from pipeline.search.native.documents import (
    BITS,
    DENSE_KINDS,
    FLOAT_KINDS,
    INT8,
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
#: Forms of packed queries: any tokens; a row per query of one token; and panels of int16 of 32 of
#: them, to select int8 documents of one vector. They pay from `MIN_PANEL` queries on.
TOKENS, ROWS, PANELS = 0, 1, 2
MIN_PANEL = 12

#: Largest value of a query of one token, and the smallest scale that is divided by.
MAX_INT16, TINY = torch.iinfo(torch.int16).max, torch.finfo(torch.float32).tiny

T = TypeVar("T")
R = TypeVar("R")

_pointer = ctypes.c_void_p
_FOUND = np.dtype([("score", np.float32), ("document", np.int32)])
#: Structure `Cell` of the library.
CELL = np.dtype([("score", np.float32), ("token", np.int32)])
#: Number of elements after the last list that `vote` reads ahead.
PADDING = 24


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


class _Selection(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("limits", "found")),
        ("stride", ctypes.c_int64),
        ("counts", _pointer),
        ("first", ctypes.c_int64),
    ]


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
                *[ctypes.c_int64] * 3,
                ctypes.POINTER(_QueriesArgument),
                ctypes.POINTER(_Output),
                ctypes.c_int,
            ]
            library.maxray_select.argtypes = [
                *library.maxray_score.argtypes[:5],
                ctypes.POINTER(_Selection),
                ctypes.c_int,
            ]
            library.maxray_vote.argtypes = [*[_pointer] * 5, *[ctypes.c_int64] * 2, *[_pointer] * 3]
            library.maxray_vote.restype = ctypes.c_int64
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


def run(function: Callable[[T], R], arguments: Sequence[T]) -> list[R]:
    """Calls a function that releases the GIL with each argument, in this and in other threads.

    This thread takes part, since waking up another one takes as long as a short call.
    """
    results: dict[int, R] = {}
    rest = iter(range(len(arguments)))

    def work() -> None:
        for number in rest:
            results[number] = function(arguments[number])

    num_threads = torch.get_num_threads()
    threads = _threads(num_threads, os.getpid())
    others = [threads.submit(work) for _ in range(min(num_threads, len(arguments)) - 1)]
    work()
    for other in others:
        if not other.cancel():
            other.result()
    return [results[number] for number in range(len(arguments))]


def vote(
    items: np.ndarray,
    bounds: np.ndarray,
    sim_MP: np.ndarray,
    list_MP: np.ndarray,
    missing_M: np.ndarray,
    cells: np.ndarray,
    found: np.ndarray,
    scores: np.ndarray,
) -> int:
    """Adds up the largest similarity of a list to each query token for the items of the lists.

    The library must be available.

    Args:
        items: (V + `PADDING`,) int32, items of each list, one list after another.
        bounds: (C + 1,) int64, first element of each list in `items`, and V.
        sim_MP: Descending similarities of lists, float32.
        list_MP: Numbers of these lists, int64.
        missing_M: Similarity to each token of items that are not in its lists, float32. Scores
            lack the sum of them.
        cells: (B,) `CELL`, zero before and after the call.
        found: (B + 1,) int32; the n found items are written to it.
        scores: (B,) float32; the scores of the found items are written to it.

    Returns:
        The number n of found items.
    """
    library = _library()
    assert library is not None, "the MaxSim library is not built"
    arrays = [items, bounds, *map(np.ascontiguousarray, (list_MP, sim_MP, missing_M))]
    dtypes = [np.int32, np.int64, np.int64, np.float32, np.float32]
    assert [array.dtype for array in arrays] == dtypes
    pointers = [array.ctypes.data for array in arrays]
    results = [array.ctypes.data for array in (cells, found, scores)]
    return library.maxray_vote(*pointers, *sim_MP.shape, *results)


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
    for subset, form in _subsets(query_lengths, documents.kind):
        part_qR, tokens_mD = out_QR, query_MD
        is_all = len(subset) == len(query_lengths)
        if not is_all:
            part_qR = torch.empty(len(subset), out_QR.shape[1])
            tokens_mD = query_MD[torch.isin(torch.repeat_interleave(query_lengths), subset)]
        calls = _Calls(level)
        for first, queries in calls.packs(tokens_mD, query_lengths[subset], documents, form):
            address = part_qR.data_ptr() + 4 * first * part_qR.stride(0)
            calls.score(documents, queries, _Output(address, part_qR.stride(0), None, None))
        calls.run()
        if not is_all:
            out_QR[subset] = part_qR


def select(
    queries: Sequence[torch.Tensor],
    packed: PackedVectors,
    rows: Sequence[torch.Tensor | None],
    limits: np.ndarray,
    level: str,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores documents like `score`, and selects those whose scores reach the limit of a query.

    The scores of the others are not written to memory.

    Args:
        queries: Q tensors (M, D) float32.
        rows: Ascending indices (R,) of the documents to score, or None for all: one element for all
            queries, or one per query.
        limits: (Q,) float32, finite.

    Returns:
        Ascending indices (n,) int64 and scores (n,) float32 of the selected documents per query.
    """
    lengths = torch.tensor([len(query) for query in queries])
    indices = torch.arange(len(queries)).split(1 if len(rows) > 1 else len(queries))
    calls = _Calls(level, num_parts=len(rows))
    results: list[tuple[torch.Tensor, _Selected]] = []
    for index, part in zip(indices, rows, strict=True):
        documents = Documents.select(packed, part)
        if not len(documents):
            continue
        for subset, form in _subsets(lengths[index], documents.kind):
            members = index[subset]
            is_single = documents.kind == INT8 and documents.longest <= 1 and level != LEVELS[0]
            if form == ROWS and is_single and len(members) >= MIN_PANEL:
                form = PANELS
            tokens_MD = torch.cat([queries[i] for i in members])
            for first, packs in calls.packs(tokens_MD, lengths[members], documents, form):
                part_members = members[first : first + len(packs.bounds) - 1]
                selected = _Selected(limits[part_members.numpy()], len(documents), part)
                calls.select(documents, packs, selected)
                results.append((part_members, selected))
    calls.run()
    found = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
    for members, selected in results:
        for number, i in enumerate(members.tolist()):
            found[i] = selected.of(number)
    return found


class _Selected:
    """Memory of the documents that are selected for q queries.

    It has space for all documents. The operating system provides the pages that are written.
    """

    def __init__(self, limits: np.ndarray, num_documents: int, rows: torch.Tensor | None):
        padding = -len(limits) % 32  # for panels
        self._limits, self._rows = np.pad(limits, (0, padding), constant_values=np.inf), rows
        self._found = np.empty((len(limits), num_documents), _FOUND)
        self._counts: dict[int, np.ndarray] = {}  # (q,) for each first document of a run

    def argument(self, first: int) -> _Selection:
        """Returns the argument of the library for the documents from `first` on."""
        counts = self._counts[first] = np.empty(len(self._found), np.int64)
        return _Selection(
            limits=self._limits.ctypes.data,
            found=self._found.ctypes.data + _FOUND.itemsize * first,
            stride=self._found.shape[1],
            counts=counts.ctypes.data,
            first=first,
        )

    def of(self, query: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices and scores of the documents that are selected for a query."""
        runs = (slice(first, first + self._counts[first][query]) for first in sorted(self._counts))
        found = np.concatenate([self._found[query, run] for run in runs])
        index = found["document"].astype(np.int64)
        return index if self._rows is None else self._rows.numpy()[index], found["score"].copy()


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
    calls = _Calls(level)
    calls.score(documents, queries, _Output(None, 0, best_RM.data_ptr(), index_RM.data_ptr()))
    calls.run()
    return best_RM, index_RM


def _subsets(query_lengths: torch.Tensor, kind: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields the indices of the queries of one token and those of the others, with their form."""
    has_one_token = (query_lengths == 1) & (kind in DENSE_KINDS)
    for form in (ROWS, TOKENS):
        subset = torch.nonzero(has_one_token == (form == ROWS)).flatten()
        if len(subset):
            yield subset, form


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
        packed: Panels of 32 tokens, or rows (Q, D) for queries of one token.
        bounds: (Q + 1,) int64, first token of each query.
        form: `TOKENS`, or `ROWS` or `PANELS` of queries of one token.
        offsets: Projections of the tokens divided by their scales, for bits, else None.
    """

    packed: torch.Tensor
    scales: torch.Tensor | None
    bounds: np.ndarray
    num_tokens: int
    form: int = TOKENS
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
            one_token=self.form,
        )

    @classmethod
    def rows(cls, query_QD: torch.Tensor, kind: int, form: int) -> _Queries:
        """Packs queries of one token as rows, or as panels.

        The scores of both forms are equal, because the products are exact.
        """
        num_queries, dim = query_QD.shape
        bounds = np.arange(num_queries + 1)
        if kind != INT8:
            return cls(query_QD.contiguous(), None, bounds, num_queries, form)
        # The sum of the products with int8 values must not exceed 31 bits.
        largest = min(MAX_INT16, torch.iinfo(torch.int32).max // (128 * dim))
        scales = (query_QD.abs().amax(dim=1) / largest).clamp_min(TINY)
        values = round_(query_QD / scales.unsqueeze(1)).to(torch.int16)
        if form == ROWS:
            return cls(values, scales, bounds, num_queries, ROWS)
        padding = -num_queries % 32
        padded_QD = functional.pad(values, (0, -dim % 64, 0, padding))
        scales = functional.pad(scales, (0, padding))
        return cls(_interleave_pairs(padded_QD), scales, bounds, num_queries, PANELS)

    @classmethod
    def pack(
        cls, query_MD: torch.Tensor, codec: Codec, kind: int, level: int, bounds: np.ndarray
    ) -> _Queries:
        """Packs tokens (M, D), padded with zeros."""
        if isinstance(codec, Bits):
            return cls.pack_bits(query_MD, codec, level, bounds)
        num_tokens, dim = query_MD.shape
        num_panels, width = -(-num_tokens // 32), -(-dim // 64) * 64
        padded = torch.zeros(num_panels * 32, width)
        padded[:num_tokens, :dim] = query_MD
        halves = padded.view(num_panels, 2, 16, width)
        if kind == INT8 and level >= LEVELS.index("avx2"):
            array = padded.numpy()  # faster than torch for so few values
            scales = np.maximum(np.abs(array).max(axis=1) / 127, TINY, dtype=np.float32)
            values = torch.from_numpy(np.rint(array / scales[:, None]).astype(np.int8))
            panels = _integer_panels(values, level, 128)
            return cls(panels, torch.from_numpy(scales), bounds, num_tokens)
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
        has_masks = codec.spec.bits == 1 and level >= LEVELS.index("avx512")
        per_byte = 1 if has_masks else 8 // codec.spec.bits
        num_bytes = -(-dim // per_byte)
        values_MD = functional.pad(query.values_QD, (0, num_bytes * per_byte - dim))
        planes_MD = values_MD.view(num_tokens, num_bytes, per_byte).transpose(1, 2).flatten(1)
        values = torch.zeros(num_padded, width, dtype=torch.int8)
        values[:num_tokens, : num_bytes * per_byte] = planes_MD
        scales, offsets = torch.zeros(2, num_padded)
        scales[:num_tokens] = query.scales_Q
        offsets[:num_tokens] = query.projections_Q / query.scales_Q
        if level >= LEVELS.index("avx2"):
            panels = _integer_panels(values, level, 2**codec.spec.bits - 1)
        else:
            panels = values.float().view(-1, 32, width).transpose(1, 2).contiguous()
        return cls(panels, scales, bounds, num_tokens, offsets=offsets)


def _integer_panels(values_MD: torch.Tensor, level: int, added: int) -> torch.Tensor:
    """Returns panels of int8 tokens, whose number is a multiple of 32.

    With AVX-512, `added` is the number by which the kernel makes the values of documents unsigned.
    Its products with the tokens, which must be subtracted, follow the panels.
    """
    if level < LEVELS.index("avx512"):
        return _interleave_pairs(values_MD.short())
    num_tokens, width = values_MD.shape
    # Groups of four dimensions are interleaved over 16 tokens.
    values = values_MD.numpy()
    panels = values.reshape(num_tokens // 32, 2, 16, width // 4, 4).swapaxes(2, 3)
    offsets = values.sum(axis=1, dtype=np.int32) * -added
    return torch.from_numpy(np.concatenate([panels.ravel(), offsets.view(np.int8)]))


def _interleave_pairs(values_MD: torch.Tensor) -> torch.Tensor:
    """Interleaves pairs of dimensions over 32 tokens."""
    num_tokens, width = values_MD.shape
    return values_MD.view(num_tokens // 32, 32, width // 2, 2).transpose(1, 2).contiguous()


def _max_tokens(kind: int, level: int, dim: int) -> int:
    """Returns the maximum number of query tokens per call, unless a single query has more."""
    bytes_per_value = 4
    if kind in (INT8, BITS) and level >= LEVELS.index("avx2"):
        bytes_per_value = 1 if level >= LEVELS.index("avx512") else 2
    return max(QUERY_BYTES // (bytes_per_value * dim), 1)


class _Calls:
    """Calls of the library for packs of queries and runs of documents, which threads execute.

    Args:
        num_parts: Number of selections of documents that are scored together. The documents of each
            are divided into fewer runs.
    """

    def __init__(self, level: str, num_parts: int = 1):
        library, self._num_threads = _library(), torch.get_num_threads()
        if library is None:
            raise RuntimeError("the MaxSim library is not built")
        self._library, self._level = library, level
        self._max_runs = -(-self._num_threads * TASKS // num_parts) if self._num_threads > 1 else 1
        self._tasks: list[Callable[[], None]] = []
        self._num_packed_bytes = 0

    def packs(
        self,
        query_MD: torch.Tensor,
        query_lengths: torch.Tensor,
        documents: Documents,
        form: int,
    ) -> Iterator[tuple[int, _Queries]]:
        """Yields packed queries of a form and the number of the first."""
        number = _level(documents.kind, self._level)
        max_tokens = _max_tokens(documents.kind, number, query_MD.shape[1])
        for first, bounds in _groups(query_lengths, max_tokens):
            tokens_MD = query_MD[bounds[0] : bounds[-1]]
            if form != TOKENS:
                queries = _Queries.rows(tokens_MD, documents.kind, form)
            else:
                queries = _Queries.pack(
                    tokens_MD, documents.codec, documents.kind, number, bounds - bounds[0]
                )
            yield first, queries
            self._num_packed_bytes += queries.packed.nbytes
            if self._num_packed_bytes >= MAX_PACKED_BYTES:
                self.run()

    def score(self, documents: Documents, queries: _Queries, output: _Output) -> None:
        """Adds calls that write scores or best tokens."""

        def after(begin: int) -> _Output:
            return output.after(begin, queries.num_tokens)

        self._add(self._library.maxray_score, documents, queries, after)

    def select(self, documents: Documents, queries: _Queries, selected: _Selected) -> None:
        """Adds calls that select documents."""
        self._add(self._library.maxray_select, documents, queries, selected.argument)

    def _add(
        self,
        function: Callable[..., int],
        documents: Documents,
        queries: _Queries,
        output: Callable[[int], ctypes.Structure],
    ) -> None:
        level = _level(documents.kind, self._level)
        min_tokens = max(TASK_PAIRS // max(queries.num_tokens, 32), 1)
        groups = documents.groups

        def task(begin: int, end: int) -> None:
            documents.verify(begin, end)
            part = groups.ctypes.data, len(groups), begin, end
            if function(*part, queries.argument(), output(begin), level):
                raise MemoryError("failed to allocate working memory for MaxSim")

        self._tasks += [
            functools.partial(task, *run)
            for run in documents.runs(self._max_runs, min_tokens, self._num_threads)
        ]

    def run(self) -> None:
        """Executes the calls that were added."""
        tasks, self._tasks, self._num_packed_bytes = self._tasks, [], 0
        run(lambda task: task(), tasks)

"""Documents to score, in the form that the library reads: one group per segment.

Packed vectors can have thousands of segments. The arguments of all of them are gathered with array
operations, because a Python loop over the segments would take longer than scoring a few candidates.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.compression.codecs import Codec
from pipeline.compression.codecs.bits import Bits
from pipeline.compression.codecs.residual import Residual
from pipeline.search.packed import PackedVectors, Segment

#: Numbers of the kinds of vectors in the library.
FLOAT_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INT8, BITS, RESIDUAL = 3, 4, 5
#: Kinds for which the library has a function for queries of one token.
DENSE_KINDS = frozenset([*FLOAT_KINDS.values(), INT8])

_CODEC_KINDS = {
    "int8": INT8,
    "bits": BITS,
    "residual": RESIDUAL,
}
#: Part that contains the values of a vector, for kinds with another part than `values`.
_VALUES = {BITS: "bits", RESIDUAL: "residuals"}

#: Structure `Documents` of the library.
_GROUP = np.dtype(
    [
        *((name, np.int32) for name in ("kind", "dim")),
        *((name, np.int64) for name in ("row_bytes", "total")),
        *((name, np.intp) for name in ("values", "scales", "codes", "centroids", "weights")),
        *((name, np.intp) for name in ("half_scales", "projections")),
        *((name, np.int32) for name in ("bits", "normalised")),
        *((name, np.intp) for name in ("starts", "lengths")),
        ("count", np.int64),
    ],
    align=True,
)


def kind_of(segment: Segment) -> int | None:
    """Returns the number of the kind of the vectors of a segment, or None if it is unsupported."""
    name = segment.codec.spec.name
    if name in ("float16", "float32"):
        return FLOAT_KINDS.get(segment.parts["values"].dtype)
    return _CODEC_KINDS.get(name)


@dataclass(frozen=True)
class _Layout:
    """Addresses of the vectors of all B items.

    Attributes:
        groups: (G,) arguments of the library, one per segment, without documents.
        firsts: (G + 1,) int64, first item of each segment, then the number of items.
        starts: (B,) int64, index of the first vector of each item in its segment.
        lengths: (B,) int64, number of vectors per item.
        ends: (B,) int64, number of vectors up to and including those of each item.
        longest: Maximum number of vectors per item.
        is_verified: (G,) bool, whether all vectors of a segment are known to be intact. Thousands
            of calls of `Segment.verify` would take milliseconds.
    """

    kind: int
    groups: np.ndarray
    firsts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    longest: int
    is_verified: np.ndarray

    @classmethod
    def of(cls, packed: PackedVectors) -> _Layout:
        """Returns the layout of packed vectors, which is computed once."""
        if packed not in _layouts:
            segments = packed.segments
            kind = kind_of(segments[0])
            assert kind is not None, "the library does not support this codec"
            groups = np.zeros(len(segments), _GROUP)
            for group, segment in zip(groups, segments, strict=True):
                _describe(group, segment, kind)
            sizes = [len(segment.live_lengths) for segment in segments]
            starts = [
                segment.starts if segment.live is None else segment.starts[segment.live]
                for segment in segments
            ]
            lengths = packed.lengths.numpy()
            _layouts[packed] = cls(
                kind,
                groups,
                np.cumsum([0, *sizes]),
                torch.cat(starts).numpy(),
                lengths,
                lengths.cumsum(),
                int(lengths.max(initial=0)),
                np.zeros(len(segments), bool),
            )
        return _layouts[packed]


_layouts: weakref.WeakKeyDictionary[PackedVectors, _Layout] = weakref.WeakKeyDictionary()


def _describe(group: np.void, segment: Segment, kind: int) -> None:
    parts, codec = segment.parts, segment.codec
    values = parts[_VALUES.get(kind, "values")]
    group["kind"], group["dim"] = kind, segment.dim
    group["row_bytes"] = values.shape[1] * values.element_size()
    group["total"], group["values"] = len(values), values.data_ptr()
    if kind == INT8:
        group["scales"] = parts["scales"].data_ptr()
    if isinstance(codec, Bits):
        group["half_scales"] = parts["scales"].data_ptr()
        group["projections"] = parts["projections"].data_ptr()
        group["bits"] = codec.spec.bits
    if isinstance(codec, Residual):
        codebook = codec.codebook(values.device)  # the codec owns its memory
        group["codes"] = parts["centroids"].data_ptr()
        group["centroids"] = codebook.centroids_CD.data_ptr()
        group["weights"] = codebook.weights.data_ptr()
        group["bits"], group["normalised"] = codec.spec.bits, codebook.normalised


@dataclass(frozen=True)
class Documents:
    """Selected documents of packed vectors.

    Attributes:
        starts: (R,) int64, index of the first vector of each document in its segment.
        lengths: (R,) int64, number of vectors per document.
        ends: (R,) int64, number of vectors up to and including those of each document.
        longest: Maximum number of vectors per document, including those that are not selected.
    """

    kind: int
    longest: int
    segments: list[Segment]
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    _layout: _Layout
    _used: np.ndarray  # (S,) int64, numbers of the segments
    _bounds: np.ndarray  # (S + 1,) first document of each segment, then the number of documents

    @classmethod
    def select(cls, packed: PackedVectors, rows: torch.Tensor | None) -> Documents:
        """Selects documents by their ascending indices (R,) int64. None selects all documents."""
        layout = _Layout.of(packed)
        starts, lengths, ends, bounds = layout.starts, layout.lengths, layout.ends, layout.firsts
        if rows is not None:
            index = rows.numpy()
            starts, lengths = starts[index], lengths[index]
            ends, bounds = lengths.cumsum(), np.searchsorted(index, bounds)
        used = np.flatnonzero(np.diff(bounds) > 0)
        segments = [packed.segments[i] for i in used]
        bounds = np.append(bounds[used], len(starts))
        return cls(
            layout.kind, layout.longest, segments, starts, lengths, ends, layout, used, bounds
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def codec(self) -> Codec:
        """Codec of the vectors."""
        return self.segments[0].codec

    def runs(self, max_runs: int, min_tokens: int, num_threads: int) -> Iterator[tuple[int, int]]:
        """Yields runs (first, last + 1) of documents with similar numbers of tokens.

        Threads get equal numbers of runs: otherwise, some of them would wait for the others.
        """
        total = int(self.ends[-1]) if len(self.ends) else 0
        num_runs = max(min(max_runs, total // min_tokens), 1)
        if num_runs > num_threads:
            num_runs -= num_runs % num_threads
        targets = np.arange(1, num_runs) * (total // num_runs)
        bounds = np.concatenate([[0], np.searchsorted(self.ends, targets), [len(self.ends)]])
        for first, end in itertools.pairwise(bounds.tolist()):
            if first < end:
                yield first, end

    @functools.cached_property
    def groups(self) -> np.ndarray:
        """Arguments of the library, one per segment."""
        groups = self._layout.groups[self._used]
        groups["starts"] = self.starts.ctypes.data + 8 * self._bounds[:-1]
        groups["lengths"] = self.lengths.ctypes.data + 8 * self._bounds[:-1]
        groups["count"] = np.diff(self._bounds)
        return groups

    def verify(self, begin: int, end: int) -> None:
        """Verifies the vectors of a run of documents."""
        bounds, is_verified = self._bounds, self._layout.is_verified
        first = int(np.searchsorted(bounds, begin, side="right")) - 1
        used = self._used[first : int(np.searchsorted(bounds, end))]
        for number in np.flatnonzero(~is_verified[used]).tolist():
            part = slice(*bounds[first + number : first + number + 2].clip(begin, end))
            verify = self.segments[first + number].verify
            is_verified[used[number]] = verify(self.starts[part], self.lengths[part])

"""Quantised token vectors of documents, stored contiguously and without padding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.compression.codecs import Codec
from pipeline.compression.codecs.floats import Float16
from pipeline.search.storage import Storage, use_huge_pages

#: Bytes per copy to a device, which bounds the pages of a mapped file that are in host memory.
COPY_BYTES = 64 << 20
#: Codec of uncompressed vectors.
FLOATS = Float16(Float16.Spec())


@dataclass(frozen=True)
class Segment:
    """Token vectors of several documents, stored one document after another or as their prefixes.

    Attributes:
        dim: Dimension D of the decoded vectors.
        parts: Parts of the vectors by name, (T, width) each; contiguous, possibly memory-mapped.
        lengths: (S,) int64, number of vectors per document, which may be 0.
        live: (L,) int64, ascending indices of documents that are not deleted, or None for all S.
        offsets: (S,) int64, index of the first vector of each document, or None if the documents
            are contiguous.
        verify: Called with the starts and lengths (n,) int64 of runs of vectors before they are
            read. Raises `SpecError` if they are corrupted, and returns whether all vectors have
            been verified, so that further calls do nothing. Vectors on other devices were verified
            when they were copied.
        storage: Owner of `parts` and `lengths`, if other segments may share them, or owners of
            joined segments. They remain in use as long as this segment.
    """

    codec: Codec
    dim: int
    parts: dict[str, torch.Tensor]
    lengths: torch.Tensor
    live: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    verify: Callable[[np.ndarray, np.ndarray], bool] = field(
        default=lambda starts, lengths: True, repr=False
    )
    storage: Storage | list[Any] | None = field(default=None, repr=False)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Index of the first vector of each document, (S,) int64."""
        return self.lengths.cumsum(0) - self.lengths if self.offsets is None else self.offsets

    @functools.cached_property
    def live_lengths(self) -> torch.Tensor:
        """Number of vectors of each document that has not been deleted, (L,) int64."""
        return self.lengths if self.live is None else self.lengths[self.live]

    @functools.cached_property
    def num_vectors(self) -> int:
        """Total number of vectors of all documents."""
        return int(self.lengths.sum())

    @functools.cached_property
    def longest(self) -> int:
        """Maximum number of vectors per document."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def prefix(self, max_vectors: int) -> Segment:
        """Returns a view of at most the first `max_vectors` vectors of each document."""
        return replace(self, lengths=self.lengths.clamp(max=max_vectors), offsets=self.starts)

    @property
    def num_rows(self) -> int:
        """Number of rows of each part, T."""
        return len(next(iter(self.parts.values())))

    def to(self, device: torch.device | str, out: dict[str, torch.Tensor] | None = None) -> Segment:
        """Copies the documents to a device, memory-mapped parts in pieces.

        Args:
            out: Memory for the parts on the device. Defaults to new memory.
        """
        parts = out or {
            name: torch.empty(part.shape, dtype=part.dtype, device=device)
            for name, part in self.parts.items()
        }
        for name, part in self.parts.items():
            size = max(COPY_BYTES // max(part.shape[1] * part.element_size(), 1), 1)
            for first in range(0, len(part), size):
                end = min(first + size, len(part))
                self.verify(np.array([first]), np.array([end - first]))
                parts[name][first:end] = part[first:end]
        live = None if self.live is None else self.live.to(device)
        offsets = None if self.offsets is None else self.offsets.to(device)
        return Segment(self.codec, self.dim, parts, self.lengths.to(device), live, offsets)

    def item(self, document: int) -> torch.Tensor:
        """Returns the decoded vectors (N, D) float32 of one of the S documents."""
        start = int(self.starts[document])
        end = start + int(self.lengths[document])
        self.verify(np.array([start]), np.array([end - start]))
        parts = {name: part[start:end] for name, part in self.parts.items()}
        return self.codec.dequantise(parts, self.dim)


class PackedVectors:
    """Token vectors of all items of a column, in the order of the items.

    Args:
        segments: Segments in item order, with the same codec and dimension.

    Attributes:
        lengths: (B,) int64, number of vectors per item, which may be 0.
        starts: (B,) int64, index of the first vector per item, over all segments.
    """

    def __init__(self, segments: Sequence[Segment]):
        assert segments and len({segment.dim for segment in segments}) == 1
        self.segments = tuple(segments)
        self.codec, self.dim = segments[0].codec, segments[0].dim
        self.lengths = torch.cat([segment.live_lengths for segment in segments])
        self.starts = self.lengths.cumsum(0) - self.lengths
        counts = torch.tensor([0, *(len(segment.live_lengths) for segment in segments)])
        self._firsts = counts.cumsum(0)  # first item of each segment, then the number of items

    @classmethod
    def from_values(cls, values_TD: torch.Tensor, lengths: torch.Tensor) -> PackedVectors:
        """Creates uncompressed vectors from a floating-point tensor."""
        return cls([Segment(FLOATS, values_TD.shape[1], {"values": values_TD}, lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    def prefix(self, max_vectors: int) -> PackedVectors:
        """Returns a view of at most the first `max_vectors` vectors of each item."""
        return PackedVectors([segment.prefix(max_vectors) for segment in self.segments])

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""
        return self.lengths.device

    @functools.cached_property
    def num_vectors(self) -> int:
        """Total number of vectors."""
        return int(self.lengths.sum())

    @property
    def is_coded(self) -> np.ndarray:
        """True for items with vectors, (B,) bool."""
        return (self.lengths > 0).numpy(force=True)

    @property
    def item_bytes(self) -> float:
        """Mean number of bytes of the encoded vectors of an item."""
        return self.num_vectors / max(len(self), 1) * self.codec.token_bytes(self.dim)

    def item(self, row: int) -> torch.Tensor:
        """Returns the decoded vectors (N, D) float32 of an item."""
        number = int(torch.searchsorted(self._firsts, row, right=True)) - 1
        segment, row = self.segments[number], row - int(self._firsts[number])
        return segment.item(row if segment.live is None else int(segment.live[row]))

    def select(
        self, rows: torch.Tensor | None = None
    ) -> Iterator[tuple[Segment, torch.Tensor | None]]:
        """Yields each segment and the indices of its selected documents, or None for all of them.

        Args:
            rows: (R,) int64, ascending indices of the selected items, on any device, or None for
                all.
        """
        if rows is None:
            yield from ((segment, segment.live) for segment in self.segments)
            return
        rows = rows.to(self.device)
        firsts = self._firsts.tolist()
        bounds = torch.searchsorted(rows, self._firsts.to(self.device)).tolist()
        for i, segment in enumerate(self.segments):
            documents = rows[bounds[i] : bounds[i + 1]] - firsts[i]
            yield segment, documents if segment.live is None else segment.live[documents]


def single_vectors(column: pa.FixedSizeListArray) -> tuple[np.ndarray, np.ndarray]:
    """Converts a column to single vectors (T, P) and lengths (B,), which are 1, or 0 for null."""
    lengths = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, column.type.list_size), lengths


def empty_parts(
    codec: Codec, dim: int, num_rows: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Allocates memory for the parts of vectors."""
    return {
        name: torch.empty(num_rows, width, dtype=dtype, device=device)
        for name, (dtype, width) in codec.parts(dim).items()
    }


def join_adjacent(segments: Sequence[Segment]) -> list[Segment]:
    """Joins successive segments whose vectors are adjacent in memory, without copying vectors."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and _is_adjacent(runs[-1][-1], segment):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _is_adjacent(first: Segment, second: Segment) -> bool:
    """Checks whether all parts of a segment begin where those of another end."""
    if first.offsets is not None or second.offsets is not None or not first.num_rows:
        return False
    pairs = ((part, second.parts[name]) for name, part in first.parts.items())
    return all(
        one._base is not None
        and one._base is other._base
        and one.storage_offset() + one.numel() == other.storage_offset()
        for one, other in pairs
    )


def _joined(run: Sequence[Segment]) -> Segment:
    num_rows = sum(segment.num_rows for segment in run)
    parts = {
        name: part.as_strided((num_rows, part.shape[1]), part.stride())
        for name, part in run[0].parts.items()
    }
    live, first = [], 0
    for segment in run:
        indices = segment.live
        if indices is None:
            indices = torch.arange(len(segment.lengths), device=segment.lengths.device)
        live.append(indices + first)
        first += len(segment.lengths)
    return Segment(
        run[0].codec,
        run[0].dim,
        parts,
        torch.cat([segment.lengths for segment in run]),
        None if all(segment.live is None for segment in run) else torch.cat(live),
        storage=[segment.storage for segment in run],
    )


def join_blocks(
    codec: Codec, dim: int, blocks: list[tuple[dict[str, np.ndarray], np.ndarray]]
) -> PackedVectors:
    """Joins blocks of (parts, lengths (B,)) into one segment. Empties the list to save memory."""
    lengths = np.concatenate([np.empty(0, np.int64), *(lengths for _, lengths in blocks)])
    end = int(lengths.sum())
    parts = empty_parts(codec, dim, end)
    for tensor in parts.values():
        use_huge_pages(tensor.numpy())
    while blocks:
        block, _ = blocks.pop()
        for name, part in block.items():
            parts[name].numpy()[end - len(part) : end] = part
        end -= len(part)
    return PackedVectors([Segment(codec, dim, parts, torch.from_numpy(lengths))])

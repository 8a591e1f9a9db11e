"""Scan of the codes in the cells that score best for a query, instead of all codes.

Shapes: B items, V items with a code, C cells, R dimensions of a code.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from pipeline.compression.codecs.int8 import Int8
from pipeline.search.packed import PackedVectors, Segment, empty_parts

#: Part of a codec with the number of the cell of a code.
PART = "cells"
#: Maximum share of the items that are scanned by cell. Otherwise, all codes are scanned.
MAX_SHARE = 0.5


class Cells:
    """Codes of a column in memory, sorted by cell, so that those of a cell are contiguous.

    Args:
        packed: Codes of B items on a CPU with the part `cells`, at most one per item.
        cells_CR: Centres of the cells, float32.

    Attributes:
        packed: Codes without the part `cells`, by cell and item.
        items: (V,) int64, items of these codes.
    """

    def __init__(self, packed: PackedVectors, cells_CR: np.ndarray):
        self._cells_CR = cells_CR
        rows = [_coded_rows(segment) for segment in packed.segments]
        pairs = list(zip(packed.segments, rows, strict=True))
        cell_V = np.concatenate([segment.parts[PART].numpy()[r, 0] for segment, r in pairs])
        order_V = np.argsort(cell_V, kind="stable")
        position_V = np.empty_like(order_V)
        position_V[order_V] = np.arange(len(order_V))
        codec = Int8(Int8.Spec())
        parts = empty_parts(codec, packed.dim, len(order_V))
        ends = np.cumsum([len(r) for r in rows])
        for (segment, r), positions in zip(pairs, np.split(position_V, ends[:-1]), strict=True):
            for name, part in parts.items():
                part.numpy()[positions] = segment.parts[name].numpy()[r]
        coded = np.flatnonzero(packed.is_coded)
        self.items = coded[order_V]
        self._bounds = np.searchsorted(cell_V[order_V], np.arange(len(cells_CR) + 1))
        self._cell_B, self._position_B = np.full((2, len(packed)), -1)
        self._cell_B[coded], self._position_B[coded] = cell_V, position_V
        lengths = torch.ones(len(order_V), dtype=torch.int64)
        self.packed = PackedVectors([Segment(codec, packed.dim, parts, lengths)])

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        return np.diff(self._bounds)

    def _order(self, query_1R: torch.Tensor) -> np.ndarray:
        """Returns the cells in descending order of their scores."""
        return np.argsort(-(self._cells_CR @ query_1R[0].numpy()), kind="stable")

    def ranks(self, query_1R: torch.Tensor, items: np.ndarray) -> np.ndarray:
        """Returns how many codes must be scanned to find each item (n,), or 0 without a code."""
        order = self._order(query_1R)
        before_C = np.empty(len(order), np.int64)
        before_C[order] = np.cumsum(self._counts[order]) - self._counts[order]
        cells = self._cell_B[items]
        return np.where(cells < 0, 0, before_C[cells] + 1)

    def scanned(
        self, queries: list[torch.Tensor], num: int, least: int, rows: np.ndarray | None
    ) -> list[np.ndarray]:
        """Returns the ascending positions in `packed` of the codes to scan for each query (1, R).

        Args:
            num: Number of codes that the scanned cells contain.
            least: Minimum number of found items.
            rows: (n,) ascending items that are selected, or None for all. The scanned cells then
                contain at least the same share of them as of all items.
        """
        positions, counts = None, self._counts
        if rows is not None:
            selected = rows[self._cell_B[rows] >= 0]
            positions = np.sort(self._position_B[selected])
            bounds = np.searchsorted(positions, self._bounds)
            counts = np.diff(bounds)
            least = max(least, num * len(positions) // max(len(self.items), 1))
        found = []
        for query_1R in queries:
            order = self._order(query_1R)
            end = np.searchsorted(np.cumsum(self._counts[order]), num) + 1
            end = max(end, np.searchsorted(np.cumsum(counts[order]), least) + 1)
            cells = np.sort(order[:end])
            starts = (self._bounds if positions is None else bounds)[cells]
            index = _ranges(starts, counts[cells])
            found.append(index if positions is None else positions[index])
        return found


def _coded_rows(segment: Segment) -> np.ndarray:
    """Returns the vectors of the items with a code, which are verified."""
    starts = segment.starts if segment.live is None else segment.starts[segment.live]
    rows = starts[segment.live_lengths > 0].numpy()
    segment.verify(rows, np.ones_like(rows))
    return rows


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenates ranges.

    >>> _ranges(np.array([3, 9]), np.array([2, 1])).tolist()
    [3, 4, 9]
    """
    shift = starts - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(counts.sum())

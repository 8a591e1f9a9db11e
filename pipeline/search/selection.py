"""Selects items of an index by filters and ids."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.index.filters import matching_ids
from pipeline.index.reader import IndexReader
from pipeline.search.options import SearchOptions

#: Columns of the ids in the options `ids` and `parents`.
ID_COLUMNS = {"ids": "item_id", "parents": "parent_id"}
#: Number of filters whose results are cached, with 8 bytes per selected item.
CACHED_FILTERS = 16


class Items:
    """Items of an index, or of one of its shards, in storage order.

    Args:
        shard: (i, n) for shard i of n, or None for all items.
    """

    def __init__(self, index: IndexReader, shard: tuple[int, int] | None = None):
        self.index = index
        self.fragments = index.fragments(shard)
        self._filtered: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def ids(self) -> pa.Table:
        """Table of all items with the columns `item_id` and `parent_id`."""
        scanner = self.index.dataset.scanner(
            columns=["item_id", "parent_id"], scan_in_order=True, fragments=self.fragments
        )
        with self.index.corruption_errors():
            return scanner.to_table().combine_chunks()

    @functools.cached_property
    def id_order(self) -> np.ndarray:
        """Rank of each item by its id, (B,) int64. It is used to break ties."""
        rank = np.empty(len(self.ids), np.int64)
        rank[pc.sort_indices(self.ids["item_id"]).to_numpy()] = np.arange(len(rank))
        return rank

    @functools.cached_property
    def parent_codes(self) -> np.ndarray:
        """(B,) int64, number of each item's parent."""
        codes = self.ids["parent_id"].combine_chunks().dictionary_encode().indices
        return codes.to_numpy().astype(np.int64)

    def select(self, options: SearchOptions) -> np.ndarray | None:
        """Selects items. Returns their indices in ascending order, or None if all are selected."""
        rows = None if options.filter is None else self._filtered_rows(options.filter)
        return self.restrict(rows, options)

    def restrict(self, rows: np.ndarray | None, options: SearchOptions) -> np.ndarray | None:
        """Restricts ascending indices of items (None for all) by the lists of ids."""
        for field, ids in (("ids", options.ids), ("parents", options.parents)):
            if ids is not None:
                values = pa.array(ids, pa.string())
                listed = pc.is_in(self.ids[ID_COLUMNS[field]], value_set=values)
                matches = np.flatnonzero(listed.to_numpy())
                if rows is None:
                    rows = matches
                else:
                    rows = np.intersect1d(rows, matches, assume_unique=True)
        return rows

    def _filtered_rows(self, filter: str) -> np.ndarray:
        if isinstance(filter, str) and (rows := self.cached_rows(filter)) is not None:
            return rows
        return self.cache_rows(filter, matching_ids(self.index, filter, self.fragments))

    def cached_rows(self, filter: str) -> np.ndarray | None:
        """Returns the indices of the items that match a filter if they are cached, or else None."""
        return self._filtered.get(filter)

    def cache_rows(self, filter: str, item_ids: pa.ChunkedArray) -> np.ndarray:
        """Caches and returns the ascending rows of items, valid as a version is immutable."""
        rows = np.flatnonzero(pc.is_in(self.ids["item_id"], value_set=item_ids).to_numpy())
        while len(self._filtered) >= CACHED_FILTERS:
            self._filtered.pop(next(iter(self._filtered)), None)
        self._filtered[filter] = rows
        return rows

    def num_known(self, ids: Sequence[str], field: str) -> int:
        """Counts the different ids of items ("ids") or parents ("parents") that the index has."""
        distinct = pc.unique(pa.array(ids, pa.string()))
        return pc.sum(pc.is_in(distinct, value_set=self.ids[ID_COLUMNS[field]])).as_py() or 0

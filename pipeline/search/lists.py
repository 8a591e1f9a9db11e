"""Search of the inverted lists of the generator `ivf`.

Shapes: B items, V vectors, C centroids, M query tokens, P probed lists per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.search import native
from pipeline.search.generators.ivf import Ivf
from pipeline.search.packed import PackedVectors

#: Number of centroids that the search of the graph keeps beside the probed ones.
EXTRA = 16
#: Factor by which the number of probed lists grows for queries with too few items, until there are
#: at least this many.
MORE_PROBES, MAX_PROBES = 4, 1024


class Scratch(NamedTuple):
    """Memory of a search, zero before and after it.

    Attributes:
        scores: (B,) float32, score of each item.
        tokens: (B,) int32, number of the last query token that found the item, from 1 on.
        found: (B,) int32, items that were found. It need not be zero.
    """

    scores: np.ndarray
    tokens: np.ndarray
    found: np.ndarray


class Lists:
    """Items of each list in memory, with 4 bytes per vector.

    Args:
        generator: Fitted generator.
        packed: Codes of the items.
    """

    def __init__(self, generator: Ivf, packed: PackedVectors):
        self._graph, self._num_items = generator.codec.graph, len(packed)
        chunks, first = [np.empty(0, np.int64)], 0
        for segment in packed.segments:
            live = segment.live
            starts = segment.starts if live is None else segment.starts[live]
            lengths = segment.live_lengths
            segment.verify(starts.numpy(), lengths.numpy())
            shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
            lists = segment.parts["lists"][torch.arange(len(shift)) + shift, 0].numpy()
            items = np.repeat(np.arange(first, first + len(lengths)), lengths.numpy())
            chunks.append((lists.astype(np.int64) << 32) | items)
            first += len(lengths)
        keys = np.concatenate(chunks)
        keys.sort()  # faster than a stable argsort
        self._items = (keys & 0xFFFFFFFF).astype(np.int32)
        self._bounds = np.searchsorted(keys, np.arange(self._graph.ntotal + 1) << 32)
        self._free: list[Scratch] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_lists(self) -> int:
        """Number of lists C."""
        return self._graph.ntotal

    def find(
        self,
        queries: Sequence[torch.Tensor],
        num_probes: int,
        rows: np.ndarray | None = None,
        num: int = 0,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the result of `search` for the items `rows`, or for all.

        More lists are probed for queries with fewer than `num` items, for example if a filter
        selects items that are unlike the query.
        """
        is_selected = None
        if rows is not None:
            is_selected = np.zeros(self._num_items, bool)
            is_selected[rows] = True
        found = []
        for items, scores in self.search(queries, num_probes):
            chosen = slice(None) if is_selected is None else is_selected[items]
            found.append((items[chosen], scores[chosen]))
        few = [number for number, (items, _) in enumerate(found) if len(items) < num]
        if few and num_probes < min(MAX_PROBES, self.num_lists):
            tokens = [queries[number] for number in few]
            more = self.find(tokens, MORE_PROBES * num_probes, rows, num)
            for number, pair in zip(few, more, strict=True):
                found[number] = pair
        return found

    def scores(self, queries: Sequence[torch.Tensor], num_probes: int) -> Iterator[np.ndarray]:
        """Yields the scores (B,) of all items, which are 0 for those that are not found."""
        for items, scores in self.search(queries, num_probes):
            scores_B = np.zeros(self._num_items, np.float32)
            scores_B[items] = scores
            yield scores_B

    def search(
        self, queries: Sequence[torch.Tensor], num_probes: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the items (n,) in the probed lists of each query (M, D), and their scores.

        Scores lack the sum over the tokens of the similarities of the last probed lists. Items
        whose score is that sum are not found.
        """
        import faiss

        num_probes = min(num_probes, self.num_lists)
        parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
            efSearch=num_probes + EXTRA
        )
        tokens = np.concatenate([query.numpy() for query in queries])
        sim_MP, list_MP = self._graph.search(tokens, num_probes, params=parameters)
        is_missing = list_MP < 0  # the graph may find fewer
        if is_missing.any():
            lowest_M1 = np.where(is_missing, np.inf, sim_MP).min(axis=1, keepdims=True)
            sim_MP = np.where(is_missing, lowest_M1, sim_MP)
        ends = np.cumsum([0, *map(len, queries)])
        ranges = [slice(*pair) for pair in itertools.pairwise(ends.tolist())]
        yield from native.run(lambda part: self._vote(sim_MP[part], list_MP[part]), ranges)

    def _vote(self, sim_MP: np.ndarray, list_MP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        try:
            scratch = self._free.pop()
        except IndexError:
            dtypes = (np.float32, np.int32, np.int32)
            scratch = Scratch(*(np.zeros(self._num_items, dtype) for dtype in dtypes))
        vote = native.vote if native.available() else _vote
        num = vote(self._items, self._bounds, sim_MP, list_MP, *scratch)
        found = scratch.found[:num].copy()
        scores = scratch.scores[found]
        scratch.scores[found] = scratch.tokens[found] = 0
        self._free.append(scratch)
        return found.astype(np.int64), scores


def _vote(
    items: np.ndarray,
    bounds: np.ndarray,
    sim_MP: np.ndarray,
    list_MP: np.ndarray,
    scores: np.ndarray,
    tokens: np.ndarray,
    found: np.ndarray,
) -> int:
    """Does the same as `native.vote`."""
    num_found = 0
    for number, (sim_P, list_P) in enumerate(zip(sim_MP, list_MP, strict=True), start=1):
        for sim, probed in zip(sim_P, list_P, strict=True):
            if not sim > sim_P[-1]:
                break
            part = np.unique(items[bounds[probed] : bounds[probed + 1]])
            part = part[tokens[part] != number]
            new = part[tokens[part] == 0]
            found[num_found : num_found + len(new)] = new
            num_found += len(new)
            tokens[part] = number
            scores[part] += sim - sim_P[-1]
    return num_found

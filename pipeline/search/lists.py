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
from pipeline.search.generators.ivf import Ivf, one_thread
from pipeline.search.packed import PackedVectors

#: Number of centroids that the search of the graph keeps beside the probed ones.
EXTRA = 16
#: The similarity of items that are not in the lists of a token is below that of its last list by
#: this share of the difference from the mean of all lists (docs/results/candidates.md).
MISSING = 0.2
#: Factor by which the number of probed lists grows for queries with too few items, until there are
#: at least this many.
MORE_PROBES, MAX_PROBES = 4, 1024
#: Selected items are unlike a query if their share of the items in its lists is below this part of
#: their share of all items.
RARE = 0.75


class Scratch(NamedTuple):
    """Memory of a search, see `native.vote`.

    Attributes:
        cells: (B,) `native.CELL`, zero before and after a search.
        found: (B + 1,) int32, items that were found.
        scores: (B,) float32, their scores.
    """

    cells: np.ndarray
    found: np.ndarray
    scores: np.ndarray


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
        self._items = np.zeros(len(keys) + native.PADDING, np.int32)
        self._items[: len(keys)] = keys & 0xFFFFFFFF
        num_lists = self._graph.ntotal
        bounds = np.searchsorted(keys, np.arange(num_lists + 1) << 32)
        self._bounds = np.append(bounds, len(keys))  # one more list, which is empty
        self._mean_D = self._graph.reconstruct_n(0, num_lists).mean(axis=0)
        self._free: list[Scratch] = []

    def __len__(self) -> int:
        return int(self._bounds[-1])

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
        most_probes: int = MAX_PROBES,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the result of `search` for the items `rows`, or for all.

        More lists are probed for queries with fewer than `num` items, and for those that are unlike
        the items `rows`, whose best ones are often in none of the lists. Instead of more than
        `most_probes` lists per token, the result consists of all items `rows`.
        """
        is_selected, share = None, 0.0
        if rows is not None:
            is_selected = np.zeros(self._num_items, bool)
            is_selected[rows] = True
            share = len(rows) / max(self._num_items, 1)
        found, few = [], []
        for number, (items, scores) in enumerate(self.search(queries, num_probes)):
            chosen = slice(None) if is_selected is None else is_selected[items]
            found.append((items[chosen], scores[chosen]))
            if len(found[-1][0]) < max(num, RARE * share * len(items)):
                few.append(number)
        more_probes = MORE_PROBES * num_probes
        if few and num_probes < min(MAX_PROBES, self.num_lists):
            tokens = [queries[number] for number in few]
            if rows is not None and more_probes > most_probes:
                more = [(rows, np.zeros(len(rows), np.float32))] * len(few)
            else:
                more = self.find(tokens, more_probes, rows, num, most_probes)
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

        Scores lack the sum over the tokens of the similarities of items that are in none of its
        lists.
        """
        num_probes = min(num_probes, self.num_lists)
        tokens = np.concatenate([query.numpy() for query in queries])
        sim_MP, list_MP = self._nearest(tokens, num_probes)
        is_missing = list_MP < 0  # the graph may find fewer
        list_MP[is_missing] = self.num_lists
        last_M = np.where(is_missing, np.inf, sim_MP).min(axis=1)
        mean_M = (tokens * self._mean_D).sum(axis=1)  # does not depend on the batch, unlike @
        missing_M = last_M - MISSING * np.maximum(last_M - mean_M, 0)
        ends = np.cumsum([0, *map(len, queries)])
        ranges = [slice(*pair) for pair in itertools.pairwise(ends.tolist())]

        def find(part: slice) -> tuple[np.ndarray, np.ndarray]:
            return self._vote(sim_MP[part], list_MP[part], missing_M[part])

        yield from native.run(find, ranges)

    def _nearest(self, token_MD: np.ndarray, num_probes: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the similarities and the numbers (M, P) of the nearest lists of the graph."""
        import faiss

        parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
            efSearch=num_probes + EXTRA
        )

        def search(part_mD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            # Threads of faiss would wait actively after the search, on the cores of later steps.
            with one_thread():
                return self._graph.search(part_mD, num_probes, params=parameters)

        parts = np.array_split(token_MD, max(min(len(token_MD), torch.get_num_threads()), 1))
        sims, lists = zip(*native.run(search, parts), strict=True)
        return np.concatenate(sims), np.concatenate(lists)

    def _vote(
        self, sim_MP: np.ndarray, list_MP: np.ndarray, missing_M: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        try:
            scratch = self._free.pop()
        except IndexError:
            size = self._num_items
            scratch = Scratch(
                np.zeros(size, native.CELL), np.empty(size + 1, np.int32), np.empty(size, "f4")
            )
        vote = native.vote if native.available() else _vote
        num = vote(self._items, self._bounds, sim_MP, list_MP, missing_M, *scratch)
        result = scratch.found[:num].astype(np.int64), scratch.scores[:num].copy()
        self._free.append(scratch)
        return result


def _vote(
    items: np.ndarray,
    bounds: np.ndarray,
    sim_MP: np.ndarray,
    list_MP: np.ndarray,
    missing_M: np.ndarray,
    cells: np.ndarray,
    found: np.ndarray,
    scores: np.ndarray,
) -> int:
    """Does the same as `native.vote`."""
    num_found, tokens = 0, cells["token"]
    for number, (sim_P, list_P) in enumerate(zip(sim_MP, list_MP, strict=True), start=1):
        for sim, probed in zip(sim_P, list_P, strict=True):
            part = np.unique(items[bounds[probed] : bounds[probed + 1]])
            part = part[tokens[part] != number]
            new = part[tokens[part] == 0]
            found[num_found : num_found + len(new)] = new
            num_found += len(new)
            tokens[part] = number
            cells["score"][part] += sim - missing_M[number - 1]
    scores[:num_found] = cells["score"][found[:num_found]]
    cells[found[:num_found]] = 0
    return num_found

"""Merging of rankings from the shards of an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np

from pipeline.search.fusion import FUSED
from pipeline.search.options import SearchOptions
from pipeline.search.score import Ranking, fuse


def merge_rankings(rankings: Sequence[Ranking], options: SearchOptions) -> Ranking:
    """Merges the rankings of one query. Ties are sorted by item id.

    Args:
        rankings: Output of `Scorer.rank_part` of each shard, with `rows` counted over all shards.

    >>> first = Ranking(["b", "d"], ["p", "q"], [3.0, 1.0], np.array([0, 1]))
    >>> second = Ranking(["a", "c"], ["q", "p"], [3.0, 2.0], np.array([2, 3]))
    >>> merge_rankings([first, second], SearchOptions(k=3)).item_ids
    ['a', 'b', 'c']
    >>> merge_rankings([first, second], SearchOptions(k=3, group_by="parent")).item_ids
    ['a', 'b']
    """
    values = {f.name: [getattr(r, f.name) for r in rankings] for f in fields(Ranking)}
    joined = Ranking(**{name: _concatenate(parts) for name, parts in values.items()})
    if options.score == FUSED:
        return fuse(joined, options)
    scores = list(chain.from_iterable(ranking.scores for ranking in rankings))
    ids = list(chain.from_iterable(ranking.item_ids for ranking in rankings))
    order = sorted(range(len(ids)), key=lambda i: (-scores[i], ids[i]))
    if options.group_by:
        parents = list(chain.from_iterable(ranking.parent_ids for ranking in rankings))
        best: dict[str, int] = {}
        for i in order:
            best.setdefault(parents[i], i)
        order = list(best.values())
    return joined.take(order[: options.k])


def _concatenate(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else list(chain(*parts))

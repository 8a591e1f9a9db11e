"""Merging of rankings from the shards of an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, Literal

import numpy as np

from pipeline.search.score import Ranking


def merge_rankings(
    rankings: Sequence[Ranking], k: int, group_by: Literal["parent"] | None = None
) -> Ranking:
    """Merges the rankings of one query. Ties are sorted by item id.

    Args:
        rankings: The k best items of each shard, with `rows` counted over all shards.
        k: Maximum number of items.
        group_by: "parent" keeps only the best item of each parent. The rankings must be grouped in
            the same way.

    >>> first = Ranking(["b", "d"], ["p", "q"], [3.0, 1.0], np.array([0, 1]))
    >>> second = Ranking(["a", "c"], ["q", "p"], [3.0, 2.0], np.array([2, 3]))
    >>> merge_rankings([first, second], 3).item_ids
    ['a', 'b', 'c']
    >>> merge_rankings([first, second], 3, "parent").item_ids
    ['a', 'b']
    """
    scores = list(chain.from_iterable(ranking.scores for ranking in rankings))
    ids = list(chain.from_iterable(ranking.item_ids for ranking in rankings))
    order = sorted(range(len(ids)), key=lambda i: (-scores[i], ids[i]))
    if group_by:
        parents = list(chain.from_iterable(ranking.parent_ids for ranking in rankings))
        best: dict[str, int] = {}
        for i in order:
            best.setdefault(parents[i], i)
        order = list(best.values())
    values = {f.name: [getattr(r, f.name) for r in rankings] for f in fields(Ranking)}
    return Ranking(**{name: _concatenate(parts) for name, parts in values.items()}).take(order[:k])


def _concatenate(parts: Sequence[Any]) -> Any:
    """Concatenates arrays or lists.

    Returns None if they are None.
    """
    if parts[0] is None:
        return None
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else list(chain(*parts))

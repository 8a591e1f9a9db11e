"""Indexes with given vectors, and reference scores of their items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.index import ITEMS
from pipeline.schema import ITEM, Item

if TYPE_CHECKING:
    from pipeline.search.query import Queries
    from pipeline.search.searcher import Searcher

DIM = 384


class Row(NamedTuple):
    """Ids of an item, token vectors (N, 384) or None, and single vector (384,) or None."""

    item_id: str
    parent_id: str
    tokens: np.ndarray | None
    pooled: np.ndarray | None


@pytest.fixture
def make_index(index_uri, tmp_path) -> Callable[[Sequence[Row]], Searcher]:
    """Returns a function that writes rows to an index as `hpool_2` and single vectors."""
    import lance  # tests of kernels need neither Lance nor Ray

    from pipeline.search.searcher import open_index

    def write(rows: Sequence[Row]) -> Searcher:
        stored = lance.dataset(f"{index_uri}/{ITEMS}").schema
        schema = pa.schema([*ITEM, stored.field("minilm_pooled"), stored.field("hpool_2")])
        items = [Item(r.item_id, r.parent_id, "test", "text", "r1").row() for r in rows]
        for item, row in zip(items, rows, strict=True):
            item["minilm_pooled"] = None if row.pooled is None else row.pooled.tolist()
            item["hpool_2"] = None if row.tokens is None else row.tokens.tolist()
        table = pa.Table.from_pylist(items, schema=schema)
        uri = str(tmp_path / f"vectors{len(list(tmp_path.iterdir()))}")
        lance.write_dataset(table, f"{uri}/{ITEMS}", max_rows_per_file=50)
        return open_index(uri)

    return write


def random_rows(rng: np.random.Generator, number: int) -> list[Row]:
    """Returns items with few distinct scores, exact in float16; some lack one kind of vectors."""
    rows = []
    for i in rng.permutation(number):
        tokens = rng.integers(-1, 2, (rng.integers(1, 4), DIM)) * (np.arange(DIM) < 3)
        pooled = rng.integers(-1, 2, DIM) * (np.arange(DIM) < 2)
        has_vectors = rng.random(2) > 0.1
        rows.append(
            Row(
                f"i{i:03}",
                f"p{rng.integers(number // 4)}",
                tokens.astype(np.float32) if has_vectors[0] else None,
                pooled.astype(np.float32) if has_vectors[1] else None,
            )
        )
    return rows


def random_queries(rng: np.random.Generator, number: int) -> Queries:
    """Returns queries of 1, 2 or 4 tokens, whose sums and means of scores are exact."""
    from pipeline.search.query import Queries

    lengths = rng.choice([1, 2, 4], number)
    tokens = [torch.from_numpy(rng.integers(-1, 2, (n, DIM)).astype(np.float32)) for n in lengths]
    pooled = torch.from_numpy(rng.integers(-1, 2, (number, DIM)).astype(np.float32))
    return Queries(tokens, pooled, [[f"#{i}" for i in range(n)] for n in lengths])


class Scored(NamedTuple):
    """Score of an item and its components."""

    total: float
    maxsim: float | None
    maxsim_mean: float | None
    single_vector: float | None


def reference_score(row: Row, queries: Queries, query: int, score: str, weights=(1, 1)) -> Scored:
    """Returns the score of a row; -inf if it lacks vectors that the score needs."""
    tokens = queries.tokens[query].numpy()
    maxsim = single_vector = -np.inf
    if row.tokens is not None:
        maxsim = sum(max(float(q @ token) for token in row.tokens) for q in tokens)
    if row.pooled is not None:
        single_vector = float(queries.pooled[query].numpy() @ row.pooled)
    mean = maxsim / len(tokens)
    if score == "maxsim":
        return Scored(maxsim, maxsim, mean, None)
    if score == "single_vector":
        return Scored(single_vector, None, None, single_vector)
    known = -np.inf not in (maxsim, single_vector)
    return Scored(
        weights[0] * single_vector + weights[1] * mean if known else -np.inf,
        maxsim,
        mean,
        single_vector,
    )


def reference_ranking(
    rows: Sequence[Row], queries: Queries, query: int, score: str, weights=(1, 1), by_parent=False
) -> list[tuple[Row, Scored]]:
    """Returns the scored rows, best first, ties by id; with `by_parent` the first per parent."""
    scored = [(row, reference_score(row, queries, query, score, weights)) for row in rows]
    scored = [(row, parts) for row, parts in scored if parts.total > -np.inf]
    scored.sort(key=lambda pair: (-pair[1].total, pair[0].item_id))
    if by_parent:
        firsts = {}
        for row, parts in scored:
            firsts.setdefault(row.parent_id, (row, parts))
        scored = list(firsts.values())
    return scored

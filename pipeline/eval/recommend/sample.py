"""Deterministic sample of the items of an index with their uncompressed token vectors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.config import SpecError
from pipeline.index.filters import matching_ids
from pipeline.index.info import RepresentationInfo
from pipeline.index.positions import decode_positions
from pipeline.index.reader import IndexReader
from pipeline.index.recompress import with_vectors
from pipeline.index.token_columns import TAP, token_batches
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: Maximum number of padded values per batch, which bounds the memory for compressing it: 64 MiB of
#: float32.
MAX_BATCH_VALUES = 1 << 24


class Sample(NamedTuple):
    """Sampled items in ascending order of their number of tokens.

    Attributes:
        ids: Item or parent id of each item (B,).
        batches: Token vectors of consecutive items, in half precision if they are stored so.
    """

    ids: list[str]
    batches: list[TokenBatch]
    num_items: int

    def __len__(self) -> int:
        return len(self.ids)


def draw_sample(
    index: IndexReader,
    info: RepresentationInfo,
    *,
    size: int,
    seed: int,
    level: str = "item",
    judged: Collection[str] = (),
    filter: str | None = None,
    taps: Sequence[Tap] = (),
) -> Sample:
    """Draws random items, and adds those that are judged.

    `level`, "item" or "parent", is that of `judged` and of the ids of the sample. All items of a
    judged parent are added.
    """
    rows, ids = _rows(index, f"{level}_id", filter)
    is_judged = pc.is_in(ids, pa.array(sorted(judged), pa.string())).to_numpy(zero_copy_only=False)
    shuffled = np.random.default_rng(seed).permutation(len(rows))
    tables = [_read(index, info, rows[is_judged], level, taps)]
    num_read, num_random = 0, 0
    for first in range(0, len(rows), size):
        if num_random >= size:
            break
        chunk = shuffled[first : first + size]
        table = _read(index, info, np.sort(rows[chunk[~is_judged[chunk]]]), level, taps)
        tables.append(table.slice(0, size - num_random))
        num_read += int((~is_judged[chunk]).sum())
        num_random += table.num_rows
    table = pa.concat_tables(tables)
    if not table.num_rows:
        rule = "a representation with vectors of at least one item (that matches the filter)"
        raise SpecError("representation", info.name, rule, "has none")
    num_unread = len(rows) - num_read - int(is_judged.sum())
    num_items = tables[0].num_rows + num_random + num_unread * num_random // max(1, num_read)
    order, batches = [], []
    is_half = table["vectors"].type.value_type.value_type == pa.float16()
    dtype = torch.float16 if is_half else torch.float32
    for batch_rows, batch in token_batches(
        table.drop_columns(["id"]), info.encoder, max_values=MAX_BATCH_VALUES
    ):
        order.append(batch_rows)
        batches.append(replace(batch, vectors=batch.vectors.to(dtype)))
    sampled_ids = table["id"].take(np.concatenate(order)).to_pylist()
    return Sample(sampled_ids, batches, num_items)


def _rows(
    index: IndexReader, column: str, filter: str | None
) -> tuple[np.ndarray, pa.ChunkedArray]:
    table = index.dataset.to_table(columns=list(dict.fromkeys(["item_id", column])))
    rows = np.arange(table.num_rows)
    if filter is not None:
        matches = matching_ids(index, filter).combine_chunks()
        rows = np.flatnonzero(pc.is_in(table["item_id"], matches).to_numpy())
    return rows, table[column].take(rows)


def _read(
    index: IndexReader, info: RepresentationInfo, rows: np.ndarray, level: str, taps: Sequence[Tap]
) -> pa.Table:
    """Reads the token columns of items that have vectors, and their ids as the column `id`."""
    encoder_info = info.encoder.for_field(info.field)
    columns = {"id": f"{level}_id", "vectors": info.name}
    for kind in ("spans", "extents"):
        if info.positions.get(kind) in index.schema.names:
            columns[kind] = info.positions[kind]
    columns |= {TAP + tap.name: encoder_info.tap_column(tap) for tap in taps}
    with index.corruption_errors():
        table = index.dataset.take(rows.tolist(), columns=list(columns.values()))
    table = decode_positions(table.select(list(columns.values())).rename_columns(list(columns)))
    table = table.filter(pc.greater(pc.list_value_length(table["vectors"]), 0))
    return with_vectors(table, index.codec(info.name), info.encoder.dim)

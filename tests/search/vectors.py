"""Indexes of small random vectors in the layout of the index job, without an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import lance
import numpy as np
import pyarrow as pa

from pipeline.config import parse
from pipeline.index.columns import Representation, encoder_fields, representation_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import ITEMS
from pipeline.schema import ITEM, Item
from pipeline.tokens import lists_of

DIM = 16
ENCODER = EncoderInfo(
    spec={"name": "minilm"},
    dim=DIM,
    pooled_dim=DIM,
    normalised=True,
    has_spans=False,
    has_extents=False,
    fingerprint="f",
    prefix="minilm",
)


def columns(encoder: EncoderInfo) -> list[pa.Field]:
    """Returns the columns of single vectors and of uncompressed vectors by an encoder."""
    representation = parse(Representation, {"compressor": "none"})
    fields = encoder_fields(encoder, keep_positions=False)
    return [*fields, *representation_fields(representation, encoder, None)]


COLUMNS = columns(ENCODER)
SCHEMA = pa.schema([*ITEM, *COLUMNS])
#: Schema of an index by another encoder, whose scores are not comparable.
OTHER_SCHEMA = pa.schema([*ITEM, *columns(replace(ENCODER, fingerprint="g"))])


def unit(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns random float16 vectors of unit length."""
    values = np.random.default_rng(seed).normal(size=shape)
    return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float16)


def lists(lengths: Sequence[int | None], seed: int) -> pa.ListArray:
    """Returns a column with these numbers of vectors per row; None for null."""
    column = lists_of(unit((sum(n or 0 for n in lengths), DIM), seed), [n or 0 for n in lengths])
    if None not in lengths:
        return column
    return pa.array([v if n is not None else None for v, n in zip(column, lengths, strict=True)])


def rows(names: Sequence[str], lengths: Sequence[int | None], seed: int = 0) -> pa.Table:
    """Returns items with `full` and single vectors; the parent is the part before a slash."""
    items = [Item(n, n.split("/")[0], "test", "text", "r1", text=f"The text of {n}") for n in names]
    table = pa.Table.from_pylist([item.row() for item in items], schema=ITEM)
    pooled = pa.FixedSizeListArray.from_arrays(unit((len(names), DIM), seed + 1).ravel(), DIM)
    for field, column in zip(COLUMNS, (pooled, lists(lengths, seed)), strict=True):
        table = table.append_column(field, column.cast(field.type))
    return table


def write(uri: str, table: pa.Table, schema: pa.Schema = SCHEMA, **options) -> lance.LanceDataset:
    """Writes rows to an index."""
    return lance.write_dataset(table.cast(schema), f"{uri}/{ITEMS}", schema=schema, **options)

"""Conversion between padded batches of token vectors and the list columns that store them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from pipeline.compression import MAX_TOKENS, Compressor
from pipeline.index.columns import ITEM_FIELDS, TOKEN_COLUMNS, token_column
from pipeline.index.info import EncoderInfo
from pipeline.taps import Tap, average_layers
from pipeline.tokens import TokenBatch, flat_from_arrow, pad, ragged_to_arrow

#: Maximum number of padded values per batch of a compressing actor: 256 MiB of float32.
MAX_BATCH_VALUES = 1 << 26

#: Prefix of the token columns that hold attention statistics.
TAP = "tap "


def with_taps(batch: TokenBatch, taps: Sequence[Tap], encoder_info: EncoderInfo) -> TokenBatch:
    """Adds the attention statistics that are averaged from those of single layers to the batch."""
    if not taps:
        return batch
    if encoder_info.num_layers is None:
        raise ValueError(f"the encoder {encoder_info.name} provides no attention statistics")
    num_layers = encoder_info.num_layers
    return replace(batch, taps={t.name: average_layers(t, batch.taps, num_layers) for t in taps})


def tap_values(batch: TokenBatch, tap: Tap) -> pa.Array:
    """Converts the values of an attention statistic to a `list<float32>` column."""
    return ragged_to_arrow(batch.taps[tap.name], batch.mask, pa.float32())


def positions_column(batch: TokenBatch, kind: str, type: pa.ListType) -> pa.Array:
    """Converts the `spans`, `extents` or `confidence` of tokens to a column, null without them."""
    positions = getattr(batch, kind)
    if positions is None:
        return pa.nulls(len(batch), type)
    is_nested = pa.types.is_fixed_size_list(type.value_type)
    value_type = type.value_type.value_type if is_nested else type.value_type
    return ragged_to_arrow(positions, batch.mask, value_type)


def assignment_column(result: TokenBatch, batch: TokenBatch, compressor: Compressor) -> pa.Array:
    """Returns the assignment of tokens to vectors as `list<uint16>`.

    The form depends on the compressor: "assignment" lists for each input token the index of its
    vector, 65535 for none; "indices" lists for each vector the index of its input token.
    """
    assignment = result.assignment
    if assignment is None:
        raise ValueError(f"the compressor {compressor.spec.name} returned no token assignment")
    if compressor.assignment_form == "assignment":
        assignment = assignment.masked_fill(assignment.lt(0), MAX_TOKENS + 1)
        return ragged_to_arrow(assignment, batch.mask, pa.uint16())
    # Indices count valid tokens only, as padding is not stored.
    ordinal = batch.mask.cumsum(dim=1) - 1
    num_outputs = result.mask.shape[1]
    indices = assignment.new_zeros((len(batch), num_outputs + 1))
    slot = assignment.masked_fill(assignment.lt(0), num_outputs)
    indices.scatter_(1, slot, ordinal)
    return ragged_to_arrow(indices[:, :num_outputs], result.mask, pa.uint16())


def fixed_lists(vectors: torch.Tensor | None, type: pa.DataType) -> pa.FixedSizeListArray:
    """Converts a (B, P) tensor to a column of fixed-size lists."""
    if vectors is None:
        raise ValueError("the encoder has a `pooled_dim`, but its batch has no `pooled` vectors")
    values = vectors.detach().float().cpu().numpy().astype(type.to_pandas_dtype())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), type), vectors.shape[1])


def token_columns(items: pa.Table, item_fields: Sequence[str] = ITEM_FIELDS) -> dict[str, str]:
    """Maps each column that `Encode` added to its name without the prefix of the item field."""
    names = {}
    for item_field in item_fields:
        prefix = token_column(item_field, "")
        for column in items.column_names:
            name = column.removeprefix(prefix)
            has_prefix = column == prefix + name
            if has_prefix and (name in TOKEN_COLUMNS or name.startswith(TAP)):
                names[column] = name
    return names


def token_batches(
    items: pa.Table,
    encoder_info: EncoderInfo,
    item_field: str = "content",
    max_values: int = MAX_BATCH_VALUES,
) -> Iterator[tuple[np.ndarray, TokenBatch]]:
    """Yields padded batches of items of similar length from token columns.

    Args:
        max_values: Maximum number of padded values per batch. A batch has at least one item.

    Yields:
        (rows, batch): Indices of rows that have tokens, and their tokens.
    """
    if (vectors := token_column(item_field, "vectors")) not in items.column_names:
        return
    names = token_columns(items, [item_field])
    columns = items.select(list(names)).rename_columns(list(names.values()))
    lengths = flat_lengths(items[vectors])
    by_length = np.argsort(lengths, kind="stable")
    start = int((lengths == 0).sum())
    while start < len(by_length):
        stop = start + 1
        while stop < len(by_length) and (
            (stop + 1 - start) * lengths[by_length[stop]] * encoder_info.dim <= max_values
        ):
            stop += 1
        rows = by_length[start:stop]
        yield rows, batch_from(columns.take(rows), encoder_info)
        start = stop


def batch_from(items: pa.Table, encoder_info: EncoderInfo) -> TokenBatch:
    """Converts the token columns of a table to a single padded batch."""
    vectors, mask = pad(*flat_from_arrow(items["vectors"]))
    others = {
        name: padded_positions(items[name], mask, fill)
        for name, fill in (("spans", -1), ("extents", float("nan")), ("confidence", float("nan")))
        if name in items.column_names
    }
    pooled, appended = (_fixed_rows(items, name) for name in ("pooled", "appended"))
    if appended is not None:
        appended = appended.unflatten(1, (-1, encoder_info.dim))
    taps = {
        name.removeprefix(TAP): pad(*flat_from_arrow(items[name]))[0]
        for name in items.column_names
        if name.startswith(TAP)
    }
    return TokenBatch(
        vectors.float(),
        mask,
        encoder_info.normalised,
        pooled=pooled,
        appended=appended,
        taps=taps,
        **others,
    )


def _fixed_rows(items: pa.Table, name: str) -> torch.Tensor | None:
    """Returns a column of fixed-size lists as a tensor (B, P); None if the table lacks it."""
    if name not in items.column_names:
        return None
    column = items[name].combine_chunks()
    return torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1))


def padded_positions(
    column: pa.ChunkedArray, mask: torch.Tensor, fill: float
) -> torch.Tensor | None:
    """Pads positions with `fill` to the shape of `mask`. Returns None if all rows are null."""
    if column.null_count == len(column):
        return None
    flat, lengths = flat_from_arrow(column)
    has_position = mask & torch.from_numpy(lengths > 0).unsqueeze(1)
    values = torch.from_numpy(flat.copy())  # Arrow's memory is read-only
    padded = torch.full((*mask.shape, *values.shape[1:]), fill, dtype=values.dtype)
    padded[has_position] = values
    return padded


def flat_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Returns the lengths of the lists in a column, (B,) int64. The length of null is 0."""
    return flat_from_arrow(column)[1]

"""Compact storage of token positions, which reduces their size to between 1/3 and 2/3."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: In-memory extents, see `TokenBatch`: x0 y0 x1 y1 in [0, 1], t0 t1 in seconds, or NaN if absent.
EXTENTS = pa.list_(pa.list_(pa.float32(), 6))
#: Stored extents: boxes in units of 1 / 65535, and times in seconds. Each list is null for items
#: without it, such as the times of a page.
STORED_EXTENTS = pa.struct(
    [
        pa.field("boxes", pa.list_(pa.list_(pa.uint16(), 4))),
        pa.field("times", pa.list_(pa.list_(pa.float32(), 2))),
    ]
)
STEPS = 65535
#: Marker of a token without a box, in items with boxes. No valid box ends before it begins.
NO_BOX = (STEPS, STEPS, 0, 0)


def stored_type(type: pa.DataType) -> pa.DataType:
    """Returns the type in which new columns of positions are stored."""
    return STORED_EXTENTS if type == EXTENTS else type


def encode_positions(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Converts token positions of a table to the storage types of an index schema."""
    for i, column in enumerate(table.schema):
        if column.type == EXTENTS:
            table = table.set_column(i, column.name, _encode_extents(table[column.name]))
    return table.cast(schema)


def decode_positions(table: pa.Table) -> pa.Table:
    """Converts token positions of a stored table to their in-memory types."""
    for i, column in enumerate(table.schema):
        if column.type == STORED_EXTENTS:
            table = table.set_column(i, column.name, _decode_extents(table[column.name]))
    return table


def stored_bytes(column: pa.Array) -> np.ndarray:
    """Computes the size in bytes of each row of a column of (structs of) lists, (B,)."""
    if pa.types.is_struct(column.type):
        return np.sum([stored_bytes(child) for child in column.flatten()], axis=0)
    return pc.list_value_length(column).fill_null(0).to_numpy() * element_bytes(column.type)


def element_bytes(type: pa.ListType) -> int:
    """Returns the size in bytes of an element of a list column, such as a vector or a span."""
    element = type.value_type
    if pa.types.is_fixed_size_list(element):
        return element.list_size * element.value_type.bit_width // 8
    return element.bit_width // 8


def _encode_extents(column: pa.ChunkedArray) -> pa.StructArray:
    lengths_B, extents_T6 = _flat(column.combine_chunks())
    item_T = np.repeat(np.arange(len(lengths_B)), lengths_B)
    has_box_T = ~np.isnan(extents_T6[:, :4]).any(axis=1)
    boxes_T4 = np.rint(np.nan_to_num(extents_T6[:, :4]).clip(0, 1) * STEPS).astype(np.uint16)
    boxes_T4[~has_box_T] = NO_BOX
    has_time_T = ~np.isnan(extents_T6[:, 4:]).all(axis=1)
    children, has_any_B = [], np.zeros(len(lengths_B), bool)
    for has_T, values in ((has_box_T, boxes_T4), (has_time_T, extents_T6[:, 4:])):
        has_B = np.zeros(len(lengths_B), bool)
        has_B[item_T[has_T]] = True
        children.append(_lists(np.where(has_B, lengths_B, 0), values[has_B[item_T]], ~has_B))
        has_any_B |= has_B
    return pa.StructArray.from_arrays(
        children, fields=list(STORED_EXTENTS), mask=pa.array(~has_any_B)
    )


def _decode_extents(column: pa.ChunkedArray) -> pa.ListArray:
    boxes, times = column.combine_chunks().flatten()
    (box_lengths_B, boxes_T4), (time_lengths_B, times_T2) = _flat(boxes), _flat(times)
    lengths_B = np.maximum(box_lengths_B, time_lengths_B)
    extents_T6 = np.full((lengths_B.sum(), 6), np.nan, np.float32)
    boxes_T4 = np.where(
        (boxes_T4 == NO_BOX).all(axis=1, keepdims=True), np.nan, boxes_T4.astype(np.float32) / STEPS
    )
    extents_T6[np.repeat(box_lengths_B > 0, lengths_B), :4] = boxes_T4
    extents_T6[np.repeat(time_lengths_B > 0, lengths_B), 4:] = times_T2
    return _lists(lengths_B, extents_T6, lengths_B == 0)


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths of the lists (B,), which are 0 for null, and all elements (T, W)."""
    lengths_B = pc.list_value_length(column).fill_null(0).to_numpy()
    width = column.type.value_type.list_size
    return lengths_B, column.flatten().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _lists(lengths_B: np.ndarray, values_TW: np.ndarray, is_null_B: np.ndarray) -> pa.ListArray:
    offsets = pa.array(np.concatenate([[0], lengths_B.cumsum()]), pa.int32())
    elements = pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(values_TW).reshape(-1)), values_TW.shape[1]
    )
    return pa.ListArray.from_arrays(offsets, elements, mask=pa.array(is_null_B))

"""The stored form of where tokens stand, a third to two thirds the size of that in use."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Extents in use, see `TokenBatch`: x0 y0 x1 y1 in [0, 1], t0 t1 in seconds; NaN for none.
EXTENTS = pa.list_(pa.list_(pa.float32(), 6))
#: Extents as stored since format 2: boxes in steps of 1 / 65535, and seconds; each of them null for
#: items that have none, such as the seconds of a page. Indexes of format 1 store `EXTENTS`.
STORED_EXTENTS = pa.struct(
    [
        pa.field("boxes", pa.list_(pa.list_(pa.uint16(), 4))),
        pa.field("times", pa.list_(pa.list_(pa.float32(), 2))),
    ]
)
STEPS = 65535
#: A token without a box in an item that has others: no box ends before it begins.
NO_BOX = (STEPS, STEPS, 0, 0)


def stored_type(type: pa.DataType) -> pa.DataType:
    """The type in which new columns store positions of a type."""
    return STORED_EXTENTS if type == EXTENTS else type


def as_stored(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns a table as the columns of an index store it."""
    for place, column in enumerate(table.schema):
        if column.type == EXTENTS and schema.field(column.name).type == STORED_EXTENTS:
            table = table.set_column(place, column.name, _stored(table[column.name]))
    return table.cast(schema)


def as_used(table: pa.Table) -> pa.Table:
    """Returns a table of an index with positions in the form in which they are used."""
    for place, column in enumerate(table.schema):
        if column.type == STORED_EXTENTS:
            table = table.set_column(place, column.name, _used(table[column.name]))
    return table


def stored_bytes(column: pa.Array) -> np.ndarray:
    """Returns the (B,) sizes in bytes of the rows of a column of lists, or of a struct of lists."""
    if pa.types.is_struct(column.type):
        return np.sum([stored_bytes(child) for child in column.flatten()], axis=0)
    return pc.list_value_length(column).fill_null(0).to_numpy() * bytes_of_element(column.type)


def bytes_of_element(type: pa.ListType) -> int:
    """Bytes of one element of a list column: a token's vector, span or support."""
    element = type.value_type
    if pa.types.is_fixed_size_list(element):
        return element.list_size * element.value_type.bit_width // 8
    return element.bit_width // 8


def _stored(column: pa.ChunkedArray) -> pa.StructArray:
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


def _used(column: pa.ChunkedArray) -> pa.ListArray:
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
    """(B,) the lengths of the lists, 0 for null, and (T, W) their elements, one after the other."""
    lengths_B = pc.list_value_length(column).fill_null(0).to_numpy()
    width = column.type.value_type.list_size
    return lengths_B, column.flatten().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _lists(lengths_B: np.ndarray, values_TW: np.ndarray, is_null_B: np.ndarray) -> pa.ListArray:
    offsets = pa.array(np.concatenate([[0], lengths_B.cumsum()]), pa.int32())
    elements = pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(values_TW).reshape(-1)), values_TW.shape[1]
    )
    return pa.ListArray.from_arrays(offsets, elements, mask=pa.array(is_null_B))

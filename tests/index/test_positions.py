"""Tests of the compact storage of token positions."""

import lance
import numpy as np
import pyarrow as pa

from pipeline.index.fragments import write_table
from pipeline.index.positions import (
    EXTENTS,
    STORED_EXTENTS,
    decode_positions,
    encode_positions,
    stored_bytes,
)
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.index.writer import STORAGE_VERSION

NAN = float("nan")
BOX = [0.1, 0.25, 0.9999, 1.0]
ROWS = [
    [[*BOX, NAN, NAN], [0.0, 0.0, 1.0, 1.0, NAN, NAN]],  # a page
    None,  # a text
    [[NAN] * 4 + [0.5, 1.25]],  # audio
    [
        [*BOX, 3600.04, 3601.5],
        [NAN] * 4 + [7200.0, 7200.1],
        [1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    ],  # video
]


def table(rows=ROWS):
    return pa.table({"item_id": [str(i) for i in range(len(rows))], "e": pa.array(rows, EXTENTS)})


def schema(type):
    return pa.schema([pa.field("item_id", pa.string()), pa.field("e", type)])


def check(actual):
    assert actual["e"].type == EXTENTS
    for row, expected in zip(actual["e"].to_pylist(), ROWS, strict=True):
        assert (row is None) == (expected is None)
        if row is not None:
            row, expected = np.array(row), np.array(expected, np.float32)
            np.testing.assert_allclose(row[:, :4], expected[:, :4], atol=0.5 / 65535 + 1e-7)
            np.testing.assert_array_equal(row[:, 4:], expected[:, 4:])


def test_round_trip():
    stored = encode_positions(table(), schema(STORED_EXTENTS))
    assert stored["e"].type == STORED_EXTENTS and stored["e"].null_count == 1
    check(decode_positions(stored))
    check(decode_positions(pa.concat_tables([stored.slice(0, 1), stored.slice(1)])))
    # 8 bytes per box and 8 bytes per time, against 24 bytes per token in memory.
    assert stored_bytes(stored["e"].combine_chunks()).tolist() == [16, 0, 8, 48]
    assert stored_bytes(table()["e"].combine_chunks()).tolist() == [48, 0, 24, 72]


def test_positions_are_written_and_read(tmp_path):
    items = str(tmp_path / ITEMS)
    empty = schema(STORED_EXTENTS).empty_table()
    lance.write_dataset(empty, items, data_storage_version=STORAGE_VERSION)
    operation = lance.LanceOperation.Append(write_table(table(), items))
    lance.LanceDataset.commit(items, operation, read_version=1)
    index = IndexReader(str(tmp_path))
    assert index.schema.field("e").type == STORED_EXTENTS
    check(index.items(["0", "1", "2", "3"]))
    (batch,) = index.batches(["item_id"], filter="e IS NOT NULL")
    assert batch["item_id"].to_pylist() == ["0", "2", "3"]
    assert index.content_key(["e"]) != index.content_key([])


def test_items_without_positions_are_null():
    empty = table([[[NAN] * 6], [], None])
    assert encode_positions(empty, schema(STORED_EXTENTS))["e"].to_pylist() == [None] * 3
    assert decode_positions(encode_positions(table([]), schema(STORED_EXTENTS))).num_rows == 0

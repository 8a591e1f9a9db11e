"""Tests that the comparison and the accounting of the chaos suite detect damage to an index."""

from __future__ import annotations

import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipeline.index.artefacts import save_artefact
from pipeline.index.reader import ITEMS
from pipeline.index.writer import IndexWriter
from pipeline.schema import REJECT, column_metadata, with_metadata
from tests.chaos.compare import (
    accounting,
    accounting_of_job,
    contents,
    differences,
    orphaned_leases,
)
from tests.conftest import TEXTS


@pytest.fixture
def uri(index_uri: str, tmp_path: Path) -> str:
    """Copy of an index that a test may change."""
    return str(shutil.copytree(index_uri, tmp_path / "index"))


def rewrite(uri: str, table: pa.Table, max_rows_per_file: int = 5) -> None:
    """Replaces the rows of an index."""
    shutil.rmtree(f"{uri}/{ITEMS}")
    lance.write_dataset(table, f"{uri}/{ITEMS}", max_rows_per_file=max_rows_per_file)


def rows(uri: str) -> pa.Table:
    """Returns the rows of an index."""
    return lance.dataset(f"{uri}/{ITEMS}").to_table()


def test_storage_order_makes_no_difference(uri, index_uri):
    table = rows(uri)
    rewrite(uri, table.take(list(range(len(table)))[::-1]), max_rows_per_file=3)
    found = differences(contents(uri), contents(index_uri))
    assert not found and found.sentences() == []
    assert not accounting(uri, TEXTS)


def test_lost_row(uri, index_uri):
    rewrite(uri, rows(uri).slice(1))
    lost = [next(iter(TEXTS))]
    found = differences(contents(uri), contents(index_uri))
    assert (found.lost, found.duplicated, found.changed, found.others) == (lost, [], [], [])
    assert accounting(uri, TEXTS).lost == lost


def test_duplicated_row(uri, index_uri):
    table = rows(uri)
    rewrite(uri, pa.concat_tables([table, table.slice(2, 1)]))
    duplicated = [list(TEXTS)[2]]
    found = differences(contents(uri), contents(index_uri))
    assert (found.lost, found.duplicated, found.changed, found.others) == ([], duplicated, [], [])
    assert accounting(uri, TEXTS).duplicated == duplicated


def test_one_changed_bit_of_a_vector(uri, index_uri):
    table = rows(uri)
    column = table["hpool_4"].combine_chunks()
    vectors = np.array(column.values.values).copy()
    vectors.view(np.uint16)[3] ^= 1
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors), column.values.type.list_size)
    changed = pa.ListArray.from_arrays(column.offsets, values)
    position = table.schema.get_field_index("hpool_4")
    rewrite(uri, table.set_column(position, table.schema.field(position), changed))
    found = differences(contents(uri), contents(index_uri))
    assert found.changed == [f"{table['item_id'][0].as_py()}.hpool_4"]
    assert found.sentences() == [f"changed: 1 ({found.changed[0]})"]


def test_null_differs_from_an_empty_list(uri, index_uri):
    table = rows(uri)
    position = table.schema.get_field_index("hpool_2")
    filled = pc.fill_null(table["hpool_2"], pa.scalar([], table["hpool_2"].type))
    rewrite(uri, table.set_column(position, table.schema.field(position), filled))
    found = differences(contents(uri), contents(index_uri))
    assert found.changed == [f"{list(TEXTS)[-1]}.hpool_2"]


def test_unknown_row_and_columns(uri, index_uri):
    table = rows(uri)
    ids = pc.replace_substring(table["item_id"], "flow", "other")
    field = with_metadata(
        table.schema.field("hpool_4"), {**column_metadata(table.schema.field("hpool_4")), "dim": 1}
    )
    table = table.set_column(0, table.schema.field(0), ids).drop_columns(["hpool_2"])
    position = table.schema.get_field_index("hpool_4")
    rewrite(uri, table.set_column(position, field, table["hpool_4"]))
    found = differences(contents(uri), contents(index_uri))
    assert (found.lost, found.changed) == (["flow"], ["other"])
    assert [sentence.split()[1] for sentence in found.others] == ["hpool_2", "hpool_4"]
    assert accounting(uri, TEXTS).changed == ["other"]


def test_corrupted_artefact(uri):
    metadata = {"fingerprint": "f"}
    name = save_artefact(uri, {"centroids": np.zeros(3)}, metadata)
    table = rows(uri)
    field = table.schema.field("hpool_4")
    field = with_metadata(field, {**column_metadata(field), "artefact": name})
    position = table.schema.get_field_index("hpool_4")
    rewrite(uri, table.set_column(position, field, table["hpool_4"]))
    expected = contents(uri)
    assert expected.artefacts == {name} and not expected.damages
    Path(uri, "artefacts", f"{name}.npz").write_bytes(b"")
    (sentence,) = differences(contents(uri), expected).others
    assert "is corrupted" in sentence


def test_rejects_and_leases(uri, index_uri):
    writer = IndexWriter(uri, "job")
    (sentence,) = [s for s in orphaned_leases(uri) if s.startswith("the lease is held by job")]
    reject = {"item_id": "flow", "source": "s", "stage": "list", "reason": "r", "retryable": False}
    writer.set_rejects(pa.Table.from_pylist([reject], schema=REJECT))
    assert accounting(uri, TEXTS).duplicated == ["flow"]  # indexed and rejected
    assert accounting(uri, [*TEXTS, "missing"]).lost == ["missing"]
    (sentence,) = differences(contents(uri), contents(index_uri)).others
    assert sentence.startswith("rejects are ")
    writer.release()
    assert orphaned_leases(uri) == []


def test_counts_of_a_job():
    counts = {"listed": 5, "indexed": 3, "rejected": 1, "rejected_before": 1, "gone": 0}
    assert accounting_of_job({"state": "done", **counts}) == []
    (sentence,) = accounting_of_job({"state": "done", **counts, "indexed": 2})
    assert sentence == "listed 5 != indexed 2 + rejected 2 + gone 0"
    (sentence,) = accounting_of_job(
        {"state": "running", "fragments": 4, "done_before": 3, "done": 1}
    )
    assert sentence == "the last job is recorded as running"
    (sentence,) = accounting_of_job({"state": "done", "fragments": 4, "done_before": 1, "done": 1})
    assert sentence == "2 of 4 fragments are filled"

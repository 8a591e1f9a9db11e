"""Tests of the format of an index and of content keys, which identify the data of columns."""

import shutil

import lance
import pyarrow as pa
import pytest

from pipeline.config import SpecError
from pipeline.index.reader import ITEMS, IndexReader, access_errors
from pipeline.schema import FORMAT_VERSION, column_metadata, with_metadata


@pytest.fixture
def uri(index_uri, tmp_path) -> str:
    shutil.copytree(index_uri, tmp_path / "index")
    return str(tmp_path / "index")


def open_dataset(uri):
    return lance.dataset(f"{uri}/{ITEMS}")


@pytest.mark.parametrize("version", [2, FORMAT_VERSION + 1, None])
def test_index_of_another_format(tmp_path, index_uri, version):
    schema = IndexReader(index_uri).schema
    column = schema.field("hpool_4")
    changed = with_metadata(column, {**column_metadata(column), "format_version": version})
    schema = schema.set(schema.get_field_index("hpool_4"), changed)
    lance.write_dataset(schema.empty_table(), str(tmp_path / ITEMS))
    message = f"index must be an index of format {FORMAT_VERSION}, got {str(tmp_path)!r},"
    with pytest.raises(SpecError) as caught:
        IndexReader(str(tmp_path))
    assert str(caught.value) == f"{message} which has format {version}"


def test_content_key_is_stable_if_columns_do_not_change(uri):
    before = IndexReader(uri).content_key(["hpool_4", "hpool_4_assignment"])
    assert IndexReader(uri).content_key(["hpool_4", "hpool_4_assignment"]) == before
    open_dataset(uri).add_columns({"twice": "item_id"})
    open_dataset(uri).update_config({"maxray.test": "changes no row"})
    assert IndexReader(uri).version > 1
    assert IndexReader(uri).content_key(["hpool_4", "hpool_4_assignment"]) == before


def test_content_key_distinguishes_columns_of_a_file(uri):
    index = IndexReader(uri)
    assert index.content_key(["hpool_4"]) != index.content_key(["hpool_2"])
    assert index.content_key(["hpool_4", "no such column"]) == index.content_key(["hpool_4"])


def test_content_key_changes_with_rows_and_data(uri):
    keys = [IndexReader(uri).content_key(["hpool_4", "text"])]
    open_dataset(uri).delete("item_id = 'flow'")
    keys.append(IndexReader(uri).content_key(["hpool_4", "text"]))
    open_dataset(uri).delete("item_id = 'bread/1'")
    keys.append(IndexReader(uri).content_key(["hpool_4", "text"]))
    open_dataset(uri).update({"text": "'other'"}, where="item_id = 'wing/1'")
    keys.append(IndexReader(uri).content_key(["hpool_4", "text"]))
    assert len(set(keys)) == len(keys)


def test_filling_a_column_changes_only_its_content_key(uri):
    dataset = open_dataset(uri)
    dataset.add_columns(pa.field("later", pa.string()))
    empty, other = (IndexReader(uri).content_key([name]) for name in ("later", "text"))
    dataset = open_dataset(uri)
    dataset.drop_columns(["later"])
    dataset.add_columns({"later": "title"})
    assert IndexReader(uri).content_key(["later"]) != empty
    assert IndexReader(uri).content_key(["text"]) == other


def test_denied_access_to_a_storage_names_the_field():
    message = "index must be a reachable URI, .*Forbidden"
    with pytest.raises(SpecError, match=message), access_errors("s3://bucket/index"):
        raise PermissionError("Forbidden")
    with pytest.raises(PermissionError), access_errors("/index"):
        raise PermissionError("local")

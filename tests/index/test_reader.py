"""What a view of an index says of its columns without reading them."""

import shutil

import lance
import pyarrow as pa
import pytest

from pipeline.index.reader import ITEMS, Index


@pytest.fixture
def uri(index_uri, tmp_path) -> str:
    shutil.copytree(index_uri, tmp_path / "index")
    return str(tmp_path / "index")


def dataset_of(uri):
    return lance.dataset(f"{uri}/{ITEMS}")


def test_a_content_key_stays_where_the_columns_stay(uri):
    before = Index(uri).content_key(["hpool_4", "hpool_4_support"])
    assert Index(uri).content_key(["hpool_4", "hpool_4_support"]) == before
    dataset_of(uri).add_columns({"twice": "item_id"})
    dataset_of(uri).update_config({"maxray.test": "no row is touched"})
    assert Index(uri).version > 1
    assert Index(uri).content_key(["hpool_4", "hpool_4_support"]) == before


def test_a_content_key_tells_columns_of_one_file_apart(uri):
    index = Index(uri)
    assert index.content_key(["hpool_4"]) != index.content_key(["hpool_2"])
    assert index.content_key(["hpool_4", "no such column"]) == index.content_key(["hpool_4"])


def test_a_content_key_changes_with_rows_and_data(uri):
    keys = [Index(uri).content_key(["hpool_4", "text"])]
    dataset_of(uri).delete("item_id = 'flow'")
    keys.append(Index(uri).content_key(["hpool_4", "text"]))
    dataset_of(uri).delete("item_id = 'bread/1'")
    keys.append(Index(uri).content_key(["hpool_4", "text"]))
    dataset_of(uri).update({"text": "'other'"}, where="item_id = 'wing/1'")
    keys.append(Index(uri).content_key(["hpool_4", "text"]))
    assert len(set(keys)) == len(keys)


def test_a_column_that_is_filled_later_changes_its_key_alone(uri):
    dataset = dataset_of(uri)
    dataset.add_columns(pa.field("later", pa.string()))
    empty, other = (Index(uri).content_key([name]) for name in ("later", "text"))
    dataset = dataset_of(uri)
    dataset.drop_columns(["later"])
    dataset.add_columns({"later": "title"})
    assert Index(uri).content_key(["later"]) != empty
    assert Index(uri).content_key(["text"]) == other

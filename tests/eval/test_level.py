"""Level of judgments, from their ids and those of an index."""

import shutil

import lance
import pytest

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.eval.level import judged_level
from pipeline.index.reader import ITEMS, IndexReader


def detect(uri, *documents, level="auto", filter=None):
    judged = JudgedQueries({"q": "text"}, {"q": dict.fromkeys(documents, 1)}, 0, 0)
    return judged_level(IndexReader(uri), judged, level, filter)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (["wing", "bread"], "parent"),
        (["wing", "flow", "gone"], "parent"),  # flow is both an item and its parent
        (["wing/1", "bread/2"], "item"),
        (["wing/1", "flow", "gone"], "item"),
        (["flow"], "parent"),  # equivalent levels
    ],
)
def test_detects_level(index_uri, documents, expected):
    assert detect(index_uri, *documents) == expected


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["wing", "bread/1", "bread/2"], {}, "judged must be parent or item, got .*"
         "is ambiguous .of 3 judged ids, 1 are parents and 2 are items.$"),
        (["gone", "lost"], {}, "judged must be a level .*, which has none of the 2 judged ids"),
        (["wing/1"], {"filter": "parent_id = 'bread'"}, "which has none of the 1 judged ids"),
        (["wing/1", "gone"], {"level": "parent"}, "judged must be item, got 'parent', "
         "which matches no judged id .1 of the 2 judged ids are items.$"),
        (["wing"], {"level": "item"}, "judged must be parent, got 'item', .* .1 of the 1 judged"),
    ],
)  # fmt: skip
def test_errors_name_valid_level(index_uri, documents, options, message):
    with pytest.raises(SpecError, match=message) as caught:
        detect(index_uri, *documents, **options)
    assert caught.value.field == "judged"


def test_explicit_level_of_mixed_ids(index_uri):
    both = ["wing", "bread/1"]
    assert detect(index_uri, *both, level="item") == "item"
    assert detect(index_uri, *both, level="parent") == "parent"


def test_item_id_equal_to_parent_id_is_ambiguous(tmp_path, index_uri):
    uri = str(tmp_path / "index")
    shutil.copytree(index_uri, uri)
    lance.dataset(f"{uri}/{ITEMS}").update({"item_id": "'wing'"}, where="item_id = 'wing/1'")
    with pytest.raises(SpecError, match="is ambiguous .of 1 judged ids, 1 are parents and 1 are"):
        detect(uri, "wing")
    assert detect(uri, "wing", "wing/2") == "item"

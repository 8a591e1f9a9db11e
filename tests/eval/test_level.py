"""The level of judgments, from their ids and those of an index."""

import shutil

import lance
import pytest

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.eval.level import judged_level
from pipeline.index.reader import ITEMS, Index


def level(uri, *documents, asked="auto", filter=None):
    judged = JudgedQueries({"q": "text"}, {"q": dict.fromkeys(documents, 1)}, 0, 0)
    return judged_level(Index(uri), judged, asked, filter)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (["wing", "bread"], "parent"),
        (["wing", "flow", "gone"], "parent"),  # flow is a whole document: an item and its parent
        (["wing/1", "bread/2"], "item"),
        (["wing/1", "flow", "gone"], "item"),
        (["flow"], "parent"),  # both levels rank alike
    ],
)
def test_level_of_ids(index_uri, documents, expected):
    assert level(index_uri, *documents) == expected


@pytest.mark.parametrize(
    ("documents", "how", "message"),
    [
        (["wing", "bread/1", "bread/2"], {}, "judged must be parent or item, got .*"
         "is ambiguous .of 3 judged ids, 1 are parents and 2 are items.$"),
        (["gone", "lost"], {}, "judged must be a level .*, which has none of the 2 judged ids"),
        (["wing/1"], {"filter": "parent_id = 'bread'"}, "which has none of the 1 judged ids"),
        (["wing/1", "gone"], {"asked": "parent"}, "judged must be item, got 'parent', "
         "which matches no judged id .1 of the 2 judged ids are items.$"),
        (["wing"], {"asked": "item"}, "judged must be parent, got 'item', .* .1 of the 1 judged"),
    ],
)  # fmt: skip
def test_refused_with_the_option_to_use(index_uri, documents, how, message):
    with pytest.raises(SpecError, match=message) as caught:
        level(index_uri, *documents, **how)
    assert caught.value.field == "judged"


def test_what_is_asked_for_holds_where_ids_are_of_both(index_uri):
    both = ["wing", "bread/1"]
    assert level(index_uri, *both, asked="item") == "item"
    assert level(index_uri, *both, asked="parent") == "parent"


def test_an_item_named_as_a_parent_of_several_is_ambiguous(tmp_path, index_uri):
    uri = str(tmp_path / "index")
    shutil.copytree(index_uri, uri)
    lance.dataset(f"{uri}/{ITEMS}").update({"item_id": "'wing'"}, where="item_id = 'wing/1'")
    with pytest.raises(SpecError, match="is ambiguous .of 1 judged ids, 1 are parents and 1 are"):
        level(uri, "wing")
    assert level(uri, "wing", "wing/2") == "item"

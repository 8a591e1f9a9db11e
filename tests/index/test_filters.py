"""Filters: what passes, and where one that does not is wrong."""

import shutil

import lance
import pyarrow as pa
import pytest

from pipeline.config import SpecError
from pipeline.index.filters import LEGAL, check_filter, filterable, filtering
from pipeline.index.reader import ITEMS, Index

COLUMNS = (
    "item_id, parent_id, source, modality, span.unit, span.start, span.end, title, text, caption, "
    "revision, metadata"
)


@pytest.fixture(scope="module")
def index(index_uri) -> Index:
    return Index(index_uri)


def sentence(index: Index, where) -> str:
    """What is said against a filter."""
    with pytest.raises(SpecError) as caught:
        check_filter(index, where)
    return str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        "parent_id = 'heat'",
        "(parent_id = 'heat') OR (item_id = 'it''s')",
        "NOT modality = 'text' AND length(text) > 3",
        "`item_id` IN ('a', 'b)', '--', '?') OR text LIKE '%$;%'",
        'item_id = "a\'b"',
        'modality = "text" AND item_id = "title"',
        "span.start::int >= -1 OR span.unit IS NULL",
        "cast(span.start AS int) BETWEEN 1 AND 2",
        "hpool_2 IS NOT NULL",
        "true",
        "title = 'naïve ☃'\n",
    ],
)
def test_filters_that_pass(index, where):
    check_filter(index, where)


@pytest.mark.parametrize(
    ("where", "at", "there"),
    [
        ("parent_id = 'heat' item_id = 'b'", "near 'item_id', character 20", "AND, OR or the end"),
        ("item_id = 'a') OR (item_id = 'b'", "near ')', character 14", "AND, OR or the end"),
        ("item_id = 'a' OR", "at its end", "an expression"),
        ("item_id = 'a' OR (source = 'b'", "at its end", "a closing bracket"),
        ("(source = 'b' 'c')", "near \"'c'\", character 15", "a closing bracket"),
        ("item_id IN ('a', )", "near ')', character 18", "an expression"),
        ("text = 'x' AND item_id BETWEEN 'a' 'x'", "near \"'x'\", character 36", "AND"),
        ("item_id = 'x' x x", "near 'x', character 15", "AND, OR or the end"),
        ("source = 'é' AND\n item_id ! 3", "near '!', character 27", "No infix parser for token"),
        ("item_id = 'a", 'near "\'", character 11', "another ' behind it"),
        ("item_id = 'a'; DROP TABLE items", "near ';', character 14", "AND, OR or the end"),
        ("DELETE FROM items", "near 'FROM', character 8", "AND, OR or the end"),
        ("item_id = '' OR 1=1; --", "near '--', character 22", "neither comments"),
        ("item_id = 'a' -- all", "near '--', character 15", "neither comments"),
        ("item_id = 'a' /* ) */", "near '/*', character 15", "neither comments"),
        ("item_id = $1", "near '$', character 11", "parameters"),
        ("item_id = :name", "near ':', character 11", "parameters"),
        ("item_id = N'x'", "near 'N', character 11", "prefixes of strings"),
        ("true AND \"Item_id\" = 'a'", "near '\"Item_id\"', character 10", "`item_id` for the col"),
        ('"title" IS NULL', "near '\"title\"', character 1", "`title` for the column, 'title' "),
    ],
)
def test_where_a_filter_does_not_parse(index, where, at, there):
    said = sentence(index, where)
    assert said.startswith(f"where: {where!r} does not parse {at}; legal: {LEGAL} (there: ")
    assert there in said.rpartition("(there: ")[2]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("colour = 'red'", "'colour', character 1"),
        ("item_id = 'colour' AND Colour > 3", "'colour', character 24"),
        ("`no. Valid` = 1", "'no. Valid', character 1"),
        ("span.page = 1", "'page', character 6"),
        ("no such column = 1", None),
    ],
)
def test_unknown_columns(index, where, name):
    said = sentence(index, where)
    if name is None:  # it is no condition before it is one of an unknown column
        assert "does not parse near 'such', character 4" in said
    else:
        assert said.lower() == (
            f"where: {where!r} names an unknown column, {name}; legal: {COLUMNS}".lower()
        )


def test_conditions_alone_are_filters(index):
    for where in ("item_id", "length(text)", "'text'", "span.start + 1"):
        said = sentence(index, where)
        assert said == f"where: {where!r} is neither true nor false of an item; legal: {LEGAL}"
    for where in ("", " \n", 3):
        assert sentence(index, where) == f"where: {where!r} is not legal; legal: {LEGAL}"


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("item_id = 3", "could not convert to literal of type 'Utf8'"),
        ("unknown(item_id)", "Invalid function 'unknown'"),
        ("item_id IN (SELECT item_id FROM items)", "is not supported SQL"),
        ("regexp_like(text, '(')", "regex parse error"),
        ("item_id = '\ud800'", "surrogates not allowed"),
    ],
)
def test_conditions_that_cannot_be(index, where, why):
    said = sentence(index, where)
    assert said.startswith(f"where: {where!r} cannot be worked out; legal: {LEGAL} (")
    assert why in said and ".rs" not in said


def test_a_filter_that_fails_on_an_item(index):
    where = "cast(item_id AS int) = 1"
    check_filter(index, where)
    for read in (index.dataset.count_rows, lambda where: index.dataset.to_table(filter=where)):
        sentence = "^where: .* cannot be worked out; .*Cannot cast string"
        with pytest.raises(SpecError, match=sentence), filtering(index, where):
            read(where)


def test_damaged_files_are_not_the_fault_of_the_filter(index_uri, tmp_path):
    shutil.copytree(index_uri, tmp_path / "index")
    index = Index(str(tmp_path / "index"))
    for file in (tmp_path / "index" / ITEMS / "data").iterdir():
        file.unlink()
    where = "parent_id = 'flow'"
    with pytest.raises(SpecError, match="^index: .* is damaged"), filtering(index, where):
        index.dataset.to_table(filter=where)


def test_no_filter_writes(index_uri, index):
    """Whatever a filter holds, the index is as it was."""
    before = lance.dataset(f"{index_uri}/{ITEMS}")
    rows, version = before.to_table(columns=["item_id"]), before.version
    for where in (
        "item_id = 'flow'; DELETE FROM items",
        "DELETE FROM items WHERE item_id = 'flow'",
        "item_id = 'flow' OR (DELETE FROM items)",
        "item_id IN (DELETE FROM items)",
        "DROP TABLE items",
        "UPDATE items SET item_id = 'x'",
    ):
        sentence(index, where)
    after = lance.dataset(f"{index_uri}/{ITEMS}")
    assert after.version == version and after.to_table(columns=["item_id"]).equals(rows)


def test_filterable_columns_hold_no_vectors(index):
    assert ", ".join(filterable(index.schema)) == COLUMNS
    own = pa.field("tags", pa.list_(pa.string()))
    assert ", ".join(filterable(index.schema.append(own))) == COLUMNS


def test_a_long_filter_is_looked_at_quickly(index):
    ids = ", ".join(f"'{number}'" for number in range(20_000))
    check_filter(index, f"item_id IN ({ids})")
    assert "does not parse near 'xyz'" in sentence(index, f"item_id IN ({ids}) xyz")

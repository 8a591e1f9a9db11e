"""Tests of filters: accepted conditions, and error messages of invalid ones."""

import contextlib
import datetime
import random
import shutil
import timeit

import lance
import pyarrow as pa
import pytest

from pipeline.config import SpecError
from pipeline.index.conditions import MAX_DEPTH, condition_sql
from pipeline.index.filters import FILTER_RULE, check_filter, filterable, filtering
from pipeline.index.reader import ITEMS, IndexReader

COLUMNS = (
    "item_id, parent_id, source, modality, span.unit, span.start, span.end, title, text, caption, "
    "revision, metadata"
)


@pytest.fixture(scope="module")
def index(index_uri) -> IndexReader:
    return IndexReader(index_uri)


def error_message(index: IndexReader, filter) -> str:
    """Returns the error message of an invalid filter."""
    with pytest.raises(SpecError) as error:
        check_filter(index, filter)
    return str(error.value)


@pytest.mark.parametrize(
    "filter",
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
def test_valid_filters(index, filter):
    check_filter(index, filter)


@pytest.mark.parametrize(
    ("filter", "location", "expected"),
    [
        (
            "parent_id = 'heat' item_id = 'b'",
            "near 'item_id' at character 20",
            "AND, OR or the end",
        ),
        ("item_id = 'a') OR (item_id = 'b'", "near ')' at character 14", "AND, OR or the end"),
        ("item_id = 'a' OR", "at its end", "an expression"),
        ("item_id = 'a' OR (source = 'b'", "at its end", "a closing bracket"),
        ("(source = 'b' 'c')", "near \"'c'\" at character 15", "a closing bracket"),
        ("item_id IN ('a', )", "near ')' at character 18", "a value"),
        ("text = 'x' AND item_id BETWEEN 'a' 'x'", "near \"'x'\" at character 36", "AND"),
        ("item_id = 'x' x x", "near 'x' at character 15", "AND, OR or the end"),
        ("source = 'é' AND\n item_id ! 3", "near '!' at character 27", "AND, OR or the end"),
        ("item_id = 'a", 'near "\'" at character 11', "a closing '"),
        ("item_id = 'a'; DROP TABLE items", "near ';' at character 14", "AND, OR or the end"),
        ("DELETE FROM items", "near 'FROM' at character 8", "AND, OR or the end"),
        ("item_id = '' OR 1=1; --", "near '--' at character 22", "no comments, "),
        ("item_id = 'a' -- all", "near '--' at character 15", "no comments, "),
        ("item_id = 'a' /* ) */", "near '/*' at character 15", "no comments, "),
        ("item_id = $1", "near '$' at character 11", "no comments, parameters"),
        ("item_id = :name", "near ':' at character 11", "no comments, parameters"),
        ("item_id = N'x'", "near 'N' at character 11", "no comments, parameters or string"),
        (
            "true AND \"Item_id\" = 'a'",
            "near '\"Item_id\"' at character 10",
            "`item_id` for the col",
        ),
        (
            '"title" IS NULL',
            "near '\"title\"' at character 1",
            "`title` for the column or 'title' ",
        ),
    ],
)
def test_parse_error_location(index, filter, location, expected):
    message = error_message(index, filter)
    problem = f"does not parse {location} (expected "
    start = f"filter must be {FILTER_RULE}, got {filter!r}, which {problem}"
    assert message.startswith(start)
    assert message.removeprefix(start).startswith(expected)


@pytest.mark.parametrize(
    ("filter", "name"),
    [
        ("colour = 'red'", "'colour' at character 1"),
        ("item_id = 'colour' AND Colour > 3", "'colour' at character 24"),
        ("`no. Valid` = 1", "'no. Valid' at character 1"),
        ("span.page = 1", "'page' at character 6"),
        ("Span.start = 1 AND span.Start = 1", "'Start' at character 25"),
        ("no such column = 1", None),
    ],
)
def test_unknown_columns(index, filter, name):
    message = error_message(index, filter)
    if name is None:  # parse errors take precedence
        assert "does not parse near 'such' at character 4" in message
    else:
        rule, problem = f"a condition on {COLUMNS}", f"names the unknown column {name}"
        expected = f"filter must be {rule}, got {filter!r}, which {problem}"
        assert message.lower().partition("; did you mean")[0] == expected.lower()


def test_unknown_column_suggests_the_closest_name(index):
    assert error_message(index, "item_ids = 'a'").endswith("; did you mean 'item_id'?")


def test_expressions_must_be_boolean(index):
    for filter in ("item_id", "length(text)", "'text'", "span.start + 1"):
        message = error_message(index, filter)
        assert message == (
            f"filter must be {FILTER_RULE}, got {filter!r},"
            " which does not evaluate to true or false"
        )
    for filter in ("", " \n", 3):
        assert error_message(index, filter) == f"filter must be {FILTER_RULE}, got {filter!r}"


@pytest.mark.parametrize(
    ("filter", "reason"),
    [
        ("item_id = 3", "could not convert to literal of type 'Utf8'"),
        ("lower(item_id, title) = 'a'", "expects 1 arguments"),
        ("item_id = '\ud800'", "surrogates not allowed"),
    ],
)
def test_conditions_that_lance_cannot_plan(index, filter, reason):
    message = error_message(index, filter)
    assert message.startswith(
        f"filter must be {FILTER_RULE}, got {filter!r}, which cannot be evaluated ("
    )
    assert reason in message and ".rs" not in message


def test_filter_that_fails_on_an_item(index):
    filter = "cast(item_id AS int) = 1"
    check_filter(index, filter)
    for read in (index.dataset.count_rows, lambda filter: index.dataset.to_table(filter=filter)):
        message = (
            "^filter must be an SQL .*, got 'cast.*, which cannot be evaluated .*Cannot cast str"
        )
        with pytest.raises(SpecError, match=message), filtering(index, filter):
            read(filter)


def test_corrupted_files_are_not_reported_as_filter_errors(index_uri, tmp_path):
    shutil.copytree(index_uri, tmp_path / "index")
    index = IndexReader(str(tmp_path / "index"))
    for file in (tmp_path / "index" / ITEMS / "data").iterdir():
        file.unlink()
    filter = "parent_id = 'flow'"
    with (
        pytest.raises(
            SpecError, match="^index must be an intact index, got .*, which is corrupted"
        ),
        filtering(index, filter),
    ):
        index.dataset.to_table(filter=filter)


def test_filters_cannot_write(index_uri, index):
    before = lance.dataset(f"{index_uri}/{ITEMS}")
    rows, version = before.to_table(columns=["item_id"]), before.version
    for filter in (
        "item_id = 'flow'; DELETE FROM items",
        "DELETE FROM items WHERE item_id = 'flow'",
        "item_id = 'flow' OR (DELETE FROM items)",
        "item_id IN (DELETE FROM items)",
        "DROP TABLE items",
        "UPDATE items SET item_id = 'x'",
    ):
        error_message(index, filter)
    after = lance.dataset(f"{index_uri}/{ITEMS}")
    assert after.version == version and after.to_table(columns=["item_id"]).equals(rows)


def test_filterable_columns_exclude_lists_and_vectors(index):
    assert ", ".join(filterable(index.schema)) == COLUMNS
    tags = pa.field("tags", pa.list_(pa.string()))
    assert ", ".join(filterable(index.schema.append(tags))) == COLUMNS


def test_long_filters_are_parsed_quickly(index):
    ids = ", ".join(f"'{number}'" for number in range(20_000))
    check_filter(index, f"item_id IN ({ids})")
    assert "does not parse near 'xyz'" in error_message(index, f"item_id IN ({ids}) xyz")
    filter = "modality = 'text' AND title IS NOT NULL AND span.start > 3"
    seconds = timeit.repeat(lambda: condition_sql(filter, index.schema), number=1, repeat=20)
    assert min(seconds) < 0.005


#: Short filters that would take gigabytes or minutes, or crash the process.
EXPENSIVE = [
    "repeat(text, 1000000) = 'x'",
    "`repeat`(text, 1000000) = 'x'",
    "\"repeat\"(text, 1000000) = 'x'",
    "`REPEAT` (text, 1000000) = 'x'",
    "re\u200bpeat(text, 9) = 'x'",
    "ｒｅｐｅａｔ(text, 9) = 'x'",
    "replace(text, '', repeat('x', 999)) = 'x'",
    "regexp_replace(text, '', 'xxxxxxxxxx', 'g') = 'x'",
    "lpad(text, 1000000000, 'x') = 'x'",
    "rpad(text, 1000000000, 'x') = 'x'",
    "array_length(range(0, 1000000000)) > 1",
    "array_length(generate_series(1, 1000000000)) > 1",
    "array_length(array_repeat(text, 1000000)) > 1",
    "array_length(array_resize([1], 1000000000, 1)) > 1",
    "array_has(array_repeat(text, 1000000), 'x')",
    "array_has([text, text, text], 'x')",
    "translate(text, 'a', 'b') = 'x'",
    "concat(text, text) = 'x'",
    "concat_ws(text, text, text) = 'x'",
    "text || text = 'x'",
    "array_to_string([text], text) = 'x'",
    "string_to_array(text, '') IS NULL",
    "regexp_like(text, '(a{1000}){1000}')",
    "text ~ '(a{1000}){1000}'",
    "text LIKE text",
    "text LIKE lower(text)",
    "text LIKE '" + "%a" * 200 + "'",
    "text LIKE '" + "a" * 5_000 + "'",
    "cast(hpool_2 AS string) = 'x'",
    "hpool_2 = hpool_2",
    "array_length(hpool_2) > 1",
    "item_id IN (SELECT item_id FROM items)",
    "item_id IN (lower(text), lower(text))",
    "EXISTS (SELECT 1)",
    "CASE WHEN true THEN true END",
    "INTERVAL '1 day' IS NULL",
    "- " * 300 + "1 = 1",
    "NOT " * 300 + "true",
    "(" * 25 + "true" + ")" * 25,
    "NOT (" * 45 + "true" + ")" * 45,
    "lower(" * 50 + "text" + ")" * 50 + " = 'a'",
    "1" + "+1" * 4_900 + "=1",
    "coalesce(" + ", ".join(["lower(text)"] * 450) + ") = 'a'",
    "text = 'a' = 'b'",
    r"text = '\' OR repeat('x', 9) = '",
    r'text = "\" OR repeat("x", 9) = "',
    "text = '''' OR repeat('x', 9) = ''",
    "text /* */ = 'x'",
    "text = 'x' # y",
    "1_000 = 1",
    "1e99999 = 1",
]


@pytest.mark.parametrize("filter", EXPENSIVE, ids=range(len(EXPENSIVE)))
def test_rejects_expensive_filters(index, filter):
    """They are rejected before Lance plans them, because its planner evaluates constants."""
    with pytest.raises(SpecError, match="^filter must be "):
        condition_sql(filter, index.schema)


TOKENS = (
    *("item_id", "`text`", '"title"', "span.start", "span", "hpool_2", "'a'", '"b"', "1", "2.5"),
    *("=", "<>", "<", "||", "::", "int", "string", "AND", "OR", "NOT", "IS", "NULL", "IN", "LIKE"),
    *("BETWEEN", "(", ")", "[", "]", ",", "+", "-", "*", "/", "lower(", "coalesce(", "`repeat`("),
    *("array_has(", "CAST(", "AS", "DATE", "'2020-01-01'", "true", ".", "--", "/*", "é", "\u200b"),
    *("a.b", "SELECT", "FROM", "CASE", ";", "$1", "?", "x'0'", "`", "'", "DISTINCT", "%", "'%a'"),
)
VALUES = (
    *("item_id", "`text`", "Title", "span.start", "'a%'", '"it\'s"', "1", "-2.5", "lower(text)"),
    *("(span.start + 1)", "CAST(span.start AS int)", "coalesce(title, 'x')", "NULL", "1::double"),
)
PREDICATES = (
    *("{} = {}", "{} < {} * 2", "{} IN ('a', 'b')", "{} LIKE '%a_'", "{} IS NOT NULL"),
    *("NOT {} = {}", "{} BETWEEN {} AND {}", "{} IS DISTINCT FROM {}", "({} = {}) = ({} >= {})"),
)
COMBINATIONS = ("{} AND {}", "({}) OR NOT ({})", "{} OR {}")


def test_lance_parses_all_accepted_filters(index):
    """Random filters raise only `SpecError`, and never because Lance cannot parse them."""
    rng = random.Random(7)
    for _ in range(3_000):
        with contextlib.suppress(SpecError):
            check_filter(index, " ".join(rng.choices(TOKENS, k=rng.randint(1, 9))))
    num_passed = 0
    for _ in range(500):
        filter = "item_id = 'a'"
        for _ in range(rng.randint(1, 4)):
            predicate = rng.choice(PREDICATES)
            predicate = predicate.format(*rng.choices(VALUES, k=predicate.count("{}")))
            filter = rng.choice(COMBINATIONS).format(filter, predicate)
        try:
            check_filter(index, filter)
            num_passed += 1
        except SpecError as error:
            assert "cannot be evaluated" in str(error), filter
            assert "sql parser error" not in str(error), filter
    assert num_passed > 50


def test_maximum_bracket_depth(index):
    for opening in ("(", "NOT (", "true OR ("):
        check_filter(index, opening * MAX_DEPTH + "true" + ")" * MAX_DEPTH)
    check_filter(index, "lower(" * MAX_DEPTH + "text" + ")" * MAX_DEPTH + " = 'a'")


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> lance.LanceDataset:
    """A dataset with a column of each comparable type."""
    inner = pa.struct([("inner", pa.struct([("x", pa.int64())]))])
    span = pa.struct([("unit", pa.string()), ("start", pa.float64())])
    rows = {
        "item_id": ["a", "b"],
        "Num": [1, 2],
        "a b": [1, 2],
        "flag": [True, False],
        "tags": [["x", "y"], None],
        "day": pa.array([datetime.date(2020, 1, 1)] * 2),
        "at": pa.array([datetime.datetime(2020, 1, 1)] * 2, pa.timestamp("us")),
        "span": pa.array([{"unit": "s", "start": 1.5}, None], span),
        "deep": pa.array([{"inner": {"x": 1}}, None], inner),
    }
    return lance.write_dataset(pa.table(rows), tmp_path_factory.mktemp("typed") / "typed.lance")


@pytest.mark.parametrize(
    ("filter", "number"),
    [
        ("Num > 1 OR `a b` = 1", 2),
        ("(Num + 1) * 2 = 4 AND flag", 1),
        ("array_has(tags, 'x')", 1),
        ("array_has_any(tags, ['x', 'z']) AND array_length(tags) > 1", 1),
        ("day < date '2021-01-01' AND at >= timestamp '2020-01-01 00:00:00'", 2),
        ("date_part('year', at) = 2020 AND at > CAST('2019-01-01' AS timestamp)", 2),
        ("span.unit = 's' AND span.start::int = 1 AND deep.inner.x = 1", 1),
        ("span IS NULL OR tags IS NOT NULL", 2),
        ("flag IS NOT TRUE", 1),
        ("item_id ILIKE 'A%' AND item_id NOT LIKE 'b%'", 1),
        ("Num NOT BETWEEN 2 AND 3 AND Num IS DISTINCT FROM 2", 1),
        ("item_id = \"it's\" OR item_id = 'it''s' OR item_id = 'a'", 1),
    ],
)
def test_filters_on_all_types(typed, filter, number):
    sql = condition_sql(filter, typed.schema)
    assert typed.count_rows(sql) == typed.count_rows(filter) == number

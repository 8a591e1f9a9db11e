"""The grammar of filters, and the SQL of a condition that Lance executes.

A condition is parsed here and written anew from what was recognised: what is checked is what Lance
executes, and what this grammar does not know cannot get through. It knows the part of SQL that
Lance's planner takes, without what can turn a short filter into gigabytes or hours: concatenation,
regular expressions, patterns out of columns, and functions whose values are longer than their
arguments. Lance's planner evaluates constants and recurses, so that a filter must be bounded before
Lance sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
from pyarrow import types

from pipeline.config import SpecError, close_match
from pipeline.index.reader import quote
from pipeline.schema import column_metadata

FILTER_RULE = "a condition in SQL over the items' columns, such as modality = 'text'"

#: Lance evaluates a chain of operators by recursion, and a long one would end the process.
MAX_OPERATORS = 400
#: Lance's parser takes exponential time to refuse more than about 24 nested brackets.
MAX_DEPTH = 20
#: Values in lists, of one filter.
MAX_VALUES = 50_000
MAX_LITERAL_CHARS = 4_096
#: Maximum number of % in a LIKE pattern: each adds work per character of a text.
MAX_WILDCARDS = 16

#: Functions that return at most about the size of their arguments.
FUNCTIONS = (
    *("abs", "btrim", "char_length", "coalesce", "contains", "date_part", "date_trunc"),
    *("ends_with", "left", "length", "lower", "ltrim", "nullif", "octet_length", "right"),
    *("round", "rtrim", "starts_with", "strpos", "upper"),
)
LIST_FUNCTIONS = (
    *("array_contains", "array_has", "array_has_all", "array_has_any", "array_length"),
    *("cardinality", "list_contains"),
)
TYPES = (
    *("bigint", "boolean", "date", "double", "float", "int", "integer", "smallint", "string"),
    *("timestamp", "tinyint"),
)
COMPARISONS = ("=", "==", "<>", "!=", "<", "<=", ">", ">=")
KEYWORDS = frozenset(
    (
        *("AND", "AS", "BETWEEN", "DISTINCT", "FALSE", "FROM", "ILIKE", "IN", "IS", "LIKE"),
        *("NOT", "NULL", "OR", "TRUE"),
    )
)

_WORDS = re.compile(
    r"""
    (?P<refused> -- | /\* | [$?] | (?<!:):(?!:) | \b[A-Za-z](?=['"]) )
  | '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*`
  | (?P<open_ended> ['"`] )
  | [^\W\d]\w* | [0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?\w* | :: | [<>!=|&]+ | \S
    """,
    re.VERBOSE,
)
_NUMBER = re.compile(r"[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?")
_NAME = re.compile(r"[^\W\d]\w*")


class _Word(NamedTuple):
    """A word, string or sign of a filter; `depth` brackets are open before it."""

    text: str
    start: int
    depth: int

    @property
    def key(self) -> str:
        """The text by which keywords and signs are compared."""
        return self.text.upper()


def condition_sql(filter: str, schema: pa.Schema) -> str:
    r"""Returns the SQL of a filter over the columns of a schema.

    >>> condition_sql('Title = "it\'s" AND (n+1)::int<3', pa.schema({"title": "str", "n": "i8"}))
    "`title` = 'it''s' AND ( `n` + 1 ) :: int < 3"

    Raises:
        SpecError: For `filter`: it does not parse; it names an unknown column or
            function; it is longer or deeper than a filter may be.
    """
    return _Parser(filter, schema).sql()


class _Parser:
    """Recognises a condition by recursive descent; `_out` is the SQL of what it has recognised."""

    def __init__(self, filter: str, schema: pa.Schema):
        self._filter, self._schema = filter, schema
        self._words = list(_split_words(filter))
        self._next = 0
        self._out: list[str] = []
        self._num_operators = self._num_values = 0
        # Raised last: in a filter that does not parse, words may not be columns at all.
        self._unknown: SpecError | None = None

    def sql(self) -> str:
        self._condition()
        if self._word is not None:
            raise self._expected("AND, OR or the end")
        if self._unknown is not None:
            raise self._unknown
        return " ".join(self._out)

    # -- words -------------------------------------------------------------------------------

    @property
    def _word(self) -> _Word | None:
        return self._words[self._next] if self._next < len(self._words) else None

    def _sees(self, *keys: str) -> bool:
        return self._word is not None and self._word.key in keys

    def _take(self, *keys: str) -> bool:
        """Takes the next word over into the SQL if it is one of these."""
        word = self._word
        if word is None or word.key not in keys:
            return False
        self._emit(word.key)
        return True

    def _emit(self, sql: str) -> None:
        self._out.append(sql)
        self._next += 1

    def _need(self, key: str, expected: str = "") -> None:
        if not self._take(key):
            raise self._expected(expected or key)

    def _close(self) -> None:
        self._need(")", "a closing bracket")

    def _expected(self, expected: str) -> SpecError:
        word = self._word
        if expected.startswith("AND, OR") and word is not None and word.depth:
            expected = "a closing bracket"
        return _unparsed(self._filter, word, expected)

    def _operator(self) -> None:
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            rule = f"a filter of at most {MAX_OPERATORS} operators (for many values use IN)"
            raise _too_long(self._filter, rule)

    # -- conditions --------------------------------------------------------------------------

    def _condition(self) -> None:
        """Predicates between AND and OR."""
        while True:
            if self._take("NOT"):
                self._operator()
            self._predicate()
            if not self._take("AND", "OR"):
                return
            self._operator()

    def _predicate(self) -> None:
        """A value, or what is true or false of one."""
        first = self._next
        self._sum(any_column=self._is_tested_for_null())
        if not self._sees(*COMPARISONS, "IS", "NOT", "IN", "LIKE", "ILIKE", "BETWEEN"):
            return
        self._check_quotes(first)
        self._operator()
        if self._take(*COMPARISONS):
            self._sum()
        elif self._take("IS"):
            self._take("NOT")
            if self._take("DISTINCT"):
                self._need("FROM")
                self._sum()
            elif not self._take("NULL", "TRUE", "FALSE"):
                raise self._expected("NULL, TRUE, FALSE or DISTINCT FROM")
        else:
            self._take("NOT")
            if self._take("IN"):
                self._need("(", "an opening bracket")
                self._literals()
                self._close()
            elif self._take("LIKE", "ILIKE"):
                self._pattern()
            else:
                self._need("BETWEEN", "IN, LIKE, ILIKE or BETWEEN")
                self._sum()
                self._need("AND")
                self._sum()

    def _is_tested_for_null(self) -> bool:
        """Returns True if the next words test a column for NULL."""
        at = self._behind_path()
        keys = [word.key for word in self._words[at : at + 3]]
        return keys[:2] == ["IS", "NULL"] or keys == ["IS", "NOT", "NULL"]

    def _check_quotes(self, first: int) -> None:
        """Raises `SpecError` if a column stands in double quotes, which Lance takes for a text.

        In other SQL it is the column; here its name would match nothing in silence.
        """
        word = self._words[first]
        name = word.text[1:-1].lower()
        is_alone = self._next == first + 1
        if is_alone and word.text[0] == '"' and name in set(filterable(self._schema)):
            raise _unparsed(self._filter, word, f"`{name}` for the column, '{name}' for a text")

    def _pattern(self) -> None:
        """Takes a literal pattern: one out of a column would be compiled for every item."""
        word = self._word
        if word is None or word.text[0] not in "'\"":
            raise self._expected("a pattern in quotes")
        if word.text.count("%") > MAX_WILDCARDS:
            raise self._expected(f"a pattern with at most {MAX_WILDCARDS} times %")
        self._literal()

    # -- values ------------------------------------------------------------------------------

    def _sum(self, any_column: bool = False) -> None:
        """A value, or values between signs of arithmetic; precedence is Lance's."""
        while True:
            if self._take("+", "-"):
                self._operator()
            self._value(any_column)
            while self._take("::"):
                self._operator()
                self._type()
            if not self._take("+", "-", "*", "/", "%"):
                return
            self._operator()

    def _value(self, any_column: bool = False) -> None:
        word = self._word
        if self._take("("):
            self._condition()
            self._close()
        elif self._is_literal():
            self._literal()
        elif word is None or word.key in KEYWORDS:
            raise self._expected("an expression")
        elif self._following() == "(" and word.key == "CAST":
            self._cast()
        elif self._following() == "(" and _NAME.fullmatch(word.text):
            self._call(word)
        else:
            self._column(any_column)

    def _following(self) -> str:
        return self._words[self._next + 1].text if self._next + 1 < len(self._words) else ""

    def _is_literal(self) -> bool:
        word = self._word
        if word is None:
            return False
        has_type = word.key in ("DATE", "TIMESTAMP") and self._following()[:1] == "'"
        is_constant = word.key in ("NULL", "TRUE", "FALSE")
        return has_type or is_constant or word.text[0] in "'\"" or word.text[0].isdigit()

    def _literal(self) -> None:
        word = self._word
        if word is None or not self._is_literal():
            raise self._expected("a value")
        if len(word.text) > MAX_LITERAL_CHARS:
            raise _too_long(
                self._filter, f"a filter with strings of at most {MAX_LITERAL_CHARS:,} characters"
            )
        mark = word.text[0]
        if mark in "'\"":
            self._emit(quote(word.text[1:-1].replace(mark * 2, mark)))
        elif self._take("DATE", "TIMESTAMP"):
            self._literal()
        elif not self._take("NULL", "TRUE", "FALSE"):
            if not _NUMBER.fullmatch(word.text):
                raise self._expected("a value")
            self._emit(word.text)

    def _literals(self) -> None:
        """One or more values between commas; columns would be read again for each of them."""
        while True:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise _too_long(
                    self._filter, f"a filter with at most {MAX_VALUES:,} values in lists"
                )
            self._take("-")
            self._literal()
            if not self._take(","):
                return

    def _cast(self) -> None:
        self._operator()
        self._emit("CAST")
        self._need("(")
        self._condition()
        self._need("AS")
        self._type()
        self._close()

    def _type(self) -> None:
        word = self._word
        if word is None or word.text.lower() not in TYPES:
            raise self._expected(f"one of the types {', '.join(TYPES)}")
        self._emit(word.text.lower())

    def _call(self, word: _Word) -> None:
        """A function, named by `word`, and its arguments; only functions of lists take lists."""
        name = word.text.lower()
        if name not in FUNCTIONS + LIST_FUNCTIONS:
            names = FUNCTIONS + LIST_FUNCTIONS
            rule = f"a filter with the functions {', '.join(names)}"
            problem = f"calls the unknown function {word.text!r} at character {word.start + 1}"
            note = close_match(name, names)
            raise SpecError("filter", self._filter, rule, problem, note)
        self._operator()
        self._emit(name)
        self._need("(")
        if self._take(")"):
            return
        while True:
            if name in LIST_FUNCTIONS and self._take("["):
                self._literals()
                self._need("]", "a closing bracket")
            elif name in LIST_FUNCTIONS and self._is_column():
                self._column(any_column=False, lists=True)
            else:
                self._condition()
            if not self._take(","):
                break
        self._close()

    def _is_column(self) -> bool:
        """Returns True if the next argument is only a column."""
        following = self._behind_path()
        is_name = self._word is not None and _is_name(self._word)
        return is_name and following < len(self._words) and self._words[following].text in ",)"

    def _behind_path(self) -> int:
        """The number of the word behind a path of names that begins here."""
        at = self._next + 1
        while at + 1 < len(self._words) and self._words[at].text == ".":
            at += 2
        return at

    def _column(self, any_column: bool, lists: bool = False) -> None:
        """A column, or a field of a struct."""
        path = [self._name()]
        while self._sees("."):
            self._next += 1
            path.append(self._name())
        field, names = _field_at(self._schema, path)
        self._out.append(".".join(f"`{name}`" for name in names))
        if field is not None and (any_column or _is_comparable(field, lists)):
            return
        place = f"{names[-1]!r} at character {path[len(names) - 1].start + 1}"
        problem = f"names the unknown column {place}"
        if field is not None:
            problem = f"compares a column that can only be tested for NULL, {place}"
        columns = filterable(self._schema)
        rule = f"a filter on {', '.join(columns)}"
        note = close_match(names[-1], columns) if field is None else ""
        self._unknown = self._unknown or SpecError("filter", self._filter, rule, problem, note)

    def _name(self) -> _Word:
        word = self._word
        if word is None or not _is_name(word):
            raise self._expected("an expression")
        self._next += 1
        return word


def _split_words(filter: str) -> Iterator[_Word]:
    """The words, strings and signs of a filter.

    Raises:
        SpecError: a string that does not end, a bracket that closes none, brackets that are nested
            too deeply, or what no filter has: comments, parameters and strings with a prefix.
    """
    depth = 0
    for match in _WORDS.finditer(filter):
        word = _Word(match[0], match.start(), depth)
        if match["open_ended"]:
            raise _unparsed(filter, word, f"another {word.text} after it")
        if match["refused"]:
            raise _unparsed(filter, word, "no comments, parameters or string prefixes")
        if word.text == ")" and not depth:
            raise _unparsed(filter, word, "AND, OR or the end")
        yield word
        depth += (word.text in "([") - (word.text in ")]")
        if depth > MAX_DEPTH:
            raise _too_long(filter, f"a filter with brackets nested at most {MAX_DEPTH} deep")


def _unparsed(filter: str, word: _Word | None, expected: str) -> SpecError:
    """The error of a filter that goes wrong at a word; None for its end."""
    at = f"near {word.text!r} at character {word.start + 1}" if word else "at its end"
    return SpecError("filter", filter, FILTER_RULE, f"does not parse {at} (expected {expected})")


def _too_long(filter: str, rule: str) -> SpecError:
    """The error of a filter that is beyond a limit."""
    return SpecError("filter", f"{filter[:60]}...", rule, "is too long")


def _field_at(schema: pa.Schema, path: list[_Word]) -> tuple[pa.Field | None, list[str]]:
    """The field that a path of names means, and the names of it as the schema has them.

    Lance finds a column whatever its case if it is not in backticks, a struct's field in its own.
    """
    fields, names, field = list(schema), [], None
    for depth, word in enumerate(path):
        name = word.text.strip("`")
        same = [f for f in fields if f.name == name]
        if not same and depth == 0 and word.text[0] != "`":
            same = [f for f in fields if f.name.lower() == name.lower()]
        field = same[0] if same else None
        names.append(field.name if field else name)
        if field is None:
            break
        fields = list(field.type) if types.is_struct(field.type) else []
    return field, names


def _is_comparable(field: pa.Field, lists: bool) -> bool:
    """Returns True for a column of one value, or with `lists` of a list of them, per item."""
    type = field.type
    if lists and types.is_list(type):
        type = type.value_type
    is_large = types.is_nested(type) or types.is_binary(type) or types.is_large_binary(type)
    return not is_large and not column_metadata(field)


def _is_name(word: _Word) -> bool:
    return word.text[0] == "`" or _NAME.fullmatch(word.text) is not None


def filterable(schema: pa.Schema) -> Iterator[str]:
    """The columns that filters are about, as a filter names them: no vectors, nothing of tokens.

    >>> span = pa.struct([("unit", pa.string()), ("start", pa.float64())])
    >>> list(filterable(pa.schema([("item_id", pa.string()), ("span", span), ("a b", pa.int8())])))
    ['item_id', 'span.unit', 'span.start', '`a b`']
    """
    for column in schema:
        if column_metadata(column) or pa.types.is_list(column.type):
            continue
        name = column.name if _NAME.fullmatch(column.name) else f"`{column.name}`"
        if pa.types.is_struct(column.type):
            yield from (f"{name}.{part.name}" for part in column.type)
        else:
            yield name

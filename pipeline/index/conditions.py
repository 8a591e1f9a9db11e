"""Parser of filters: validates a condition and generates the SQL that Lance executes.

The SQL is generated from the parsed condition, so that Lance executes exactly what was validated.
The grammar lacks the constructs of SQL that let a short filter use gigabytes or take hours:
concatenation, regular expressions, patterns from columns, and functions whose results are longer
than their arguments. Lance's planner recurses, so nesting is bounded.
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

FILTER_RULE = "an SQL condition over the columns of the items, such as modality = 'text'"

#: Lance evaluates a chain of operators recursively; a long one overflows the stack.
MAX_OPERATORS = 400
#: Lance's parser takes exponential time to reject more than about 24 nested brackets.
MAX_DEPTH = 20
#: Maximum number of list values per filter.
MAX_VALUES = 50_000
#: Maximum number of characters per literal.
MAX_LITERAL_CHARS = 4_096
#: Maximum number of % per LIKE pattern. Each adds work per character of a text.
MAX_WILDCARDS = 16

#: Functions whose result is at most about as large as their arguments.
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

_TOKEN_PATTERN = re.compile(
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


class _Token(NamedTuple):
    """Word, string or symbol, its offset and the number of brackets open before it."""

    text: str
    start: int
    depth: int

    @property
    def key(self) -> str:
        return self.text.upper()


def condition_sql(filter: str, schema: pa.Schema) -> str:
    r"""Parses a filter over the columns of a schema and returns its SQL.

    >>> condition_sql('Title = "it\'s" AND (n+1)::int<3', pa.schema({"title": "str", "n": "i8"}))
    "`title` = 'it''s' AND ( `n` + 1 ) :: int < 3"

    Raises:
        SpecError: The filter does not parse, names an unknown column or function, or exceeds a
            limit of length or nesting.
    """
    return _Parser(filter, schema).sql()


class _Parser:
    """Recursive-descent parser, which collects the SQL of the parsed tokens in `_out`."""

    def __init__(self, filter: str, schema: pa.Schema):
        self._filter, self._schema = filter, schema
        self._tokens = list(_tokenise(filter))
        self._next = 0
        self._out: list[str] = []
        self._num_operators = self._num_values = 0
        # Raised last: in a filter that does not parse, a token is not necessarily a column.
        self._unknown: SpecError | None = None

    def sql(self) -> str:
        self._condition()
        if self._token is not None:
            raise self._expected("AND, OR or the end of the filter")
        if self._unknown is not None:
            raise self._unknown
        return " ".join(self._out)

    # -- tokens ------------------------------------------------------------------------------

    @property
    def _token(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _next_is(self, *keys: str) -> bool:
        return self._token is not None and self._token.key in keys

    def _take(self, *keys: str) -> bool:
        token = self._token
        if token is None or token.key not in keys:
            return False
        self._emit(token.key)
        return True

    def _emit(self, sql: str) -> None:
        self._out.append(sql)
        self._next += 1

    def _require(self, key: str, expected: str = "") -> None:
        if not self._take(key):
            raise self._expected(expected or key)

    def _close(self) -> None:
        self._require(")", "a closing bracket")

    def _expected(self, expected: str) -> SpecError:
        token = self._token
        if expected.startswith("AND, OR") and token is not None and token.depth:
            expected = "a closing bracket"
        return _unparsed(self._filter, token, expected)

    def _operator(self) -> None:
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            rule = f"a condition with at most {MAX_OPERATORS} operators (use IN for many values)"
            raise _too_long(self._filter, rule)

    # -- conditions --------------------------------------------------------------------------

    def _condition(self) -> None:
        while True:
            if self._take("NOT"):
                self._operator()
            self._predicate()
            if not self._take("AND", "OR"):
                return
            self._operator()

    def _predicate(self) -> None:
        first = self._next
        self._sum(any_column=self._is_tested_for_null())
        if not self._next_is(*COMPARISONS, "IS", "NOT", "IN", "LIKE", "ILIKE", "BETWEEN"):
            return
        self._check_quotes(first)
        self._operator()
        if self._take(*COMPARISONS):
            self._sum()
        elif self._take("IS"):
            self._take("NOT")
            if self._take("DISTINCT"):
                self._require("FROM")
                self._sum()
            elif not self._take("NULL", "TRUE", "FALSE"):
                raise self._expected("NULL, TRUE, FALSE or DISTINCT FROM")
        else:
            self._take("NOT")
            if self._take("IN"):
                self._require("(", "an opening bracket")
                self._literals()
                self._close()
            elif self._take("LIKE", "ILIKE"):
                self._pattern()
            else:
                self._require("BETWEEN", "IN, LIKE, ILIKE or BETWEEN")
                self._sum()
                self._require("AND")
                self._sum()

    def _is_tested_for_null(self) -> bool:
        end = self._path_end()
        keys = [token.key for token in self._tokens[end : end + 3]]
        return keys[:2] == ["IS", "NULL"] or keys == ["IS", "NOT", "NULL"]

    def _check_quotes(self, first: int) -> None:
        """Rejects a column in double quotes, which Lance reads as a string and matches nothing."""
        token = self._tokens[first]
        name = token.text[1:-1].lower()
        is_single_token = self._next == first + 1
        if is_single_token and token.text[0] == '"' and name in set(filterable(self._schema)):
            raise _unparsed(
                self._filter, token, f"`{name}` for the column or '{name}' for a string"
            )

    def _pattern(self) -> None:
        """Parses a literal pattern: one from a column would be compiled for each item."""
        token = self._token
        if token is None or token.text[0] not in "'\"":
            raise self._expected("a pattern in quotes")
        if token.text.count("%") > MAX_WILDCARDS:
            raise self._expected(f"a pattern with at most {MAX_WILDCARDS} wildcards %")
        self._literal()

    # -- values ------------------------------------------------------------------------------

    def _sum(self, any_column: bool = False) -> None:
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
        token = self._token
        if self._take("("):
            self._condition()
            self._close()
        elif self._is_literal():
            self._literal()
        elif token is None or token.key in KEYWORDS:
            raise self._expected("an expression")
        elif self._following() == "(" and token.key == "CAST":
            self._cast()
        elif self._following() == "(" and _NAME.fullmatch(token.text):
            self._call(token)
        else:
            self._column(any_column)

    def _following(self) -> str:
        return self._tokens[self._next + 1].text if self._next + 1 < len(self._tokens) else ""

    def _is_literal(self) -> bool:
        token = self._token
        if token is None:
            return False
        has_type = token.key in ("DATE", "TIMESTAMP") and self._following()[:1] == "'"
        is_constant = token.key in ("NULL", "TRUE", "FALSE")
        return has_type or is_constant or token.text[0] in "'\"" or token.text[0].isdigit()

    def _literal(self) -> None:
        token = self._token
        if token is None or not self._is_literal():
            raise self._expected("a value")
        if len(token.text) > MAX_LITERAL_CHARS:
            raise _too_long(
                self._filter,
                f"a condition with literals of at most {MAX_LITERAL_CHARS:,} characters",
            )
        mark = token.text[0]
        if mark in "'\"":
            self._emit(quote(token.text[1:-1].replace(mark * 2, mark)))
        elif self._take("DATE", "TIMESTAMP"):
            self._literal()
        elif not self._take("NULL", "TRUE", "FALSE"):
            if not _NUMBER.fullmatch(token.text):
                raise self._expected("a value")
            self._emit(token.text)

    def _literals(self) -> None:
        """Parses literals: columns would be read again for each element."""
        while True:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise _too_long(
                    self._filter, f"a condition with at most {MAX_VALUES:,} values in lists"
                )
            self._take("-")
            self._literal()
            if not self._take(","):
                return

    def _cast(self) -> None:
        self._operator()
        self._emit("CAST")
        self._require("(")
        self._condition()
        self._require("AS")
        self._type()
        self._close()

    def _type(self) -> None:
        token = self._token
        if token is None or token.text.lower() not in TYPES:
            raise self._expected(f"one of the types {', '.join(TYPES)}")
        self._emit(token.text.lower())

    def _call(self, token: _Token) -> None:
        """Parses a call of the function `token`. Lists are only accepted by list functions."""
        name = token.text.lower()
        if name not in FUNCTIONS + LIST_FUNCTIONS:
            names = FUNCTIONS + LIST_FUNCTIONS
            rule = f"a condition that calls only {', '.join(names)}"
            problem = f"calls the unknown function {token.text!r} at character {token.start + 1}"
            note = close_match(name, names)
            raise SpecError("filter", self._filter, rule, problem, note)
        self._operator()
        self._emit(name)
        self._require("(")
        if self._take(")"):
            return
        while True:
            if name in LIST_FUNCTIONS and self._take("["):
                self._literals()
                self._require("]", "a closing bracket")
            elif name in LIST_FUNCTIONS and self._is_column():
                self._column(any_column=False, lists=True)
            else:
                self._condition()
            if not self._take(","):
                break
        self._close()

    def _is_column(self) -> bool:
        end = self._path_end()
        is_name = self._token is not None and _is_name(self._token)
        return is_name and end < len(self._tokens) and self._tokens[end].text in ",)"

    def _path_end(self) -> int:
        """Returns the index of the token that follows the dotted path at the current position."""
        end = self._next + 1
        while end + 1 < len(self._tokens) and self._tokens[end].text == ".":
            end += 2
        return end

    def _column(self, any_column: bool, lists: bool = False) -> None:
        path = [self._name()]
        while self._next_is("."):
            self._next += 1
            path.append(self._name())
        field, names = _field_at(self._schema, path)
        self._out.append(".".join(f"`{name}`" for name in names))
        if field is not None and (any_column or _is_comparable(field, lists)):
            return
        location = f"{names[-1]!r} at character {path[len(names) - 1].start + 1}"
        problem = f"names the unknown column {location}"
        if field is not None:
            problem = f"compares the column {location}, which can only be tested for NULL"
        columns = list(filterable(self._schema))
        rule = f"a condition on {', '.join(columns)}"
        note = close_match(names[-1], columns) if field is None else ""
        self._unknown = self._unknown or SpecError("filter", self._filter, rule, problem, note)

    def _name(self) -> _Token:
        token = self._token
        if token is None or not _is_name(token):
            raise self._expected("an expression")
        self._next += 1
        return token


def _tokenise(filter: str) -> Iterator[_Token]:
    """Yields the tokens, or raises `SpecError` for comments, parameters and prefixed strings."""
    depth = 0
    for match in _TOKEN_PATTERN.finditer(filter):
        token = _Token(match[0], match.start(), depth)
        if match["open_ended"]:
            raise _unparsed(filter, token, f"a closing {token.text}")
        if match["refused"]:
            raise _unparsed(filter, token, "no comments, parameters or string prefixes")
        if token.text == ")" and not depth:
            raise _unparsed(filter, token, "AND, OR or the end of the filter")
        yield token
        depth += (token.text in "([") - (token.text in ")]")
        if depth > MAX_DEPTH:
            raise _too_long(
                filter, f"a condition with at most {MAX_DEPTH} levels of nested brackets"
            )


def _unparsed(filter: str, token: _Token | None, expected: str) -> SpecError:
    location = f"near {token.text!r} at character {token.start + 1}" if token else "at its end"
    problem = f"does not parse {location} (expected {expected})"
    return SpecError("filter", filter, FILTER_RULE, problem)


def _too_long(filter: str, rule: str) -> SpecError:
    return SpecError("filter", f"{filter[:60]}...", rule, "is too long")


def _field_at(schema: pa.Schema, path: list[_Token]) -> tuple[pa.Field | None, list[str]]:
    """Resolves a path like Lance, which ignores the case of columns that are not in backticks."""
    fields, names, field = list(schema), [], None
    for depth, token in enumerate(path):
        name = token.text.strip("`")
        matches = [f for f in fields if f.name == name]
        if not matches and depth == 0 and token.text[0] != "`":
            matches = [f for f in fields if f.name.lower() == name.lower()]
        field = matches[0] if matches else None
        names.append(field.name if field else name)
        if field is None:
            break
        fields = list(field.type) if types.is_struct(field.type) else []
    return field, names


def _is_comparable(field: pa.Field, lists: bool) -> bool:
    type = field.type
    if lists and types.is_list(type):
        type = type.value_type
    is_large = types.is_nested(type) or types.is_binary(type) or types.is_large_binary(type)
    return not is_large and not column_metadata(field)


def _is_name(token: _Token) -> bool:
    return token.text[0] == "`" or _NAME.fullmatch(token.text) is not None


def filterable(schema: pa.Schema) -> Iterator[str]:
    """Yields the columns that filters can use, which exclude token columns. Quotes special names.

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

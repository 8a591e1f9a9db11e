"""Filters over the items' columns: conditions in Lance's SQL, checked before they are used.

Lance reads a filter from its beginning as far as it is a condition, and ignores the rest: of
`a = 1 b = 2` or `a = 1) OR (b = 2` it takes the first part in silence. Here such a filter is wrong,
and the sentence says where. A filter cannot write: it is never more than a condition.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import lance
import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.reader import Index, first_line
from pipeline.schema import metadata_of

LEGAL = "a condition in SQL over the items' columns, such as modality = 'text'"

_WORDS = re.compile(
    r"""
    (?P<refused> -- | /\* | [$?] | (?<!:):(?!:) | \b[A-Za-z](?=['"]) )
  | '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*`
  | (?P<open_ended> ['"`] )
  | [^\W\d]\w* | \d[\w.]* | :: | [<>!=|&]+ | \S
    """,
    re.VERBOSE,
)
#: Operators of a filter, at most: Lance works it out by recursion, and a longer chain of them would
#: end the process.
MOST_OPERATORS = 400
_OPERATOR = re.compile(r"::|[^\w\s(),.'\"`\[\]]+|AND|OR|NOT|IS", re.IGNORECASE)
#: Functions that make much of little: of a short filter gigabytes, or a search without an end.
_GROWING = re.compile(
    r"repeat|array_repeat|lpad|rpad|range|generate_series|array_resize", re.IGNORECASE
)
_COMPARISON = re.compile("[<>!=]+|IS|IN|NOT|LIKE|ILIKE|BETWEEN", re.IGNORECASE)
_PARSER_ERROR = re.compile(
    r"\(sql parser error: (?:Expected: (?P<expected>.*), found: (?P<found>.*)|(?P<other>.*))\)$"
)
_UNKNOWN = re.compile(r'No field named (?:"(.+?)"|(\S+?))\.(?: |$)|Field (\S+) not found in struct')


_IS_ABOUT_FILES = re.compile(r"Not found: |LanceError\(IO\)|Object at location|No such file")


class _Word(NamedTuple):
    text: str
    start: int
    depth: int  # how many brackets are open before it


def check_filter(index: Index, where: str) -> None:
    """Looks at a filter, and at no item.

    Raises:
        SpecError: for `where`: it does not parse, and where; it names an unknown column; it is no
            condition.
    """
    if not isinstance(where, str) or not where.strip():
        raise SpecError("where", where, LEGAL)
    words = list(_words(where))
    _check_cost(where, words)
    _check_quotes(index, where, words)
    problem = _problem(index, f"({where})")
    if problem is None:
        return
    if error := _PARSER_ERROR.search(problem):
        word = _failing(index, where, words, error["found"])
        raise _unparsed(where, word, error["expected"] or error["other"])
    if unknown := _UNKNOWN.search(problem):
        name = next(filter(None, unknown.groups()))
        raise _unknown_column(where, words, name, index.schema)
    if "does not return a boolean" in problem:
        raise SpecError("where", where, LEGAL, "is neither true nor false of an item")
    raise _unusable(where, ValueError(problem))


@contextlib.contextmanager
def filtering(index: Index, where: str | None) -> Iterator[None]:
    """Items are filtered inside; what comes of the filter and what of damaged files is told apart.

    Raises:
        SpecError: as `check_filter`; the filter fails on an item (a division by zero); data files
            are missing or damaged.
    """
    with index.reading():
        if where is not None:
            check_filter(index, where)
        try:
            yield
        except (ValueError, OSError) as error:
            # By its class alone Lance does not tell one from the other.
            if where is None or "Error applying filter" not in str(error):
                raise
            raise _unusable(where, error) from None


def matching_ids(
    index: Index, where: str, fragments: Sequence[lance.LanceFragment] | None = None
) -> pa.ChunkedArray:
    """Returns the ids of the items that a filter lets through, of some fragments or of all.

    Raises:
        SpecError: As `filtering`.
    """
    with filtering(index, where):
        scanner = index.dataset.scanner(columns=["item_id"], filter=where, fragments=fragments)
        return scanner.to_table()["item_id"]


def _unusable(where: str, error: Exception) -> SpecError:
    line = first_line(error).removeprefix("Invalid user input: ")
    return SpecError("where", where, f"{LEGAL} ({line})", "cannot be worked out")


def _words(where: str) -> Iterator[_Word]:
    """The words, strings and signs of a filter.

    Raises:
        SpecError: a string that does not end, a bracket that closes none, or what no filter has:
            comments, parameters and strings with a prefix (over the last two Lance panics).
    """
    depth = 0
    for match in _WORDS.finditer(where):
        word = _Word(match[0], match.start(), depth)
        if match["open_ended"]:
            raise _unparsed(where, word, f"another {word.text} behind it")
        if match["refused"]:
            raise _unparsed(where, word, "neither comments, parameters nor prefixes of strings")
        if word.text == ")" and not depth:
            raise _unparsed(where, word, ")")
        yield word
        depth += (word.text == "(") - (word.text == ")")


def _check_cost(where: str, words: Sequence[_Word]) -> None:
    """Raises `SpecError` if a filter would take the process, or all of its memory."""
    operators = sum(bool(_OPERATOR.fullmatch(word.text)) for word in words)
    if operators > MOST_OPERATORS:
        legal = f"at most {MOST_OPERATORS} operators; many values as column IN ('a', 'b', ...)"
        raise SpecError("where", f"{where[:60]}...", legal, f"has {operators:,} operators")
    for word, following in itertools.pairwise(words):
        if following.text == "(" and _GROWING.fullmatch(word.text):
            legal = "a function that makes no long values"
            raise _unparsed(where, word, legal)


def _check_quotes(index: Index, where: str, words: Sequence[_Word]) -> None:
    """Raises `SpecError` if a column stands in double quotes, which Lance takes for a text.

    In other SQL it is the column; here its name would be compared, and match nothing in silence.
    """
    names = set(filterable(index.schema))
    for word, following in itertools.pairwise(words):
        name = word.text[1:-1].lower()
        if word.text[0] == '"' and name in names and _COMPARISON.fullmatch(following.text):
            raise _unparsed(where, word, f"`{name}` for the column, '{name}' for a text")


def _problem(index: Index, where: str) -> str | None:
    """What Lance says against a filter that it plans and does not run."""
    try:
        index.dataset.scanner(columns=["item_id"], filter=where).explain_plan()
    except (ValueError, RuntimeError) as error:
        if _IS_ABOUT_FILES.search(str(error)):
            raise OSError(str(error)) from None  # as `reading` expects it
        return re.sub(r",? \S+\.rs:\d+:\d+", "", str(error))
    return None


def _failing(index: Index, where: str, words: Sequence[_Word], found: str | None) -> _Word | None:
    """The word that the parser cannot take; None for the end.

    Lance does not say where it is. But behind an open bracket, all that goes before it lacks no
    more than its end.
    """
    if found == "EOF":
        return None
    for word in words:
        if found in (None, word.text):
            problem = _problem(index, "(" + where[: word.start + len(word.text)])
            if problem is None or not problem.endswith("found: EOF)"):
                return word
    return None


def _unparsed(where: str, word: _Word | None, expected: str) -> SpecError:
    if expected == ")":
        expected = "a closing bracket" if word is None or word.depth else "AND, OR or the end"
    at = f"near {word.text!r}, character {word.start + 1}" if word else "at its end"
    return SpecError("where", where, f"{LEGAL} (there: {expected})", f"does not parse {at}")


def _unknown_column(where: str, words: Sequence[_Word], name: str, schema: pa.Schema) -> SpecError:
    at = next((w.start for w in words if w.text.strip("`").lower() == name.lower()), None)
    place = "" if at is None else f", character {at + 1}"
    legal = ", ".join(filterable(schema))
    return SpecError("where", where, legal, f"names an unknown column, {name!r}{place}")


def filterable(schema: pa.Schema) -> Iterator[str]:
    """The columns that filters are about, as a filter names them: no vectors, nothing of tokens.

    >>> span = pa.struct([("unit", pa.string()), ("start", pa.float64())])
    >>> list(filterable(pa.schema([("item_id", pa.string()), ("span", span), ("a b", pa.int8())])))
    ['item_id', 'span.unit', 'span.start', '`a b`']
    """
    for column in schema:
        if metadata_of(column) or pa.types.is_list(column.type):
            continue
        name = column.name if re.fullmatch(r"[^\W\d]\w*", column.name) else f"`{column.name}`"
        if pa.types.is_struct(column.type):
            yield from (f"{name}.{part.name}" for part in column.type)
        else:
            yield name

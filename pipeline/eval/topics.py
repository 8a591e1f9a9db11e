"""Readers of files of queries and judgments, and categories of queries.

Texts are JSON lines or tab-separated, vectors are .npy or Parquet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import SpecError, reading
from pipeline.data.decode import Unreadable
from pipeline.data.text import parse_object
from pipeline.eval import JudgedQueries
from pipeline.paths import open_file
from pipeline.schema import ITEM, SURROGATES, is_blank

if TYPE_CHECKING:
    from pipeline.index.reader import IndexReader

#: Prefix of the keys of the metadata of items.
METADATA = "metadata."


def read_lines(path: str, field: str, required: str = "") -> Iterator[tuple[int, str]]:
    """Yields the non-blank lines of a UTF-8 text file with their numbers, which start from 1.

    Lines may begin with a byte order mark, as in concatenated files. If `required` names the
    content of the lines, there must be at least one.
    """
    rule, is_empty = "a UTF-8 file", bool(required)
    with reading(field, path, rule), open_file(path, "r", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if SURROGATES.search(line):
                raise SpecError(field, path, rule, f"is malformed in line {number}")
            if (line := line.removeprefix("\ufeff")).strip():
                is_empty = False
                yield number, line.rstrip("\r\n")
    if is_empty:
        raise SpecError(field, path, f"a file with at least one {required}", "is empty")


def parse_row(line: str, field: str, rule: str, note: str) -> dict[str, Any]:
    """Returns the JSON object of a line, with the checks of `pipeline.data.text.parse_object`."""
    try:
        return parse_object(line.encode())
    except Unreadable as error:
        problem = f"cannot be parsed ({error.detail})"
        raise SpecError(field, line[:80], rule, problem, note) from None


def read_queries(path: str, field: str = "queries") -> dict[str, str]:
    """Reads query texts by id from lines `{"_id": ..., "text": ...}` or `id<TAB>text`."""
    queries: dict[str, str] = {}
    rule = 'a line {"_id": "1", "text": "..."} or id<TAB>text, neither empty'
    for number, line in read_lines(path, field, "query"):
        note = f" (line {number} of {path})"
        if line.lstrip().startswith("{"):
            row = parse_row(line, field, rule, note)
            query_id, text = _clean_id(row.get("_id")), row.get("text")
        else:
            name, _, text = line.partition("\t")
            query_id = _clean_id(name)
            if number == 1 and _is_header(name, text):
                continue
        if not query_id or not isinstance(text, str) or is_blank(text):
            raise SpecError(field, line[:80], rule, note=note)
        if query_id in queries:
            raise SpecError(field, query_id, "a unique id", "occurs twice", f" (line {number})")
        queries[query_id] = text
    return queries


#: Largest absolute grade: grades are 32-bit integers.
MAX_GRADE = 2**31 - 1


def read_qrels(path: str, field: str = "qrels") -> dict[str, dict[str, int]]:
    """Reads grades by document id and query id.

    The lines are `query-id<TAB>corpus-id<TAB>score`, as in BEIR, or
    `query-id iteration document-id grade`, as in TREC.

    Negative grades are returned unchanged. All metrics treat them as 0, which means that a document
    was judged and is not relevant.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path, field):
        columns = line.split("\t") if "\t" in line else line.split()
        if number == 1 and columns[-1].strip() == "score":
            continue
        if len(columns) == 4:
            del columns[1]
        note = f" (line {number} of {path})"
        try:
            query_id, document_id, grade = map(str.strip, columns)
            if not query_id or not document_id or abs(int(grade)) > MAX_GRADE:
                raise ValueError
            graded = qrels.setdefault(query_id, {}).setdefault(document_id, int(grade))
        except ValueError:
            rule = "a line query-id<TAB>corpus-id<TAB>32-bit integer or a line in TREC format"
            raise SpecError(field, line[:80], rule, note=note) from None
        if graded != int(grade):
            rule = "the only grade of its document"
            raise SpecError(field, line[:80], rule, "differs from another", note)
    return qrels


#: Maximum number of values of a field that is treated as a category.
MAX_CATEGORIES = 20
#: Category of the queries without a value.
NO_CATEGORY = "(none)"


def read_categories(path: str, query_ids: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Groups query ids by category, using the fields of JSON lines that contain categories.

    Candidates are all fields except `_id`, `text` and `title`, and the fields of an object
    `metadata`. See `group_categories`.
    """
    wanted = set(query_ids)
    fields: dict[str, dict[str, Any]] = {}
    for number, line in read_lines(path, "queries"):
        if not line.lstrip().startswith("{"):
            continue
        row = parse_row(line, "queries", "a JSON object", f" (line {number} of {path})")
        query_id = _clean_id(row.get("_id"))
        metadata = row.get("metadata")
        row |= metadata if isinstance(metadata, dict) else {}
        if query_id in wanted:
            for field in row.keys() - {"_id", "text", "title", "metadata"}:
                fields.setdefault(field, {})[query_id] = row[field]
    return group_categories(fields, wanted)


def group_categories(
    fields: Mapping[str, Mapping[str, Any]], wanted: Collection[str]
) -> dict[str, dict[str, list[str]]]:
    """Groups query ids by the values of the fields that contain categories.

    A field is assumed to contain categories if it satisfies three conditions: its values are short
    strings or lists of short strings, there are between 2 and `MAX_CATEGORIES` distinct values, and
    each value has two or more queries on average. A query with several values belongs to several
    categories.
    """
    wanted, found = set(wanted), {}
    for field, values in sorted(fields.items()):
        groups: dict[str, list[str]] = {}
        for query_id in wanted & values.keys():
            for category in categories(values[query_id]):
                groups.setdefault(category, []).append(query_id)
        if without := wanted - {query_id for group in groups.values() for query_id in group}:
            groups.setdefault(NO_CATEGORY, []).extend(without)
        is_few = 2 <= len(groups) <= min(MAX_CATEGORIES, len(wanted) // 2)
        if is_few and all(len(category) <= MAX_CATEGORY_LENGTH for category in groups):
            found[field] = {category: sorted(groups[category]) for category in sorted(groups)}
    return found


#: Maximum length of a category name in characters. Longer values are texts.
MAX_CATEGORY_LENGTH = 60


def categories(value: Any) -> Iterator[str]:
    """Yields the category names that a value contains. A list contains several.

    >>> list(categories(["table", 3])), list(categories(None)), list(categories(""))
    (['table', '3'], ['(none)'], ['(none)'])
    """
    for name in value if isinstance(value, list) else [value]:
        yield NO_CATEGORY if name is None or name == "" else str(name)


def queries_by_document_category(
    index: IndexReader, judged: JudgedQueries, field: str, level: str, filter: str | None
) -> dict[str, list[str]]:
    """Groups query ids by the categories of their relevant documents.

    A query is in all groups to which one of its relevant documents belongs, and a parent in those
    of its items. `field` is a text column such as "modality", or "metadata.KEY".
    """
    columns = [c.name for c in ITEM if pa.types.is_string(c.type) and c.name != "metadata"]
    is_key = field.startswith(METADATA)
    column = "metadata" if is_key else field
    if not is_key and field not in columns:
        rule = f"one of {', '.join(columns)}, or {METADATA}KEY"
        raise SpecError("document_categories", field, rule, "is not a text column")
    key, keys = field.removeprefix(METADATA), set()
    document_categories: dict[str, set[str]] = {}
    for batch in index.batches(list(dict.fromkeys([f"{level}_id", column])), filter=filter):
        values = batch[column].to_pylist()
        for document, value in zip(batch[f"{level}_id"].to_pylist(), values, strict=True):
            if is_key:
                fields = json.loads(value or "{}")
                keys |= set(fields)
                value = fields.get(key)
            document_categories.setdefault(document, set()).update(categories(value))
    if is_key and key not in keys:
        names = [f"{METADATA}{name}" for name in sorted(keys)]
        raise SpecError.unknown_name(
            "document_categories", field, names, "is not in the metadata of any item"
        )
    groups: dict[str, list[str]] = {}
    for query_id in judged.queries:
        relevant = [document for document, grade in judged.qrels[query_id].items() if grade > 0]
        query_categories = {
            category for document in relevant for category in document_categories.get(document, ())
        }
        for category in sorted(query_categories):
            groups.setdefault(category, []).append(query_id)
    return dict(sorted(groups.items()))


def _clean_id(value: Any) -> str:
    """Returns a string or an integer as an id without surrounding white space, or "" for others."""
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value).strip() if is_id else ""


def _is_header(name: str, text: str) -> bool:
    """Checks whether the first line of a tab-separated file names its columns.

    >>> _is_header("query-id", "text"), _is_header("id", "text of an id")
    (True, False)
    """
    id, column = (re.sub(r"[^a-z]", "", name.lower()) for name in (name, text.partition("\t")[0]))
    return id in ("id", "qid", "queryid") and column in ("text", "query", "querytext", "question")


def read_ids(path: str, field: str) -> list[str]:
    """Reads ids, one per line, without duplicates."""
    return list(dict.fromkeys(line.strip() for _, line in read_lines(path, field, "id")))


def read_query_vectors(path: str, field: str = "query_vectors") -> dict[str, np.ndarray]:
    """Reads vectors by id from .npy (M, D), one query, or Parquet (`id`, `vectors`)."""
    rule = "a .npy of shape (query tokens, dim), or Parquet with the columns id and vectors"
    with reading(field, path, rule, ValueError, TypeError, EOFError, pa.ArrowException):
        with open_file(path) as file:
            if path.endswith(".npy"):
                return {"1": np.load(file, allow_pickle=False)}
            table = pq.read_table(file, columns=["id", "vectors"])
        vectors = [np.array(value, dtype=np.float32) for value in table["vectors"].to_pylist()]
    ids = [
        "" if query_id is None else str(query_id).strip() for query_id in table["id"].to_pylist()
    ]
    if not ids or not all(ids) or len(set(ids)) < len(ids):
        problem = "has an empty id" if len(set(ids)) == len(ids) else "has the same id twice"
        problem = problem if ids else "is empty"
        rule = "a file of at least one query, each with a unique id"
        raise SpecError(field, path, rule, problem)
    return dict(zip(ids, vectors, strict=True))


def judged_query_vectors(
    path: str, judged: JudgedQueries, query_ids: Sequence[str]
) -> list[np.ndarray] | None:
    """Returns the vectors of the given queries, in the given order, or None to encode the texts.

    Without a path, they are those of the benchmark, if any.
    """
    vectors = read_query_vectors(path) if path else judged.vectors
    if vectors is None:
        return None
    for query_id in query_ids:
        if query_id not in vectors:
            rule = "vectors for every judged query"
            raise SpecError("query_vectors", query_id, rule, "has no vectors")
    return [vectors[query_id] for query_id in query_ids]

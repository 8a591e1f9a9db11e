"""Reads the queries of `jobs.search` from the command line or from a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.config import SpecError, reading

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.schema import Composed
    from pipeline.search.query import AnyQuery
    from pipeline.search.searcher import Searcher

#: Parts of a query that are files, as `schema.QUERY_FILES`, whose module imports PyArrow.
FILES = ("image", "audio", "video")


def read(args: Namespace) -> Mapping[str, AnyQuery]:
    """Reads the queries, by id."""
    from pipeline.eval.topics import read_queries, read_query_vectors

    if args.queries:
        return read_queries(args.queries)
    if not args.query_vectors:
        return {"1": _query(args)}
    vectors = read_query_vectors(args.query_vectors)
    if args.save_maps and len(vectors) > 1:
        problem = f"contains {len(vectors):,} queries"
        rule = "a file with a single query if --save-maps is used"
        raise SpecError("query-vectors", args.query_vectors, rule, problem)
    return vectors


def _query(args: Namespace) -> str | bytes | Composed:
    from pipeline.schema import compose

    files = {part: _read_file(part, path) for part in FILES if (path := getattr(args, part))}
    return compose(" ".join(args.query), files)


def _read_file(part: str, uri: str) -> bytes:
    from pipeline.paths import open_file
    from pipeline.search.media import MAX_BYTES

    rule = f"a file of at most {MAX_BYTES:,} bytes"
    with reading(part, uri, rule), open_file(uri) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise SpecError(part, uri, rule, "is too large")
    return data


def check_vectors(searcher: Searcher, queries: Mapping[str, AnyQuery], name: str) -> None:
    """Validates all queries of a file before the search starts."""
    for query_id, vectors in queries.items():
        try:
            searcher.queries([vectors], name)
        except SpecError as error:
            if error.field != "query":  # the index is corrupted
                raise
            problem = f"has {error.value}"
            raise SpecError("query-vectors", query_id, error.rule, problem) from None

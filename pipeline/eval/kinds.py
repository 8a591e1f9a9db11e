"""Queries grouped by the kind of document that answers them, as SAP decomposes its figures."""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.eval.topics import categories
from pipeline.index.reader import Index
from pipeline.schema import ITEM

METADATA = "metadata."


def queries_by_kind(
    index: Index, judged: JudgedQueries, kinds: str, by: str, filter: str | None
) -> dict[str, list[str]]:
    """Groups query ids by the kinds of their relevant documents, kinds in order.

    A query with relevant documents of several kinds is in each of their groups.

    Args:
        index: Index of the documents.
        judged: Queries and their relevance judgments.
        kinds: Item column of text such as "modality", or "metadata.KEY".
        by: Level of the judgments, "item" or "parent"; a parent has the kinds of its items.
        filter: SQL condition of the items; None for all of them.

    Raises:
        SpecError: There is no such column, or no item has the key.
    """
    columns = [c.name for c in ITEM if pa.types.is_string(c.type) and c.name != "metadata"]
    is_key = kinds.startswith(METADATA)
    column = "metadata" if is_key else kinds
    if not is_key and kinds not in columns:
        rule = f"one of {', '.join(columns)}, or {METADATA}KEY"
        raise SpecError("kinds", kinds, rule, "is not a text column")
    key, keys = kinds.removeprefix(METADATA), set()
    kinds_of: dict[str, set[str]] = {}
    for batch in index.batches(list(dict.fromkeys([f"{by}_id", column])), filter=filter):
        values = batch[column].to_pylist()
        for document, value in zip(batch[f"{by}_id"].to_pylist(), values, strict=True):
            if is_key:
                fields = json.loads(value or "{}")
                keys |= set(fields)
                value = fields.get(key)
            kinds_of.setdefault(document, set()).update(categories(value))
    if is_key and key not in keys:
        names = [f"{METADATA}{name}" for name in sorted(keys)]
        raise SpecError.unknown_name("kinds", kinds, names, "is not in the metadata of any item")
    groups: dict[str, list[str]] = {}
    for query_id in judged.queries:
        relevant = [document for document, grade in judged.qrels[query_id].items() if grade > 0]
        for kind in sorted({kind for document in relevant for kind in kinds_of.get(document, ())}):
            groups.setdefault(kind, []).append(query_id)
    return dict(sorted(groups.items()))

"""Query categories that are derived from the relevant documents, as in the analysis of SAP."""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.eval.topics import categories
from pipeline.index.reader import Index
from pipeline.schema import ITEM

METADATA = "metadata."


def queries_by_document_category(
    index: Index, judged: JudgedQueries, field: str, level: str, filter: str | None
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

"""Retrievers of other frameworks, which search an index. Each module needs its framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.search.library import Index
from pipeline.search.results import Hit

#: Fields of a hit among the metadata of a document.
FIELDS = {"item_id", "parent_id", "score", "title", "span", "modality", "source"}


def retrieve(
    index: Index, query: str, options: Mapping[str, Any]
) -> list[tuple[Hit, dict[str, Any]]]:
    """Returns the hits of a text query, each with the metadata of the item and of the hit."""
    hits: list[Any] = index.search(query, **{"explain": False, **options})
    if not hits:
        return []
    rows = index.reader.items([hit.item_id for hit in hits], ["metadata"]).to_pylist()
    stored = {row["item_id"]: row["metadata"] or "{}" for row in rows}
    return [
        (hit, hit.model_dump(include=FIELDS, exclude_none=True) | json.loads(stored[hit.item_id]))
        for hit in hits
    ]

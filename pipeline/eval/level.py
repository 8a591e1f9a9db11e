"""The level of judgments: whether the ids that they name are those of items or of parents."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.index.reader import Index

Level = Literal["parent", "item"]


def judged_level(
    index: Index,
    judged: JudgedQueries,
    asked: Literal["auto", "parent", "item"],
    filter: str | None,
) -> Level:
    """Returns the level on which judgments are read.

    With `auto` it is the level at which the index has ids that are judged. Ids that are both an
    item's and its parent's, such as those of whole documents, do not tell levels apart.

    Args:
        index: Index of the documents.
        judged: Queries and their relevance judgments.
        asked: Level in the spec, or `auto`.
        filter: Filter of the items that take part.

    Raises:
        SpecError: For `judged`: no judged id is in the index at the level that is asked for; or,
            with `auto`, at both levels there are ids that the other one lacks.
    """
    named = {document for grades in judged.qrels.values() for document in grades}
    items: set[str] = set()
    parents: Counter[str] = Counter()
    for batch in index.batches(["item_id", "parent_id"], filter=filter):
        items |= named & set(batch["item_id"].to_pylist())
        parents.update(parent for parent in batch["parent_id"].to_pylist() if parent in named)
    found = {"parent": set(parents), "item": items}
    if not items and not parents:
        raise SpecError(
            "judged",
            asked,
            "a level whose ids are in the index (and match `filter`)",
            f"has none of the {len(named):,} judged ids",
        )
    if asked != "auto":
        if not found[asked]:
            (other,) = {"parent", "item"} - {asked}
            number = f"{len(found[other]):,} of the {len(named):,} judged ids"
            problem = f"matches no judged id ({number} are {other}s)"
            raise SpecError("judged", asked, f"{other}", problem)
        return asked
    only_items, only_parents = items - found["parent"], found["parent"] - items
    if only_items and not only_parents:
        return "item"
    # Where every id is of both levels, they differ if a parent has further items.
    has_parts = any(number > 1 for number in parents.values())
    if only_items or (not only_parents and has_parts):
        raise SpecError(
            "judged",
            asked,
            "parent or item",
            f"is ambiguous (of {len(named):,} judged ids, {len(parents):,} are parents and"
            f" {len(items):,} are items)",
        )
    return "parent"

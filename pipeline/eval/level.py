"""Level of judgments: item ids or parent ids."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.index.reader import IndexReader

Level = Literal["parent", "item"]


def judged_level(
    index: IndexReader,
    judged: JudgedQueries,
    level: Literal["auto", "parent", "item"],
    filter: str | None,
) -> Level:
    """Determines whether the ids in the judgments refer to items or to parents.

    With `auto`, the level is the one at which the index contains the judged ids. Ids that an item
    shares with its parent, as is the case for undivided documents, are not taken into account.
    """
    if judged.moments is not None:
        if level == "parent":
            raise SpecError("judged", level, "item or auto for a benchmark of moments")
        return "item"
    named = {document for grades in judged.qrels.values() for document in grades}
    items: set[str] = set()
    parents: Counter[str] = Counter()
    for batch in index.batches(["item_id", "parent_id"], filter=filter):
        items |= named & set(batch["item_id"].to_pylist())
        parents.update(parent for parent in batch["parent_id"].to_pylist() if parent in named)
    found = {"parent": set(parents), "item": items}
    if not items and not parents:
        rule = "a level whose ids are in the index (and match `filter`)"
        raise SpecError("judged", level, rule, f"has none of the {len(named):,} judged ids")
    if level != "auto":
        if not found[level]:
            (other,) = {"parent", "item"} - {level}
            number = f"{len(found[other]):,} of the {len(named):,} judged ids"
            problem = f"matches no judged id ({number} are {other}s)"
            raise SpecError("judged", level, f"{other}", problem)
        return level
    only_items, only_parents = items - found["parent"], found["parent"] - items
    if only_items and not only_parents:
        return "item"
    # If every judged id is on both levels, the levels differ when a parent has more than one item.
    has_more_items = any(number > 1 for number in parents.values())
    if only_items or (not only_parents and has_more_items):
        counts = f"{len(parents):,} are parents and {len(items):,} are items"
        problem = f"is ambiguous (of {len(named):,} judged ids, {counts})"
        raise SpecError("judged", level, "parent or item", problem)
    return "parent"

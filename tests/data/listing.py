"""Lists and decodes the items of a source in tests."""

from __future__ import annotations

from typing import Any

from pipeline.data.base import items_table
from pipeline.registry import SOURCES
from pipeline.schema import Item, Reject


def build(name: str, wants: tuple[str, ...] = ("text",), **fields: Any) -> Any:
    """Returns a source after its check."""
    source = SOURCES.build(SOURCES.resolve({"name": name, **fields}), wants)
    source.check()
    return source


def read(source: Any) -> tuple[dict[str, Item], list[Reject]]:
    """Returns all items with their payload by id, and the rejects of both stages."""
    items: dict[str, Item] = {}
    rejects: list[Reject] = []
    for shard in source.shards():
        scanned = list(enumerate(source.scan(shard)))
        rejects += [entry for _, entry in scanned if isinstance(entry, Reject)]
        listed = [(n, entry) for n, entry in scanned if isinstance(entry, Item)]
        decoded = list(source.decode(shard, listed))
        assert len(decoded) == len(listed)
        items_table([item for item in decoded if isinstance(item, Item)], source.payload)
        for entry in decoded:
            if isinstance(entry, Reject):
                rejects.append(entry)
            else:
                assert entry.item_id not in items
                items[entry.item_id] = entry
    return items, rejects

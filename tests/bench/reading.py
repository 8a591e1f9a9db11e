"""Reads items from sources without running the index job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.data.base import Source
from pipeline.schema import Item


def listed_items(source: Source[Any], shard: dict[str, Any]) -> list[tuple[int, Item]]:
    """Returns the items of a shard and their positions. Entries that were rejected are omitted."""
    entries = enumerate(source.scan(shard))
    return [(position, entry) for position, entry in entries if isinstance(entry, Item)]


def decoded_items(
    source: Source[Any], shard: dict[str, Any], listed: list[tuple[int, Item]]
) -> Iterator[Item]:
    """Yields the listed items of a shard with their payload.

    Items that are rejected are omitted.
    """
    decoded = source.decode(shard, listed)
    return (item for item in decoded if isinstance(item, Item))

"""Reading items from sources, without the index job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.schema import Item
from pipeline.sources import Source


def listed_items(source: Source[Any], shard: dict[str, Any]) -> list[tuple[int, Item]]:
    """Returns the items of a shard with their positions, rejected entries left out."""
    entries = enumerate(source.scan(shard))
    return [(position, entry) for position, entry in entries if isinstance(entry, Item)]


def decoded_items(
    source: Source[Any], shard: dict[str, Any], listed: list[tuple[int, Item]]
) -> Iterator[Item]:
    """Yields listed items of a shard with their payload, rejected ones left out."""
    decoded = source.decode(shard, listed)
    return (item for item in decoded if isinstance(item, Item))

"""Combination of several sources, which a spec defines as a list of sources."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from pipeline import config
from pipeline.config import ComponentSpec, ComponentSpecT, SpecError, within
from pipeline.data.base import ItemSize, NoFiles, Source
from pipeline.registry import SOURCES, SourceSpec
from pipeline.schema import Item, Reject


class PartedSource(Source[ComponentSpecT]):
    """Base class of sources whose shards belong to one of several sources.

    Shards are `{"source": number of the source, "shard": ...}`.
    """

    _sources: Sequence[Source]

    @property
    def num_parts(self) -> int:
        """Number of parts of all sources."""
        return sum(source.num_parts for source in self._sources)

    @property
    def stores_listing(self) -> bool:
        """True if at least one of the sources stores its listing."""
        return any(source.stores_listing for source in self._sources)

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """Returns the limit of the source that the shard belongs to."""
        return self._sources[shard["source"]].unit_limit(shard["shard"])

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the size of an item according to its source."""
        return self._sources[shard["source"]].item_size(shard["shard"], item)

    @property
    def copies_files(self) -> bool:
        """True if at least one of the sources copies whole files."""
        return any(source.copies_files for source in self._sources)

    def covers(self, parent_id: str) -> bool:
        """Checks whether one of the sources would list an indexed document."""
        return any(source.covers(parent_id) for source in self._sources)

    def hides_items(self, reject: Reject) -> bool:
        """Checks whether a reject may contain items of one of the sources."""
        return any(source.hides_items(reject) for source in self._sources)

    @property
    def parts(self) -> Sequence[Source]:
        """The sources."""
        return self._sources

    @functools.cached_property
    def payload(self) -> pa.Schema:
        """The payload columns of all sources."""
        columns = {f.name: f for source in self._sources for f in source.payload}
        return pa.schema(list(columns.values()))

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of a shard."""
        return self._sources[shard["source"]].scan(shard["shard"])

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Yields the requested items. The payload of each item is loaded by its source."""
        return self._sources[shard["source"]].decode(shard["shard"], items)


class Combined(PartedSource["Combined.Spec"]):
    """The items of several sources, in the order of the sources.

    The spec is `source: [{name: text, ...}, {name: pages, ...}]`. Each source has its own
    `collection`. An id that several sources list belongs to the first of them.
    """

    class Spec(config.ComponentSpec):
        """Options of the combined source."""

        name: Literal["combined"] = "combined"
        sources: list[SourceSpec] = Field(min_length=1)
        """The sources, in the order in which they are listed."""

        @field_validator("sources")
        @classmethod
        def _check_collections(cls, sources: list[ComponentSpec]) -> list[ComponentSpec]:
            first: dict[str, int] = {}
            for number, spec in enumerate(sources):
                for name in SOURCES.load(spec.name)(spec).collections:
                    if first.setdefault(name, number) != number:
                        field, rule = f"[{number}].collection", "unique for each source"
                        note = f", first in source[{first[name]}]; set `collection` of one of them"
                        raise SpecError(field, name, rule, "occurs twice", note)
            return sources

    provides = ()  # checked for each of its sources

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        self._sources: list[Source] = [SOURCES.build(s, wants) for s in spec.sources]

    @classmethod
    def leaf_specs(cls, spec: Spec) -> list[ComponentSpec]:
        """Returns the specs of the sources."""
        return [leaf for s in spec.sources for leaf in SOURCES.load(s.name).leaf_specs(s)]

    @property
    def collections(self) -> tuple[str, ...]:
        """The collections of all sources."""
        return tuple(name for source in self._sources for name in source.collections)

    def check(self) -> None:
        """Raises `SpecError` if at least one of the sources contains no items."""
        for error in self.empty():
            raise error

    def check_some(self) -> None:
        """Raises `SpecError` if a path is missing, or if no folder has files of its types."""
        empty = list(self.empty())
        if len(empty) == len(self._sources):
            raise empty[0]

    def empty(self) -> Iterator[NoFiles]:
        """Yields the errors of the sources whose folder has no files of their types."""
        for number, source in enumerate(self._sources):
            try:
                with within(f"[{number}]"):
                    source.check()
            except NoFiles as error:
                yield error

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields the shards of all sources as `{"source": number of the source, "shard": ...}`."""
        for number, source in enumerate(self._sources):
            for shard in source.shards():
                yield {"source": number, "shard": shard}

"""Several sources read as one: a list of sources in a spec."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from pipeline import config
from pipeline.config import ComponentSpec, SpecError, within
from pipeline.registry import SOURCES, SourceSpec
from pipeline.schema import Item, Reject
from pipeline.sources import Source


class Several(Source["Several.Spec"]):
    """The items of several sources, one source after the other.

    In a spec it is `source: [{name: text, ...}, {name: pages, ...}]`. Each source keeps its own
    `collection`; an id that two of them list belongs to the first.
    """

    class Spec(config.ComponentSpec):
        """The sources, in the order in which they are listed."""

        name: Literal["several"] = "several"
        sources: list[SourceSpec] = Field(min_length=1)
        """The sources, in the order in which they are listed."""

        @field_validator("sources")
        @classmethod
        def _tell_them_apart(cls, sources: list[ComponentSpec]) -> list[ComponentSpec]:
            names = [SOURCES.load(spec.name)(spec).collections for spec in sources]
            flat = [name for collections in names for name in collections]
            for name in flat:
                if flat.count(name) > 1:
                    rule = "unique for each source"
                    raise SpecError("collection", name, rule, "occurs twice")
            return sources

    gives = ()  # each of its sources has its own

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        self._sources: list[Source] = [SOURCES.build(s, wants) for s in spec.sources]

    @property
    def keeps_listing(self) -> bool:
        """Whether that is so for one of them."""
        return any(source.keeps_listing for source in self._sources)

    @classmethod
    def leaf_specs(cls, spec: Spec) -> list[ComponentSpec]:
        """The specs of its sources."""
        return [leaf for s in spec.sources for leaf in SOURCES.load(s.name).leaf_specs(s)]

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """That of the source which the shard is of."""
        return self._sources[shard["source"]].unit_limit(shard["shard"])

    @property
    def collections(self) -> tuple[str, ...]:
        """Those of every source."""
        return tuple(name for source in self._sources for name in source.collections)

    @functools.cached_property
    def payload(self) -> pa.Schema:
        """Every column that one of the sources fills."""
        columns = {f.name: f for source in self._sources for f in source.payload}
        return pa.schema(list(columns.values()))

    def check(self) -> None:
        """Raises `SpecError` if one of the sources has nothing to read."""
        for number, source in enumerate(self._sources):
            with within(str(number)):
                source.check()

    def shards(self) -> Iterator[dict[str, Any]]:
        """The shards of each source `{"source": its number, "shard": ...}`."""
        for number, source in enumerate(self._sources):
            for shard in source.shards():
                yield {"source": number, "shard": shard}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Lists a shard of one source."""
        return self._sources[shard["source"]].scan(shard["shard"])

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Fills in the payload by the source that listed the items."""
        return self._sources[shard["source"]].decode(shard["shard"], items)

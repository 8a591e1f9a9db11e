"""Reads the images and the audio of indexed items from their original files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import yaml

from pipeline.config import ComponentSpec, SpecError, absolute, within
from pipeline.decoding import Unreadable
from pipeline.index import JOBS
from pipeline.index.reader import Index, first_line, open_folder
from pipeline.registry import SOURCES
from pipeline.sources import NO_PREVIEW, Source, content_hash
from pipeline.sources.files import existing_root

T = TypeVar("T")


class Previews:
    """Reads the images and the audio of indexed items.

    Args:
        index: Index of the items.
        documents: Current folder of each collection whose files were moved, by collection name. The
            key "" applies to all other collections.
        only_indexed: Whether to reject files that were modified after indexing.
    """

    def __init__(
        self,
        index: Index,
        documents: Mapping[str, str] | None = None,
        *,
        only_indexed: bool = False,
    ):
        self.index, self._documents = index, documents or {}
        self._only_indexed = only_indexed
        self._sources: dict[str, Source] = {}

    def image(self, item_id: str, seconds: float | None = None) -> bytes:
        """Returns a page, an image, or the video frame at a given time as an encoded image.

        Raises:
            SpecError: The item has no image, or its file is missing or unreadable.
        """
        return self._read(item_id, lambda source, item: source.preview_image(item, seconds))

    def audio(self, item_id: str) -> tuple[np.ndarray, int, float]:
        """Returns the audio of an item: samples (S,), sample rate in Hz, and start in seconds.

        Raises:
            SpecError: The item has no audio, or its file is missing or unreadable.
        """
        return self._read(item_id, lambda source, item: source.preview_audio(item))

    def _read(self, item_id: str, read: Callable[[Source, dict[str, Any]], T]) -> T:
        columns = ["source", "parent_id", "modality", "span", "metadata", "revision"]
        (item,) = self.index.items([item_id], columns).to_pylist() or [None]
        if item is None:
            raise SpecError("item_id", item_id, "the id of an item in the index")
        item["metadata"] = json.loads(item["metadata"] or "{}")
        source = self._source(item["source"])
        try:
            indexed = content_hash(item["revision"])
            if self._only_indexed and source.read_content_hash(item) != indexed:
                rule = "an indexed file that was not modified"
                raise SpecError("documents", item["parent_id"], rule, "was modified since")
            return read(source, item)
        except (Unreadable, OSError) as error:
            if isinstance(error, Unreadable) and error.reason == NO_PREVIEW:
                rule = "a page, an image, a video or an audio file"
                raise SpecError("item_id", item_id, rule, note=f" ({error.detail})") from None
            problem = f"has no readable {item['parent_id']} ({first_line(error)})"
            note = f"; pass their folder as --documents {item['source']}=FOLDER"
            rule = "the folder that contains the indexed files"
            location = getattr(source.spec, source.location_field)
            raise SpecError("documents", location, rule, problem, note) from None

    def _source(self, collection: str) -> Source:
        if collection not in self._sources:
            spec = next((s for s in self._specs() if collection in _collections(s)), None)
            folder = self._documents.get(collection, self._documents.get(""))
            if spec is None:
                rule = "the folder of a collection that a job of the index has read"
                note = f" (collection {collection!r})"
                raise SpecError("documents", folder, rule, note=note)
            if folder:
                with within("documents"):
                    existing_root(absolute(folder))
                field = SOURCES.load(spec.name).location_field
                spec = spec.model_copy(update={field: absolute(folder)})
            self._sources[collection] = SOURCES.build(spec)
        return self._sources[collection]

    def _specs(self) -> Iterator[ComponentSpec]:
        """Yields the sources of all jobs of the index. The most recent job comes first."""
        filesystem, path = open_folder(self.index.uri, JOBS)
        for file in sorted(filesystem.glob(f"{path}/*/spec.yaml"), reverse=True):
            with filesystem.open(file, "r", encoding="utf-8") as stream:
                source = yaml.safe_load(stream).get("source")
            if isinstance(source, dict):  # recompression reads a column of the index instead
                spec = SOURCES.resolve(source, stored=True)
                yield from SOURCES.load(spec.name).leaf_specs(spec)


def _collections(spec: ComponentSpec) -> tuple[str, ...]:
    return SOURCES.build(spec).collections

"""Stage that serves stored items and their previews, and deletes items."""

from __future__ import annotations

import functools
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config import SpecError, parse
from pipeline.index import delete, job_id
from pipeline.index.delete import DeleteSpec
from pipeline.index.reader import Edition, open_edition
from pipeline.index.writer import LeaseHeld
from pipeline.runtime.text import Table
from pipeline.schema import ITEM
from pipeline.search.facets import ExampleQuery, IndexFacets, index_facets
from pipeline.search.options import representation_info
from pipeline.search.previews import ByteRange, MediaPart, Previews, media_type, thumbnail
from pipeline.search.projection import project_items
from pipeline.search.query import Queries
from pipeline.search.stored_items import stored_query
from pipeline.serve.outcomes import logged, returns_errors
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.scheduler import Caller, FairScheduler, busiest
from pipeline.serve.settings import ServedIndex, Timeouts
from pipeline.serve.versions import Versions

log = logging.getLogger("ray.serve")

#: Field of the error that another job is writing to the index.
WRITER = "writer"
#: Number of threads for looking up items, and of further threads for creating previews.
LIBRARY_THREADS = 4


class Library:
    """Stage that looks up individual items, creates previews of them and deletes items."""

    def __init__(self, indexes: Mapping[str, ServedIndex], timeouts: Timeouts):
        bind_to_loopback()
        unused_s = timeouts.request_s
        self._versions = {
            name: Versions(functools.partial(_open_previews, served), unused_s)
            for name, served in indexes.items()
        }
        self._indexes = indexes
        self._facets = {
            name: Versions(functools.partial(_open_facets, served), unused_s)
            for name, served in indexes.items()
        }
        self._maps = {
            name: Versions(functools.partial(_open_map, served), unused_s)
            for name, served in indexes.items()
        }
        self._item_scheduler = FairScheduler(_run_calls, workers=LIBRARY_THREADS)
        self._preview_scheduler = FairScheduler(_run_calls, workers=LIBRARY_THREADS)
        self._delete_scheduler = FairScheduler(_run_calls, workers=1)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the queueing delay and the utilisation, for `QueueingDelayPolicy`."""
        return busiest(self._item_scheduler, self._preview_scheduler)

    async def ping(self, caller: Caller) -> bool:
        """Responds to a readiness check."""
        return True

    @returns_errors
    async def item(
        self, index: str, edition: Edition, item_id: str, caller: Caller
    ) -> dict[str, Any] | None:
        """Returns the stored columns of an item without its vectors, or None for an unknown one."""
        call = functools.partial(self._item, index, edition, item_id)
        (row,) = await self._item_scheduler.run(caller, None, [call])
        return row

    def _item(self, index: str, edition: Edition, item_id: str) -> dict[str, Any] | None:
        previews = self._versions[index].get(edition)
        table = previews.index.items([item_id], ITEM.names)
        (row,) = table.to_pylist() or [None]
        if row is not None:
            row["metadata"] = json.loads(row["metadata"] or "{}")
        return row

    @returns_errors
    async def delete(
        self,
        index: str,
        item_ids: list[str] | None,
        filter: str | None,
        is_dry: bool,
        caller: Caller,
    ) -> dict[str, int]:
        """Deletes items in a single job.

        Returns how many were `selected`, `unknown` and `deleted`. An error has the field `WRITER`
        if another job is writing to the index.
        """
        uri = self._indexes[index].uri
        spec = parse(DeleteSpec, {"index": uri, "ids": item_ids, "filter": filter})
        call = functools.partial(_delete, spec, is_dry)
        (counts,) = await self._delete_scheduler.run(caller, None, [call])
        return counts

    @returns_errors
    async def preview(
        self,
        index: str,
        edition: Edition,
        item_id: str,
        media: str,
        seconds: float | None,
        width: int | None,
        caller: Caller,
    ) -> tuple[bytes, str]:
        """Returns the image or audio of an item as an encoded file, with its media type.

        An error has the field `documents` if the file has changed since it was indexed.
        """
        with logged("preview", media=media):
            arguments = index, edition, item_id, media, seconds, width
            call = functools.partial(self._preview, *arguments)
            (content,) = await self._preview_scheduler.run(caller, None, [call])
            return content

    def _preview(
        self,
        index: str,
        edition: Edition,
        item_id: str,
        media: str,
        seconds: float | None,
        width: int | None,
    ) -> tuple[bytes, str]:
        previews = self._versions[index].get(edition)
        if media == "image":
            image = previews.image(item_id, seconds)
            image = image if width is None else thumbnail(image, width)
            return image, media_type(image)
        import soundfile  # of the extra `media`

        samples, rate, _ = previews.audio(item_id)
        wave = io.BytesIO()
        soundfile.write(wave, samples, rate, format="WAV", subtype="PCM_16")
        return wave.getvalue(), "audio/wav"

    @returns_errors
    async def media(
        self, index: str, edition: Edition, item_id: str, range: ByteRange, caller: Caller
    ) -> MediaPart:
        """Returns a part of the file of an item. See `preview` for errors."""
        with logged("media"):

            def read() -> MediaPart:
                return self._versions[index].get(edition).media(item_id, range)

            (part,) = await self._preview_scheduler.run(caller, None, [read])
            return part

    @returns_errors
    async def facets(self, index: str, edition: Edition, caller: Caller) -> IndexFacets:
        """Returns the facets of an index, the sizes of its representations, and examples."""
        with logged("facets"):
            call = functools.partial(self._facets[index].get, edition)
            (facets,) = await self._item_scheduler.run(caller, None, [call])
            return facets

    @returns_errors
    async def item_map(self, index: str, edition: Edition, caller: Caller) -> str:
        """Returns the positions of the items of an index as CSV, see `project_items`."""
        with logged("map"):
            call = functools.partial(self._maps[index].get, edition)
            (text,) = await self._item_scheduler.run(caller, None, [call])
            return text

    @returns_errors
    async def stored_query(
        self,
        index: str,
        edition: Edition,
        item_id: str,
        representation: str,
        box: Sequence[float] | None,
        times: Sequence[float] | None,
        caller: Caller,
    ) -> Queries:
        """Returns the stored vectors of an item, or of a part of it, as a query."""
        with logged("stored_query"):

            def read() -> Queries:
                opened = self._versions[index].get(edition).index
                return stored_query(opened, item_id, representation, box, times)

            (query,) = await self._item_scheduler.run(caller, None, [read])
            return query


def _run_calls(group: None, calls: list[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def _delete(spec: DeleteSpec, is_dry: bool) -> dict[str, int]:
    try:
        progress = delete.run(spec, job=job_id(), report=log.info, is_dry=is_dry)
    except LeaseHeld:  # its message names processes of the server
        raise SpecError(WRITER, spec.index, "an index without a writer") from None
    return {
        "selected": progress.selected,
        "unknown": progress.unknown,
        "deleted": progress.removed,
    }


def _open_previews(served: ServedIndex, edition: Edition) -> Previews:
    return Previews(open_edition(served.uri, edition), served.documents, only_indexed=True)


def _open_map(served: ServedIndex, edition: Edition) -> str:
    table = project_items(open_edition(served.uri, edition))
    return Table([table.column_names, *zip(*table.to_pydict().values(), strict=True)]).csv()


def _open_facets(served: ServedIndex, edition: Edition) -> IndexFacets:
    index = open_edition(served.uri, edition)
    found = index_facets(index)
    examples = [
        ExampleQuery(example.query, representation_info(index, example.representation).name)
        for example in served.examples
    ]
    return replace(found, examples=examples or found.examples)

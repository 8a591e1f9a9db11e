"""Stage that serves stored items and their previews, and deletes items."""

from __future__ import annotations

import functools
import io
import json
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import soundfile

from pipeline.config import SpecError, parse
from pipeline.index import delete, job_id
from pipeline.index.delete import DeleteSpec
from pipeline.index.reader import Edition, open_edition
from pipeline.index.writer import LeaseHeld
from pipeline.schema import ITEM
from pipeline.search.previews import Previews
from pipeline.serve.outcomes import logged, returns_errors
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.scheduler import Caller, FairScheduler
from pipeline.serve.settings import ServedIndex
from pipeline.serve.versions import Versions

log = logging.getLogger("ray.serve")

#: Field of the error that another job is writing to the index.
WRITER = "writer"
#: Number of threads for looking up items, and of further threads for creating previews.
LIBRARY_THREADS = 4


class Library:
    """Stage that looks up individual items, creates previews of them and deletes items."""

    def __init__(self, indexes: Mapping[str, ServedIndex]):
        bind_to_loopback()
        self._versions = {
            name: Versions(functools.partial(_open_previews, served))
            for name, served in indexes.items()
        }
        self._indexes = indexes
        self._item_scheduler = FairScheduler(_run_calls, workers=LIBRARY_THREADS)
        self._preview_scheduler = FairScheduler(_run_calls, workers=LIBRARY_THREADS)
        self._delete_scheduler = FairScheduler(_run_calls, workers=1)

    async def ping(self, caller: Caller) -> bool:
        """Responds to a readiness check."""
        return True

    @returns_errors
    async def item(
        self, index: str, edition: Edition, item_id: str, caller: Caller
    ) -> dict[str, Any] | None:
        """Returns the stored columns of an item without its vectors.

        Returns None if it is not in the index.
        """
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
        """Deletes items of an index in a single job.

        Args:
            index: Name of the index.
            item_ids: Ids of the items, or None.
            filter: SQL condition that selects the items, or None.
            is_dry: Whether only to count the items.
            caller: The access key, and the time limit in seconds.

        Returns:
            The number of items that were `selected`, are `unknown` and were `deleted`.

        Raises:
            SpecError: The filter is invalid, or another job is writing (field `WRITER`).
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
        caller: Caller,
    ) -> tuple[bytes, str]:
        """Returns the image or audio of an item as an encoded file, with its media type.

        Args:
            index: Name of the index.
            edition: Version of the index.
            item_id: Id of the item.
            media: "image" or "audio".
            seconds: Time of a video frame in the parent, in seconds.
            caller: The access key, and the time limit in seconds.

        Raises:
            SpecError: The item has no preview, or its file has been removed or modified since it
                was indexed (field `documents`).
        """
        with logged("preview", media=media):
            call = functools.partial(self._preview, index, edition, item_id, media, seconds)
            (content,) = await self._preview_scheduler.run(caller, None, [call])
            return content

    def _preview(
        self, index: str, edition: Edition, item_id: str, media: str, seconds: float | None
    ) -> tuple[bytes, str]:
        previews = self._versions[index].get(edition)
        if media == "image":
            image = previews.image(item_id, seconds)
            return image, _media_type(image)
        samples, rate, _ = previews.audio(item_id)
        wave = io.BytesIO()
        soundfile.write(wave, samples, rate, format="WAV", subtype="PCM_16")
        return wave.getvalue(), "audio/wav"


def _run_calls(group: None, calls: list[Callable[[], Any]]) -> Generator[None, None, list[Any]]:
    """Runs functions in one slice."""
    yield from ()
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


def _media_type(image: bytes) -> str:
    """Determines the media type of an encoded image from its first bytes.

    >>> _media_type(b"RIFF....WEBP")
    'image/webp'
    """
    if image.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if image[8:12] == b"WEBP" else "image/jpeg"

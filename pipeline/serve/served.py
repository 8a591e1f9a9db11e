"""The indexes of a server, each in the newest version that every shard has open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Edition, Index
from pipeline.search.representations import representation_info
from pipeline.serve.calls import Handle, Stages
from pipeline.serve.errors import ApiError, of_spec_error
from pipeline.serve.outcomes import result
from pipeline.serve.settings import ServedIndex, ServeSpec

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Served:
    """A version of an index that is served, without its vectors."""

    name: str
    spec: ServedIndex
    index: Index
    edition: Edition

    @property
    def version(self) -> int:
        """The Lance version."""
        return self.edition.version

    def representation(self, name: str | None) -> RepresentationInfo:
        """Returns the metadata of a representation to search; default `full`, else the first.

        Raises:
            ApiError: There is none.
        """
        if name is None and not self.index.representations():
            raise ApiError("unavailable", f"index {self.name} has no representation yet")
        try:
            return representation_info(self.index, name)
        except SpecError as error:
            raise of_spec_error(error) from None


class ServedIndexes:
    """The served version of each index.

    A request uses one version from its beginning to its end. A new version is opened by the stages
    first and served when it is ready.

    Args:
        count: Called with the event and the stage when a new version cannot be opened.
    """

    def __init__(
        self, settings: ServeSpec, stages: Stages[Handle], count: Callable[[str, str], None]
    ):
        self._settings, self._stages, self._count = settings, stages, count
        self._served: dict[str, Served] = {}
        self._refreshing: asyncio.Task | None = None

    async def start(self) -> None:
        """Opens every index, and starts to look for new versions.

        Raises:
            SpecError: An index is missing.
        """
        for name in self._settings.indexes:
            await self._refresh(name)
        self._refreshing = asyncio.create_task(self._keep_fresh())

    async def stop(self) -> None:
        """Stops looking for new versions."""
        if self._refreshing:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._settings.reload_interval_s)
            for name in self._settings.indexes:
                try:
                    await self._refresh(name)
                except Exception as error:  # the present version stays in service
                    self._count("reload_failed", "gateway")
                    log.warning("index %s: no new version is served: %s", name, error)

    async def _refresh(self, name: str) -> None:
        """Serves the newest version of an index, once every shard has opened it."""
        spec = self._settings.indexes[name]
        present = self._served.get(name)
        served = await asyncio.to_thread(_newest, name, spec, present)
        if served is None:
            return
        representations = served.index.representations()
        wanted = [n for n in spec.preload if n in representations]
        if representations and not spec.preload:
            wanted = [served.representation(None).name]
        shards = self._stages.searchers[name]
        calls: list[Awaitable] = [s.prepare.remote(served.edition, wanted) for s in shards]
        for outcome in await asyncio.gather(*calls):
            result(outcome)
        self._served[name] = served
        if present is not None:
            log.info("index %s: version %d is served now", name, served.version)

    def __getitem__(self, name: str) -> Served:
        return self._served[name]

    @property
    def names(self) -> list[str]:
        """Names of the indexes."""
        return list(self._served)


def _newest(name: str, spec: ServedIndex, present: Served | None) -> Served | None:
    """Returns the newest version of an index; None if it is served already."""
    index = Index(spec.uri)
    edition = index.edition
    if present is not None and edition == present.edition:
        return None
    return Served(name, spec, index, edition)

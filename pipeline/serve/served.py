"""Indexes that the server serves, each in the newest version that all of its shards have opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Edition, Index
from pipeline.scores import Score
from pipeline.search.candidates import EXACT, generators
from pipeline.search.options import SearchOptions
from pipeline.search.representations import representation_info
from pipeline.serve.calls import Handle, Stages
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.outcomes import unwrap
from pipeline.serve.settings import ServedCandidates, ServedIndex, ServeSpec

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Served:
    """Version of an index that is being served, without its vectors."""

    name: str
    spec: ServedIndex
    index: Index
    edition: Edition

    @property
    def version(self) -> int:
        """The Lance version."""
        return self.edition.version

    def representation(self, name: str | None) -> RepresentationInfo:
        """Returns the metadata of a representation, which must be searchable.

        Args:
            name: Name of the representation. Default: `full` if the index has it, else the first.

        Raises:
            ApiError: The index has no such representation.
        """
        if name is None and not self.index.representations():
            raise ApiError("unavailable", f"index {self.name} has no representation yet")
        try:
            return representation_info(self.index, name)
        except SpecError as error:
            raise from_spec_error(error) from None

    def default_candidates(self, info: RepresentationInfo, score: Score) -> ServedCandidates | None:
        """Returns the default candidate generator of a search, or None if all items are scored."""
        candidates = self.spec.candidates.get(info.name) or self.spec.candidates.get(info.column)
        if candidates is None or score == "single_vector":
            return None
        is_built = candidates.generator in generators(self.index, info)
        return candidates if is_built else None

    def default_options(self, representation: str) -> SearchOptions:
        """Returns the options of a search of a representation without other options."""
        candidates = self.default_candidates(self.representation(representation), "maxsim")
        name = EXACT if candidates is None else candidates.generator
        return SearchOptions(representation, candidates=name)


class ServedIndexes:
    """Versions of all indexes that are being served.

    A request uses the same version from beginning to end. A new version is served as soon as all
    shards have opened it.

    Args:
        settings: Settings of the server.
        stages: Handles of the stages.
        count: Called with "reload_failed" and "gateway" if a new version cannot be opened.
    """

    def __init__(
        self, settings: ServeSpec, stages: Stages[Handle], count: Callable[[str, str], None]
    ):
        self._settings, self._stages, self._count = settings, stages, count
        self._served: dict[str, Served] = {}
        self._refreshing: asyncio.Task | None = None
        self._locks = {name: asyncio.Lock() for name in settings.indexes}

    async def start(self) -> None:
        """Opens all indexes and starts to check them periodically for new versions.

        Raises:
            SpecError: An index is missing.
        """
        for name in self._settings.indexes:
            await self._refresh(name)
        self._refreshing = asyncio.create_task(self._refresh_loop())

    async def stop(self) -> None:
        """Stops checking for new versions."""
        if self._refreshing:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing

    async def _refresh_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.reload_interval_s)
            for name in self._settings.indexes:
                await self.refresh(name)

    async def refresh(self, name: str) -> None:
        """Serves the newest version of an index.

        If it cannot be opened, the present version remains in service.
        """
        try:
            await self._refresh(name)
        except Exception as error:
            self._count("reload_failed", "gateway")
            fields = {"event": "reload_failed", "index": name}
            log.warning("index %s could not be reloaded: %s", name, error, extra=fields)

    async def _refresh(self, name: str) -> None:
        """Serves the newest version of an index as soon as all shards have opened it."""
        async with self._locks[name]:  # an earlier version must not replace a later one
            await self._open(name)

    async def _open(self, name: str) -> None:
        spec = self._settings.indexes[name]
        current = self._served.get(name)
        served = await asyncio.to_thread(_open_newest, name, spec, current)
        if served is None:
            return
        representations = served.index.representations()
        names = []
        for requested in spec.preload:
            with contextlib.suppress(ApiError):  # the job may not have stored it yet
                names.append(served.representation(requested).name)
        if representations and not spec.preload:
            names = [served.representation(None).name]
        preload = [served.default_options(name) for name in names]
        shards = self._stages.searchers[name]
        calls: list[Awaitable] = [s.prepare.remote(served.edition, preload) for s in shards]
        for outcome in await asyncio.gather(*calls):
            unwrap(outcome)
        self._served[name] = served
        if current is not None:
            fields = {"event": "reloaded", "index": name, "version": served.version}
            log.info("index %s reloaded: version %d", name, served.version, extra=fields)

    def __getitem__(self, name: str) -> Served:
        return self._served[name]

    @property
    def names(self) -> list[str]:
        """Names of the indexes."""
        return list(self._served)


def _open_newest(name: str, spec: ServedIndex, current: Served | None) -> Served | None:
    """Returns the newest version of an index, or None if this version is being served already."""
    index = Index(spec.uri)
    edition = index.edition
    if current is not None and edition == current.edition:
        return None
    return Served(name, spec, index, edition)

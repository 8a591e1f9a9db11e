"""Indexes that the server serves, each in the newest version that all of its shards have opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Edition, IndexReader
from pipeline.search.candidates import EXACT, default_candidates, generators
from pipeline.search.federation import Federation
from pipeline.search.options import SearchOptions, representation_info
from pipeline.search.scores import Score
from pipeline.serve.calls import Handle, Stages
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.outcomes import Failure, unwrap
from pipeline.serve.settings import ServedCandidates, ServedIndex, ServeSpec
from pipeline.serve.vectors import SearchVectors

log = logging.getLogger("ray.serve")

#: Stages that load vectors.
StageName = Literal["search", "rerank"]
#: Time for which replicas keep the vectors that a request used, also in later versions, in seconds.
RECENT_SECONDS = 3600


@dataclass(frozen=True)
class Served:
    """Version of an index that is being served, without its vectors."""

    name: str
    spec: ServedIndex
    index: IndexReader
    edition: Edition

    @classmethod
    def newest(cls, name: str, spec: ServedIndex) -> Served:
        """Opens the newest version of an index."""
        index = IndexReader(spec.uri)
        return cls(name, spec, index, index.edition)

    @property
    def version(self) -> int:
        """The Lance version."""
        return self.edition.version

    def representation(self, name: str | None) -> RepresentationInfo:
        """Returns the metadata of a representation, which must be searchable.

        Raises:
            ApiError: The index has no such representation.
        """
        if name is None and not self.index.representations():
            raise ApiError("unavailable", f"index {self.name} has no representation yet")
        try:
            return representation_info(self.index, name)
        except SpecError as error:
            raise from_spec_error(error) from None

    def default_candidates(self, info: RepresentationInfo, score: Score) -> ServedCandidates:
        """Returns the default candidate generator of a search."""
        candidates = self.spec.candidates.get(info.name) or self.spec.candidates.get(info.column)
        exact = ServedCandidates(generator=EXACT)
        if candidates is None and score == "maxsim":
            name = default_candidates(self.index, info, self.spec.device)
            return ServedCandidates(generator=name)
        if candidates is None or score == "single_vector":
            return exact
        is_built = candidates.generator in generators(self.index, info)
        return candidates if is_built else exact

    def preloaded(self) -> set[SearchVectors]:
        """Returns the vectors that are loaded before the first request."""
        names = []
        for requested in self.spec.preload:
            with contextlib.suppress(ApiError):  # the job may not have stored it yet
                names.append(self.representation(requested).name)
        if self.index.representations() and not self.spec.preload:
            names = [self.representation(None).name]
        return {SearchVectors.of(self.default_options(name)) for name in names}

    def default_options(self, representation: str) -> SearchOptions:
        """Returns the options of a search of a representation without other options."""
        candidates = self.default_candidates(self.representation(representation), "maxsim")
        return SearchOptions(representation=representation, candidates=candidates.generator)


@dataclass(frozen=True)
class ServedFederation:
    """Federation with the served versions of the indexes of its members, by member."""

    name: str
    spec: Federation
    members: dict[str, Served]


class ServedIndexes:
    """Versions of all indexes that are being served.

    A request uses the same version from beginning to end. A new version is served as soon as all
    replicas of the searchers have loaded what is preloaded, and all replicas of searchers and
    rerankers the vectors of recent requests. Replicas that start later load the same.

    Attributes:
        members: Names of the indexes of each federation by member.
    """

    def __init__(
        self, settings: ServeSpec, stages: Stages[Handle], count: Callable[[str, str], None]
    ):
        self._settings, self._stages, self._count = settings, stages, count
        self._served: dict[str, Served] = {}
        self.members = {
            name: {key: settings.member_index(member) for key, member in spec.members.items()}
            for name, spec in settings.federations.items()
        }
        self._refreshing: asyncio.Task | None = None
        self._locks = {name: asyncio.Lock() for name in settings.indexes}
        self._recent: dict[str, dict[tuple[StageName, SearchVectors], float]] = {
            name: {} for name in settings.indexes
        }

    async def start(self) -> None:
        """Opens all indexes and starts to check them periodically for new versions."""
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
        """Serves the newest version of an index, or the present one if that cannot be opened."""
        try:
            await self._refresh(name)
        except Exception as error:
            self._count("reload_failed", "gateway")
            fields = {"event": "reload_failed", "index": name}
            log.warning("index %s could not be reloaded: %s", name, error, extra=fields)

    async def _refresh(self, name: str) -> None:
        """Serves the newest version of an index as soon as all shards have opened it."""
        async with self._locks[name]:  # an earlier version must not replace a later one
            spec, current = self._settings.indexes[name], self._served.get(name)
            served = await asyncio.to_thread(_open_newest, name, spec, current)
            if served is None:
                assert current is not None
                await self._load_recent(current)
                return
            preload = served.preloaded()
            shards = self._stages.searchers[name]
            # Waits for replicas that have not started, which a broadcast does not.
            calls: list[Awaitable] = [s.prepare.remote(served.edition, preload) for s in shards]
            for outcome in await asyncio.gather(*calls):
                unwrap(outcome)
            for outcome in await self._prepare_all("search", served, preload):
                unwrap(outcome)
            await self._load_recent(served)
            self._served[name] = served
            if current is not None:
                fields = {"event": "reloaded", "index": name, "version": served.version}
                log.info("index %s reloaded: version %d", name, served.version, extra=fields)

    def used(self, name: str, stage: StageName, vectors: SearchVectors) -> None:
        """Notes that a request has used vectors, so that all replicas of the stage load them."""
        self._recent[name][stage, vectors] = time.monotonic()

    async def _load_recent(self, served: Served) -> None:
        """Lets all replicas load the preloaded vectors and those of recent requests."""
        recent, oldest = self._recent[served.name], time.monotonic() - RECENT_SECONDS
        for key in [key for key, used in recent.items() if used < oldest]:
            del recent[key]
        for stage in get_args(StageName):
            vectors = {vectors for used_stage, vectors in recent if used_stage == stage}
            if stage == "search":
                vectors |= served.preloaded()
            for outcome in await self._prepare_all(stage, served, vectors):
                if isinstance(outcome, Failure):  # a later request reports it
                    log.warning("index %s: not loaded: %s", served.name, outcome.error)

    async def _prepare_all(
        self, stage: StageName, served: Served, vectors: Collection[SearchVectors]
    ) -> list[Failure | None]:
        """Loads vectors in all running replicas of a stage. Ignores replicas that die."""
        handles: Sequence[Handle] = [self._stages.rerankers[served.name]]
        if stage == "search":
            handles = self._stages.searchers[served.name]
            handles = handles[:1] if served.spec.gang else handles  # a gang is one deployment
        outcomes: list[Failure | None] = []
        for handle in handles:
            response = handle.broadcast("prepare", served.edition, vectors)
            with contextlib.suppress(DeploymentUnavailableError):
                results = await response.results_async(return_exceptions=True)
                outcomes += [
                    Failure(result) if isinstance(result, Exception) else result
                    for result in results
                    if not isinstance(result, RayActorError)
                ]
        return outcomes

    def __getitem__(self, name: str) -> Served:
        return self._served[name]

    @property
    def names(self) -> list[str]:
        """Names of the indexes."""
        return list(self._served)

    def federation(self, name: str) -> ServedFederation:
        """Returns a federation with the present versions of its members."""
        members = {key: self._served[index] for key, index in self.members[name].items()}
        return ServedFederation(name, self._settings.federations[name], members)


def _open_newest(name: str, spec: ServedIndex, current: Served | None) -> Served | None:
    newest = Served.newest(name, spec)
    return None if current is not None and newest.edition == current.edition else newest

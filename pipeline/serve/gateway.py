"""State shared by the routes of a gateway."""

from __future__ import annotations

import asyncio
import time

from pipeline.config import MissingField, SpecError
from pipeline.serve.auth import Auth
from pipeline.serve.engine import Engine
from pipeline.serve.errors import ApiError
from pipeline.serve.evaluations import EvaluationStore
from pipeline.serve.keys import ANONYMOUS, Key
from pipeline.serve.metrics import Metrics
from pipeline.serve.rates import Limiter
from pipeline.serve.scheduler import FairSlots
from pipeline.serve.served import Served, ServedFederation
from pipeline.serve.settings import ServeSpec

#: Interval at which draining checks for requests in progress, in seconds.
DRAIN_CHECK_SECONDS = 0.05


class Gateway:
    """State of the gateway: the engine, authentication and the requests in progress."""

    def __init__(
        self,
        settings: ServeSpec,
        engine: Engine,
        metrics: Metrics,
        store: EvaluationStore | None = None,
        limiter: Limiter | None = None,
    ):
        self.settings, self.engine, self.metrics, self.store = settings, engine, metrics, store
        self.auth = Auth(settings, limiter)
        are_shared = self.auth.has_keys
        self.in_flight = FairSlots(settings.limits.max_in_flight_requests, are_shared=are_shared)
        self.bodies = FairSlots(settings.limits.max_pending_bodies, are_shared=are_shared)
        self._is_draining = False

    def check_running(self) -> None:
        """Raises `ApiError` if the server is shutting down."""
        if self._is_draining:
            raise ApiError("unavailable", "the server is shutting down")

    async def drain(self) -> None:
        """Rejects new requests and waits until the requests in progress have been answered."""
        self._is_draining = True
        end = time.monotonic() + self.settings.timeouts.drain_s
        while self.in_flight.num_acquired + self.bodies.num_acquired and time.monotonic() < end:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)

    def served(self, key: Key, name: str | None) -> Served:
        """Returns an index that a key can access. Its name is optional if it is the only one."""
        visible = self.visible_indexes(key)
        if name is None and len(visible) == 1:
            return self.engine.indexes[visible[0]]
        if name is None:
            names = ", ".join(visible)
            rule = f"one of {names}" if visible else "an index that this key can access"
            raise ApiError("invalid_argument", str(MissingField("index", None, rule)), "index")
        if name in self.visible_federations(key):
            rule = "the name of an index for this request"
            error = SpecError("index", name, rule, "is a federation")
            raise ApiError("invalid_argument", str(error), "index")
        if name not in visible:  # same response for inaccessible and for missing indexes
            raise ApiError("not_found", f"unknown index {name!r}", "index")
        return self.engine.indexes[name]

    def visible_indexes(self, key: Key) -> list[str]:
        """Returns the names of the indexes to which a key has access."""
        return [name for name in self.engine.indexes.names if key.can_access(name)]

    def federation(self, key: Key, name: str | None) -> ServedFederation | None:
        """Returns the federation of this name, if there is one that a key can access."""
        found = name if name in self.visible_federations(key) else None
        return None if found is None else self.engine.indexes.federation(found)

    def visible_federations(self, key: Key) -> list[str]:
        """Returns the names of the federations to which, and to all indexes, a key has access."""
        return [
            name
            for name, members in self.engine.indexes.members.items()
            if all(map(key.can_access, (name, *members.values())))
        ]

    def check_delete(self, key: Key) -> None:
        """Raises `ApiError` if a key is not allowed to delete items."""
        if not key.delete:
            message = f"the key {key.name} is not allowed to delete items"
            if key is ANONYMOUS:
                message = "deleting requires an access key with `delete: true`"
            raise ApiError("forbidden", message)

    def evaluations(self, key: Key) -> EvaluationStore:
        """Returns the store of the evaluations, if the key may use it."""
        if self.store is None:
            message = "evaluations are disabled on this server (evaluations.folder is not set)"
            raise ApiError("not_found", message)
        if not key.evaluate:
            message = f"the key {key.name} is not allowed to run evaluations"
            raise ApiError("forbidden", message)
        return self.store

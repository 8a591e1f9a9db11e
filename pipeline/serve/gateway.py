"""The state of a gateway: what its routes share, and what is in progress."""

from __future__ import annotations

import asyncio
import time

from pipeline.config import MissingField
from pipeline.serve.auth import Auth
from pipeline.serve.engine import Engine
from pipeline.serve.errors import ApiError
from pipeline.serve.evaluations import Store
from pipeline.serve.keys import Key
from pipeline.serve.metrics import Metrics
from pipeline.serve.served import Served
from pipeline.serve.settings import ServeSpec
from pipeline.serve.turns import Shares

#: Seconds between two checks whether all requests are answered.
DRAIN_CHECK_SECONDS = 0.05


class Gateway:
    """The engine, the access keys, and the requests in progress.

    Args:
        store: Evaluations; None if the settings have no folder for them.
    """

    def __init__(
        self, settings: ServeSpec, engine: Engine, metrics: Metrics, store: Store | None = None
    ):
        self.settings, self.engine, self.metrics, self.store = settings, engine, metrics, store
        self.auth = Auth(settings)
        are_shared = self.auth.has_keys
        self.in_flight = Shares(settings.limits.max_in_flight_requests, are_shared=are_shared)
        self.bodies = Shares(settings.limits.max_pending_bodies, are_shared=are_shared)
        self._is_draining = False

    def check_running(self) -> None:
        """Raises `ApiError` if the server takes no more requests."""
        if self._is_draining:
            raise ApiError("unavailable", "the server is being stopped")

    async def drain(self) -> None:
        """Takes no more requests, and waits until those in progress are answered."""
        self._is_draining = True
        end = time.monotonic() + self.settings.timeouts.drain_s
        while self.in_flight.taken + self.bodies.taken and time.monotonic() < end:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)

    def served(self, key: Key, name: str | None) -> Served:
        """Returns an index that the key may see; default the only one.

        Raises:
            ApiError: There is none.
        """
        visible = self.visible_indexes(key)
        if name is None and len(visible) == 1:
            return self.engine.indexes[visible[0]]
        if name is None:
            names = ", ".join(visible)
            rule = f"one of {names}" if visible else "an index that this key can access"
            raise ApiError("invalid_argument", str(MissingField("index", None, rule)), "index")
        if name not in visible:  # nor does the answer tell that a hidden one exists
            raise ApiError("not_found", f"unknown index {name!r}", "index")
        return self.engine.indexes[name]

    def visible_indexes(self, key: Key) -> list[str]:
        """Returns the names of the indexes that a key may see."""
        return [name for name in self.engine.indexes.names if key.may_see(name)]

    def evaluations(self, key: Key) -> Store:
        """Returns the evaluations.

        Raises:
            ApiError: The server has none, or the key may not ask for them.
        """
        if self.store is None:
            raise ApiError("not_found", "this server runs no evaluations (evaluations.folder)")
        if not key.evaluate:
            raise ApiError("forbidden", f"the key {key.name} may not ask for evaluations")
        return self.store

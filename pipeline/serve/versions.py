"""Versions of an index that are open in a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeline.index.reader import Edition

T = TypeVar("T")

#: Maximum number of open versions per index and stage: the newest one, and the previous one for
#: requests in progress.
MAX_OPEN_VERSIONS = 2


class Versions(Generic[T]):
    """Versions of an index that are open in a process.

    The version that was opened last stays open. An earlier one is closed when it has not been used
    for `unused_s` seconds since, or when it is the least recently used of more than
    `MAX_OPEN_VERSIONS`. A request that still needs it opens it again.
    """

    def __init__(self, load: Callable[[Edition], T], unused_s: float):
        self._load, self._unused_s = load, unused_s
        # Versions with the time of their last use, in this order.
        self._open: dict[Edition, tuple[T, float]] = {}
        self._newest: Edition | None = None
        self._lock = threading.Lock()
        self._load_locks: dict[Edition, threading.Lock] = {}
        self._has_timer = False

    @property
    def editions(self) -> set[Edition]:
        """Versions that are open."""
        with self._lock:
            return set(self._open)

    def get(self, edition: Edition) -> T:
        """Returns a version. Each version is opened once, which does not block access to others."""
        with self._lock:
            if edition in self._open:
                return self._use(edition)
            load_lock = self._load_locks.setdefault(edition, threading.Lock())
        with load_lock:
            with self._lock:
                if edition in self._open:
                    return self._use(edition)
            version = self._load(edition)
            with self._lock:
                if self._newest is not None:  # requests may have begun with it until now
                    self._use(self._newest)
                self._open[edition] = version, time.monotonic()
                self._newest = edition
                self._load_locks.pop(edition, None)
                while len(self._open) > MAX_OPEN_VERSIONS:
                    del self._open[next(iter(self._open))]
                self._start_timer()
            return version

    def _use(self, edition: Edition) -> T:
        version, _ = self._open.pop(edition)
        self._open[edition] = version, time.monotonic()
        return version

    def _start_timer(self) -> None:
        last_uses = [used for edition, (_, used) in self._open.items() if edition != self._newest]
        if last_uses and not self._has_timer:
            seconds = last_uses[0] + self._unused_s - time.monotonic()
            timer = threading.Timer(seconds, self._close_unused)
            timer.daemon = self._has_timer = True  # a process does not wait for it to exit
            timer.start()

    def _close_unused(self) -> None:
        with self._lock:
            limit = time.monotonic() - self._unused_s
            for edition, (_, used) in list(self._open.items()):
                if edition != self._newest and used <= limit:
                    del self._open[edition]
            self._has_timer = False
            self._start_timer()

"""Cache of the open versions of an index."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeline.index.reader import Edition

T = TypeVar("T")

#: Maximum number of open versions per index and stage: the newest one, and the previous one for
#: requests in progress.
MAX_OPEN_VERSIONS = 2


class Versions(Generic[T]):
    """Cache of the versions of an index that are open in a process, with LRU eviction.

    Args:
        load: Opens a version.
    """

    def __init__(self, load: Callable[[Edition], T]):
        self._load = load
        self._open: OrderedDict[Edition, T] = OrderedDict()
        self._lock = threading.Lock()
        self._load_locks: dict[Edition, threading.Lock] = {}

    @property
    def editions(self) -> set[Edition]:
        """Versions that are open."""
        with self._lock:
            return set(self._open)

    def get(self, edition: Edition) -> T:
        """Returns a version. Each version is opened once, which does not block access to others."""
        with self._lock:
            if edition in self._open:
                self._open.move_to_end(edition)
                return self._open[edition]
            load_lock = self._load_locks.setdefault(edition, threading.Lock())
        with load_lock:
            with self._lock:
                if edition in self._open:
                    return self._open[edition]
            version = self._load(edition)
            with self._lock:
                self._open[edition] = version
                self._load_locks.pop(edition, None)
                while len(self._open) > MAX_OPEN_VERSIONS:
                    self._open.popitem(last=False)
            return version

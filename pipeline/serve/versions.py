"""The versions of an index that a stage has open."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeline.index.reader import Edition

T = TypeVar("T")

#: Versions of an index that a stage keeps open: the newest, and one with requests in progress.
OPEN_VERSIONS = 2


class Versions(Generic[T]):
    """The versions of an index that are open in a process, least recently used first.

    Args:
        make: Opens a version.
    """

    def __init__(self, make: Callable[[Edition], T]):
        self._make = make
        self._open: OrderedDict[Edition, T] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[Edition, threading.Lock] = {}

    def get(self, edition: Edition) -> T:
        """Returns a version, opened once; threads that want another do not wait for it."""
        with self._lock:
            if edition in self._open:
                self._open.move_to_end(edition)
                return self._open[edition]
            making = self._making.setdefault(edition, threading.Lock())
        with making:
            with self._lock:
                if edition in self._open:
                    return self._open[edition]
            made = self._make(edition)
            with self._lock:
                self._open[edition] = made
                self._making.pop(edition, None)
                while len(self._open) > OPEN_VERSIONS:
                    self._open.popitem(last=False)
            return made

"""Vectors that the open versions of an index share.

The vectors of a fragment never change, so that open versions of an index share them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch


def use_huge_pages(numbers: np.ndarray) -> None:
    """Asks Linux for huge pages for memory that has not been written, or a mapped file.

    The pages of a file are huge if they were not in memory and the file system supports it.
    Vectors of scattered candidates are then scored in 10 % (file) and 20 % (memory) less time.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        first = numbers.ctypes.data + -numbers.ctypes.data % mmap.PAGESIZE
        size = max(numbers.ctypes.data + numbers.nbytes - first, 0)
        address = ctypes.c_void_p(first)
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


@dataclass(frozen=True, eq=False)
class Storage:
    """Vectors of documents of a fragment in the memory of a device, or in a mapped file.

    Attributes:
        parts: Parts of the vectors by name, (T, width) each; contiguous.
        lengths: (S,) int64, number of vectors per document.
        rows: (S,) int64, ascending rows of the documents in their fragment.
    """

    parts: dict[str, torch.Tensor]
    lengths: torch.Tensor
    rows: np.ndarray

    def find(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns the indices of the documents in the given rows. None if one of them is missing.

        >>> storage = Storage({}, torch.tensor([3, 1, 2]), np.array([0, 2, 5]))
        >>> storage.find(np.array([2, 5])), storage.find(np.array([1, 2]))
        (array([1, 2]), None)
        """
        if len(rows) == len(self.rows):
            return np.arange(len(rows)) if np.array_equal(rows, self.rows) else None
        indices = np.searchsorted(self.rows, rows)
        in_range = indices < len(self.rows)
        found = in_range.all() and np.array_equal(self.rows[indices], rows)
        return indices if found else None


StorageT = TypeVar("StorageT", bound=Storage)


class SharedStorages(Generic[StorageT]):
    """Storages in use by key. Weak references release a storage with its last user."""

    def __init__(self) -> None:
        self._storages: WeakValueDictionary[Hashable, StorageT] = WeakValueDictionary()
        self._creating: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._storages)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._storages

    def get(
        self,
        key: Hashable,
        create: Callable[[], StorageT],
        is_usable: Callable[[StorageT], bool] = lambda storage: True,
    ) -> StorageT:
        """Returns the storage with a key. It is created once, even if several threads need it.

        Args:
            is_usable: Checks the storage in use. If False, a new one replaces it for later calls.
        """
        with self._lock:
            creating = self._creating.setdefault(key, threading.Lock())
        with creating:
            storage = self._storages.get(key)
            if storage is None or not is_usable(storage):
                storage = self._storages[key] = create()
            return storage

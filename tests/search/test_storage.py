"""Storages in use: created once, replaced, and released with their last user."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pipeline.search.packed import FLOATS, Segment
from pipeline.search.storage import SharedStorages, Storage


def storage(num_documents: int = 3, device: str = "cpu") -> Storage:
    values = torch.ones(num_documents, 4, dtype=torch.float16)
    segment = Segment(FLOATS, 4, {"values": values}, torch.ones(num_documents, dtype=torch.int64))
    copy = segment.to(device)
    return Storage(copy.parts, copy.lengths, np.arange(num_documents))


def test_is_created_once_and_released_with_its_last_user():
    storages = SharedStorages[Storage]()
    first = storages.get("a", storage)
    assert storages.get("a", storage) is first and storages.get("b", storage) is not first
    assert len(storages) == 1
    user = Segment(FLOATS, 4, first.parts, first.lengths, storage=first).prefix(1)
    reference = weakref.ref(first)
    del first
    assert storages.get("a", storage) is user.storage
    del user
    assert reference() is None and len(storages) == 0


def test_is_replaced_if_it_is_not_usable():
    storages = SharedStorages[Storage]()
    small = storages.get("a", storage)
    large = storages.get("a", lambda: storage(5), lambda found: len(found.rows) == 5)
    assert large is not small and len(small.rows) == 3
    assert storages.get("a", storage) is large


def test_error_leaves_no_storage():
    storages = SharedStorages[Storage]()

    def fail() -> Storage:
        raise OSError

    with pytest.raises(OSError):
        storages.get("a", fail)
    assert len(storages) == 0
    assert storages.get("a", storage).rows.tolist() == [0, 1, 2]


def test_threads_share_one_storage_and_wait_only_for_their_key():
    storages, num_created = SharedStorages[Storage](), 0
    has_begun, may_end = threading.Event(), threading.Event()

    def create() -> Storage:
        nonlocal num_created
        num_created += 1
        has_begun.set()
        assert may_end.wait(30)
        return storage()

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(storages.get, "a", create) for _ in range(4)]
        assert has_begun.wait(30)
        other = storages.get("b", storage)
        assert not any(call.done() for call in calls)
        may_end.set()
        found = [call.result() for call in calls]
    assert len({id(one) for one in found}) == num_created == 1 and found[0] is not other


@pytest.mark.gpu
def test_copies_on_a_gpu():
    storages = SharedStorages[Storage]()
    before = torch.cuda.memory_allocated()
    first = storages.get(("a", "cuda:0"), lambda: storage(1 << 20, "cuda"))
    used = torch.cuda.memory_allocated()
    assert used >= before + (1 << 23)
    second = storages.get(("a", "cuda:0"), lambda: storage(1 << 20, "cuda"))
    assert second.parts["values"].data_ptr() == first.parts["values"].data_ptr()
    assert torch.cuda.memory_allocated() == used
    del first, second
    assert torch.cuda.memory_allocated() == before

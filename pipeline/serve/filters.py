"""Evaluation of the filters of requests in subprocesses, which are killed at the deadline.

Lance evaluates a filter in internal threads that cannot be cancelled. `Filters` therefore runs at
most two worker processes, at most one per access key. A process is killed if its filter exceeds the
time limit, if the request is cancelled or if the parent process exits. Its memory is limited, and
it runs at low priority.

`python -m pipeline.serve.filters` runs a worker process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import queue
import resource
import struct
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.data.decode.process import PipedProcess
from pipeline.data.decode.serve import send
from pipeline.index.filters import matching_ids
from pipeline.index.reader import Edition, IndexReader, open_edition
from pipeline.serve.scheduler import Caller

#: Maximum number of worker processes.
MAX_PROCESSES = 2
#: Increment of the niceness of a worker process.
NICENESS = 10


class Filters:
    """Pool of processes that evaluate filters on an index or on one of its shards.

    Args:
        shard: (i, n) for the i-th of n shards, or None for all items.
    """

    def __init__(
        self,
        uri: str,
        shard: tuple[int, int] | None,
        timeout_s: float,
        memory_bytes: int = 4 << 30,
    ):
        self._uri, self._shard, self._timeout_s = uri, shard, timeout_s
        self._memory_bytes = memory_bytes
        self._idle: list[_Process] = []
        self._free = asyncio.Semaphore(MAX_PROCESSES)
        # Each key has a lock, so a key waits for at most one process.
        self._key_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def matching_ids(self, caller: Caller, edition: Edition, filter: str) -> pa.ChunkedArray:
        """Returns the ids of the items that match a filter."""
        async with asyncio.timeout(caller.timeout_s), self._key_locks[caller.key], self._free:
            process = self._idle.pop() if self._idle else await self._start_process()
            request = self._uri, list(edition), self._shard, filter
            future = asyncio.get_running_loop().run_in_executor(None, process.run, request)
            try:
                reply = await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
            except TimeoutError:
                raise TimeoutError(f"the filter took longer than {self._timeout_s:g} s") from None
            finally:
                if future.done() and "died" not in future.result():
                    self._idle.append(process)
                else:
                    process.kill()
        if "died" in reply:
            rule = f"a filter that needs at most {self._memory_bytes >> 20:,} MB of memory"
            raise SpecError("filter", filter, rule, "cannot be evaluated")
        if "error" in reply:
            raise SpecError(*reply["error"])
        return pa.ipc.open_stream(reply["ids"]).read_all()["item_id"]

    async def _start_process(self) -> _Process:
        return await asyncio.to_thread(_Process, self._memory_bytes)


class _Process:
    """Worker process that evaluates one filter at a time.

    The constructor waits until it is ready.
    """

    def __init__(self, memory_bytes: int):
        self._process = PipedProcess("-P", "-m", __name__, str(memory_bytes))
        self._process.stdout.read(1)

    def run(self, request: Any) -> dict[str, Any]:
        """Returns the reply, or `{"died": True}` if the process died."""
        try:
            send(self._process.stdin, request)
            (length,) = struct.unpack("<Q", self._process.stdout.read(8))
            reply = json.loads(self._process.stdout.read(length))
            for name, _, (size,) in reply.pop("bulk"):
                reply[name] = self._process.stdout.read(size)
        except (OSError, ValueError, struct.error):
            return {"died": True}
        return reply

    def kill(self) -> None:
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()

    def __del__(self) -> None:
        self._process.kill()


# -- worker process --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _open_index(uri: str, edition: Edition) -> IndexReader:
    return open_edition(uri, edition)


def _reply(uri: str, edition: list[Any], shard: list[int] | None, filter: str) -> dict[str, Any]:
    try:
        index = _open_index(uri, Edition(*edition))
        fragments = index.fragments((shard[0], shard[1]) if shard else None)
        table = pa.table({"item_id": matching_ids(index, filter, fragments)})
    except SpecError as error:
        return {"error": (error.field, error.value, error.rule, error.problem, error.note)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return {"ids": sink.getvalue().to_pybytes()}


def _read(requests: queue.SimpleQueue, stream: BinaryIO) -> None:
    """Queues requests until the parent closes the pipe or exits, and then exits."""
    while header := stream.read(8):
        requests.put(json.loads(stream.read(*struct.unpack("<Q", header))))
    os._exit(0)


def main() -> None:
    """Evaluates the filters that are received on standard input until it is closed."""
    os.nice(NICENESS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that libraries print must not corrupt the replies
    replies.write(b"!")
    replies.flush()
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, sys.stdin.buffer), daemon=True).start()
    while True:
        send(replies, _reply(*requests.get()))


if __name__ == "__main__":
    main()

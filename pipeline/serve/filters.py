"""Filters of requests, each evaluated in a process that is killed at the deadline.

Lance evaluates a filter in threads of its own, which nothing in the process can stop: after a
timeout they would go on for as long as the filter takes. `Filters` therefore asks processes, two at
most, and each key has at most one of them. A process is killed when its filter takes too long, when
the caller has gone, or with its parent; it has a limit of memory, and it leaves the cores to others
while they are busy.

`python -m pipeline.serve.filters` is such a process.
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
from pipeline.decoding.process import PipedProcess
from pipeline.decoding.serve import send
from pipeline.index.filters import matching_ids
from pipeline.index.reader import Edition, Index, open_edition
from pipeline.serve.turns import Caller

#: Filters that are evaluated at once.
PROCESSES = 2
#: What a process adds to its niceness.
NICENESS = 10


class Filters:
    """Evaluates filters over an index or a shard of it.

    Args:
        uri: URI of the index.
        shard: (i, n) for the i-th of n shards; None for all items.
        seconds: Maximum time of a filter.
        memory_bytes: Maximum memory of a filter, beyond what its process has when it starts.
    """

    def __init__(
        self,
        uri: str,
        shard: tuple[int, int] | None,
        seconds: float,
        memory_bytes: int = 4 << 30,
    ):
        self._uri, self._shard, self._seconds = uri, shard, seconds
        self._memory_bytes = memory_bytes
        self._idle: list[_Process] = []
        self._free = asyncio.Semaphore(PROCESSES)
        # One turn per key, so that those who wait for a process are each of another key.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def matching_ids(self, caller: Caller, edition: Edition, filter: str) -> pa.ChunkedArray:
        """Returns the ids of the items that a filter lets through.

        Raises:
            SpecError: The filter is invalid, or needs too much memory.
            TimeoutError: It takes too long.
        """
        async with asyncio.timeout(caller.seconds), self._turns[caller.key], self._free:
            process = self._idle.pop() if self._idle else await self._started()
            asked = self._uri, list(edition), self._shard, filter
            answer = asyncio.get_running_loop().run_in_executor(None, process.ask, asked)
            try:
                reply = await asyncio.wait_for(asyncio.shield(answer), self._seconds)
            except TimeoutError:
                raise TimeoutError(f"the filter took longer than {self._seconds:g} s") from None
            finally:
                if answer.done() and "died" not in answer.result():
                    self._idle.append(process)
                else:
                    process.kill()
        if "died" in reply:
            rule = f"a filter that needs at most {self._memory_bytes >> 20:,} MB of memory"
            raise SpecError("filter", filter, rule, "cannot be evaluated")
        if "error" in reply:
            raise SpecError(*reply["error"])
        return pa.ipc.open_stream(reply["ids"]).read_all()["item_id"]

    async def _started(self) -> _Process:
        return await asyncio.to_thread(_Process, self._memory_bytes)


class _Process:
    """A process that evaluates one filter at a time; it has started when it is made."""

    def __init__(self, memory_bytes: int):
        self._process = PipedProcess("-P", "-m", __name__, str(memory_bytes))
        self._process.stdout.read(1)

    def ask(self, asked: Any) -> dict[str, Any]:
        """Returns the reply of the process, or that it died, as it does without memory."""
        try:
            send(self._process.stdin, asked)
            (length,) = struct.unpack("<Q", self._process.stdout.read(8))
            reply = json.loads(self._process.stdout.read(length))
            for name, _, (size,) in reply.pop("bulk"):
                reply[name] = self._process.stdout.read(size)
        except (OSError, ValueError, struct.error):
            return {"died": True}
        return reply

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()

    def __del__(self) -> None:
        self._process.kill()


# -- the process -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _opened(uri: str, edition: Edition) -> Index:
    return open_edition(uri, edition)


def _reply(uri: str, edition: list[Any], shard: list[int] | None, filter: str) -> dict[str, Any]:
    try:
        index = _opened(uri, Edition(*edition))
        fragments = index.fragments((shard[0], shard[1]) if shard else None)
        table = pa.table({"item_id": matching_ids(index, filter, fragments)})
    except SpecError as error:
        return {"error": (error.field, error.value, error.rule, error.problem, error.note)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return {"ids": sink.getvalue().to_pybytes()}


def _read(requests: queue.SimpleQueue, stream: BinaryIO) -> None:
    """Queues requests until the parent has gone, which ends this process at once."""
    while head := stream.read(8):
        requests.put(json.loads(stream.read(*struct.unpack("<Q", head))))
    os._exit(0)


def main() -> None:
    """Answers requests from standard input until it is closed."""
    os.nice(NICENESS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the replies
    replies.write(b"!")
    replies.flush()
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, sys.stdin.buffer), daemon=True).start()
    while True:
        send(replies, _reply(*requests.get()))


if __name__ == "__main__":
    main()

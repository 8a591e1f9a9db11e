"""Processes that read files, with limits of time and memory: the side that asks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.config import Spec
from pipeline.decoding import Unreadable
from pipeline.decoding.serve import send

#: Reasons that may go away by themselves: the next run tries such items again.
RETRYABLE = ("timed out", "out of memory", "unreadable")

#: What starting the process may take, on a busy machine too.
START_SECONDS = 120.0
#: The C library keeps the memory of an image for the next one. By default it gives blocks of that
#: size back to the kernel, and a fifth of the time goes into getting and clearing them again.
#: One heap for all threads: a decoder's threads free what others took, and with a heap for each
#: the memory of a long video grows by a fifth.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_ARENA_MAX": "1",
}
#: The same for the process that asks, in glibc's numbers: never a mapping of its own for a block.
M_TRIM_THRESHOLD, M_MMAP_MAX, KEPT_BYTES = -1, -4, 512 << 20
#: What the process may be ahead of who reads it.
PIPE_BYTES = 1 << 20

#: A process reads so many files; then another is started. Decoders of video keep some memory of
#: every file, about 50 kB of a short clip, and the limit would be reached by no fault of a file.
FILES_A_PROCESS = 1000

_ROOT = str(Path(__file__).parents[2])
_processes = threading.local()


class Limits(Spec):
    """What reading one result may take: a page, a photo, the frames of a window."""

    seconds: float = Field(30.0, gt=0, le=86_400)
    memory_bytes: int = Field(4 << 30, ge=256 << 20)  # of address space


class DecodingProcess:
    """A process that reads files of one kind: started when needed, and again after it died.

    It serves one thread; `decoding_process` gives each its own. It ends with its maker.

    Args:
        module: what it runs, a module of `pipeline.decoding`.
    """

    def __init__(self, module: str, limits: Limits):
        self.module, self.limits = module, limits
        self._process: subprocess.Popen | None = None
        self._num_requests = 0

    def call(self, function: str, *arguments: Any) -> dict[str, Any]:
        """The one result of a function of the module.

        Raises:
            Unreadable: it cannot be had, or the process died or took too long.
        """
        self._request(function, *arguments)
        reply = self._reply()
        if "reason" in reply:
            self.stop()  # a library may keep its last error, and tell of it with the next file
            raise Unreadable(reply["reason"], reply["detail"])
        return reply

    def stream(
        self, number: int, function: str, *arguments: Any
    ) -> Iterator[dict[str, Any] | Unreadable]:
        """The `number` results that a generator function of the module yields, one after the other.

        After a crash, a time-out or an error of the whole file its other parts are not tried.
        """
        waiting = number
        try:
            self._request(function, *arguments)
            while waiting:
                try:
                    reply = self._reply()
                except Unreadable as error:
                    reply = {**vars(error), "is_last": True}
                if "reason" not in reply:
                    waiting -= 1
                    yield reply
                    continue
                for _ in range(waiting if reply["is_last"] else 1):
                    waiting -= 1
                    yield Unreadable(reply["reason"], reply["detail"])
        finally:
            if waiting:  # the reader stopped early: what comes now would be taken for other parts
                self.stop()

    def stop(self) -> None:
        """Kills the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _request(self, *request: Any) -> None:
        is_old = self._num_requests >= FILES_A_PROCESS
        if self._process is not None and (is_old or self._process.poll() is not None):
            self.stop()
        self._num_requests += 1
        if self._process is None:
            self._num_requests = 1
            paths = [_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "pipeline.decoding.serve"),
                    *(self.module, str(self.limits.memory_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={
                    **os.environ,
                    **KEEP_MEMORY,
                    "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                },
            )
            with contextlib.suppress(OSError):  # it reads the next part while one is taken
                fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._read(1, time.monotonic() + START_SECONDS)  # its start is no file's time
        send(self._process.stdin, request)

    def _reply(self) -> dict[str, Any]:
        """The next reply.

        Raises:
            Unreadable: the process died or took too long, and is stopped.
        """
        deadline = time.monotonic() + self.limits.seconds
        try:
            (length,) = struct.unpack("<Q", self._read(8, deadline))
            reply = dict(json.loads(bytes(self._read(length, deadline))))
            for name, dtype, shape in reply.pop("bulk", ()):
                size = math.prod(shape) * (np.dtype(dtype).itemsize if dtype else 1)
                data = self._read(size, deadline)
                reply[name] = np.frombuffer(data, dtype).reshape(shape) if dtype else bytes(data)
        except (ValueError, TypeError, RecursionError) as error:
            self.stop()  # a file may have taken the process over
            raise Unreadable("crashed", f"a malformed reply ({error})") from None
        return reply

    def _read(self, length: int, deadline: float) -> memoryview:
        if not 0 <= length <= self.limits.memory_bytes:  # more than the process can hold
            raise ValueError(f"of {length:,} bytes")
        view = memoryview(np.empty(length, np.uint8))  # not cleared first: frames are large
        stream = self._process.stdout.fileno()
        done = 0
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while done < length:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise Unreadable("timed out", f"more than {self.limits.seconds:g} s")
                if not (some := os.readv(stream, [view[done : done + PIPE_BYTES]])):
                    code = self._process.wait()
                    self.stop()
                    raise Unreadable("crashed", f"the library that reads it ended with code {code}")
                done += some
        return view

    def __del__(self) -> None:
        self.stop()


def keep_memory() -> None:
    """Lets this process keep the memory of large results, Arrow's too, for the next ones.

    Asking the kernel for the memory of the frames of a window, and having it cleared, can take as
    long as a fifth of decoding them. Does nothing where the C library cannot.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        pa.set_memory_pool(pa.system_memory_pool())


def decoding_process(module: str, limits: Limits) -> DecodingProcess:
    """The process of this thread that runs a module."""
    there = _processes.__dict__.setdefault("by_module", {})
    if (module, limits) not in there:
        there[module, limits] = DecodingProcess(module, limits)
    return there[module, limits]

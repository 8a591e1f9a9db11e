"""Processes that read untrusted files, with limits of time and memory: the parent's side."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.config import Spec
from pipeline.decoding import Unreadable
from pipeline.decoding.serve import send

#: Reasons that may be temporary: the next run retries such items.
RETRYABLE = ("timed out", "out of memory", "unreadable")

#: Time limit of starting the process, long enough for a busy machine.
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
#: Size of the pipe: how far the process may be ahead of its reader.
PIPE_BYTES = 1 << 20

#: Files that a process reads before it is replaced. Video decoders leak memory, about 50 kB per
#: short clip, and the memory limit would be reached without any file being at fault.
FILES_PER_PROCESS = 1000

_ROOT = str(Path(__file__).parents[2])
_processes = threading.local()


class PipedProcess:
    """A Python process and the pipes to its standard input and output.

    Args:
        arguments: Command line of the Python interpreter, such as `-m` and a module.
        environment: Environment variables in addition to those of this process.
        options: Further options of `subprocess.Popen`.

    Attributes:
        stdin: Pipe to the standard input of the process.
        stdout: Pipe from its standard output.
    """

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
    ):
        paths = [_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            },
            **options,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Returns whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process, without waiting for its end."""
        self._process.kill()

    def wait(self) -> int:
        """Waits for the end of the process, and returns its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Kills the process, waits for its end, and closes the pipes."""
        self.kill()
        self.wait()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.stdout.close()


class Limits(Spec):
    """Limits of reading one result: a page, an image, the frames of a window.

    Attributes:
        seconds: Time limit, in seconds.
        memory_bytes: Maximum size of the address space of the process, in bytes.
    """

    seconds: float = Field(30.0, gt=0, le=86_400)
    memory_bytes: int = Field(4 << 30, ge=256 << 20)


class DecodingProcess:
    """A process that reads files of one kind; it is started on demand and restarted if it dies.

    It serves one thread (see `decoding_process`) and ends with this object.

    Args:
        module: The module of `pipeline.decoding` that it runs.
        limits: Limits per result.
    """

    def __init__(self, module: str, limits: Limits):
        self.module, self.limits = module, limits
        self._process: PipedProcess | None = None
        self._num_requests = 0

    def call(self, function: str, *arguments: Any) -> dict[str, Any]:
        """Returns the one result of a function of the module.

        Raises:
            Unreadable: The file cannot be read, or the process died or timed out.
        """
        reply = self._reply(self._request(function, *arguments))
        if "reason" in reply:
            self.stop()  # a library may keep its last error, and tell of it with the next file
            raise Unreadable(reply["reason"], reply["detail"])
        return reply

    def stream(
        self, number: int, function: str, *arguments: Any
    ) -> Iterator[dict[str, Any] | Unreadable]:
        """Yields the `number` results of a generator function of the module.

        After a crash, a timeout or an error of the whole file, the remaining results are errors.
        """
        waiting = number
        try:
            process = self._request(function, *arguments)
            while waiting:
                try:
                    reply = self._reply(process)
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
            if waiting:  # the reader stopped early: later replies would be taken for other results
                self.stop()

    def stop(self) -> None:
        """Kills the process; the next request starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _request(self, *request: Any) -> PipedProcess:
        """Sends a request to the process, and returns the process."""
        is_old = self._num_requests >= FILES_PER_PROCESS
        if self._process is not None and (is_old or self._process.has_ended()):
            self.stop()
        self._num_requests += 1
        process = self._process or self._start()
        send(process.stdin, request)
        return process

    def _start(self) -> PipedProcess:
        process = PipedProcess(
            *("-P", "-m", "pipeline.decoding.serve"),
            *(self.module, str(self.limits.memory_bytes)),
            environment=KEEP_MEMORY,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._process, self._num_requests = process, 1
        with contextlib.suppress(OSError):  # it reads the next result while one is processed
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._read(process, 1, time.monotonic() + START_SECONDS)  # not in the time of a file
        return process

    def _reply(self, process: PipedProcess) -> dict[str, Any]:
        """Returns the next reply.

        Raises:
            Unreadable: The process died or timed out, and is stopped.
        """
        deadline = time.monotonic() + self.limits.seconds
        try:
            (length,) = struct.unpack("<Q", self._read(process, 8, deadline))
            reply = dict(json.loads(bytes(self._read(process, length, deadline))))
            for name, dtype, shape in reply.pop("bulk", ()):
                size = math.prod(shape) * (np.dtype(dtype).itemsize if dtype else 1)
                data = self._read(process, size, deadline)
                reply[name] = np.frombuffer(data, dtype).reshape(shape) if dtype else bytes(data)
        except (ValueError, TypeError, RecursionError) as error:
            self.stop()  # a file may have taken the process over
            raise Unreadable("crashed", f"a malformed reply ({error})") from None
        return reply

    def _read(self, process: PipedProcess, length: int, deadline: float) -> memoryview:
        if not 0 <= length <= self.limits.memory_bytes:  # more than the process can hold
            raise ValueError(f"of {length:,} bytes")
        view = np.empty(length, np.uint8).data  # not cleared first: frames are large
        stream = process.stdout.fileno()
        done = 0
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while done < length:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise Unreadable("timed out", f"more than {self.limits.seconds:g} s")
                if not (some := os.readv(stream, [view[done : done + PIPE_BYTES]])):
                    code = process.wait()
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
    """Returns the process of this thread that runs a module with these limits."""
    processes = _processes.__dict__.setdefault("by_module", {})
    if (module, limits) not in processes:
        processes[module, limits] = DecodingProcess(module, limits)
    return processes[module, limits]

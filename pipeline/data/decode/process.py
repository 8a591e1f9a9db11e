"""Client of decoding processes, which read untrusted files with limits on time and memory."""

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

from pipeline import extras
from pipeline.config import Spec
from pipeline.data.decode import Unreadable, join_surrogates
from pipeline.data.decode.serve import send

#: Packages of the decoding modules that need an extra.
DECODERS = {
    "audio": ("av", "soundfile", "soxr"),
    "video": ("av", "decord", "soundfile", "soxr"),
    "pdf": ("pypdfium2",),
}
#: Reasons that may be temporary. The next run retries items that were rejected for one of them.
RETRYABLE = ("timed out", "out of memory", "unreadable")

#: Time limit for starting a process, which is long enough for a busy machine.
START_SECONDS = 120.0
#: Environment variables that make glibc reuse the memory of large results. By default, glibc
#: returns blocks of the size of an image to the kernel. Allocating and clearing them again takes a
#: fifth of the decoding time. All threads share one arena, because the threads of a decoder free
#: each other's memory. With separate arenas, a long video needs a fifth more memory.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_ARENA_MAX": "1",
}
#: The corresponding glibc settings of the client: large blocks are not allocated with mmap.
M_TRIM_THRESHOLD, M_MMAP_MAX, TRIM_BYTES = -1, -4, 512 << 20
#: Size of the pipe, which limits how far the process can run ahead of its reader.
PIPE_BYTES = 1 << 20

#: Number of files that a process reads before it is replaced. Video decoders leak about 50 kB per
#: short clip. Eventually, this would exceed the memory limit although no file is at fault.
FILES_PER_PROCESS = 1000

_ROOT = str(Path(__file__).parents[2])
_processes = threading.local()


class PipedProcess:
    """Python process with pipes to its standard input and output."""

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
        """Checks whether the process has exited."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process, but does not wait for its exit."""
        self._process.kill()

    def wait(self) -> int:
        """Waits until the process exits and returns its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Kills the process, waits until it has exited and closes the pipes."""
        self.kill()
        self.wait()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.stdout.close()


class Limits(Spec):
    """Limits for reading a single result, such as a page, an image or the frames of a window."""

    max_seconds: float = Field(30.0, gt=0, le=86_400)
    """Time limit in seconds."""
    max_memory_bytes: int = Field(4 << 30, ge=256 << 20)
    """Maximum size of the address space of the process in bytes."""


class DecodingProcess:
    """Process that reads files of one format.

    The process is started on demand and restarted after a crash. An instance must only be used by
    one thread, see `decoding_process`. The process exits when the instance is deleted.
    """

    def __init__(self, module: str, limits: Limits):
        self.module, self.limits = module, limits
        self._process: PipedProcess | None = None
        self._num_requests = 0

    def call(self, function: str, *arguments: Any) -> dict[str, Any]:
        """Calls a function of the module that returns a single result.

        Raises:
            Unreadable: The file cannot be read, or the process has crashed or timed out.
        """
        reply = self._reply(self._request(function, *arguments))
        if "reason" in reply:
            self.stop()  # a library may report the error again for the next file
            raise Unreadable(reply["reason"], reply["detail"])
        return reply

    def stream(
        self, number: int, function: str, *arguments: Any
    ) -> Iterator[dict[str, Any] | Unreadable]:
        """Calls a generator function of the module and yields its results.

        If the process crashes or times out, or if the file as a whole cannot be read, all remaining
        results are errors. Any other error concerns a single result. If the second argument is a
        list, it must have one value per result.
        """
        num_remaining = number
        try:
            process = self._request(function, *arguments)
            while num_remaining:
                try:
                    reply = self._reply(process)
                except Unreadable as error:
                    reply = {**vars(error), "is_last": True}
                if "reason" not in reply:
                    num_remaining -= 1
                    yield reply
                    continue
                for _ in range(num_remaining if reply["is_last"] else 1):
                    num_remaining -= 1
                    yield Unreadable(reply["reason"], reply["detail"])
        finally:
            if num_remaining:  # the caller has stopped early, so replies would be misattributed
                self.stop()

    def stop(self) -> None:
        """Kills the process. The next request starts a new one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _request(self, *request: Any) -> PipedProcess:
        is_old = self._num_requests >= FILES_PER_PROCESS
        if self._process is not None and (is_old or self._process.has_ended()):
            self.stop()
        self._num_requests += 1
        process = self._process or self._start()
        send(process.stdin, request)
        return process

    def _start(self) -> PipedProcess:
        process = PipedProcess(
            *("-P", "-m", "pipeline.data.decode.serve"),
            *(self.module, str(self.limits.max_memory_bytes)),
            environment=KEEP_MEMORY,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._process, self._num_requests = process, 1
        with contextlib.suppress(OSError):  # allows the process to read ahead
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._read(process, 1, time.monotonic() + START_SECONDS)  # not part of the time limit
        return process

    def _reply(self, process: PipedProcess) -> dict[str, Any]:
        """Reads the next reply.

        Raises:
            Unreadable: The process has crashed or timed out. It is stopped.
        """
        deadline = time.monotonic() + self.limits.max_seconds
        try:
            (length,) = struct.unpack("<Q", self._read(process, 8, deadline))
            data = bytes(self._read(process, length, deadline))
            reply = dict(json.loads(data, object_hook=_without_surrogates))
            for name, dtype, shape in reply.pop("bulk", ()):
                size = math.prod(shape) * (np.dtype(dtype).itemsize if dtype else 1)
                view = self._read(process, size, deadline)
                reply[name] = np.frombuffer(view, dtype).reshape(shape) if dtype else bytes(view)
        except (ValueError, TypeError, RecursionError) as error:
            self.stop()  # a file may have compromised the process
            raise Unreadable("crashed", f"a malformed reply ({error})") from None
        return reply

    def _read(self, process: PipedProcess, length: int, deadline: float) -> memoryview:
        if not 0 <= length <= self.limits.max_memory_bytes:  # more than the process can allocate
            raise ValueError(f"of {length:,} bytes")
        view = np.empty(length, np.uint8).data  # not initialised, because frames are large
        stream = process.stdout.fileno()
        done = 0
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while done < length:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise Unreadable("timed out", f"more than {self.limits.max_seconds:g} s")
                if not (num_read := os.readv(stream, [view[done : done + PIPE_BYTES]])):
                    code = process.wait()
                    self.stop()
                    raise Unreadable("crashed", f"the decoding process exited with code {code}")
                done += num_read
        return view

    def __del__(self) -> None:
        self.stop()


def _without_surrogates(values: dict[str, Any]) -> dict[str, Any]:
    return {k: join_surrogates(v) if isinstance(v, str) else v for k, v in values.items()}


def keep_memory() -> None:
    """Configures this process to reuse the memory of large results, including Arrow buffers.

    Otherwise, allocating and clearing the memory of the frames of a window can take a fifth of the
    decoding time. The function has no effect with C libraries other than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        pa.set_memory_pool(pa.system_memory_pool())


def check_decoder(module: str) -> None:
    """Raises `MissingExtra` if a package that a decoding module needs is not installed."""
    extras.require(*DECODERS.get(module, ()))


def decoding_process(module: str, limits: Limits) -> DecodingProcess:
    """Returns the decoding process of the current thread for a module and limits."""
    check_decoder(module)  # the process would fail with a less helpful error
    processes = _processes.__dict__.setdefault("by_module", {})
    if (module, limits) not in processes:
        processes[module, limits] = DecodingProcess(module, limits)
    return processes[module, limits]

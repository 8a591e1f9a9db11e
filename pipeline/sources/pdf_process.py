"""PDFs read in another process, with a time limit: what crashes or hangs there is one document."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.config import Spec
from pipeline.sources.pdf import Unreadable, send

#: Reasons that may go away by themselves: the next run tries such pages again.
RETRYABLE = ("timed out", "out of memory", "unreadable")

#: What starting the process may take, on a busy machine too.
START_SECONDS = 120.0
#: The C library keeps the memory of a page's image for the next page. By default it gives blocks of
#: that size back to the kernel, and a fifth of the time goes into getting and clearing them again.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
#: What the process may be ahead of who reads it.
PIPE_BYTES = 1 << 20

_SCRIPT = Path(__file__).with_name("pdf.py")
_processes = threading.local()


class Limits(Spec):
    """What reading a page may take."""

    seconds: float = Field(30.0, gt=0, le=86_400)
    memory_bytes: int = Field(4 << 30, ge=256 << 20)  # of address space


class PdfProcess:
    """A process that reads PDFs: started when it is needed, and again after it died.

    It serves one thread; `pdf_process` gives each its own. It ends with the process that made it.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self._process: subprocess.Popen | None = None

    def describe(self, path: str) -> dict[str, Any]:
        """How many pages a document has (`num_pages`), and its `title` or None.

        Raises:
            Unreadable: it cannot be opened.
        """
        self._request("describe", path)
        reply = self._reply()
        if "reason" in reply:
            self.stop()  # PDFium tells of its last error, and keeps it for the next document
            raise Unreadable(reply["reason"], reply["detail"])
        return reply

    def pages(
        self, path: str, numbers: Sequence[int], settings: dict[str, Any]
    ) -> Iterator[dict[str, Any] | Unreadable]:
        """Reads pages as `pipeline.sources.pdf.read_pages` does, one result each.

        After a crash, a time-out or an error of the whole document its other pages are not tried.
        """
        waiting = len(numbers)
        try:
            self._request("pages", path, list(numbers), settings)
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
            if waiting:  # the reader stopped early: what comes now would be taken for other pages
                self.stop()

    def stop(self) -> None:
        """Kills the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _request(self, *request: Any) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(self.limits.memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, **KEEP_MEMORY},
            )
            with contextlib.suppress(OSError):  # it reads the next page while one is taken
                fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._read(1, time.monotonic() + START_SECONDS)  # its start is no page's time
        send(self._process.stdin, request)

    def _reply(self) -> dict[str, Any]:
        """The next reply.

        Raises:
            Unreadable: the process died or took too long, and is stopped.
        """
        deadline = time.monotonic() + self.limits.seconds
        (length,) = struct.unpack("<Q", self._read(8, deadline))
        reply = json.loads(self._read(length, deadline))
        for name, dtype, shape in reply.pop("bulk"):
            size = math.prod(shape) * (np.dtype(dtype).itemsize if dtype else 1)
            data = self._read(size, deadline)
            reply[name] = np.frombuffer(data, dtype).reshape(shape) if dtype else data
        return reply

    def _read(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        stream = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while len(data) < length:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise Unreadable("timed out", f"more than {self.limits.seconds:g} s a page")
                if not (some := os.read(stream, min(length - len(data), 1 << 20))):
                    code = self._process.wait()
                    self.stop()
                    raise Unreadable("crashed", f"the PDF library ended with code {code}")
                data += some
        return bytes(data)

    def __del__(self) -> None:
        self.stop()


def pdf_process(limits: Limits) -> PdfProcess:
    """The process of this thread."""
    there = _processes.__dict__.setdefault("by_limits", {})
    if limits not in there:
        there[limits] = PdfProcess(limits)
    return there[limits]

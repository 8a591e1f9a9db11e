"""Main program of decoding processes: `python -m pipeline.data.decode.serve MODULE MEMORY_BYTES`.

A request has the form [function, arguments...] and calls a function of the module. If the function
returns a mapping, this mapping is the reply. If it is a generator, there is one reply per value. An
`Unreadable` that is yielded replaces one result. An `Unreadable` that is raised replaces all
remaining results (`is_last`).

Any other error also replaces one result. If the second argument of a generator function is a list,
it has one value per result, and the function is called again for the values after the error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from pipeline.data.decode import Unreadable


def send(stream: IO[bytes], value: Any) -> None:
    """Writes a value as JSON, followed by the raw data of arrays and bytes.

    Values are not pickled. A compromised process could otherwise run code in its parent process.
    """
    bulk = {}
    if isinstance(value, Mapping):
        bulk = {k: v for k, v in value.items() if isinstance(v, np.ndarray | bytes)}
        value = {k: v for k, v in value.items() if k not in bulk}
        value["bulk"] = [
            [k, v.dtype.str, v.shape] if isinstance(v, np.ndarray) else [k, "", [len(v)]]
            for k, v in bulk.items()
        ]
    data = json.dumps(value).encode()
    stream.write(struct.pack("<Q", len(data)) + data)
    for v in bulk.values():
        stream.write(v if isinstance(v, bytes) else np.ascontiguousarray(v).reshape(-1).data)
    stream.flush()


def answer(replies: IO[bytes], module: str, function: str, *arguments: Any) -> None:
    """Calls a function of a module and sends its results."""
    values: list[Any] = [None]
    if len(arguments) > 1 and isinstance(arguments[1], list):
        values = arguments[1]
    num_done = 0
    while num_done < len(values):
        try:
            reader = importlib.import_module(f"pipeline.data.decode.{module}")
            results = getattr(reader, function)(*arguments)
            for result in [results] if isinstance(results, dict) else results:
                is_error = not isinstance(result, dict)
                send(replies, {**vars(result), "is_last": False} if is_error else result)
                num_done += 1
            return
        except Unreadable as error:
            send(replies, {**vars(error), "is_last": True})
            return
        except Exception as error:
            if num_done < len(values):
                send(replies, {**describe_error(error), "is_last": False})
                num_done += 1
            arguments = (arguments[0], values[num_done:], *arguments[2:])


def describe_error(error: Exception) -> dict[str, str]:
    """Returns the `reason` and the `detail` of an error that is not an `Unreadable`.

    >>> describe_error(FileNotFoundError(2, "No such file"))
    {'reason': 'unreadable', 'detail': '[Errno 2] No such file'}
    >>> describe_error(OSError("broken data stream"))  # raised by a library
    {'reason': 'unexpected error', 'detail': 'OSError: broken data stream'}
    >>> describe_error(ImportError("libz.so: failed to map segment from shared object"))["reason"]
    'out of memory'
    """
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):
        return {"reason": "out of memory", "detail": str(error)}
    if isinstance(error, OSError) and error.errno:
        return {"reason": "unreadable", "detail": str(error)}
    detail = " ".join(f"{type(error).__name__}: {error}".split())
    return {"reason": "unexpected error", "detail": detail}


def main() -> None:
    """Processes requests from standard input until it is closed."""
    module, limit = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the output of libraries out of the replies
    with contextlib.suppress(Exception):  # `answer` reports the error
        importlib.import_module(f"pipeline.data.decode.{module}")
    replies.write(b"!")  # signals that the process is ready
    replies.flush()
    requests = sys.stdin.buffer
    while head := requests.read(8):
        (length,) = struct.unpack("<Q", head)
        answer(replies, module, *json.loads(requests.read(length)))


if __name__ == "__main__":
    main()

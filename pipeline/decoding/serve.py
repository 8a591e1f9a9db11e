"""Main program of decoding processes: `python -m pipeline.decoding.serve MODULE MEMORY_BYTES`.

A request has the form [function, arguments...] and calls a function of the module. If the function
returns a mapping, this mapping is the reply. If it is a generator, there is one reply per value. An
`Unreadable` that is yielded replaces one result. An `Unreadable` that is raised replaces all
remaining results (`is_last`).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from pipeline.decoding import Unreadable


def send(stream: IO[bytes], value: Any) -> None:
    """Writes a value as JSON, followed by the raw data of arrays and bytes.

    Values are not pickled. A compromised process could otherwise run code in its parent process.

    Args:
        stream: The stream to write to.
        value: A JSON value, or a mapping whose values may also be arrays or bytes.
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


def main() -> None:
    """Processes requests from standard input until it is closed."""
    module, limit = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the output of libraries out of the replies
    reader = importlib.import_module(f"pipeline.decoding.{module}")
    replies.write(b"!")  # signals that the process is ready
    replies.flush()
    requests = sys.stdin.buffer
    while head := requests.read(8):
        (length,) = struct.unpack("<Q", head)
        function, *arguments = json.loads(requests.read(length))
        try:
            results = getattr(reader, function)(*arguments)
            for result in [results] if isinstance(results, dict) else results:
                is_error = not isinstance(result, dict)
                send(replies, {**vars(result), "is_last": False} if is_error else result)
        except Unreadable as error:
            send(replies, {**vars(error), "is_last": True})
        except (MemoryError, OSError) as error:
            reason = "unreadable" if isinstance(error, OSError) else "out of memory"
            send(replies, {"reason": reason, "detail": str(error), "is_last": True})


if __name__ == "__main__":
    main()

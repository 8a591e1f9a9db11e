"""Main program that converts pickled weights: `python -I unpickle.py SOURCE TARGET SECONDS`.

It is run as a file and imports nothing of Maxray. `weights_only=True` builds tensors and containers
and executes nothing. In case that this has a defect, the process has no network, and its memory and
time are limited. Its output is a JSON object: either `error`, or the number of tensors and of those
that shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import sys
import zipfile
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
#: Memory for the file, the copies of its tensors and buffers, beside that of the libraries.
MEMORY_PER_BYTE, MEMORY_BYTES = 3, 2**30


def leave_network() -> None:
    """Moves the process to a network without interfaces, where the system allows it."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.unshare(CLONE_NEWNET):  # not root
            libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)


def limit_resources(file_bytes: int, seconds: int) -> None:
    """Limits the address space and the processor time of the process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = used + MEMORY_PER_BYTE * file_bytes + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def convert(source: str, target: str) -> dict[str, Any]:
    """Writes the tensors of a file as safetensors and returns their numbers.

    safetensors does not store tensors that share memory, such as tied weights, or that are not
    contiguous. They are copied.
    """
    import torch
    from safetensors.torch import save_file

    loaded = torch.load(
        source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source)
    )
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]  # of a training run of OpenCLIP
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError("has no mapping of weights")
    weights, storages, num_shared = {}, set(), 0
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"has {name!r:.80}, which is not a dense tensor")
        weights[str(name)] = tensor = tensor.detach()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages or not tensor.is_contiguous():
            weights[str(name)] = tensor.clone(memory_format=torch.contiguous_format)
            num_shared += storage in storages
        storages.add(storage)
    save_file(weights, target, {"format": "pt"})
    return {"tensors": len(weights), "shared": num_shared}


def reason(error: Exception) -> str:
    """Returns what is wrong with a file, for an object that is not built only its name."""
    text = " ".join(str(error).split())
    if text.startswith("has "):
        return text
    if "while serializing" in text:
        return f"cannot be written as safetensors ({text})"
    if found := re.search(r"(?:GLOBAL|global|class) (\w+(?:\.\w+)+)", text):
        return f"refers to {found[1]} (which was not executed)"
    if isinstance(error, MemoryError) or "memory" in text or "failed to map" in text:
        return "needs more memory than its size explains"
    return "is truncated, or was not written by torch.save"


def main() -> None:
    """Converts the file that the arguments name."""
    source, target, seconds = sys.argv[1:]
    leave_network()
    import torch  # before the limits, because libraries reserve much address space

    torch.set_num_threads(1)
    limit_resources(os.path.getsize(source), int(seconds))
    try:
        print(json.dumps(convert(source, target)))
    except Exception as error:
        print(json.dumps({"error": reason(error)}))


if __name__ == "__main__":
    main()

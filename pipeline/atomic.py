"""Result files that are there whole or not at all."""

from __future__ import annotations

import os
import posixpath

import fsspec

from pipeline.config import absolute


def write_atomic(uri: str, data: str | bytes) -> None:
    """Writes a file under another name and renames it; makes the folders above it."""
    filesystem, path = fsspec.url_to_fs(absolute(uri))
    folder, name = posixpath.split(path)
    filesystem.makedirs(folder, exist_ok=True)
    unfinished = posixpath.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        filesystem.pipe_file(unfinished, data.encode() if isinstance(data, str) else data)
        filesystem.mv(unfinished, path)
    finally:
        if filesystem.exists(unfinished):
            filesystem.rm(unfinished)

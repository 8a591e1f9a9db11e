"""Result files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import fsspec
from fsspec import AbstractFileSystem

from pipeline.config import SpecError, absolute
from pipeline.extras import require_storage


def check_writable(uri: str, field: str, *, as_file: bool = False) -> None:
    """Checks that a path can be written, before any work is done for it.

    Args:
        uri: Local path or URI; only local paths are checked.
        field: Field of the spec that names the path, for the error message.
        as_file: True for a file, False for a folder.

    Raises:
        SpecError: For `field`: the path cannot be written.
    """
    require_storage(uri)
    filesystem, path = fsspec.url_to_fs(absolute(uri))
    if "file" not in filesystem.protocol:
        return
    there = Path(path)
    if as_file and there.is_dir():
        raise SpecError(field, uri, "the path of a file", "is a folder")
    if not as_file and there.is_file():
        raise SpecError(field, uri, "the path of a folder", "is a file")
    # Renaming would put a file in the place of /dev/null, or of /dev/stdout, a link to /proc.
    is_stream = there.is_symlink() and os.readlink(there).startswith("/proc/")
    if as_file and (is_stream or (there.exists() and not there.is_file())):
        raise SpecError(field, uri, "the path of a file", "is a device or a pipe")
    there = there.parent if as_file else there
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise SpecError(field, uri, "a path below a folder", f"is below the file {there}")
    if not os.access(there, os.W_OK | os.X_OK) or there.is_relative_to("/proc"):
        raise SpecError(
            field, uri, "a writable path", f"cannot be written ({there} is not writable)"
        )


def write_atomic(uri: str, data: str | bytes) -> None:
    """Writes a file under another name and renames it; makes the folders above it.

    Raises:
        OSError: it cannot be written there, or is a folder.
    """
    with _renamed(uri) as (filesystem, unfinished):
        filesystem.pipe_file(unfinished, data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def writing_atomic(uri: str) -> Iterator[TextIO]:
    """A text file to be written bit by bit, which is there when the block ends without an error.

    Raises:
        OSError: as `write_atomic`.
    """
    with (
        _renamed(uri) as (filesystem, unfinished),
        filesystem.open(unfinished, "w", encoding="utf-8", newline="\n") as file,
    ):
        yield file


@contextlib.contextmanager
def _renamed(uri: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Where to write a file that gets its name at the end, and goes if there is an error."""
    require_storage(uri)
    filesystem, path = fsspec.url_to_fs(absolute(uri))
    if filesystem.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to write", uri)
    folder, name = posixpath.split(path)
    filesystem.makedirs(folder, exist_ok=True)
    unfinished = posixpath.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        yield filesystem, unfinished
        filesystem.mv(unfinished, path)
    finally:
        if filesystem.exists(unfinished):
            filesystem.rm(unfinished)

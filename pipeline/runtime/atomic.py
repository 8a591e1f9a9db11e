"""Utilities for writing files and folders atomically, and the folder of caches."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import SpecError, absolute, reading, within
from pipeline.paths import is_uri, locate


def check_writable(uri: str, field: str, *, as_file: bool = False) -> None:
    """Checks that an output can be written, so that a job fails before it does any work.

    Only local paths are checked. Permissions in object storage are not.

    Raises:
        MissingExtra: The URI needs a storage package that is not installed.
        SpecError: The path is not writable.
    """
    filesystem, path = locate(absolute(uri))
    if "file" not in filesystem.protocol:
        return
    target = Path(path)
    rule, problem = f"the path of a {'file' if as_file else 'folder'} that can be written", None
    parent = target.parent if as_file else target
    while not parent.exists():
        parent = parent.parent
    # Devices such as /dev/null, and links to /proc such as /dev/stdout, would be replaced by a
    # rename.
    is_stream = target.is_symlink() and os.readlink(target).startswith("/proc/")
    if as_file and target.is_dir():
        problem = "is a folder"
    elif not as_file and target.is_file():
        problem = "is a file"
    elif as_file and (is_stream or (target.exists() and not target.is_file())):
        problem = "is a device or a pipe"
    elif not parent.is_dir():
        problem = f"is below the file {parent}"
    elif not os.access(parent, os.W_OK | os.X_OK) or parent.is_relative_to("/proc"):
        problem = f"cannot be written ({parent} is not writable)"
    if problem:
        raise SpecError(field, uri, rule, problem)


def cache_folder() -> Path:
    """Returns the folder of caches, which is `MAXRAY_CACHE` or in the user's cache folder."""
    with within("cache"):
        if folder := os.environ.get("MAXRAY_CACHE"):
            if is_uri(folder):  # would otherwise create a local folder named "s3:"
                raise SpecError("", folder, "a local folder (see MAXRAY_CACHE)", "is a URI")
            return Path(absolute(folder))
        return Path(absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "maxray"


def cached_folder(name: str, write: Callable[[Path], None]) -> Path:
    """Returns a subfolder of the cache, which `write` creates if it does not exist.

    It appears when it is complete. Processes that need it at the same time all write it.

    Raises:
        SpecError: The folder cannot be written.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    rule = "a writable folder with free space (see MAXRAY_CACHE)"
    try:
        with reading("cache", str(target), rule, problem="cannot be written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            temporary.rename(target)
    except SpecError:
        if not target.is_dir():  # another process has written it
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def write_atomic(uri: str, data: str | bytes) -> None:
    """Writes a file atomically. Missing parent folders are created.

    The data is written to a temporary path, which is then renamed to `uri`, so that readers never
    see a partial file.
    """
    with _temporary_path(uri) as (filesystem, temporary):
        filesystem.pipe_file(temporary, data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def open_atomic(uri: str) -> Iterator[TextIO]:
    """Opens a text file that appears at `uri` only when the block ends without an error."""
    with (
        _temporary_path(uri) as (filesystem, temporary),
        filesystem.open(temporary, "w", encoding="utf-8", newline="\n") as file,
    ):
        yield file


@contextlib.contextmanager
def _temporary_path(uri: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Context manager for a temporary path, which is renamed to `uri` unless an error occurs."""
    filesystem, path = locate(absolute(uri))
    if filesystem.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to write", uri)
    folder, name = posixpath.split(path)
    filesystem.makedirs(folder, exist_ok=True)
    temporary = posixpath.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        yield filesystem, temporary
        if isinstance(filesystem, LocalFileSystem):
            os.replace(temporary, path)
        else:  # `mv` and `rm` would read `[`, `*` and `?` as a pattern
            filesystem.cp_file(temporary, path)
    finally:
        if filesystem.exists(temporary):
            filesystem.rm_file(temporary)

"""Lists files and folders at fsspec URIs in a stable order."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import SpecError, reading
from pipeline.data.base import NoFiles
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import check_regular
from pipeline.paths import locate

#: The size that `walk` yields for a pipe, a socket or a device, and for a link to one.
SPECIAL_FILE_SIZE = -1
#: Number of folders that are listed at the same time.
LIST_THREADS = 16


def open_root(uri: str, field: str = "path") -> tuple[AbstractFileSystem, str]:
    """Resolves a URI to its file system and the path in it.

    Raises:
        MissingExtra: The package of the storage is not installed.
        SpecError: The scheme is unknown, or requires a package that is not installed.
    """
    rule = "a local path or the URI of an installed fsspec file system"
    with reading(field, uri, rule, ValueError, ImportError, problem="cannot be opened"):
        return locate(uri)


def existing_root(uri: str, field: str = "path") -> tuple[AbstractFileSystem, str]:
    """Resolves a URI as `open_root` does. Raises `SpecError` if its path cannot be read."""
    fs, root = open_root(uri, field)
    rule = "an existing file or folder"
    with reading(field, uri, rule, Exception):  # any of the library behind the file system
        exists = bool(uri) and (fs.exists(root) or fs.isdir(root))
    if not exists:
        raise SpecError(field, uri, rule, "does not exist")
    if not fs.isdir(root):
        try:
            check_regular(fs, root)
        except Unreadable as error:
            kind = error.detail.rpartition(", ")[2]
            raise SpecError(field, uri, "a regular file or a folder", kind) from None
    return fs, root


def check_suffix(fs: AbstractFileSystem, root: str, uri: str, suffixes: tuple[str, ...]) -> None:
    """Raises `SpecError` if a path is neither a folder nor a file with one of the suffixes."""
    if not fs.isdir(root) and not root.lower().endswith(suffixes):
        raise SpecError("path", uri, f"a folder, or a file ending in {', '.join(suffixes)}")


def resolve_folder(uri: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URI and its folder, or the parent folder of a file.

    A path that does not exist is considered a file if its name has a suffix.
    """
    fs, root = open_root(uri)
    folder, _, name = root.rpartition("/")
    is_file = fs.isfile(root) or ("." in name and not fs.isdir(root))
    return (fs, folder) if is_file else (fs, root)


def walk(
    fs: AbstractFileSystem,
    root: str,
    is_closed: Callable[[str, list[str]], bool] = lambda folder, children: False,
) -> Iterator[tuple[str, int | None]]:
    """Yields all files below a folder, sorted by name.

    The next `LIST_THREADS` folders are listed in advance, because object stores answer slowly.
    Links are followed, except links to a folder that contains them. A folder that is reached below
    itself through links or mounts is skipped, as in `find -L`.

    Yields:
        (path relative to `root`, size in bytes). A folder that cannot be listed is yielded in place
        of its files with the size None. Opening it raises the error. The size of a pipe, a socket
        or a device is `SPECIAL_FILE_SIZE`. `untrusted.open_file` rejects it.
    """
    pending: list[tuple[str, int | None]] = [(root, None)]  # None: a folder to be listed
    waiting = deque([root])  # folders in the order in which they are listed
    listed: dict[str, Future[list[tuple[str, int | None]]]] = {}
    pool = ThreadPoolExecutor(LIST_THREADS)
    try:
        while pending:
            path, num_bytes = pending.pop()
            if num_bytes is None:
                while path not in listed or (waiting and len(listed) < LIST_THREADS):
                    folder = waiting.popleft()
                    listed[folder] = pool.submit(_children, fs, root, folder)
                try:
                    children = sorted(listed.pop(path).result(), reverse=True)
                    if path == root or not is_closed(path, [name for name, _ in children]):
                        pending += children
                        waiting.extendleft(name for name, size in children if size is None)
                        continue
                except OSError:
                    pass
            yield path[len(root) :].lstrip("/"), num_bytes
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def find_files(uri: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, int | None]]:
    """Yields the file at the URI, or all files in a folder that have a suffix, as `walk` does."""
    fs, root = open_root(uri)
    if not fs.isdir(root):
        yield root.rpartition("/")[2], fs.size(root)
        return
    for file, num_bytes in walk(fs, root):
        if num_bytes is None or file.lower().endswith(suffixes):
            yield file, num_bytes


def first_file(
    files: Iterator[tuple[str, int | None]], uri: str, rule: str
) -> tuple[str, int | None]:
    """Returns the first file of a folder.

    Raises:
        NoFiles: The folder contains no files.
        SpecError: It cannot be listed.
    """
    first = next(files, None)
    if first is None:
        raise NoFiles("path", uri, rule, "contains no such files")
    if first == ("", None):  # the folder in place of its files, see `walk`
        raise SpecError("path", uri, rule, "cannot be listed")
    return first


def _children(fs: AbstractFileSystem, root: str, folder: str) -> list[tuple[str, int | None]]:
    """Returns the paths and sizes of the files and folders in a folder, in any order."""
    children: list[tuple[str, int | None]] = []
    is_local = isinstance(fs, LocalFileSystem)
    ends = [n for n, sign in enumerate(f"{folder}/") if sign == "/" and n >= len(root)]
    ancestors = {_identity(path) for path in [root, *(folder[:end] for end in ends)] if is_local}
    for entry in fs.ls(folder, detail=True):
        path = entry["name"].rstrip("/")
        is_folder, size = entry["type"] == "directory", entry["size"] or 0
        if entry.get("islink") and fs.isdir(path):
            target = os.path.realpath(path)
            if os.path.commonpath([target, os.path.realpath(folder)]) == target:
                continue
            is_folder = True
        if is_folder and is_local and _identity(path) in ancestors:
            continue
        if not is_folder and entry["type"] == "other":
            size = _size(fs, path, size)
        if path != folder:  # object stores may list a folder as its own child
            children.append((path, None if is_folder else size))
    return children


def _identity(folder: str) -> tuple[int, int] | str:
    """Returns the device and inode of a folder, or its path if they are unknown."""
    try:
        status = os.stat(folder)
    except OSError:
        return folder
    return (status.st_dev, status.st_ino) if status.st_ino else folder


def _size(fs: AbstractFileSystem, path: str, size: int) -> int:
    """Returns the size of an irregular directory entry. A dangling link has its listed size."""
    try:
        check_regular(fs, path)
    except Unreadable:
        return SPECIAL_FILE_SIZE
    except OSError:
        pass
    return size


@contextmanager
def local_copy(fs: AbstractFileSystem, path: str, suffix: str = "") -> Iterator[str]:
    """Context manager for the path of a local file, or of a temporary copy of another file."""
    if isinstance(fs, LocalFileSystem):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=suffix) as copy:
        fs.get_file(path, copy.name)
        yield copy.name


def file_state(fs: AbstractFileSystem, path: str) -> Any:
    """Returns a value that changes whenever a file is replaced or written, or None if unknown.

    The time of the last status change cannot be set by a program, in contrast to the modification
    time.
    """
    if isinstance(fs, LocalFileSystem):
        status = os.stat(path)
        times = status.st_mtime_ns, status.st_ctime_ns
        return status.st_dev, status.st_ino, status.st_size, *times
    info = fs.info(path)
    return next(((info["size"], str(info[k])) for k in ("ETag", "LastModified") if k in info), None)


def escape(text: str) -> str:
    r"""Returns text that Arrow can store. Bytes of file names that are not UTF-8 become escapes.

    >>> print(escape("a\udcff.txt"))
    a\udcff.txt
    """
    return text.encode("utf-8", "backslashreplace").decode()

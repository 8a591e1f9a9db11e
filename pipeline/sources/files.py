"""Files at any fsspec URI: opening a root, and walking it in a stable order."""

from __future__ import annotations

import os
from collections.abc import Iterator

import fsspec
from fsspec import AbstractFileSystem

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import check_regular
from pipeline.extras import require_storage

#: The size that `walk` gives of a pipe, a socket or a device, and of a link to one.
SPECIAL = -1


def open_root(uri: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URI, and the path in it.

    Raises:
        MissingExtra: The package of its storage is not installed.
        SpecError: The scheme is unknown, or needs a package that is not installed.
    """
    require_storage(uri)
    rule = "a local path or the URI of an installed fsspec file system"
    try:
        # A listing is read once: keeping it would cost memory and hide files that come later.
        return fsspec.url_to_fs(uri, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise SpecError("path", uri, rule, f"cannot be opened ({error})") from None


def existing_root(uri: str) -> tuple[AbstractFileSystem, str]:
    """`open_root` of a file or folder that is there.

    Raises:
        SpecError: nothing is there, or it cannot be looked at.
    """
    fs, root = open_root(uri)
    try:
        exists = bool(uri) and (fs.exists(root) or fs.isdir(root))
    except Exception as error:  # of whatever library the file system stands on
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise SpecError("path", uri, "a readable path", problem) from None
    if not exists:
        raise SpecError("path", uri, "an existing file or folder", "does not exist")
    if not fs.isdir(root):
        try:
            check_regular(fs, root)
        except Unreadable as error:
            kind = error.detail.rpartition(", ")[2]
            raise SpecError("path", uri, "a regular file or a folder", kind) from None
    return fs, root


def folder_of(uri: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URI, and the folder in it: that of the file, if the URI is one.

    What is not there any more is taken for a file if its name ends like one.
    """
    fs, root = open_root(uri)
    folder, _, name = root.rpartition("/")
    is_file = fs.isfile(root) or ("." in name and not fs.isdir(root))
    return (fs, folder) if is_file else (fs, root)


def walk(fs: AbstractFileSystem, root: str) -> Iterator[tuple[str, int | None]]:
    """Every file below a folder, one folder in memory at a time, each sorted by name.

    Links are followed, except to a folder that holds the link.

    Yields:
        (path relative to `root`, bytes). A folder that cannot be listed stands for its files, with
        None for the bytes: opening it says why. The bytes of a pipe, a socket, a device or a link
        to one are `SPECIAL`: `untrusted.open_file` refuses it.
    """
    pending: list[tuple[str, int | None]] = [(root, None)]  # None: a folder, still to be listed
    while pending:
        path, num_bytes = pending.pop()
        if num_bytes is None:
            try:
                pending += sorted(_children(fs, path), reverse=True)
                continue
            except OSError:
                pass
        yield path[len(root) :].lstrip("/"), num_bytes


def files_below(uri: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, int | None]]:
    """The files below a folder whose names end so, as `walk` gives them; of a file, itself."""
    fs, root = open_root(uri)
    if not fs.isdir(root):
        yield root.rpartition("/")[2], fs.size(root)
        return
    for file, num_bytes in walk(fs, root):
        if num_bytes is None or file.lower().endswith(suffixes):
            yield file, num_bytes


def _children(fs: AbstractFileSystem, folder: str) -> Iterator[tuple[str, int | None]]:
    for entry in fs.ls(folder, detail=True):
        path = entry["name"].rstrip("/")
        is_folder, size = entry["type"] == "directory", entry["size"] or 0
        if entry.get("islink") and fs.isdir(path):
            target = os.path.realpath(path)
            if os.path.commonpath([target, os.path.realpath(folder)]) == target:
                continue
            is_folder = True
        elif entry["type"] == "other":
            size = _size(fs, path, size)
        if path != folder:  # object stores may list a folder inside itself
            yield path, None if is_folder else size


def _size(fs: AbstractFileSystem, path: str, size: int) -> int:
    """The size of what may not be a regular file; a link to nothing has that of its listing."""
    try:
        check_regular(fs, path)
    except Unreadable:
        return SPECIAL
    except OSError:
        pass
    return size


def escaped(text: str) -> str:
    r"""Text that Arrow can store: a file name's bytes that are not UTF-8 are written as escapes.

    >>> print(escaped("a\udcff.txt"))
    a\udcff.txt
    """
    return text.encode("utf-8", "backslashreplace").decode()

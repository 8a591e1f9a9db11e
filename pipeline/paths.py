"""Opens files at local paths and at the URIs of fsspec file systems."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.extras import require_storage

#: File systems that read another one, which follows `::` in a URI.
_CHAINED = r"(?:zip|tar|dir|blockcache|filecache|simplecache)"
_SCHEME = re.compile(rf"(?:{_CHAINED}::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CHAIN = re.compile(rf"{_CHAINED}(?:://.*?)?::", re.DOTALL)


def is_uri(path: str) -> bool:
    """Returns True for a URI and False for a local path, which may contain any character.

    >>> [is_uri(uri) for uri in ("s3://bucket/a", "simplecache::s3://b/a", "zip://a::b.zip")]
    [True, True, True]
    >>> [is_uri(path) for path in ("runs/a::b", "file:a", "out/s3://a", "a::s3://b")]
    [False, False, False, False]
    """
    return _SCHEME.match(path) is not None


def local_path(path: str) -> str:
    """Makes a local path absolute and expands `~`, except before the name of an unknown user."""
    return str(Path(os.path.expanduser(path)).absolute())


def locate(uri: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a path or URI and the path in it. Listings are not cached.

    fsspec reads `a::b` as a chain of file systems. Here, `::` is part of the name, except after a
    file system that reads another one: `zip://image.png::s3://bucket/images.zip`.

    Raises:
        MissingExtra: The package of the storage is not installed.
        ValueError: The scheme is unknown.
        ImportError: The scheme requires another package that is not installed.
    """
    if not is_uri(uri):
        return LocalFileSystem(use_listings_cache=False), local_path(uri)
    if _CHAIN.match(uri):
        archive, _, target = uri.partition("::")
        require_storage(target)
        if "::" in target and not is_uri(target):
            protocol, _, path = archive.partition("://")
            return fsspec.filesystem(protocol, fo=open(local_path(target), "rb")), path
        return fsspec.url_to_fs(uri, use_listings_cache=False)
    require_storage(uri)
    storage = fsspec.get_filesystem_class(uri.partition("://")[0])
    options = storage._get_kwargs_from_urls(uri)
    return storage(**options, use_listings_cache=False), storage._strip_protocol(uri)


@contextlib.contextmanager
def open_file(uri: str, mode: str = "rb", **options: Any) -> Iterator[IO[Any]]:
    """Opens a file at a path or URI, by default text as UTF-8, and creates missing parents."""
    filesystem, path = locate(uri)
    if "r" not in mode:
        filesystem.makedirs(filesystem._parent(path), exist_ok=True)
    if "b" not in mode:
        options = {"encoding": "utf-8", **options}
    with filesystem.open(path, mode, **options) as file:
        yield file

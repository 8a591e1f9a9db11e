"""Untrusted files that are read in this process: what is opened, and bounds for what they claim."""

from __future__ import annotations

import os
import stat
import tarfile
from tarfile import InvalidHeaderError  # type: ignore[attr-defined]  # absent from its stubs
from typing import Any, BinaryIO, Self

from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from pipeline.decoding import Unreadable

#: A longer line is an error, or a reject; it is never in memory as a whole.
MAX_LINE_BYTES = 16 << 20
#: Names and attributes that stand before a member of a tar archive are read at once.
MAX_TAR_HEADER_BYTES = 1 << 20
#: How far the next member of a damaged tar archive is searched for, block by block.
MAX_SEARCHED_BYTES = 1 << 30

#: What reading a malformed tar archive may raise. The headers of a header are read by recursion,
#: and numbers in them may be of any length.
TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, RecursionError)

_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(
    fs: AbstractFileSystem, path: str, *, compression: str | None = None, **options: Any
) -> BinaryIO:
    """Opens a regular file for reading, without waiting for the writer of a pipe.

    Args:
        fs: The file system.
        path: Path in it.
        compression: Compression of the file, as fsspec names it; None: not compressed.
        options: Options of file systems that are not local, such as `block_size`.

    Raises:
        Unreadable: The path leads to a pipe, a socket or a device, which may never end.
        OSError: It cannot be opened.
    """
    if not isinstance(fs, LocalFileSystem):
        return fs.open(path, "rb", compression=compression, **options)
    check_regular(fs, path)  # opening a device may act on it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode)  # the path may lead elsewhere by now
        stream = os.fdopen(descriptor, "rb")  # refuses a folder
    except BaseException:
        os.close(descriptor)
        raise
    return compr[compression](stream, mode="rb") if compression else stream


def check_regular(fs: AbstractFileSystem, path: str) -> None:
    """Raises `Unreadable` if a local path leads to a pipe, a socket or a device."""
    if isinstance(fs, LocalFileSystem):
        _check_mode(os.stat(path).st_mode)


def _check_mode(mode: int) -> None:
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise Unreadable("not a regular file", f"must be a regular file, is {kind}")


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parses a header, and refuses sizes that the reader would seek to or read at once."""
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0:
            raise InvalidHeaderError(f"the size of a member must be >= 0, got {member.size}")
        if member.type in _HEADERS and member.size > MAX_TAR_HEADER_BYTES:
            limit = f"at most {MAX_TAR_HEADER_BYTES:,} bytes"
            raise InvalidHeaderError(f"a header must be {limit}, got {member.size:,}")
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Reads the header at the archive's offset."""
        if isinstance(archive, TarArchive):
            archive.check_search()
        return super().fromtarfile(archive)


class TarArchive(tarfile.TarFile):
    """A tar archive whose headers cannot exhaust memory or send the reader backwards."""

    tarinfo = _Member
    members: list[tarfile.TarInfo]  # set by TarFile; absent from its stubs
    _search_start = 0  # offset at which the search for the next member began

    def check_search(self) -> None:
        """Raises `tarfile.ReadError` if the next member has been searched for too far."""
        if self.offset - self._search_start > MAX_SEARCHED_BYTES:
            raise tarfile.ReadError(f"no member within {MAX_SEARCHED_BYTES:,} bytes")

    def next(self) -> tarfile.TarInfo | None:
        """Returns the next member, None at the end.

        Raises:
            tarfile.ReadError: The archive is malformed.
        """
        self._search_start = self.offset
        member = super().next()
        if member is not None and self.offset <= member.offset:  # a size of PAX may be negative
            raise tarfile.ReadError("the size of a member is negative")
        return member

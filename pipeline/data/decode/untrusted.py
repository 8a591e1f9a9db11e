"""Functions that read untrusted files in this process with limits on declared sizes."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from tarfile import InvalidHeaderError  # type: ignore[attr-defined]  # absent from its stubs
from typing import Any, BinaryIO, Self

from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from pipeline.data.decode import Unreadable

#: Maximum size of a line. Longer lines cause an error or a reject and are never read entirely into
#: memory.
MAX_LINE_BYTES = 16 << 20
#: Maximum size of the extended header of a tar member, which is read into memory.
MAX_TAR_HEADER_BYTES = 1 << 20
#: Maximum number of bytes to search for the next member of a corrupted tar archive.
MAX_SEARCHED_BYTES = 1 << 30

#: Errors that reading a malformed tar archive can raise. Extended headers are read recursively, and
#: the numbers that they contain may have any length.
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
    """Opens a regular file for reading. The call never blocks on a pipe.

    Raises:
        Unreadable: The path is a pipe, a socket or a device, from which reading may never end.
        OSError: The file cannot be opened.
    """
    if not isinstance(fs, LocalFileSystem):
        return buffered(fs.open(path, "rb", compression=compression, **options))
    check_regular(fs, path)  # opening a device may have side effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode)  # the path may have been replaced in the meantime
        stream = os.fdopen(descriptor, "rb")  # raises an error for a folder
    except BaseException:
        os.close(descriptor)
        raise
    return compr[compression](stream, mode="rb") if compression else stream


def buffered(stream: Any) -> BinaryIO:
    """Wraps a stream so that `readline` accepts a size, which remote files do not support."""
    return io.BufferedReader(stream) if isinstance(stream, AbstractBufferedFile) else stream


def check_regular(fs: AbstractFileSystem, path: str) -> None:
    """Raises `Unreadable` if a local path is a pipe, a socket or a device."""
    if isinstance(fs, LocalFileSystem):
        _check_mode(os.stat(path).st_mode)


def _check_mode(mode: int) -> None:
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise Unreadable("not a regular file", f"must be a regular file, is {kind}")


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parses a header. Rejects sizes that would exhaust memory or move the reader backwards."""
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0:
            raise InvalidHeaderError(f"the size of a member must be >= 0, got {member.size}")
        if member.type in _HEADERS and member.size > MAX_TAR_HEADER_BYTES:
            limit = f"at most {MAX_TAR_HEADER_BYTES:,} bytes"
            raise InvalidHeaderError(f"a header must be {limit}, got {member.size:,}")
        return member

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        if isinstance(archive, TarArchive):
            archive.check_search()
        return super().fromtarfile(archive)


class TarArchive(tarfile.TarFile):
    """Tar archive that rejects headers which would exhaust memory or move the reader backwards."""

    tarinfo = _Member
    members: list[tarfile.TarInfo]  # set by TarFile, but missing in its stubs
    _search_start = 0  # offset at which the search for the next member began

    def check_search(self) -> None:
        """Raises `tarfile.ReadError` if the search for the next member has exceeded the limit."""
        if self.offset - self._search_start > MAX_SEARCHED_BYTES:
            raise tarfile.ReadError(f"no member within {MAX_SEARCHED_BYTES:,} bytes")

    def next(self) -> tarfile.TarInfo | None:
        """Returns the next member, or None at the end of the archive."""
        self._search_start = self.offset
        member = super().next()
        if member is not None and self.offset <= member.offset:  # PAX sizes may be negative
            raise tarfile.ReadError("the size of a member is negative")
        return member

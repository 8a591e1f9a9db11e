"""Members of ZIP archives, which are located once and read directly afterwards."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol

from pipeline.data.decode import Unreadable

#: Size and magic number of a local file header, and the offset of the lengths in it.
HEADER_BYTES, HEADER_MAGIC, LENGTHS_OFFSET = 30, b"PK\x03\x04", 26
CHUNK_BYTES = 1 << 20
#: Errors of opening a corrupted archive.
ZIP_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError)


class ZipMember(NamedTuple):
    """Location of a file in an archive.

    Attributes:
        offset: Offset of its (compressed) content, in bytes.
        deflated: Size of the compressed content in bytes, or None if it is not compressed.
        problem: Reason why the member cannot be read, or empty.
    """

    name: str
    offset: int
    size: int
    deflated: int | None
    problem: str = ""


def zip_members(stream: BinaryIO) -> Iterator[ZipMember]:
    """Yields the files of an archive in the order of its directory. Only that is kept in memory.

    Raises:
        Unreadable: The archive has no valid directory.
    """
    try:
        entries = zipfile.ZipFile(stream).infolist()
    except ZIP_ERRORS as error:
        raise Unreadable("not a zip archive", f"{type(error).__name__}: {error}") from None
    for entry in entries:
        if entry.is_dir():
            continue
        offset, problem = 0, ""
        if entry.flag_bits & 1:
            problem = "is encrypted"
        elif entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            problem = f"has the unsupported compression method {entry.compress_type}"
        else:
            stream.seek(entry.header_offset)
            header = stream.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES or not header.startswith(HEADER_MAGIC):
                problem = "has no header at its offset"
            else:
                lengths = header[LENGTHS_OFFSET:]
                name_bytes = int.from_bytes(lengths[:2], "little")
                extra_bytes = int.from_bytes(lengths[2:], "little")
                offset = entry.header_offset + HEADER_BYTES + name_bytes + extra_bytes
        is_deflated = entry.compress_type == zipfile.ZIP_DEFLATED
        deflated = entry.compress_size if is_deflated else None
        yield ZipMember(entry.filename, offset, entry.file_size, deflated, problem)


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class InflatedStream:
    """A deflated stream that is decompressed while it is read."""

    def __init__(self, stream: _Readable, size: int):
        self._stream, self._num_remaining = stream, size
        self._inflater, self._pending = zlib.decompressobj(-zlib.MAX_WBITS), b""

    def read(self, size: int = -1, /) -> bytes:
        """Reads at most `size` bytes, or all remaining bytes if `size` is -1. Empty at the end.

        Raises:
            Unreadable: The stream is corrupted, or does not have the declared size.
        """
        size = self._num_remaining if size < 0 else min(size, self._num_remaining)
        chunks = []
        while size:
            if not self._pending and not (data := self._stream.read(CHUNK_BYTES)):
                raise Unreadable("corrupted archive", "a member is shorter than declared")
            try:
                chunk = self._inflater.decompress(self._pending or data, size)
            except zlib.error as error:
                raise Unreadable("corrupted archive", str(error)) from None
            self._pending = self._inflater.unconsumed_tail
            if not chunk and self._inflater.eof:
                raise Unreadable("corrupted archive", "a member is shorter than declared")
            chunks.append(chunk)
            size -= len(chunk)
            self._num_remaining -= len(chunk)
        return b"".join(chunks)

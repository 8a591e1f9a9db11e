"""Detection of media files that are shorter than their headers specify."""

from __future__ import annotations

import os
import re
from typing import BinaryIO

#: Ids of Matroska and WebM elements.
EBML, SEGMENT = bytes.fromhex("1a45dfa3"), bytes.fromhex("18538067")
#: RIFF sizes from this value on indicate that the size was unknown when the header was written.
UNKNOWN_RIFF = 0xFFFFFF00


def is_truncated(path: str) -> bool:
    """Checks whether a file is shorter than its header specifies.

    MP4, MOV, Matroska, WebM, AVI and WAV files are supported. The result is False for all other
    formats, and for streams of unknown length.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(12)
        file.seek(0)
        if head[:4] == b"RIFF":
            declared = int.from_bytes(head[4:8], "little")
            return declared < UNKNOWN_RIFF and declared + 8 > size
        if head[:4] == EBML:
            return _segment_end(file) > size
        if head[4:8] == b"ftyp":
            return _boxes_end(file, size) > size
    return False


def has_length_tag(path: str) -> bool:
    """Checks whether a header declares the length of a file; for many MP3 files it is estimated."""
    with open(path, "rb") as file:
        head = file.read(10)
        if head[:3] == b"ID3":  # a tag, whose size has seven bits per byte
            file.seek(10 + sum(byte << 7 * (9 - i) for i, byte in enumerate(head[6:], 6)))
            head = b""
        head += file.read(1024)
    is_mp3 = head[:1] == b"\xff"
    return not is_mp3 or re.search(b"Xing|Info|VBRI", head) is not None


def _boxes_end(file: BinaryIO, size: int) -> int:
    """Returns the offset at which the last top-level box of an MP4 or MOV file ends."""
    end = 0
    while end + 8 <= size:
        file.seek(end)
        head = file.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8:  # a length of 0 means that the box extends to the end of the file
            return end
        end += length
    return end


def _segment_end(file: BinaryIO) -> int:
    """Returns the offset of the end of the first Matroska segment, or 0 if it is unknown."""
    file.seek(len(EBML))
    file.seek(_varint(file) or 0, os.SEEK_CUR)
    if file.read(len(SEGMENT)) != SEGMENT or (length := _varint(file)) is None:
        return 0
    return file.tell() + length


def _varint(file: BinaryIO) -> int | None:
    """Reads a variable-length integer of Matroska. Returns None if it encodes an unknown length.

    >>> import io
    >>> [_varint(io.BytesIO(bytes.fromhex(code))) for code in ("83", "4102", "ff")]
    [3, 258, None]
    """
    first = file.read(1)
    if not first or not first[0]:
        return None
    extra = 8 - first[0].bit_length()
    value = int.from_bytes(bytes([first[0] & (0x7F >> extra)]) + file.read(extra), "big")
    return None if value == (1 << 7 * (extra + 1)) - 1 else value

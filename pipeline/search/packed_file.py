"""The file of a segment: token vectors in the form that is scored, mapped into memory.

    header    one page: magic, format, length and CRC-32 of a JSON description, the description
    parts     each (T, width), aligned to a page and followed by zeros
    lengths   (S,) int64, number of vectors per document
    rows      (S,) int64, row of each document in its fragment; omitted if it is 0 ... S - 1
    footer    (parts, blocks) uint32: CRC-32 of each block of vectors; a seal

Numbers are little-endian; sections are aligned to pages. The seal is the CRC-32 of header, lengths,
rows and checksums. Opening checks only the seal and the length of the file, so it does not read the
vectors. A block is compared with its checksum when it is first read.

S documents, T vectors in all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import struct
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch

#: Version of the format above.
FORMAT = 1
MAGIC = b"maxraypk"
PAGE = 4096
#: Approximate number of bytes per checksum: the least that the first use of a vector reads.
BLOCK_BYTES = 1 << 20
#: Zero rows after a part: kernels that read tiles of 16 rows may read past its end.
SLACK_ROWS = 16

_START = struct.Struct("<8sIII")  # magic, format, length and checksum of the description
_SEAL = struct.Struct("<I8s")  # checksum, magic

#: Type and width of each part of a vector, as `Codec.parts` returns them.
Layout = Mapping[str, tuple[torch.dtype, int]]


class DamagedError(Exception):
    """A file is corrupted or of another format."""


def numpy_type(dtype: torch.dtype) -> np.dtype:
    """Returns the NumPy type of a torch type."""
    return torch.empty(0, dtype=dtype).numpy().dtype


class PackedWriter:
    """Writes the file of a segment batch by batch, under a temporary name until it is complete.

    A context manager that removes the file at its end unless it was published. Files that a killed
    process leaves behind are removed by `remove_unfinished`.

    Args:
        folder: Folder of the file.
        layout: Type and width of each part of a vector.

    Raises:
        OSError: The folder has no space or cannot be written. The methods raise it too.
    """

    def __init__(self, folder: Path, layout: Layout):
        self._types = {name: numpy_type(dtype) for name, (dtype, _) in layout.items()}
        self._widths = {name: width for name, (_, width) in layout.items()}
        vector_bytes = sum(t.itemsize * self._widths[name] for name, t in self._types.items())
        self._block = max(1, BLOCK_BYTES // max(vector_bytes, 1))
        self._sums: dict[str, list[int]] = {name: [] for name in layout}
        self._lengths: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._num_vectors = 0
        with contextlib.ExitStack() as stack:
            self._path, file = _begin(folder)
            self._file = stack.enter_context(_closing(file))
            stack.callback(self._path.unlink, missing_ok=True)
            self._file.write(bytes(PAGE))
            # The first part may grow until the end, so the others are written to temporary files.
            self._files = {name: self._file for name in layout}
            for name in list(layout)[1:]:
                nameless = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, the stack closes it
                self._files[name] = stack.enter_context(_closing(nameless))
            self._stack = stack.pop_all()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def append(
        self, parts: Mapping[str, np.ndarray], lengths: np.ndarray, rows: np.ndarray
    ) -> None:
        """Adds documents.

        Args:
            parts: Parts of all their vectors, (t, width) each.
            lengths: (s,) number of vectors per document.
            rows: (s,) row of each document in its fragment, ascending over all calls.
        """
        self._lengths.append(lengths.astype("<i8"))
        self._rows.append(rows.astype("<i8"))
        for name, part in parts.items():
            part = np.ascontiguousarray(part, self._types[name])
            self._files[name].write(part.data)
            self._add_to_sums(self._sums[name], part)
        self._num_vectors += int(lengths.sum())

    def _add_to_sums(self, sums: list[int], part: np.ndarray) -> None:
        done, end = self._num_vectors, self._num_vectors + len(part)
        first = done
        while done < end:
            if done % self._block == 0:
                sums.append(0)
            upto = min(end, done - done % self._block + self._block)
            sums[-1] = zlib.crc32(part[done - first : upto - first].data, sums[-1])
            done = upto

    def publish(self, path: Path, key: str) -> None:
        """Completes the file and moves it to `path`, over an existing file."""
        places = {}
        for name, file in self._files.items():
            if file is not self._file:
                places[name] = self._file.tell()
                file.seek(0)
                shutil.copyfileobj(file, self._file, BLOCK_BYTES)
            else:
                places[name] = PAGE
            row_bytes = self._types[name].itemsize * self._widths[name]
            self._pad(max(PAGE, SLACK_ROWS * row_bytes))
        lengths = np.concatenate([np.empty(0, "<i8"), *self._lengths])
        rows = np.concatenate([np.empty(0, "<i8"), *self._rows])
        if np.array_equal(rows, np.arange(len(rows))):
            rows = rows[:0]
        places["lengths"] = self._section(lengths)
        places["rows"] = self._section(rows)
        sums = np.array(list(self._sums.values()), "<u4")
        description = {
            "key": key,
            "documents": len(lengths),
            "vectors": self._num_vectors,
            "block": self._block,
            "parts": {
                name: {"type": str(kind), "width": self._widths[name], "place": places[name]}
                for name, kind in self._types.items()
            },
            "lengths": places["lengths"],
            "rows": places["rows"] if len(rows) else None,
            "footer": self._file.tell(),
            "size": self._file.tell() + sums.nbytes + _SEAL.size,
        }
        described = json.dumps(description).encode()
        start = _START.pack(MAGIC, FORMAT, len(described), zlib.crc32(described))
        header = (start + described).ljust(PAGE, b"\0")
        assert len(header) == PAGE
        self._file.write(sums.data)
        self._file.write(_SEAL.pack(_checksum(header, lengths.data, rows.data, sums.data), MAGIC))
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._path, path)
        _sync_folder(path.parent)

    def _section(self, numbers: np.ndarray) -> int:
        place = self._file.tell()
        self._file.write(numbers.data)
        self._pad(0)
        return place

    def _pad(self, least: int) -> None:
        """Writes at least `least` zeros, up to the next page."""
        size = least + -(self._file.tell() + least) % PAGE
        self._file.write(bytes(size))


#: Prefix of the names of unfinished files.
UNFINISHED = ".unfinished-"


def _begin(folder: Path) -> tuple[Path, BinaryIO]:
    """Creates a file that is locked until the process ends."""
    while True:
        path = folder / f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
        file = path.open("x+b")
        with contextlib.suppress(OSError):  # some network file systems know no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else it was removed before it was locked
            return path, file
        file.close()


def remove_unfinished(folder: Path) -> None:
    """Removes the unfinished files of killed processes: those that nobody has locked."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class PackedFile:
    """An open file with memory-mapped tensors.

    Attributes:
        path: The file; it may be removed or replaced while it is open.
        parts: Parts of the vectors by name, (T, width) each.
        lengths: (S,) int64, number of vectors per document.
        rows: (S,) int64, ascending, row of each document in its fragment.
    """

    path: Path
    parts: dict[str, torch.Tensor]
    lengths: torch.Tensor
    rows: np.ndarray
    _block: int
    _sums: np.ndarray  # (parts, blocks)
    _verified: np.ndarray  # (blocks,) bool

    @classmethod
    def open(cls, path: Path, key: str) -> PackedFile:
        """Maps a file after checking everything except the vectors.

        Args:
            path: The file.
            key: Key that `publish` was given.

        Raises:
            DamagedError: The file is corrupted, or of another format or key.
            OSError: The file is missing or unreadable.
        """
        if path.stat().st_size < PAGE + _SEAL.size:
            raise DamagedError("is cut short")
        with pa.memory_map(str(path)) as file:  # the map outlives it, and holds no file open
            data = np.frombuffer(file.read_buffer(), np.uint8)
        magic, version, size, checksum = _START.unpack_from(data.data)
        if magic != MAGIC or version != FORMAT:
            raise DamagedError(f"is not of the format {FORMAT}")
        described = data[_START.size :][:size].tobytes()
        if zlib.crc32(described) != checksum:
            raise DamagedError("has a damaged header")
        description = json.loads(described)
        if description["key"] != key:
            raise DamagedError("holds something else")
        if description["size"] != len(data):
            raise DamagedError("is cut short")
        return cls._mapped(path, data, description)

    @classmethod
    def _mapped(cls, path: Path, data: np.ndarray, description: dict[str, Any]) -> PackedFile:
        num_docs, num_vectors = description["documents"], description["vectors"]
        block = description["block"]
        lengths = _view(data, description["lengths"], (num_docs,), "<i8")
        rows = description["rows"] and _view(data, description["rows"], (num_docs,), "<i8")
        num_blocks = -(-num_vectors // block)
        shape = len(description["parts"]), num_blocks
        sums = _view(data, description["footer"], shape, "<u4")
        stored_rows = rows if rows is not None else lengths[:0]
        seal = _SEAL.pack(
            _checksum(data[:PAGE].data, lengths.data, stored_rows.data, sums.data), MAGIC
        )
        if data[-_SEAL.size :].tobytes() != seal:
            raise DamagedError("has a damaged header or footer")
        parts = {
            name: _tensor(_view(data, part["place"], (num_vectors, part["width"]), part["type"]))
            for name, part in description["parts"].items()
        }
        rows = np.arange(num_docs) if rows is None else rows
        return cls(path, parts, _tensor(lengths), rows, block, sums, np.zeros(num_blocks, bool))

    def check(self, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Compares the blocks of some documents' vectors with their checksums, each block once.

        Thread-safe: at worst two threads check the same block.

        Args:
            starts: (S,) int64, index of each document's first vector.
            lengths: (S,) int64, number of vectors per document.

        Raises:
            DamagedError: A block differs from its checksum.
        """
        if self._verified.all():
            return
        first, size = starts.numpy(), lengths.numpy()
        first, size = first[size > 0], size[size > 0]
        # A block is read if more documents have begun than ended by it.
        num_blocks = len(self._verified) + 1
        begun = np.bincount(first // self._block, minlength=num_blocks)
        ended = np.bincount((first + size - 1) // self._block + 1, minlength=num_blocks)
        is_read = np.cumsum(begun - ended)[: len(self._verified)] > 0
        for block in np.flatnonzero(is_read & ~self._verified):
            vectors = slice(block * self._block, (block + 1) * self._block)
            for part, expected in zip(self.parts.values(), self._sums[:, block], strict=True):
                if zlib.crc32(part[vectors].numpy().data) != expected:
                    raise DamagedError(f"is damaged in block {block}")
            self._verified[block] = True


def _view(data: np.ndarray, place: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Returns an array that is a view of the mapped file."""
    return np.ndarray(shape, kind, data, place)


def _tensor(numbers: np.ndarray) -> torch.Tensor:
    """Returns a tensor that shares an array's memory, without the warning that it is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(numbers)


def _checksum(*sections: bytes | memoryview) -> int:
    checksum = 0
    for section in sections:
        checksum = zlib.crc32(section, checksum)
    return checksum


@contextlib.contextmanager
def _closing(file: BinaryIO) -> Iterator[BinaryIO]:
    """Closes a file even if the disk has no space for its buffered data."""
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _sync_folder(folder: Path) -> None:
    """Makes a renamed file durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

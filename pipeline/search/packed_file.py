"""Memory-mapped file format of a segment of token vectors.

    header    one page: magic, format, length and CRC-32 of a JSON description, the description
    parts     each (T, width), aligned to a page and followed by zeros
    lengths   (S,) int64, number of vectors per document
    rows      (S,) int64, row of each document in its fragment, or omitted if it is 0 ... S - 1
    footer    (parts, blocks) uint32: CRC-32 of each block of vectors, followed by a seal

Numbers are little-endian, and sections are aligned to pages. The seal is the CRC-32 of the header,
the lengths, the rows and the checksums. Opening a file only verifies the seal and the file size,
and does not read the vectors. Each block is verified when it is first read.

Shapes: S documents with T vectors in total.
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

from pipeline.search.storage import SharedStorages, Storage, use_huge_pages

#: Version of the format above.
FORMAT = 1
MAGIC = b"maxraypk"
PAGE = 4096
#: Approximate bytes per checksum, which is the minimum that the first access to a vector reads.
BLOCK_BYTES = 1 << 20
#: Zero rows after each part, because kernels that read tiles of 16 rows may read past its end.
SLACK_ROWS = 16

_START = struct.Struct("<8sIII")  # magic, format, length and checksum of the description
_SEAL = struct.Struct("<I8s")  # checksum, magic

#: Data type and width of each part of a vector, see `Codec.parts`.
Layout = Mapping[str, tuple[torch.dtype, int]]


class CorruptedError(Exception):
    """A file is corrupted or has another format."""


def numpy_type(dtype: torch.dtype) -> np.dtype:
    """Returns the NumPy dtype that corresponds to a torch dtype."""
    return torch.empty(0, dtype=dtype).numpy().dtype


class PackedWriter:
    """Writer of a segment's file, which has a temporary name until it is published.

    The context manager removes the file on exit unless it was published. Files left behind by
    killed processes are removed by `remove_unfinished`.

    Raises:
        OSError: The folder is full or not writable. The methods raise it too.
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
            # The first part grows in place, so the others are written to temporary files.
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
        """Adds documents: parts (t, width), lengths (s,) and ascending rows (s,)."""
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
            stop = min(end, done - done % self._block + self._block)
            sums[-1] = zlib.crc32(part[done - first : stop - first].data, sums[-1])
            done = stop

    def publish(self, path: Path, key: str) -> None:
        """Completes the file and moves it to `path`, where it replaces an existing file."""
        offsets = {}
        for name, file in self._files.items():
            if file is not self._file:
                offsets[name] = self._file.tell()
                file.seek(0)
                shutil.copyfileobj(file, self._file, BLOCK_BYTES)
            else:
                offsets[name] = PAGE
            row_bytes = self._types[name].itemsize * self._widths[name]
            self._pad(max(PAGE, SLACK_ROWS * row_bytes))
        lengths = np.concatenate([np.empty(0, "<i8"), *self._lengths])
        rows = np.concatenate([np.empty(0, "<i8"), *self._rows])
        if np.array_equal(rows, np.arange(len(rows))):
            rows = rows[:0]
        offsets["lengths"] = self._section(lengths)
        offsets["rows"] = self._section(rows)
        sums = np.array(list(self._sums.values()), "<u4")
        description = {
            "key": key,
            "documents": len(lengths),
            "vectors": self._num_vectors,
            "block": self._block,
            "parts": {
                name: {"type": str(dtype), "width": self._widths[name], "place": offsets[name]}
                for name, dtype in self._types.items()
            },
            "lengths": offsets["lengths"],
            "rows": offsets["rows"] if len(rows) else None,
            "footer": self._file.tell(),
            "size": self._file.tell() + sums.nbytes + _SEAL.size,
        }
        encoded = json.dumps(description).encode()
        start = _START.pack(MAGIC, FORMAT, len(encoded), zlib.crc32(encoded))
        header = (start + encoded).ljust(PAGE, b"\0")
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
        offset = self._file.tell()
        self._file.write(numbers.data)
        self._pad(0)
        return offset

    def _pad(self, min_bytes: int) -> None:
        size = min_bytes + -(self._file.tell() + min_bytes) % PAGE
        self._file.write(bytes(size))


#: File name prefix of unfinished files.
UNFINISHED = ".unfinished-"


def _begin(folder: Path) -> tuple[Path, BinaryIO]:
    """Creates an unfinished file, which remains locked as long as the process is running."""
    while True:
        path = folder / f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
        file = path.open("x+b")
        with contextlib.suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # 0 if another process removed it before the lock
            return path, file
        file.close()


def remove_unfinished(folder: Path) -> None:
    """Removes unfinished files of processes that were killed. Their files are no longer locked."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class PackedFile(Storage):
    """Open file with memory-mapped tensors. It may be removed or replaced while it is open."""

    path: Path
    _status: os.stat_result
    _block: int
    _sums: np.ndarray  # (parts, blocks)
    _verified: np.ndarray  # (blocks,) bool

    @classmethod
    def open(cls, path: Path, key: str) -> PackedFile:
        """Maps a file into memory. Everything except the vectors is verified.

        Raises:
            CorruptedError: The file is corrupted or has another format or key.
            OSError: The file is missing or unreadable.
        """
        status = path.stat()
        if status.st_size < PAGE + _SEAL.size:
            raise CorruptedError("is truncated")
        with pa.memory_map(str(path)) as file:  # the mapping outlives the open file
            data = np.frombuffer(file.read_buffer(), np.uint8)
        use_huge_pages(data)
        magic, version, size, checksum = _START.unpack_from(data.data)
        if magic != MAGIC or version != FORMAT:
            raise CorruptedError(f"does not have format {FORMAT}")
        encoded = data[_START.size :][:size].tobytes()
        if zlib.crc32(encoded) != checksum:
            raise CorruptedError("has a corrupted header")
        description = json.loads(encoded)
        if description["key"] != key:
            raise CorruptedError("contains other vectors")
        if description["size"] != len(data):
            raise CorruptedError("is truncated")
        return cls._from_description(path, status, data, description)

    @classmethod
    def _from_description(
        cls, path: Path, status: os.stat_result, data: np.ndarray, description: dict[str, Any]
    ) -> PackedFile:
        """Creates views of the sections of a mapped file and verifies the seal."""
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
            raise CorruptedError("has a corrupted header or footer")
        parts = {
            name: _tensor(_view(data, part["place"], (num_vectors, part["width"]), part["type"]))
            for name, part in description["parts"].items()
        }
        rows = np.arange(num_docs) if rows is None else rows
        verified = np.zeros(num_blocks, bool)
        return cls(parts, _tensor(lengths), rows, path, status, block, sums, verified)

    @classmethod
    def shared(cls, path: Path, key: str) -> PackedFile:
        """Opens a file, or returns it if it is open. Its blocks are then verified only once."""
        status = path.stat()
        # The number of an inode is not reused as long as the file is mapped.
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return _open_files.get((path, key, *identity), lambda: cls.open(path, key))

    def remove(self) -> None:
        """Removes the file, unless another file has replaced it. Its mapping remains readable."""
        with contextlib.suppress(OSError):  # the folder may be read-only
            if os.path.samestat(self.path.stat(), self._status):
                self.path.unlink()

    def verify(self, starts: np.ndarray, lengths: np.ndarray) -> bool:
        """Verifies the checksums of the blocks that contain some documents, once per block.

        This method is thread-safe: at worst, two threads verify the same block. Returns whether all
        blocks have been verified.

        Raises:
            CorruptedError: A block does not match its checksum.
        """
        if self._verified.all():
            return True
        first, size = starts[lengths > 0], lengths[lengths > 0]
        # A block is read if more documents have started than ended up to it.
        num_blocks = len(self._verified) + 1
        num_starts = np.bincount(first // self._block, minlength=num_blocks)
        num_ends = np.bincount((first + size - 1) // self._block + 1, minlength=num_blocks)
        is_read = np.cumsum(num_starts - num_ends)[: len(self._verified)] > 0
        for block in np.flatnonzero(is_read & ~self._verified):
            vectors = slice(block * self._block, (block + 1) * self._block)
            for part, expected in zip(self.parts.values(), self._sums[:, block], strict=True):
                if zlib.crc32(part[vectors].numpy().data) != expected:
                    raise CorruptedError(f"is corrupted in block {block}")
            self._verified[block] = True
        return bool(self._verified.all())


_open_files: SharedStorages[PackedFile] = SharedStorages()


def _view(data: np.ndarray, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.ndarray(shape, dtype, data, offset)


def _tensor(numbers: np.ndarray) -> torch.Tensor:
    """Creates a tensor that shares its memory with a read-only array."""
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
    """Context that closes a file, even if the disk is too full for its buffered data."""
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _sync_folder(folder: Path) -> None:
    """Flushes a folder to disk, so that a rename in it is durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

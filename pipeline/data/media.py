"""Base class of sources that read media files from folders and tar archives."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import shutil
import tarfile
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar, Literal, Protocol, TypeVar

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from pipeline import config
from pipeline.data.base import NO_PREVIEW, Source, make_revision
from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import DecodingProcess, Limits, check_decoder, decoding_process
from pipeline.data.decode.untrusted import TAR_ERRORS, TarArchive, check_regular, open_file
from pipeline.data.files import (
    SPECIAL_FILE_SIZE,
    check_suffix,
    escape,
    existing_root,
    file_state,
    find_files,
    first_file,
    resolve_folder,
)
from pipeline.data.texts import decode
from pipeline.data.zip_members import InflatedStream, zip_members
from pipeline.schema import SEEN, Item, Reject, detail_with_file, item_id_problem, payload_schema

ARCHIVE, ZIP = ".tar", ".zip"
#: A shard is listed by one task, which reads its files. Other tasks decode its items.
BYTES_PER_SHARD = 256 << 20
#: Maximum size of a caption or metadata file in an archive.
SIDECAR_BYTES = 1 << 20
#: Maximum size of a compressed archive member that is read into memory for a preview.
MAX_BUFFERED_BYTES = 64 << 20
SIDECARS = (".txt", ".caption", ".json")


@dataclass(frozen=True)
class MediaFile:
    """A media file, or a member of an archive.

    Attributes:
        id: Id of the file. The ids of its items begin with it.
        path: Path of the file, archive or table, relative to the folder of the source.
        size: Size in bytes, or None if unknown.
        offset: Offset of a member in its archive, in bytes, or None for other files.
        suffix: Suffix of the file name, in lower case with the dot.
        sidecars: Contents of the other members of the same sample, by suffix.
        annotation: Captions, title and metadata from a manifest.
        row: Row of the table at `path` that contains the bytes, or None for other files.
        deflated: Number of compressed bytes of a compressed archive member, or None.
        header: Properties of the file, if they were measured.
    """

    id: str
    path: str
    size: int | None
    offset: int | None = None
    suffix: str = ""
    sidecars: dict[str, str] = field(default_factory=dict)
    annotation: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    deflated: int | None = None
    header: dict[str, Any] = field(default_factory=dict)


class MediaSpec(config.ComponentSpec):
    """Options of all sources of media files."""

    path: config.Uri
    """Local path or fsspec URI of a folder, an archive or a single file."""
    collection: str = ""
    """Name of the collection. Defaults to the last part of the path."""
    ids: Literal["key", "path"] = "key"
    """Ids of archive members: the WebDataset `key` (the path up to the first dot), or the `path`
    of the archive and the member, for archives that share keys."""
    revision: Literal["content", "stat"] = "content"
    """Detection of changed files: by `content`, or by `stat` (size and modification time or ETag).
    With `content`, each file is read twice: a first time to be hashed, and if it is new or has
    changed, a second time to be decoded. `stat` only decodes files. It suits large collections in
    object storage, whose ETags change with the content. On a file system, it misses changes that
    keep the size and the modification time, and it indexes copied files again."""
    max_file_bytes: int = Field(16 << 30, ge=1024)
    """Maximum size of a file or an archive member, in bytes."""
    limits: Limits = Limits(max_seconds=120.0)
    """Limits of time and memory per decoded item."""


MediaSpecT = TypeVar("MediaSpecT", bound=MediaSpec)


class MediaSource(Source[MediaSpecT]):
    """Base class of sources whose files are read by a decoding process.

    `path` is a folder that contains files with the supported suffixes and tar or ZIP archives of
    them, at any depth, or a single such file. The id of a file is its path relative to the folder.
    The id of an archive member is its WebDataset key. A corrupted range of an archive is one
    reject. Reading resumes at the next member.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of media files."""
    containers: ClassVar[tuple[str, ...]] = (ARCHIVE, ZIP)
    """Suffixes of files that contain media files."""
    lists: ClassVar[tuple[str, ...]] = ()
    """Suffixes of manifests, which are read only if `path` is one."""
    module: ClassVar[str]
    """Name of the module of `pipeline.data.decode` that decodes the files."""
    files_per_shard: ClassVar[int]
    """Maximum number of files per shard."""

    @property
    def stores_listing(self) -> bool:
        """Returns True, because listing an archive takes as long as reading it."""
        return True

    @property
    @abstractmethod
    def decodes_to_list(self) -> bool:
        """True if the items of a file can only be listed by decoding it."""

    def decodes_file_to_list(self, file: MediaFile) -> bool:
        """Returns True if the items of this file can only be listed by decoding it."""
        return self.decodes_to_list

    @property
    def measures_files(self) -> bool:
        """True if listing opens the files, see `measure_file`."""
        return False

    @property
    def reads_files(self) -> bool:
        """True if items are decoded from the files, and not only from the listing."""
        return True

    @property
    def copies_files(self) -> bool:
        """True if the files are not on this machine."""
        return not isinstance(self._folder[0], LocalFileSystem)

    def __init__(self, spec: MediaSpecT, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        self.payload = payload_schema(self.provides, wants)
        self._scanned: tuple[str, list[Any]] = "", []

    @abstractmethod
    def list_items(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """Yields the items of a file, without payload.

        `path` is a local path of the file if `decodes_file_to_list`, else None.

        Raises:
            Unreadable: The file cannot be read.
        """

    @abstractmethod
    def decode_file(self, file: MediaFile, path: str, items: Sequence[Item]) -> Iterator[Any]:
        """Yields the requested items of a file in order, with their payload or as `Unreadable`."""

    def measure_file(self, path: str) -> dict[str, Any]:
        """Returns properties from which the size of the decoded file is estimated, if any."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the decoded content; they are part of revisions."""
        excluded = {"name", "path", "collection", "ids", "revision", "max_file_bytes", "limits"}
        wants = [kind for kind in self.provides if kind in self.wants]
        if SEEN in self.wants and {"image", "frames"} & {*self.provides}:
            wants.append(SEEN)
        return {**self.spec.model_dump(mode="json", exclude=excluded), "wants": wants}

    @property
    def process(self) -> DecodingProcess:
        """The decoding process of this thread."""
        return decoding_process(self.module, self.spec.limits)

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read, or `MissingExtra` without a decoder."""
        check_decoder(self.module)
        fs, root = existing_root(self.spec.path)
        suffixes = (*self.suffixes, *self.containers)
        check_suffix(fs, root, self.spec.path, (*suffixes, *self.lists))
        rule = f"a folder with files ending in {', '.join(suffixes)}"
        first_file(self._files(), self.spec.path, rule)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields groups of files `{"files": [[path, size], ...]}` and the shards of containers."""
        group: list[tuple[str, int | None]] = []
        size = 0
        for file, num_bytes in self._files():
            if file.lower().endswith((*self.containers, *self.lists)):
                yield from self.container_shards(file, num_bytes)
                continue
            if self.spec.revision == "content" or self.decodes_to_list:  # files are read
                size += max(num_bytes or 0, 0)
            if group and (len(group) == self.files_per_shard or size > BYTES_PER_SHARD):
                yield {"files": group}
                group, size = [], max(num_bytes or 0, 0)
            group.append((file, num_bytes))
        if group:
            yield {"files": group}

    def container_shards(self, container: str, num_bytes: int | None) -> Iterator[dict[str, Any]]:
        """Yields the shards of an archive or manifest, a path relative to the folder."""
        yield {"archive": container}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of each file. A file that cannot be read is one reject."""
        self._scanned = "", []
        for file in self.list_files(shard):
            yield from self._scan_file(file) if isinstance(file, MediaFile) else (file,)

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the files of a shard."""
        if "archive" in shard:
            yield from self._members(shard["archive"])
            return
        for path, num_bytes in shard["files"]:
            yield MediaFile(path, path, num_bytes, suffix=PurePosixPath(path).suffix.lower())

    def _scan_file(self, file: MediaFile) -> Iterator[Item | Reject]:
        revision = ""
        try:
            if problem := item_id_problem(f"{file.id}#t=100000.0,100000.0"):
                raise Unreadable("bad id", problem)
            if (file.size or 0) > (limit := self.spec.max_file_bytes):
                raise Unreadable("too large", f"must be at most {limit:,} bytes, got {file.size:,}")
            if file.size in (0, SPECIAL_FILE_SIZE):
                with self._open(file):  # the size of a dangling link is 0, too
                    raise Unreadable("empty file")
            if not (is_decoded := self.decodes_file_to_list(file)) and not self.measures_files:
                revision = self._revision(file, None)
                items = list(self.list_items(file, revision, None))
            else:
                with self.local_path(file) as path:
                    revision = self._revision(file, path)
                    if self.measures_files:
                        file = replace(file, header=self.measure_file(path))
                    items = list(self.list_items(file, revision, path if is_decoded else None))
        except (Unreadable, OSError) as error:
            yield self._reject(file, escape(file.id), revision, error, "list")
            return
        yield from (self._listed(item, file) for item in items)

    def _listed(self, item: Item, file: MediaFile) -> Item:
        """Adds the location of the file to the handle and the metadata of an item."""
        location: dict[str, Any] = {}
        if file.path != file.id:
            location["file"] = file.path
        if file.offset is not None:
            location["bytes"] = [file.offset, file.size]
        if file.row is not None:
            location["row"] = file.row
        if file.deflated is not None:
            location["deflated"] = file.deflated
        return replace(item, handle=asdict(file), metadata={**(item.metadata or {}), **location})

    def find_file(self, parent_id: str, metadata: dict[str, Any]) -> MediaFile:
        """Returns the file of an indexed item."""
        path = metadata.get("file", parent_id)
        offset, size = metadata.get("bytes", (None, None))
        suffix = PurePosixPath(path).suffix.lower()
        row, deflated = metadata.get("row"), metadata.get("deflated")
        return MediaFile(parent_id, path, size, offset, suffix, row=row, deflated=deflated)

    def resolve_path(self, file: MediaFile) -> tuple[Any, str]:
        """Returns the file system and the path of a file or of the archive that contains it."""
        fs, folder = self._folder
        return fs, f"{folder}/{file.path}"

    def _revision(self, file: MediaFile, path: str | None) -> str:
        settings = [self._settings, file.sidecars, file.annotation]
        if self.spec.revision == "stat":
            if self._scanned[0] != file.path:  # one request for all members of an archive
                self._scanned = file.path, self._stat(file)
            return make_revision(settings, [*self._scanned[1], file.offset, file.row])
        return make_revision(settings, self._content(file, path))

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        return self.settings()

    def _stat(self, file: MediaFile) -> list[Any]:
        """Returns the size and the date or ETag of a file or of the archive that contains it."""
        fs, path = self.resolve_path(file)
        info = fs.info(path)
        date = next((info[k] for k in ("ETag", "mtime", "LastModified") if k in info), "")
        return [info["size"], str(date)]

    def read_content_hash(self, item: dict[str, Any]) -> str:
        """Returns the current content hash of an item's file, or a hash of its size and date."""
        file = self.find_file(item["parent_id"], item["metadata"] or {})
        return config.digest(self._content(file, None))

    def file_state(self, item: dict[str, Any]) -> Any:
        """Returns a value that changes whenever the file or archive of an item is written."""
        file = self.find_file(item["parent_id"], item["metadata"] or {})
        return file_state(*self.resolve_path(file))

    @contextmanager
    def open_file(self, item: dict[str, Any]) -> Iterator[tuple[BinaryIO, int, int]]:
        """Opens the file of an item. A compressed archive member is read into memory."""
        file = self.find_file(item["parent_id"], item["metadata"] or {})
        if file.row is None and file.deflated is None:
            with open_file(*self.resolve_path(file)) as stream:
                size = stream.seek(0, 2) if file.offset is None else file.size or 0
                yield stream, file.offset or 0, size
            return
        if (file.size or 0) > MAX_BUFFERED_BYTES:
            raise Unreadable(NO_PREVIEW, "a compressed archive member that is too large")
        with self._open(file) as content:
            data = content.read(MAX_BUFFERED_BYTES)
        yield io.BytesIO(data), 0, len(data)

    def _content(self, file: MediaFile, path: str | None) -> Any:
        if self.spec.revision == "stat":
            return [*self._stat(file), file.offset, file.row]
        with open(path, "rb") if path else self._open(file) as stream:
            content = hashlib.blake2b()
            while data := stream.read(1 << 20):
                content.update(data)
            return content.hexdigest()

    @functools.cached_property
    def _folder(self) -> tuple[Any, str]:
        return resolve_folder(self.spec.path)

    def _files(self) -> Iterator[tuple[str, int | None]]:
        """Yields (path relative to the folder, size in bytes) of all files and archives."""
        return find_files(self.spec.path, (*self.suffixes, *self.containers))

    # -- archives ----------------------------------------------------------------------------

    def _members(self, archive: str) -> Iterator[MediaFile | Reject]:
        """Yields the media files of an archive. Members that have the same key form a sample.

        The members of a sample need not be adjacent: `tar` writes them in the order of the folder.
        """
        fs, folder = self._folder
        samples: dict[str, list[Member]] = {}
        problem: Unreadable | OSError | None = None
        try:
            with open_file(fs, f"{folder}/{archive}") as stream:
                entries: Iterator[Member | UnreadableMember]
                if archive.lower().endswith(ZIP):
                    entries = read_zip_members(stream)
                else:
                    entries = read_members(stream, fs.size(f"{folder}/{archive}"))
                for entry in entries:
                    if isinstance(entry, Member):
                        samples.setdefault(self._key(entry), []).append(entry)
                    else:
                        yield self._reject_member(archive, entry)
        except (Unreadable, OSError) as error:
            problem = error
        for key, members in samples.items():
            files = list(self._sample(archive, key, members))
            yield from files or self._without_file(archive, key, members)
        if problem is not None:
            yield self.reject(escape(archive), "", problem, "list")

    def _reject_member(self, archive: str, problem: UnreadableMember) -> Reject:
        location = problem.name or f"byte {problem.offset}"
        error = Unreadable(problem.reason, problem.detail)
        return self.reject(escape(f"{archive}/{location}"), "", error, "list")

    def _key(self, member: Member) -> str:
        """Returns the path of a member without its suffix, which begins at the first dot.

        If this suffix is unknown, only the part from the last dot on is removed.
        """
        folder, _, name = member.name.rpartition("/")
        stem, _, rest = name.partition(".")
        if f".{rest}".lower() not in (*self.suffixes, *SIDECARS):
            stem = name.rpartition(".")[0] or name
        return f"{folder}/{stem}" if folder else stem

    def _without_file(self, archive: str, key: str, members: list[Member]) -> Iterator[Reject]:
        """Yields rejects for the members of a sample without a media file."""
        return iter(())

    def _sample(self, archive: str, key: str, members: list[Member]) -> Iterator[MediaFile]:
        media = [m for m in members if m.suffix in self.suffixes]
        sidecars = {
            m.suffix: m.text for m in members if m.suffix in SIDECARS and m.text is not None
        }
        for member in media:
            sample_id = key if len({m.name for m in media}) == 1 else member.name
            file_id = sample_id if self.spec.ids == "key" else f"{archive}/{member.name}"
            yield MediaFile(
                file_id,
                archive,
                member.size,
                member.offset,
                member.suffix,
                sidecars,
                deflated=member.deflated,
            )

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes items. Each file is copied to this machine at most once."""
        for _, group in itertools.groupby(items, lambda entry: entry[1].handle["id"]):
            file_items = [item for _, item in group]
            file = MediaFile(**file_items[0].handle)
            num_done = 0
            try:
                opened = self.local_path(file) if self.reads_files else nullcontext("")
                with opened as path:
                    results = self.decode_file(file, path, file_items)
                    for item, result in zip(file_items, results, strict=True):
                        is_bad = isinstance(result, Unreadable)
                        yield (
                            self._reject(file, item.item_id, item.revision, result, "decode")
                            if is_bad
                            else result
                        )
                        num_done += 1
            except (Unreadable, OSError) as error:
                for item in file_items[num_done:]:
                    yield self._reject(file, item.item_id, item.revision, error, "decode")

    def _reject(self, file: MediaFile, *arguments: Any) -> Reject:
        """Builds the reject of an item, whose detail contains a path that differs from the id."""
        reject = self.reject(*arguments)
        path = None if file.path == file.id else escape(file.path)
        return replace(reject, detail=detail_with_file(reject.detail, path))

    @contextmanager
    def local_path(self, file: MediaFile) -> Iterator[str]:
        """Context manager for a local path of the file, which may be a temporary copy."""
        fs, path_in_fs = self.resolve_path(file)
        if isinstance(fs, LocalFileSystem) and file.offset is None and file.row is None:
            check_regular(fs, path_in_fs)
            yield path_in_fs
            return
        with tempfile.NamedTemporaryFile(suffix=file.suffix) as copy:
            with self._open(file) as stream:
                shutil.copyfileobj(stream, copy, 1 << 20)
            copy.flush()
            yield copy.name

    @contextmanager
    def _open(self, file: MediaFile) -> Iterator[ByteStream]:
        fs, path_in_fs = self.resolve_path(file)
        with open_file(fs, path_in_fs) as stream:
            if file.offset is None or file.size is None:
                yield stream
            else:
                yield member_stream(stream, file.offset, file.size, file.deflated)


@dataclass(frozen=True)
class Member:
    """A file in an archive.

    Attributes:
        name: Path in the archive.
        offset: Offset of the content in the archive, in bytes.
        size: Size in bytes.
        text: Content of caption and metadata files, or None for other files.
        deflated: Number of compressed bytes, or None if the content is not compressed.
    """

    name: str
    offset: int
    size: int
    text: str | None = None
    deflated: int | None = None

    @property
    def suffix(self) -> str:
        """Suffix of the name in lower case, including the dot."""
        return PurePosixPath(self.name).suffix.lower()


@dataclass(frozen=True)
class UnreadableMember:
    """Byte range, or member if it has a `name`, of an archive that cannot be read."""

    offset: int
    detail: str
    name: str = ""
    reason: str = "corrupted archive"


class ByteStream(Protocol):
    """A stream of bytes that is read sequentially."""

    def read(self, size: int = -1, /) -> bytes:
        """Reads at most `size` bytes, or all remaining bytes if `size` is -1. Empty at the end."""


class FileRange:
    """A stream of a byte range of a file."""

    def __init__(self, stream: BinaryIO, offset: int, size: int):
        stream.seek(offset)
        self._stream, self._num_remaining = stream, size

    def read(self, size: int = -1, /) -> bytes:
        """Reads at most `size` bytes, or all remaining bytes if `size` is -1. Empty at the end."""
        size = self._num_remaining if size < 0 else min(size, self._num_remaining)
        data = self._stream.read(size)
        self._num_remaining -= len(data)
        return data


def member_stream(
    stream: BinaryIO, offset: int, size: int, deflated: int | None = None
) -> ByteStream:
    """Returns a stream of a member's content. If compressed, `deflated` is its number of bytes."""
    if deflated is None:
        return FileRange(stream, offset, size)
    return InflatedStream(FileRange(stream, offset, deflated), size)


def read_zip_members(stream: BinaryIO) -> Iterator[Member | UnreadableMember]:
    """Yields the files of a ZIP archive in the order of its directory, and unreadable members.

    Raises:
        Unreadable: The archive has no valid directory.
    """
    for entry in zip_members(stream):
        if entry.problem:
            yield UnreadableMember(entry.offset, entry.problem, escape(entry.name))
            continue
        text = None
        if entry.name.lower().endswith(SIDECARS) and entry.size <= SIDECAR_BYTES:
            try:
                content = member_stream(stream, entry.offset, entry.size, entry.deflated)
                text = decode(content.read())
            except UnicodeError as error:
                name = escape(entry.name)
                yield UnreadableMember(entry.offset, str(error), name, "not UTF-8")
                continue
            except Unreadable as error:
                yield UnreadableMember(entry.offset, error.detail, escape(entry.name))
                continue
        yield Member(escape(entry.name), entry.offset, entry.size, text, entry.deflated)


def read_members(stream: BinaryIO, size: int) -> Iterator[Member | UnreadableMember]:
    """Yields the regular files of a tar archive in order, and its unreadable members and ranges.

    `tarfile` stops at the first malformed header. This function searches for the next header block
    by block, and reports the skipped range if it contains more than zeros.

    Raises:
        Unreadable: The archive has no valid member.
    """
    try:
        archive = TarArchive(fileobj=stream, ignore_zeros=True)
    except TAR_ERRORS as error:
        raise Unreadable("not a tar archive", str(error)) from None
    end, has_members = 0, False
    while True:
        try:
            member = archive.next()
        except TAR_ERRORS as error:
            yield UnreadableMember(end, f"{type(error).__name__}: {error}")
            return
        start = size if member is None else member.offset
        if start > end and _has_content(stream, end, start):
            if member is None and not has_members:
                raise Unreadable("not a tar archive", "the file contains no member")
            yield UnreadableMember(end, f"bytes {end:,} to {start:,} contain no archive member")
        if member is None:
            return
        has_members = True
        archive.members = []  # TarFile would keep all members in memory
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if member.issparse():  # the archive lacks its holes, which may be of any size
            end = archive.offset
            detail = f"must be stored in full, is a sparse file of {member.size:,} bytes"
            yield UnreadableMember(member.offset, detail, escape(member.name), "sparse member")
        elif not member.isreg():
            end = member.offset_data
            if not member.isdir():
                detail = f"is a link to {escape(member.linkname)}" if member.linkname else ""
                reason = "no file of its own"
                yield UnreadableMember(member.offset, detail, escape(member.name), reason)
        elif member.offset_data + member.size > size:
            detail = "the archive ends before the member does"
            yield UnreadableMember(member.offset, detail, member.name)
            return
        else:
            yield _member(stream, member)


def _member(stream: BinaryIO, member: tarfile.TarInfo) -> Member | UnreadableMember:
    text = None
    if member.name.lower().endswith(SIDECARS) and member.size <= SIDECAR_BYTES:
        stream.seek(member.offset_data)
        try:
            text = decode(stream.read(member.size))
        except UnicodeError as error:
            return UnreadableMember(member.offset, str(error), escape(member.name), "not UTF-8")
    return Member(escape(member.name), member.offset_data, member.size, text)


def _has_content(stream: BinaryIO, start: int, end: int) -> bool:
    """Checks whether a byte range of a file contains non-zero bytes."""
    stream.seek(start)
    while start < end:
        if not (data := stream.read(min(1 << 20, end - start))):
            return False
        if any(data):
            return True
        start += len(data)
    return False

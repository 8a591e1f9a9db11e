"""Files of one medium in folders and tar archives: listed, told apart, brought here to decode."""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
import tarfile
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar, Literal, Protocol, TypeVar

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.process import DecodingProcess, Limits, decoding_process
from pipeline.decoding.untrusted import TAR_ERRORS, TarArchive, check_regular, open_file
from pipeline.schema import Item, Reject, detail_with_file, item_id_problem, payload_schema
from pipeline.sources import Source, revision_of
from pipeline.sources.files import SPECIAL, escaped, existing_root, files_below, folder_of

ARCHIVE = ".tar"
#: A shard is a task's work: some files, few enough that tasks end at about the same time.
BYTES_PER_SHARD = 64 << 20
#: What stands beside a sample of an archive is small: captions, metadata.
SIDECAR_BYTES = 1 << 20
SIDECARS = (".txt", ".caption", ".json")


@dataclass(frozen=True)
class MediaFile:
    """A file, or the member of an archive.

    Attributes:
        id: what its items are called.
        path: below the source's folder; of the archive, for a member.
        size: bytes; None if that is not known.
        offset: where a member's bytes begin in the archive; None for a file by itself.
        sidecars: texts that stand beside a member in its sample, by suffix.
        about: what a manifest says of it.
        row: of the table at `path` that holds the file's bytes; None for other files.
    """

    id: str
    path: str
    size: int | None
    offset: int | None = None
    suffix: str = ""
    sidecars: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    row: int | None = None


class MediaSpec(config.ComponentSpec):
    """What the sources of media files share.

    Attributes:
        path: a local path or an fsspec URI: a folder, an archive or one file.
        collection: the name of what is read here; default: the last part of the path.
        ids: the id of an archive's member: its `key` (the path up to the first dot, WebDataset's),
            or its `path`, with the archive's before it, where keys repeat in other archives.
        revision: how a changed file is known: by its `content`, or by its `stat` (size and time of
            change or ETag), which reads nothing: for corpora that are too large to be read twice.
        max_file_bytes: Maximum size of a file or of an archive's member, in bytes.
        limits: what decoding one item may take.
    """

    path: config.Uri
    collection: str = ""
    ids: Literal["key", "path"] = "key"
    revision: Literal["content", "stat"] = "content"
    max_file_bytes: int = Field(16 << 30, ge=1024)
    limits: Limits = Limits(seconds=120.0)


MediaSpecT = TypeVar("MediaSpecT", bound=MediaSpec)


class MediaSource(Source[MediaSpecT]):
    """A source of files that a decoding process reads; subclasses say what their items are.

    `path` is a folder, at any depth, with files of the right suffixes and with tar archives of
    them, or one of these. The id of a file is its path below the folder; that of an archive's
    member its WebDataset key. A damaged stretch of an archive is one reject, what lies behind it is
    found again.
    """

    suffixes: ClassVar[tuple[str, ...]]
    containers: ClassVar[tuple[str, ...]] = (ARCHIVE,)  # what holds files
    lists: ClassVar[tuple[str, ...]] = ()  # what names files, only where `path` is it
    module: ClassVar[str]  # of `pipeline.decoding`
    files_per_shard: ClassVar[int]

    @property
    def keeps_listing(self) -> bool:
        """Whether the listing is stored: that of archives takes as long as reading them."""
        return True

    @property
    @abstractmethod
    def opens_to_list(self) -> bool:
        """Whether the items of a file are known only after decoding it."""

    def __init__(self, spec: MediaSpecT, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        self.payload = payload_schema(self.gives, wants)

    @abstractmethod
    def items_of(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """Yields the items of a file, without payload.

        Args:
            file: The file.
            revision: Its revision.
            path: Its local path, if `opens_to_list`.

        Raises:
            Unreadable: It cannot be read.
        """

    @abstractmethod
    def decode_file(self, file: MediaFile, path: str, items: Sequence[Item]) -> Iterator[Any]:
        """Yields the given items of a file with their payload, or `Unreadable`, in order.

        Args:
            file: The file.
            path: Its local path.
            items: The items to decode.
        """

    def settings(self) -> dict[str, Any]:
        """The options that change what is decoded: part of every revision."""
        keep_out = {"name", "path", "collection", "ids", "revision", "max_file_bytes", "limits"}
        wants = [kind for kind in self.gives if kind in self.wants]
        return {**self.spec.model_dump(mode="json", exclude=keep_out), "wants": wants}

    @property
    def process(self) -> DecodingProcess:
        """The process that decodes for this thread."""
        return decoding_process(self.module, self.spec.limits)

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read."""
        fs, root = existing_root(self.spec.path)
        rule = (*self.suffixes, *self.containers)
        if not fs.isdir(root) and not root.lower().endswith((*rule, *self.lists)):
            kinds = ", ".join((*rule, *self.lists))
            raise SpecError("path", self.spec.path, f"a folder, or a file that ends in {kinds}")
        if next(self._files(), ("", None)) == ("", None):
            kinds = ", ".join(rule)
            raise SpecError(
                "path", self.spec.path, f"a folder with files that end in {kinds}", "contains none"
            )

    def shards(self) -> Iterator[dict[str, Any]]:
        """Groups of files `{"files": [[path, bytes], ...]}`, and archives `{"archive": path}`."""
        group: list[tuple[str, int | None]] = []
        size = 0
        for file, num_bytes in self._files():
            if file.lower().endswith((*self.containers, *self.lists)):
                yield from self.shards_of(file, num_bytes)
                continue
            size += max(num_bytes or 0, 0)
            if group and (len(group) == self.files_per_shard or size > BYTES_PER_SHARD):
                yield {"files": group}
                group, size = [], num_bytes or 0
            group.append((file, num_bytes))
        if group:
            yield {"files": group}

    def shards_of(self, container: str, num_bytes: int | None) -> Iterator[dict[str, Any]]:
        """The shards of an archive, or of what else holds or names files."""
        yield {"archive": container}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Lists the items of each file; a file that cannot be read is one reject."""
        for file in self.files_of(shard):
            yield from self._scan_file(file) if isinstance(file, MediaFile) else (file,)

    def files_of(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """The files that a shard names."""
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
            if (file.size or 0) > (most := self.spec.max_file_bytes):
                raise Unreadable("too large", f"must be at most {most:,} bytes, got {file.size:,}")
            if file.size in (0, SPECIAL):
                with self._open(file):  # a link to nothing has no bytes either
                    raise Unreadable("empty file")
            if not self.opens_to_list:
                revision = self._revision(file, None)
                items = list(self.items_of(file, revision, None))
            else:
                with self.local(file) as path:
                    revision = self._revision(file, path)
                    items = list(self.items_of(file, revision, path))
        except (Unreadable, OSError) as error:
            yield self._reject(file, escaped(file.id), revision, error, "list")
            return
        yield from (self._listed(item, file) for item in items)

    def _listed(self, item: Item, file: MediaFile) -> Item:
        """With all that finds its file again, now and, in the metadata, later."""
        location: dict[str, Any] = {}
        if file.path != file.id:
            location["file"] = file.path
        if file.offset is not None:
            location["bytes"] = [file.offset, file.size]
        if file.row is not None:
            location["row"] = file.row
        return replace(item, handle=asdict(file), metadata={**(item.metadata or {}), **location})

    def file_of(self, parent_id: str, metadata: dict[str, Any]) -> MediaFile:
        """The file of a stored item."""
        path = metadata.get("file", parent_id)
        offset, size = metadata.get("bytes", (None, None))
        suffix = PurePosixPath(path).suffix.lower()
        return MediaFile(parent_id, path, size, offset, suffix, row=metadata.get("row"))

    def place_of(self, file: MediaFile) -> tuple[Any, str]:
        """The file system of a file, and its path there; of what holds it, if something does."""
        fs, folder = self._folder
        return fs, f"{folder}/{file.path}"

    def _revision(self, file: MediaFile, path: str | None) -> str:
        """Of what the file holds, or of its size and age, and of all that bears on it."""
        settings = [self.settings(), file.sidecars, file.about]
        return revision_of(settings, self._content(file, path))

    def content_of(self, item: dict[str, Any]) -> str:
        """What the item's file holds now, or its size and age."""
        file = self.file_of(item["parent_id"], item["metadata"] or {})
        return config.digest(self._content(file, None))

    def _content(self, file: MediaFile, path: str | None) -> Any:
        fs, place = self.place_of(file)
        if self.spec.revision == "stat":
            about = fs.info(place)
            age = next((about[k] for k in ("ETag", "mtime", "LastModified") if k in about), "")
            return [about["size"], str(age), file.offset, file.row]
        with open(path, "rb") if path else self._open(file) as stream:
            content = hashlib.blake2b()
            while data := stream.read(1 << 20):
                content.update(data)
            return content.hexdigest()

    @functools.cached_property
    def _folder(self) -> tuple[Any, str]:
        return folder_of(self.spec.path)

    def _files(self) -> Iterator[tuple[str, int | None]]:
        """(path relative to the folder, bytes) of all that is read."""
        return files_below(self.spec.path, (*self.suffixes, *self.containers))

    # -- archives ----------------------------------------------------------------------------

    def _members(self, archive: str) -> Iterator[MediaFile | Reject]:
        """The media files of an archive, a sample (members of one key) at a time."""
        fs, folder = self._folder
        try:
            with open_file(fs, f"{folder}/{archive}") as stream:
                entries = read_members(stream, fs.size(f"{folder}/{archive}"))
                samples = itertools.groupby(
                    entries, lambda e: self._key(e) if isinstance(e, Member) else None
                )
                for key, sample in samples:
                    members: list[Member] = []
                    for entry in sample:
                        if isinstance(entry, Member):
                            members.append(entry)
                        else:
                            yield self._broken(archive, entry)
                    if key is not None:
                        yield from self._sample(archive, key, members)
        except (Unreadable, OSError) as error:
            yield self.reject(escaped(archive), "", error, "list")

    def _broken(self, archive: str, problem: Broken) -> Reject:
        location = problem.name or f"byte {problem.offset}"
        error = Unreadable(problem.reason, problem.detail)
        return self.reject(escaped(f"{archive}/{location}"), "", error, "list")

    def _key(self, member: Member) -> str:
        """The member's path up to its suffix: all behind the first dot, if it is a known suffix."""
        folder, _, name = member.name.rpartition("/")
        stem, _, rest = name.partition(".")
        if f".{rest}".lower() not in (*self.suffixes, *SIDECARS):
            stem = name.rpartition(".")[0] or name
        return f"{folder}/{stem}" if folder else stem

    def _sample(self, archive: str, key: str, members: list[Member]) -> Iterator[MediaFile]:
        media = [m for m in members if m.suffix in self.suffixes]
        sidecars = {
            m.suffix: m.text for m in members if m.suffix in SIDECARS and m.text is not None
        }
        for member in media:
            own = key if len(media) == 1 else member.name
            file_id = own if self.spec.ids == "key" else f"{archive}/{member.name}"
            yield MediaFile(file_id, archive, member.size, member.offset, member.suffix, sidecars)

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes the wanted items, each file brought here once."""
        for _, group in itertools.groupby(items, lambda entry: entry[1].handle["id"]):
            own = [item for _, item in group]
            file = MediaFile(**own[0].handle)
            given = 0
            try:
                with self.local(file) as path:
                    results = self.decode_file(file, path, own)
                    for item, result in zip(own, results, strict=True):
                        is_bad = isinstance(result, Unreadable)
                        yield (
                            self._reject(file, item.item_id, item.revision, result, "decode")
                            if is_bad
                            else result
                        )
                        given += 1
            except (Unreadable, OSError) as error:
                for item in own[given:]:
                    yield self._reject(file, item.item_id, item.revision, error, "decode")

    def _reject(self, file: MediaFile, *about: Any) -> Reject:
        """Returns the reject of an item of a file, which the detail names if the id does not."""
        reject = self.reject(*about)
        holder = None if file.path == file.id else escaped(file.path)
        return replace(reject, detail=detail_with_file(reject.detail, holder))

    @contextmanager
    def local(self, file: MediaFile) -> Iterator[str]:
        """A path of the file on this machine; what lies elsewhere is copied while it is needed."""
        fs, place = self.place_of(file)
        if isinstance(fs, LocalFileSystem) and file.offset is None and file.row is None:
            check_regular(fs, place)
            yield place
            return
        with tempfile.NamedTemporaryFile(suffix=file.suffix) as copy:
            with self._open(file) as stream:
                shutil.copyfileobj(stream, copy, 1 << 20)
            copy.flush()
            yield copy.name

    @contextmanager
    def _open(self, file: MediaFile) -> Iterator[ByteStream]:
        fs, place = self.place_of(file)
        with open_file(fs, place) as stream:
            if file.offset is None or file.size is None:
                yield stream
            else:
                yield FileRange(stream, file.offset, file.size)


@dataclass(frozen=True)
class Member:
    """A file of an archive; `text` of those that stand beside media."""

    name: str
    offset: int
    size: int
    text: str | None = None

    @property
    def suffix(self) -> str:
        """With its dot, in lower case."""
        return PurePosixPath(self.name).suffix.lower()


@dataclass(frozen=True)
class Broken:
    """A stretch of an archive, or a member (`name`), that cannot be read."""

    offset: int
    detail: str
    name: str = ""
    reason: str = "damaged archive"


class ByteStream(Protocol):
    """A stream of bytes that is read from its beginning to its end."""

    def read(self, size: int = -1, /) -> bytes:
        """Returns up to `size` bytes, none at the end; -1: all that are left."""


class FileRange:
    """A byte range of a file, as a stream.

    Args:
        stream: The file.
        offset: Start of the range, in bytes.
        size: Length of the range, in bytes.
    """

    def __init__(self, stream: BinaryIO, offset: int, size: int):
        stream.seek(offset)
        self._stream, self._num_left = stream, size

    def read(self, size: int = -1, /) -> bytes:
        """Returns up to `size` bytes, none at the end; -1: all that are left."""
        size = self._num_left if size < 0 else min(size, self._num_left)
        data = self._stream.read(size)
        self._num_left -= len(data)
        return data


def read_members(stream: BinaryIO, size: int) -> Iterator[Member | Broken]:
    """The regular files of a tar archive in order; links and damaged stretches are told.

    A reader of tar files takes a damaged header for the end. Here the search goes on, block by
    block, and what was skipped is reported if it is more than zeros.

    Raises:
        Unreadable: nothing in it looks like a member of an archive.
    """
    try:
        archive = TarArchive(fileobj=stream, ignore_zeros=True)
    except TAR_ERRORS as error:
        raise Unreadable("not a tar archive", str(error)) from None
    end, found = 0, False
    while True:
        try:
            member = archive.next()
        except TAR_ERRORS as error:
            yield Broken(end, f"{type(error).__name__}: {error}")
            return
        start = size if member is None else member.offset
        if start > end and _has_content(stream, end, start):
            if member is None and not found:
                raise Unreadable("not a tar archive", "it holds no member")
            yield Broken(end, f"bytes {end:,} to {start:,} are no members of an archive")
        if member is None:
            return
        found = True
        archive.members = []  # it would keep all of them
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if member.issparse():  # its bytes are not all there, and may stand for any number
            end = archive.offset
            detail = f"must be stored in full, is a sparse file of {member.size:,} bytes"
            yield Broken(member.offset, detail, escaped(member.name), "sparse member")
        elif not member.isreg():
            end = member.offset_data
            if not member.isdir():
                detail = f"leads to {escaped(member.linkname)}" if member.linkname else ""
                yield Broken(member.offset, detail, escaped(member.name), "no file of its own")
        elif member.offset_data + member.size > size:
            yield Broken(member.offset, "the archive ends before the member does", member.name)
            return
        else:
            yield _member(stream, member)


def _member(stream: BinaryIO, member: tarfile.TarInfo) -> Member:
    text = None
    if member.name.lower().endswith(SIDECARS) and member.size <= SIDECAR_BYTES:
        stream.seek(member.offset_data)
        text = stream.read(member.size).decode("utf-8", "replace")
    return Member(escaped(member.name), member.offset_data, member.size, text)


def _has_content(stream: BinaryIO, start: int, end: int) -> bool:
    """Whether a stretch of a file holds anything but zeros."""
    stream.seek(start)
    while start < end:
        if not (data := stream.read(min(1 << 20, end - start))):
            return False
        if any(data):
            return True
        start += len(data)
    return False

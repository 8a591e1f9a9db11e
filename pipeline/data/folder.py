"""Source of all files of a folder, whose types are detected by their content."""

from __future__ import annotations

import codecs
import collections
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from fsspec.utils import glob_translate
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.data.audio import Audio
from pipeline.data.base import NoFiles, Source
from pipeline.data.combined import PartedSource
from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import DECODERS, check_decoder
from pipeline.data.decode.untrusted import open_file
from pipeline.data.documents import CONVERTED, Documents
from pipeline.data.files import existing_root, walk
from pipeline.data.images import Images
from pipeline.data.pages import Pages
from pipeline.data.text import Passages
from pipeline.data.video import Video
from pipeline.extras import MissingExtra
from pipeline.schema import Reject

#: Kinds of files that are read, in the order of reports, and the suffixes of their names. A suffix
#: decides between kinds of text, and for files whose content is malformed.
KINDS = {
    "text": (".txt", ".rst", ".log"),
    "Markdown": (".md", ".markdown"),
    "HTML": (".html", ".htm", ".xhtml"),
    "e-mail": (".eml",),
    "CSV": (".csv", ".tsv"),
    "JSON lines": (".jsonl", ".ndjson"),
    "DOCX": (".docx",),
    "PPTX": (".pptx",),
    "XLSX": (".xlsx",),
    "OpenDocument": (".odt", ".ods", ".odp"),
    "EPUB": (".epub",),
    "PDF": (".pdf",),
    "image": Images.suffixes,
    "video": Video.suffixes,
    "audio": Audio.suffixes,
}
#: Kind of all other files, and kinds with a source of their own: its number.
OTHER, MEDIA = "other", {"PDF": 1, "image": 2, "video": 3, "audio": 4}
#: Sources by the modality of their items.
MODALITIES = {"page": 1, "image": 2, "video": 3, "audio": 4}
#: Extras with which the encoder `transcript` recognises the text of a kind of file.
RECOGNITION = {"image": "ocr", "video": "ocr,asr", "audio": "asr"}
#: Content at a position of files of a kind, and what other files are and what can be done.
SIGNATURES = (
    *((0, head, "image") for head in (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")),
    *((0, head, "audio") for head in (b"fLaC", b"ID3\2", b"ID3\3", b"ID3\4", b"OggS")),
    *((0, bytes((0xFF, byte)), "audio") for byte in (0xFB, 0xFA, 0xF3, 0xF2, 0xF1, 0xF9)),
    *((8, b"WEBP", "image"), (8, b"WAVE", "audio"), (8, b"AVI ", "video")),
    *((4, b"ftyp", "video"), (4, b"moov", "video"), (0, b"\x1aE\xdf\xa3", "video")),
)
OTHER_SIGNATURES = (
    (0, b"PK\3\4", "is a ZIP archive; unpack it"),
    (0, b"\x1f\x8b", "is a compressed file; unpack it"),
    (257, b"ustar", "is a tar archive; unpack it"),
    (0, b"PAR1", "is a Parquet file; index it with a spec"),
    (0, b"\xd0\xcf\x11\xe0", "is an old Office file; save it as DOCX, PPTX or XLSX"),
    (0, b"{\\rtf", "is an RTF file; save it as DOCX"),
    (4, b"ftyp", "is a HEIF image; save it as JPEG"),
)
#: Main brands of MP4 files of audio, and of images, which are not read.
AUDIO_BRANDS, IMAGE_BRANDS = (b"M4A ", b"M4B "), (b"heic", b"heix", b"mif1", b"msf1", b"avif")
#: Names in the directory of a ZIP archive, and the start of the first member.
OFFICE = {b"word/document": "DOCX", b"ppt/presentation": "PPTX", b"xl/workbook": "XLSX"}
PACKAGES = {
    b"mimetypeapplication/epub+zip": "EPUB",
    b"mimetypeapplication/vnd.oasis.opendocument": "OpenDocument",
}
#: Size of the beginning of a file, and of its end if it is a ZIP archive, that are read to detect
#: its type, in bytes.
HEAD_BYTES, TAIL_BYTES = 4096, 1 << 20
#: Size of the requests to object storage, in bytes.
BLOCK_BYTES = 64 << 10
#: A text has at most this share of control characters.
MAX_CONTROL = 0.05
#: Lines that at least three of begin an e-mail.
HEADER = re.compile(rb"^(from|to|date|subject|message-id|mime-version|received): ", re.I | re.M)
#: A folder with this member is an index.
INDEX_MEMBER = "items.lance"
UNREADABLE_FOLDER = "unreadable folder"
#: Number of files whose types are detected at the same time, and that are listed by one task.
DETECTION_THREADS, FILES_PER_SHARD, BYTES_PER_SHARD = 16, 4096, 256 << 20


class Entry(NamedTuple):
    """A file or folder, with its kind and, if it is not read, with reason and detail."""

    path: str
    size: int
    kind: str
    reason: str = ""
    detail: str = ""


class Folder(PartedSource["Folder.Spec"]):
    """All files of a folder, at any depth. `maxray index FOLDER` uses this source.

    **Types.** The type of a file is detected by its content. The suffix of its name decides between
    plain text, Markdown and CSV. Texts, HTML, e-mails, DOCX, PPTX, XLSX, OpenDocument (ODT, ODS,
    ODP) and EPUB are read as text and divided into `passages`. Rows of CSV and JSON lines files,
    slides, sheets and chapters are read one by one. The sources `pages`, `images`, `video` and
    `audio` read all other types, with their default options.

    **Rejects.** A file of another type is rejected (`unsupported type`), so that every file is an
    item or a reject. Hidden files and folders, whose names begin with a dot, and indexes are
    one reject each.

    **Ids.** The id of a file is its path relative to `path`. See the other sources for the ids of
    its parts.
    """

    class Spec(config.ComponentSpec):
        """Options of the folder source."""

        name: Literal["folder"] = "folder"
        path: config.Uri
        """Local path or fsspec URI of a folder."""
        only: list[str] = Field(default_factory=list)
        """Files and folders to read, as glob patterns relative to `path`. By default, all."""
        collection: str = ""
        """Name of the collection. Defaults to the last part of the path."""
        passages: Passages = Passages()
        """Division of texts into passages."""

    provides = ("item_id", "text", "image", "scan", "caption", "frames", "audio")

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        fields = {"path": spec.path, "collection": self.collection}
        kinds: tuple[Any, ...] = (Documents, Pages, Images, Video, Audio)
        given = ({"passages": spec.passages}, *({} for _ in MEDIA))
        # Of pages, a text encoder needs only images without a text layer, which are scans.
        of_pages = tuple(name for name in wants if name != "image" or "text" not in wants)
        self._sources: list[Source] = [
            kind(kind.Spec(**fields, **more), of_pages if kind is Pages else wants)
            for kind, more in zip(kinds, given, strict=True)
        ]

    def check(self) -> None:
        """Raises `SpecError` if no file can be read, or `MissingExtra` if one needs a decoder."""
        path, rule = self.spec.path, f"a folder with files of the types {', '.join(KINDS)}"
        existing_root(path)
        entries = self.entries()
        if (first := next(entries, None)) is None:
            patterns = ", ".join(f"{path.rstrip('/')}/{pattern}" for pattern in self.spec.only)
            raise NoFiles("path", patterns or path, rule, "has no files")
        if all(entry.reason for entry in itertools.chain([first], entries)):
            detail = f"{first.path} is rejected: {first.reason}, {first.detail}"
            raise SpecError("path", path, rule, "has none", f" ({detail})")
        try:
            for module in DECODERS:
                check_decoder(module)
        except MissingExtra:  # is raised again if there is a file of that type
            collections.deque(entries, maxlen=0)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields groups of files of one source."""
        groups: dict[int, list[Entry]] = {}
        sizes: dict[int, int] = {}
        for entry in self.entries():
            number = 0 if entry.reason else MEDIA.get(entry.kind, 0)
            group, size = groups.setdefault(number, []), sizes.get(number, 0) + entry.size
            if group and (len(group) == FILES_PER_SHARD or size > BYTES_PER_SHARD):
                yield {"source": number, "shard": self._shard(number, group)}
                groups[number], size = [], entry.size
            groups[number].append(entry)
            sizes[number] = size
        for number, group in sorted(groups.items()):
            yield {"source": number, "shard": self._shard(number, group)}

    def _shard(self, number: int, group: list[Entry]) -> dict[str, Any]:
        if number == MEDIA["PDF"]:
            return {"files": [entry.path for entry in group]}
        return {"files": [list(entry[:2] if number else entry) for entry in group]}

    def entries(self) -> Iterator[Entry]:
        """Yields all files, and the folders that are not read, with their kinds."""
        found = self._found()
        with ThreadPoolExecutor(DETECTION_THREADS) as pool:
            while chunk := list(itertools.islice(found, 16 * DETECTION_THREADS)):
                yield from pool.map(self._entry, chunk)

    def file_states(self) -> dict[str, Any]:
        """Returns a value of each file that changes when the file is written."""
        return {path: self._state(path) for path, size in self._found() if size is not None}

    def _state(self, path: str) -> Any:
        try:
            return self._sources[1].file_state({"parent_id": path})
        except OSError:
            return None

    @functools.cached_property
    def _root(self) -> tuple[Any, str]:
        fs, root = existing_root(self.spec.path)
        return fs, root.rstrip("/")

    def _found(self) -> Iterator[tuple[str, int | None]]:
        """Yields the paths and sizes of files. The size of a folder that is not read is None."""
        fs, root = self._root
        seen: set[str] = set()
        for pattern in self.spec.only or [""]:
            parts = pattern.split("/")
            base = "/".join(itertools.takewhile(lambda part: not re.search(r"[*?[]", part), parts))
            start = f"{root}/{base}".rstrip("/")
            found = [("", fs.size(start))] if fs.isfile(start) else walk(fs, start, _is_closed)
            for path, size in found:
                path = f"{base}/{path}".strip("/")
                if self.covers(path) and path not in seen:
                    seen.add(path)
                    yield path, size

    def _entry(self, found: tuple[str, int | None]) -> Entry:
        path, size = found
        fs, root = self._root
        name, location = path.rpartition("/")[2], f"{root}/{path}"
        suffix = PurePosixPath(name).suffix.lower()
        kind = next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), OTHER)
        entry = Entry(path, max(size or 0, 0), kind)
        try:
            if name.startswith(".") and path not in self.spec.only:
                raise Unreadable("hidden", "its name begins with a dot")
            if size is None:
                if fs.exists(f"{location}/{INDEX_MEMBER}"):
                    raise Unreadable("index", "is an index")
                raise Unreadable(UNREADABLE_FOLDER, "cannot be listed")
            with open_file(fs, location, block_size=BLOCK_BYTES) as stream:
                head = stream.read(HEAD_BYTES)
                if not head:
                    raise Unreadable("empty file")
                kind = detect(head, suffix, functools.partial(_tail, stream), kind)
            if kind == OTHER:
                details = (d for at, sign, d in OTHER_SIGNATURES if head.startswith(sign, at))
                detail = next(details, "is of no type that is read")
                raise Unreadable("unsupported type", f"{suffix or name} {detail}")
            source = self._sources[MEDIA.get(kind, 0)]
            if not set(source.provides) & set(self.wants):
                detail = f"the encoder reads {', '.join(self.wants)}"
                if extra := RECOGNITION.get(kind):
                    command = f'pip install "maxray[{extra}]"'
                    detail += f"; the encoder transcript recognises its text ({command})"
                raise Unreadable("not read by the encoder", detail)
            check_decoder(kind.lower())
        except (Unreadable, OSError) as error:
            problem = (
                error if isinstance(error, Unreadable) else Unreadable("unreadable", str(error))
            )
            return entry._replace(kind=kind, reason=problem.reason, detail=problem.detail)
        return entry._replace(kind=kind)

    def covers(self, parent_id: str) -> bool:
        """Checks whether a file, or a folder that contains it, is among those to read."""
        names = itertools.accumulate(parent_id.split("/"), "{}/{}".format)
        return not self.spec.only or any(map(self._matches, names))

    @functools.cached_property
    def _matches(self) -> Callable[[str], Any]:
        return re.compile("|".join(map(glob_translate, self.spec.only))).fullmatch

    def hides_items(self, reject: Reject) -> bool:
        """Checks whether a reject is a folder that cannot be listed."""
        return reject.reason == UNREADABLE_FOLDER

    # -- files of indexed items --------------------------------------------------------------

    def _source(self, item: dict[str, Any]) -> Source:
        return self._sources[MODALITIES.get(item["modality"], 0)]

    def read_content_hash(self, item: dict[str, Any]) -> str:
        """Returns the hash of the current content of an indexed item's file."""
        return self._source(item).read_content_hash(item)

    def file_state(self, item: dict[str, Any]) -> Any:
        """Returns a value that changes whenever the file of an indexed item is written."""
        return self._source(item).file_state(item)

    def open_file(self, item: dict[str, Any]) -> AbstractContextManager[tuple[BinaryIO, int, int]]:
        """Opens the media file of an indexed item."""
        return self._source(item).open_file(item)

    def preview_image(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """Returns an encoded image of an indexed item."""
        return self._source(item).preview_image(item, seconds)

    def preview_audio(self, item: dict[str, Any]) -> tuple[np.ndarray, int, float]:
        """Returns the audio of an indexed item."""
        return self._source(item).preview_audio(item)


def _is_closed(folder: str, children: list[str]) -> bool:
    return folder.rpartition("/")[2].startswith(".") or f"{folder}/{INDEX_MEMBER}" in children


def _tail(stream: BinaryIO) -> bytes:
    size = stream.seek(0, 2)
    stream.seek(max(size - TAIL_BYTES, 0))
    return stream.read(TAIL_BYTES)


def detect(head: bytes, suffix: str, tail: Callable[[], bytes], named: str = OTHER) -> str:
    r"""Returns the kind of a file: a key of `KINDS`, or `OTHER`.

    Args:
        head: The first `HEAD_BYTES` bytes of the file.
        suffix: The suffix of its name.
        tail: Reads the end of the file.
        named: The kind of files with this suffix.

    >>> detect(b"\x89PNG", ".txt", bytes, "text"), detect(b"\0\1", ".bin", bytes)
    ('image', 'other')
    >>> detect(b"BMW is a brand.", ".txt", bytes, "text"), detect(b'{"a": 1}\n{}', "", bytes)
    ('text', 'JSON lines')
    """
    if head.lstrip().startswith(b"%PDF-") or (named == "PDF" and b"%PDF-" in head[:1024]):
        return "PDF"
    if head[4:8] == b"ftyp" and head[8:12] in (*AUDIO_BRANDS, *IMAGE_BRANDS):
        return "audio" if head[8:12] in AUDIO_BRANDS else OTHER
    if head.startswith(b"OggS") and b"theora" in head:
        return "video"
    for position, signature, kind in SIGNATURES:
        if head.startswith(signature, position):
            return named if {kind, named} == {"audio", "video"} else kind  # such as .webm, .mka
    if head.startswith(b"BM") and head[6:10] == bytes(4):
        return "image"
    if head.startswith(b"PK\3\4"):
        if found := next((kind for sign, kind in PACKAGES.items() if sign in head[:128]), None):
            return found
        end = tail()
        return next((kind for sign, kind in OFFICE.items() if sign in end), _if_converted(named))
    if head.startswith(b"\xd0\xcf\x11\xe0"):  # also an encrypted DOCX, PPTX or XLSX
        if "EncryptedPackage".encode("utf-16-le") in head + tail():
            raise Unreadable("encrypted", "it needs a password")
        return _if_converted(named)
    if head.startswith(b"{\\rtf") or not _is_text(head):
        return named if named in (*MEDIA, *CONVERTED) else OTHER
    return _text_kind(head, suffix, named)


def _if_converted(named: str) -> str:
    return named if named in CONVERTED[2:] else OTHER


def _is_text(head: bytes) -> bool:
    if head.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    control = sum(byte < 32 and byte not in b"\t\n\r\f\b\x1b" for byte in head)
    return b"\0" not in head and control <= MAX_CONTROL * len(head)


def _text_kind(head: bytes, suffix: str, named: str) -> str:
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")) or named == "HTML":
        return "HTML"
    lines = head.splitlines()
    header = head.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    if named == "e-mail" or len({name.lower() for name in HEADER.findall(header)}) >= 3:
        return "e-mail"
    if start.startswith(b"{") and (named == "JSON lines" or all(map(_is_object, lines[:2]))):
        return "JSON lines" if named == "JSON lines" or len(lines) > 1 else "text"
    return named if named in ("Markdown", "CSV") else "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False

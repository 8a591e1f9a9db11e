"""Reads the images, the audio and the media files of indexed items."""

from __future__ import annotations

import glob
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from PIL import Image

from pipeline.config import ComponentSpec, SpecError, absolute, within
from pipeline.data.base import NO_PREVIEW, Source, content_hash
from pipeline.data.decode import Unreadable
from pipeline.data.files import existing_root
from pipeline.index import JOBS
from pipeline.index.reader import IndexReader, first_line, open_folder
from pipeline.registry import SOURCES

T = TypeVar("T")

#: Maximum number of bytes of a media file that are read at once.
MAX_PART_BYTES = 2 << 20
#: Maximum number of files whose state at the last check is kept.
MAX_CHECKED_FILES = 10_000


class ByteRange(NamedTuple):
    """Range of bytes of a file.

    Attributes:
        start: First byte. If None, the range consists of the last `end` bytes.
        end: End of the range, exclusive, or None for the end of the file.
    """

    start: int | None = 0
    end: int | None = None

    def resolve(self, size: int) -> tuple[int, int]:
        """Returns start and end in a file of a given size.

        >>> ByteRange(None, 2).resolve(9), ByteRange(4).resolve(9), ByteRange(0, 99).resolve(9)
        ((7, 9), (4, 9), (0, 9))
        """
        if self.start is None:
            return max(size - (self.end or 0), 0), size
        return self.start, size if self.end is None else min(self.end, size)


@dataclass(frozen=True)
class MediaPart:
    """Part of a media file.

    Attributes:
        data: Bytes of the part, at most `MAX_PART_BYTES`; empty if the range is not in the file.
        size: Size of the file, in bytes.
        media_type: Media type of the file, such as "video/mp4".
    """

    data: bytes
    start: int
    size: int
    media_type: str
    content_hash: str


class Previews:
    """Reads the images and the audio of indexed items.

    Args:
        index: Index of the items.
        documents: Current folder of each collection whose files were moved, by collection name. The
            key "" applies to all other collections.
        only_indexed: Whether to reject files that were modified after indexing.
    """

    def __init__(
        self,
        index: IndexReader,
        documents: Mapping[str, str] | None = None,
        *,
        only_indexed: bool = False,
    ):
        self.index, self._documents = index, documents or {}
        self._only_indexed = only_indexed
        self._sources: dict[str, Source] = {}
        self._checked: dict[tuple[str, str, str], Any] = {}

    def image(self, item_id: str, seconds: float | None = None) -> bytes:
        """Returns a page, an image, or the video frame at a given time as an encoded image."""
        return self._read(item_id, lambda source, item: source.preview_image(item, seconds))

    def audio(self, item_id: str) -> tuple[np.ndarray, int, float]:
        """Returns the audio of an item: samples (S,), sample rate in Hz, and start in seconds."""
        return self._read(item_id, lambda source, item: source.preview_audio(item))

    def media(self, item_id: str, range: ByteRange) -> MediaPart:
        """Returns a part of the document or the image, audio or video file of an item."""
        return self._read(item_id, lambda source, item: _read_part(source, item, range))

    def _read(self, item_id: str, read: Callable[[Source, dict[str, Any]], T]) -> T:
        columns = ["source", "parent_id", "modality", "span", "metadata", "revision"]
        (item,) = self.index.item(item_id, columns).to_pylist()
        item["metadata"] = json.loads(item["metadata"] or "{}")
        source = self._source(item["source"])
        try:
            if self._only_indexed and not self._is_unmodified(source, item):
                rule = "an indexed file that was not modified"
                raise SpecError("documents", item["parent_id"], rule, "was modified since")
            return read(source, item)
        except (Unreadable, OSError) as error:
            if isinstance(error, Unreadable) and error.reason == NO_PREVIEW:
                rule = "a page, an image, a video or an audio file"
                raise SpecError("item_id", item_id, rule, note=f" ({error.detail})") from None
            problem = f"has no readable {item['parent_id']} ({first_line(error)})"
            note = f"; pass their folder as --documents {item['source']}=FOLDER"
            rule = "the folder that contains the indexed files"
            location = getattr(source.spec, source.location_field)
            raise SpecError("documents", location, rule, problem, note) from None

    def _is_unmodified(self, source: Source, item: dict[str, Any]) -> bool:
        """Checks whether a file has the indexed content.

        The content is read again only if the state of the file has changed, because a range of a
        long video would otherwise take as long as the whole.
        """
        key = item["source"], item["parent_id"], item["revision"]
        state = source.file_state(item)
        if state is not None and self._checked.get(key) == state:
            return True
        if source.read_content_hash(item) != content_hash(item["revision"]):
            return False
        if len(self._checked) >= MAX_CHECKED_FILES:
            self._checked.clear()
        self._checked[key] = state
        return True

    def _source(self, collection: str) -> Source:
        if collection not in self._sources:
            spec = next((s for s in self._specs() if collection in _collections(s)), None)
            folder = self._documents.get(collection, self._documents.get(""))
            if spec is None:
                rule = "the folder of a collection that a job of the index has read"
                note = f" (collection {collection!r})"
                raise SpecError("documents", folder, rule, note=note)
            if folder:
                with within("documents"):
                    existing_root(absolute(folder))
                field = SOURCES.load(spec.name).location_field
                spec = spec.model_copy(update={field: absolute(folder)})
            self._sources[collection] = SOURCES.build(spec)
        return self._sources[collection]

    def _specs(self) -> Iterator[ComponentSpec]:
        """Yields the sources of all jobs of the index. The most recent job comes first."""
        filesystem, path = open_folder(self.index.uri, JOBS)
        for file in sorted(filesystem.glob(f"{glob.escape(path)}/*/spec.yaml"), reverse=True):
            with filesystem.open(file, "r", encoding="utf-8") as stream:
                source = yaml.safe_load(stream).get("source")
            if isinstance(source, dict):  # recompression reads a column of the index instead
                spec = SOURCES.resolve(source)
                yield from SOURCES.load(spec.name).leaf_specs(spec)


def _read_part(source: Source, item: dict[str, Any], range: ByteRange) -> MediaPart:
    with source.open_file(item) as (stream, offset, size):
        stream.seek(offset)
        kind = media_type(stream.read(min(16, size)), item["modality"])
        start, end = range.resolve(size)
        data = b""
        if start < end:
            stream.seek(offset + start)
            data = stream.read(min(end - start, MAX_PART_BYTES))
    return MediaPart(data, start, size, kind, content_hash(item["revision"]))


#: Media types by the bytes at the beginning of a file and their position.
SIGNATURES = (
    (0, b"%PDF-", "application/pdf"),
    (0, b"\x89PNG", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (8, b"WAVE", "audio/wav"),
    (8, b"AVI ", "video/x-msvideo"),
    (0, b"fLaC", "audio/flac"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xf1", "audio/aac"),
    (0, b"\xff\xf9", "audio/aac"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"\xff\xf3", "audio/mpeg"),
)
#: Signatures of containers of video or audio.
CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1aE\xdf\xa3", "webm"), (0, b"OggS", "ogg"))


def media_type(head: bytes, modality: str = "image") -> str:
    """Determines the media type of a file from its first bytes.

    A file of another type is never announced as a page or a script.

    >>> media_type(b"RIFF....WEBP"), media_type(b"....ftypisom", "video"), media_type(b"<html>")
    ('image/webp', 'video/mp4', 'application/octet-stream')
    """
    for position, signature, kind in SIGNATURES:
        if head[position : position + len(signature)] == signature:
            return kind
    for position, signature, container in CONTAINERS:
        if head[position : position + len(signature)] == signature:
            return f"{'audio' if modality == 'audio' else 'video'}/{container}"
    return "application/octet-stream"


def thumbnail(image: bytes, width: int) -> bytes:
    """Returns an image scaled down to fit into a square, as JPEG, or PNG with transparency."""
    with Image.open(io.BytesIO(image)) as opened:
        if max(opened.size) <= width:
            return image
        opened.draft("RGB", (width, width))  # JPEG files are decoded at a reduced size
        is_transparent = opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info
        small = opened.convert("RGBA" if is_transparent else "RGB")
        small.thumbnail((width, width), Image.Resampling.LANCZOS)
        output = io.BytesIO()
        if is_transparent:
            small.save(output, "PNG")
        else:
            small.save(output, "JPEG", quality=85)
        return output.getvalue()


def _collections(spec: ComponentSpec) -> tuple[str, ...]:
    return SOURCES.build(spec).collections

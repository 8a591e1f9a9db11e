"""The source of the videos of MultiVENT 2.0 with their recognised text."""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from pipeline.config import MissingField, SpecError, Uri, within
from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import open_file
from pipeline.schema import Item, Reject
from pipeline.sources import make_revision
from pipeline.sources.annotations import read_csv
from pipeline.sources.audio import Audio
from pipeline.sources.media import SIDECAR_BYTES, MediaFile, Member
from pipeline.sources.video import Video
from pipeline.tokens import AUDIO, TEXT
from pipeline.transcribe.precomputed import (
    Precomputed,
    PrecomputedSpeech,
    PrecomputedText,
    unreadable_files,
)

#: YouTube ids of the train set, and numbers of the test set. Some lists contain other lines.
VIDEO_ID = re.compile(r"[A-Za-z0-9_-]{11}|\d+")
SOUND, METADATA = ".m4a", ".json"
#: Parts of the text of an item, in the order in which they are joined.
TextPart = Literal["title", "description", "caption", "ocr", "asr"]


class Multivent(Video):
    """Videos of MultiVENT 2.0, whole or divided into windows, with their recognised text.

    `path` is a folder with the shards (`000001.tar`), or with the unpacked files at any depth. A
    video `<id>.mp4` may have `<id>.m4a`, which replaces its audio, and `<id>.json` with the title,
    the description and a caption. The id of an item is the id of the video, as in the judgments.

    **Text.** `asr` and `ocr` are the archives of the features as they are distributed (a folder,
    .zip, .tar.gz, possibly nested; see the recogniser `precomputed`). The text of an item consists
    of the parts in `text`, separated by empty lines, so that indexes of text need not decode
    videos. A window has the text of its time, and parts without times belong to the first window.
    An unreadable file or member of the archives is a reject, and so is an item without text if the
    encoder reads only texts.

    **Payload and metadata.** See `Video`. In addition: `description`, and `audio_file` for videos
    with a separate audio file.
    """

    class Spec(Video.Spec):
        """Options of the MultiVENT source."""

        name: Literal["multivent"] = "multivent"  # type: ignore[assignment]
        window_seconds: float | None = Field(None, ge=1, le=86_400)
        """Duration of a window, in seconds; None: an item is an entire video."""
        video_ids: Uri | None = None
        """CSV file with the videos to index in the column `id`, such as `multivent_2_ids.csv`; null
        for all. Lines that are not ids are ignored."""
        asr: Uri | None = None
        """Recognised speech, such as `whisper_asr.zip` or the folder of the archives of train."""
        ocr: Uri | None = None
        """Recognised text of frames, such as `paddle_ocr.zip`."""
        text: tuple[TextPart, ...] = ("ocr", "asr")
        """Parts of the text of an item: title, description, caption, ocr, asr."""

    provides = ("item_id", "text", "frames", "audio")
    spec: Spec

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if videos or feature archives are missing."""
        super().check()
        for part, recogniser in self._recognisers.items():
            if part not in self.spec.text:
                rule = f"null unless {part} is in `text`"
                raise SpecError(part, getattr(self.spec, part), rule)
            with within(part):
                recogniser.check_exists()
        for part in ("ocr", "asr"):
            if part in self.spec.text and part not in self._recognisers:
                is_default = "text" not in self.spec.model_fields_set
                if not is_default:
                    raise MissingField(part, None, f"the archive of {part}, which is in `text`")
        _ = self._ids

    @functools.cached_property
    def _ids(self) -> frozenset[str] | None:
        if self.spec.video_ids is None:
            return None
        rows = read_csv(self.spec.video_ids, ("id",), "video_ids")
        ids = frozenset(row["id"] for _, row in rows if VIDEO_ID.fullmatch(row["id"]))
        if not ids:
            raise SpecError(
                "video_ids", self.spec.video_ids, "a file with at least one video id", "has none"
            )
        return ids

    @functools.cached_property
    def _recognisers(self) -> dict[str, _Features]:
        found = {}
        if self.spec.ocr is not None:
            found["ocr"] = _Features(self.spec.ocr, TEXT)
        if self.spec.asr is not None:
            found["asr"] = _Features(self.spec.asr, AUDIO)
        return found

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the decoded content. The texts are part of revisions."""
        excluded = ("video_ids", "asr", "ocr", "text")
        return {name: v for name, v in super().settings().items() if name not in excluded}

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields the shards of the videos, and one for the unreadable files of each archive."""
        yield from super().shards()
        yield from ({"unreadable": part} for part in self._recognisers)

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of each video, or the unreadable files of an archive as rejects."""
        if "unreadable" not in shard:
            yield from super().scan(shard)
            return
        part = shard["unreadable"]
        for name, problem in self._recognisers[part].unreadable():
            error = Unreadable(f"corrupted {part}", problem)
            yield self.reject(f"{part}/{PurePosixPath(name).name}", "", error, "list")

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the videos of a shard with their other files."""
        for file in super().list_files(shard):
            if isinstance(file, Reject):
                yield file
                continue
            file = file if "archive" in shard else self._with_siblings(file)
            video = PurePosixPath(file.id).name.removesuffix(file.suffix)
            if self._ids is None or video in self._ids:
                yield replace(file, id=video)

    def _with_siblings(self, file: MediaFile) -> MediaFile:
        """Adds the audio and the metadata next to a video."""
        stem = file.path.removesuffix(PurePosixPath(file.path).suffix)
        fs, folder = self._folder
        sound, metadata = (posixpath.join(folder, stem + suffix) for suffix in (SOUND, METADATA))
        if fs.isfile(sound):
            location = [stem + SOUND, None, fs.size(sound), None]
            file = replace(file, annotation={**file.annotation, "audio_file": location})
        if fs.isfile(metadata) and fs.size(metadata) <= SIDECAR_BYTES:
            with open_file(fs, metadata) as stream:
                text = stream.read().decode("utf-8", "replace")
            file = replace(file, sidecars={METADATA: text})
        return file

    def _sample(self, archive: str, key: str, members: list[Member]) -> Iterator[MediaFile]:
        sounds = {PurePosixPath(m.name).stem: m for m in members if m.suffix == SOUND}
        for file in super()._sample(archive, key, members):
            if sound := sounds.get(PurePosixPath(file.id).name.removesuffix(file.suffix)):
                location = [archive, sound.offset, sound.size, sound.deflated]
                file = replace(file, annotation={**file.annotation, "audio_file": location})
            yield file

    def list_items(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """Yields the windows of a video, or the video, with title and text."""
        info = _read_metadata(file.sidecars.get(METADATA))
        metadata = {k: v for k, v in info.items() if k in ("title", "description", "caption") and v}
        if "audio_file" in file.annotation:
            metadata["audio_file"] = file.annotation["audio_file"]
        title = metadata.pop("title", None)
        for item in super().list_items(file, revision, path):
            text = self._text(item, info)
            yield replace(
                item,
                title=title,
                text=text or None,
                metadata={**(item.metadata or {}), **metadata},
                revision=make_revision([revision], text) if text else revision,
            )

    def _text(self, item: Item, info: dict[str, str]) -> str:
        parts = []
        is_first = item.span is None or item.span[1] == 0
        for part in self.spec.text:
            if part in self._recognisers:
                parts.append(self._recognisers[part].text(item))
            elif is_first:
                parts.append(info.get(part) or "")
        return "\n\n".join(filter(None, parts))

    def find_file(self, parent_id: str, metadata: dict[str, Any]) -> MediaFile:
        """Returns the video of an indexed item, with its audio file."""
        file = super().find_file(parent_id, metadata)
        if "audio_file" not in metadata:
            return file
        return replace(file, annotation={"audio_file": metadata["audio_file"]})

    # -- decoding ----------------------------------------------------------------------------

    def decode_file(
        self, file: MediaFile, path: str, items: Sequence[Item]
    ) -> Iterator[Item | Unreadable]:
        """Yields the requested windows. Audio is read from the audio file, if it can be read."""
        if not {"frames", "audio"} & set(self.payload.names):  # the encoder reads the text
            missing = Unreadable("empty text", f"no {' or '.join(self.spec.text)}")
            yield from (item if item.text else missing for item in items)
            return
        videos = super().decode_file(file, path, items)
        location = file.annotation.get("audio_file")
        if location is None or "audio" not in self.payload.names:
            yield from videos
            return
        name, offset, size, deflated = location
        sound = MediaFile(file.id, name, size, offset, SOUND, deflated=deflated)
        try:
            with self._audio.local_path(sound) as sound_path:
                sounds = self._audio.decode_file(sound, sound_path, items)
                for video, item in zip(videos, sounds, strict=True):
                    yield self._merge(video, item)
        except OSError as error:
            raise Unreadable("unreadable", f"{name}: {error}") from None

    def _merge(self, video: Item | Unreadable, sound: Item | Unreadable) -> Item | Unreadable:
        """Replaces the audio of a decoded video."""
        if isinstance(sound, Unreadable):
            return video
        if isinstance(video, Unreadable):  # such as a video without an audio track
            return video if "frames" in self.payload.names else sound
        duration = (sound.metadata or {}).get("duration")
        metadata = {**(video.metadata or {}), "has_audio": True, "audio_duration": duration}
        payload = {**video.payload, "audio": sound.payload["audio"]}
        return replace(video, metadata=metadata, payload=payload)

    def _payload(self, name: str, window: dict[str, Any]) -> Any:
        return super()._payload(name, window) if name in ("frames", "audio") else None

    @functools.cached_property
    def _audio(self) -> Audio:
        fields = {name: getattr(self.spec, name) for name in Audio.Spec.model_fields}
        return Audio(Audio.Spec(**{**fields, "name": "audio"}), ("audio",))


class _Features:
    """Recognised text of videos in feature archives."""

    def __init__(self, uri: str, kind: int):
        self._spec = Precomputed.Spec(path=uri)
        self._kind = kind

    @functools.cached_property
    def _recogniser(self) -> Precomputed:
        recogniser = PrecomputedText if self._kind == TEXT else PrecomputedSpeech
        return recogniser(self._spec, skip_unreadable=True)

    def check_exists(self) -> None:
        """Reads all archives.

        Raises:
            SpecError: The archive does not exist.
        """
        self.unreadable()

    def unreadable(self) -> list[tuple[str, str]]:
        """Returns the names and the problems of unreadable files."""
        return unreadable_files(self._spec, self._kind)

    def text(self, item: Item) -> str:
        """Returns the recognised text of an item."""
        lines = self._recogniser.lines(item.row())
        separator = "\n" if self._kind == TEXT else " "
        return separator.join(line.text for line in lines)


def _read_metadata(text: str | None) -> dict[str, str]:
    """Returns the title, the description and the caption of a video, as far as they are known.

    >>> _read_metadata('{"caption": "c", "yt_meta_dict": {"info": {"title": "t"}}}')
    {'title': 't', 'description': '', 'caption': 'c'}
    """
    try:
        fields = json.loads(text or "{}")
        info = fields.get("yt_meta_dict", {}).get("info", {})
        values = {name: info.get(name) for name in ("title", "description")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise Unreadable("corrupted sidecar", f"{METADATA}: {error}") from None
    values["caption"] = fields.get("caption")
    return {name: value if isinstance(value, str) else "" for name, value in values.items()}

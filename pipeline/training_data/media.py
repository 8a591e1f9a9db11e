"""Videos and sound of training documents, decoded as the sources give them to encoders."""

from __future__ import annotations

import posixpath
from typing import Any, Literal

from pydantic import Field

from pipeline.decoding import Unreadable
from pipeline.decoding.process import Limits
from pipeline.schema import Item
from pipeline.sources.audio import Audio
from pipeline.sources.video import FramesSpec, Video
from pipeline.sources.windows import SoundSpec


class Decoding(FramesSpec, SoundSpec):
    """What is decoded of a whole video or sound, and how: as by the sources `video` and `audio`.

    `FramesSpec` and `SoundSpec` have more.

    Attributes:
        wants: what the encoder reads, frames, audio or both: nothing else is decoded.
        limits: what decoding one file may take.
    """

    wants: tuple[Literal["frames", "audio"], ...] = Field(("frames", "audio"), min_length=1)
    limits: Limits = Limits(seconds=120.0)


def decoded(spec: Decoding, video: str | None, sound: str | None) -> dict[str, Any]:
    """What is wanted of a document, as in `schema.PAYLOAD`, and its `span`.

    What a video sounds like is in the file of its sound, if it has one.

    Args:
        video, sound: URIs of files.

    Raises:
        Unreadable: a file cannot be read, or has nothing of what is wanted.
        OSError: of the storage.
    """
    item: dict[str, Any] = dict.fromkeys((*spec.wants, "span"))
    if sound is not None and "audio" in spec.wants:
        item |= _of_file(Audio, spec, sound, ("audio",))
    own = tuple(kind for kind in spec.wants if kind == "frames" or sound is None)
    if video is not None and own:
        item |= _of_file(Video, spec, video, own)
    return item


def settings_of(spec: Decoding) -> dict[str, Any]:
    """The options that change what is decoded."""
    return _source(Video, spec, ".", spec.wants).settings()


def _source(kind: type[Video | Audio], spec: Decoding, uri: str, wants: tuple[str, ...]) -> Any:
    """A source of whole files, of which `uri` is one."""
    given = spec.model_dump(include=set(kind.Spec.model_fields))
    return kind(kind.Spec(path=uri, window_seconds=None, **given), wants)


def _of_file(
    kind: type[Video | Audio], spec: Decoding, uri: str, wants: tuple[str, ...]
) -> dict[str, Any]:
    source, name = _source(kind, spec, uri, wants), posixpath.basename(uri)
    file, whole = source.file_of(name, {}), Item(name, name, "", kind.modality, "")
    with source.local(file) as path:
        (item,) = source.decode_file(file, path, [whole])
    if isinstance(item, Unreadable):
        raise item
    row = item.row()
    found = {name: row[name] for name in (*wants, "span")}
    if "frames" in found:
        found["frames"] = found["frames"].to_pylist()
    return found

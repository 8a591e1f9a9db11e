"""Videos and sound of training documents, decoded as the sources give them to encoders."""

from __future__ import annotations

import posixpath
from typing import Any, Literal

from pydantic import Field

from pipeline.config import Spec
from pipeline.decoding import Unreadable
from pipeline.decoding.process import Limits
from pipeline.schema import Item
from pipeline.sources.audio import Audio
from pipeline.sources.video import FramesSpec, Video
from pipeline.sources.windows import SoundSpec, WindowSource


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
    """Returns the wanted payload columns of a document (see `schema.PAYLOAD`) and its `span`.

    The audio of a video is read from the audio file, if there is one.

    Args:
        spec: Columns to decode, and how to decode them.
        video: URI of the video file, if any.
        sound: URI of the audio file, if any.

    Raises:
        Unreadable: A file cannot be read or has none of the wanted contents.
        OSError: The storage fails.
    """
    item: dict[str, Any] = dict.fromkeys((*spec.wants, "span"))
    if sound is not None and "audio" in spec.wants:
        item |= _payload(_audio(spec, sound), sound)
    own = tuple(kind for kind in spec.wants if kind == "frames" or sound is None)
    if video is not None and own:
        item |= _payload(_video(spec, video, own), video)
    return item


def settings_of(spec: Decoding) -> dict[str, Any]:
    """The options that change what is decoded."""
    return _video(spec, ".", spec.wants).settings()


def _video(spec: Decoding, uri: str, wants: tuple[str, ...]) -> Video:
    """Returns a source that reads the video file at `uri` as one item."""
    return Video(Video.Spec(path=uri, window_seconds=None, **_fields(spec, Video.Spec)), wants)


def _audio(spec: Decoding, uri: str) -> Audio:
    """Returns a source that reads the audio file at `uri` as one item."""
    fields = _fields(spec, Audio.Spec)
    return Audio(Audio.Spec(path=uri, window_seconds=None, **fields), ("audio",))


def _fields(spec: Decoding, source_spec: type[Spec]) -> dict[str, Any]:
    """Returns the decoding options that a source has too."""
    return spec.model_dump(include=set(source_spec.model_fields))


def _payload(source: WindowSource[Any], uri: str) -> dict[str, Any]:
    """Returns the payload of a whole file and its `span`.

    Raises:
        Unreadable: The file cannot be read or has none of the wanted contents.
    """
    name = posixpath.basename(uri)
    file, whole = source.file_of(name, {}), Item(name, name, "", source.modality, "")
    with source.local(file) as path:
        (item,) = source.decode_file(file, path, [whole])
    if isinstance(item, Unreadable):
        raise item
    row = item.row()
    found = {name: row[name] for name in (*source.wants, "span")}
    if "frames" in found:
        found["frames"] = found["frames"].to_pylist()
    return found

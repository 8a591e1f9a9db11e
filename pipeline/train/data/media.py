"""Decodes videos and audio in training documents in the same way as the index job."""

from __future__ import annotations

import posixpath
from typing import Any, Literal

from pydantic import Field

from pipeline.config import Spec
from pipeline.data.audio import Audio
from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import Limits
from pipeline.data.video import FramesSpec, Video
from pipeline.data.windows import AudioSpec, WindowSource
from pipeline.schema import Item
from pipeline.train.data.tables import ArchiveMember


class Decoding(FramesSpec, AudioSpec):
    """Options for decoding complete video and audio files. See `FramesSpec` and `AudioSpec`."""

    inputs: tuple[Literal["frames", "audio"], ...] = Field(("frames", "audio"), min_length=1)
    """Inputs of the encoder to decode."""
    limits: Limits = Limits(max_seconds=120.0)
    """Resource limits for decoding one file."""


def decode_media(
    spec: Decoding, video: str | ArchiveMember | None, audio: str | ArchiveMember | None
) -> dict[str, Any]:
    """Returns the requested payload columns of a document (see `schema.PAYLOAD`) and its `span`.

    If a video has a separate audio file, the audio is read from it.

    Raises:
        Unreadable: A file cannot be read or has none of the requested inputs.
    """
    item: dict[str, Any] = dict.fromkeys((*spec.inputs, "span"))
    if audio is not None and "audio" in spec.inputs:
        item |= _payload(_audio(spec, _path(audio)), audio)
    video_inputs = tuple(kind for kind in spec.inputs if kind == "frames" or audio is None)
    if video is not None and video_inputs:
        item |= _payload(_video(spec, _path(video), video_inputs), video)
    return item


def decoding_settings(spec: Decoding) -> dict[str, Any]:
    """Returns the options that affect the decoded content."""
    return _video(spec, ".", spec.inputs).settings()


def _video(spec: Decoding, uri: str, inputs: tuple[str, ...]) -> Video:
    return Video(Video.Spec(path=uri, window_seconds=None, **_fields(spec, Video.Spec)), inputs)


def _audio(spec: Decoding, uri: str) -> Audio:
    fields = _fields(spec, Audio.Spec)
    return Audio(Audio.Spec(path=uri, window_seconds=None, **fields), ("audio",))


def _fields(spec: Decoding, source_spec: type[Spec]) -> dict[str, Any]:
    """Returns the decoding options that exist in the spec of a source as well."""
    return spec.model_dump(include=set(source_spec.model_fields))


def _path(file: str | ArchiveMember) -> str:
    return file.archive if isinstance(file, ArchiveMember) else file


def _payload(source: WindowSource[Any], media: str | ArchiveMember) -> dict[str, Any]:
    name = posixpath.basename(_path(media))
    metadata: dict[str, Any] = {}
    if isinstance(media, ArchiveMember):
        metadata = {"bytes": (media.offset, media.size)}
    file, whole = source.find_file(name, metadata), Item(name, name, "", source.modality, "")
    with source.local_path(file) as path:
        (item,) = source.decode_file(file, path, [whole])
    if isinstance(item, Unreadable):
        raise item
    row = item.row()
    found = {name: row[name] for name in (*source.wants, "span")}
    if "frames" in found:
        found["frames"] = found["frames"].to_pylist()
    return found

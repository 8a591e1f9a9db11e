"""Contents of queries: decoded images, audio and videos, and recognised speech."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

from pipeline.config import SpecError
from pipeline.data.audio import Audio
from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import Limits
from pipeline.data.media import MediaFile
from pipeline.data.recognise import Recogniser
from pipeline.data.video import Video
from pipeline.encoders import QUERY_KINDS, Encoder, unsupported_query
from pipeline.encoders.images import read_query_image
from pipeline.registry import SPEECH
from pipeline.schema import Composed, Item

#: Maximum duration of audio and videos, in seconds, and maximum size of a file, in bytes.
MAX_SECONDS, MAX_BYTES = 300.0, 64 << 20
#: Limits of decoding a file.
LIMITS = Limits(max_seconds=60.0)
#: Parts of queries whose speech is recognised for encoders of texts, with their sources.
SOURCES: dict[str, Any] = {"audio": Audio, "video": Video}

#: Input of a query encoder: a text, the bytes of an image file, or several parts.
Unencoded = str | bytes | Composed


def query_parts(query: Unencoded) -> tuple[str, ...]:
    """Returns the names of the parts of a query."""
    if isinstance(query, Composed):
        return query.parts
    return ("text",) if isinstance(query, str) else ("image",)


def is_supported(parts: Sequence[str], kinds: Sequence[str]) -> bool:
    """Checks whether an encoder whose `query_kinds` are given can encode the parts of a query.

    Audio, and videos unless the encoder reads frames, are read by their speech.

    >>> is_supported(["text", "audio"], ["text"]), is_supported(["image", "audio"], ["text"])
    (True, False)
    """
    read = {"text" if part in SOURCES and part not in kinds else part for part in parts}
    return {*read, *["composed"] * (len(read) > 1)} <= {*kinds}


def supported_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the kinds of queries that are supported with an encoder's `query_kinds`.

    >>> supported_kinds(["text", "image", "composed"])
    ('text', 'image', 'audio', 'video', 'composed')
    """
    return tuple(
        k for k in QUERY_KINDS if k in kinds or (k in SOURCES and is_supported([k], kinds))
    )


def read_content(
    query: Unencoded, encoder: Encoder, max_seconds: float = MAX_SECONDS
) -> dict[str, Any]:
    """Returns the content of a query for an encoder, in the columns of `Encoder.encode_media`.

    Encoders read audio and videos like items. The recognised speech is part of the text for
    encoders that read texts but no audio, except for videos whose frames they read.

    Args:
        max_seconds: Maximum duration of audio and videos.

    Raises:
        SpecError: The query has no part or too many, a file is corrupted or too long, the encoder
            does not support its kind, or no word is recognised.
        MissingExtra: A package that decodes or recognises is not installed.
    """
    parts, kinds = query_parts(query), encoder.query_kinds(encoder.spec)
    if not isinstance(query, Composed):
        query = Composed(query) if isinstance(query, str) else Composed(image=query)
    if not parts:
        raise SpecError("query", "", "a text, an image, audio, a video or a combination of these")
    if {"image", "video"} <= {*parts}:
        raise SpecError("query", "an image with a video", "an image or a video")
    if not is_supported(parts, kinds):
        raise unsupported_query(parts, supported_kinds(kinds), type(encoder).__name__)
    content: dict[str, Any] = {}
    if query.image is not None:
        content["image"] = read_query_image(query.image)
    if query.audio is not None:
        content |= _decode("audio", query.audio, ["audio"], max_seconds)
    if query.video is not None:
        reads_frames, has_audio = "video" in kinds, "audio" in content
        wants = ["frames"] if reads_frames else []
        if not has_audio and ("audio" in kinds or not reads_frames):
            wants.append("audio")
        if wants:
            content |= _decode("video", query.video, wants, max_seconds)
    texts = [query.text]
    if "audio" in content and "audio" not in kinds:
        lines = _recogniser().lines({"audio": content.pop("audio"), "item_id": "", "parent_id": ""})
        texts += [line.text for line in lines]
        if not lines:
            part = "audio" if query.audio is not None else "video"
            rule = f"{part} with speech for {type(encoder).__name__}"
            raise SpecError(f"query.{part}", f"the {part}", rule, "has no recognised word")
    if text := "\n".join(filter(None, texts)):
        content["text"] = text
    return content if content.keys() - {"text", "span"} else {"text": text}


@functools.cache
def _recogniser() -> Recogniser[Any]:
    """Returns the speech recogniser of encoders without one: the default of `transcript`."""
    return SPEECH.build(SPEECH.resolve("pocketsphinx"))


def _decode(part: str, data: bytes, wants: Sequence[str], max_seconds: float) -> dict[str, Any]:
    """Decodes a file in a separate process, like a whole file that is an item."""
    field, value = f"query.{part}", f"the {part}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        spec = SOURCES[part].Spec(path=file.name, window_seconds=None, limits=LIMITS)
        source = SOURCES[part](spec, tuple(wants))
        try:
            seconds = source.process.call("describe", file.name)["duration"]
            if seconds > max_seconds:
                rule = f"at most {max_seconds:g} s long"
                raise SpecError(field, f"{part} of {seconds:,.0f} s", rule)
            whole = Item("query", "query", "", part, "")
            (item,) = source.decode_file(MediaFile("query", "", len(data)), file.name, [whole])
            if isinstance(item, Unreadable):
                raise item
        except Unreadable as error:
            detail = ": ".join(filter(None, vars(error).values())).replace(file.name, part)
            problem = f"cannot be read ({detail})"
            raise SpecError(field, value, f"a readable {part} file", problem) from None
    content = {name: values for name, values in item.payload.items() if values}
    if "frames" in content:
        content["frames"] = content["frames"].to_pylist()
    return {**content, "span": dict(zip(("unit", "start", "end"), item.span, strict=True))}

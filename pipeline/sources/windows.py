"""What sources of media that last have in common: windows of time as items, and sound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from pipeline.config import Spec, SpecError
from pipeline.decoding import Unreadable
from pipeline.schema import Item
from pipeline.sources.media import MediaFile, MediaSource, MediaSpec

#: What is left behind the last window is one of its own from this length on; less is joined to it.
LEAST_SECONDS = 1.0
#: What the undecoded payload of the items of a unit may take in memory together.
UNIT_BYTES = 128 << 20


class SoundSpec(Spec):
    """How sound is given.

    Attributes:
        sample_rate: what sound is converted to, in samples a second.
    """

    sample_rate: int = Field(16_000, ge=1000, le=192_000)


class WindowSpec(MediaSpec, SoundSpec):
    """What the sources of video and audio share; `SoundSpec` has more.

    Attributes:
        window_seconds: how long an item lasts; None: a whole file is one item.
        overlap_seconds: how much of a window the next one has too.
        border_shift: Maximum distance, in seconds, by which the sound of a window begins or ends
            earlier or later than the window, in a pause; at most a quarter of what is new in a
            window. So sentences are recognised whole, each in one window; 0: borders stay.
    """

    window_seconds: float | None = Field(30.0, ge=LEAST_SECONDS, le=86_400)
    overlap_seconds: float = Field(0.0, ge=0, le=86_400)
    border_shift: float = Field(5.0, ge=0, le=60)

    @field_validator("window_seconds", "overlap_seconds")
    @classmethod
    def _whole_milliseconds(cls, seconds: float | None) -> float | None:
        """Ids name windows in milliseconds."""
        return seconds if seconds is None else round(seconds, 3)

    @model_validator(mode="after")
    def _overlap_is_part_of_a_window(self) -> WindowSpec:
        if self.window_seconds is None:
            if self.overlap_seconds:
                rule = "0 when a whole file is one item"
                raise SpecError("overlap_seconds", self.overlap_seconds, rule)
        elif self.window_seconds - self.overlap_seconds < LEAST_SECONDS:
            rule = f"at least {LEAST_SECONDS:g} s less than `window_seconds`"
            raise SpecError("overlap_seconds", self.overlap_seconds, rule)
        return self


WindowSpecT = TypeVar("WindowSpecT", bound=WindowSpec)


class WindowSource(MediaSource[WindowSpecT]):
    """Files cut into windows of time: items `<file>#t=<start>,<end>`, the file their parent.

    The end of an id is W3C's media fragment, which browsers know. The last window ends where the
    file does; it holds something that no other does, and no less than a second of it. Of whole
    files as items (`window_seconds: null`) the id is the file's, and they are listed without being
    opened.
    """

    modality: str

    @property
    def opens_to_list(self) -> bool:
        """Whether the items of a file are known only after decoding it, by its duration."""
        return self.spec.window_seconds is not None

    def settings(self) -> dict[str, Any]:
        """The options that change what is decoded."""
        settings = super().settings()
        if "audio" not in self.wants or self.spec.window_seconds is None:  # no border of sound
            del settings["border_shift"]
        return settings

    def items_of(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """The windows of a file, or the file."""
        whole = Item(file.id, file.id, self.collection, self.modality, revision)
        window_seconds = self.spec.window_seconds
        if path is None or window_seconds is None:
            yield whole
            return
        about = self.process.call("describe", path)
        duration = about["duration"]
        whole = replace(whole, metadata=_about(about))
        for start, end in cut(duration, window_seconds, self.spec.overlap_seconds):
            yield replace(
                whole, item_id=f"{file.id}#t={short(start)},{short(end)}", span=_span(start, end)
            )

    def decode_file(
        self, file: MediaFile, path: str, items: Sequence[Item]
    ) -> Iterator[Item | Unreadable]:
        """The windows with what is wanted of them."""
        if not self.payload:  # nobody wants to see or hear it
            yield from items
            return
        windows = [list(item.span[1:]) if item.span else [0.0, None] for item in items]
        results = self.process.stream(
            len(items), "read_windows", path, windows, self._reader_settings()
        )
        for item, result in zip(items, results, strict=True):
            yield result if isinstance(result, Unreadable) else self._item(item, result)

    def sound(self, item: dict[str, Any]) -> tuple[np.ndarray, int, float]:
        """What a stored item sounds like: samples (S,), their rate, the second they start at.

        Raises:
            Unreadable: there is no sound.
        """
        settings = {**self._reader_settings(), "frames": False, "audio": True}
        span = [item["span"]["start"], item["span"]["end"]]
        with self.local(self.file_of(item["parent_id"], item["metadata"])) as path:
            (window,) = self.process.stream(1, "read_windows", path, [span], settings)
        if isinstance(window, Unreadable):
            raise window
        return window["samples"], self.spec.sample_rate, window["audio_start"]

    def _reader_settings(self) -> dict[str, Any]:
        """What `read_windows` is told."""
        wanted = {kind: kind in self.wants for kind in self.gives}
        new = (self.spec.window_seconds or 0.0) - self.spec.overlap_seconds
        shift = min(self.spec.border_shift, new / 4)
        return {**self.spec.model_dump(mode="json"), **wanted, "border_shift": shift}

    def _item(self, item: Item, window: dict[str, Any]) -> Item:
        """An item with what was read of it."""
        metadata = {**(item.metadata or {}), **self._metadata(window)}
        filled = {name: self._payload(name, window) for name in self.payload.names}
        span = item.span or _span(0.0, window["about"]["duration"])
        return replace(item, span=span, metadata=metadata, payload=filled)

    def _metadata(self, window: dict[str, Any]) -> dict[str, Any]:
        """What is said of a window, and of its file."""
        return _about(window["about"])

    def _payload(self, name: str, window: dict[str, Any]) -> Any:
        """A column of the payload, see `schema.PAYLOAD`."""
        assert name == "audio"
        if not len(window["samples"]):
            return None
        return {
            "start": window["audio_start"],
            "sample_rate": self.spec.sample_rate,
            "samples": window["samples"].astype("<f4", copy=False).tobytes(),
        }

    def _audio_bytes(self) -> float:
        """What the sound of an item takes; of a whole file, what that of an hour would."""
        return 4 * self.spec.sample_rate * (self.spec.window_seconds or 3600.0)


def _about(described: dict[str, Any]) -> dict[str, Any]:
    """What is stored of what a file says of itself."""
    return {**described, "duration": round(described["duration"], 3)}


def cut(duration: float, window: float, overlap: float = 0.0) -> list[tuple[float, float]]:
    """The windows (start, end) of a file, in seconds.

    >>> cut(70.0, 30.0)
    [(0.0, 30.0), (30.0, 60.0), (60.0, 70.0)]
    >>> cut(60.5, 30.0)
    [(0.0, 30.0), (30.0, 60.5)]
    >>> cut(50.0, 30.0, 10.0)
    [(0.0, 30.0), (20.0, 50.0)]
    """
    end = round(duration, 3)
    step = window - overlap
    # Each window behind the first brings `step` seconds that are new; the last may bring less.
    rest = round(end - window - LEAST_SECONDS, 3)
    number = 1 if rest < 0 else 2 + math.floor(round(rest / step, 6))
    starts = [round(i * step, 3) for i in range(number)]
    ends = [round(start + window, 3) for start in starts[:-1]] + [end]
    return list(zip(starts, ends, strict=True))


def short(seconds: float) -> str:
    """Seconds in whole milliseconds, without zeros that say nothing.

    >>> short(30.0), short(12.5), short(0.033), short(86400.0)
    ('30', '12.5', '0.033', '86400')
    """
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def _span(start: float, end: float) -> tuple[str, float, float]:
    return ("seconds", start, end)

"""Base classes of sources that divide audio and video files into time windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from pipeline.config import Spec
from pipeline.data.base import ItemSize
from pipeline.data.decode import Unreadable
from pipeline.data.media import MediaFile, MediaSource, MediaSpec
from pipeline.schema import Item

#: Minimum duration of the last window. A shorter remainder becomes part of the previous window.
MIN_WINDOW_SECONDS = 1.0
#: Bit rate from which the duration of a whole file is estimated if it was not measured, in
#: bytes per second. Most files have a higher rate and are therefore shorter.
MIN_AUDIO_RATE, MIN_VIDEO_RATE = 4_000, 25_000
#: Duration that is assumed if neither the duration nor the size of a file is known, in seconds.
UNKNOWN_SECONDS = 3600.0


class AudioSpec(Spec):
    """Options of decoded audio."""

    sample_rate: int = Field(16_000, ge=1000, le=192_000)
    """Sample rate of the decoded audio, in Hz."""


class WindowSpec(MediaSpec, AudioSpec):
    """Options of the audio and video sources."""

    window_seconds: float | None = Field(30.0, ge=MIN_WINDOW_SECONDS, le=86_400)
    """Duration of a window, in seconds; None: an item is an entire file."""
    overlap_seconds: float = Field(0.0, ge=0, le=86_400)
    """Overlap of adjacent windows, in seconds."""
    border_shift: float = Field(5.0, ge=0, le=60)
    """Maximum distance, in seconds, by which the audio of a window is extended or shortened to
    start and end in a pause, so that sentences are not divided. At most a quarter of the step
    between windows is used; 0: windows are not adjusted."""

    @field_validator("window_seconds", "overlap_seconds")
    @classmethod
    def _whole_milliseconds(cls, seconds: float | None) -> float | None:
        """Rounds a time to milliseconds, which is the precision of item ids."""
        return seconds if seconds is None else round(seconds, 3)

    @model_validator(mode="after")
    def _check_overlap(self) -> WindowSpec:
        if self.window_seconds is None:
            rule, largest = "0 when a whole file is one item", 0.0
        else:
            rule = f"at least {MIN_WINDOW_SECONDS:g} s less than `window_seconds`"
            largest = self.window_seconds - MIN_WINDOW_SECONDS
        self.require(self.overlap_seconds <= largest, "overlap_seconds", rule)
        return self


WindowSpecT = TypeVar("WindowSpecT", bound=WindowSpec)


class WindowSource(MediaSource[WindowSpecT]):
    """Base class of sources whose items are time windows of files.

    The id of an item is `<file>#t=<start>,<end>`, a W3C media fragment that browsers understand.
    Its parent is the file. The last window ends at the end of the file and adds at least one
    second. If items are entire files (`window_seconds: null`), their id is the id of the file, and
    files are listed without being decoded.
    """

    modality: str
    min_rate: ClassVar[int]
    """Minimum bit rate that is assumed for files of unknown duration, in bytes per second."""

    @property
    def decodes_to_list(self) -> bool:
        """True if files are divided into windows, for which their duration must be known."""
        return self.spec.window_seconds is not None

    @property
    def measures_files(self) -> bool:
        """True if items are entire files that are read anyway, to be hashed."""
        is_decoded = bool(self.payload.names)
        return is_decoded and not self.decodes_to_list and self.spec.revision == "content"

    @property
    def reads_files(self) -> bool:
        """True if the encoder reads frames or audio."""
        return bool({"frames", "audio"} & {*self.payload.names})

    def measure_file(self, path: str) -> dict[str, Any]:
        """Returns the properties of a file, such as its `duration`, if it can be read."""
        try:
            return self.process.call("describe", path)
        except Unreadable:
            return {}  # decoding reports the error

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the size of the decoded audio of an item."""
        size = super().item_size(shard, item)
        if "audio" not in self.payload.names:
            return size
        samples = self._seconds(item) * self.spec.sample_rate
        return size._replace(num_bytes=size.num_bytes + int(4 * samples))

    def _seconds(self, item: Item) -> float:
        """Returns the duration of a listed item, which is estimated for files of unknown length."""
        if item.span is not None:
            return item.span[2] - item.span[1]
        if duration := item.handle["header"].get("duration"):
            return duration
        num_bytes = item.handle["size"]
        return num_bytes / self.min_rate if num_bytes else UNKNOWN_SECONDS

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the decoded content."""
        settings = super().settings()
        if "audio" not in self.wants or self.spec.window_seconds is None:
            del settings["border_shift"]
        return settings

    def list_items(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """Yields the windows of a file, or the file."""
        whole = Item(file.id, file.id, self.collection, self.modality, revision)
        window_seconds = self.spec.window_seconds
        if path is None or window_seconds is None:
            yield whole
            return
        info = self.process.call("describe", path)
        duration = info["duration"]
        whole = replace(whole, metadata=_file_metadata(info))
        for start, end in split_windows(duration, window_seconds, self.spec.overlap_seconds):
            item_id = f"{file.id}#t={format_seconds(start)},{format_seconds(end)}"
            yield replace(whole, item_id=item_id, span=_span(start, end))

    def decode_file(
        self, file: MediaFile, path: str, items: Sequence[Item]
    ) -> Iterator[Item | Unreadable]:
        """Yields the requested windows with their payload and metadata."""
        if not self.reads_files:
            yield from items
            return
        windows = [list(item.span[1:]) if item.span else [0.0, None] for item in items]
        results = self.process.stream(
            len(items), "read_windows", path, windows, self._reader_settings()
        )
        for item, result in zip(items, results, strict=True):
            yield result if isinstance(result, Unreadable) else self._item(item, result)

    def preview_audio(self, item: dict[str, Any]) -> tuple[np.ndarray, int, float]:
        """Returns the audio of an indexed item for use in a preview."""
        settings = {**self._reader_settings(), "frames": False, "audio": True}
        span = [item["span"]["start"], item["span"]["end"]]
        with self.local_path(self.find_file(item["parent_id"], item["metadata"])) as path:
            (window,) = self.process.stream(1, "read_windows", path, [span], settings)
        if isinstance(window, Unreadable):
            raise window
        return window["samples"], self.spec.sample_rate, window["audio_start"]

    def _reader_settings(self) -> dict[str, Any]:
        """Returns the arguments of the function `read_windows` in the decoding modules."""
        inputs = {name: name in self.wants for name in self.provides}
        step = (self.spec.window_seconds or 0.0) - self.spec.overlap_seconds
        shift = min(self.spec.border_shift, step / 4)
        return {**self.spec.model_dump(mode="json"), **inputs, "border_shift": shift}

    def _item(self, item: Item, window: dict[str, Any]) -> Item:
        metadata = {**(item.metadata or {}), **self._metadata(window)}
        payload = {name: self._payload(name, window) for name in self.payload.names}
        span = item.span or _span(0.0, window["info"]["duration"])
        return replace(item, span=span, metadata=metadata, payload=payload)

    def _metadata(self, window: dict[str, Any]) -> dict[str, Any]:
        return _file_metadata(window["info"])

    def _payload(self, name: str, window: dict[str, Any]) -> Any:
        assert name == "audio"
        if not len(window["samples"]):
            return None
        return {
            "start": window["audio_start"],
            "sample_rate": self.spec.sample_rate,
            "samples": window["samples"].astype("<f4", copy=False).tobytes(),
        }


def _file_metadata(info: dict[str, Any]) -> dict[str, Any]:
    return {**info, "duration": round(info["duration"], 3)}


def split_windows(
    duration: float, window: float, overlap: float = 0.0
) -> list[tuple[float, float]]:
    """Divides a file into windows and returns their start and end; all times are in seconds.

    >>> split_windows(70.0, 30.0)
    [(0.0, 30.0), (30.0, 60.0), (60.0, 70.0)]
    >>> split_windows(60.5, 30.0)
    [(0.0, 30.0), (30.0, 60.5)]
    >>> split_windows(50.0, 30.0, 10.0)
    [(0.0, 30.0), (20.0, 50.0)]
    """
    end = round(duration, 3)
    step = window - overlap
    # Each window after the first adds `step` seconds. The last may add less.
    remainder = round(end - window - MIN_WINDOW_SECONDS, 3)
    num_windows = 1 if remainder < 0 else 2 + math.floor(round(remainder / step, 6))
    starts = [round(i * step, 3) for i in range(num_windows)]
    ends = [round(start + window, 3) for start in starts[:-1]] + [end]
    return list(zip(starts, ends, strict=True))


def format_seconds(seconds: float) -> str:
    """Formats a time in seconds with a precision of milliseconds and without trailing zeros.

    >>> format_seconds(30.0), format_seconds(12.5), format_seconds(0.033), format_seconds(86400.0)
    ('30', '12.5', '0.033', '86400')
    """
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def _span(start: float, end: float) -> tuple[str, float, float]:
    return ("seconds", start, end)

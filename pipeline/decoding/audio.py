"""One file with sound: its samples, one channel, window by window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
import soxr

from pipeline.decoding import Unreadable
from pipeline.decoding.truncation import is_truncated

#: Frames of sound that are in memory together while they are resampled.
BLOCK = 1 << 16
#: What is read around a window: a resampler looks that far to both sides.
MARGIN_SECONDS = 0.05
#: Compressed sound is decoded from so far before a window on: the first packets only warm it up.
WARM_UP_SECONDS = 0.25
#: Times of packets are rounded; what is missing between them beyond this is silence.
GAP_SECONDS = 0.05
#: Windows are divided where sound is quietest for so long; pauses between sentences are longer.
PAUSE_SECONDS = 0.4
#: Loudness is measured so many times a second.
LOUDNESS_RATE = 100
#: Places at most twice as loud (3 dB) as the quietest, or digital silence, are as good as it.
AS_QUIET, SILENCE = 2.0, (1.5 / 32768) ** 2

#: Samples (n, channels) and the time of the first in seconds.
Block = tuple[float, np.ndarray]


class SoundFile:
    """A file that libsndfile reads: WAV, FLAC, Ogg, MP3."""

    def __init__(self, path: str):
        self._file = soundfile.SoundFile(path)
        self.sample_rate, self.channels = self._file.samplerate, self._file.channels
        self.duration = self._file.frames / self.sample_rate
        self.is_truncated = is_truncated(path)

    def is_whole(self) -> bool:
        """Whether the last of the frames that the header tells of is there."""
        try:
            self._file.seek(max(self._file.frames - 1, 0))
            return len(self._file.read(1)) == min(self._file.frames, 1)
        except soundfile.LibsndfileError:
            return False

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """The sound of a stretch, or the part of it that can be read."""
        at = max(0, math.floor(start * self.sample_rate))
        stop = min(self._file.frames, end * self.sample_rate)
        try:
            self._file.seek(min(at, self._file.frames))
            while at < stop:
                block = self._file.read(BLOCK, dtype="float32", always_2d=True)
                if not len(block):
                    return
                yield at / self.sample_rate, block
                at += len(block)
        except soundfile.LibsndfileError:
            return

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Track:
    """The audio track of a file that FFmpeg reads: AAC, Opus, any video.

    decord has a reader of tracks too, but it decodes the whole track when it opens it: 30 minutes
    of stereo took 460 MB at 16 kHz and 1.2 GB at 44.1 kHz, where this one takes 17 MB. It also adds
    up the channels of stereo with a factor of 0.7 instead of their mean.

    Args:
        container: The opened file.
        stream: Its audio stream.
        zero: Time stamp of the beginning of the file, in seconds.
        is_truncated: Whether the file ends before its header says it does.
    """

    def __init__(
        self,
        container: av.container.InputContainer,
        stream: av.AudioStream,
        zero: float = 0.0,
        is_truncated: bool = False,
    ):
        self.is_truncated = is_truncated
        self._container, self._stream, self._zero = container, stream, zero
        stream.codec_context.thread_count = 1  # several processes run side by side
        self.sample_rate, self.channels = stream.codec_context.rate, stream.codec_context.channels
        self.duration = self._end()

    def _end(self) -> float:
        """Where the last packet ends, in seconds."""
        for target in (1 << 62, None):  # from near its end on, if the file can be searched
            end = 0.0
            try:
                self._seek(target)
                for packet in self._container.demux(self._stream):
                    if packet.pts is not None:
                        stop = (packet.pts + (packet.duration or 0)) * packet.time_base
                        end = max(end, float(stop) - self._zero)
            except av.FFmpegError:
                pass  # what comes before it counts
            if end:
                return end
        return 0.0

    def _seek(self, target: int | None) -> None:
        """To a time stamp or the packet before it; None: to the beginning."""
        stream = self._stream
        if target is None:
            # The decoder's first packets are not heard, and lie before the beginning.
            first = stream.start_time or 0
            try:
                self._container.seek(first - int(1 / time_base(stream)), stream=stream)
                return
            except av.FFmpegError:  # MP3 has nothing before it
                target = first
        self._container.seek(target, stream=stream, backward=True)

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """The sound of a stretch, or the part of it that can be decoded; gaps are filled."""
        unit = time_base(self._stream)
        first = start - WARM_UP_SECONDS
        try:
            self._seek(int((first + self._zero) / unit) if first > 0 else None)
        except av.FFmpegError:
            return
        to_float = av.AudioResampler(format="flt")
        expected: float | None = None
        for frame in self._frames():
            at = expected or 0.0 if frame.pts is None else float(frame.pts * unit) - self._zero
            if at >= end:
                return
            frame.pts = None
            for converted in to_float.resample(frame):
                block = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
                seconds = len(block) / self.sample_rate
                if at + seconds > start:
                    if expected is not None and at - expected > GAP_SECONDS:
                        missing = round((min(at, end) - expected) * self.sample_rate)
                        yield expected, np.zeros((missing, block.shape[1]), np.float32)
                    yield at, block
                    expected = at + seconds
                at += seconds

    def _frames(self) -> Iterator[av.AudioFrame]:
        """Frames from here on; damaged packets are left out."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    return
            except av.FFmpegError:  # the file ends in the middle of one
                return
            try:
                frames = packet.decode()
            except av.FFmpegError:
                continue
            yield from frames

    def close(self) -> None:
        """Closes the file."""
        self._container.close()


def open_sound(path: str, trust: bool = False) -> SoundFile | Track:
    """Opens a file with audio by its content, whatever its name.

    Args:
        path: Path of the file.
        trust: Whether to skip the check that the end is there, which takes a search in FLAC.

    Raises:
        Unreadable: It holds no audio.
    """
    with open(path, "rb") as content:
        head = content.read(16)
    if not head:
        raise Unreadable("empty file")
    sound: SoundFile | Track
    try:
        file = SoundFile(path)
        if trust or file.is_whole():
            sound = file
        else:  # libsndfile reads little of a truncated file
            file.close()
            sound = _open_track(path, head, "its end is missing", is_cut=True)
    except soundfile.LibsndfileError as error:
        sound = _open_track(path, head, str(error))
    if not sound.duration:
        sound.close()
        raise Unreadable("no sound", "the file has a header and no samples")
    return sound


def _open_track(path: str, head: bytes, detail: str, is_cut: bool = False) -> Track:
    try:
        container = av.open(path)
    except av.FFmpegError:
        raise Unreadable("damaged audio" if is_audio(head) else "not audio", detail) from None
    if (stream := audio_stream(container)) is None:
        reason = "no audio track" if container.streams.video else "not audio"
        container.close()
        raise Unreadable(reason)
    try:
        zero = (container.start_time or 0) / av.time_base
        return Track(container, stream, zero, is_cut or is_truncated(path))
    except (av.FFmpegError, ValueError) as error:
        container.close()
        raise Unreadable("damaged audio", str(error)) from None


def audio_stream(container: av.container.InputContainer) -> av.AudioStream | None:
    """Returns the audio stream that FFmpeg prefers, if there is one."""
    stream = container.streams.best("audio")
    return stream if isinstance(stream, av.AudioStream) else None


def time_base(stream: av.stream.Stream) -> Fraction:
    """Returns the unit of a stream's time stamps, in seconds.

    Raises:
        ValueError: The stream has none.
    """
    if stream.time_base is None:
        raise ValueError("the stream has no time base")
    return stream.time_base


def is_audio(head: bytes) -> bool:
    """Whether a file that cannot be read begins like one with sound."""
    return head.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3")) or head[4:8] == b"ftyp"


def describe(path: str) -> dict[str, Any]:
    """`duration` in seconds, `sample_rate` and `channels`, as the file has them.

    A file that ends before its header says it does has `truncated`, True.
    """
    sound = open_sound(path)
    about = _about(sound)
    sound.close()
    return about


def _about(sound: SoundFile | Track) -> dict[str, Any]:
    about = {name: getattr(sound, name) for name in ("duration", "sample_rate", "channels")}
    return {**about, "truncated": True} if sound.is_truncated else about


def read_windows(
    path: str, windows: Sequence[tuple[float, float | None]], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Reads windows of a file, one result each.

    Args:
        path: Path of the file.
        windows: (start, end) of each window in seconds; an end of None is the end of the file.
        settings: `sample_rate` of the result in Hz; `border_shift`, see `to_pauses`.

    Yields:
        `samples` (n,) float32, the mean of the channels; `audio_start`, the time of the first in
        seconds; `about`, the result of `describe`.
    """
    sound, is_trusted = open_sound(path, trust=True), True
    about = _about(sound)
    for window_start, window_end in windows:
        end = sound.duration if window_end is None else window_end
        start, end = to_pauses(sound, window_start, end, settings)
        audio_start, samples = read_samples(sound, start, end, settings["sample_rate"])
        missing = min(end, sound.duration) - start - len(samples) / settings["sample_rate"]
        if is_trusted and missing > GAP_SECONDS:
            sound.close()
            sound, is_trusted = open_sound(path), False
            about, end = _about(sound), min(end, sound.duration)
            audio_start, samples = read_samples(sound, start, end, settings["sample_rate"])
        if len(samples):
            yield {"samples": samples, "audio_start": audio_start, "about": about}
        else:
            yield Unreadable("nothing in this window", f"no sound from {start:g} s to {end:g} s")
    sound.close()


def to_pauses(
    sound: SoundFile | Track, start: float, end: float, settings: dict[str, Any]
) -> tuple[float, float]:
    """Moves the borders of a window to pauses, so that no word and few sentences are divided.

    A border depends only on the audio around it, so adjacent windows agree on it. The beginning
    and the end of the file stay.

    Args:
        sound: The audio.
        start: Start of the window, in seconds.
        end: End of the window, in seconds.
        settings: `sample_rate` in Hz; `border_shift`, the maximum distance in seconds by which a
            border moves.

    Returns:
        The new start and end, in seconds.
    """
    if not (reach := settings.get("border_shift", 0.0)):
        return start, end
    rate = settings["sample_rate"]
    is_last = end > sound.duration - PAUSE_SECONDS
    return (
        _pause(sound, start, reach, rate) if start > 0 else start,
        end if is_last else _pause(sound, end, reach, rate),
    )


def _pause(sound: SoundFile | Track, at: float, reach: float, rate: int) -> float:
    """The place nearest to `at` that is as quiet as the quietest within `reach` seconds."""
    first, samples = read_samples(sound, max(0.0, at - reach), at + reach, rate)
    step = rate // LOUDNESS_RATE
    power = np.square(samples[: len(samples) // step * step].reshape(-1, step)).mean(axis=1)
    width = round(PAUSE_SECONDS * LOUDNESS_RATE)
    if len(power) < width:
        return at
    power = np.convolve(power, np.full(width, 1 / width), mode="valid")
    quiet = np.flatnonzero(power <= max(AS_QUIET * power.min(), SILENCE))
    places = first + (quiet + width / 2) * step / rate
    nearest = float(places[np.abs(places - at).argmin()])
    return at if abs(nearest - at) < 2 / LOUDNESS_RATE else nearest


def read_samples(
    sound: SoundFile | Track, start: float, end: float, sample_rate: int
) -> tuple[float, np.ndarray]:
    """Returns the audio of a window; only the result and one block are in memory.

    Args:
        sound: The audio.
        start: Start of the window, in seconds.
        end: End of the window, in seconds.
        sample_rate: Sample rate of the result, in Hz.

    Returns:
        Time of the first sample in seconds, and the samples (n,) float32.
    """
    blocks = sound.blocks(max(0.0, start - MARGIN_SECONDS), end + MARGIN_SECONDS)
    first = next(blocks, None)
    if first is None:
        return start, np.zeros(0, np.float32)
    at = first[0]
    skip = max(0, round((start - at) * sample_rate))
    stop = max(0, round((end - at) * sample_rate))
    chunks: list[np.ndarray] = []
    position = 0
    mono = (_mono(block) for _, block in itertools.chain([first], blocks))
    for piece in _resampled(mono, sound.sample_rate, sample_rate):
        inside = piece[max(0, skip - position) : max(0, stop - position)]
        if len(inside):
            chunks.append(inside)
        position += len(piece)
        if position >= stop:
            break
    samples = np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
    return at + skip / sample_rate, samples


def _mono(block: np.ndarray) -> np.ndarray:
    """The mean of the channels; as a product, which is much faster."""
    channels = block.shape[1]
    return block[:, 0] if channels == 1 else block @ np.full(channels, 1 / channels, np.float32)


def _resampled(blocks: Iterator[np.ndarray], source_rate: int, rate: int) -> Iterator[np.ndarray]:
    """The same sound at another rate, in pieces as they come."""
    if source_rate == rate:
        yield from blocks
        return
    stream = soxr.ResampleStream(source_rate, rate, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)

"""Reads one channel of audio from a file, window by window."""

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

#: Number of audio frames in memory at the same time during resampling.
BLOCK = 1 << 16
#: Additional audio on both sides of a window, the support of the resampling filter.
MARGIN_SECONDS = 0.05
#: Compressed audio is decoded from this time before a window, because the first decoded packets are
#: distorted.
WARM_UP_SECONDS = 0.25
#: Timestamps of packets are rounded; only longer gaps between packets are filled with silence.
GAP_SECONDS = 0.05
#: Duration over which loudness is averaged to find pauses; pauses between sentences are longer.
PAUSE_SECONDS = 0.4
#: Number of loudness values per second.
LOUDNESS_RATE = 100
#: Times with at most twice the power (3 dB) of the quietest, or digital silence, are equally good.
QUIET_FACTOR, SILENCE = 2.0, (1.5 / 32768) ** 2

#: Time of the first sample in seconds, and samples (n, channels).
Block = tuple[float, np.ndarray]


class SoundFile:
    """An audio file read by libsndfile: WAV, FLAC, Ogg or MP3.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: str):
        self._file = soundfile.SoundFile(path)
        self.sample_rate, self.channels = self._file.samplerate, self._file.channels
        self.duration = self._file.frames / self.sample_rate
        self.is_truncated = is_truncated(path)

    def is_complete(self) -> bool:
        """Returns whether the last frame declared in the header is readable."""
        try:
            self._file.seek(max(self._file.frames - 1, 0))
            return len(self._file.read(1)) == min(self._file.frames, 1)
        except soundfile.LibsndfileError:
            return False

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """Yields the readable audio between two times in seconds."""
        position = max(0, math.floor(start * self.sample_rate))
        stop = min(self._file.frames, end * self.sample_rate)
        try:
            self._file.seek(min(position, self._file.frames))
            while position < stop:
                block = self._file.read(BLOCK, dtype="float32", always_2d=True)
                if not len(block):
                    return
                yield position / self.sample_rate, block
                position += len(block)
        except soundfile.LibsndfileError:
            return

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class AudioTrack:
    """The audio track of a file read by FFmpeg, such as AAC, Opus or a video.

    decord can read audio tracks, too, but decodes the entire track on opening: 30 minutes of stereo
    take 460 MB at 16 kHz and 1.2 GB at 44.1 kHz, compared to 17 MB here. It also downmixes stereo
    as a sum with the factor 0.7 instead of the mean.

    Args:
        container: The opened file.
        stream: Audio stream of the file.
        zero: Timestamp of the beginning of the file, in seconds.
        is_truncated: Whether the file is shorter than its header specifies.
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
        stream.codec_context.thread_count = 1  # processes run in parallel
        self.sample_rate, self.channels = stream.codec_context.rate, stream.codec_context.channels
        self.duration = self._end()

    def _end(self) -> float:
        """Returns the end of the last packet, in seconds."""
        for target in (1 << 62, None):  # from near the end if the file is seekable
            end = 0.0
            try:
                self._seek(target)
                for packet in self._container.demux(self._stream):
                    if packet.pts is not None:
                        stop = (packet.pts + (packet.duration or 0)) * packet.time_base
                        end = max(end, float(stop) - self._zero)
            except av.FFmpegError:
                pass  # uses the packets before the error
            if end:
                return end
        return 0.0

    def _seek(self, target: int | None) -> None:
        """Seeks to a timestamp or the packet before it; None: to the beginning."""
        stream = self._stream
        if target is None:
            # The first packets prime the decoder and precede the beginning.
            first = stream.start_time or 0
            try:
                self._container.seek(first - int(1 / time_base(stream)), stream=stream)
                return
            except av.FFmpegError:  # MP3 has no such packets
                target = first
        self._container.seek(target, stream=stream, backward=True)

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """Yields the decodable audio between two times in seconds; gaps are filled with silence."""
        unit = time_base(self._stream)
        first = start - WARM_UP_SECONDS
        try:
            self._seek(int((first + self._zero) / unit) if first > 0 else None)
        except av.FFmpegError:
            return
        to_float = av.AudioResampler(format="flt")
        expected: float | None = None
        for frame in self._frames():
            time = expected or 0.0 if frame.pts is None else float(frame.pts * unit) - self._zero
            if time >= end:
                return
            frame.pts = None
            for converted in to_float.resample(frame):
                block = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
                seconds = len(block) / self.sample_rate
                if time + seconds > start:
                    if expected is not None and time - expected > GAP_SECONDS:
                        missing = round((min(time, end) - expected) * self.sample_rate)
                        yield expected, np.zeros((missing, block.shape[1]), np.float32)
                    yield time, block
                    expected = time + seconds
                time += seconds

    def _frames(self) -> Iterator[av.AudioFrame]:
        """Yields the frames from the current position on, skipping corrupted packets."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    return
            except av.FFmpegError:  # the file ends in the middle of a packet
                return
            try:
                frames = packet.decode()
            except av.FFmpegError:
                continue
            yield from frames

    def close(self) -> None:
        """Closes the file."""
        self._container.close()


def open_audio(path: str, trust: bool = False) -> SoundFile | AudioTrack:
    """Opens a file with audio, detecting the format from its content.

    Args:
        path: Path of the file.
        trust: Whether to skip the check that the end of the file is readable, which requires a
            search in FLAC files.

    Raises:
        Unreadable: The file contains no audio.
    """
    with open(path, "rb") as content:
        head = content.read(16)
    if not head:
        raise Unreadable("empty file")
    audio: SoundFile | AudioTrack
    try:
        file = SoundFile(path)
        if trust or file.is_complete():
            audio = file
        else:  # FFmpeg reads more of a truncated file than libsndfile
            file.close()
            audio = _open_track(path, head, "its end is missing", is_incomplete=True)
    except soundfile.LibsndfileError as error:
        audio = _open_track(path, head, str(error))
    if not audio.duration:
        audio.close()
        raise Unreadable("no sound", "the file has a header but no samples")
    return audio


def _open_track(path: str, head: bytes, detail: str, is_incomplete: bool = False) -> AudioTrack:
    try:
        container = av.open(path)
    except av.FFmpegError:
        raise Unreadable("corrupted audio" if is_audio(head) else "not audio", detail) from None
    if (stream := audio_stream(container)) is None:
        reason = "no audio track" if container.streams.video else "not audio"
        container.close()
        raise Unreadable(reason)
    try:
        zero = (container.start_time or 0) / av.time_base
        return AudioTrack(container, stream, zero, is_incomplete or is_truncated(path))
    except (av.FFmpegError, ValueError) as error:
        container.close()
        raise Unreadable("corrupted audio", str(error)) from None


def audio_stream(container: av.container.InputContainer) -> av.AudioStream | None:
    """Returns the audio stream that FFmpeg selects by default, or None."""
    stream = container.streams.best("audio")
    return stream if isinstance(stream, av.AudioStream) else None


def time_base(stream: av.stream.Stream) -> Fraction:
    """Returns the unit of the timestamps of a stream, in seconds.

    Raises:
        ValueError: The stream has no time base.
    """
    if stream.time_base is None:
        raise ValueError("the stream has no time base")
    return stream.time_base


def is_audio(head: bytes) -> bool:
    """Returns whether a file begins with the signature of an audio format."""
    return head.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3")) or head[4:8] == b"ftyp"


def describe(path: str) -> dict[str, Any]:
    """Returns `duration` in seconds, `sample_rate` and `channels` of a file.

    Files that are shorter than their header specifies also have `truncated`, True.
    """
    audio = open_audio(path)
    info = _info(audio)
    audio.close()
    return info


def _info(audio: SoundFile | AudioTrack) -> dict[str, Any]:
    info = {name: getattr(audio, name) for name in ("duration", "sample_rate", "channels")}
    return {**info, "truncated": True} if audio.is_truncated else info


def read_windows(
    path: str, windows: Sequence[tuple[float, float | None]], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields one result per window of a file.

    Args:
        path: Path of the file.
        windows: (start, end) of each window in seconds; None: the end of the file.
        settings: `sample_rate` of the result in Hz; `border_shift`, see `shift_to_pauses`.

    Yields:
        `samples` (n,) float32, the mean of the channels; `audio_start`, the time of the first
        sample in seconds; `info`, the result of `describe`.
    """
    audio, is_trusted = open_audio(path, trust=True), True
    info = _info(audio)
    for window_start, window_end in windows:
        end = audio.duration if window_end is None else window_end
        start, end = shift_to_pauses(audio, window_start, end, settings)
        audio_start, samples = read_samples(audio, start, end, settings["sample_rate"])
        missing = min(end, audio.duration) - start - len(samples) / settings["sample_rate"]
        if is_trusted and missing > GAP_SECONDS:
            audio.close()
            audio, is_trusted = open_audio(path), False
            info, end = _info(audio), min(end, audio.duration)
            audio_start, samples = read_samples(audio, start, end, settings["sample_rate"])
        if len(samples):
            yield {"samples": samples, "audio_start": audio_start, "info": info}
        else:
            yield Unreadable("nothing in this window", f"no audio from {start:g} s to {end:g} s")
    audio.close()


def shift_to_pauses(
    audio: SoundFile | AudioTrack, start: float, end: float, settings: dict[str, Any]
) -> tuple[float, float]:
    """Moves the borders of a window to pauses, so that few sentences are divided.

    A border depends only on the audio around it, so adjacent windows agree. The beginning and the
    end of the file are unchanged.

    Args:
        audio: The audio.
        start: Start of the window, in seconds.
        end: End of the window, in seconds.
        settings: `sample_rate` in Hz; `border_shift`, the maximum displacement of a border in
            seconds.

    Returns:
        The new start and end, in seconds.
    """
    if not (max_shift := settings.get("border_shift", 0.0)):
        return start, end
    rate = settings["sample_rate"]
    is_last = end > audio.duration - PAUSE_SECONDS
    return (
        _nearest_pause(audio, start, max_shift, rate) if start > 0 else start,
        end if is_last else _nearest_pause(audio, end, max_shift, rate),
    )


def _nearest_pause(
    audio: SoundFile | AudioTrack, border: float, max_shift: float, rate: int
) -> float:
    """Returns the time of the nearest pause, or `border` if it is negligibly close.

    Pauses are as quiet as the quietest time within `max_shift` seconds of the border.
    """
    first, samples = read_samples(audio, max(0.0, border - max_shift), border + max_shift, rate)
    step = rate // LOUDNESS_RATE
    power = np.square(samples[: len(samples) // step * step].reshape(-1, step)).mean(axis=1)
    width = round(PAUSE_SECONDS * LOUDNESS_RATE)
    if len(power) < width:
        return border
    power = np.convolve(power, np.full(width, 1 / width), mode="valid")
    quiet = np.flatnonzero(power <= max(QUIET_FACTOR * power.min(), SILENCE))
    times = first + (quiet + width / 2) * step / rate
    nearest = float(times[np.abs(times - border).argmin()])
    return border if abs(nearest - border) < 2 / LOUDNESS_RATE else nearest


def read_samples(
    audio: SoundFile | AudioTrack, start: float, end: float, sample_rate: int
) -> tuple[float, np.ndarray]:
    """Returns the audio of a window, with only the result and one block in memory.

    Args:
        audio: The audio.
        start: Start of the window, in seconds.
        end: End of the window, in seconds.
        sample_rate: Sample rate of the result, in Hz.

    Returns:
        Time of the first sample in seconds, and the samples (n,) float32.
    """
    blocks = audio.blocks(max(0.0, start - MARGIN_SECONDS), end + MARGIN_SECONDS)
    first = next(blocks, None)
    if first is None:
        return start, np.zeros(0, np.float32)
    block_time = first[0]
    skip = max(0, round((start - block_time) * sample_rate))
    stop = max(0, round((end - block_time) * sample_rate))
    chunks: list[np.ndarray] = []
    position = 0
    mono = (_mono(block) for _, block in itertools.chain([first], blocks))
    for piece in _resample(mono, audio.sample_rate, sample_rate):
        inside = piece[max(0, skip - position) : max(0, stop - position)]
        if len(inside):
            chunks.append(inside)
        position += len(piece)
        if position >= stop:
            break
    samples = np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
    return block_time + skip / sample_rate, samples


def _mono(block: np.ndarray) -> np.ndarray:
    """Returns the mean of the channels, as a matrix product, which is faster than `mean`."""
    channels = block.shape[1]
    return block[:, 0] if channels == 1 else block @ np.full(channels, 1 / channels, np.float32)


def _resample(blocks: Iterator[np.ndarray], source_rate: int, rate: int) -> Iterator[np.ndarray]:
    """Yields the audio at another sample rate, in blocks of varying size."""
    if source_rate == rate:
        yield from blocks
        return
    stream = soxr.ResampleStream(source_rate, rate, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)

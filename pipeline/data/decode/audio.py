"""Reader that decodes the audio of a file to a single channel, one window at a time."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
import soxr

from pipeline.data.decode import Unreadable
from pipeline.data.decode.truncation import has_length_tag, is_truncated

#: Maximum number of audio frames that are in memory during resampling.
BLOCK = 1 << 16
#: Additional audio on both sides of a window. It covers the support of the resampling filter.
MARGIN_SECONDS = 0.05
#: Decoding of compressed audio begins this long before a window, because the first packets that a
#: decoder returns are distorted.
WARM_UP_SECONDS = 0.25
#: Timestamps of packets are rounded. Gaps are filled with silence only if they are longer than
#: this.
GAP_SECONDS = 0.05
#: libsndfile's names of formats whose packets are counted, because their headers are often wrong.
COUNTED_FORMATS = ("FLAC", "MP3", "OGG")
#: Maximum duration of the delay and the padding of an encoder, which are packets but not audio.
PADDING_SECONDS = 0.5
#: libsndfile returns more frames than this if their number is unknown.
UNKNOWN_FRAMES = 1 << 62
#: Pattern of the first bytes of a file in formats whose files can be joined, by the first four.
FIRST_BYTES = {
    b"OggS": re.compile(rb"OggS\0\x02"),
    b"fLaC": re.compile(rb"fLaC\0\0\0\x22"),
    b"RIFF": re.compile(rb"RIFF.{4}WAVE", re.DOTALL),
}
#: Maximum magnitude of a sample, that of 32-bit integers which were not scaled. Samples that exceed
#: it or are not finite become 0, because resampling would spread them over their surroundings.
MAX_AMPLITUDE = 2.0**31
#: A channel is inverted if its correlation with another one is below this value, because the mean
#: would cancel both. It is decided every `MIX_SECONDS` if at least `MIN_MIX_SECONDS` are left.
OPPOSITE, MIX_SECONDS, MIN_MIX_SECONDS = -0.7, 2.0, 0.5
#: Duration over which the loudness is averaged to detect pauses. Pauses between sentences are
#: longer.
PAUSE_SECONDS = 0.4
#: Number of loudness measurements per second.
LOUDNESS_RATE = 100
#: Times whose power is at most twice (3 dB) that of the quietest time are considered equally quiet.
#: The same holds for digital silence.
QUIET_FACTOR, SILENCE = 2.0, (1.5 / 32768) ** 2

#: Time of the first sample in seconds, the samples (n, channels), and their rate in Hz.
Block = tuple[float, np.ndarray, int]


class SoundFile:
    """Audio file that is read by libsndfile, in WAV, FLAC, Ogg or MP3 format.

    The duration is that in the header, or 0 if it is unknown.
    """

    def __init__(self, file: str | io.RawIOBase, is_truncated: bool = False):
        self._file = soundfile.SoundFile(file)
        self.format: str = self._file.format
        self.sample_rate, self.channels = self._file.samplerate, self._file.channels
        is_unknown = self._file.frames > UNKNOWN_FRAMES
        self.duration = 0.0 if is_unknown else self._file.frames / self.sample_rate
        self.is_truncated = is_truncated

    def is_complete(self) -> bool:
        """Checks whether the last frame that the header declares can be read."""
        try:
            self._file.seek(max(self._file.frames - 1, 0))
            return len(self._file.read(1)) == min(self._file.frames, 1)
        except soundfile.LibsndfileError:
            return False

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """Yields the readable audio between two times, which are given in seconds."""
        position = max(0, math.floor(start * self.sample_rate))
        stop = min(self._file.frames, end * self.sample_rate)
        try:
            self._file.seek(min(position, self._file.frames))
            while position < stop:
                block = self._file.read(BLOCK, dtype="float32", always_2d=True)
                if not len(block):
                    return
                yield position / self.sample_rate, block, self.sample_rate
                position += len(block)
        except soundfile.LibsndfileError:
            return

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class JoinedFiles:
    """Ogg, FLAC or WAV files that follow each other in one file."""

    is_truncated = False

    def __init__(self, path: str, starts: Sequence[int]):
        self._stream = io.FileIO(path)
        borders = itertools.pairwise([*starts, self._stream.seek(0, io.SEEK_END)])
        self._files = [_open_part(_FilePart(self._stream, *part)) for part in borders]
        self.sample_rate, self.channels = self._files[0].sample_rate, self._files[0].channels
        durations = [file.duration for file in self._files]
        *self._starts, self.duration = itertools.accumulate(durations, initial=0.0)

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """Yields the readable audio between two times, which are given in seconds."""
        for zero, file in zip(self._starts, self._files, strict=True):
            for time, block, rate in file.blocks(start - zero, end - zero):
                yield zero + time, block, rate

    def close(self) -> None:
        """Closes the file."""
        for file in self._files:
            file.close()
        self._stream.close()


class _FilePart(io.RawIOBase):
    def __init__(self, stream: io.RawIOBase, start: int, end: int):
        self._stream, self._start, self._size, self._position = stream, start, end - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._position)
        view = memoryview(buffer)[: max(0, self._size - self._position)]
        num_read = self._stream.readinto(view) or 0
        self._position += num_read
        return num_read


class AudioTrack:
    """Audio track that is read by FFmpeg, for example AAC or Opus, or the audio of a video.

    decord can read audio tracks as well, but it decodes the entire track when a file is opened: 30
    minutes of stereo need 460 MB at 16 kHz and 1.2 GB at 44.1 kHz, compared to 17 MB with this
    class. In addition, decord downmixes stereo to 0.7 times the sum of the channels instead of
    their mean.
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
        stream.codec_context.thread_count = 1  # decoding processes run in parallel
        self.sample_rate, self.channels = stream.codec_context.rate, stream.codec_context.channels
        self.duration = self._end()

    def _end(self) -> float:
        """Returns the end of the last packet, in seconds."""
        for target in (1 << 62, None):  # read only the end if the file is seekable
            end = 0.0
            try:
                self._seek(target)
                for packet in self._container.demux(self._stream):
                    if packet.pts is not None:
                        stop = (packet.pts + (packet.duration or 0)) * packet.time_base
                        end = max(end, float(stop) - self._zero)
            except av.FFmpegError:
                pass  # use the packets before the error
            if end:
                return end
        return 0.0

    def _seek(self, target: int | None) -> None:
        """Seeks to a timestamp or to the packet before it; None is the beginning of the file."""
        stream = self._stream
        if target is None:
            # The first packets only initialise the decoder. They have earlier timestamps.
            first = stream.start_time or 0
            try:
                self._container.seek(first - int(1 / time_base(stream)), stream=stream)
                return
            except av.FFmpegError:  # MP3 has no such packets
                target = first
        self._container.seek(target, stream=stream, backward=True)

    def blocks(self, start: float, end: float) -> Iterator[Block]:
        """Yields the decodable audio between two times in seconds. Gaps become silence."""
        unit = time_base(self._stream)
        first = start - WARM_UP_SECONDS
        try:
            self._seek(int((first + self._zero) / unit) if first > 0 else None)
        except av.FFmpegError:
            return
        expected: float | None = None
        shape: tuple[Any, ...] = ()
        for frame in self._frames():
            time = expected or 0.0 if frame.pts is None else float(frame.pts * unit) - self._zero
            if time >= end:
                return
            frame.pts = None
            rate = frame.sample_rate
            if shape != (shape := (rate, frame.layout.name, frame.format.name)):
                to_float = av.AudioResampler(format="flt")  # joined files may differ
            for converted in to_float.resample(frame):
                block = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
                seconds = len(block) / rate
                if time + seconds > start:
                    if expected is not None and time - expected > GAP_SECONDS:
                        missing = round((min(time, end) - expected) * rate)
                        yield expected, np.zeros((missing, block.shape[1]), np.float32), rate
                    yield time, block, rate
                    expected = time + seconds
                time += seconds

    def _frames(self) -> Iterator[av.AudioFrame]:
        """Yields the frames from the current position to the end. Corrupted packets are skipped."""
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


Audio = SoundFile | JoinedFiles | AudioTrack


def open_audio(path: str) -> Audio:
    """Opens a file that contains audio. The format is detected from the content of the file.

    The length in the header is not trusted: recorders and pipes do not write it, and joined files
    have several headers.

    Raises:
        Unreadable: The file contains no audio.
    """
    with open(path, "rb") as content:
        head = content.read(16)
    if not head:
        raise Unreadable("empty file")
    audio: Audio | None = None
    detail, is_incomplete, states_length = "the length in its header is wrong", False, True
    try:
        with contextlib.closing(SoundFile(path)) as file:
            if states_length := file.duration > 0:
                is_incomplete = not file.is_complete()
            is_correct = states_length and not is_incomplete and not _is_longer(file, path)
        if is_correct:  # opened again, because the samples of MP3 files depend on earlier seeks
            audio = SoundFile(path, is_truncated(path))
    except soundfile.LibsndfileError as error:
        detail = str(error)
    audio = audio or _open_joined(path, head)
    if audio is None:
        # Without a length, the samples extend to the end of the file.
        options = {} if states_length else {"ignore_length": "1"}
        audio = _open_track(path, head, detail, options)
        audio.is_truncated |= is_incomplete and has_length_tag(path)
    if not audio.duration:
        audio.close()
        raise Unreadable("no sound", "the file has a header but no samples")
    return audio


def _is_longer(file: SoundFile, path: str) -> bool:
    """Checks whether a file has more packets than its header declares."""
    if file.format not in COUNTED_FORMATS:
        return False
    num_ticks, unit = 0, Fraction(0)
    with contextlib.suppress(av.FFmpegError, ValueError), av.open(path) as container:
        if stream := audio_stream(container):
            unit = time_base(stream)
            for packet in container.demux(stream):
                num_ticks += packet.duration or 0
    return num_ticks * unit > file.duration + PADDING_SECONDS


def _open_joined(path: str, head: bytes) -> JoinedFiles | None:
    """Opens a file that consists of several files, or returns None for other files."""
    if (pattern := FIRST_BYTES.get(head[:4])) is None:
        return None
    with contextlib.suppress(OSError, ValueError, av.FFmpegError, soundfile.LibsndfileError):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            starts = [match.start() for match in pattern.finditer(data)]
        if len(starts) > 1 and (joined := JoinedFiles(path, starts)).duration:
            return joined
    return None


def _open_part(part: _FilePart) -> SoundFile | AudioTrack:
    """Opens one of several joined files. FFmpeg reads those with a wrong length in their header."""
    file = SoundFile(part)
    if file.duration and file.is_complete():
        return file
    part.seek(0)
    container = av.open(part, "r")
    if (stream := audio_stream(container)) is None:
        raise ValueError("a joined file contains no audio")
    return AudioTrack(container, stream)


def _open_track(path: str, head: bytes, detail: str, options: dict[str, str]) -> AudioTrack:
    try:
        container = av.open(path, options=options)
    except av.FFmpegError:
        raise Unreadable("corrupted audio" if is_audio(head) else "not audio", detail) from None
    if (stream := audio_stream(container)) is None:
        reason = "no audio track" if container.streams.video else "not audio"
        container.close()
        raise Unreadable(reason)
    try:
        zero = (container.start_time or 0) / av.time_base
        return AudioTrack(container, stream, zero, is_truncated(path))
    except (av.FFmpegError, ValueError) as error:
        container.close()
        raise Unreadable("corrupted audio", str(error)) from None


def audio_stream(container: av.container.InputContainer) -> av.AudioStream | None:
    """Returns the audio stream that FFmpeg selects by default, or None if there is none."""
    stream = container.streams.best("audio")
    return stream if isinstance(stream, av.AudioStream) else None


def time_base(stream: av.stream.Stream) -> Fraction:
    """Returns the unit of the timestamps of a stream in seconds."""
    if stream.time_base is None:
        raise ValueError("the stream has no time base")
    return stream.time_base


def is_audio(head: bytes) -> bool:
    """Checks whether the first bytes of a file are the signature of an audio format."""
    return head.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3")) or head[4:8] == b"ftyp"


def describe(path: str) -> dict[str, Any]:
    """Returns the `duration` in seconds, the `sample_rate` and the number of `channels` of a file.

    If the file is shorter than its header specifies, the result also contains `truncated: True`.
    """
    audio = open_audio(path)
    info = _info(audio)
    audio.close()
    return info


def _info(audio: Audio) -> dict[str, Any]:
    info = {name: getattr(audio, name) for name in ("duration", "sample_rate", "channels")}
    return {**info, "truncated": True} if audio.is_truncated else info


def read_windows(
    path: str, windows: Sequence[tuple[float, float | None]], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Decodes windows of a file and yields one result per window.

    `settings` has the `sample_rate` of the result in Hz, and `border_shift`, see `shift_to_pauses`.

    Yields:
        Mappings with `samples` (n,) float32, the mean over the channels after opposite channels are
        inverted; `audio_start`, the time of the first sample in seconds; and `info`, the result of
        `describe`.
    """
    audio = open_audio(path)
    info = _info(audio)
    for window_start, window_end in windows:
        end = audio.duration if window_end is None else window_end
        start, end = shift_to_pauses(audio, window_start, end, settings)
        audio_start, samples = read_samples(audio, start, end, settings["sample_rate"])
        if len(samples):
            yield {"samples": samples, "audio_start": audio_start, "info": info}
        else:
            yield Unreadable("nothing in this window", f"no audio from {start:g} s to {end:g} s")
    audio.close()


def shift_to_pauses(
    audio: Audio, start: float, end: float, settings: dict[str, Any]
) -> tuple[float, float]:
    """Moves the borders of a window to pauses, so that sentences are rarely split.

    The position of a border depends only on the audio around it. Adjacent windows therefore choose
    the same position for a shared border. The beginning and the end of the file are not moved.

    `settings` has the `sample_rate` in Hz, and `border_shift`, the maximum displacement of a border
    in seconds.
    """
    if not (max_shift := settings.get("border_shift", 0.0)):
        return start, end
    rate = settings["sample_rate"]
    is_last = end > audio.duration - PAUSE_SECONDS
    return (
        _nearest_pause(audio, start, max_shift, rate) if start > 0 else start,
        end if is_last else _nearest_pause(audio, end, max_shift, rate),
    )


def _nearest_pause(audio: Audio, border: float, max_shift: float, rate: int) -> float:
    """Finds the time that is as quiet as the quietest within `max_shift` seconds of `border`.

    The nearest of several such times is returned, and a border that is practically in a pause
    unchanged.
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
    audio: Audio, start: float, end: float, sample_rate: int
) -> tuple[float, np.ndarray]:
    """Returns the time of the first sample of a window in seconds, and its samples (n,) float32.

    Only the result and one block of audio are in memory at any time.
    """
    blocks = audio.blocks(max(0.0, start - MARGIN_SECONDS), end + MARGIN_SECONDS)
    first = next(blocks, None)
    if first is None:
        return start, np.zeros(0, np.float32)
    block_time, blocks = first[0], itertools.chain([first], blocks)
    skip = max(0, round((start - block_time) * sample_rate))
    stop = max(0, round((end - block_time) * sample_rate))
    chunks: list[np.ndarray] = []
    position = 0
    for piece in _resample(blocks, block_time, sample_rate):
        inside = piece[max(0, skip - position) : max(0, stop - position)]
        if len(inside):
            chunks.append(inside)
        position += len(piece)
        if position >= stop:
            break
    samples = np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
    return block_time + skip / sample_rate, samples


def _mono(blocks: Iterator[Block], start: float) -> Iterator[np.ndarray]:
    """Yields the mean of the channels of each block, with opposite channels inverted (`_signs`)."""
    signs = np.ones(0, np.float32)
    sections = itertools.groupby(
        blocks, lambda block: (block[1].shape[1], block[2], int((block[0] - start) / MIX_SECONDS))
    )
    for (channels, rate, _), section in sections:
        samples = (_finite(samples) for _, samples, _ in section)
        if channels == 1:
            yield from (block[:, 0] for block in samples)
            continue
        held = list(samples)
        if len(signs) != channels or sum(map(len, held)) >= MIN_MIX_SECONDS * rate:
            signs = _signs(np.concatenate(held))
        weights = signs * np.float32(1 / channels)
        yield from (block @ weights for block in held)  # faster than `np.mean`


def _finite(samples: np.ndarray) -> np.ndarray:
    """Replaces samples that are not finite or exceed `MAX_AMPLITUDE` by 0."""
    if np.abs(samples).max(initial=0.0) <= MAX_AMPLITUDE:  # False for NaN
        return samples
    return np.where(np.abs(samples) <= MAX_AMPLITUDE, samples, np.float32(0))


def _signs(samples: np.ndarray) -> np.ndarray:
    """Returns -1 for channels that are nearly the negative of an earlier channel, and 1 for others.

    >>> left = np.sin(np.arange(1000, dtype=np.float32))
    >>> [_signs(np.stack([left, right], 1)).tolist() for right in (left, -left, 0 * left)]
    [[1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN for a silent channel
        correlation = np.corrcoef(samples, rowvar=False, dtype=np.float32)
    signs = np.ones(len(correlation), np.float32)
    for channel in range(1, len(signs)):
        opposite = np.flatnonzero(correlation[channel, :channel] < OPPOSITE)
        if len(opposite):
            signs[channel] = -signs[opposite[0]]
    return signs


def _resample(blocks: Iterator[Block], start: float, rate: int) -> Iterator[np.ndarray]:
    """Yields the mean of the channels at another sample rate. The blocks vary in size."""
    for source_rate, group in itertools.groupby(blocks, key=lambda block: block[2]):
        mono = _mono(group, start)
        if source_rate == rate:
            yield from mono
            continue
        stream = soxr.ResampleStream(source_rate, rate, 1, dtype="float32")
        for samples in mono:
            yield stream.resample_chunk(samples)
        yield stream.resample_chunk(np.zeros(0, np.float32), last=True)

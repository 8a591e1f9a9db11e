"""Synthetic video and audio: each frame encodes its index, each second has a different tone."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import soundfile

#: Number of light and dark blocks that encode the index of a frame.
BITS = 12
#: Time base of frame timestamps, in ticks per second.
TICKS = 30_000
#: Elements a, b, c, d of the display matrix by clockwise rotation in degrees.
MATRICES = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def picture(number: int, width: int = 192, height: int = 108) -> np.ndarray:
    """Returns a frame (H, W, 3): bits of the number above a red and a grey half."""
    pixels = np.full((height, width, 3), 60, np.uint8)
    for bit in range(BITS):
        left, right = bit * width // BITS, (bit + 1) * width // BITS
        pixels[: height // 2, left:right] = 220 if number >> bit & 1 else 20
    pixels[height // 2 :, : width // 2] = (200, 30, 30)
    return pixels


def number_of(pixels: np.ndarray) -> int:
    """Decodes the index of a frame."""
    height, width, _ = pixels.shape
    columns = [(2 * bit + 1) * width // (2 * BITS) for bit in range(BITS)]
    return sum((int(pixels[height // 4, x].mean()) > 120) << bit for bit, x in enumerate(columns))


def numbers_of(pixels: np.ndarray) -> list[int]:
    """Decodes the indices of frames (F, H, W, 3)."""
    return [number_of(frame) for frame in pixels]


def tones(seconds: float, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """Returns audio (n, channels) with a different tone each second, equal in all channels."""
    time = np.arange(round(seconds * rate)) / rate
    wave = 0.5 * np.sin(2 * np.pi * tone_of(time) * (time % 1.0))
    return np.repeat(wave.astype(np.float32)[:, None], channels, axis=1)


def tone_of(seconds: np.ndarray | float) -> np.ndarray:
    """Returns the frequency of the tone at a time, in Hz; tones repeat after 20 seconds."""
    return 300.0 + 100.0 * (np.floor(seconds) % 20)


def heard(samples: np.ndarray, rate: int) -> float:
    """Returns the dominant frequency of audio samples, in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


def write_video(
    path: Path,
    times: Iterable[float],
    *,
    size: tuple[int, int] = (192, 108),
    frames: Iterable[np.ndarray] | None = None,
    codec: str = "libx264",
    keyframe_every: int = 12,
    rotation: int = 0,
    sound: np.ndarray | None = None,
    rate: int = 16_000,
    sound_codec: str = "aac",
    sound_start: float = 0.0,
    options: dict[str, str] | None = None,
) -> Path:
    """Writes a video; the suffix of the path determines the container.

    Args:
        path: Path of the file.
        times: Timestamps of the frames, in seconds; empty for audio only.
        size: Width and height, in pixels.
        frames: Frames (H, W, 3); by default frames that encode their index.
        codec: Video codec.
        keyframe_every: Number of frames per keyframe.
        rotation: Clockwise rotation in the metadata, in degrees.
        sound: Audio samples (n, channels).
        rate: Sampling rate, in Hz.
        sound_codec: Audio codec.
        sound_start: Timestamp of the first sample, in seconds.
        options: Options of the container.
    """
    times = list(times)
    with av.open(str(path), "w", options=options or {}) as container:
        video = audio = None
        if times:
            settings = {"g": str(keyframe_every), "bf": "2", "preset": "ultrafast"}
            settings = settings if codec == "libx264" else {}
            video = container.add_stream(codec, rate=30, options=settings)
            video.width, video.height = size
            video.pix_fmt = "yuv420p"
            video.time_base = video.codec_context.time_base = Fraction(1, TICKS)
        if sound is not None:
            layout = {1: "mono", 2: "stereo"}[sound.shape[1]]
            audio = container.add_stream(sound_codec, rate=rate, layout=layout)
        if video:
            shown = frames or (picture(number, *size) for number in range(len(times)))
            for time, pixels in zip(times, shown, strict=True):
                frame = av.VideoFrame.from_ndarray(pixels)
                frame.pts, frame.time_base = round(time * TICKS), Fraction(1, TICKS)
                container.mux(video.encode(frame))
            container.mux(video.encode())
        if audio:
            for first in range(0, len(sound), 1024):
                block = np.ascontiguousarray(sound[first : first + 1024].T)
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
                frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
                frame.pts = first + round(sound_start * rate)
                container.mux(audio.encode(frame))
            container.mux(audio.encode())
    if rotation:
        turn(path, rotation)
    return path


def turn(path: Path, rotation: int) -> None:
    """Sets the clockwise rotation in the metadata of an MP4 or MOV file."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44  # display matrix of the first track
    a, b, c, d = (value << 16 for value in MATRICES[rotation])
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


def hide_beginning(path: Path, seconds: float) -> None:
    """Sets an edit list that hides the first seconds of an MP4 file, like the trim of a phone."""
    data = bytearray(path.read_bytes())
    at = data.index(b"elst") + 12  # duration and start of the first entry
    length, begin = struct.unpack(">Ii", data[at : at + 8])
    with av.open(str(path)) as container:
        ticks = round(seconds / container.streams.video[0].time_base)
    entry = struct.pack(">Ii", length - round(1000 * seconds), begin + ticks)
    data[at : at + 8] = entry
    path.write_bytes(data)


def spoil(path: Path) -> None:
    """Overwrites the video packets of an MP4 file without changing its structure."""
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        for packet in container.demux(video=0):
            if packet.size:
                data[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    path.write_bytes(data)


def every(seconds: float, fps: float) -> list[float]:
    """Returns the timestamps of frames at a constant rate."""
    return [number / fps for number in range(round(seconds * fps))]


def write_sound(path: Path, sound: np.ndarray, rate: int = 16_000) -> Path:
    """Writes an audio file in the format of its suffix."""
    soundfile.write(path, sound, rate)
    return path


def tar(members: Sequence[tuple[str, bytes]]) -> bytes:
    """Returns a TAR archive of the given files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()

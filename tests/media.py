"""Videos and audio for tests: each frame encodes its number, and each second has its own tone."""

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

#: Number of bits of a frame number, drawn as light and dark blocks.
BITS = 12
#: Resolution of frame times, in ticks per second.
TICKS = 30_000
#: Coefficients a, b, c, d of the display matrix for each clockwise rotation in degrees.
MATRICES = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def numbered_image(number: int, width: int = 192, height: int = 108) -> np.ndarray:
    """Returns an image (H, W, 3) with the bits of a number above a red and a grey half."""
    pixels = np.full((height, width, 3), 60, np.uint8)
    for bit in range(BITS):
        left, right = bit * width // BITS, (bit + 1) * width // BITS
        pixels[: height // 2, left:right] = 220 if number >> bit & 1 else 20
    pixels[height // 2 :, : width // 2] = (200, 30, 30)
    return pixels


def read_number(pixels: np.ndarray) -> int:
    """Returns the number that a frame encodes."""
    height, width, _ = pixels.shape
    columns = [(2 * bit + 1) * width // (2 * BITS) for bit in range(BITS)]
    return sum((int(pixels[height // 4, x].mean()) > 120) << bit for bit, x in enumerate(columns))


def read_numbers(pixels: np.ndarray) -> list[int]:
    """Returns the numbers that frames (F, H, W, 3) encode."""
    return [read_number(frame) for frame in pixels]


def tones(seconds: float, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """Returns audio (n, channels) with a different tone each second, equal in all channels."""
    time = np.arange(round(seconds * rate)) / rate
    wave = 0.5 * np.sin(2 * np.pi * tone_at(time) * (time % 1.0))
    return np.repeat(wave.astype(np.float32)[:, None], channels, axis=1)


def tone_at(seconds: np.ndarray | float) -> np.ndarray:
    """Returns the frequency at a time, in Hz; it repeats after 20 seconds."""
    return 300.0 + 100.0 * (np.floor(seconds) % 20)


def frequency(samples: np.ndarray, rate: int) -> float:
    """Returns the dominant frequency of audio, in Hz."""
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
    mirrored: bool = False,
    pixel_ratio: Fraction = Fraction(1),
    audio: np.ndarray | None = None,
    rate: int = 16_000,
    audio_codec: str = "aac",
    audio_start: float = 0.0,
    options: dict[str, str] | None = None,
) -> Path:
    """Writes a video in the container format of the suffix.

    Args:
        path: Path of the file.
        times: Start of each frame, in seconds; empty: audio only.
        size: Width and height of the frames.
        frames: Frames; default: frames that encode their numbers.
        codec: Video codec.
        keyframe_every: Number of frames per keyframe.
        rotation: Clockwise rotation for display, in degrees.
        mirrored: Whether frames are mirrored horizontally before the rotation.
        pixel_ratio: Ratio of the width to the height of a pixel.
        audio: Samples (n, channels).
        rate: Sample rate of the audio, in Hz.
        audio_codec: Audio codec.
        audio_start: Start of the audio, in seconds.
        options: Options of the container.
    """
    times = list(times)
    with av.open(str(path), "w", options=options or {}) as container:
        video_stream = audio_stream = None
        if times:
            settings = {"g": str(keyframe_every), "bf": "2", "preset": "ultrafast"}
            settings = settings if codec == "libx264" else {}
            video_stream = container.add_stream(codec, rate=30, options=settings)
            video_stream.width, video_stream.height = size
            video_stream.pix_fmt = "yuv420p"
            video_stream.codec_context.sample_aspect_ratio = pixel_ratio
            video_stream.time_base = video_stream.codec_context.time_base = Fraction(1, TICKS)
        if audio is not None:
            layout = {1: "mono", 2: "stereo", 6: "5.1"}[audio.shape[1]]
            audio_stream = container.add_stream(audio_codec, rate=rate, layout=layout)
        if video_stream:
            frames = frames or (numbered_image(number, *size) for number in range(len(times)))
            for time, pixels in zip(times, frames, strict=True):
                frame = av.VideoFrame.from_ndarray(pixels)
                frame.pts, frame.time_base = round(time * TICKS), Fraction(1, TICKS)
                container.mux(video_stream.encode(frame))
            container.mux(video_stream.encode())
        if audio_stream:
            for first in range(0, len(audio), 1024):
                block = np.ascontiguousarray(audio[first : first + 1024].T)
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
                frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
                frame.pts = first + round(audio_start * rate)
                container.mux(audio_stream.encode(frame))
            container.mux(audio_stream.encode())
    if rotation or mirrored:
        set_orientation(path, rotation, mirrored)
    return path


def set_orientation(path: Path, rotation: int, mirrored: bool = False) -> None:
    """Sets the display matrix of an MP4 or MOV file."""
    data = bytearray(path.read_bytes())
    offset = data.index(b"tkhd") + 44  # offset of the matrix of the first track
    a, b, c, d = (value << 16 for value in MATRICES[rotation])
    a, b = (-a, -b) if mirrored else (a, b)
    data[offset : offset + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


def hide_first_frames(path: Path, seconds: float) -> None:
    """Adds an edit list to an MP4 that hides its beginning, as phones do when trimming a clip."""
    data = bytearray(path.read_bytes())
    offset = data.index(b"elst") + 12  # duration and start of the first entry
    length, start = struct.unpack(">Ii", data[offset : offset + 8])
    with av.open(str(path)) as container:
        ticks = round(seconds / container.streams.video[0].time_base)
    entry = struct.pack(">Ii", length - round(1000 * seconds), start + ticks)
    data[offset : offset + 8] = entry
    path.write_bytes(data)


def corrupt_frames(path: Path) -> None:
    """Overwrites the video packets of an MP4, and leaves the container intact."""
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        for packet in container.demux(video=0):
            if packet.size:
                data[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    path.write_bytes(data)


def frame_times(seconds: float, fps: float) -> list[float]:
    """Returns the times of the frames of a video with a constant frame rate."""
    return [number / fps for number in range(round(seconds * fps))]


def write_audio(path: Path, samples: np.ndarray, rate: int = 16_000) -> Path:
    """Writes an audio file in the format of the suffix."""
    soundfile.write(path, samples, rate)
    return path


def make_tar(members: Sequence[tuple[str, bytes]]) -> bytes:
    """Returns a tar archive of files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()

"""Reads the frames and the audio of a video, window by window."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import av  # before decord: its codecs do not work with the libraries that decord loads
import decord
import numpy as np
from PIL import Image

from pipeline.data.decode import Unreadable
from pipeline.data.decode.audio import (
    AudioTrack,
    audio_stream,
    read_samples,
    shift_to_pauses,
    time_base,
)
from pipeline.data.decode.scenes import SceneCuts, image_difference
from pipeline.data.decode.truncation import is_truncated

#: Error of decord's frame times, which are rounded to milliseconds and stored as 32-bit floats.
ROUNDING_SECONDS = 0.0006
#: Size of the frames that are compared to detect scenes, in pixels, and their number in memory.
SCENE_FRAME_PIXELS = 128 * 72
SCENE_FRAMES_PER_BATCH = 64
#: Maximum difference of a pixel between equal frames, due to compression, and the maximum number of
#: frames that are compared to find equal ones, as a multiple of the number of selected frames.
EQUAL_DIFFERENCE, MAX_COMPARED = 3 / 255, 8
#: A file is truncated if its header specifies a duration that exceeds the readable one by this many
#: seconds.
MIN_MISSING_SECONDS = 1.0
#: Range of valid ratios of the width to the height of a pixel. Ratios that differ from 1 by less
#: than `RATIO_ROUNDING` result from rounding the size of a frame.
PIXEL_RATIOS, RATIO_ROUNDING = (0.1, 10.0), 0.01
#: FFmpeg's names of the formats whose headers specify durations.
EXACT_DURATION_FORMATS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
#: FFmpeg's names of image formats, which it opens as videos.
IMAGE_FORMATS = ("image2", "_pipe", "gif", "apng", "webp")

Size = tuple[int, int]  # width, height as displayed


class UnreadableVideo(Exception):
    """A reader cannot read the video. Another reader may."""


class DecordFrames:
    """The upright frames of a video, read by decord.

    Args:
        start: Start of the track in the file, in seconds. Decord's times are relative to it.
        size: Size to which frames are scaled. None does not scale them.
    """

    def __init__(self, path: str, start: float, size: Size | None = None):
        width, height = size or (-1, -1)
        try:
            # One thread, because processes run in parallel.
            self._reader = decord.VideoReader(path, num_threads=1, width=width, height=height)
            spans = self._reader.get_frame_timestamp(np.arange(len(self._reader)))
        except (decord.DECORDError, RuntimeError, AssertionError) as error:
            raise UnreadableVideo(_error_message(error)) from None
        if spans[0, 0] < -ROUNDING_SECONDS:
            # An edit list hides the first frames (clips trimmed on a phone). decord counts hidden
            # frames and returns wrong frames after seeking.
            raise UnreadableVideo("decord does not support hidden frames")
        spans = np.round(spans.astype(np.float64), 3) + start
        self.times: np.ndarray = spans[:, 0]
        self.end = float(max(spans[-1]))

    def read(self, indices: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Reads the frames of ascending indices. Returns the indices and pixels (F, H, W, 3) uint8.

        Raises:
            UnreadableVideo: A frame cannot be read.
        """
        try:
            return list(indices), self._reader.get_batch(list(indices)).asnumpy()
        except (decord.DECORDError, RuntimeError) as error:
            raise UnreadableVideo(_error_message(error)) from None


class FFmpegFrames:
    """The upright frames of a video, read by PyAV, which skips corrupted packets."""

    def __init__(self, path: str, start: float, size: Size | None = None):
        self._container, self._size = av.open(path), size
        stream = _video_stream(self._container)
        if stream is None:
            raise UnreadableVideo("the file contains no video track")
        self._stream = stream
        _one_thread(self._stream)
        stamps: list[tuple[int, int, bool]] = []
        try:
            for packet in self._container.demux(self._stream):
                if packet.pts is not None and not packet.is_discard:
                    stamps.append((packet.pts, packet.duration or 0, packet.is_keyframe))
        except av.FFmpegError:
            pass  # the file ends in the middle of a packet
        stamps.sort()
        self._stamps = [stamp for stamp, _, _ in stamps]
        keys = [number for number, (_, _, is_key) in enumerate(stamps) if is_key]
        self._keys = np.array(keys, np.int64)
        if not stamps:
            raise UnreadableVideo("the file contains no frame")
        unit = time_base(self._stream)
        offset = start - float((self._stream.start_time or 0) * unit)
        self.times: np.ndarray = np.array(self._stamps) * float(unit) + offset
        self.end = float(self.times[-1]) + float(stamps[-1][1] * unit)
        self._decoded_frames: Iterator[av.VideoFrame] = iter(())
        self._last_index = math.inf  # of the last decoded frame

    def read(self, indices: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Reads the frames that can be decoded, as `DecordFrames.read` does.

        Raises:
            UnreadableVideo: No frame can be decoded.
        """
        decoded, pixels = [], []
        for index in indices:
            if (frame := self._frame(index)) is not None:
                decoded.append(index)
                pixels.append(_upright(frame, self._size))
        if not decoded:
            raise UnreadableVideo("no frame can be decoded")
        return decoded, np.stack(pixels)

    def _frame(self, index: int) -> av.VideoFrame | None:
        keys = self._keys[self._keys <= index]
        if index <= self._last_index or (len(keys) and keys[-1] > self._last_index):
            stamp = self._stamps[index]
            try:
                self._container.seek(stamp, stream=self._stream, backward=True)
            except av.FFmpegError:
                self._container.seek(0)
            self._decoded_frames = _decode_frames(self._container, self._stream)
        for frame in self._decoded_frames:
            if frame.pts is None:
                continue
            self._last_index = int(np.searchsorted(self._stamps, frame.pts))
            if frame.pts >= self._stamps[index]:
                return frame if frame.pts == self._stamps[index] else None
        self._last_index = math.inf
        return None


class Video:
    """An opened video file with its frames and its audio track.

    All times are in seconds from the beginning of the file, which is that of its first track.

    Raises:
        Unreadable: The file contains neither video nor audio.
    """

    def __init__(self, path: str, max_pixels: int | None = None):
        self.path = path
        self._container = _open(path)
        self._zero = (self._container.start_time or 0) / av.time_base
        video = _video_stream(self._container)
        if video is not None and av.stream.Disposition.attached_pic in video.disposition:
            video = None  # cover art of an audio file
        self._video = video
        self._audio = audio_stream(self._container)
        if self._video is None and self._audio is None:
            self.close()
            raise Unreadable("not a video", "the file contains neither video nor audio")
        self.display_size: Size = (0, 0)
        self.rotation, self.is_mirrored = 0, False
        stored: Size = (0, 0)
        if self._video is not None:
            stored = self._read_shape(self._video)
        scaled = fit_size(self.display_size, max_pixels) if max_pixels else self.display_size
        self.size = None if scaled == stored else scaled  # None: `frames` are unscaled

    def close(self) -> None:
        """Closes the file."""
        self._container.close()

    @cached_property
    def has_video(self) -> bool:
        """True if the file has frames with known times."""
        if self._video is None:
            return False
        try:
            return len(self.frames.times) > 0
        except Unreadable:
            if self.track is None:
                raise
            return False  # its audio may be intact

    @cached_property
    def frames(self) -> DecordFrames | FFmpegFrames:
        """The frames, scaled to `size`."""
        return self.open_frames(self.size)

    def open_frames(self, size: Size | None, slow: bool = False) -> DecordFrames | FFmpegFrames:
        """Returns the frames, scaled to a size in pixels unless it is None; `slow` forces FFmpeg.

        Raises:
            Unreadable: There are no frames.
        """
        if self._video is None:
            raise Unreadable("no video track")
        start = float((self._video.start_time or 0) * time_base(self._video)) - self._zero
        if not slow and not self.is_mirrored:  # decord rotates mirrored frames instead
            try:
                return DecordFrames(self.path, start, size)
            except UnreadableVideo:
                pass
        try:
            return FFmpegFrames(self.path, start, size)
        except (UnreadableVideo, av.FFmpegError) as error:
            raise Unreadable("corrupted video", str(error)) from None

    @cached_property
    def track(self) -> AudioTrack | None:
        """The audio track, or None."""
        if self._audio is None:
            return None
        try:
            track = AudioTrack(self._container, self._audio, self._zero)
        except (av.FFmpegError, ValueError):
            return None
        return track if track.duration > 0 else None

    def _read_shape(self, video: av.VideoStream) -> Size:
        """Sets the display size and orientation. Returns the unscaled size of upright frames."""
        _one_thread(video)
        # The orientation is known after decoding a frame.
        frame = next(_decode_frames(self._container, video), None)
        video.discard = av.stream.Discard.all  # from here on, this container reads the audio
        width, height = video.codec_context.width, video.codec_context.height
        if frame is not None:
            width, height = frame.width, frame.height
            self.rotation, self.is_mirrored = _orientation(frame)
        displayed_width = max(1, round(width * _pixel_ratio(video)))
        if self.rotation % 180:
            self.display_size = height, displayed_width
            return height, width
        self.display_size = displayed_width, height
        return width, height

    @cached_property
    def info(self) -> dict[str, Any]:
        """The result of `describe`."""
        audio_duration = self.track.duration if self.track else 0.0
        info: dict[str, Any] = {"has_video": self.has_video, "has_audio": self.track is not None}
        info["audio_duration"] = round(audio_duration, 3)
        end = 0.0
        if self.has_video:
            times, end = self.frames.times, self.frames.end
            duration = end - float(times[0])
            info["width"], info["height"] = self.display_size
            info["rotation"] = self.rotation
            if self.is_mirrored:
                info["mirrored"] = True
            info["num_frames"] = len(times)
            info["fps"] = round(len(times) / duration, 3) if duration > 0 else 0.0
        if not (duration := round(max(end, audio_duration), 3)):
            raise Unreadable("corrupted video", "neither frames nor audio can be read")
        info["duration"] = duration
        header_duration = max(map(_header_duration, (self._video, self._audio)))
        if is_truncated(self.path) or header_duration - duration > MIN_MISSING_SECONDS:
            info["truncated"] = True
            if header_duration > duration:
                info["stated_duration"] = round(header_duration, 3)
        return info


def describe(path: str) -> dict[str, Any]:
    """Returns the properties of a video file.

    Returns:
        `duration` in seconds, the end of the last frame or audio packet, independent of the header;
        `has_video`, `has_audio` and `audio_duration`; for files with video, `num_frames`, the
        average `fps`, `width` and `height` as displayed, `rotation`, the clockwise rotation of the
        frames for display in degrees, and `mirrored`, True, if the frames are mirrored horizontally
        before the rotation. `truncated`, True, if the file is shorter than its header specifies,
        and `stated_duration`, the duration in the header if it is known.
    """
    with closing(Video(path)) as video:
        return video.info


def read_windows(
    path: str, windows: Sequence[tuple[float, float | None]], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields one result per window of a file.

    `settings` has `frames` and `audio`, whether to read them; `sampling` and its options, see
    `WindowReader.select_frames`; `max_pixels`, the maximum size of a frame; `sample_rate` of the
    audio in Hz; and `border_shift`, see `audio.shift_to_pauses`.

    Yields:
        `pixels` (F, H, W, 3) uint8, `indices` (F,) int32 and `seconds` (F,) float64 of the frames;
        `samples` (n,) float32 and `audio_start`, the time of the first sample in seconds; `info`,
        the result of `describe`. Arrays are empty if they are not requested or not available.
    """
    with closing(Video(path, settings["max_pixels"])) as video:
        duration = video.info["duration"]
        reader = WindowReader(video, settings) if settings["frames"] and video.has_video else None
        track = video.track if settings["audio"] else None
        if reader is None and track is None:
            reason = "no audio track" if video.has_video else "no video track"
            raise Unreadable(reason, "the file has none of the requested inputs")
        for start, stop in windows:
            end = duration if stop is None else stop
            problem = Unreadable("nothing in this window", f"from {start:g} s to {end:g} s")
            window: dict[str, Any] = {
                "pixels": np.zeros((0, 0, 0, 3), np.uint8),
                "indices": np.zeros(0, np.int32),
                "seconds": np.zeros(0),
                "samples": np.zeros(0, np.float32),
                "audio_start": start,
                "info": video.info,
            }
            if reader is not None:
                try:
                    window.update(reader.read(start, end))
                except UnreadableVideo as error:
                    problem = Unreadable("corrupted video", str(error))
            if track is not None:
                borders = shift_to_pauses(track, start, end, settings)
                window["audio_start"], window["samples"] = read_samples(
                    track, *borders, settings["sample_rate"]
                )
            is_empty = not len(window["indices"]) and not len(window["samples"])
            yield problem if is_empty else window


def read_frame(path: str, seconds: float, max_pixels: int) -> dict[str, Any]:
    """Returns the frame displayed at a time: `jpeg`, its `index` and its time `seconds`.

    Raises:
        Unreadable: The file has no frames, or the frame cannot be decoded.
    """
    with closing(Video(path, max_pixels)) as video:
        if not video.has_video:
            raise Unreadable("no video track")
        reader = WindowReader(video, {})
        try:
            frame = reader.frames([reader.frames_at(np.array([seconds]))[0]])
        except UnreadableVideo as error:
            raise Unreadable("corrupted video", str(error)) from None
        jpeg = io.BytesIO()
        Image.fromarray(frame["pixels"][0]).save(jpeg, "JPEG", quality=92)
        index, time = int(frame["indices"][0]), float(frame["seconds"][0])
        return {"jpeg": jpeg.getvalue(), "index": index, "seconds": time}


class WindowReader:
    """Selects and reads the frames of windows, with PyAV after the first error of decord."""

    def __init__(self, video: Video, settings: dict[str, Any]):
        self._video, self._settings = video, settings
        self._frames = video.frames
        self._scene_frames: DecordFrames | FFmpegFrames | None = None

    def read(self, start: float, end: float) -> dict[str, np.ndarray]:
        """Returns the selected frames of a window, see `frames`."""
        return self.frames(self.select_frames(start, end))

    def frames(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns `pixels`, `indices` and `seconds` of frames, given by ascending indices.

        Raises:
            UnreadableVideo: No frame can be decoded.
        """
        if not len(indices):
            return {}
        self._frames, (decoded, pixels) = self._read(self._frames, indices, self._video.size)
        seconds = np.round(self._frames.times[decoded], 3)
        return {"pixels": pixels, "indices": np.array(decoded, np.int32), "seconds": seconds}

    def select_frames(self, start: float, end: float) -> list[int]:
        """Returns the numbers of the selected frames of a window in ascending order.

        `uniform` selects the frames in the middle of `num_frames` equal intervals; `fps` the frames
        at intervals of 1 / fps seconds, or, if these are more than `num_frames`, an evenly spaced
        subset of those that differ from the one before; `scenes` the middle frame of each scene,
        for at most the `num_frames` longest scenes.
        """
        first, last_end = self._frames.times[0], self._frames.end
        end = min(end, max(last_end, first + ROUNDING_SECONDS))  # a frame may have no duration
        if end <= max(start, first - ROUNDING_SECONDS):
            return []
        sampling, num_frames = self._settings["sampling"], self._settings["num_frames"]
        middles = np.arange(num_frames) + 0.5
        if sampling == "uniform":
            times = start + middles * (end - start) / num_frames
        elif sampling == "fps":
            times = _times(self._settings["fps"], start, end)
            indices = np.unique(self.frames_at(times))
            if num_frames < len(indices) <= MAX_COMPARED * num_frames:
                indices = self._different(indices)
            if len(indices) > num_frames:
                indices = indices[(middles * len(indices) / num_frames).astype(int)]
            return indices.tolist()
        else:
            times = self._scenes(
                _times(self._settings["scene_detection_fps"], start, end), num_frames
            )
        return np.unique(self.frames_at(times)).tolist()

    def frames_at(self, times: np.ndarray) -> np.ndarray:
        """Returns the numbers of the frames displayed at the given times."""
        after = np.searchsorted(self._frames.times, times + ROUNDING_SECONDS, side="right")
        return (after - 1).clip(0, len(self._frames.times) - 1)

    def _different(self, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers of the frames that differ from the one before."""
        different: list[int] = []
        previous: np.ndarray | None = None
        try:
            for index, frame in self._small_frames(indices):
                if previous is None or image_difference(frame, previous).max() > EQUAL_DIFFERENCE:
                    different.append(index)
                    previous = frame
        except UnreadableVideo:  # no frame of a batch can be decoded
            return indices
        return np.array(different, np.int64)

    def _scenes(self, times: np.ndarray, max_scenes: int) -> np.ndarray:
        """Returns the middle times of the longest scenes among frames at the given times."""
        indices, index_of_time = np.unique(self.frames_at(times), return_inverse=True)
        cuts = SceneCuts(self._settings["scene_threshold"])
        decoded_times: list[float] = []
        times_by_index = {
            int(index): times[index_of_time == number].tolist()
            for number, index in enumerate(indices)
        }
        for index, frame in self._small_frames(indices):
            for time in times_by_index[index]:
                cuts.add(frame)
                decoded_times.append(time)
        scenes = [
            decoded_times[first:stop]
            for first, stop in zip(cuts.starts, [*cuts.starts[1:], len(decoded_times)], strict=True)
            if stop > first
        ]
        scenes.sort(key=len, reverse=True)  # stable: earlier scenes first among equals
        return np.array([scene[len(scene) // 2] for scene in scenes[:max_scenes]])

    def _small_frames(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the numbers and small images (H, W, 3) uint8 of the frames that can be decoded."""
        size = fit_size(self._video.display_size, SCENE_FRAME_PIXELS)
        frames = self._scene_frames or self._video.open_frames(size)
        for first in range(0, len(indices), SCENE_FRAMES_PER_BATCH):
            batch = indices[first : first + SCENE_FRAMES_PER_BATCH].tolist()
            frames, (decoded, pixels) = self._read(frames, batch, size)
            self._scene_frames = frames
            yield from zip(decoded, pixels, strict=True)

    def _read(
        self, frames: DecordFrames | FFmpegFrames, indices: Sequence[int], size: Size | None
    ) -> tuple[DecordFrames | FFmpegFrames, tuple[list[int], np.ndarray]]:
        """Reads frames, and also returns the reader to use for the next ones."""
        if isinstance(frames, DecordFrames):
            try:
                return frames, frames.read(indices)
            except UnreadableVideo:
                frames = self._video.open_frames(size, slow=True)
        return frames, frames.read(indices)


def fit_size(size: Size, max_pixels: int) -> Size:
    """Returns the largest size of at most `max_pixels` with the same aspect ratio.

    >>> fit_size((1920, 1080), 1_000_000)
    (1333, 750)
    >>> fit_size((640, 360), 1_000_000)
    (640, 360)
    """
    width, height = size
    scale = (max_pixels / max(1, width * height)) ** 0.5
    return size if scale >= 1 else (max(1, int(width * scale)), max(1, int(height * scale)))


def _times(fps: float, start: float, end: float) -> np.ndarray:
    return start + np.arange(max(1, math.ceil((end - start) * fps - 1e-6))) / fps


def _open(path: str) -> av.container.InputContainer:
    with open(path, "rb") as file:
        head = file.read(16)
    if not head:
        raise Unreadable("empty file")
    try:
        container = av.open(path)
    except (av.FFmpegError, ValueError) as error:
        is_video = head[4:8] == b"ftyp" or head.startswith((b"\x1aE\xdf\xa3", b"RIFF"))
        raise Unreadable("corrupted video" if is_video else "not a video", str(error)) from None
    if container.format.name.endswith(IMAGE_FORMATS):
        container.close()
        raise Unreadable("not a video", "the file is an image")
    return container


def _video_stream(container: av.container.InputContainer) -> av.VideoStream | None:
    """Returns the video stream that FFmpeg selects by default, or None."""
    stream = container.streams.best("video")
    return stream if isinstance(stream, av.VideoStream) else None


def _header_duration(stream: av.stream.Stream | None) -> float:
    """Returns the duration in an MP4, MOV, Matroska or WebM header, or 0.

    FFmpeg estimates the duration of other formats.
    """
    if stream is None or stream.container.format.name not in EXACT_DURATION_FORMATS:
        return 0.0
    if stream.duration is not None:
        return float(stream.duration * time_base(stream))
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if clock is None:
        return 0.0
    hours, minutes, seconds = map(float, clock.groups())
    return 3600 * hours + 60 * minutes + seconds


def _one_thread(stream: av.VideoStream) -> None:
    stream.codec_context.thread_count = 1


def _decode_frames(
    container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[av.VideoFrame]:
    """Yields the frames from the current position on, skipping corrupted packets."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:  # the file ends in the middle of a packet
            return
        if packet is None:
            return
        try:
            frames = packet.decode()
        except av.FFmpegError:
            continue
        yield from frames


def _upright(frame: av.VideoFrame, size: Size | None) -> np.ndarray:
    """Returns the pixels (H, W, 3) RGB of a frame as displayed."""
    rotation, is_mirrored = _orientation(frame)
    if size is not None:
        width, height = size[::-1] if rotation % 180 else size
        frame = frame.reformat(width=width, height=height, format="rgb24")
    pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels[:, ::-1] if is_mirrored else pixels, -rotation // 90)


def _orientation(frame: av.VideoFrame) -> tuple[int, bool]:
    """Returns the clockwise rotation in degrees for display, and whether to mirror before it."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()  # type: ignore[call-overload]
    if is_mirrored := a * d - b * c < 0:
        a, b = -a, -b
    return round(math.degrees(math.atan2(b, a)) / 90) * 90 % 360, is_mirrored


def _pixel_ratio(video: av.VideoStream) -> float:
    """Returns the ratio of the width to the height of a displayed pixel, or 1 if it is invalid."""
    ratio = float(video.sample_aspect_ratio or 1)
    is_valid = PIXEL_RATIOS[0] <= ratio <= PIXEL_RATIOS[1]
    return ratio if is_valid and abs(ratio - 1) > RATIO_ROUNDING else 1.0


def _error_message(error: BaseException) -> str:
    """Returns the message of a decord error without timestamps and source locations."""
    return str(error).partition("\n")[0].rpartition("] ")[2][:200]

"""One video: frames as it shows them and the sound with them, window by window."""

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

from pipeline.decoding import Unreadable
from pipeline.decoding.audio import Track, audio_stream, read_samples, time_base, to_pauses
from pipeline.decoding.truncation import is_truncated

#: decord rounds a frame's time to milliseconds, and to the 24 bits of a float.
ROUNDING_SECONDS = 0.0006
#: Scenes are looked for in frames of about so many pixels, so many of them at a time.
LOOK_PIXELS = 64 * 36
LOOKS_AT_ONCE = 64
#: A file whose header promises so many seconds more than can be read is truncated.
LEAST_MISSING = 1.0
#: FFmpeg's names of the formats whose headers tell durations.
EXACT = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
#: What FFmpeg opens as a video too: pictures.
PICTURES = ("image2", "_pipe", "gif", "apng", "webp")

Size = tuple[int, int]  # width, height as displayed


class DamagedVideo(Exception):
    """This reader cannot read it; another one may."""


class DecordFrames:
    """The frames of a video by decord, which turns them upright itself.

    Args:
        start: the time of the track's beginning in seconds of the file; decord counts from there.
        size: what frames are scaled to; None: as they are.
    """

    def __init__(self, path: str, start: float, size: Size | None = None):
        width, height = size or (-1, -1)
        try:
            # One thread: several processes run side by side.
            self._reader = decord.VideoReader(path, num_threads=1, width=width, height=height)
            spans = self._reader.get_frame_timestamp(np.arange(len(self._reader)))
        except (decord.DECORDError, RuntimeError, AssertionError) as error:
            raise DamagedVideo(_first_line(error)) from None
        if spans[0, 0] < -ROUNDING_SECONDS:
            # The file says that frames at its beginning are not shown (a clip cut by a phone).
            # decord counts them, and after a search gives others than those it was asked for.
            raise DamagedVideo("decord mistakes the frames of a video with hidden ones")
        spans = np.round(spans.astype(np.float64), 3) + start
        self.times: np.ndarray = spans[:, 0]
        self.end = float(max(spans[-1]))

    def read(self, indices: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """The frames with these numbers, ascending, (F, H, W, 3) uint8: all of them."""
        try:
            return list(indices), self._reader.get_batch(list(indices)).asnumpy()
        except (decord.DECORDError, RuntimeError) as error:
            raise DamagedVideo(_first_line(error)) from None


class FFmpegFrames:
    """The same frames by PyAV, which goes on where a file is damaged."""

    def __init__(self, path: str, start: float, size: Size | None = None):
        self._container, self._size = av.open(path), size
        stream = _video_stream(self._container)
        if stream is None:
            raise DamagedVideo("it holds no video track")
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
            raise DamagedVideo("it holds no frame")
        unit = time_base(self._stream)
        offset = start - float((self._stream.start_time or 0) * unit)
        self.times: np.ndarray = np.array(self._stamps) * float(unit) + offset
        self.end = float(self.times[-1]) + float(stamps[-1][1] * unit)
        self._decoded: Iterator[av.VideoFrame] = iter(())
        self._at = math.inf  # the number of the frame that was decoded last

    def read(self, indices: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Those of the frames with these numbers, ascending, that can be decoded."""
        found, pixels = [], []
        for index in indices:
            if (frame := self._frame(index)) is not None:
                found.append(index)
                pixels.append(_upright(frame, self._size))
        if not found:
            raise DamagedVideo("no frame can be decoded")
        return found, np.stack(pixels)

    def _frame(self, index: int) -> av.VideoFrame | None:
        before = self._keys[self._keys <= index]
        if index <= self._at or (len(before) and before[-1] > self._at):
            stamp = self._stamps[index]
            try:
                self._container.seek(stamp, stream=self._stream, backward=True)
            except av.FFmpegError:
                self._container.seek(0)
            self._decoded = _decoded(self._container, self._stream)
        for frame in self._decoded:
            if frame.pts is None:
                continue
            self._at = int(np.searchsorted(self._stamps, frame.pts))
            if frame.pts >= self._stamps[index]:
                return frame if frame.pts == self._stamps[index] else None
        self._at = math.inf
        return None


class Video:
    """An opened video file: its frames and its sound, on one line of time.

    Time is counted in seconds from the beginning of the file, which is that of its first track.

    Args:
        max_pixels: larger frames are made smaller.

    Raises:
        Unreadable: it is no video and holds no sound.
    """

    def __init__(self, path: str, max_pixels: int | None = None):
        self.path = path
        self._container = _open(path)
        self._zero = (self._container.start_time or 0) / av.time_base
        video = _video_stream(self._container)
        if video is not None and av.stream.Disposition.attached_pic in video.disposition:
            video = None  # the cover of a record
        self._video = video
        self._audio = audio_stream(self._container)
        if self._video is None and self._audio is None:
            self.close()
            raise Unreadable("not a video", "it holds neither pictures nor sound")
        self.sides: Size = (0, 0)
        self.rotation = 0
        if self._video is not None:
            self.sides, self.rotation = self._shape(self._video)
        fitted = fitting(self.sides, max_pixels) if max_pixels else self.sides
        self.size = None if fitted == self.sides else fitted  # what `frames` are scaled to

    def close(self) -> None:
        """Closes the file."""
        self._container.close()

    @cached_property
    def has_video(self) -> bool:
        """True if the file has frames whose times are known."""
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
        """Returns the frames, scaled to a size.

        Args:
            size: Width and height of the frames in pixels; None: unscaled.
            slow: Whether to use FFmpeg even where decord can read the file.

        Raises:
            Unreadable: There are none.
        """
        if self._video is None:
            raise Unreadable("no video track")
        start = float((self._video.start_time or 0) * time_base(self._video)) - self._zero
        if not slow:
            try:
                return DecordFrames(self.path, start, size)
            except DamagedVideo:
                pass
        try:
            return FFmpegFrames(self.path, start, size)
        except (DamagedVideo, av.FFmpegError) as error:
            raise Unreadable("damaged video", str(error)) from None

    @cached_property
    def track(self) -> Track | None:
        """The audio track, or None if there is none."""
        if self._audio is None:
            return None
        try:
            track = Track(self._container, self._audio, self._zero)
        except (av.FFmpegError, ValueError):
            return None
        return track if track.duration > 0 else None

    def _shape(self, video: av.VideoStream) -> tuple[Size, int]:
        """Returns the size as displayed, and the clockwise rotation of the frames in degrees."""
        _one_thread(video)
        # Only a decoded frame has the rotation.
        frame = next(_decoded(self._container, video), None)
        video.discard = av.stream.Discard.all  # from here on, this container reads the audio
        if frame is None:
            return (video.codec_context.width, video.codec_context.height), 0
        rotation = -frame.rotation % 360
        size = (frame.height, frame.width) if rotation % 180 else (frame.width, frame.height)
        return size, rotation

    @cached_property
    def about(self) -> dict[str, Any]:
        """What `describe` gives."""
        audio_duration = self.track.duration if self.track else 0.0
        about: dict[str, Any] = {"has_video": self.has_video, "has_audio": self.track is not None}
        about["audio_duration"] = round(audio_duration, 3)
        end = 0.0
        if self.has_video:
            times, end = self.frames.times, self.frames.end
            duration = end - float(times[0])
            about["width"], about["height"] = self.sides
            about["rotation"] = self.rotation
            about["num_frames"] = len(times)
            about["fps"] = round(len(times) / duration, 3) if duration > 0 else 0.0
        if not (duration := round(max(end, audio_duration), 3)):
            raise Unreadable("damaged video", "neither a frame nor a sound can be read")
        about["duration"] = duration
        stated = max(map(_stated_duration, (self._video, self._audio)))
        if is_truncated(self.path) or stated - duration > LEAST_MISSING:
            about["truncated"] = True
            if stated > duration:
                about["stated_duration"] = round(stated, 3)
        return about


def describe(path: str) -> dict[str, Any]:
    """What a video file holds.

    Returns:
        `duration` in seconds: where the last frame or the last sound ends, whatever the header
        says; `has_video`, `has_audio`, `audio_duration`; of the video `num_frames`, `fps` on
        average, `width` and `height` as displayed, and `rotation` (degrees to the right by which
        its pictures are turned for that); `truncated`, True, of a file that ends before its header
        says it does, and `stated_duration` where the header says how long it was.
    """
    with closing(Video(path)) as video:
        return video.about


def read_windows(
    path: str, windows: Sequence[tuple[float, float | None]], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Reads windows of a file, one result each.

    Args:
        path: Path of the file.
        windows: (start, end) of each window in seconds; an end of None is the end of the file.
        settings: `frames` and `audio`: whether they are wanted; `sampling` and what it needs, see
            `choose`; `max_pixels`: larger frames are made smaller; `sample_rate` of the sound,
            and `border_shift`, see `audio.to_pauses`.

    Yields:
        `pixels` (F, H, W, 3) uint8, `indices` (F,) int32 and `seconds` (F,) float64 of the frames;
        `samples` (n,) float32 and `audio_start`, the time of the first; `about`: what `describe`
        says. What is not wanted or not there has no entries.
    """
    with closing(Video(path, settings["max_pixels"])) as video:
        duration = video.about["duration"]
        reader = WindowReader(video, settings) if settings["frames"] and video.has_video else None
        track = video.track if settings["audio"] else None
        if reader is None and track is None:
            reason = "no audio track" if video.has_video else "no video track"
            raise Unreadable(reason, "what is wanted is not in the file")
        for start, stop in windows:
            end = duration if stop is None else stop
            problem = Unreadable("nothing in this window", f"from {start:g} s to {end:g} s")
            window: dict[str, Any] = {
                "pixels": np.zeros((0, 0, 0, 3), np.uint8),
                "indices": np.zeros(0, np.int32),
                "seconds": np.zeros(0),
                "samples": np.zeros(0, np.float32),
                "audio_start": start,
                "about": video.about,
            }
            if reader is not None:
                try:
                    window.update(reader.read(start, end))
                except DamagedVideo as error:
                    problem = Unreadable("damaged video", str(error))
            if track is not None:
                borders = to_pauses(track, start, end, settings)
                window["audio_start"], window["samples"] = read_samples(
                    track, *borders, settings["sample_rate"]
                )
            is_empty = not len(window["indices"]) and not len(window["samples"])
            yield problem if is_empty else window


def read_picture(path: str, seconds: float, max_pixels: int) -> dict[str, Any]:
    """The frame shown at a time: `jpeg`, its `index` and its `seconds`.

    Raises:
        Unreadable: there is none.
    """
    with closing(Video(path, max_pixels)) as video:
        if not video.has_video:
            raise Unreadable("no video track")
        reader = WindowReader(video, {})
        try:
            frame = reader.frames([reader.shown_at(np.array([seconds]))[0]])
        except DamagedVideo as error:
            raise Unreadable("damaged video", str(error)) from None
        jpeg = io.BytesIO()
        Image.fromarray(frame["pixels"][0]).save(jpeg, "JPEG", quality=92)
        index, at = int(frame["indices"][0]), float(frame["seconds"][0])
        return {"jpeg": jpeg.getvalue(), "index": index, "seconds": at}


class WindowReader:
    """Chooses and reads the frames of windows: by decord, and by PyAV from its first error on."""

    def __init__(self, video: Video, settings: dict[str, Any]):
        self._video, self._settings = video, settings
        self._frames = video.frames
        self._looks: DecordFrames | FFmpegFrames | None = None

    def read(self, start: float, end: float) -> dict[str, np.ndarray]:
        """The frames of a window; see `frames`."""
        return self.frames(self.choose(start, end))

    def frames(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """`pixels`, `indices` and `seconds` of frames.

        Raises:
            DamagedVideo: none of them can be decoded.
        """
        if not len(indices):
            return {}
        self._frames, (found, pixels) = self._read(self._frames, indices, self._video.size)
        seconds = np.round(self._frames.times[found], 3)
        return {"pixels": pixels, "indices": np.array(found, np.int32), "seconds": seconds}

    def choose(self, start: float, end: float) -> list[int]:
        """The numbers of a window's frames, ascending.

        `uniform` takes the frames shown in the middles of `num_frames` equal stretches; `fps` those
        shown every 1 / fps seconds, at most `num_frames`, spread evenly; `scenes` the middle look
        of each scene, at most `num_frames`, the longest.
        """
        first, behind = self._frames.times[0], self._frames.end
        end = min(end, max(behind, first + ROUNDING_SECONDS))  # one frame may last no time
        if end <= max(start, first - ROUNDING_SECONDS):
            return []
        sampling, most = self._settings["sampling"], self._settings["num_frames"]
        if sampling == "uniform":
            times = start + (np.arange(most) + 0.5) * (end - start) / most
        elif sampling == "fps":
            times = _every(self._settings["fps"], start, end)
            if len(times) > most:
                times = times[((np.arange(most) + 0.5) * len(times) / most).astype(int)]
        else:
            times = self._scenes(_every(self._settings["look_fps"], start, end), most)
        return np.unique(self.shown_at(times)).tolist()

    def shown_at(self, times: np.ndarray) -> np.ndarray:
        """The numbers of the frames shown at some times; before the first one, the first."""
        shown = np.searchsorted(self._frames.times, times + ROUNDING_SECONDS, side="right") - 1
        return shown.clip(0, len(self._frames.times) - 1)

    def _scenes(self, times: np.ndarray, most: int) -> np.ndarray:
        """The middles of the longest scenes between looks at some times."""
        size = fitting(self._video.sides, LOOK_PIXELS)
        self._looks = self._looks or self._video.open_frames(size)
        last: np.ndarray | None = None
        seen: list[float] = []
        cuts = [0]
        for first in range(0, len(times), LOOKS_AT_ONCE):
            chunk = times[first : first + LOOKS_AT_ONCE]
            indices, index_of_time = np.unique(self.shown_at(chunk), return_inverse=True)
            self._looks, (found, pixels) = self._read(self._looks, indices.tolist(), size)
            at_look = {index: pixels[row] for row, index in enumerate(found)}
            for time, index in zip(chunk, indices[index_of_time], strict=True):
                if (look := at_look.get(int(index))) is None:
                    continue
                if last is not None:
                    change = np.abs(look.astype(np.int16) - last).mean() / 255
                    if change > self._settings["scene_threshold"]:
                        cuts.append(len(seen))
                last = look
                seen.append(float(time))
        scenes = [
            seen[first:stop]
            for first, stop in zip(cuts, [*cuts[1:], len(seen)], strict=True)
            if stop > first
        ]
        scenes.sort(key=len, reverse=True)  # stable: of equally long ones the earlier
        return np.array([scene[len(scene) // 2] for scene in scenes[:most]])

    def _read(
        self, frames: DecordFrames | FFmpegFrames, indices: Sequence[int], size: Size | None
    ) -> tuple[DecordFrames | FFmpegFrames, tuple[list[int], np.ndarray]]:
        """Reads frames, and says who reads the next."""
        if isinstance(frames, DecordFrames):
            try:
                return frames, frames.read(indices)
            except DamagedVideo:
                frames = self._video.open_frames(size, slow=True)
        return frames, frames.read(indices)


def fitting(size: Size, max_pixels: int) -> Size:
    """A size of at most so many pixels with the same ratio of its sides.

    >>> fitting((1920, 1080), 1_000_000)
    (1333, 750)
    >>> fitting((640, 360), 1_000_000)
    (640, 360)
    """
    width, height = size
    scale = (max_pixels / max(1, width * height)) ** 0.5
    return size if scale >= 1 else (max(1, int(width * scale)), max(1, int(height * scale)))


def _every(fps: float, start: float, end: float) -> np.ndarray:
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
        raise Unreadable("damaged video" if is_video else "not a video", str(error)) from None
    if container.format.name.endswith(PICTURES):
        container.close()
        raise Unreadable("not a video", "it is a picture")
    return container


def _video_stream(container: av.container.InputContainer) -> av.VideoStream | None:
    """Returns the video stream that FFmpeg prefers, if there is one."""
    stream = container.streams.best("video")
    return stream if isinstance(stream, av.VideoStream) else None


def _stated_duration(stream: av.stream.Stream | None) -> float:
    """Returns the duration in the header of an MP4, MOV, Matroska or WebM; 0 if there is none.

    For other formats FFmpeg estimates it.
    """
    if stream is None or stream.container.format.name not in EXACT:
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


def _decoded(
    container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[av.VideoFrame]:
    """Yields the frames from the present position on, without those of corrupted packets."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:  # the file ends in the middle of one
            return
        if packet is None:
            return
        try:
            frames = packet.decode()
        except av.FFmpegError:
            continue
        yield from frames


def _upright(frame: av.VideoFrame, size: Size | None) -> np.ndarray:
    """(H, W, 3) RGB of a frame as displayed."""
    turns = frame.rotation // 90
    if size is not None:
        width, height = size[::-1] if turns % 2 else size
        frame = frame.reformat(width=width, height=height, format="rgb24")
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)


def _first_line(error: BaseException) -> str:
    """What an error of decord says, without the times and places of its source."""
    return str(error).partition("\n")[0].rpartition("] ")[2][:200]

"""The source of video files."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.config import Spec
from pipeline.data.base import ItemSize
from pipeline.data.windows import MIN_VIDEO_RATE, WindowSource, WindowSpec
from pipeline.schema import FRAME, Item

log = logging.getLogger("maxray.sources")

#: The options of each sampling method.
SAMPLING_OPTIONS = {
    "uniform": (),
    "fps": ("fps",),
    "scenes": ("scene_detection_fps", "scene_threshold"),
}


class FramesSpec(Spec):
    """Options for selecting the frames of a window. See `Video` for the sampling methods."""

    sampling: Literal["uniform", "fps", "scenes"] = "fps"
    """Method of selecting frames."""
    fps: float = Field(0.5, gt=0, le=1000)
    """Frames per second, for `fps`."""
    num_frames: int = Field(16, ge=1, le=4096)
    """Number of frames per item; for `fps` and `scenes`, the maximum."""
    scene_detection_fps: float = Field(2.0, gt=0, le=100)
    """Frames per second that are compared to detect scenes, for `scenes`."""
    scene_threshold: float = Field(0.1, gt=0, lt=1)
    """Minimum difference between two frames that starts a new scene: the mean absolute
    difference of pixel values in [0, 1]. Changes of still parts, such as slides, need less."""
    max_pixels: int = Field(1_000_000, ge=1000, le=100_000_000)
    """Maximum size of a frame, in pixels. Larger frames are scaled down."""


class Video(WindowSource["Video.Spec"]):
    """Time windows of video files, one item per window.

    **Ids.** `<file>#t=<start>,<end>` in seconds. The id of an entire video is its path. The parent
    of an item is the file.

    **Frames.** Payload `frames`, RGB pixels as displayed: upright and with the displayed aspect
    ratio. The frame of a time is the last one with an equal or earlier timestamp, so variable frame
    rates are supported. `sampling` selects the frames of a window:

    - `fps`: the frames at intervals of 1 / `fps` seconds. If there are more than `num_frames`, an
      evenly spaced subset of those that differ from the one before. (More than 8 `num_frames` are
      not compared.);
    - `uniform`: the frames in the middle of `num_frames` equal intervals;
    - `scenes`: frames at intervals of 1 / `scene_detection_fps` seconds are compared. A mean
      difference above `scene_threshold` starts a new scene, and so does a smaller change of parts
      that are still before and after, such as the text of a slide. The middle frame of each scene
      is selected, for at most the `num_frames` longest scenes.

    **Audio.** Payload `audio`, as in the audio source, or null for windows without audio.

    **Errors.** The readable part of a truncated or corrupted video is indexed. A window with
    neither frames nor audio is rejected, and so is a file without any of the inputs of the encoder.

    **Metadata.** `frames` [[number, seconds], ...], the selected frames; `duration`; the average
    `fps`; `num_frames`; `width` and `height` as displayed; `rotation` in degrees; `mirrored`, True,
    if the frames are mirrored; `has_video`; `has_audio`; `audio_duration`. `truncated`, True, if
    the file is shorter than its header specifies, and `stated_duration`, the duration in the header
    if it is known.
    """

    class Spec(WindowSpec, FramesSpec):
        """Options of the video source."""

        name: Literal["video"] = "video"

    provides: ClassVar[tuple[str, ...]] = ("item_id", "frames", "audio")
    suffixes = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
    module = "video"
    files_per_shard = 1024
    modality = "video"
    min_rate = MIN_VIDEO_RATE

    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read. Warns if `num_frames` limits `fps`."""
        super().check()
        spec = self.spec
        limit = spec.num_frames / spec.fps
        is_limited = spec.window_seconds is None or spec.window_seconds > limit
        if "frames" in self.wants and spec.sampling == "fps" and is_limited:
            items = "videos" if spec.window_seconds is None else "windows"
            log.warning(
                f"{spec.path}: {items} longer than {limit:g} s have more frames at fps "
                f"{spec.fps:g} than num_frames ({spec.num_frames}); a subset is indexed"
            )

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the size of the decoded frames and audio of an item."""
        size = super().item_size(shard, item)
        if "frames" not in self.payload.names:
            return size
        info = item.handle["header"] or item.metadata or {}
        max_pixels = self.spec.max_pixels
        pixels = min(max_pixels, info.get("width", 0) * info.get("height", 0)) or max_pixels
        num_frames = self._max_frames(self._seconds(item))
        return size._replace(num_bytes=size.num_bytes + 3 * pixels * num_frames)

    def preview_image(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """Returns the frame at a time in seconds, or in the middle of the item, as a JPEG file."""
        if seconds is None:
            seconds = (item["span"]["start"] + item["span"]["end"]) / 2
        with self.local_path(self.find_file(item["parent_id"], item["metadata"])) as path:
            frame = self.process.call("read_frame", path, seconds, self.spec.max_pixels)
        return frame["jpeg"]

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the decoded content. Those of other samplings do not."""
        names = {"window_seconds", "overlap_seconds", "wants"}
        if "audio" in self.wants:
            names |= {"sample_rate", "border_shift"}
        if "frames" in self.wants:
            names |= {"sampling", "num_frames", "max_pixels", *SAMPLING_OPTIONS[self.spec.sampling]}
        return {name: value for name, value in super().settings().items() if name in names}

    def _max_frames(self, seconds: float) -> int:
        if self.spec.sampling != "fps":
            return self.spec.num_frames
        return min(self.spec.num_frames, int(self.spec.fps * (seconds + 1)) + 1)

    def _metadata(self, window: dict[str, Any]) -> dict[str, Any]:
        frames = zip(window["indices"].tolist(), window["seconds"].tolist(), strict=True)
        return {"frames": [list(frame) for frame in frames], **super()._metadata(window)}

    def _payload(self, name: str, window: dict[str, Any]) -> Any:
        if name != "frames":
            return super()._payload(name, window)
        num_frames, height, width = window["pixels"].shape[:3]
        # The pixels are most of the payload and are not copied.
        ends = np.arange(num_frames + 1, dtype=np.int32) * (3 * height * width)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(window["pixels"])]
        columns = {
            "index": window["indices"],
            "seconds": window["seconds"],
            "height": np.full(num_frames, height),
            "width": np.full(num_frames, width),
            "pixels": pa.Array.from_buffers(pa.binary(), num_frames, buffers),
        }
        arrays = [pa.array(columns[f.name]).cast(f.type) for f in FRAME]
        return pa.StructArray.from_arrays(arrays, fields=list(FRAME))

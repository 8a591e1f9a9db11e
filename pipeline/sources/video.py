"""Video files: windows with the frames that stand for them, and with their sound."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.config import Spec
from pipeline.schema import FRAME
from pipeline.sources.windows import UNIT_BYTES, WindowSource, WindowSpec

#: What only one way to sample reads.
OPTIONS_OF = {"uniform": (), "fps": ("fps",), "scenes": ("look_fps", "scene_threshold")}


class FramesSpec(Spec):
    """How the frames that stand for a window of a video are chosen, see `Video`.

    Attributes:
        sampling: how frames are chosen.
        fps: frames a second, for `fps`.
        num_frames: frames of an item; for `fps` and `scenes`, at most.
        look_fps: looks a second, for `scenes`.
        scene_threshold: what makes a cut: the mean difference of pixel values in [0, 1].
        max_pixels: larger frames are made smaller.
    """

    sampling: Literal["uniform", "fps", "scenes"] = "fps"
    fps: float = Field(0.5, gt=0, le=1000)
    num_frames: int = Field(16, ge=1, le=4096)
    look_fps: float = Field(2.0, gt=0, le=100)
    scene_threshold: float = Field(0.1, gt=0, lt=1)
    max_pixels: int = Field(1_000_000, ge=1000, le=100_000_000)


class Video(WindowSource["Video.Spec"]):
    """The windows of video files: one item a window, the video its parent.

    **Ids.** `<file>#t=<start>,<end>` in seconds; that of a whole video is the file's.

    **Frames.** Payload `frames`, upright RGB pixels. The frame of a time is the one that is shown
    then: the last that does not begin later, by the frames' own times, so that a variable rate
    does not matter. Which frames stand for a window is said by `sampling`:

    - `fps`: those shown every 1 / `fps` seconds, at most `num_frames`, spread evenly;
    - `uniform`: those in the middles of `num_frames` equal stretches;
    - `scenes`: a look every 1 / `look_fps` seconds, a cut where two looks differ by more than
      `scene_threshold`, and of each scene the look in its middle; at most `num_frames`, those of
      the longest scenes.

    **Sound.** Payload `audio`, as the audio source gives it; null for a window without.

    **What cannot be read.** A truncated or damaged video gives what can be decoded of it. A window
    with neither frames nor sound is rejected, as is a file that has nothing of what is wanted.

    **Metadata.** `frames` [[number, seconds], ...], which were used; `duration`, `fps` on average,
    `num_frames`, `width` and `height` as displayed, `rotation` in degrees, `has_video`,
    `has_audio`, `audio_duration`; `truncated`, True, of a file that ends before its header says it
    does, and `stated_duration` where the header says how long it was.
    """

    class Spec(WindowSpec, FramesSpec):
        """Options of the video source; see `WindowSpec` and `FramesSpec`."""

        name: Literal["video"] = "video"

    gives = ("item_id", "frames", "audio")
    suffixes = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
    module = "video"
    files_per_shard = 4  # a minute of one takes seconds
    modality = "video"

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        item_bytes = self._audio_bytes() if "audio" in wants else 0.0
        if "frames" in wants:
            item_bytes += 3 * self.spec.max_pixels * self._most_frames()
        if item_bytes:
            self.max_unit_items = max(1, int(UNIT_BYTES / item_bytes))

    def picture(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """The frame that a stored item's video shows at a time, by default the middle, as a JPEG.

        Raises:
            Unreadable: there is none.
        """
        if seconds is None:
            seconds = (item["span"]["start"] + item["span"]["end"]) / 2
        with self.local(self.file_of(item["parent_id"], item["metadata"])) as path:
            found = self.process.call("read_picture", path, seconds, self.spec.max_pixels)
        return found["jpeg"]

    def settings(self) -> dict[str, Any]:
        """The options that change what is decoded: those of another sampling do not."""
        used = {"window_seconds", "overlap_seconds", "wants"}
        if "audio" in self.wants:
            used |= {"sample_rate", "border_shift"}
        if "frames" in self.wants:
            used |= {"sampling", "num_frames", "max_pixels", *OPTIONS_OF[self.spec.sampling]}
        return {name: value for name, value in super().settings().items() if name in used}

    def _most_frames(self) -> int:
        """The most frames that an item may have."""
        most = self.spec.num_frames
        if self.spec.sampling == "fps" and self.spec.window_seconds is not None:
            most = min(most, int(self.spec.fps * (self.spec.window_seconds + 1)) + 1)
        return most

    def _metadata(self, window: dict[str, Any]) -> dict[str, Any]:
        frames = zip(window["indices"].tolist(), window["seconds"].tolist(), strict=True)
        return {"frames": [list(frame) for frame in frames], **super()._metadata(window)}

    def _payload(self, name: str, window: dict[str, Any]) -> Any:
        if name != "frames":
            return super()._payload(name, window)
        number, *sides = window["pixels"].shape[:3]
        # Not copied: they are most of what the source gives.
        ends = np.arange(number + 1, dtype=np.int32) * (3 * sides[0] * sides[1])
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(window["pixels"])]
        columns = {
            "index": window["indices"],
            "seconds": window["seconds"],
            "height": np.full(number, sides[0]),
            "width": np.full(number, sides[1]),
            "pixels": pa.Array.from_buffers(pa.binary(), number, buffers),
        }
        arrays = [pa.array(columns[f.name]).cast(f.type) for f in FRAME]
        return pa.StructArray.from_arrays(arrays, fields=list(FRAME))

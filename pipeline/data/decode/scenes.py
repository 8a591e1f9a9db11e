"""Detection of the scenes of a video in small images of its frames."""

from __future__ import annotations

import numpy as np
from PIL import Image

#: Exponent of `scene_threshold` for the parts of a frame that change between two still images, such
#: as the text of a slide: 0.03 for 0.1. A part is still if it changes by less than half of this.
STILL_EXPONENT = 1.5
#: Minimum area of the still parts that change, as a share of the frame, and the maximum number of
#: compared frames of a transition such as a fade.
MIN_CHANGED_AREA, MAX_TRANSITION = 0.002, 8
#: Distance from motion, in pixels of the compared frames, at which a part counts as still. What a
#: moving object uncovers is next to the object.
STILL_DISTANCE = 12


class SceneCuts:
    """Finds the first frames of scenes in small images of a video.

    A scene begins if the mean difference from the frame before exceeds the threshold, or if parts
    of the image that were still before and after have changed: slides have the same background and
    little text. Parts that move are not compared, so neither motion nor noise begins a scene.

    Args:
        threshold: Mean absolute difference of pixel values in [0, 1].
    """

    def __init__(self, threshold: float):
        self.starts = [0]
        self._threshold, self._still_threshold = threshold, threshold**STILL_EXPONENT
        self._num_frames = 0
        self._last_still = 0  # last frame before which nothing moved

    def add(self, frame: np.ndarray) -> None:
        """Adds the next frame (H, W, 3) uint8."""
        number = self._num_frames
        self._num_frames += 1
        if number == 0:
            self._previous = self._still_image = frame
            self._speed = np.zeros(frame.shape[:2])  # maximum since a part was still
            return
        if image_difference(_halved(frame), _halved(self._previous)).mean() > self._threshold:
            self.starts.append(number)
        difference = image_difference(frame, self._previous)
        threshold = self._still_threshold
        nearby = _local_maximum(difference, 1)
        is_still = nearby < threshold / 2
        change = image_difference(frame, self._still_image)
        has_changed = (change > threshold) & (self._speed > threshold) & is_still
        has_changed &= _local_maximum(difference, STILL_DISTANCE) < threshold / 2
        if has_changed.mean() > MIN_CHANGED_AREA:
            first = number - 1  # of the new still image
            while self.starts[-1] > max(self._last_still, first - MAX_TRANSITION):
                self.starts.pop()  # the transition is not a scene
            if first > self.starts[-1]:
                self.starts.append(first)
        if is_still.mean() > 0.5:
            self._last_still = number
        self._speed = np.where(is_still, 0.0, np.maximum(self._speed, nearby))
        self._still_image = np.where(is_still[..., None], frame, self._still_image)
        self._previous = frame


def image_difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the absolute difference (H, W) of two images (H, W, 3) uint8, 0 to 1."""
    return np.abs(first.astype(np.int16) - second).mean(axis=2) / 255


def _halved(image: np.ndarray) -> np.ndarray:
    """Returns an image at half its size, which blurs fine texture."""
    height, width = (max(1, side // 2) for side in image.shape[:2])
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


def _local_maximum(values: np.ndarray, radius: int) -> np.ndarray:
    """Returns the maximum of the values (H, W) >= 0 within a radius, along both axes."""
    for _ in range(2):  # the rows, then the columns
        padded = np.pad(values, ((radius, radius), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1, axis=0)
        values = windows.max(axis=-1).T
    return values

"""Pictures for tests."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of which every patch is another."""
    pixels = np.random.default_rng([seed, width, height]).integers(0, 255, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def png(picture: Image.Image) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def pictures(*sizes: tuple[int, int]) -> tuple[list[Image.Image], pa.Table]:
    """Pictures, and the items that hold them."""
    made = [noise(*size, seed=i) for i, size in enumerate(sizes)]
    names = [f"item-{i}" for i in range(len(made))]
    return made, pa.table({"item_id": names, "image": [png(picture) for picture in made]})

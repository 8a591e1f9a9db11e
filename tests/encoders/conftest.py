"""Tiny checkpoints, each written once a run, and pictures."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from tests.encoders.checkpoints import FAMILIES


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """The folder of a family's tiny checkpoint."""
    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def of(family: str) -> str:
        if family not in made:
            made[family] = str(FAMILIES[family](folder / family))
        return made[family]

    return of


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

"""Decodes the images of queries and items and computes the extents of their patches."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipeline.config import reading
from pipeline.data.decode import Unreadable
from pipeline.data.decode.image import decode, without_comments

#: File formats of query images.
QUERY_FORMATS = ("PNG", "JPEG", "WEBP")

#: Maximum number of pixels of a query image after downscaling, and of its file.
MAX_PIXELS, MAX_INPUT_PIXELS = 4_000_000, 200_000_000


def read_query_image(data: bytes) -> bytes:
    """Decodes a query image like the image source decodes items by default.

    A query and an item of the same file are therefore identical: upright, 8-bit, on a white
    background where transparent, and downscaled where large.
    """
    rule = f"an image file ({', '.join(QUERY_FORMATS)})"
    with reading("query", "the image", rule, Unreadable, ValueError, SyntaxError):
        Image.open(io.BytesIO(without_comments(data)), formats=QUERY_FORMATS).close()
        return decode(data, max_pixels=MAX_PIXELS, max_input_pixels=MAX_INPUT_PIXELS)["image"]


def open_query_image(data: bytes) -> Image.Image:
    """Opens a query image in RGB, decoded by `read_query_image`."""
    with Image.open(io.BytesIO(read_query_image(data))) as image:
        return image.convert("RGB")


def png_file(image: Image.Image) -> bytes:
    """Returns the PNG file of an image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def item_images(item: Mapping[str, Any]) -> list[tuple[Image.Image, float, float]]:
    """Returns the images of an item in RGB, each with the start and end of its display, in seconds.

    Images of pages and photos have no times (NaN). A video frame is displayed until the next one.
    """
    if item.get("image"):
        with Image.open(io.BytesIO(item["image"])) as image:
            return [(image.convert("RGB"), np.nan, np.nan)]
    frames = item.get("frames") or []
    starts = [frame["seconds"] for frame in frames]
    span = item.get("span") or {}
    end = span.get("end") if span.get("unit") == "seconds" else None
    if end is None:
        end = starts[-1] if starts else 0.0
    ends = [*starts[1:], max(end, starts[-1])] if starts else []
    images = []
    for frame, start, stop in zip(frames, starts, ends, strict=True):
        size = (frame["width"], frame["height"])
        images.append((Image.frombytes("RGB", size, frame["pixels"]), start, stop))
    return images


def grid_extents(
    rows: int, columns: int, times: tuple[float, float] = (np.nan, np.nan)
) -> torch.Tensor:
    """Returns the extents (rows * columns, 6) of a grid of patches over an image, row by row.

    `times` are the start and end of its display in seconds.

    >>> grid_extents(1, 2)[:, :4].tolist()
    [[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0]]
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    x, y = x.reshape(-1).float(), y.reshape(-1).float()
    boxes = torch.stack([x / columns, y / rows, (x + 1) / columns, (y + 1) / rows], dim=1)
    return torch.cat([boxes, torch.tensor([times]).float().expand(len(boxes), 2)], dim=1)

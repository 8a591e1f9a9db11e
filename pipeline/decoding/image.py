"""One picture: upright RGB within bounds, whatever the file holds."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from pipeline.decoding import Unreadable

#: What is read, whatever a file is called. Others need programs of their own, or are no pictures.
FORMATS = ("BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
#: How such files begin: one that does and cannot be opened is damaged.
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
#: What every reader of pictures knows, and the schema allows.
PASSED_ON = ("JPEG", "PNG", "WEBP")
#: JPEG holds no longer sides.
JPEG_SIDE = 65_500
QUALITY = 95

ORIENTATION = 0x0112  # the tag of EXIF
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # the settings say what is too much, before anything is decoded
ImageFile.LOAD_TRUNCATED_IMAGES = False


def read_picture(path: str, settings: dict[str, Any]) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields the one result of reading an image.

    Args:
        path: Path of the file.
        settings: `max_pixels`, the maximum size of the result in pixels, larger images are scaled
            down; `max_input_pixels`, images that claim more pixels are not decoded.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        yield decode(data, **settings)
    except Unreadable as error:  # yielded: the next picture needs no other process
        yield error
    except MemoryError:
        yield Unreadable("out of memory", "the picture needs more than the process may take")


def decode(data: bytes, max_pixels: int, max_input_pixels: int) -> dict[str, Any]:
    """The picture that a file's bytes hold.

    The first frame where there are several, turned as EXIF says, on white where it is transparent.
    Bytes that are such a picture already are passed on, once all of it has been decoded.

    Returns:
        `image`: JPEG, PNG or WebP; `width` and `height` of the file's picture, upright; `frames`.

    Raises:
        Unreadable: it is no picture, damaged, or claims too many pixels.
    """
    if not data:
        raise Unreadable("empty file")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make the readers raise whatever they like
        if data.startswith(BEGINNINGS) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP"):
            raise Unreadable("damaged image", _said(error)) from None
        raise Unreadable("not an image", f"starts with {data[:8]!r}") from None
    width, height = picture.size
    if width * height > max_input_pixels:
        claim = f"claims {width:,} x {height:,} pixels, more than max_input_pixels"
        raise Unreadable("decompression bomb", f"{claim} ({max_input_pixels:,})")
    try:
        return _decode(picture, data, max_pixels)
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable("damaged image", _said(error)) from None


def _decode(picture: Image.Image, data: bytes, max_pixels: int) -> dict[str, Any]:
    width, height = picture.size
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    size = max(1, int(width * scale)), max(1, int(height * scale))
    is_plain = picture.format in PASSED_ON and picture.mode == "RGB" and not is_deep_png(data)
    if scale < 1:
        picture.draft(None, size)  # a JPEG is decoded at a half, a quarter or an eighth
    picture.load()
    turned = orientation(picture)
    turn = UPRIGHT.get(turned)
    is_plain = is_plain and scale == 1 and turn is None and "transparency" not in picture.info
    upright = evened(picture)
    if scale < 1:  # before it is RGB on white, which takes as much memory again
        upright = upright.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    upright = rgb(upright)
    num_frames = getattr(picture, "n_frames", 1)  # behind all that reads the first
    if turn is not None and turned >= 5:
        width, height = height, width
    result = {"width": width, "height": height, "frames": num_frames}
    if is_plain and num_frames == 1:
        return {**result, "image": data}
    if turn is not None:
        upright = upright.transpose(turn)
    return {**result, "image": encoded(upright)}


def evened(picture: Image.Image) -> Image.Image:
    """The picture in a mode in which pixels can be averaged: no palette, no transparent colour.

    >>> grey = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    >>> evened(grey).mode, list(evened(grey).tobytes())
    ('L', [0, 128, 255])
    """
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("1", "P", "PA") or "transparency" in picture.info:
        return picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    return picture


def rgb(picture: Image.Image) -> Image.Image:
    """The picture in eight bits of red, green and blue; colour profiles are not applied.

    >>> rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    if picture.mode in ("I", "F"):  # no range of their own: from the darkest to the brightest
        values = np.nan_to_num(np.asarray(picture, np.float32), posinf=0.0, neginf=0.0)
        low, high = float(values.min()), float(values.max())
        values = (values - low) * (255 / (high - low or 1.0))
        picture = Image.fromarray(values.round().astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        white.alpha_composite(picture)
        picture = white
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def orientation(picture: Image.Image) -> int:
    """How the picture is to be turned, 1 to 8 as in EXIF; 1 where that cannot be read."""
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # the picture is sound, what is said of it is not
        return 1


def is_deep_png(data: bytes) -> bool:
    """Whether these are the bytes of a PNG with sixteen bits a channel."""
    return data.startswith(b"\x89PNG") and data[24:25] == b"\x10"


def encoded(picture: Image.Image) -> bytes:
    """A picture as a JPEG with all of its colours; as a PNG if it is too long for one."""
    buffer = io.BytesIO()
    if max(picture.size) > JPEG_SIDE:
        picture.save(buffer, "PNG")
    else:
        picture.info.clear()  # profiles and comments of the source do not fit what it is now
        picture.save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

"""Reader that converts images to upright RGB images of limited size."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageFile

from pipeline.data.decode import Unreadable

#: Supported formats. They are detected from the content of a file. The other formats of Pillow
#: require external programs or are not images.
FORMATS = ("BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
#: First bytes of the supported formats. A file that begins with them but cannot be opened is
#: corrupted.
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
#: PNG chunks with comments and colour profiles, which are not needed. Pillow rejects images whose
#: comments exceed a megabyte.
PNG, COMMENTS = b"\x89PNG", (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
#: Images in these formats are not re-encoded, because the schema and all readers support them.
UNCHANGED_FORMATS = ("JPEG", "PNG", "WEBP")
#: TIFF tags that describe the role of a page, and values for thumbnails and masks.
NEW_SUBFILE_TYPE, THUMBNAIL_OR_MASK = 254, 0b101
SUBFILE_TYPE, THUMBNAIL = 255, 2
#: Maximum number of pages of a TIFF file.
MAX_PAGES = 20_000
#: Maximum length of the side of a JPEG in pixels.
MAX_JPEG_SIDE = 65_500
QUALITY = 95

ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # `max_input_pixels` is checked instead
ImageFile.LOAD_TRUNCATED_IMAGES = False


def count_pages(path: str) -> dict[str, Any]:
    """Returns the number of pages `num_pages` of an image, which is 1 unless it is a TIFF file."""
    with open(path, "rb") as file:
        return {"num_pages": len(find_pages(file))}


def find_pages(file: BinaryIO) -> list[int]:
    """Returns the frame of each page. Thumbnails and masks are not pages; corrupted frames are.

    Raises:
        Unreadable: There are more than `MAX_PAGES` pages.
    """
    pages: list[int] = []
    try:
        image = Image.open(file, formats=("TIFF",))
    except Exception:  # another format, or reported by decoding
        return [0]
    for frame in range(MAX_PAGES + 1):
        try:
            image.seek(frame)
            tags = image.tag_v2  # type: ignore[attr-defined]
            is_thumbnail = tags.get(SUBFILE_TYPE) == THUMBNAIL
            is_page = not is_thumbnail and not tags.get(NEW_SUBFILE_TYPE, 0) & THUMBNAIL_OR_MASK
        except EOFError:
            return pages or [0]
        except Exception:
            is_page = True
        if is_page:
            pages.append(frame)
    raise Unreadable("too many pages", f"must be at most {MAX_PAGES:,}")


def read_image(
    path: str, pages: Sequence[int | None], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields some pages, numbered from 1; None is the only page. See `decode` for `settings`."""
    with open(path, "rb") as file:
        data = file.read()
    frames = find_pages(io.BytesIO(data))
    for page in pages:
        try:
            if (page or 1) > len(frames):
                raise Unreadable("missing page", f"the file has {len(frames)} pages")
            yield decode(data, **settings, frame=frames[(page or 1) - 1])
        except Unreadable as error:  # raising it would restart the process
            yield error
        except MemoryError:
            yield Unreadable("out of memory", "the image exceeds the memory limit of the process")


def decode(data: bytes, max_pixels: int, max_input_pixels: int, frame: int = 0) -> dict[str, Any]:
    """Decodes an image and converts it to upright RGB.

    Only one frame of an animation or a TIFF file is used. It is rotated according to its EXIF
    orientation, and transparent areas become white. An image that needs no conversion is decoded to
    validate it, but its original data is returned, without comments that Pillow rejects.

    Images larger than `max_pixels` are scaled down, and those larger than `max_input_pixels`
    rejected. Frames are numbered from 0.

    Returns:
        A mapping with `image`, the data of a JPEG, PNG or WebP file, the `width` and `height` of
        the original image after rotation, and the number of `frames`.

    Raises:
        Unreadable: The data is not an image, is corrupted, or declares too many pixels.
    """
    if not data:
        raise Unreadable("empty file")
    try:
        return _decode_file(data, max_pixels, max_input_pixels, frame)
    except Unreadable as error:
        intact = without_comments(data)
        if error.reason != "corrupted image" or len(intact) == len(data):
            raise
    return _decode_file(intact, max_pixels, max_input_pixels, frame)


def without_comments(data: bytes) -> bytes:
    """Removes the comments and the colour profile of a PNG file. Returns other files unchanged."""
    if not data.startswith(PNG):
        return data
    parts, position = [data[:8]], 8
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if kind not in COMMENTS:
            parts.append(data[position:end])
        position = end
    return b"".join([*parts, data[position:]])


def _decode_file(data: bytes, max_pixels: int, max_input_pixels: int, frame: int) -> dict[str, Any]:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.seek(frame)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises various errors for corrupted files
        if data.startswith(SIGNATURES) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP"):
            raise Unreadable("corrupted image", _one_line(error)) from None
        raise Unreadable("not an image", f"starts with {data[:8]!r}") from None
    width, height = image.size
    if width * height > max_input_pixels:
        claim = f"claims {width:,} x {height:,} pixels, more than max_input_pixels"
        raise Unreadable("decompression bomb", f"{claim} ({max_input_pixels:,})")
    try:
        return _decode(image, data, max_pixels)
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable("corrupted image", _one_line(error)) from None


def _decode(image: Image.Image, data: bytes, max_pixels: int) -> dict[str, Any]:
    width, height = image.size
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    size = max(1, int(width * scale)), max(1, int(height * scale))
    is_plain = image.format in UNCHANGED_FORMATS and image.mode == "RGB" and not is_deep_png(data)
    if scale < 1:
        image.draft(None, size)  # decode a JPEG at 1/2, 1/4 or 1/8 of its size
    image.load()
    exif_orientation = orientation(image)
    transpose = UPRIGHT.get(exif_orientation)
    is_plain = is_plain and scale == 1 and transpose is None and "transparency" not in image.info
    upright = to_averageable(image)
    if scale < 1:  # before the conversion to RGB, which doubles the memory
        upright = upright.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    upright = to_rgb(upright)
    num_frames = getattr(image, "n_frames", 1)  # seeks, so frame 0 must have been read before
    if transpose is not None and exif_orientation >= 5:
        width, height = height, width
    result = {"width": width, "height": height, "frames": num_frames}
    if is_plain and num_frames == 1:
        return {**result, "image": data}
    if transpose is not None:
        upright = upright.transpose(transpose)
    return {**result, "image": encode(upright)}


def to_averageable(image: Image.Image) -> Image.Image:
    """Converts an image to a mode whose pixels can be averaged, that is, one without a palette.

    >>> grey = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    >>> to_averageable(grey).mode, list(to_averageable(grey).tobytes())
    ('L', [0, 128, 255])
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("1", "P", "PA") or "transparency" in image.info:
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to 8-bit RGB on a white background. Colour profiles are not applied.

    >>> to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    if image.mode in ("I", "F"):  # the range is not fixed, so it is mapped from minimum to maximum
        values = np.nan_to_num(np.asarray(image, np.float32), posinf=0.0, neginf=0.0)
        low, high = float(values.min()), float(values.max())
        values = (values - low) * (255 / (high - low or 1.0))
        image = Image.fromarray(values.round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image if image.mode == "RGB" else image.convert("RGB")


def orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation of an image, which is from 1 to 8, or 1 if it cannot be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the EXIF data may be corrupted in an intact image
        return 1


def is_deep_png(data: bytes) -> bool:
    """Checks whether the data is a PNG file with 16 bits per channel."""
    return data.startswith(b"\x89PNG") and data[24:25] == b"\x10"


def encode(image: Image.Image) -> bytes:
    """Encodes an image as JPEG without chroma subsampling, or as PNG if it is too long for JPEG."""
    buffer = io.BytesIO()
    if max(image.size) > MAX_JPEG_SIDE:
        image.save(buffer, "PNG")
    else:
        image.info.clear()  # profiles and comments do not apply to the result
        image.save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

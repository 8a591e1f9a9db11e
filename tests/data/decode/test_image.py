"""Decoding of images: formats, modes, EXIF orientation, scaling, and corrupted files."""

from __future__ import annotations

import io
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from pipeline.data.decode import Unreadable
from pipeline.data.decode.image import decode, find_pages

BOUNDS = {"max_pixels": 4_000_000, "max_input_pixels": 200_000_000}
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


def encode_image(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def two_colours(
    mode: str = "RGB", left: Any = RED, right: Any = BLUE, size=(80, 40)
) -> Image.Image:
    """Returns an image with two colours side by side."""
    image = Image.new(mode, size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def decode_rgb(data: bytes, **bounds: int) -> Image.Image:
    """Decodes an image, and checks that it is upright RGB."""
    image = Image.open(io.BytesIO(decode(data, **{**BOUNDS, **bounds})["image"]))
    assert image.mode == "RGB" and image.format in ("JPEG", "PNG", "WEBP")
    assert image.getexif().get(0x0112, 1) == 1
    return image


def is_near(image: Image.Image, at: tuple[int, int], colour: tuple[int, ...], by=12) -> bool:
    return np.abs(np.subtract(image.getpixel(at), colour)).max() <= by


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_plain_rgb_is_unchanged(kind):
    data = encode_image(two_colours(), kind)
    result = decode(data, **BOUNDS)
    assert result == {"image": data, "width": 80, "height": 40, "frames": 1}


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "GIF", "PPM", "JPEG2000"])
def test_other_formats_become_jpeg(kind):
    image = decode_rgb(encode_image(two_colours(), kind))
    assert image.format == "JPEG" and image.size == (80, 40)
    assert is_near(image, (20, 20), RED) and is_near(image, (60, 20), BLUE)


def test_jpeg_without_chroma_subsampling():
    stripes = Image.fromarray(np.array([RED, BLUE], np.uint8)[np.indices((16, 16))[1] % 2])
    image = decode_rgb(encode_image(stripes, "BMP"))
    assert is_near(image, (4, 4), RED, 30) and is_near(image, (5, 4), BLUE, 30)


@pytest.mark.parametrize(
    ("mode", "kind", "left", "right", "expected"),
    [
        ("L", "JPEG", 0, 128, ((0, 0, 0), GREY)),
        ("L", "PNG", 0, 128, ((0, 0, 0), GREY)),
        ("1", "PNG", 0, 1, ((0, 0, 0), WHITE)),
        ("CMYK", "JPEG", (0, 255, 255, 0), (0, 0, 0, 0), (RED, WHITE)),
        ("CMYK", "TIFF", (0, 255, 255, 0), (0, 0, 0, 0), (RED, WHITE)),
        ("RGBA", "PNG", (255, 0, 0, 255), (0, 0, 255, 0), (RED, WHITE)),
        ("RGBA", "WEBP", (255, 0, 0, 255), (0, 0, 0, 127), (RED, GREY)),
        ("LA", "PNG", (0, 255), (0, 0), ((0, 0, 0), WHITE)),
        ("F", "TIFF", -2.5, 7.5, ((0, 0, 0), WHITE)),
        ("I", "TIFF", 0, 1_000_000, ((0, 0, 0), WHITE)),
    ],
)
def test_modes_become_rgb(mode, kind, left, right, expected):
    image = decode_rgb(encode_image(two_colours(mode, left, right), kind))
    assert is_near(image, (20, 20), expected[0]) and is_near(image, (60, 20), expected[1])


@pytest.mark.parametrize("transparent", [False, True])
def test_palette(transparent):
    image = two_colours().convert("P", palette=Image.Palette.ADAPTIVE)
    hole = {"transparency": image.getpixel((60, 20))} if transparent else {}
    decoded = decode_rgb(encode_image(image, "PNG", **hole))
    assert is_near(decoded, (20, 20), RED) and is_near(decoded, (60, 20), WHITE if hole else BLUE)


def test_transparent_rgb_colour():
    decoded = decode_rgb(encode_image(two_colours(), "PNG", transparency=BLUE))
    assert is_near(decoded, (20, 20), RED) and is_near(decoded, (60, 20), WHITE)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled(kind):
    values = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (8, 1))
    decoded = np.asarray(decode_rgb(encode_image(Image.fromarray(values), kind)))
    assert np.abs(decoded[4, :, 0].astype(int) - np.linspace(0, 255, 64)).max() < 4


def chunk(name: bytes, data: bytes) -> bytes:
    """Returns a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


LONG = b"{workflow}" * 200_000


@pytest.mark.parametrize(
    "comment",
    [
        chunk(b"zTXt", b"Comment\0\0" + zlib.compress(LONG)),
        chunk(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(LONG)),
        chunk(b"tEXt", b"Comment\0" + 40 * LONG),
        chunk(b"iCCP", b"profile\0\0" + zlib.compress(LONG)),
        chunk(b"eXIf", b"II*\0\x08\0\0\0\0\0" + LONG),
        chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100 << 20))),
        80 * chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1_000_000))),
        chunk(b"zTXt", b"Comment\0\0" + zlib.compress(LONG))[:-1] + b"?",  # a wrong checksum
    ],
)
@pytest.mark.parametrize("offset", [33, -12])
def test_long_comment_in_png(comment, offset):
    data = encode_image(two_colours(), "PNG")
    data = data[:offset] + comment + data[offset:]
    decoded = decode_rgb(data)
    decoded.load()
    assert is_near(decoded, (20, 20), RED, 0)
    assert decode_rgb(data, max_pixels=2000).size == (63, 31)
    assert decoding_error(data, max_input_pixels=100).reason == "decompression bomb"
    assert decoding_error(data[: data.index(b"IDAT") + 20]).reason == "corrupted image"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_long_metadata(kind):
    long = {"exif": exif(6)} if kind == "JPEG" else {"exif": exif(6).tobytes() + bytes(3 << 20)}
    data = encode_image(two_colours(), kind, icc_profile=bytes(900_000), **long)
    if kind == "JPEG":
        comments = (b"\xff" + marker + b"\xff\xff" + bytes(65_533) for marker in (b"\xe1", b"\xfe"))
        data = data[:2] + 50 * b"".join(comments) + data[2:]
    assert decode_rgb(data).size == (40, 80)


def test_16_bit_rgb():
    rows = np.tile(np.array([0xFFFF, 0x8000, 0x0000], ">u2"), (8, 8, 1))
    lines = b"".join(b"\0" + row.tobytes() for row in rows)

    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    decoded = decode_rgb(data)
    assert decoded.format == "JPEG" and is_near(decoded, (4, 4), (255, 128, 0), 4)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_animation(kind):
    first, second = two_colours(), two_colours(left=BLUE, right=RED)
    data = encode_image(first, kind, save_all=True, append_images=[second, two_colours(left=WHITE)])
    assert is_near(decode_rgb(data), (20, 20), RED)
    assert decode(data, **BOUNDS)["frames"] == 3


def tiff(*pages: Image.Image, types: dict[int, int] | None = None, **options: Any) -> bytes:
    """Returns a multi-page TIFF file.

    Args:
        pages: The pages.
        types: Value of the tag `NewSubfileType` by page.
        options: Options of the encoder.
    """
    buffer = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(buffer, new=True) as writer:
        for number, page in enumerate(pages):
            info = TiffImagePlugin.ImageFileDirectory_v2()
            if number in (types or {}):
                info[254] = types[number]
            page.save(writer, "TIFF", tiffinfo=info, **options)
            writer.newFrame()
    return buffer.getvalue()


PAGES = [two_colours("L", shade, 255) for shade in (0, 100, 200)]


def shades(data: bytes) -> list[int]:
    """Returns the shade of the left half of each page."""
    results = [decode(data, **BOUNDS, frame=frame) for frame in find_pages(io.BytesIO(data))]
    images = [Image.open(io.BytesIO(result["image"])) for result in results]
    return [round(image.getpixel((20, 20))[0], -1) for image in images]


@pytest.mark.parametrize("options", [{}, {"compression": "tiff_lzw"}, {"big_tiff": True}])
def test_pages_of_tiff(options):
    assert shades(tiff(*PAGES, **options)) == [0, 100, 200]
    assert shades(tiff(PAGES[1], **options)) == [100]
    fax = [page.convert("1", dither=Image.Dither.NONE) for page in PAGES]
    assert shades(tiff(*fax, compression="group4")) == [0, 0, 260]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({0: 2, 1: 2, 2: 2}, [0, 100, 200]),  # pages of a multi-page image
        ({1: 1}, [0, 200]),  # a thumbnail
        ({0: 1}, [100, 200]),
        ({1: 4, 2: 5}, [0]),  # masks
        ({0: 1, 1: 1, 2: 1}, [0]),
    ],
)
def test_thumbnails_and_masks_are_not_pages(types, expected):
    assert shades(tiff(*PAGES, types=types)) == expected


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "MPO", "JPEG"])
def test_frames_of_other_formats_are_not_pages(kind):
    options = (
        {} if kind == "JPEG" else {"save_all": True, "append_images": [two_colours(left=BLUE)]}
    )
    assert find_pages(io.BytesIO(encode_image(two_colours(), kind, **options))) == [0]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_directory_is_page():
    data = bytearray(tiff(*PAGES))
    image = Image.open(io.BytesIO(data))
    image.seek(1)
    second = image._frame_pos[1]
    for offset in (len(data) - 2, len(data) + 1000):
        broken = data.replace(struct.pack("<I", second), struct.pack("<I", offset), 1)
        assert find_pages(io.BytesIO(broken)) == [0, 1]
        with pytest.raises(Unreadable, match="corrupted image"):
            decode(bytes(broken), **BOUNDS, frame=1)
    loop = data.replace(struct.pack("<I", image._frame_pos[1]), struct.pack("<I", 8), 1)
    assert find_pages(io.BytesIO(loop)) == [0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "size", "red_at"),
    [
        (2, (80, 40), (60, 20)),
        (3, (80, 40), (60, 20)),
        (4, (80, 40), (20, 20)),
        (5, (40, 80), (20, 20)),
        (6, (40, 80), (20, 20)),
        (7, (40, 80), (20, 60)),
        (8, (40, 80), (20, 60)),
    ],
)
def test_exif_orientation(kind, orientation, size, red_at):
    data = encode_image(two_colours(), kind, exif=exif(orientation))
    decoded, result = decode_rgb(data), decode(data, **BOUNDS)
    assert decoded.size == size == (result["width"], result["height"])
    assert is_near(decoded, red_at, RED)


def test_8k_image_is_scaled_quickly():
    data = encode_image(two_colours(size=(7680, 4320)), exif=exif(6))
    start = time.monotonic()
    decoded, result = decode_rgb(data), decode(data, **BOUNDS)
    assert time.monotonic() - start < 10
    assert (result["width"], result["height"]) == (4320, 7680)  # of the original
    assert decoded.size == (1500, 2666) and decoded.size[0] * decoded.size[1] <= 4_000_000
    assert is_near(decoded, (700, 100), RED) and is_near(decoded, (700, 2600), BLUE)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "I;16", "I", "F", "CMYK"])
def test_all_modes_are_scaled(mode):
    high = {"I;16": 65535, "RGBA": (255, 255, 255, 255), "LA": (255, 255), "CMYK": (0, 0, 0, 0)}
    low = {"RGBA": (0, 0, 0, 255), "LA": (0, 255), "CMYK": (0, 0, 0, 255)}
    image = two_colours(mode, low.get(mode, 0), high.get(mode, 255), size=(400, 300))
    decoded = decode_rgb(
        encode_image(image, "TIFF" if mode in ("CMYK", "I", "F") else "PNG"), max_pixels=30_000
    )
    assert decoded.size == (200, 150)
    assert is_near(decoded, (50, 75), (0, 0, 0)) and (
        mode == "P" or is_near(decoded, (150, 75), WHITE)
    )


def test_side_too_long_for_jpeg():
    decoded = decode_rgb(encode_image(Image.new("L", (70_000, 2)), "PNG"))
    assert decoded.format == "PNG" and decoded.size == (70_000, 2)


def bomb(width: int, height: int) -> bytes:
    """Returns a small PNG that declares a large size."""
    data = bytearray(encode_image(Image.new("RGB", (1, 1)), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def decoding_error(data: bytes, **bounds: int) -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        decode(data, **{**BOUNDS, **bounds})
    return caught.value


def test_decompression_bomb_is_rejected_by_header():
    start = time.monotonic()
    error = decoding_error(bomb(60_000, 60_000))
    assert time.monotonic() - start < 0.5
    assert error.reason == "decompression bomb"
    assert error.detail.startswith("claims 60,000 x 60,000 pixels, more than max_input_pixels")
    small = encode_image(two_colours(size=(200, 100)))
    assert decoding_error(small, max_input_pixels=19_999).reason == "decompression bomb"
    assert decode_rgb(small, max_input_pixels=20_000)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_truncated_image_is_rejected(kind, part):
    data = encode_image(NOISE, kind)
    assert decoding_error(data[: max(12, int(len(data) * part))]).reason == "corrupted image"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"Dear Ada, this is not an image.", "not an image"),
        (b"%PDF-1.7\n", "not an image"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "not an image"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "not an image",
        ),  # would be rendered by an external program
        (bytes(1000), "not an image"),
    ],
)
def test_invalid_images(data, reason):
    assert decoding_error(data).reason == reason


def test_corrupted_exif():
    data = encode_image(two_colours(), exif=exif(6))
    at = data.index(b"Exif\0\0") + 6
    decoded = decode_rgb(data[:at] + b"\xff" * 14 + data[at + 14 :])
    assert decoded.size == (80, 40)

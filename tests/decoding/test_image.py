"""Pictures of every kind become upright RGB, and those that cannot be read say why."""

from __future__ import annotations

import io
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.decoding import Unreadable
from pipeline.decoding.image import decode

BOUNDS = {"max_pixels": 4_000_000, "max_input_pixels": 200_000_000}
RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


def file_of(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def halves(mode: str = "RGB", left: Any = RED, right: Any = BLUE, size=(80, 40)) -> Image.Image:
    """A picture with two colours side by side."""
    picture = Image.new(mode, size, right)
    picture.paste(left, (0, 0, size[0] // 2, size[1]))
    return picture


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def shown(data: bytes, **bounds: int) -> Image.Image:
    """The decoded picture; always RGB and upright."""
    picture = Image.open(io.BytesIO(decode(data, **{**BOUNDS, **bounds})["image"]))
    assert picture.mode == "RGB" and picture.format in ("JPEG", "PNG", "WEBP")
    assert picture.getexif().get(0x0112, 1) == 1
    return picture


def is_near(picture: Image.Image, at: tuple[int, int], colour: tuple[int, ...], by=12) -> bool:
    return np.abs(np.subtract(picture.getpixel(at), colour)).max() <= by


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_what_is_fine_already_is_passed_on(kind):
    data = file_of(halves(), kind)
    result = decode(data, **BOUNDS)
    assert result == {"image": data, "width": 80, "height": 40, "frames": 1}


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "GIF", "PPM", "JPEG2000"])
def test_other_kinds_become_jpeg(kind):
    picture = shown(file_of(halves(), kind))
    assert picture.format == "JPEG" and picture.size == (80, 40)
    assert is_near(picture, (20, 20), RED) and is_near(picture, (60, 20), BLUE)


def test_the_colours_of_a_new_jpeg_keep_their_resolution():
    stripes = Image.fromarray(np.array([RED, BLUE], np.uint8)[np.indices((16, 16))[1] % 2])
    picture = shown(file_of(stripes, "BMP"))
    assert is_near(picture, (4, 4), RED, 30) and is_near(picture, (5, 4), BLUE, 30)


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
def test_every_mode_becomes_rgb(mode, kind, left, right, expected):
    picture = shown(file_of(halves(mode, left, right), kind))
    assert is_near(picture, (20, 20), expected[0]) and is_near(picture, (60, 20), expected[1])


@pytest.mark.parametrize("transparent", [False, True])
def test_a_palette(transparent):
    picture = halves().convert("P", palette=Image.Palette.ADAPTIVE)
    hole = {"transparency": picture.getpixel((60, 20))} if transparent else {}
    found = shown(file_of(picture, "PNG", **hole))
    assert is_near(found, (20, 20), RED) and is_near(found, (60, 20), WHITE if hole else BLUE)


def test_a_colour_of_rgb_that_is_transparent():
    found = shown(file_of(halves(), "PNG", transparency=BLUE))
    assert is_near(found, (20, 20), RED) and is_near(found, (60, 20), WHITE)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    values = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (8, 1))
    found = np.asarray(shown(file_of(Image.fromarray(values), kind)))
    assert np.abs(found[4, :, 0].astype(int) - np.linspace(0, 255, 64)).max() < 4


def test_sixteen_bits_of_rgb():
    rows = np.tile(np.array([0xFFFF, 0x8000, 0x0000], ">u2"), (8, 8, 1))
    lines = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    found = shown(data)
    assert found.format == "JPEG" and is_near(found, (4, 4), (255, 128, 0), 4)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_of_several_frames(kind):
    first, second = halves(), halves(left=BLUE, right=RED)
    data = file_of(first, kind, save_all=True, append_images=[second, halves(left=WHITE)])
    assert is_near(shown(data), (20, 20), RED)
    assert decode(data, **BOUNDS)["frames"] == 3


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
def test_a_picture_is_turned_upright(kind, orientation, size, red_at):
    data = file_of(halves(), kind, exif=turned(orientation))
    found, result = shown(data), decode(data, **BOUNDS)
    assert found.size == size == (result["width"], result["height"])
    assert is_near(found, red_at, RED)


def test_8k_is_made_smaller_quickly():
    data = file_of(halves(size=(7680, 4320)), exif=turned(6))
    start = time.monotonic()
    found, result = shown(data), decode(data, **BOUNDS)
    assert time.monotonic() - start < 10
    assert (result["width"], result["height"]) == (4320, 7680)  # of the file
    assert found.size == (1500, 2666) and found.size[0] * found.size[1] <= 4_000_000
    assert is_near(found, (700, 100), RED) and is_near(found, (700, 2600), BLUE)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "I;16", "I", "F", "CMYK"])
def test_other_modes_are_made_smaller_too(mode):
    high = {"I;16": 65535, "RGBA": (255, 255, 255, 255), "LA": (255, 255), "CMYK": (0, 0, 0, 0)}
    low = {"RGBA": (0, 0, 0, 255), "LA": (0, 255), "CMYK": (0, 0, 0, 255)}
    picture = halves(mode, low.get(mode, 0), high.get(mode, 255), size=(400, 300))
    found = shown(
        file_of(picture, "TIFF" if mode in ("CMYK", "I", "F") else "PNG"), max_pixels=30_000
    )
    assert found.size == (200, 150)
    assert is_near(found, (50, 75), (0, 0, 0)) and (mode == "P" or is_near(found, (150, 75), WHITE))


def test_sides_too_long_for_jpeg():
    found = shown(file_of(Image.new("L", (70_000, 2)), "PNG"))
    assert found.format == "PNG" and found.size == (70_000, 2)


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""
    data = bytearray(file_of(Image.new("RGB", (1, 1)), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def refusal(data: bytes, **bounds: int) -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        decode(data, **{**BOUNDS, **bounds})
    return caught.value


def test_a_bomb_is_refused_by_its_header():
    start = time.monotonic()
    error = refusal(bomb(60_000, 60_000))
    assert time.monotonic() - start < 0.5
    assert error.reason == "decompression bomb"
    assert error.detail.startswith("claims 60,000 x 60,000 pixels, more than max_input_pixels")
    small = file_of(halves(size=(200, 100)))
    assert refusal(small, max_input_pixels=19_999).reason == "decompression bomb"
    assert shown(small, max_input_pixels=20_000)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_a_truncated_file_is_damaged(kind, part):
    data = file_of(NOISE, kind)
    assert refusal(data[: max(12, int(len(data) * part))]).reason == "damaged image"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"Dear Ada, this is no picture.", "not an image"),
        (b"%PDF-1.7\n", "not an image"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # runs programs
        (bytes(1000), "not an image"),
    ],
)
def test_what_is_no_picture(data, reason):
    assert refusal(data).reason == reason


def test_what_exif_says_may_be_damaged():
    data = file_of(halves(), exif=turned(6))
    at = data.index(b"Exif\0\0") + 6
    found = shown(data[:at] + b"\xff" * 14 + data[at + 14 :])
    assert found.size == (80, 40)

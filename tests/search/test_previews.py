"""Tests of media types, thumbnails and ranges of bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from PIL import Image

from pipeline.search.previews import ByteRange, media_type, thumbnail
from tests import media


def encoded(format: str, mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> bytes:
    output = io.BytesIO()
    Image.new(mode, size, 80).save(output, format)
    return output.getvalue()


@pytest.mark.parametrize(
    ("format", "kind"),
    [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("GIF", "gif"), ("TIFF", "tiff")],
)
def test_types_of_images(format, kind):
    assert media_type(encoded(format)) == f"image/{kind}"


@pytest.mark.parametrize(("format", "kind"), [("WAV", "wav"), ("FLAC", "flac"), ("OGG", "ogg")])
def test_types_of_audio(format, kind):
    output = io.BytesIO()
    soundfile.write(output, np.zeros(4000), 16_000, format=format)
    assert media_type(output.getvalue(), "audio") == f"audio/{kind}"


def test_type_of_video(tmp_path):
    path = tmp_path / "clip.mp4"
    media.write_video(path, media.frame_times(1, 4))
    assert media_type(path.read_bytes()[:16], "video") == "video/mp4"


@pytest.mark.parametrize(
    "head", [b"<html><script>", b"<svg xmlns=", b"%!PS-Adobe", b"", b"#!/bin/sh"]
)
def test_pages_and_scripts_have_no_type(head):
    assert media_type(head, "video") == "application/octet-stream"


@pytest.mark.parametrize(
    ("mode", "source", "result"),
    [("RGB", "JPEG", "JPEG"), ("RGBA", "PNG", "PNG"), ("L", "PNG", "JPEG")],
)
def test_thumbnail(mode, source, result):
    small = Image.open(io.BytesIO(thumbnail(encoded(source, mode, (400, 100)), 64)))
    assert (small.size, small.format) == ((64, 16), result)


def test_image_that_fits_is_unchanged():
    image = encoded("PNG")
    assert thumbnail(image, 64) is image


@pytest.mark.parametrize(
    ("range", "expected"),
    [
        (ByteRange(), (0, 10)),
        (ByteRange(2, 5), (2, 5)),
        (ByteRange(8, 99), (8, 10)),
        (ByteRange(None, 3), (7, 10)),
        (ByteRange(None, 99), (0, 10)),
        (ByteRange(10, None), (10, 10)),
    ],
)
def test_ranges(range, expected):
    assert range.resolve(10) == expected

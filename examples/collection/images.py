"""Reads images and their titles: clip art, stamps of Tux Paint, and emoji."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from examples.collection.extract import members, normalise_language

#: Code points of symbols that consist of one character.
EMOJI = (*range(0x2190, 0x2BFF), *range(0x1F000, 0x1FAFF))
#: Size of the bitmaps of the font in pixels.
EMOJI_SIZE, EMOJI_WIDTH = 109, 136
#: Images with equal thumbnails are near-duplicates: number of pixels, and bits that are ignored.
THUMBNAIL, IGNORED_BITS = 8, 5
#: Authors whose titles are Italian or French, although they are declared as English.
_IS_FOREIGN = re.compile("architetto francesco|yves guillou", re.I)
#: Folders of clip art whose titles often do not describe the image.
_NOT_DESCRIBED = ("unsorted/", "computer/icons/")
_ANNOTATION = re.compile(r'<annotation cp="([^"]+)" type="tts"[^>]*>([^<]+)<')


def contents(path: Path, file: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yields the names and contents of the images in a package."""
    for name, content in members(path):
        if file["reader"] == "emoji" and name.endswith(".ttf"):
            yield from _emoji(content)
        elif name.endswith(".png") and file["reader"] != "emoji":
            yield _name(name) + ".png", content


def _name(path: str) -> str:
    """Returns the common part of the names of an image and of its title."""
    name = re.sub(r"^usr/share/(openclipart/(png|svg)|tuxpaint)/|\.\w+$", "", path)
    return re.sub(r"[^\w./-]", "_", name, flags=re.A)


def _emoji(content: bytes) -> Iterator[tuple[str, bytes]]:
    font = ImageFont.truetype(io.BytesIO(content), EMOJI_SIZE)
    absent = bytes(font.getmask("\U0010fffe"))
    for code in EMOJI:
        if bytes(font.getmask(chr(code))) != absent:
            image = Image.new("RGB", (EMOJI_WIDTH, EMOJI_WIDTH), "white")
            ImageDraw.Draw(image).text((0, 0), chr(code), font=font, embedded_color=True)
            output = io.BytesIO()
            image.save(output, "PNG")
            yield f"emoji/{code:04x}.png", output.getvalue()


def _images(path: Path, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, content in contents(path, file):
        try:
            image = Image.open(io.BytesIO(content)).convert("RGBA")
        except OSError:
            continue
        white = Image.new("RGBA", image.size, "white")
        small = Image.alpha_composite(white, image).convert("RGB").resize((THUMBNAIL, THUMBNAIL))
        thumbnail = bytes(value >> IGNORED_BITS for value in small.tobytes())
        row = {"_id": f"{file['package']}/{name}", "key": name.removesuffix(".png")}
        yield row | {"package": file["package"], "thumbnail": thumbnail.hex()}


def _stamps(path: Path, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the images, and their descriptions with translations."""
    yield from _images(path, file)
    for name, content in members(path):
        if name.endswith(".txt"):
            first, *lines = content.decode(errors="replace").splitlines() or [""]
            found = re.findall(r"(?m)^([\w@]+)\.utf8=(.+)$", "\n".join(lines))
            titles = {normalise_language(language): title for language, title in found}
            yield {"key": _name(name), "titles": titles | {"en": first}}


def _titles(path: Path, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the titles in SVG images."""
    for name, content in members(path):
        text, key = content.decode(errors="replace"), _name(name)
        found = re.search(r"<dc:title[^>]*>([^<]+)", text)
        is_usable = not _IS_FOREIGN.search(text) and not key.startswith(_NOT_DESCRIBED)
        if name.endswith(".svg") and found and is_usable:
            yield {"key": key, "titles": {"en": html.unescape(found[1])}}


def _annotations(path: Path, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the names of emoji in the languages of Unicode CLDR."""
    for name, content in members(path):
        if found := re.search(r"/annotations/([a-z]+)\.xml$", name):
            for text, title in _ANNOTATION.findall(content.decode()):
                if len(text) == 1:
                    yield {
                        "key": f"emoji/{ord(text):04x}",
                        "titles": {found[1]: html.unescape(title)},
                    }


READERS: dict[str, Callable[[Path, dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "clipart": _images,
    "emoji": _images,
    "stamps": _stamps,
    "titles": _titles,
    "annotations": _annotations,
}

"""Bounding boxes of objects in images, in the formats of COCO and Flickr30K Entities."""

from __future__ import annotations

import posixpath
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config import SpecError
from pipeline.paths import open_file
from pipeline.texts import fold

#: The value of images without boxes.
NO_BOXES = np.zeros((0, 4), np.float32)
#: Minimum area of a box relative to the image. Smaller ones are ignored, as in SaMer's code.
MIN_AREA = 0.005
#: Number of pixels by which a box may exceed its image, because annotations are rounded.
TOLERANCE = 1.0

_PHRASE = re.compile(r"\[/EN#(\d+)((?:/[^\s/\]]+)+) ([^\]]*)\]")

#: Phrase and its boxes (M, 4).
Phrase = tuple[str, np.ndarray]


def check_boxes(boxes: Any, field: str, location: str) -> np.ndarray:
    """Validates boxes x0 y0 x1 y1 relative to the image size. Small boxes are removed.

    Args:
        boxes: Boxes to validate.
        field: Spec field that errors name.
        location: Line or row of the boxes, for errors.

    Returns:
        Boxes (M, 4) float32.

    Raises:
        SpecError: The boxes are in pixels, exceed the image, or are malformed.
    """
    rule = "boxes [x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1"
    try:
        found = np.asarray(boxes, dtype=np.float64).reshape(len(boxes), 4)
    except (TypeError, ValueError):
        raise SpecError(field, boxes, rule, note=f" ({location})") from None
    is_pixels = bool((found > 2).any())
    is_outside = not ((found >= -1e-3) & (found <= 1 + 1e-3)).all()  # True for NaN too
    found = found.clip(0, 1)
    if is_pixels or is_outside:
        problem = "are in pixels" if is_pixels else "exceed the image"
        raise SpecError(field, boxes, rule, problem, f" ({location})")
    if (found[:, :2] >= found[:, 2:]).any():
        raise SpecError(field, boxes, rule, "have no area", f" ({location})")
    return drop_small_boxes(found)


def normalise_box(
    box: Sequence[float], width: float, height: float, field: str, location: str
) -> np.ndarray:
    """Converts a box x0 y0 x1 y1 from pixels to fractions of the image size, (4,).

    >>> normalise_box([10, 0, 20.5, 50], 20, 50, "path", "line 1").tolist()
    [0.5, 0.0, 1.0, 1.0]

    Args:
        box: Box in pixels.
        width: Width of the image in pixels.
        height: Height of the image in pixels.
        field: Spec field that errors name.
        location: Line or row of the box, for errors.

    Raises:
        SpecError: The box exceeds the image.
    """
    found = np.asarray(box, dtype=np.float64)
    size = np.array([width, height, width, height], dtype=np.float64)
    if not ((found >= -TOLERANCE) & (found <= size + TOLERANCE)).all():
        rule = f"a box within the image of {width:g} x {height:g} pixels"
        value = [float(side) for side in box]
        raise SpecError(field, value, rule, note=f" ({location})")
    return (found / size).clip(0, 1)


def drop_small_boxes(boxes: np.ndarray) -> np.ndarray:
    """Returns the boxes that are not too small, (M, 4) float32."""
    boxes = np.asarray(boxes, dtype=np.float32).reshape(-1, 4)
    return boxes[area(boxes) >= MIN_AREA]


def area(boxes: np.ndarray) -> np.ndarray:
    """Returns the areas (M,) of boxes (M, 4)."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def read_coco_boxes(value: Any, file: str) -> dict[str, np.ndarray]:
    """Returns the boxes of each image by its id, from COCO instances. Crowds are ignored.

    Args:
        value: Parsed JSON file.
        file: Path of the file, for errors.

    Raises:
        SpecError: For `instances`: the file has another format, or a box is invalid.
    """
    rule = "COCO instances {images: [{id, width, height}], annotations: [{image_id, bbox}]}"
    sizes: dict[str, tuple[float, float]] = {}
    boxes: dict[str, list[np.ndarray]] = {}
    largest = 0.0
    try:
        for image in value["images"]:
            sizes[str(image["id"])] = float(image["width"]), float(image["height"])
        for number, annotation in enumerate(value["annotations"]):
            if annotation.get("iscrowd"):
                continue
            location = f"annotation {annotation.get('id', number)} of {file}"
            image_id = str(annotation["image_id"])
            x, y, width, height = map(float, annotation["bbox"])
            largest = max(largest, x + width, y + height)
            if image_id not in sizes:
                rule = "the id of an image of the file"
                raise SpecError("instances", image_id, rule, note=f" ({location})")
            corners = [x, y, x + width, y + height]
            box = normalise_box(corners, *sizes[image_id], "instances", location)
            boxes.setdefault(image_id, []).append(box)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        problem = f"has another format ({type(error).__name__}: {error})"
        raise SpecError("instances", file, rule, problem) from None
    if boxes and largest <= 1:
        rule = "a file with bbox: [x, y, width, height] in pixels"
        raise SpecError("instances", file, rule, "has relative boxes")
    return {image_id: drop_small_boxes(np.stack(found)) for image_id, found in boxes.items()}


class Entities:
    """Phrases of the captions in Flickr30K Entities, and their boxes.

    Args:
        folder: Folder with `Sentences` and `Annotations`.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._last: tuple[str, list[tuple[str, list[Phrase]]]] | None = None

    def read(self, image_id: str) -> list[tuple[str, list[Phrase]]]:
        """Returns the captions of an image with their phrases, sorted by descending area.

        Phrases that have no boxes or only small ones are ignored. If a phrase occurs twice in a
        caption, it is returned once.

        Raises:
            SpecError: For `entities`: a file is missing or malformed.
        """
        if self._last is not None and self._last[0] == image_id:
            return self._last[1]
        boxes = self._boxes(image_id)
        file = posixpath.join(self._folder, "Sentences", f"{image_id}.txt")
        lines = [line for line in _read(file).decode("utf-8-sig").splitlines() if line.strip()]
        captions = []
        for number, line in enumerate(lines, start=1):
            text = _PHRASE.sub(r"\3", line)
            if "/EN#" in text or not text.strip():
                rule = "a line with phrases [/EN#<number>/<type> words]"
                raise SpecError("entities", line[:80], rule, note=f" (line {number} of {file})")
            found: dict[str, Phrase] = {}
            for chain, _, words in _PHRASE.findall(line):
                if len(boxes.get(chain, NO_BOXES)):
                    found.setdefault(chain, (words, boxes[chain]))
            phrases = sorted(found.values(), key=lambda phrase: -float(area(phrase[1]).max()))
            captions.append((text, phrases))
        self._last = image_id, captions
        return captions

    def _boxes(self, image_id: str) -> dict[str, np.ndarray]:
        """Returns the boxes of each coreference chain of phrases.

        In the annotations, pixels are numbered from 1, and boxes include their last pixel.
        """
        file = posixpath.join(self._folder, "Annotations", f"{image_id}.xml")
        try:
            root = ElementTree.fromstring(_read(file))
            width, height = (_number(root, f"size/{side}") for side in ("width", "height"))
            boxes: dict[str, list[np.ndarray]] = {}
            for element in root.findall("object"):
                corners = element.find("bndbox")
                if corners is None:
                    continue
                names = ("xmin", "ymin", "xmax", "ymax")
                x0, y0, x1, y1 = (_number(corners, name) for name in names)
                box = normalise_box([x0 - 1, y0 - 1, x1, y1], width, height, "entities", file)
                for chain in element.findall("name"):
                    boxes.setdefault(chain.text or "", []).append(box)
        except (ElementTree.ParseError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            rule = "an annotation file with size, and objects with name and bndbox"
            raise SpecError("entities", file, rule, f"cannot be read ({error})") from None
        return {chain: drop_small_boxes(np.stack(found)) for chain, found in boxes.items()}


def caption_phrases(
    image_id: str, captions: Sequence[str], entities: Entities
) -> list[list[Phrase]]:
    """Returns the phrases of each caption, matched by the letters of the tokenised captions.

    Args:
        image_id: Id of the image in Flickr30K Entities, its file name without suffix.
        captions: Captions of the image.
        entities: Phrases and their boxes.

    Raises:
        SpecError: For `entities`: a file of the image is missing or malformed.
    """
    by_text = {_letters(text): phrases for text, phrases in entities.read(image_id)}
    return [by_text.get(_letters(caption), []) for caption in captions]


def _letters(text: str) -> str:
    """Returns the lower-case letters and digits of a text, which tokenisation does not change.

    >>> _letters("Two men's shirts.") == _letters("Two men 's shirts .")
    True
    """
    return "".join(character for character in fold(text) if character.isalnum())


def _number(element: ElementTree.Element, path: str) -> float:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"{path} is missing")
    return float(text)


def _read(file: str) -> bytes:
    try:
        with open_file(file) as stream:
            return stream.read()
    except OSError as error:
        rule = "a folder with Sentences/<id>.txt and Annotations/<id>.xml for each image"
        problem = f"cannot be read ({type(error).__name__})"
        raise SpecError("entities", file, rule, problem) from None

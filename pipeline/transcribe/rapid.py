"""Printed text in pictures, by RapidOCR: PP-OCR models on the CPU, which its wheel carries."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from pipeline import config, extras
from pipeline.config import SpecError
from pipeline.decoding.layout import TextLine, is_right_to_left, reading_order
from pipeline.transcribe import Line, Recogniser, Word
from pipeline.transcribe.frames import Box, Reading, read_frames

#: In a picture that is less than so many pixels high or wide no text can be read.
LEAST_SIDE = 16


class Rapid(Recogniser["Rapid.Spec"]):
    """Text detection and recognition by RapidOCR; the built-in models read Latin and Chinese.

    Words are what white space divides: a line of a script without blanks is one word. The box of a
    word that stands at an angle is the upright one around it. Columns of text are read one after
    the other, as far as white space divides them, and tables row by row. Of a video's frames those
    are read that show something new, see `read_frames`.
    """

    class Spec(config.ComponentSpec):
        """Which models, and what they are given.

        Attributes:
            detection: an ONNX file of a PP-OCR model that finds lines; default: the wheel's.
            recognition: an ONNX file of a PP-OCR model that reads them, for another script.
            characters: its characters, one a line, if the ONNX file does not hold them itself.
            min_confidence: lines that are less sure are left out.
            upside_down: also read lines that stand on their heads; short lines that do not are then
                sometimes turned.
            max_side: a picture with a longer side is made smaller.
            min_change: a frame is read if it differs at least so much from the last one that was
                read, in the 32 x 32 pixels that differ most, or if one of its lines has changed;
                0 to 1.
        """

        name: Literal["rapidocr"] = "rapidocr"
        detection: config.Uri | None = None
        recognition: config.Uri | None = None
        characters: config.Uri | None = None
        min_confidence: float = Field(0.5, ge=0, le=1)
        upside_down: bool = False
        max_side: int = Field(2000, ge=64, le=16384)
        min_change: float = Field(0.02, ge=0, le=1)

    def __init__(self, spec: Spec):
        self.check(spec)
        from rapidocr import RapidOCR  # takes a second, and a search does without it

        self.spec = spec
        paths = {
            "Det.model_path": spec.detection,
            "Rec.model_path": spec.recognition,
            "Rec.rec_keys_path": spec.characters,
        }
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                # Lines that are not sure are left out here: it loses count of its boxes.
                "Global.text_score": 0.0,
                "Global.max_side_len": spec.max_side,
                "Global.use_cls": spec.upside_down,
                "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                **{name: path for name, path in paths.items() if path},
            }
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the package and the model files are there.

        Raises:
            MissingExtra: The package is not installed.
            SpecError: A model file does not exist.
        """
        extras.require("rapidocr", "onnxruntime")
        for field in ("detection", "recognition", "characters"):
            path = getattr(spec, field)
            if path and not Path(path).is_file():
                raise SpecError(field, path, "the path of an existing file", "does not exist")

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Pictures whose text is not known, and frames."""
        return ("scan", "frames")

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """The lines of the picture in reading order, and those of the frames in that of time."""
        lines = []
        if item.get("scan"):
            with Image.open(io.BytesIO(item["scan"])) as image:
                picture = np.asarray(image.convert("RGB"))
            lines += [
                Line(tuple(word for reading in row for word in reading.line.words))
                for row in self._read(picture)
            ]
        if item.get("frames"):
            span = item.get("span")
            times = None
            if span and span["unit"] == "seconds":
                times = span["start"], span["end"]
            lines += read_frames(item["frames"], times, self._read_lines, self.spec.min_change)
        return lines

    def _read_lines(self, picture: np.ndarray) -> list[Reading]:
        """The lines of an image; each cell of a table by itself, since any may change."""
        return list(itertools.chain.from_iterable(self._read(picture)))

    def _read(self, picture: np.ndarray) -> list[list[Reading]]:
        """The rows of an image (height, width, 3) uint8 RGB, in reading order: lines or cells."""
        height, width, _ = picture.shape
        if min(height, width) * min(1.0, self.spec.max_side / max(height, width)) < LEAST_SIDE:
            return []
        result: Any = self._engine(np.ascontiguousarray(picture[:, :, ::-1]), return_word_box=True)
        if getattr(result, "txts", None) is None:
            return []
        size = np.array([width, height])
        readings = []
        for text, confidence, corners, pieces in zip(
            result.txts, result.scores, result.boxes, result.word_results, strict=True
        ):
            if confidence >= self.spec.min_confidence and text.strip():
                boxes = [(s, upright(points, size), float(sure)) for s, sure, points in pieces]
                box = upright(corners, size)
                words = words_of(text, boxes, box, float(confidence))
                readings.append(Reading(Line(tuple(words)), box, float(confidence)))
        from_right = is_right_to_left("".join(reading.line.text for reading in readings))
        blocks = [[TextLine(_inner(r.box, size), r.line.text, r)] for r in readings]
        return [row for block in reading_order(blocks, from_right) for row in block]


def _inner(box: Box, size: np.ndarray) -> np.ndarray:
    """What is surely ink of a line's box: detected boxes are wider, and hide narrow gaps."""
    x0, y0, x1, y1 = box
    height = y1 - y0
    across = min(0.4 * height * size[1] / size[0], 0.4 * (x1 - x0))
    return np.array([x0 + across, y0 + 0.25 * height, x1 - across, y1 - 0.25 * height])


def upright(corners: Any, size: np.ndarray) -> Box:
    """The upright box in [0, 1] around four corners in pixels of a picture (width, height).

    >>> upright([[10, 0], [20, 10], [10, 20], [-2, 10]], np.array([40, 20]))
    (0.0, 0.0, 0.5, 1.0)
    """
    points = (np.asarray(corners, dtype=np.float64) / size).clip(0, 1)
    return (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())


def words_of(
    text: str, pieces: list[tuple[str, Box, float]], box: Box, confidence: float
) -> list[Word]:
    """The words of a line that was read in pieces: words, or characters, or parts of words.

    Args:
        text: Text of the line.
        pieces: (string without white space, box, confidence) in the order of the text.
        box: Box of the line, used for all words if text and pieces disagree.
        confidence: Confidence of the line, used in the same case.

    >>> boxes = (0, 0, 0.1, 1), (0.1, 0, 0.2, 1), (0.4, 0, 0.6, 1)
    >>> pieces = list(zip(("a", "b", "cd"), boxes, (0.5, 1.0, 0.8)))
    >>> words = words_of("ab cd", pieces, (0, 0, 1, 1), 0.7)
    >>> [(word.text, word.box, word.confidence) for word in words]
    [('ab', (0, 0, 0.2, 1), 0.75), ('cd', (0.4, 0, 0.6, 1), 0.8)]
    """
    strings = text.split()
    characters = [(c, own, sure) for string, own, sure in pieces for c in string]
    if "".join(strings) != "".join(character for character, *_ in characters):
        # As in scripts that run from the right.
        return [Word(string, box, confidence=confidence) for string in strings]
    words, first = [], 0
    for string in strings:
        _, own, sure = zip(*characters[first : first + len(string)], strict=True)
        x0, y0, x1, y1 = zip(*own, strict=True)
        around = (min(x0), min(y0), max(x1), max(y1))
        words.append(Word(string, around, confidence=float(np.mean(sure))))
        first += len(string)
    return words

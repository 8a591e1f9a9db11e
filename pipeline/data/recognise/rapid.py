"""OCR with RapidOCR, which runs PP-OCR models on the CPU. The models are part of its wheel."""

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
from pipeline.data.decode.layout import TextLine, is_right_to_left, reading_order
from pipeline.data.recognise import Line, Recogniser, Word
from pipeline.data.recognise.frames import Box, OcrLine, read_frames

#: Minimum side of an image, in pixels, for text recognition.
MIN_SIDE = 16


class Rapid(Recogniser["Rapid.Spec"]):
    """Text detection and recognition with RapidOCR. The included models read Latin and Chinese.

    Words are separated by white space, so a line of a script without spaces is one word. The box of
    a rotated word is its bounding box. Columns of text separated by white space are read one after
    the other, and tables row by row. Only video frames that show changes are read, see
    `read_frames`.
    """

    class Spec(config.ComponentSpec):
        """Options of RapidOCR."""

        name: Literal["rapidocr"] = "rapidocr"
        detection: config.Uri | None = None
        """ONNX file of a PP-OCR detection model. Defaults to the included model."""
        recognition: config.Uri | None = None
        """ONNX file of a PP-OCR recognition model, for other scripts. Defaults to the included
        model."""
        characters: config.Uri | None = None
        """File with the characters of the recognition model, one per line, if the ONNX file does
        not include them."""
        min_confidence: float = Field(0.5, ge=0, le=1)
        """Minimum confidence of a line. Other lines are omitted."""
        upside_down: bool = False
        """Whether to recognise upside-down lines; may misread short upright lines."""
        max_side: int = Field(2000, ge=64, le=16384)
        """Maximum side of an image, in pixels. Larger images are scaled down."""
        min_change: float = Field(0.02, ge=0, le=1)
        """Minimum change (`frames.max_change`) between the last frame that was read and a frame
        that is read, 0 to 1. Frames in which a line has changed are also read."""

    def __init__(self, spec: Spec):
        self.check(spec)
        from rapidocr import RapidOCR  # takes a second, and searches do not need it

        self.spec = spec
        paths = {
            "Det.model_path": spec.detection,
            "Rec.model_path": spec.recognition,
            "Rec.rec_keys_path": spec.characters,
        }
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                # Filtered in `_read`: RapidOCR's filter mixes up the boxes of words.
                "Global.text_score": 0.0,
                "Global.max_side_len": spec.max_side,
                "Global.use_cls": spec.upside_down,
                # A batch is padded to its longest line: six lines at once take a fifth longer.
                "Rec.rec_batch_num": 1,
                "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                **{name: path for name, path in paths.items() if path},
            }
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the package and the model files exist."""
        extras.require("rapidocr", "onnxruntime")
        for field in ("detection", "recognition", "characters"):
            path = getattr(spec, field)
            if path and not Path(path).is_file():
                raise SpecError(field, path, "the path of an existing file", "does not exist")

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """Returns "scan" and "frames"."""
        return ("scan", "frames")

    def lines(self, item: dict[str, Any]) -> list[Line]:
        """Returns the lines of the image in reading order, and those of frames in order of time."""
        lines = []
        if item.get("scan"):
            with Image.open(io.BytesIO(item["scan"])) as image:
                pixels = np.asarray(image.convert("RGB"))
            lines += [
                Line(tuple(word for reading in row for word in reading.line.words))
                for row in self._read(pixels)
            ]
        if item.get("frames"):
            span = item.get("span")
            times = None
            if span and span["unit"] == "seconds":
                times = span["start"], span["end"]
            lines += read_frames(item["frames"], times, self._read_lines, self.spec.min_change)
        return lines

    def _read_lines(self, pixels: np.ndarray) -> list[OcrLine]:
        """Returns the lines of an image, with each table cell as a line, since any may change."""
        return list(itertools.chain.from_iterable(self._read(pixels)))

    def _read(self, pixels: np.ndarray) -> list[list[OcrLine]]:
        """Returns the rows of an image (height, width, 3) uint8 RGB: lines or table cells."""
        height, width, _ = pixels.shape
        if min(height, width) * min(1.0, self.spec.max_side / max(height, width)) < MIN_SIDE:
            return []
        result: Any = self._engine(np.ascontiguousarray(pixels[:, :, ::-1]), return_word_box=True)
        if getattr(result, "txts", None) is None:
            return []
        size = np.array([width, height])
        readings = []
        for text, confidence, corners, pieces in zip(
            result.txts, result.scores, result.boxes, result.word_results, strict=True
        ):
            if confidence >= self.spec.min_confidence and text.strip():
                boxes = [(s, bounding_box(points, size), float(prob)) for s, prob, points in pieces]
                box = bounding_box(corners, size)
                words = split_words(text, boxes, box, float(confidence))
                readings.append(OcrLine(Line(tuple(words)), box, float(confidence)))
        from_right = is_right_to_left("".join(reading.line.text for reading in readings))
        blocks = [[TextLine(_shrink_box(r.box, size), r.line.text, r)] for r in readings]
        return [row for block in reading_order(blocks, from_right) for row in block]


def _shrink_box(box: Box, size: np.ndarray) -> np.ndarray:
    """Shrinks the box of a line to its ink. Detected boxes are too wide and hide narrow gaps."""
    x0, y0, x1, y1 = box
    height = y1 - y0
    across = min(0.4 * height * size[1] / size[0], 0.4 * (x1 - x0))
    return np.array([x0 + across, y0 + 0.25 * height, x1 - across, y1 - 0.25 * height])


def bounding_box(corners: Any, size: np.ndarray) -> Box:
    """Returns the bounding box in [0, 1] of four corners x y in pixels, (4, 2).

    >>> bounding_box([[10, 0], [20, 10], [10, 20], [-2, 10]], np.array([40, 20]))
    (0.0, 0.0, 0.5, 1.0)
    """
    points = (np.asarray(corners, dtype=np.float64) / size).clip(0, 1)
    return (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())


def split_words(
    text: str, pieces: list[tuple[str, Box, float]], box: Box, confidence: float
) -> list[Word]:
    """Combines recognised pieces, which may be characters or parts of words, to words.

    `pieces` have no white space and are in the order of the text. If they disagree with it, all
    words have the box and the confidence of the line.

    >>> boxes = (0, 0, 0.1, 1), (0.1, 0, 0.2, 1), (0.4, 0, 0.6, 1)
    >>> pieces = list(zip(("a", "b", "cd"), boxes, (0.5, 1.0, 0.8)))
    >>> words = split_words("ab cd", pieces, (0, 0, 1, 1), 0.7)
    >>> [(word.text, word.box, word.confidence) for word in words]
    [('ab', (0, 0, 0.2, 1), 0.75), ('cd', (0.4, 0, 0.6, 1), 0.8)]
    """
    strings = text.split()
    characters = [(c, c_box, c_prob) for string, c_box, c_prob in pieces for c in string]
    if "".join(strings) != "".join(character for character, *_ in characters):
        # Right-to-left scripts, for example.
        return [Word(string, box, confidence=confidence) for string in strings]
    words, first = [], 0
    for string in strings:
        _, boxes, probabilities = zip(*characters[first : first + len(string)], strict=True)
        x0, y0, x1, y1 = zip(*boxes, strict=True)
        word_box = (min(x0), min(y0), max(x1), max(y1))
        words.append(Word(string, word_box, confidence=float(np.mean(probabilities))))
        first += len(string)
    return words

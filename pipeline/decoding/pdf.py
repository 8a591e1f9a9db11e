"""Reads the words of PDF pages with their boxes, and renders pages."""

from __future__ import annotations

import ctypes
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as raw

from pipeline.decoding import Unreadable
from pipeline.decoding.layout import TextLine, is_right_to_left, reading_order

#: Reasons of PDFium's error codes when opening a document.
OPEN_ERRORS = {3: "corrupted PDF", 4: "encrypted", 5: "encrypted", 6: "corrupted PDF"}

#: Number of pages after which a document is reopened, because PDFium caches what it reads.
PAGES_PER_OPENING = 100

#: Code of a hyphen at the end of a line whose word continues in the next line.
HYPHEN = 0x02

#: Codes that separate words: white space, control characters and non-characters.
_BREAKS = frozenset(
    code for code in range(0x10000) if code < 32 or chr(code).isspace() or code >= 0xFFFE
)


def open_document(path: str) -> pdfium.PdfDocument:
    """Opens a PDF.

    Raises:
        Unreadable: The file is not a PDF, is corrupted or encrypted, or has no pages.
    """
    with open(path, "rb") as file:
        head = file.read(1024)
    if not head:
        raise Unreadable("empty file")
    if b"%PDF-" not in head:
        raise Unreadable("not a PDF", f"starts with {head[:8]!r}")
    try:
        document = pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        # PDFium reports "Success" for a file without pages.
        reason = "no pages" if "Success" in str(error) else None
        reason = reason or OPEN_ERRORS.get(getattr(error, "err_code", 0), "corrupted PDF")
        raise Unreadable(reason, str(error)) from None
    if len(document) == 0:
        raise Unreadable("no pages")
    return document


def describe(path: str) -> dict[str, Any]:
    """Returns the number of pages of a document as `num_pages`, and its `title` or None."""
    document = open_document(path)
    title = " ".join(document.get_metadata_value("Title").split())
    return {"num_pages": len(document), "title": title or None}


def read_pages(
    path: str, numbers: list[int], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields one result per page.

    Args:
        path: Path of the file.
        numbers: Page numbers, from 1.
        settings: `text`, whether to read the words; `image`, whether to render the page, or "no
            text" to render it only if it has no words; `dpi`, the resolution of the image;
            `max_pixels`, the maximum size of the image in pixels, larger ones are scaled down.
    """
    for first in range(0, len(numbers), PAGES_PER_OPENING):
        document = open_document(path)
        for number in numbers[first : first + PAGES_PER_OPENING]:
            try:
                page = document[number - 1]
                yield read_page(page, document.get_page_label(number - 1), settings)
                page.close()
            except pdfium.PdfiumError as error:
                yield Unreadable("corrupted page", str(error))
            except MemoryError:
                yield Unreadable("out of memory", "the page exceeds the memory limit")
        document.close()


def read_page(page: pdfium.PdfPage, label: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the requested content of a page.

    Args:
        page: The page.
        label: Label of the page.
        settings: See `read_pages`.

    Returns:
        `label`; `size` in points as displayed; `num_objects`; `text`, `word_spans` (W, 2) int32 and
        `word_boxes` (W, 4) float32, see `page_words`; `image`, a JPEG, if the page was rendered.
    """
    result = {
        "label": label or None,
        "size": tuple(round(side, 1) for side in page.get_size()),
        "num_objects": raw.FPDFPage_CountObjects(page),
    }
    if settings["text"]:
        result["text"], result["word_spans"], result["word_boxes"] = page_words(page)
    mode = settings["image"]
    if mode is True or (mode == "no text" and not result["text"] and result["num_objects"]):
        result["image"] = render(page, settings["dpi"], settings["max_pixels"])
    return result


def render(page: pdfium.PdfPage, dpi: float, max_pixels: int) -> bytes:
    """Renders a page as a JPEG, as displayed: rotated, and clipped to its crop box.

    Args:
        page: The page.
        dpi: Resolution, in pixels per inch.
        max_pixels: Maximum size of the image, in pixels; larger images are scaled down.
    """
    width, height = page.get_size()
    scale = min(dpi / 72, (max_pixels / (width * height)) ** 0.5)
    image = page.render(scale=scale).to_pil().convert("RGB")
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=92)
    return jpeg.getvalue()


def page_words(page: pdfium.PdfPage) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns the words of a page in reading order.

    Lines and table rows end with a line break, and blocks with two. A word that is hyphenated at
    the end of a line is one word of the text with two boxes.

    Returns:
        (text, spans, boxes): the text; for each box its characters in the text, (W, 2) int32; the
        boxes x0 y0 x1 y1, (W, 4) float32, in [0, 1] of the displayed page from its upper left
        corner. Words outside of the page are omitted.
    """
    codes, corners = read_characters(page)
    boxes = to_display_boxes(page, corners)
    lines = _lines(codes, boxes)
    text, length = [], 0
    spans, piece_boxes = [], []
    from_right = is_right_to_left("".join(map(chr, codes[codes < 0xD800])))
    for number, block in enumerate(reading_order(_blocks(lines), from_right)):
        for row, cells in enumerate(block):
            for column, (string, box, joins) in enumerate(itertools.chain(*cells)):
                if column or row or number:
                    gap = "" if joins else " " if column else "\n" if row else "\n\n"
                    text.append(gap)
                    length += len(gap)
                text.append(string)
                spans.append((length, length + len(string)))
                piece_boxes.append(box)
                length += len(string)
    return (
        "".join(text),
        np.array(spans, np.int32).reshape(-1, 2),
        np.array(piece_boxes, np.float32).reshape(-1, 4),
    )


def read_characters(page: pdfium.PdfPage) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters of a page in drawing order.

    Returns:
        (codes, corners): code points (n,), and left, top, right, bottom in points (n, 4). Only the
        first and last character of each word have corners, others are zero, because querying them
        takes most of the time.
    """
    textpage = page.get_textpage()
    number = textpage.count_chars()
    codes = np.array([raw.FPDFText_GetUnicode(textpage, i) for i in range(number)], np.int64)
    in_word = ~np.isin(codes, list(_BREAKS))
    previous, following = np.r_[False, in_word[:-1]], np.r_[in_word[1:], False]
    rectangles = (raw.FS_RECTF * number)()
    pointer, size = ctypes.POINTER(raw.FS_RECTF), ctypes.sizeof(raw.FS_RECTF)
    # Loose boxes have the height of the font, so all words of a line have the same height.
    for i in np.flatnonzero(in_word & ~(previous & following)).tolist():
        rectangle = ctypes.cast(ctypes.byref(rectangles, i * size), pointer)
        raw.FPDFText_GetLooseCharBox(textpage, i, rectangle)
    corners = np.frombuffer(rectangles, np.float32).reshape(-1, 4).astype(np.float64)
    return codes, corners


def to_display_boxes(page: pdfium.PdfPage, corners: np.ndarray) -> np.ndarray:
    """Converts boxes in points to [0, 1] of the displayed page.

    Args:
        page: The page.
        corners: (n, 4) left, top, right, bottom in points.

    Returns:
        (n, 4) x0 y0 x1 y1.
    """
    unit, distance = 10**8, 1000.0  # a device resolution that makes rounding errors negligible
    x, y = ctypes.c_int(), ctypes.c_int()

    def at(point_x: float, point_y: float) -> np.ndarray:
        raw.FPDF_PageToDevice(page, 0, 0, unit, unit, 0, point_x, point_y, x, y)
        return np.array([x.value, y.value]) / unit

    origin = at(0, 0)
    matrix = np.stack([at(distance, 0) - origin, at(0, distance) - origin]) / distance
    first = corners[:, [0, 1]] @ matrix + origin
    second = corners[:, [2, 3]] @ matrix + origin
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


#: String, box, and whether the piece continues the previous one.
Piece = tuple[str, np.ndarray, bool]
Line = list[Piece]


def _lines(codes: np.ndarray, boxes: np.ndarray) -> list[Line]:
    """Returns lines of words in drawing order, without invisible words."""
    lines: list[Line] = [[]]
    letters: list[str] = []
    first = 0
    joins = False

    def end(stop: int) -> None:
        if not letters:
            return
        corners = boxes[first:stop]
        # Generated characters have empty boxes.
        corners = corners[(corners[:, 2] > corners[:, 0]) | (corners[:, 3] > corners[:, 1])]
        string = "".join(letters).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        letters.clear()
        if not len(corners):
            return
        box = np.concatenate([corners[:, :2].min(axis=0), corners[:, 2:].max(axis=0)])
        if (box[2:] > 0).all() and (box[:2] < 1).all():
            lines[-1].append((string, box.clip(0, 1), joins and bool(lines[-1])))

    for i, code in enumerate(codes.tolist()):
        character = chr(code)
        if code in _BREAKS:
            end(i)
            joins = code == HYPHEN
            if character in "\r\n" and lines[-1]:
                lines.append([])
        else:
            if not letters:
                first = i
            letters.append(character)
    end(len(codes))
    return [line for line in lines if line]


def _blocks(lines: list[Line]) -> list[list[TextLine[Line]]]:
    """Groups consecutive lines that are drawn below each other."""
    blocks: list[list[TextLine[Line]]] = []
    for line in lines:
        boxes = np.stack([box for _, box, _ in line])
        box = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])
        text_line = TextLine(box, " ".join(string for string, _, _ in line), line)
        if blocks:
            block = blocks[-1]
            previous = block[-1].box
            height = max(box[3] - box[1], previous[3] - previous[1], 1e-6)
            is_below = -0.5 * height < box[1] - previous[3] < 0.8 * height
            left, right = min(other.box[0] for other in block), max(o.box[2] for o in block)
            if is_below and min(box[2], right) > max(box[0], left):
                block.append(text_line)
                continue
        blocks.append([text_line])
    return blocks

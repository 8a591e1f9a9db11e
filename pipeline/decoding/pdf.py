"""One PDF: its pages' words with boxes, and their images."""

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

#: What PDFium says when a document cannot be opened.
OPEN_ERRORS = {3: "damaged PDF", 4: "encrypted", 5: "encrypted", 6: "damaged PDF"}

#: A document is opened anew after so many pages: PDFium keeps what it has read of it.
PAGES_AN_OPENING = 100

#: What stands for a hyphen at the end of a line whose word goes on in the next.
HYPHEN = 0x02

#: Codes that stand between words: white space, controls, and what is no character.
_BREAKS = frozenset(
    code for code in range(0x10000) if code < 32 or chr(code).isspace() or code >= 0xFFFE
)


def open_document(path: str) -> pdfium.PdfDocument:
    """Opens a PDF.

    Raises:
        Unreadable: it is no PDF, damaged, encrypted, or has no page.
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
        # PDFium's error of a file without pages is "Success".
        reason = "no pages" if "Success" in str(error) else None
        reason = reason or OPEN_ERRORS.get(getattr(error, "err_code", 0), "damaged PDF")
        raise Unreadable(reason, str(error)) from None
    if len(document) == 0:
        raise Unreadable("no pages")
    return document


def describe(path: str) -> dict[str, Any]:
    """How many pages a document has, and its title or None."""
    document = open_document(path)
    title = " ".join(document.get_metadata_value("Title").split())
    return {"num_pages": len(document), "title": title or None}


def read_pages(
    path: str, numbers: list[int], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Reads pages, one result each.

    Args:
        path: Path of the file.
        numbers: Page numbers, from 1.
        settings: `text`, whether to read the words; `image`, whether to render the page, "no text"
            only if it has no words; `dpi`, the resolution of the image; `max_pixels`, the maximum
            size of the image in pixels, larger ones are scaled down.
    """
    for first in range(0, len(numbers), PAGES_AN_OPENING):
        document = open_document(path)
        for number in numbers[first : first + PAGES_AN_OPENING]:
            try:
                page = document[number - 1]
                yield read_page(page, document.get_page_label(number - 1), settings)
                page.close()
            except pdfium.PdfiumError as error:
                yield Unreadable("damaged page", str(error))
            except MemoryError:
                yield Unreadable("out of memory", "the page needs more than the process may take")
        document.close()


def read_page(page: pdfium.PdfPage, label: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What is asked for of a page.

    Returns:
        `label`, `size` in points as displayed, `num_objects`; `text`, `word_spans` (W, 2) int32 and
        `word_boxes` (W, 4) float32 as in `page_words`; `image`, a JPEG, if it was drawn.
    """
    result = {
        "label": label or None,
        "size": tuple(round(side, 1) for side in page.get_size()),
        "num_objects": raw.FPDFPage_CountObjects(page),
    }
    if settings["text"]:
        result["text"], result["word_spans"], result["word_boxes"] = page_words(page)
    wanted = settings["image"]
    if wanted is True or (wanted == "no text" and not result["text"] and result["num_objects"]):
        result["image"] = render(page, settings["dpi"], settings["max_pixels"])
    return result


def render(page: pdfium.PdfPage, dpi: float, max_pixels: int) -> bytes:
    """The page as a JPEG, as displayed: rotated, and cut to its crop box."""
    width, height = page.get_size()
    scale = min(dpi / 72, (max_pixels / (width * height)) ** 0.5)
    image = page.render(scale=scale).to_pil().convert("RGB")
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=92)
    return jpeg.getvalue()


def page_words(page: pdfium.PdfPage) -> tuple[str, np.ndarray, np.ndarray]:
    """The words of a page in reading order.

    Lines and rows of tables end with a line break, blocks of them with two. A word that a hyphen
    divides between two lines is one word of the text and two boxed parts.

    Returns:
        (text, spans, boxes): for each boxed part its characters in the text, (W, 2) int32, and its
        box x0 y0 x1 y1, (W, 4) float32, in [0, 1] of the displayed page from its upper left corner.
        Words that lie outside of the page are left out.
    """
    codes, corners = characters(page)
    boxes = displayed(page, corners)
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


def characters(page: pdfium.PdfPage) -> tuple[np.ndarray, np.ndarray]:
    """The characters of a page in the order in which it draws them.

    Returns:
        (codes, corners): (n,) code points, and (n, 4) left, top, right, bottom in points; of a word
        the first and the last character have them, the others zeros: asking takes most of the time.
    """
    textpage = page.get_textpage()
    number = textpage.count_chars()
    codes = np.array([raw.FPDFText_GetUnicode(textpage, i) for i in range(number)], np.int64)
    in_word = ~np.isin(codes, list(_BREAKS))
    before, behind = np.r_[False, in_word[:-1]], np.r_[in_word[1:], False]
    rectangles = (raw.FS_RECTF * number)()
    pointer, size = ctypes.POINTER(raw.FS_RECTF), ctypes.sizeof(raw.FS_RECTF)
    # Loose boxes have the font's height: words of a line look alike.
    for i in np.flatnonzero(in_word & ~(before & behind)).tolist():
        at = ctypes.cast(ctypes.byref(rectangles, i * size), pointer)
        raw.FPDFText_GetLooseCharBox(textpage, i, at)
    corners = np.frombuffer(rectangles, np.float32).reshape(-1, 4).astype(np.float64)
    return codes, corners


def displayed(page: pdfium.PdfPage, corners: np.ndarray) -> np.ndarray:
    """(n, 4) left, top, right, bottom in points -> x0 y0 x1 y1 in [0, 1] of the displayed page."""
    unit, far = 10**8, 1000.0  # of a device so fine that its whole pixels do not matter
    x, y = ctypes.c_int(), ctypes.c_int()

    def at(point_x: float, point_y: float) -> np.ndarray:
        raw.FPDF_PageToDevice(page, 0, 0, unit, unit, 0, point_x, point_y, x, y)
        return np.array([x.value, y.value]) / unit

    origin = at(0, 0)
    matrix = np.stack([at(far, 0) - origin, at(0, far) - origin]) / far
    first = corners[:, [0, 1]] @ matrix + origin
    second = corners[:, [2, 3]] @ matrix + origin
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


Piece = tuple[str, np.ndarray, bool]  # the string, its box, whether it goes on the piece before it
Line = list[Piece]


def _lines(codes: np.ndarray, boxes: np.ndarray) -> list[Line]:
    """Lines of words as the page draws them; what is not to be seen is left out."""
    lines: list[Line] = [[]]
    letters: list[str] = []
    first = 0
    joins = False

    def end(stop: int) -> None:
        if not letters:
            return
        own = boxes[first:stop]
        own = own[(own[:, 2] > own[:, 0]) | (own[:, 3] > own[:, 1])]  # generated ones have none
        string = "".join(letters).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        letters.clear()
        if not len(own):
            return
        box = np.concatenate([own[:, :2].min(axis=0), own[:, 2:].max(axis=0)])
        if (box[2:] > 0).all() and (box[:2] < 1).all():
            lines[-1].append((string, box.clip(0, 1), joins and bool(lines[-1])))

    for i, code in enumerate(codes.tolist()):
        character = chr(code)
        if code in _BREAKS:  # some fonts have a space of their own
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
    """Runs of lines that the page draws one below the other."""
    blocks: list[list[TextLine[Line]]] = []
    for line in lines:
        boxes = np.stack([box for _, box, _ in line])
        box = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])
        this = TextLine(box, " ".join(string for string, _, _ in line), line)
        if blocks:
            block = blocks[-1]
            before = block[-1].box
            height = max(box[3] - box[1], before[3] - before[1], 1e-6)
            is_below = -0.5 * height < box[1] - before[3] < 0.8 * height
            left, right = min(other.box[0] for other in block), max(o.box[2] for o in block)
            if is_below and min(box[2], right) > max(box[0], left):
                block.append(this)
                continue
        blocks.append([this])
    return blocks

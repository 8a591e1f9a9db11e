"""Reader that extracts the words of PDF pages with their bounding boxes, and renders pages."""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as raw

from pipeline.data.decode import Unreadable
from pipeline.data.decode.layout import TextLine, is_right_to_left, reading_order

#: Reasons for the error codes that PDFium returns when it opens a document.
OPEN_ERRORS = {3: "corrupted PDF", 4: "encrypted", 5: "encrypted", 6: "corrupted PDF"}

#: A document is reopened after this number of pages, because PDFium caches everything it reads.
PAGES_PER_OPENING = 100

#: A page whose images cover at least this share of it is a scan, unless its text layer has more
#: letters and digits than the stamps, page numbers and headers that are added to scans.
MIN_SCAN_SHARE, MAX_STAMP_LETTERS = 0.5, 150
#: Maximum length of the side of an image in pixels, which is the limit of JPEG (65,500) without
#: rounding errors.
MAX_SIDE = 65_499
#: Number of rows and columns of the grid on which the share of images is measured.
GRID = 100

#: Text that some programs write in place of a character that a font does not map to Unicode.
UNMAPPED = re.compile(r"\(cid:\d+\)|\ufffd")

#: Character code of a hyphen that splits a word at the end of a line.
HYPHEN = 0x02

#: Annotations of these types show nothing on the page itself, and those with these flags are not
#: displayed.
_NOT_ON_PAGE = (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP)
_NOT_DISPLAYED = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW

#: Codes that separate words, which are white space, control characters and non-characters.
_BREAKS = frozenset(
    code for code in range(0x10000) if code < 32 or chr(code).isspace() or code >= 0xFFFE
)


def open_document(path: str) -> pdfium.PdfDocument:
    """Opens a PDF document.

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
        document.init_forms()  # draws the values of form fields that have no appearance
    except pdfium.PdfiumError as error:
        # PDFium reports "Success" for a file that has no pages.
        reason = "no pages" if "Success" in str(error) else None
        reason = reason or OPEN_ERRORS.get(getattr(error, "err_code", 0), "corrupted PDF")
        raise Unreadable(reason, str(error)) from None
    if len(document) == 0:
        raise Unreadable("no pages")
    return document


def describe(path: str) -> dict[str, Any]:
    """Returns the number of pages of a document as `num_pages`, and its `title` or None."""
    document = open_document(path)
    title = " ".join(_read_string(raw.FPDF_GetMetaText, document, b"Title").split())
    return {"num_pages": len(document), "title": title or None}


def _read_string(function: Callable[..., int], *arguments: Any) -> str:
    """Calls a function of PDFium that writes a string, and omits halves of surrogate pairs."""
    buffer = ctypes.create_string_buffer(function(*arguments, None, 0))
    function(*arguments, buffer, len(buffer))
    return buffer.raw.decode("utf-16-le", "ignore").rstrip("\0")


def read_pages(
    path: str, numbers: list[int], settings: dict[str, Any]
) -> Iterator[dict[str, Any] | Unreadable]:
    """Reads pages of a document, numbered from 1, and yields one result per page.

    In `settings`, `text` selects whether to read the words, `image` whether to render all pages,
    and `scan` whether to render those whose text must be recognised. Images have a resolution of
    `dpi` and at most `max_pixels` pixels.
    """
    for first in range(0, len(numbers), PAGES_PER_OPENING):
        document = open_document(path)
        for number in numbers[first : first + PAGES_PER_OPENING]:
            try:
                page = open_page(document, number)
                label = _read_string(raw.FPDF_GetPageLabel, document, number - 1)
                yield read_page(page, label, settings)
                page.close()
            except pdfium.PdfiumError as error:
                yield Unreadable("corrupted page", str(error))
            except MemoryError:
                yield Unreadable("out of memory", "the page exceeds the memory limit")
        document.close()


def open_page(document: pdfium.PdfDocument, number: int) -> pdfium.PdfPage:
    """Opens a page by its number from 1, with visible form fields and annotations as content."""
    page = document[number - 1]
    is_annotated = False
    for index in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, index)
        flags = raw.FPDFAnnot_GetFlags(annotation)
        if flags & _NOT_DISPLAYED:
            # Otherwise, PDFium would flatten fields that are only printed.
            raw.FPDFAnnot_SetFlags(annotation, flags | raw.FPDF_ANNOT_FLAG_HIDDEN)
        elif raw.FPDFAnnot_GetSubtype(annotation) not in _NOT_ON_PAGE:
            is_annotated = True
        raw.FPDFPage_CloseAnnot(annotation)
    if not is_annotated:
        return page
    box = page.get_bbox()  # flattening replaces inherited boxes by US letter
    page.set_mediabox(*box)
    page.set_cropbox(*box)
    raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
    page.close()
    return document[number - 1]


def read_page(page: pdfium.PdfPage, label: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads the requested content of a page.

    Returns:
        A mapping with the `label`, the `size` in points as displayed and `num_objects`. If
        requested, it also contains `text`, `word_spans` (W, 2) int32 and `word_boxes` (W, 4)
        float32, see `page_words`, and `image`, the page as a JPEG file. `is_garbled` states that
        the text layer was ignored (see `is_legible`), and `needs_ocr` that it is not the whole text
        of the page (see `is_stamped_scan`).
    """
    result = {
        "label": label or None,
        "size": tuple(round(side, 1) for side in page.get_size()),
        "num_objects": raw.FPDFPage_CountObjects(page),
        "is_garbled": False,
        "needs_ocr": False,
    }
    if settings["text"]:
        text, spans, boxes = page_words(page)
        if text and not is_legible(text):
            text, spans, boxes = "", spans[:0], boxes[:0]
            result["is_garbled"] = True
        result |= {"text": text, "word_spans": spans, "word_boxes": boxes}
        if settings.get("scan") and result["num_objects"]:
            result["needs_ocr"] = not text or is_stamped_scan(page, text)
    if settings["image"] or result["needs_ocr"]:
        result["image"] = render(page, settings["dpi"], settings["max_pixels"])
    return result


def is_legible(text: str) -> bool:
    """Checks whether a text consists of letters and digits, and not of characters without meaning.

    Text layers of fonts without a map to Unicode contain private-use, unassigned, control or
    replacement characters, or signs. Runs of equal signs count once, such as leaders and rules.

    >>> is_legible("1.2 Lift ........ 12"), is_legible("กำแพงเมือง"), is_legible("$ (1,299.00)")
    (True, True, True)
    >>> is_legible("\ue054\ue068\ue065 \ue077 3"), is_legible("(cid:3)(cid:5) a"), is_legible("□!")
    (False, False, False)
    """
    counts: Counter[str] = Counter()
    for character, run in itertools.groupby("".join(UNMAPPED.sub("\0", text).split())):
        kind = unicodedata.category(character)[0]
        counts[kind] += 1 if kind in "PS" else len(list(run))
    num_letters = counts["L"] + counts["M"] + counts["N"]
    num_signs = counts["P"] + counts["S"]
    return num_letters > 0 and num_letters >= max(2 * counts["C"], num_signs / 4)


def is_stamped_scan(page: pdfium.PdfPage, text: str) -> bool:
    """Checks whether a page consists of images and a few words, which do not replace OCR."""
    if sum(map(str.isalnum, text)) > MAX_STAMP_LETTERS:
        return False
    corners = []
    for item in page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE]):
        left, bottom, right, top = item.get_bounds()
        while (item := item.container) is not None:  # bounds are relative to the form
            left, bottom, right, top = item.get_matrix().on_rect(left, bottom, right, top)
        corners.append((left, top, right, bottom))
    boxes = to_display_boxes(page, np.array(corners).reshape(-1, 4)).clip(0, 1)
    is_image = np.zeros((GRID, GRID), bool)
    for x0, y0, x1, y1 in boxes * GRID:
        is_image[int(y0) : math.ceil(y1), int(x0) : math.ceil(x1)] = True
    return bool(is_image.mean() >= MIN_SCAN_SHARE)


def render(page: pdfium.PdfPage, dpi: float, max_pixels: int) -> bytes:
    """Renders a page, rotated and clipped to its crop box, as a JPEG file.

    It is scaled down to at most `max_pixels` pixels, and sides of at most `MAX_SIDE`.
    """
    width, height = page.get_size()
    scale = min(dpi / 72, (max_pixels / (width * height)) ** 0.5, MAX_SIDE / max(width, height))
    image = page.render(scale=scale).to_pil().convert("RGB")
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=92)
    return jpeg.getvalue()


def page_words(page: pdfium.PdfPage) -> tuple[str, np.ndarray, np.ndarray]:
    """Extracts the words of a page in reading order.

    Lines and table rows end with a line break, and blocks end with two. A word that is hyphenated
    at the end of a line is a single word of the text that has two boxes. Words outside the page are
    omitted.

    Returns:
        The text, the range of characters in the text that each box covers, (W, 2) int32, and the
        boxes x0 y0 x1 y1, (W, 4) float32. Boxes are in [0, 1] of the displayed page, and the origin
        is its upper left corner.
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
    """Returns the code points (n,) of a page in drawing order, and left, top, right, bottom (n, 4).

    Boxes are in points. Querying them takes most of the time, so they are set only for the first
    and last character of each word, and zero otherwise.
    """
    textpage = page.get_textpage()
    number = textpage.count_chars()
    codes = np.array([raw.FPDFText_GetUnicode(textpage, i) for i in range(number)], np.int64)
    in_word = ~np.isin(codes, list(_BREAKS))
    previous, following = np.r_[False, in_word[:-1]], np.r_[in_word[1:], False]
    rectangles = (raw.FS_RECTF * number)()
    pointer, size = ctypes.POINTER(raw.FS_RECTF), ctypes.sizeof(raw.FS_RECTF)
    # Loose boxes are as high as the font, so all words of a line have the same height.
    for i in np.flatnonzero(in_word & ~(previous & following)).tolist():
        rectangle = ctypes.cast(ctypes.byref(rectangles, i * size), pointer)
        raw.FPDFText_GetLooseCharBox(textpage, i, rectangle)
    corners = np.frombuffer(rectangles, np.float32).reshape(-1, 4).astype(np.float64)
    return codes, corners


def to_display_boxes(page: pdfium.PdfPage, corners: np.ndarray) -> np.ndarray:
    """Converts left, top, right, bottom in points (n, 4) to x0 y0 x1 y1 in [0, 1] as displayed."""
    unit = 10**8  # a resolution at which rounding errors are negligible
    left, bottom, _, _ = page.get_bbox()
    distance = min(1000.0, 20 * min(page.get_size()))  # coordinates are 32-bit integers
    x, y = ctypes.c_int(), ctypes.c_int()

    def at(point_x: float, point_y: float) -> np.ndarray:
        raw.FPDF_PageToDevice(page, 0, 0, unit, unit, 0, point_x, point_y, x, y)
        return np.array([x.value, y.value]) / unit

    origin = at(left, bottom)
    along_x, along_y = at(left + distance, bottom), at(left, bottom + distance)
    matrix = np.stack([along_x - origin, along_y - origin]) / distance
    first = (corners[:, [0, 1]] - [left, bottom]) @ matrix + origin
    second = (corners[:, [2, 3]] - [left, bottom]) @ matrix + origin
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


#: String, box, and whether the piece continues the previous one.
Piece = tuple[str, np.ndarray, bool]
Line = list[Piece]


def _lines(codes: np.ndarray, boxes: np.ndarray) -> list[Line]:
    """Returns the visible lines of words in drawing order."""
    lines: list[Line] = [[]]
    letters: list[str] = []
    first = 0
    joins = False

    def end(stop: int) -> None:
        if not letters:
            return
        corners = boxes[first:stop]
        # Characters that PDFium generates have empty boxes.
        corners = corners[(corners[:, 2] > corners[:, 0]) | (corners[:, 3] > corners[:, 1])]
        string = "".join(letters).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        string = unicodedata.normalize("NFC", string)
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
    """Groups consecutive lines that are drawn one below the other."""
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

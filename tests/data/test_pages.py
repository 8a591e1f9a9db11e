"""The pages source: words and boxes, images, and malformed documents."""

from __future__ import annotations

import io
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from PIL import Image, ImageChops

from pipeline.config import SpecError, parse
from pipeline.data import pages
from pipeline.data.decode import Unreadable
from pipeline.data.decode.pdf import is_legible
from pipeline.data.decode.process import DecodingProcess, Limits
from pipeline.data.pages import Pages
from pipeline.schema import Item, Reject
from tests.conftest import ROOT
from tests.pdfs import Page, bomb, pdf

TEXT = {"text": True, "image": False, "dpi": 72, "max_pixels": 10_000}
ENCRYPTED = ROOT / "tests/files/encrypted.pdf"


def source(path: Path | str, wants: tuple[str, ...] = ("text",), **options: Any) -> Pages:
    return Pages(Pages.Spec(path=str(path), **options), wants)


def pdfs() -> DecodingProcess:
    return DecodingProcess("pdf", Limits())


def read(pages: Pages) -> dict[str, Item | Reject]:
    """Returns all decoded items and rejects of a source by id."""
    results = {}
    for shard in pages.shards():
        entries = list(enumerate(pages.scan(shard)))
        wanted = [(position, entry) for position, entry in entries if isinstance(entry, Item)]
        results |= {entry.item_id: entry for _, entry in entries if isinstance(entry, Reject)}
        decoded = list(pages.decode(shard, wanted))
        assert [result.item_id for result in decoded] == [item.item_id for _, item in wanted]
        results |= {result.item_id: result for result in decoded}
    return results


def only_page(tmp_path: Path, page: Page) -> Item:
    (tmp_path / "a.pdf").write_bytes(pdf(page))
    return read(source(tmp_path / "a.pdf"))["a.pdf#page=1"]


def boxes(item: Item) -> dict[str, list[float]]:
    spans, places = item.payload["word_spans"], item.payload["word_boxes"]
    return {
        item.text[start:end]: [round(side, 2) for side in box]
        for (start, end), box in zip(spans, places, strict=True)
    }


# -- text and boxes --------------------------------------------------------------------------


def test_page_is_item(tmp_path):
    (tmp_path / "folder").mkdir()
    document = pdf(Page([(10, 50, "one")]), Page([(10, 50, "two words")]), title="On  numbers")
    (tmp_path / "folder/a b.PDF").write_bytes(document)
    first, second = read(source(tmp_path)).values()
    assert (first.item_id, second.item_id) == ("folder/a b.PDF#page=1", "folder/a b.PDF#page=2")
    assert second.parent_id == "folder/a b.PDF"
    assert (second.modality, second.span, second.title) == ("page", ("page", 2, 2), "On numbers")
    assert second.text == "two words"
    assert second.metadata == {"label": None, "width": 200.0, "height": 100.0}
    assert second.payload["word_spans"].tolist() == [[0, 3], [4, 9]]
    assert first.revision != second.revision


@pytest.mark.parametrize(
    ("page", "expected"),
    [  # Courier is 6 points wide at 10 points; "wing" and "lift" are 24 points long
        (Page(), {"wing": (0.1, 0.22), "lift": (0.5, 0.62)}),
        (Page(rotate=180), {"wing": (0.78, 0.9), "lift": (0.38, 0.5)}),
        (Page(crop=(0, 0, 100, 100)), {"wing": (0.2, 0.44)}),  # the other word is outside
        (Page(crop=(100, 0, 200, 100)), {"lift": (0.0, 0.24)}),
    ],
)
def test_boxes_refer_to_displayed_page(tmp_path, page, expected):
    words = [(20, 50, "wing"), (100, 50, "lift")]
    results = boxes(only_page(tmp_path, Page(words, rotate=page.rotate, crop=page.crop)))
    assert {word: (box[0], box[2]) for word, box in results.items()} == expected


@pytest.mark.parametrize(("rotate", "edge"), [(90, (0.1, 0.22)), (270, (0.78, 0.9))])
def test_rotated_page(tmp_path, rotate, edge):
    item = only_page(tmp_path, Page([(20, 50, "wing")], rotate=rotate))
    assert (item.metadata["width"], item.metadata["height"]) == (100.0, 200.0)
    (box,) = boxes(item).values()
    assert (box[1], box[3]) == edge  # the text direction is vertical


def test_columns_are_read_in_order(tmp_path):
    left, right = (
        [(x, y, f"{column}{row}") for row, y in ((1, 80), (2, 68), (3, 56))]
        for column, x in (("a", 10), ("b", 120))
    )
    wide = [(10, 5, "footer"), (10, 92, "a-heading-over-both-columns")]
    page = Page([*right, wide[0], *left, wide[1]], size=(200, 110))  # drawn in a different order
    text = only_page(tmp_path, page).text
    columns = ["a1", "a2", "a3", "b1", "b2", "b3"]
    assert text.split() == ["a-heading-over-both-columns", *columns, "footer"]


def test_hyphenated_word_has_two_boxes():
    document = str(ROOT / "jobs/data/pages/pdf/us-001.pdf")
    (page,) = pdfs().stream(1, "read_pages", document, [1], TEXT)
    text, spans = page["text"], page["word_spans"].tolist()
    start = text.index("disability estimates presented")
    parts = [i for i, (first, _) in enumerate(spans) if start <= first < start + 10]
    assert [text[slice(*spans[i])] for i in parts] == ["dis", "ability"]
    first, second = (page["word_boxes"][i] for i in parts)
    assert first[0] > second[0] and first[1] < second[1]  # end of a line, and start of the next one


# -- form fields and annotations -------------------------------------------------------------

FIELD = "/Subtype /Widget /FT /Tx /T (a) /V (ZX-48) /DA (/F 10 Tf 0 g) /Rect [20 20 100 40]"
NOTE = "/Subtype /FreeText /Contents (by hand) /DA (/F 10 Tf 0 g) /Rect [20 20 100 40] /F 4"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (f"{FIELD} /F 4", ["ZX-48"]),
        (f"{FIELD} /F 4 /AP << /N 5 0 R >>", ["Drawn"]),  # the appearance, unlike the value
        (FIELD.replace("/Tx", "/Ch /Ff 131072 /Opt [(ZX-48) (ZX-49)]"), ["ZX-48"]),
        (NOTE, ["by", "hand"]),
        (f"{FIELD} /F 2", []),  # hidden
        (f"{FIELD} /F 36", []),  # only printed
        (NOTE.replace("FreeText", "Popup"), []),
        (NOTE.replace("FreeText", "Link"), []),
    ],
)
@pytest.mark.parametrize("rotate", [0, 90])
def test_fields_and_annotations_are_content(tmp_path, annotation, words, rotate):
    form = "BT /F 3000 Tf 0 3000 Td (Drawn) Tj ET"  # is scaled to the rectangle of the field
    page, blank = (
        Page([(20, 80, "Policy")], rotate=rotate, annotations=annotations)
        for annotations in ([annotation], [])
    )
    (tmp_path / "a.pdf").write_bytes(pdf(page, blank, forms=[form]))
    item, without = read(source(tmp_path, ("text", "image"), dpi=72)).values()
    assert sorted(item.text.split()) == sorted(["Policy", *words])
    for word in words:
        x0, y0, x1, y1 = boxes(item)[word]
        if rotate:
            x0, y0, x1, y1 = y0, 1 - x1, y1, 1 - x0
        assert 0.1 <= x0 < x1 <= 0.5 and 0.59 <= y0 < y1 <= 0.85
    images = [Image.open(io.BytesIO(i.payload["image"])).convert("L") for i in (item, without)]
    assert images[0].size == images[1].size
    assert (ImageChops.difference(*images).getextrema()[1] > 100) == bool(words)


def test_inherited_page_size_of_filled_form(tmp_path):
    field = f"{FIELD} /F 4".replace("20 20 100 40", "1000 20 1200 40")
    page = Page([(310, 480, "Policy")], annotations=[field])
    (tmp_path / "a.pdf").write_bytes(pdf(page, inherited="/MediaBox [300 0 1300 500] /Rotate 90"))
    (item,) = read(source(tmp_path)).values()
    assert (item.metadata["width"], item.metadata["height"]) == (1000.0, 500.0)
    assert item.text.split() == ["Policy", "ZX-48"]


# -- text layers that do not replace OCR -----------------------------------------------------

SCAN = "q {} 0 0 {} {} {} cm BI /W 1 /H 1 /CS /G /BPC 8 ID A EI Q "
FULL = SCAN.format(200, 100, 0, 0)
STRIPS = "".join(SCAN.format(180, 5, 10, y) for y in range(0, 100, 5))
STAMP = [(10, 5, "ACME-000123")]
PROSE = [(10, 8 * row, f"{row} ropes of braided polyester") for row in range(12)]
TABLE = [(10, 8 * row, "1,299.00  5.3  (12.5)  48  7,300") for row in range(12)]


@pytest.mark.parametrize(
    ("page", "needs_ocr"),
    [
        (Page(STAMP, drawing=FULL), True),
        (Page(STAMP, drawing=STRIPS), True),
        (Page(STAMP, drawing=FULL, rotate=90), True),
        (Page(STAMP, drawing="q .5 0 0 .5 0 0 cm /X0 Do Q"), True),  # an image in a form
        (Page(STAMP, drawing="q .1 0 0 .1 0 0 cm /X0 Do Q"), False),
        (Page(STAMP, drawing=SCAN.format(60, 60, 20, 30)), False),  # a figure
        (Page(STAMP, drawing="0 0 200 100 re f"), False),
        (Page(drawing="0 0 200 100 re f"), True),
        (Page(drawing=FULL, annotations=[NOTE]), True),
        (Page(PROSE, drawing=FULL), False),  # a scan with recognised text
        (Page(TABLE, drawing=FULL), False),
        (Page(STAMP), False),
    ],
)
def test_page_of_image_and_few_words_needs_ocr(tmp_path, page, needs_ocr):
    image = SCAN.format(400, 200, 0, 0)
    (tmp_path / "a.pdf").write_bytes(pdf(page, forms=[image]))
    (item,) = read(source(tmp_path, ("text", "scan"))).values()
    assert (item.payload["scan"] is not None) == needs_ocr
    assert (item.text is None) == (not page.words and not page.annotations)
    (item,) = read(source(tmp_path, ("text", "image", "scan"))).values()
    assert item.payload["scan"] == (item.payload["image"] if needs_ocr else None)


def test_text_layer_without_letters_is_ignored(tmp_path):
    layers = ["(cid:3)(cid:15)(cid:7)", "!!! %% &&", "Page 3 (cid:3)(cid:5)(cid:7)(cid:9)(cid:1)"]
    (tmp_path / "a.pdf").write_bytes(pdf(*(Page([(10, 50, layer)]) for layer in layers)))
    for item in read(source(tmp_path, ("text", "scan"))).values():
        assert item.text is None and item.payload["scan"]
        assert len(item.payload["word_spans"]) == len(item.payload["word_boxes"]) == 0
    for reject in read(source(tmp_path)).values():
        assert reject.reason == "no text layer" and "have no meaning" in reject.detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The winch launch ends at four hundred metres", True),
        ("1,299.00 (5.3) -- 48.1 % -- 7,300", True),
        (
            "Introduction . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . 5",
            True,
        ),
        ("\u4fdd\u967a\u8a3c\u5238\u3002", True),
        ("\u0e01\u0e33\u0e41\u0e1e\u0e07\u0e40\u0e21\u0e37\u0e2d\u0e07", True),
        ("\u0645\u0650\u0646\u064e\u200c\u0647\u0627", True),
        ("\uf0b7 First item \uf0b7 Second item", True),  # bullets of a symbol font
        ("E = m c² + (a − b) · ∑ x / y", True),
        ("\ue054\ue068\ue065 \ue077\ue069 Page 3", False),
        ("\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd Page", False),
        ("\x80\x81\x82\x83 \x84 a", False),
        ("\u0378\u0379\U000e0fff", False),
        ("\u200b \xad", False),
        ("\u25a1 \u25a1\u25a1 \u2022 *** ?", False),
    ],
)
def test_is_legible(text, expected):
    assert is_legible(text) == expected


# -- images ----------------------------------------------------------------------------------


def test_images_are_rendered_only_if_wanted(tmp_path):
    (tmp_path / "a.pdf").write_bytes(
        pdf(Page([(10, 50, "x")]), Page(drawing="1 0 0 rg 0 0 99 99 re f"))
    )
    assert "image" not in read(source(tmp_path))["a.pdf#page=1"].payload
    results = read(source(tmp_path, ("image",), dpi=72))
    assert set(results["a.pdf#page=2"].payload) == {
        "image"
    }  # a page without words is an item for image encoders
    image = Image.open(io.BytesIO(results["a.pdf#page=2"].payload["image"]))
    assert image.size == (200, 100)
    red, green, _ = image.getpixel((20, 80))
    assert red > 200 and green < 60


def test_revision_depends_on_content_and_options(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(Page([(10, 50, "x")])))

    def revision(*wants: str, **options: Any) -> str:
        return read(source(tmp_path, wants, **options))["a.pdf#page=1"].revision

    assert revision("text") == revision("text", dpi=72)
    assert revision("image") != revision("image", dpi=72)
    before = revision("text")
    (tmp_path / "a.pdf").write_bytes(pdf(Page([(10, 50, "y")])))
    assert revision("text") != before


def test_max_pixels(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(Page([(10, 50, "x")], size=(14_000, 14_000))))
    item = read(source(tmp_path, ("text", "image"), max_pixels=1_000_000))["a.pdf#page=1"]
    width, height = Image.open(io.BytesIO(item.payload["image"])).size
    assert 900_000 < width * height <= 1_010_000


@pytest.mark.parametrize(
    ("size", "pixels"),
    [
        ((100_000, 2), (65_499, 2)),
        ((2, 100_000), (2, 65_499)),
        ((32_750, 10), (65_499, 20)),
        ((0.01, 0.01), (1, 1)),
        ((0, 100), (1224, 1584)),  # PDFium replaces invalid sizes by US letter
        ((10**12, 1), (1224, 1584)),
    ],
)
def test_unusual_page_sizes(tmp_path, size, pixels):
    pages = [Page([(10, 50, word)]) for word in ("first", "third")]
    pages.insert(1, Page(size=size, drawing="0 0 1 1 re f"))
    (tmp_path / "a.pdf").write_bytes(pdf(*pages))
    first, unusual, third = read(source(tmp_path, ("text", "image"))).values()
    assert (first.text, third.text) == ("first", "third")
    assert Image.open(io.BytesIO(unusual.payload["image"])).size == pixels


@pytest.mark.parametrize("origin", [0, -3000, 100_000])
def test_boxes_on_small_pages_and_far_from_the_origin(tmp_path, origin):
    page = Page([(origin + 10, origin + 5, "lift")])
    inherited = f"/MediaBox [{origin} {origin} {origin + 40} {origin + 20}]"
    (tmp_path / "a.pdf").write_bytes(pdf(page, inherited=inherited))
    (item,) = read(source(tmp_path)).values()
    box = boxes(item)["lift"]
    assert (box[0], box[2]) == (0.25, 0.85) and 0.2 < box[1] < 0.75 < box[3] < 1


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"Dear Ada, this is no PDF.", "not a PDF"),
        (b"%PDF-1.7\nnothing that makes a document", "corrupted PDF"),
        (pdf(Page([(10, 50, "x")]))[:200], "corrupted PDF"),
        (pdf(), "no pages"),
        (ENCRYPTED.read_bytes(), "encrypted"),
    ],
)
def test_unreadable_document_is_one_reject(tmp_path, content, reason):
    (tmp_path / "bad.pdf").write_bytes(content)
    (tmp_path / "good.pdf").write_bytes(pdf(Page([(10, 50, "fine")])))
    results = read(source(tmp_path))
    assert (results["bad.pdf"].reason, results["bad.pdf"].stage) == (reason, "list")
    assert results["good.pdf#page=1"].text == "fine"


def test_pages_without_text(tmp_path):
    pages = Page(), Page(drawing="0 0 50 50 re f"), Page([(10, 50, "text")])
    (tmp_path / "a.pdf").write_bytes(pdf(*pages))
    results = read(source(tmp_path))
    assert results["a.pdf#page=1"].reason == "empty page"
    assert results["a.pdf#page=2"].reason == "no text layer"
    assert results["a.pdf#page=3"].text == "text"


@pytest.mark.parametrize(
    ("digits", "expected"),
    [
        ("0041D83D0042", "AB"),
        ("DE000041", "A"),
        ("D83DDE000041", "\U0001f600A"),
        ("D83D", None),
    ],
)
def test_halves_of_surrogate_pairs(tmp_path, digits, expected):
    root = f"/PageLabels << /Nums [0 << /P <FEFF{digits}> >>] >>"
    document = pdf(Page([(10, 50, "fine")]), title=f"<FEFF{digits}>", root=root)
    (tmp_path / "a.pdf").write_bytes(document)
    (page,) = read(source(tmp_path)).values()
    assert (page.title, page.metadata["label"], page.text) == (expected, expected, "fine")


def test_unexpected_error_concerns_one_page(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(*(Page([(10, 50, f"page{i}")]) for i in range(4))))
    process = pdfs()
    numbers = [1, "2", 3, None, 4]
    results = list(process.stream(5, "read_pages", str(tmp_path / "a.pdf"), numbers, TEXT))
    assert [results[i]["text"] for i in (0, 2, 4)] == ["page0", "page2", "page3"]
    assert all(results[i].reason == "unexpected error" for i in (1, 3))
    assert results[1].detail.startswith("TypeError: unsupported operand")
    with pytest.raises(Unreadable, match="^unexpected error: AttributeError: .*no_function"):
        process.call("no_function", str(tmp_path / "a.pdf"))


def test_ten_thousand_objects(tmp_path):
    words = [(i % 100 * 40, 9 * (i // 100) + 5, f"w{i}") for i in range(10_000)]
    item = only_page(tmp_path, Page(words, size=(4000, 1000)))
    assert len(item.text.split()) == 10_000 == len(item.payload["word_boxes"])


def test_timeout_rejects_document(tmp_path):
    (tmp_path / "a.pdf").write_bytes(bomb())
    (tmp_path / "b.pdf").write_bytes(pdf(Page([(10, 50, "fine")])))
    start = time.monotonic()
    results = read(source(tmp_path, limits={"max_seconds": 2}))
    assert time.monotonic() - start < 10
    assert [results[f"a.pdf#page={n}"].reason for n in (1, 2)] == ["timed out"] * 2
    assert results["a.pdf#page=1"].retryable
    assert results["b.pdf#page=1"].text == "fine"


def test_crash_rejects_document(tmp_path):
    (tmp_path / "a.pdf").write_bytes(bomb())
    (tmp_path / "b.pdf").write_bytes(pdf(Page([(10, 50, "fine")])))
    process = pdfs()
    process.call("describe", str(tmp_path / "a.pdf"))
    results = process.stream(2, "read_pages", str(tmp_path / "a.pdf"), [1, 2], TEXT)
    os.kill(process._process.pid, signal.SIGSTOP)  # so that it is killed during the request
    os.kill(process._process.pid, signal.SIGKILL)
    first, second = results
    assert isinstance(first, Unreadable) and first.reason == second.reason == "crashed"
    (page,) = process.stream(1, "read_pages", str(tmp_path / "b.pdf"), [1], TEXT)
    assert page["text"] == "fine"


def test_page_beyond_memory_limit_is_rejected(tmp_path):
    page = Page([(10, 50, "x")], size=(14_000, 14_000))
    (tmp_path / "a.pdf").write_bytes(pdf(page))
    limits = {"max_memory_bytes": 400 << 20}
    options = {"max_pixels": 100_000_000, "dpi": 144, "limits": limits}
    reject = read(source(tmp_path, ("image",), **options))["a.pdf#page=1"]
    assert isinstance(reject, Reject)
    assert reject.reason in ("out of memory", "corrupted page", "crashed")


def test_unread_results_are_discarded(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(*(Page([(10, 50, f"page{i}")]) for i in range(5))))
    process = pdfs()
    pages = process.stream(4, "read_pages", str(tmp_path / "a.pdf"), [1, 2, 3, 4], TEXT)
    assert next(pages)["text"] == "page0"
    pages.close()
    (page,) = process.stream(1, "read_pages", str(tmp_path / "a.pdf"), [5], TEXT)
    assert page["text"] == "page4"


def test_file_removed_after_listing(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(Page([(10, 50, "x")])))
    pages = source(tmp_path)
    (shard,) = pages.shards()
    listed = list(enumerate(pages.scan(shard)))
    (tmp_path / "a.pdf").unlink()
    (reject,) = pages.decode(shard, listed)
    assert reject.retryable and "a.pdf" in reject.detail


def test_documents_on_other_file_systems():
    with fsspec.open("memory://papers/a.pdf", "wb") as file:
        file.write(pdf(Page([(10, 50, "far")])))
    assert read(source("memory://papers"))["a.pdf#page=1"].text == "far"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "nowhere",
            "path must be an existing file or folder, got '.*nowhere', which does not exist",
        ),
        ("a.txt", "path must be a folder, or a file ending in .pdf, got '.*a.txt'"),
        ("", "path must be a folder with .pdf files, got '.*', which contains no such files"),
    ],
)
def test_check_rejects_path_without_items(tmp_path, name, sentence):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SpecError, match=sentence):
        source(tmp_path / name).check()


def test_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.pdf")  # opening it would wait for a writer
    (tmp_path / "a.pdf").write_bytes(pdf(Page([(10, 50, "fine")])))
    results = read(source(tmp_path))
    assert set(results) == {"a.pdf#page=1", "pipe.pdf"}
    assert results["pipe.pdf"].reason == "not a regular file"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dpi", float("inf")),
        ("dpi", 0),
        ("max_pixels", 1),
        ("limits", {"max_seconds": float("inf")}),
    ],
)
def test_invalid_options(option, value):
    with pytest.raises(SpecError, match=f"{option}.* must be .*, got "):
        parse(Pages.Spec, {"path": "x", option: value})


def test_shard_sizes(tmp_path, monkeypatch):
    for i in range(40):
        (tmp_path / f"{i:02}.pdf").write_bytes(b"%PDF-")

    def sizes() -> list[int]:
        files = [shard["files"] for shard in source(tmp_path).shards()]
        assert sorted(itertools.chain(*files)) == [f"{i:02}.pdf" for i in range(40)]
        return [len(group) for group in files]

    assert sizes() == [40]
    monkeypatch.setattr(pages, "FILES_PER_SHARD", 16)
    assert sizes() == [16, 16, 8]
    monkeypatch.setattr(pages, "BYTES_PER_SHARD", 50)
    assert sizes() == [10] * 4


def test_item_size_is_that_of_the_image(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(Page([(10, 50, "one")])))

    def num_bytes(*wants: str) -> int:
        documents = source(tmp_path, wants, max_pixels=1_000_000)
        (shard,) = documents.shards()
        (item,) = documents.scan(shard)
        return documents.item_size(shard, item).num_bytes

    assert num_bytes("text") == 0 < num_bytes("text", "image") == 250_000

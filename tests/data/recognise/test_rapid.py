"""RapidOCR on rendered text: words, boxes, reading order, and frames."""

import io

import numpy as np
import pypdfium2 as pdfium
import pytest
from PIL import Image, ImageDraw, ImageFont

from pipeline.config import SpecError
from pipeline.data.decode.pdf import page_words
from pipeline.data.recognise.accuracy import word_errors
from pipeline.data.recognise.rapid import Rapid
from pipeline.tokens import TEXT
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def rapid() -> Rapid:
    return Rapid(Rapid.Spec())


def draw(*texts: tuple[int, int, str], size=(640, 240)) -> Image.Image:
    image = Image.new("RGB", size, "white")
    font = ImageFont.load_default(24)
    for x, y, text in texts:
        ImageDraw.Draw(image).text((x, y), text, font=font, fill="black")
    return image


def scan(image: Image.Image) -> dict:
    data = io.BytesIO()
    image.save(data, "PNG")
    return {"item_id": "a", "scan": data.getvalue(), "frames": None, "span": None}


def frames(*images: Image.Image) -> list[dict]:
    return [
        {
            "index": 25 * i,
            "seconds": float(i),
            "height": image.height,
            "width": image.width,
            "pixels": np.asarray(image).tobytes(),
        }
        for i, image in enumerate(images)
    ]


def test_boxes_of_words(rapid):
    (line,) = rapid.lines(scan(draw((20, 60, "Lift and drag"))))
    assert line.text == "Lift and drag"
    font = ImageFont.load_default(24)
    for word in line.words:
        assert word.kind == TEXT and np.isnan(word.times).all()
        assert 0.8 < word.confidence <= 1
        before = line.text[: line.text.index(word.text)]
        left = (20 + font.getlength(before)) / 640
        right = left + font.getlength(word.text) / 640
        assert word.box[0] == pytest.approx(left, abs=0.02)
        assert word.box[2] == pytest.approx(right, abs=0.02)
        assert 0.2 < word.box[1] < 0.3 < word.box[3] < 0.42


def test_columns_are_read_in_order(rapid):
    image = draw(
        (20, 20, "A title that goes over both of the columns"),
        *((20, 80, "first one"), (20, 115, "first two")),
        *((360, 90, "second one"), (360, 125, "second two")),
    )
    lines = [line.text for line in rapid.lines(scan(image))]
    assert lines[1:] == ["first one", "first two", "second one", "second two"]


def test_rendered_page_matches_text_layer(rapid):
    document = pdfium.PdfDocument(ROOT / "tests/files/pdflatex-image.pdf")
    page = document[0]
    image = page.render(scale=100 / 72).to_pil().convert("RGB")
    text, _, _ = page_words(page)
    page.close()
    document.close()
    lines = rapid.lines(scan(image))
    errors, number = word_errors(text, "\n".join(line.text for line in lines))
    assert number > 100 and errors <= 0.03 * number
    boxes = np.array([word.box for line in lines for word in line.words])
    assert (boxes >= 0).all() and (boxes <= 1).all() and (boxes[:, :2] < boxes[:, 2:]).all()


def test_rotated_text_has_bounding_boxes(rapid):
    image = draw((150, 110, "turned words"), size=(400, 240)).rotate(10, fillcolor="white")
    words = [word for line in rapid.lines(scan(image)) for word in line.words]
    assert [word.text for word in words] == ["turned", "words"]
    assert words[0].box[1] > words[1].box[1]  # the baseline rises


@pytest.mark.parametrize("size", [(1, 1), (300, 200), (4000, 3), (15, 600)])
def test_no_lines_without_text(rapid, size):
    assert rapid.lines(scan(Image.new("RGB", size, "white"))) == []


def test_no_lines_without_images(rapid):
    assert rapid.lines({"item_id": "a", "scan": None, "frames": None}) == []
    assert rapid.lines({"item_id": "a", "scan": None, "frames": []}) == []


def test_lines_of_frames_have_times(rapid):
    first = draw((20, 20, "Good evening"), size=(320, 160))
    both = draw((20, 20, "Good evening"), (20, 100, "Wind tunnel"), size=(320, 160))
    item = {
        "item_id": "v",
        "scan": None,
        "frames": frames(first, first, both, both),
        "span": {"unit": "seconds", "start": 0.0, "end": 4.5},
    }
    lines = rapid.lines(item)
    assert [line.text for line in lines] == ["Good evening", "Wind tunnel"]
    assert {word.times for word in lines[0].words} == {(0.0, 4.5)}
    assert {word.times for word in lines[1].words} == {(1.5, 4.5)}
    assert lines[1].words[0].box[1] > 0.5


def test_values_of_counter_are_separate_lines(rapid):
    shown = [("Part 1 of 4", "10:59:58", "$ 18.00"), ("Part 2 of 4", "10:59:59", "$ 13.00")]
    images = [
        draw(*((20, 20 + 60 * i, text) for i, text in enumerate(("Quarterly report", *texts))))
        for texts in shown
    ]
    item = {"item_id": "v", "scan": None, "frames": frames(*images)}
    lines = {line.text: line.words[0].times for line in rapid.lines(item)}
    assert lines.pop("Quarterly report") == (0, 1)
    assert [text for text, times in lines.items() if times == (0, 0.5)] == [*shown[0]]
    assert [text for text, times in lines.items() if times == (0.5, 1)] == [*shown[1]]


def test_min_confidence():
    strict = Rapid(Rapid.Spec(min_confidence=1.0))
    assert strict.lines(scan(draw((20, 60, "Lift and drag")))) == []


def test_check_rejects_missing_model(tmp_path):
    with pytest.raises(SpecError, match="^recognition must be .*does not exist"):
        Rapid.check(Rapid.Spec(recognition=str(tmp_path / "arabic.onnx")))


def test_table_is_read_row_by_row(rapid):
    rows = [("Age", "Share", "Men"), ("0-14", "12.5", "48.1"), ("15-64", "63.0", "50.2")]
    columns = enumerate(zip(*rows, strict=True))
    cells = [
        (20 + 220 * x, 40 + 60 * y, cell) for x, column in columns for y, cell in enumerate(column)
    ]
    assert [line.text for line in rapid.lines(scan(draw(*cells)))] == [*map(" ".join, rows)]

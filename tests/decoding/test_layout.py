"""Reading order: columns of text one after the other, tables row by row."""

import numpy as np
import pypdfium2
import pytest

from pipeline.decoding.layout import TextLine, is_right_to_left, reading_order
from pipeline.decoding.pdf import page_words
from tests.pdfs import Page, pdf

PROSE = """The board met in the spring and heard
the report of its auditors on the year
that had passed. It found that income
had grown by 4 per cent, while costs
rose by half of that. The members gave
their thanks to the staff and to those
who had left. They then turned to plans
for the coming year and to the budget."""


def column(x: float, text: str, top: float = 280, step: float = 12) -> list:
    """The lines of a text one below the other, as words of a page; no line where one is empty."""
    rows = enumerate(text.strip().split("\n"))
    return [(x, top - step * row, line.strip()) for row, line in rows if line.strip()]


def read(*columns: list) -> list[str]:
    """The lines of a page that is drawn column by column."""
    words = [word for column in columns for word in column]
    document = pypdfium2.PdfDocument(pdf(Page(words, size=(700, 300))))
    text, spans, boxes = page_words(document[0])
    assert len(spans) == len(boxes) == len(text.split())
    assert [text[start:end] for start, end in spans] == text.split()
    return [line for line in text.split("\n") if line]


def test_a_table_of_numbers_is_read_row_by_row():
    rows = ["Year Total Share", "1996 32,762 5.6%", "1997 33,071 n/a", "1998 33,344 7.0%"]
    names, totals, shares = zip(*map(str.split, rows), strict=True)
    columns = [column(x, "\n".join(c)) for x, c in ((10, names), (200, totals), (300, shares))]
    assert read(*columns) == rows
    assert read(*columns[::-1]) == rows
    title = column(10, "Table 1. Pupils of public schools, by year, in thousands", top=295)
    assert read(*columns, title) == [title[0][2], *rows]


def test_a_table_of_short_texts_is_read_row_by_row():
    rows = [
        ("Ada Berg", "Physics", "Oslo"),
        ("Ole Dahl", "Law", "Bergen"),
        ("Per Lie", "Art", "Moss"),
    ]
    columns = zip((10, 200, 400), zip(*rows, strict=True), strict=True)
    assert read(*(column(x, "\n".join(cells)) for x, cells in columns)) == [*map(" ".join, rows)]


def test_labels_may_be_long_and_cells_may_be_empty():
    labels = """
        Net cash provided by operating activities
        Effect of exchange rates on cash
        Net increase in cash and cash equivalents
        Cash at the end of the year"""
    lines = read(
        column(10, labels), column(320, "1,204\n\n88\n1,310"), column(420, "997\n12\n\n1,009")
    )
    assert lines == [
        "Net cash provided by operating activities 1,204 997",
        "Effect of exchange rates on cash 12",
        "Net increase in cash and cash equivalents 88",
        "Cash at the end of the year 1,310 1,009",
    ]


@pytest.mark.parametrize("by_cell", [False, True])
def test_cells_of_several_lines_are_read_cell_by_cell(by_cell):
    cells = [
        ("Income", "All that a household\nreceives in a year"),
        ("Debt\nburden", "Monthly payments as a\nshare of the income\nof that month"),
        ("Age", "In years at the\ntime of the interview"),
    ]
    tops = [280, 248, 204]
    drawn = [
        [column(x, text, top) for x, text in zip((10, 150), texts, strict=True)]
        for texts, top in zip(cells, tops, strict=True)
    ]
    order = drawn if by_cell else zip(*drawn, strict=True)
    lines = read(*(cell for cells in order for cell in cells))
    rows = [" ".join(" ".join(texts).split()) for texts in cells]
    assert " ".join(lines) == " ".join(rows)
    assert by_cell or lines == rows


@pytest.mark.parametrize(
    "right",
    [
        PROSE,
        "\n".join(PROSE.split("\n")[4:]),  # shorter
        PROSE.replace("that had passed", "2011, 2012, 13"),
        "News\n\n" + PROSE,
    ],
)
def test_columns_of_text_with_equal_baselines_are_read_one_after_the_other(right):
    left = "Notes\n\n" + PROSE if right.startswith("News") else PROSE
    lines = [line.strip() for text in (left, right) for line in text.split("\n") if line.strip()]
    assert read(column(10, left), column(300, right)) == lines


def test_paragraphs_side_by_side_are_columns_of_text():
    left, right = ("\n\n".join([PROSE[:148]] * 3) for _ in range(2))
    lines = [line for text in (left, right) for line in text.split("\n") if line]
    assert read(column(10, left), column(300, right)) == lines


def test_addresses_side_by_side_stay_together():
    left, right = "Ada Berg\nMain Street\nOslo", "Ole Dahl\nHigh Street\nBergen"
    assert read(column(10, left), column(300, right)) == [*left.split("\n"), *right.split("\n")]


def test_columns_and_rows_from_the_right():
    def block(x: float, *texts: str) -> list[TextLine]:
        boxes = (np.array([x, 0.1 * i, x + 0.3, 0.1 * i + 0.05]) for i in range(len(texts)))
        return [TextLine(box, t, t) for box, t in zip(boxes, texts, strict=True)]

    left, right = block(0.0, "left"), block(0.6, "right")
    assert reading_order([left, right]) == [[["left"]], [["right"]]]
    assert reading_order([left, right], from_right=True) == [[["right"]], [["left"]]]
    left, right = block(0.0, "12", "13"), block(0.6, "a", "b")
    assert reading_order([left, right], from_right=True) == [[["a", "12"], ["b", "13"]]]
    assert is_right_to_left("שלום 2020") and not is_right_to_left("hello שלום")

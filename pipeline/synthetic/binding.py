"""SMART's benchmark of local evidence: pairs of reports that differ only in what labels what.

A report is a grid of 5 x 5 panels. Each has a cluttered chart and a marker, described by its
colour and shape, which a short code labels (SMART, section 4.1, Figure 2 and appendix A). The hard
negative of a report has the same layout, codes and markers, with the codes permuted so that none
keeps its marker: who only knows what is in a report cannot tell the two apart.

The paper leaves open which codes, colours, shapes and charts there are. Here a code is a letter, a
digit and a letter; letters that look like digits are left out. No marker and no code stands twice
in a report, so that a query is true of one panel and of nothing in the hard negative.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.synthetic.shapes import COLOURS, SHAPES, stamp

GRID = 5
PANELS = GRID * GRID
LETTERS = [letter for letter in string.ascii_uppercase if letter not in "IO"]
DIGITS = string.digits
#: What can be seen on white paper.
MARKER_COLOURS = [colour for colour in COLOURS if colour != "white"]
SIDE = 560  # pixels of a picture
SMALLEST_SIDE = 200  # at which a code has 8 pixels

#: What is drawn of a panel, as shares of its side.
RADIUS, FONT_SIZE, GAP, MARGIN = 0.11, 0.19, 0.03, 0.06
NUM_BARS, NUM_DOTS = 8, 12
#: Greys of the charts, so that colours are those of markers.
FRAME, BAR, LINE, DOT, INK = 120, 222, 170, 190, 0

_CONTENT, _LAYOUT = 0, 1


@dataclass(frozen=True)
class Report:
    """A report: its panels in raster order.

    Attributes:
        codes: of each panel the code.
        markers: (25, 2) int64, of each panel the marker: its colour in `MARKER_COLOURS` and its
            shape in `SHAPES`.
        layout: series and number, of which the charts and the places in the panels are drawn.
    """

    codes: tuple[str, ...]
    markers: np.ndarray
    layout: tuple[int, int]

    @property
    def bindings(self) -> list[tuple[str, str]]:
        """The code and the marker in words of each panel."""
        words = [f"{MARKER_COLOURS[colour]} {SHAPES[shape]}" for colour, shape in self.markers]
        return list(zip(self.codes, words, strict=True))

    @property
    def queries(self) -> list[str]:
        """A query a panel (SMART, Figure 2)."""
        return [
            f"Find the report where code {code} labels the {marker} marker."
            for code, marker in self.bindings
        ]

    @property
    def text(self) -> str:
        """The report in words, a sentence a panel."""
        return " ".join(
            f"Code {code} labels the {marker} marker." for code, marker in self.bindings
        )

    def code_boxes(self, side: int = SIDE) -> np.ndarray:
        """(25, 4) int64 x0 y0 x1 y1 in pixels: where the codes stand; x1 and y1 are outside."""
        panel = side // GRID
        radius, gap, margin = (round(share * panel) for share in (RADIUS, GAP, MARGIN))
        width, height = _code_size(side)
        block = np.array([2 * radius + gap + width, max(2 * radius, height)])
        corner_P2 = np.stack(np.divmod(np.arange(PANELS), GRID)[::-1], axis=1) * panel
        free_2 = panel - 2 * margin - block
        places_P2 = self._random().random((PANELS, 2))
        start_P2 = corner_P2 + margin + (places_P2 * (free_2 + 1)).astype(np.int64)
        start_P2 += [2 * radius + gap, (block[1] - height) // 2]
        size_2 = np.array([width, height])
        return np.concatenate([start_P2, start_P2 + size_2], axis=1)

    def picture(self, side: int = SIDE) -> Image.Image:
        """The report in RGB, `side` pixels wide and high."""
        picture = Image.new("RGB", (side, side), "white")
        draw = ImageDraw.Draw(picture)
        panel = side // GRID
        radius, gap = round(RADIUS * panel), round(GAP * panel)
        random = self._random()
        random.random((PANELS, 2))  # the places of the codes
        boxes = self.code_boxes(side).tolist()
        for number, (colour, shape) in enumerate(self.markers):
            row, column = divmod(number, GRID)
            _draw_chart(draw, column * panel, row * panel, panel, random)
            x0, y0, x1, y1 = boxes[number]
            top = (y0 + y1) // 2 - radius
            left = x0 - gap - 2 * radius
            # A label on paper of its own: the chart never hides what is asked for.
            around = (left, min(top, y0), x1 - 1, max(top + 2 * radius, y1) - 1)
            draw.rectangle(around, fill="white")
            picture.paste(COLOURS[MARKER_COLOURS[colour]], (left, top), _mask(shape, radius))
            middle = ((x0 + x1) // 2, (y0 + y1) // 2)
            draw.text(middle, self.codes[number], fill=(INK,) * 3, font=_font(side), anchor="mm")
        return picture

    def _random(self) -> np.random.Generator:
        return _generator(*self.layout, _LAYOUT)


@dataclass(frozen=True)
class Pair:
    """A report and its hard negative; the queries are those of the report."""

    positive: Report
    negative: Report


def pair_of(series: int, number: int) -> Pair:
    """The pair of this number of an endless series.

    >>> pair = pair_of(0, 3)
    >>> pair.positive.queries[0]
    'Find the report where code K7X labels the green star marker.'
    >>> sorted(pair.positive.codes) == sorted(pair.negative.codes)
    True
    """
    random = _generator(series, number, _CONTENT)
    codes = [
        LETTERS[first] + DIGITS[digit] + LETTERS[last]
        for first, digit, last in _distinct(random, len(LETTERS), len(DIGITS), len(LETTERS))
    ]
    markers = _distinct(random, len(MARKER_COLOURS), len(SHAPES))
    moved = tuple(codes[panel] for panel in derangement(random, PANELS))
    layout = (series, number)
    return Pair(Report(tuple(codes), markers, layout), Report(moved, markers, layout))


def derangement(random: np.random.Generator, size: int) -> np.ndarray:
    """(size,) int64: a permutation without a fixed point, each as likely as any other.

    Permutations are drawn until one has none, of which more than a third do.

    >>> derangement(np.random.default_rng(0), 2).tolist()
    [1, 0]
    """
    assert size != 1
    while True:
        drawn = random.permutation(size)
        if (drawn != np.arange(size)).all():
            return drawn


def _generator(series: int, number: int, stream: int) -> np.random.Generator:
    # NumPy joins the 32-bit words of a list and fills up with zeros, so that [1 << 32, 0] and
    # [0, 1] are one seed: each number has its own words here.
    return np.random.default_rng([series % (1 << 32), series >> 32, number, stream])


def _distinct(random: np.random.Generator, *sizes: int) -> np.ndarray:
    """(25, len(sizes)) int64: of all combinations as many as there are panels, none twice."""
    drawn = random.choice(int(np.prod(sizes)), PANELS, replace=False)
    return np.stack(np.unravel_index(drawn, sizes), axis=1)


def _draw_chart(
    draw: ImageDraw.ImageDraw, left: int, top: int, panel: int, random: np.random.Generator
) -> None:
    """Bars, a line and dots in greys, in a frame."""
    inner = panel * (1 - 2 * MARGIN)
    x, y = left + MARGIN * panel, top + MARGIN * panel
    for number, height in enumerate(random.random(NUM_BARS)):
        start = x + inner * number / NUM_BARS
        bar = (start, y + inner * (1 - height), start + 0.7 * inner / NUM_BARS, y + inner)
        draw.rectangle(bar, fill=(BAR,) * 3)
    points = [
        (x + inner * number / (NUM_BARS - 1), y + inner * height)
        for number, height in enumerate(random.random(NUM_BARS))
    ]
    draw.line(points, fill=(LINE,) * 3, width=max(1, panel // 80))
    size = max(1, panel // 50)
    for across, down in x + inner * random.random((NUM_DOTS, 2)) - [0, x - y]:
        draw.ellipse((across - size, down - size, across + size, down + size), fill=(DOT,) * 3)
    draw.rectangle((left, top, left + panel - 1, top + panel - 1), outline=(FRAME,) * 3)


@functools.cache
def _font(side: int) -> ImageFont.FreeTypeFont:
    """Returns the font that comes with Pillow, which needs no file of the system."""
    font = ImageFont.load_default(round(FONT_SIZE * (side // GRID)))
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


@functools.cache
def _code_size(side: int) -> tuple[int, int]:
    """Width and height in pixels in which every code can be drawn."""

    def widest(letters: Sequence[str]) -> float:
        return max(_font(side).getlength(letter) for letter in letters)

    top, bottom = _font(side).getmetrics()
    return int(2 * widest(LETTERS) + widest(DIGITS)) + 2, top + bottom


@functools.cache
def _mask(shape: int, radius: int) -> Image.Image:
    """How much of each pixel a marker covers."""
    return Image.fromarray((255 * stamp(SHAPES[shape], radius)).round().astype(np.uint8))

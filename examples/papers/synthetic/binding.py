"""Local-evidence benchmark of the SMART paper, with reports that differ only in bindings.

A report is a grid of 5 x 5 panels. Each panel contains a cluttered chart and a marker with a colour
and a shape, which is labelled by a short code (SMART, section 4.1, figure 2 and appendix A). The
hard negative of a report has the same layout, codes and markers, but its codes are permuted so that
each code labels a different marker. The two can therefore not be distinguished by the set of their
codes and markers.

The paper does not specify the codes, colours, shapes and charts. In this implementation, a code
consists of a letter, a digit and a letter. Letters that resemble digits are not used. Markers and
codes are unique within a report. A query therefore matches exactly one panel of the report, and no
panel of the hard negative.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from examples.papers.synthetic.shapes import COLOURS, SHAPES, stamp

GRID = 5
PANELS = GRID * GRID
LETTERS = [letter for letter in string.ascii_uppercase if letter not in "IO"]
DIGITS = string.digits
#: Colours that are visible on a white background.
MARKER_COLOURS = [colour for colour in COLOURS if colour != "white"]
SIDE = 560  # default width and height of a rendered report, in pixels
MIN_SIDE = 200  # codes are 8 pixels high

#: Dimensions relative to the side of a panel.
RADIUS, FONT_SIZE, GAP, MARGIN = 0.11, 0.19, 0.03, 0.06
NUM_BARS, NUM_DOTS = 8, 12
#: Grey levels of the charts; only markers are coloured.
FRAME, BAR, LINE, DOT, INK = 120, 222, 170, 190, 0

_CONTENT, _LAYOUT = 0, 1


@dataclass(frozen=True)
class Report:
    """Report with panels in raster order.

    Attributes:
        markers: Marker of each panel, (25, 2) int64: indices into `MARKER_COLOURS` and `SHAPES`.
        layout: Series and number, the seed of the charts and of the positions within panels.
    """

    codes: tuple[str, ...]
    markers: np.ndarray
    layout: tuple[int, int]

    @property
    def bindings(self) -> list[tuple[str, str]]:
        """Code and description of the marker of each panel."""
        words = [f"{MARKER_COLOURS[colour]} {SHAPES[shape]}" for colour, shape in self.markers]
        return list(zip(self.codes, words, strict=True))

    @property
    def queries(self) -> list[str]:
        """One query per panel (SMART, figure 2)."""
        return [
            f"Find the report where code {code} labels the {marker} marker."
            for code, marker in self.bindings
        ]

    @property
    def text(self) -> str:
        """Text of the report, with one sentence per panel."""
        return " ".join(
            f"Code {code} labels the {marker} marker." for code, marker in self.bindings
        )

    def code_boxes(self, side: int = SIDE) -> np.ndarray:
        """Returns the boxes of the codes in pixels, (25, 4) int64; x1 and y1 are exclusive."""
        panel = side // GRID
        radius, gap, margin = (round(size * panel) for size in (RADIUS, GAP, MARGIN))
        width, height = _code_size(side)
        block = np.array([2 * radius + gap + width, max(2 * radius, height)])
        corner_P2 = np.stack(np.divmod(np.arange(PANELS), GRID)[::-1], axis=1) * panel
        free_2 = panel - 2 * margin - block
        offset_P2 = self._random().random((PANELS, 2))
        start_P2 = corner_P2 + margin + (offset_P2 * (free_2 + 1)).astype(np.int64)
        start_P2 += [2 * radius + gap, (block[1] - height) // 2]
        size_2 = np.array([width, height])
        return np.concatenate([start_P2, start_P2 + size_2], axis=1)

    def render(self, side: int = SIDE) -> Image.Image:
        """Renders the report as an RGB image of `side` x `side` pixels."""
        image = Image.new("RGB", (side, side), "white")
        draw = ImageDraw.Draw(image)
        panel = side // GRID
        radius, gap = round(RADIUS * panel), round(GAP * panel)
        random = self._random()
        random.random((PANELS, 2))  # skips the positions of the codes
        boxes = self.code_boxes(side).tolist()
        for number, (colour, shape) in enumerate(self.markers):
            row, column = divmod(number, GRID)
            _draw_chart(draw, column * panel, row * panel, panel, random)
            x0, y0, x1, y1 = boxes[number]
            top = (y0 + y1) // 2 - radius
            left = x0 - gap - 2 * radius
            # A white background keeps the chart from hiding the label.
            background = (left, min(top, y0), x1 - 1, max(top + 2 * radius, y1) - 1)
            draw.rectangle(background, fill="white")
            image.paste(COLOURS[MARKER_COLOURS[colour]], (left, top), _mask(shape, radius))
            centre = ((x0 + x1) // 2, (y0 + y1) // 2)
            draw.text(centre, self.codes[number], fill=(INK,) * 3, font=_font(side), anchor="mm")
        return image

    def _random(self) -> np.random.Generator:
        return _generator(*self.layout, _LAYOUT)


@dataclass(frozen=True)
class Pair:
    """Report and its hard negative. Queries refer to the report."""

    positive: Report
    negative: Report


def generate_pair(series: int, number: int) -> Pair:
    """Generates a pair of an infinite series.

    >>> pair = generate_pair(0, 3)
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
    permuted = tuple(codes[panel] for panel in derangement(random, PANELS))
    layout = (series, number)
    return Pair(Report(tuple(codes), markers, layout), Report(permuted, markers, layout))


def derangement(random: np.random.Generator, size: int) -> np.ndarray:
    """Draws a permutation (size,) int64 without fixed points uniformly at random.

    The function uses rejection sampling, which accepts more than a third of all permutations.

    >>> derangement(np.random.default_rng(0), 2).tolist()
    [1, 0]
    """
    assert size != 1
    while True:
        permutation = random.permutation(size)
        if (permutation != np.arange(size)).all():
            return permutation


def _generator(series: int, number: int, stream: int) -> np.random.Generator:
    # NumPy concatenates the 32-bit words of the numbers and pads them with zeros, so [1 << 32, 0]
    # and [0, 1] would be the same seed. Fixed numbers of words per number avoid this.
    return np.random.default_rng([series % (1 << 32), series >> 32, number, stream])


def _distinct(random: np.random.Generator, *sizes: int) -> np.ndarray:
    """Draws one distinct combination of indices per panel, (25, len(sizes)) int64."""
    choices = random.choice(int(np.prod(sizes)), PANELS, replace=False)
    return np.stack(np.unravel_index(choices, sizes), axis=1)


def _draw_chart(
    draw: ImageDraw.ImageDraw, left: int, top: int, panel: int, random: np.random.Generator
) -> None:
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
    for dot_x, dot_y in x + inner * random.random((NUM_DOTS, 2)) - [0, x - y]:
        draw.ellipse((dot_x - size, dot_y - size, dot_x + size, dot_y + size), fill=(DOT,) * 3)
    draw.rectangle((left, top, left + panel - 1, top + panel - 1), outline=(FRAME,) * 3)


@functools.cache
def _font(side: int) -> ImageFont.FreeTypeFont:
    """Returns the font that is bundled with Pillow, which does not depend on the system."""
    font = ImageFont.load_default(round(FONT_SIZE * (side // GRID)))
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


@functools.cache
def _code_size(side: int) -> tuple[int, int]:
    """Returns the maximum width and height of a code, in pixels."""

    def max_width(letters: Sequence[str]) -> float:
        return max(_font(side).getlength(letter) for letter in letters)

    top, bottom = _font(side).getmetrics()
    return int(2 * max_width(LETTERS) + max_width(DIGITS)) + 2, top + bottom


@functools.cache
def _mask(shape: int, radius: int) -> Image.Image:
    """Returns the coverage of each pixel by a marker, from 0 to 255."""
    return Image.fromarray((255 * stamp(SHAPES[shape], radius)).round().astype(np.uint8))

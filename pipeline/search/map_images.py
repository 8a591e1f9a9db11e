"""Draws similarity maps on pages, images, video frames and audio waveforms."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.config import SpecError
from pipeline.search.explain import printable, strengths, value_range
from pipeline.search.maps import SimilarityMap, similarity_map, visible_time
from pipeline.search.previews import Previews
from pipeline.search.results import Hit, Passage, Word
from pipeline.search.searcher import Searcher

#: Boxes as x0 y0 x1 y1 in [0, 1] of the image.
Boxes = Sequence[Sequence[float]]
Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

#: Colour of matches; its opacity increases with the similarity, up to `MAX_OPACITY` of 255.
COLOUR: Colour = (255, 120, 0)
MAX_OPACITY = 150
#: Colour of the frames around the best matches.
BEST_COLOUR: Colour = (200, 30, 0)
#: Colours of headers.
BLACK: Colour = (0, 0, 0)
GREY: Colour = (90, 90, 90)
#: Approximate minimum of the longer side of a map, in pixels. Smaller images are enlarged.
MIN_PIXELS = 448
#: Maximum of the longer side of an image in a report, in pixels.
REPORT_PIXELS = 900


def highlight(previews: Previews, map: SimilarityMap, query_token: int | None = None) -> bytes:
    """Returns an item's image with the matching words highlighted, as a PNG.

    A video is represented by the frame of its best passage or word, or by the waveform if that is
    speech.
    """
    focus = map.focus(query_token)
    if focus.times and not focus.box:
        return draw_waveform(*previews.audio(map.item_id), map, query_token)
    return draw_image(previews.image(map.item_id, visible_time(focus)), map, query_token)


def draw_image(image: bytes, map: SimilarityMap, query_token: int | None = None) -> bytes:
    """Returns an image highlighted by one query token or by the whole query, as a PNG.

    Words are highlighted by their similarity with the query token, if it exceeds that of the
    item's median word, or by their contribution for the whole query. A frame is drawn around the
    best word or, for the whole query, around each line of the passages. For videos, only words
    that are visible in the frame are drawn.
    """
    focus = map.focus(query_token)
    boxes = [focus.box] if isinstance(focus, Word) and focus.box else []
    for passage in map.passages if query_token is None else ():
        if passage.box and _is_visible_with(passage, focus):
            boxes += map.lines(passage)
    values = map.values(query_token)
    return to_png(highlight_words(image, map.words, values, focus, boxes, BEST_COLOUR))


def highlight_words(
    image: bytes,
    words: Sequence[Word],
    values: np.ndarray,
    best: Word | Passage,
    boxes: Boxes,
    frame_colour: Colour,
) -> Image.Image:
    """Highlights the words of an image by their values and draws frames around some boxes.

    Args:
        values: (W,) value per word, or NaN if it has no vector.
        best: Word or passage that selects the video frame; only words that are visible at the same
            time are highlighted.
    """
    fills = [
        (word.box, COLOUR, strength)
        for word, strength in zip(words, strengths(values), strict=True)
        if strength > 0 and word.box and _is_visible_with(word, best)
    ]
    return fill_boxes(image, fills, boxes, frame_colour)


def fill_boxes(
    image: bytes,
    fills: Sequence[tuple[Sequence[float], Colour, float]],
    boxes: Boxes,
    frame_colour: Colour,
) -> Image.Image:
    """Fills boxes of an image with translucent colours and outlines others.

    Args:
        fills: Box, colour and strength in [0, 1] of each filled box. The strength is relative to
            `MAX_OPACITY`.
        boxes: Boxes to outline.
    """
    page = Image.open(io.BytesIO(image)).convert("RGB")
    if (times := MIN_PIXELS // max(page.size)) > 1:  # outlines would cover most of a small image
        page = page.resize((page.width * times, page.height * times), Image.Resampling.NEAREST)
    layer = Image.new("RGBA", page.size, (*COLOUR, 0))
    pen = ImageDraw.Draw(layer)
    size = np.array([*page.size, *page.size])
    for box, colour, strength in fills:
        x0, y0, x1, y1 = np.array(box) * size
        opacity = round(MAX_OPACITY * strength)
        pen.rectangle((x0 - 2, y0 - 1, x1 + 2, y1 + 1), fill=(*colour, opacity))
    for box in boxes:
        x0, y0, x1, y1 = np.array(box) * size
        pen.rectangle((x0 - 3, y0 - 2, x1 + 3, y1 + 2), outline=(*frame_colour, 255), width=2)
    return Image.alpha_composite(page.convert("RGBA"), layer).convert("RGB")


def draw_waveform(
    samples: np.ndarray,
    sample_rate: int,
    start: float,
    map: SimilarityMap,
    query_token: int | None = None,
) -> bytes:
    """Draws the waveform of an audio item as a PNG. Matching words are highlighted and labelled.

    Args:
        samples: (S,) float samples.
    """
    width, height, foot = 1200, 240, 24
    seconds = max(len(samples) / sample_rate, 1e-3)
    image = Image.new("RGB", (width, height + foot), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)
    labels: list[tuple[tuple[float, float], str]] = []

    def x(time: float) -> float:
        return (time - start) / seconds * width

    word_strengths = strengths(map.values(query_token))
    ends = [0.0] * 3  # end of the last label in each row; labels of short words would overlap
    for word, strength in zip(map.words, word_strengths, strict=True):
        if strength > 0 and word.times and not word.box:
            left = x(word.times[0])
            tint = _tint(MAX_OPACITY / 255 * strength)
            pen.rectangle((left, 0, x(word.times[1]), height), tint)
            row = next((i for i, end in enumerate(ends) if end <= left), None)
            if row is not None:
                labels.append(((left + 3, 4 + 16 * row), word.text))
                ends[row] = left + 6 + pen.textlength(word.text, font)
    columns = np.array_split(samples, width) if len(samples) >= width else [samples]
    loudest = max(float(np.abs(samples).max(initial=0)), 1e-6)
    for column, part in enumerate(columns):
        low, high = (height / 2 * (1 - side / loudest) for side in (part.min(), part.max()))
        pen.line((column, high, column, low), (60, 90, 140))
    step = next(s for s in (1, 2, 5, 10, 30, 60, 300, 600, 3600) if seconds / s <= 20)
    for mark in np.arange(-(-start // step) * step, start + seconds, step):
        pen.line((x(mark), height, x(mark), height + 5), "black")
        pen.text((x(mark) + 2, height + 6), f"{mark:g} s", "black", font)
    for match in [map.focus(query_token), *(map.passages if query_token is None else ())]:
        if match.times and not match.box:
            sides = (x(match.times[0]), 0, x(match.times[1]), height)
            pen.rectangle(sides, outline=BEST_COLOUR, width=2)
    for position, text in labels:
        pen.text(position, text, "black", font)
    png = io.BytesIO()
    image.save(png, "PNG", optimize=True)
    return png.getvalue()


def add_header(
    drawing: bytes, map: SimilarityMap, query: str, query_token: int | None = None
) -> bytes:
    """Adds a header to a map, which shows the query, the item, its score and a legend."""
    image = Image.open(io.BytesIO(drawing)).convert("RGB")
    size = min(max(image.width // 60, 14), 28)
    font, large = ImageFont.load_default(size), ImageFont.load_default(size * 5 // 4)
    width, line, margin = max(image.width, 30 * size), size * 8 // 5, size // 2
    values = map.values(query_token)
    low, high = (f"{value:.2f}" for value in value_range(values))
    if query_token is None:
        meaning = "contribution to the score"
        frame = "best passages" if len(map.passages) > 1 else "best passage"
    else:
        meaning = f'similarity with the query token "{map.query_tokens[query_token]}"'
        frame = "best word"
    subtitle = f"{map.item_id} · {map.representation} · MaxSim score {map.score:.2f}"
    if map.evidence != map.representation:
        subtitle += f" · words compared by {map.evidence}"
    elif map.is_shared:
        subtitle += " · words that share a vector share its similarity"
    rows = [(text, large, BLACK) for text in _wrapped(f'"{query}"', large, width - 2 * margin)]
    rows += [(text, font, GREY) for text in _wrapped(subtitle, font, width - 2 * margin)]
    height = margin + len(rows) * line + 2 * line + margin
    sheet = Image.new("RGB", (width, height + image.height), "white")
    pen, top = ImageDraw.Draw(sheet), margin
    for text, face, colour in rows:
        pen.text((margin, top), text, colour, face)
        top += line
    pen.text((margin, top), low, GREY, font)
    left = 2 * margin + pen.textlength(low, font)
    for step in range(bar := 8 * size):
        opacity = MAX_OPACITY / 255 * (step / bar) ** 2  # as in `strengths`
        pen.line((left + step, top, left + step, top + size), _tint(opacity))
    pen.rectangle((left, top, left + bar, top + size), outline=GREY)
    pen.text((left + bar + margin, top), f"{high}   {meaning}", GREY, font)
    top += line
    pen.rectangle((margin, top + 2, margin + 2 * size, top + size), outline=BEST_COLOUR, width=2)
    pen.text((margin + 3 * size, top), frame, GREY, font)
    sheet.paste(image, (0, height))
    pen.line((0, height - 1, width, height - 1), (200, 200, 200))
    return to_png(sheet)


def _wrapped(text: str, font: Font, width: float) -> list[str]:
    """Splits a text into lines that are at most `width` pixels wide."""
    lines = [""]
    for word in printable(text).split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def hit_maps(
    searcher: Searcher, query: str, hit: Hit, representation: str
) -> list[tuple[str, bytes]]:
    """Returns the caption and the map of a hit for a report; empty without an image."""
    try:
        map = similarity_map(searcher, query, hit.item_id, representation)
        image = highlight(Previews(searcher.index), map)
    except SpecError:
        return []
    return [(f"{hit.item_id}: matches of {representation}", _shrunk(image))]


def _shrunk(data: bytes) -> bytes:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.thumbnail((REPORT_PIXELS, REPORT_PIXELS))
    return to_png(image)


def to_png(image: Image.Image) -> bytes:
    """Encodes an image as PNG with 256 colours, which reduces its size to a third."""
    png = io.BytesIO()
    image.quantize(256).save(png, "PNG", optimize=True)
    return png.getvalue()


def _is_visible_with(location: Word | Passage, best: Word | Passage) -> bool:
    """Checks whether a location is visible in the same video frame as the best word or passage."""
    time = visible_time(best)
    if location.times is None or time is None:
        return location.times == best.times
    return location.times[0] <= time <= location.times[1]


def _tint(opacity: float) -> Colour:
    red, green, blue = (round(255 + (side - 255) * opacity) for side in COLOUR)
    return red, green, blue

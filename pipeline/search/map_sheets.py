"""Draws contact sheets, which show either maps of phrases or the images of hits."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from pipeline.config import SpecError
from pipeline.search.map_images import GREY, Boxes, highlight_words, to_png
from pipeline.search.maps import similarity_map
from pipeline.search.previews import Previews
from pipeline.search.results import Hit
from pipeline.search.searcher import Searcher

#: Colour of the outlines of a phrase's true location.
TRUE_COLOUR = (0, 90, 255)
#: Distance between neighbouring images in pixels, on sheets of phrases and of hits.
SHEET_STEP = 320
HIT_STEP = 200


def phrase_sheet(
    columns: Sequence[tuple[str, Searcher, str]], phrases: Sequence[tuple[str, str, Boxes]]
) -> bytes:
    """Draws maps of phrases, with a row per phrase and a column per representation.

    Words are highlighted by the relevance used to measure grounding: the mean similarity over the
    tokens of the phrase (SaMer, appendix C and figure 4). The true locations are outlined.

    Args:
        columns: Title, searcher and representation of each column. The images are read from the
            index of the first searcher.
        phrases: Item id, phrase and boxes of the true locations (x0 y0 x1 y1 in [0, 1]).
    """
    previews, rows = Previews(columns[0][1].index), []
    for item_id, phrase, boxes in phrases:
        image, cells = previews.image(item_id), []
        for title, searcher, representation in columns:
            map = similarity_map(searcher, phrase, item_id, representation, by_token=False)
            values = np.array([word.similarities for word in map.words], float).mean(axis=1)
            best = map.words[int(np.nanargmax(values))]
            cells.append(
                (title, highlight_words(image, map.words, values, best, boxes, TRUE_COLOUR))
            )
        rows.append((f'"{phrase}" in {item_id}', cells))
    return map_sheet(rows)


def map_sheet(rows: Sequence[tuple[str, Sequence[tuple[str, Image.Image]]]]) -> bytes:
    """Draws rows of titled images below each other, as a PNG. A cell has a title and an image."""
    font = ImageFont.load_default(18)
    sheet = Image.new("RGB", (max(len(cells) for _, cells in rows) * SHEET_STEP, 0), "white")
    for title, cells in rows:
        row = Image.new("RGB", (sheet.width, SHEET_STEP + 44), "white")
        pen = ImageDraw.Draw(row)
        pen.text((6, 4), title, "black", font)
        for column, (subtitle, image) in enumerate(cells):
            drawing = image.copy()
            drawing.thumbnail((SHEET_STEP - 12, SHEET_STEP - 12))
            row.paste(drawing, (column * SHEET_STEP + 6, 52))
            pen.text((column * SHEET_STEP + 6, 28), subtitle, GREY, font)
        sheet = ImageOps.expand(sheet, (0, 0, 0, row.height), "white")
        sheet.paste(row, (0, sheet.height - row.height))
    return to_png(sheet)


def hit_sheet(
    searcher: Searcher, query: str, rows: Sequence[tuple[str, Sequence[Hit]]]
) -> tuple[bytes, int]:
    """Draws the images of hits, with a row per list of hits.

    Each image is labelled with its rank, the rank before reranking, and its score. A missing or
    unreadable image is replaced by the item id.

    Returns:
        The sheet as a PNG, and the number of missing images.
    """
    previews, font = Previews(searcher.index), ImageFont.load_default(15)
    most = max((len(hits) for _, hits in rows), default=0)
    height = HIT_STEP + 52
    sheet = Image.new("RGB", (12 + max(1, most) * HIT_STEP, 34 + len(rows) * height), "white")
    num_missing = 0
    pen = ImageDraw.Draw(sheet)
    pen.text((6, 8), f'"{query}"', "black", ImageFont.load_default(18))
    for number, (title, hits) in enumerate(rows):
        top = 34 + number * height
        pen.text((6, top + 4), title, "black", font)
        for column, hit in enumerate(hits):
            left = 6 + column * HIT_STEP
            before = f" (was {hit.first_stage.rank})" if hit.first_stage else ""
            pen.text((left, top + 26), f"{hit.rank}{before}   {hit.score:.3f}", GREY, font)
            box = (left, top + 48, left + HIT_STEP - 10, top + height - 6)
            try:
                image = Image.open(io.BytesIO(previews.image(hit.item_id))).convert("RGB")
            except SpecError:
                pen.rectangle(box, outline=(200, 200, 200))
                pen.text((left + 6, top + 54), hit.item_id, GREY, font)
                num_missing += 1
                continue
            size = (box[2] - box[0], box[3] - box[1])
            sheet.paste(ImageOps.contain(image, size, Image.Resampling.BICUBIC), box[:2])
    return to_png(sheet), num_missing

"""Sheets with the best hits of judged queries, in which relevant hits are outlined."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from pipeline.config import SpecError
from pipeline.eval.metrics import Run, ranking
from pipeline.eval.results import Evaluation, Result
from pipeline.schema import Composed
from pipeline.search.map_images import GREY, highlight
from pipeline.search.map_sheets import SHEET_STEP, map_sheet
from pipeline.search.maps import similarity_map
from pipeline.search.previews import Previews
from pipeline.search.query import AnyQuery
from pipeline.search.searcher import Searcher

#: Colours of the outlines of relevant and of other hits, and their width in pixels.
RELEVANT, IRRELEVANT, OUTLINE = (0, 150, 60), (200, 200, 200), 8
#: Longest side of an image before it is outlined.
SIDE = SHEET_STEP - 12 - 2 * OUTLINE
#: Scores whose matches are highlighted.
HIGHLIGHTED = ("maxsim", "hybrid")
MAX_TITLE = 90


def match_sheet(
    searcher: Searcher,
    query: AnyQuery,
    rows: Sequence[tuple[Result, Sequence[tuple[str, float]]]],
    grades: Mapping[str, int],
) -> bytes:
    """Draws the hits of a query as a PNG, a row per row of an evaluation (SMART, figures 1, 3-5).

    Relevant hits are outlined in green. In rows of MaxSim and hybrid scores, the words that match
    the query are highlighted. A hit without a readable image is represented by its id. The image of
    a query is drawn in a row of its own.
    """
    previews, sheet_rows = Previews(searcher.index), []
    text = query.text if isinstance(query, Composed) else query if isinstance(query, str) else ""
    data = query.image if isinstance(query, Composed) else query
    title = f"query: {text}"[:MAX_TITLE]
    if isinstance(data, bytes):
        sheet_rows.append((title, [("", _outlined(_open(data), None))]))
        title = ""
    for result, hits in rows:
        cells = []
        for rank, (item_id, score) in enumerate(hits, start=1):
            grade = grades.get(item_id, 0)
            mark = "   relevant" if grade > 0 else ""
            image = _hit_image(searcher, previews, query, item_id, result)
            cells.append((f"{rank}   {score:.3f}{mark}", _outlined(image, grade > 0)))
        sheet_rows.append((f"{result.name}   {title}", cells))
        title = ""
    return map_sheet(sheet_rows)


def _hit_image(
    searcher: Searcher, previews: Previews, query: AnyQuery, item_id: str, result: Result
) -> Image.Image:
    """Returns the image of a hit, highlighted if its matches are known, or its id."""
    if result.score in HIGHLIGHTED:
        try:
            map = similarity_map(searcher, query, item_id, result.representation)
            return _open(highlight(previews, map))
        except SpecError:  # no positions, no image, or a document that is not an item
            pass
    try:
        return _open(previews.image(item_id))
    except SpecError:
        blank = Image.new("RGB", (SIDE, SIDE // 2), "white")
        ImageDraw.Draw(blank).text((8, 8), item_id, GREY, ImageFont.load_default(15))
        return blank


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _outlined(image: Image.Image, is_relevant: bool | None) -> Image.Image:
    """Scales an image to a cell and outlines it, in white for None."""
    colour = "white" if is_relevant is None else RELEVANT if is_relevant else IRRELEVANT
    return ImageOps.expand(ImageOps.contain(image, (SIDE, SIDE)), OUTLINE, colour)


def changed_queries(evaluation: Evaluation, rows: Sequence[Result], count: int) -> list[str]:
    """Returns the queries that gain most from the first to the last of some rows, best first."""
    gains = {
        query_id: values[evaluation.headline] - rows[0].values[query_id][evaluation.headline]
        for query_id, values in rows[-1].values.items()
    }
    return sorted(gains, key=lambda query_id: -gains[query_id])[:count]


def best_hits(run: Run, query_id: str, count: int) -> list[tuple[str, float]]:
    """Returns the ids and scores of the best hits of a query, in the order of the metrics."""
    scores = run.get(query_id, {})
    return [(document_id, scores[document_id]) for document_id in ranking(scores)[:count]]

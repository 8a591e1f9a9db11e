"""Similarity maps: where in an item the words of a query match, and where its score comes from.

Pages and photos are highlighted where the words stand, videos on the frame of the best passage, and
speech on the waveform. A map compares each query token with each *input*
token of an item, through the vector that stands for it: its own, or that of the compressed token
whose support holds it. So a map of a compressed item shows what its few vectors still tell apart.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont, ImageOps

from pipeline.config import Spec, SpecError, absolute, within
from pipeline.decoding import Unreadable
from pipeline.index import JOBS
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index, first_line, open_folder
from pipeline.registry import SOURCES
from pipeline.schema import Hit, Passage
from pipeline.search.explain import (
    NO_SPAN,
    contributions,
    find_passages,
    outputs_of,
    place_of,
    printable,
)
from pipeline.search.query import AnyQuery, Queries
from pipeline.search.searcher import Searcher
from pipeline.sources import NO_PREVIEW, Source, content_in
from pipeline.sources.files import existing_root

#: The colour of what matches; its opacity grows with the similarity.
COLOUR = (255, 120, 0)
MAX_OPACITY = 150
#: Of the frame around what matches best, and around where a phrase stands.
BEST_COLOUR, TRUE_COLOUR = (200, 30, 0), (0, 90, 255)
#: Of titles and legends.
GREY = (90, 90, 90)
#: The longer side of a map, nearly: smaller pictures are shown so many times as large.
LEAST_PIXELS = 448

#: The longer side of pictures in reports.
REPORT_PIXELS = 900
#: From picture to picture of a sheet of phrases, and of one of hits.
SHEET_STEP = 320
HIT_STEP = 200

#: x0 y0 x1 y1 in [0, 1] of the picture.
Boxes = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Word:
    """A word of an item and how it matches.

    Attributes:
        text: the word, or the part of it in this box; empty: a patch of a picture, no word.
        span: Its characters in the item's text; -1 of a patch.
        box: x0 y0 x1 y1 in [0, 1] of the page, photo or frame; None if it is not to be seen.
        times: t0 t1 in seconds of the parent; None if it has no time.
        similarities: (M,) with each query token, the best of the word's tokens; NaN if no vector
            stands for them.
        credit: what the word's vectors add to the late score, summed over the query tokens; the
            words that share a vector each have all of its credit.
        contribution: The same of the score beyond its mean, see `explain.contributions`: stop words
            have little of it.
    """

    text: str
    span: tuple[int, int]
    box: tuple[float, float, float, float] | None
    times: tuple[float, float] | None
    similarities: np.ndarray
    credit: float
    contribution: float

    @property
    def is_heard(self) -> bool:
        """Whether it is said, not shown."""
        return self.times is not None and self.box is None


@dataclass(frozen=True)
class SimilarityMap:
    """The words of one item under one query.

    Attributes:
        query_tokens: their texts, M of them.
        contributions: That of each, see `explain.contributions`.
        words: in the order of the text.
        score: the late score.
        passages: Where the query matches best, best first.
    """

    item_id: str
    representation: str
    query_tokens: list[str]
    contributions: list[float]
    words: list[Word]
    score: float
    passages: tuple[Passage, ...] = ()

    def values(self, query_token: int | None = None) -> np.ndarray:
        """Returns what is drawn of each word: (W,).

        It is the similarity with a query token; for the whole query the contribution to the score
        of the item or, where it is higher, to the gain of a passage. More than the highest
        contribution of a query token counts as that: a name of many tokens would outshine all else.
        """
        if query_token is None:
            marks = [mark for passage in self.passages for mark in passage.marks]
            inside = [
                sum(m.contribution for m in marks if _overlap(m.span, word.span))
                for word in self.words
            ]
            values = np.maximum([word.contribution for word in self.words], inside)
            return np.minimum(values, max(self.contributions))
        return np.array([word.similarities[query_token] for word in self.words])

    def best_word(self, query_token: int | None = None) -> Word:
        """The word with the highest value, the first of equals."""
        return self.words[int(np.nanargmax(self.values(query_token)))]

    def lines(self, passage: Passage) -> list[tuple[float, ...]]:
        """Returns the boxes around the words of a passage, one per line of text."""
        if passage.span == NO_SPAN:
            return [passage.box]
        lines: list[np.ndarray] = []
        for word in self.words:
            if word.box and _overlap(word.span, passage.span):
                box = np.array(word.box)
                if lines and lines[-1][1] <= (box[1] + box[3]) / 2 <= lines[-1][3]:
                    box = np.r_[np.minimum(lines[-1], box)[:2], np.maximum(lines.pop(), box)[2:]]
                lines.append(box)
        return [tuple(line.tolist()) for line in lines]

    def focus(self, query_token: int | None = None) -> Word | Passage:
        """Returns what to show and frame: the best word of a query token, or the best passage."""
        seen = [p for p in self.passages if p.box or p.times] if query_token is None else []
        return seen[0] if seen else self.best_word(query_token)

    def to_json(self) -> str:
        """The map as a JSON object, for other tools."""
        words = [
            {
                "text": word.text,
                "span": word.span,
                "box": word.box and [round(side, 5) for side in word.box],
                "times": word.times and [round(side, 3) for side in word.times],
                "similarities": [
                    None if np.isnan(s) else round(float(s), 4) for s in word.similarities
                ],
                "credit": round(word.credit, 4),
                "contribution": round(word.contribution, 4),
            }
            for word in self.words
        ]
        about = {
            "item_id": self.item_id,
            "representation": self.representation,
            "score": round(self.score, 5),
            "query_tokens": self.query_tokens,
            "contributions": [round(contribution, 4) for contribution in self.contributions],
            "passages": [asdict(passage) for passage in self.passages],
        }
        return json.dumps({**about, "words": words}, ensure_ascii=False)


def similarity_map(
    searcher: Searcher,
    query: AnyQuery | Queries,
    item_id: str,
    representation: str | None = None,
) -> SimilarityMap:
    """Compares a query with the words of an item.

    Args:
        query: a text, a picture or both, its token vectors, or what `Searcher.queries` gave for it
            alone.

    Raises:
        SpecError: no such item, or it lacks what a map needs: the positions of its tokens, the
            vectors, the support of compressed ones.
    """
    info = searcher.representation(representation)
    name = info.name
    queries = searcher.queries(query if isinstance(query, Queries) else [query], name)
    row = _row(searcher, item_id, info)
    output_T = _outputs(row, info)
    stored = searcher.index.codec(name).decode(row[name], info.dim)[0]
    vectors_ND = torch.from_numpy(stored.astype(np.float32))
    sim_MN = (queries.tokens[0] @ vectors_ND.T).numpy()

    sim_MT = np.where(output_T < 0, np.nan, sim_MN[:, output_T])
    best_M = sim_MN.argmax(axis=1)
    contribution_M = contributions(sim_MN)
    credit_T, contribution_T = (
        np.where(output_T < 0, 0.0, np.bincount(best_M, parts_M, len(vectors_ND))[output_T])
        for parts_M in (sim_MN.max(axis=1), contribution_M)
    )
    text = row[info.text_column][0].as_py()
    spans_T2, extents_T6, confidence_T = _positions(row, info.positions)
    words = _words(text, spans_T2, extents_T6, sim_MT, credit_T, contribution_T)
    tokens = queries.token_texts[0]
    passages = find_passages(tokens, sim_MN, output_T, spans_T2, extents_T6, text, confidence_T)
    score = float(sim_MN.max(axis=1).sum())
    return SimilarityMap(item_id, name, tokens, contribution_M.tolist(), words, score, passages)


class Previews:
    """What the items of an index look and sound like, from the files that its jobs read.

    Args:
        documents: where the files of a collection lie now, if not where the jobs found them; under
            "", those of all others.
        only_indexed: whether a file is shown only if it holds what it held when it was indexed.
    """

    def __init__(
        self,
        index: Index,
        documents: Mapping[str, str] | None = None,
        *,
        only_indexed: bool = False,
    ):
        self.index, self._documents = index, documents or {}
        self._only_indexed = only_indexed
        self._sources: dict[str, Source] = {}

    def picture(self, item_id: str, seconds: float | None = None) -> bytes:
        """The page, the photo, or the frame at a time, as an encoded picture.

        Raises:
            SpecError: the item has none, or its file is not there or cannot be read.
        """
        return self._of(item_id, lambda source, item: source.picture(item, seconds))

    def sound(self, item_id: str) -> tuple[np.ndarray, int, float]:
        """The sound of the item: samples (S,), their rate, and the second at which they start.

        Raises:
            SpecError: the item has none, or its file is not there or cannot be read.
        """
        return self._of(item_id, lambda source, item: source.sound(item))

    def _of(self, item_id: str, read: Callable[[Source, dict[str, Any]], Any]) -> Any:
        columns = ["source", "parent_id", "modality", "span", "metadata", "revision"]
        (item,) = self.index.items([item_id], columns).to_pylist() or [None]
        if item is None:
            raise SpecError("item_id", item_id, "the id of an item in the index")
        item["metadata"] = json.loads(item["metadata"] or "{}")
        source = self._source(item["source"])
        try:
            if self._only_indexed and source.content_of(item) != content_in(item["revision"]):
                rule = "the file that was indexed"
                raise SpecError("documents", item["parent_id"], rule, "has changed since")
            return read(source, item)
        except (Unreadable, OSError) as error:
            if isinstance(error, Unreadable) and error.reason == NO_PREVIEW:
                rule = "a page, an image, a video or an audio file"
                raise SpecError("item_id", item_id, rule, note=f" ({error.detail})") from None
            problem = f"has no readable {item['parent_id']} ({first_line(error)})"
            note = f"; pass their folder as --documents {item['source']}=FOLDER"
            rule = "the folder of the indexed files"
            raise SpecError("documents", source.spec.path, rule, problem, note) from None

    def _source(self, collection: str) -> Source:
        if collection not in self._sources:
            spec = next((s for s in self._specs() if collection in _collections(s)), None)
            moved = self._documents.get(collection, self._documents.get(""))
            if spec is None:
                rule = f"a mapping with the folder of the collection {collection}"
                raise SpecError("documents", moved, rule, "lacks it")
            if moved:
                with within("documents"):
                    existing_root(absolute(moved))
                spec = spec.model_copy(update={"path": absolute(moved)})
            self._sources[collection] = SOURCES.build(spec)
        return self._sources[collection]

    def _specs(self) -> Iterator[Spec]:
        """The sources that the index's jobs read, the last first."""
        filesystem, path = open_folder(self.index.uri, JOBS)
        for file in sorted(filesystem.glob(f"{path}/*/spec.yaml"), reverse=True):
            with filesystem.open(file, "r", encoding="utf-8") as stream:
                source = yaml.safe_load(stream).get("source")
            if isinstance(source, dict):  # the source of a recompression is a column
                spec = SOURCES.resolve(source)
                yield from SOURCES.load(spec.name).leaf_specs(spec)


def _collections(spec: Spec) -> tuple[str, ...]:
    return SOURCES.build(spec).collections


def light(previews: Previews, map: SimilarityMap, query_token: int | None = None) -> bytes:
    """Returns an item's image with the matching words highlighted, as a PNG.

    For a video it is the frame of the best passage or word; if that is speech, the waveform.

    Raises:
        SpecError: as `Previews`.
    """
    focus = map.focus(query_token)
    if focus.times and not focus.box:
        return draw_sound(*previews.sound(map.item_id), map, query_token)
    return draw(previews.picture(map.item_id, moment(focus)), map, query_token)


def draw(image: bytes, map: SimilarityMap, query_token: int | None = None) -> bytes:
    """Returns an image with words highlighted by one query token, or by the whole query, as a PNG.

    A query token highlights what is more similar than the item's median word, the whole query
    highlights words by their contribution. Framed is the best word, or the passages, line by line.
    Of a video only what one frame shows is drawn.
    """
    focus = map.focus(query_token)
    boxes = [focus.box] if isinstance(focus, Word) and focus.box else []
    for passage in map.passages if query_token is None else ():
        if passage.box and _together(passage, focus):
            boxes += map.lines(passage)
    return _png(_lit(image, map.words, map.values(query_token), focus, boxes, BEST_COLOUR))


def phrase_sheet(
    columns: Sequence[tuple[str, Searcher, str]], phrases: Sequence[tuple[str, str, Boxes]]
) -> bytes:
    """Where phrases match, a row a phrase, a column a representation, as a PNG.

    Lit is the relevance by which grounding is measured, the mean similarity over the phrase's
    tokens (SaMer, appendix C), as the pictures of its figure 4 are; framed is where it stands.

    Args:
        columns: (title, index, representation) each; the first index shows the items.
        phrases: (item id, phrase, boxes x0 y0 x1 y1 in [0, 1] in which it stands) each.

    Raises:
        SpecError: as `similarity_map` and `Previews`.
    """
    previews, font = Previews(columns[0][1].index), ImageFont.load_default(18)
    sheet = Image.new("RGB", (len(columns) * SHEET_STEP, 0), "white")
    for item_id, phrase, boxes in phrases:
        image = previews.picture(item_id)
        row = Image.new("RGB", (sheet.width, SHEET_STEP + 44), "white")
        pen = ImageDraw.Draw(row)
        pen.text((6, 4), f'"{phrase}" in {item_id}', "black", font)
        for place, (title, searcher, name) in enumerate(columns):
            map = similarity_map(searcher, phrase, item_id, name)
            values = np.mean([word.similarities for word in map.words], axis=1)
            best = map.words[int(np.nanargmax(values))]
            lit = _lit(image, map.words, values, best, boxes, TRUE_COLOUR)
            lit.thumbnail((SHEET_STEP - 12, SHEET_STEP - 12))
            row.paste(lit, (place * SHEET_STEP + 6, 52))
            pen.text((place * SHEET_STEP + 6, 28), title, (90, 90, 90), font)
        sheet = ImageOps.expand(sheet, (0, 0, 0, row.height), "white")
        sheet.paste(row, (0, sheet.height - row.height))
    return _png(sheet)


def hit_sheet(
    searcher: Searcher, query: str, rows: Sequence[tuple[str, Sequence[Hit]]]
) -> tuple[bytes, int]:
    """What hits look like, best first, a row a list of hits under its title, as a PNG.

    Above each stand its rank, that of the first stage where it was reranked, and its score. Of what
    has no picture, or none that can be read, there is its id; the number is of those.
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
        for place, hit in enumerate(hits):
            left = 6 + place * HIT_STEP
            before = f" (was {hit.reranked.first_rank})" if hit.reranked else ""
            pen.text((left, top + 26), f"{hit.rank}{before}   {hit.score:.3f}", (90, 90, 90), font)
            box = (left, top + 48, left + HIT_STEP - 10, top + height - 6)
            try:
                shown = Image.open(io.BytesIO(previews.picture(hit.item_id))).convert("RGB")
            except SpecError:
                pen.rectangle(box, outline=(200, 200, 200))
                pen.text((left + 6, top + 54), hit.item_id, (90, 90, 90), font)
                num_missing += 1
                continue
            size = (box[2] - box[0], box[3] - box[1])
            sheet.paste(ImageOps.contain(shown, size, Image.Resampling.BICUBIC), box[:2])
    return _png(sheet), num_missing


def _lit(
    image: bytes,
    words: Sequence[Word],
    values: np.ndarray,
    best: Word | Passage,
    boxes: Boxes,
    frame: tuple[int, int, int],
) -> Image.Image:
    """A picture with words lit by their values, and frames around some boxes.

    Args:
        values: (W,) of each word; NaN if no vector stands for it.
        best: of the words of a video those are lit that are to be seen together with it.
        frame: the colour of the frames.
    """
    page = Image.open(io.BytesIO(image)).convert("RGB")
    if (times := LEAST_PIXELS // max(page.size)) > 1:  # else the frames would cover what is there
        page = page.resize((page.width * times, page.height * times), Image.Resampling.NEAREST)
    layer = Image.new("RGBA", page.size, (*COLOUR, 0))
    pen = ImageDraw.Draw(layer)
    size = np.array([*page.size, *page.size])
    for word, strength in zip(words, _strengths(values), strict=True):
        if strength > 0 and word.box and _together(word, best):
            x0, y0, x1, y1 = np.array(word.box) * size
            opacity = round(MAX_OPACITY * strength)
            pen.rectangle((x0 - 2, y0 - 1, x1 + 2, y1 + 1), fill=(*COLOUR, opacity))
    for box in boxes:
        x0, y0, x1, y1 = np.array(box) * size
        pen.rectangle((x0 - 3, y0 - 2, x1 + 3, y1 + 2), outline=(*frame, 255), width=2)
    return Image.alpha_composite(page.convert("RGBA"), layer).convert("RGB")


def _png(picture: Image.Image) -> bytes:
    png = io.BytesIO()
    # 256 colours do for text on white, at a third of the bytes.
    picture.quantize(256).save(png, "PNG", optimize=True)
    return png.getvalue()


def titled(picture: bytes, map: SimilarityMap, query: str, query_token: int | None = None) -> bytes:
    """Returns a map with a header: the query, the item and its score, and what the colour means."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    size = min(max(image.width // 60, 14), 28)
    font, large = ImageFont.load_default(size), ImageFont.load_default(size * 5 // 4)
    width, line, margin = max(image.width, 30 * size), size * 8 // 5, size // 2
    values = map.values(query_token)
    low, high = (f"{value:.2f}" for value in _scale(values))
    if query_token is None:
        meaning = "contribution to the score"
        frame = "best passages" if len(map.passages) > 1 else "best passage"
    else:
        meaning = f'similarity with the query token "{map.query_tokens[query_token]}"'
        frame = "best word"
    where = f"{map.item_id} · {map.representation} · late score {map.score:.2f}"
    rows = [(text, large, "black") for text in _wrapped(f'"{query}"', large, width - 2 * margin)]
    rows += [(text, font, GREY) for text in _wrapped(where, font, width - 2 * margin)]
    height = margin + len(rows) * line + 2 * line + margin
    sheet = Image.new("RGB", (width, height + image.height), "white")
    pen, top = ImageDraw.Draw(sheet), margin
    for text, face, colour in rows:
        pen.text((margin, top), text, colour, face)
        top += line
    left = margin
    pen.text((left, top), low, GREY, font)
    left += pen.textlength(low, font) + margin
    for step in range(bar := 8 * size):
        opacity = MAX_OPACITY / 255 * (step / bar) ** 2  # as `_strengths` has it
        colour = tuple(round(255 + (c - 255) * opacity) for c in COLOUR)
        pen.line((left + step, top, left + step, top + size), colour)
    pen.rectangle((left, top, left + bar, top + size), outline=GREY)
    pen.text((left + bar + margin, top), f"{high}   {meaning}", GREY, font)
    top += line
    pen.rectangle((margin, top + 2, margin + 2 * size, top + size), outline=BEST_COLOUR, width=2)
    pen.text((margin + 3 * size, top), frame, GREY, font)
    sheet.paste(image, (0, height))
    pen.line((0, height - 1, width, height - 1), (200, 200, 200))
    return _png(sheet)


def _wrapped(text: str, font: Any, width: float) -> list[str]:
    """Returns a text in lines no wider than `width` pixels."""
    lines = [""]
    for word in printable(text).split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def draw_sound(
    samples: np.ndarray,
    sample_rate: int,
    start: float,
    map: SimilarityMap,
    query_token: int | None = None,
) -> bytes:
    """The wave of a sound with the spans of its matching words lit and written out, as a PNG.

    Args:
        samples: (S,) from `start` seconds of the parent on.
    """
    width, height, foot = 1200, 240, 24
    seconds = max(len(samples) / sample_rate, 1e-3)
    picture = Image.new("RGB", (width, height + foot), "white")
    pen = ImageDraw.Draw(picture)
    font = ImageFont.load_default(13)
    labels: list[tuple[tuple[float, float], str]] = []

    def x(time: float) -> float:
        return (time - start) / seconds * width

    strengths = _strengths(map.values(query_token))
    ends = [0.0] * 3  # of what is written in each row: short words would hide one another
    for word, strength in zip(map.words, strengths, strict=True):
        if strength > 0 and word.is_heard:
            share = MAX_OPACITY / 255 * strength
            colour = tuple(round(255 + (c - 255) * share) for c in COLOUR)
            left = x(word.times[0])
            pen.rectangle((left, 0, x(word.times[1]), height), colour)
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
    for place in [map.focus(query_token), *(map.passages if query_token is None else ())]:
        if place.times and not place.box:
            sides = (x(place.times[0]), 0, x(place.times[1]), height)
            pen.rectangle(sides, outline=BEST_COLOUR, width=2)
    for at, text in labels:
        pen.text(at, text, "black", font)
    png = io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    return png.getvalue()


def hit_maps(
    searcher: Searcher, query: str, hit: Hit, representation: str
) -> list[tuple[str, bytes]]:
    """The map of a hit under the whole query, with a caption; nothing for what has no picture.

    A document that is not there any more has no map: a report can do without.
    """
    try:
        map = similarity_map(searcher, query, hit.item_id, representation)
        picture = light(Previews(searcher.index), map)
    except SpecError:
        return []
    return [(f"{hit.item_id}: what {representation} matches", smaller(picture))]


def smaller(picture: bytes) -> bytes:
    """A picture as a report shows it."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail((REPORT_PIXELS, REPORT_PIXELS))
    png = io.BytesIO()
    image.quantize(256).save(png, "PNG", optimize=True)
    return png.getvalue()


def _together(word: Word | Passage, best: Word | Passage) -> bool:
    """Returns whether a frame that shows the best word or passage shows another one too."""
    if word.times is None or best.times is None:
        return word.times == best.times
    return word.times[0] <= moment(best) <= word.times[1]


def moment(shown: Word | Passage) -> float | None:
    """Returns a second at which a word or passage is visible; None without times.

    The times of text are estimated, so their middle is safest; those of an image region begin with
    its frame.
    """
    if shown.times is None:
        return None
    is_text = shown.text if isinstance(shown, Word) else shown.marks
    return sum(shown.times) / 2 if is_text else shown.times[0]


def _strengths(values: np.ndarray) -> np.ndarray:
    """Values -> 0 (not above the median) to 1 (the highest)."""
    low, high = _scale(values)
    values = np.nan_to_num(values, nan=-np.inf)
    if high <= low:
        return (values == high).astype(float)
    return np.clip((values - low) / (high - low), 0, 1) ** 2


def _overlap(one: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether two character ranges share a character."""
    return one[0] < other[1] and other[0] < one[1]


def _scale(values: np.ndarray) -> tuple[float, float]:
    """Returns the values drawn in no colour and in the strongest: the median and the highest."""
    finite = values[np.isfinite(values)]
    return max(float(np.median(finite)), 0.0), float(finite.max())


def _row(searcher: Searcher, item_id: str, info: RepresentationInfo) -> Any:
    """The stored columns of an item that a map needs, as a table of one row."""
    schema = searcher.index.schema
    name, positions = info.name, info.positions
    needed = [*positions.values(), info.support_column, name, info.text_column]
    table = searcher.index.items([item_id], [c for c in needed if c in schema.names])
    if not table.num_rows:
        raise SpecError("item_id", item_id, "the id of an item in the index")
    if _num_tokens(table, positions) is None:
        rule = "an item with stored token positions (keep_positions)"
        raise SpecError("item_id", item_id, rule, "has none")
    if not table[name].is_valid()[0].as_py():
        raise SpecError("item_id", item_id, f"an item with vectors in {name}", "has none")
    return table.combine_chunks()


def _num_tokens(row: Any, positions: Mapping[str, str]) -> int | None:
    """How many input tokens an item has, where their places are stored; else None."""
    for column in positions.values():
        if column in row.column_names and row[column].is_valid()[0].as_py():
            return len(row[column][0])
    return None


def _outputs(row: Any, info: RepresentationInfo) -> np.ndarray:
    """(T,) for each input token the vector that stands for it, or -1."""
    num_tokens = _num_tokens(row, info.positions)
    if info.is_uncompressed:
        return np.arange(num_tokens)
    if info.support_column not in row.column_names:
        rule = "a representation with stored token assignments (keep_support)"
        raise SpecError("representation", info.name, rule, "has none")
    return outputs_of(row[info.support_column][0].as_py(), info.support_form, num_tokens)


def _positions(row: Any, positions: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the characters (T, 2), extents (T, 6) and confidences (T,) of an item's tokens."""
    num_tokens = _num_tokens(row, positions)
    spans_T2, extents_T6 = np.full((num_tokens, 2), NO_SPAN), np.full((num_tokens, 6), np.nan)
    confidence_T = np.full(num_tokens, np.nan)
    spans, extents = positions.get("spans"), positions.get("extents")
    confidence = positions.get("confidence")
    if spans in row.column_names:
        spans_T2 = np.array(row[spans][0].as_py())
    if extents in row.column_names and row[extents].is_valid()[0].as_py():
        extents_T6 = np.array(row[extents][0].as_py(), float)
    if confidence in row.column_names and row[confidence].is_valid()[0].as_py():
        confidence_T = np.array(row[confidence][0].as_py(), float)
    return spans_T2, extents_T6, confidence_T


def _words(
    text: str | None,
    spans_T2: np.ndarray,
    extents_T6: np.ndarray,
    sim_MT: np.ndarray,
    credit_T: np.ndarray,
    contribution_T: np.ndarray,
) -> list[Word]:
    """Neighbouring tokens of one place, as words; without places, those of one run of letters."""
    has_place_T = ~np.isnan(extents_T6).all(axis=1)
    moves_T = (np.nan_to_num(np.diff(extents_T6, axis=0)) != 0).any(axis=1)
    moves_T |= np.isnan(extents_T6[1:]).sum(axis=1) != np.isnan(extents_T6[:-1]).sum(axis=1)
    touches_T = spans_T2[1:, 0] == spans_T2[:-1, 1]
    starts = np.flatnonzero(np.r_[True, np.where(has_place_T[1:], moves_T, ~touches_T)])
    words = []
    for start, stop in zip(starts, [*starts[1:], len(spans_T2)], strict=True):
        # A patch of a picture has a place and no characters, a word without places only those.
        if not has_place_T[start] and (has_place_T.any() or spans_T2[start, 0] < 0):
            continue
        own = sim_MT[:, start:stop]
        there = ~np.isnan(own).all(axis=0)
        similarities = own[:, there].max(axis=1) if there.any() else np.full(len(own), np.nan)
        first, last = spans_T2[start, 0], spans_T2[stop - 1, 1]
        found = place_of((first, last), extents_T6[start].tolist())
        box, times = (found.box, found.times) if found else (None, None)
        credit, share = (float(each[start:stop].max()) for each in (credit_T, contribution_T))
        word = text[first:last] if first >= 0 else ""
        words.append(Word(word, (int(first), int(last)), box, times, similarities, credit, share))
    return words

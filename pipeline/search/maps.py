"""Similarity maps: where on a page the words of a query match, and where its score comes from.

A map compares each query token with each *input* token of an item, through the vector that stands
for it: its own, or that of the compressed token whose support holds it. So a map of a compressed
item shows what its few vectors still tell apart.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw

from pipeline.atomic import write_atomic
from pipeline.config import SpecError, absolute, within
from pipeline.decoding import Unreadable
from pipeline.index.columns import by_role
from pipeline.index.reader import JOBS, Index, first_line, open_folder
from pipeline.registry import CODECS, SOURCES
from pipeline.schema import Hit
from pipeline.search.explain import DROPPED
from pipeline.search.searcher import Searcher
from pipeline.sources.files import existing_root
from pipeline.sources.pages import Pages

#: The colour of what matches; its opacity grows with the similarity.
COLOUR = (255, 120, 0)
MAX_OPACITY = 150

#: Pages in reports are this small: pixels per inch.
REPORT_DPI = 72.0


@dataclass(frozen=True)
class Word:
    """A word of a page and how it matches.

    Attributes:
        text: the word, or the part of it in this box.
        box: x0 y0 x1 y1 in [0, 1] of the page.
        similarities: (M,) with each query token, the best of the word's tokens; NaN if no vector
            stands for them.
        credit: what the word's vectors add to the late score, summed over the query tokens; the
            words that share a vector each have all of its credit.
    """

    text: str
    box: tuple[float, float, float, float]
    similarities: np.ndarray
    credit: float


@dataclass(frozen=True)
class SimilarityMap:
    """The words of one item under one query.

    Attributes:
        query_tokens: their texts, M of them.
        words: in the order of the text.
        score: the late score.
    """

    item_id: str
    representation: str
    query_tokens: list[str]
    words: list[Word]
    score: float

    def values(self, query_token: int | None = None) -> np.ndarray:
        """(W,) the similarities of one query token, or the credits for the whole query."""
        if query_token is None:
            return np.array([word.credit for word in self.words])
        return np.array([word.similarities[query_token] for word in self.words])

    def best_word(self, query_token: int | None = None) -> Word:
        """The word with the highest value, the first of equals."""
        return self.words[int(np.nanargmax(self.values(query_token)))]

    def to_json(self) -> str:
        """The map as a JSON object, for other tools."""
        words = [
            {
                "text": word.text,
                "box": [round(float(side), 5) for side in word.box],
                "similarities": [
                    None if np.isnan(s) else round(float(s), 4) for s in word.similarities
                ],
                "credit": round(word.credit, 4),
            }
            for word in self.words
        ]
        about = {
            "item_id": self.item_id,
            "representation": self.representation,
            "score": round(self.score, 5),
            "query_tokens": self.query_tokens,
        }
        return json.dumps({**about, "words": words}, ensure_ascii=False)


def similarity_map(
    searcher: Searcher,
    query: str | np.ndarray,
    item_id: str,
    representation: str | None = None,
) -> SimilarityMap:
    """Compares a query with the words of an item.

    Raises:
        SpecError: no such item, or it lacks what a map needs: boxes of its tokens, the vectors, the
            support of compressed ones.
    """
    name, about = searcher.representation(representation)
    queries = searcher.queries([query], name)
    row = _row(searcher, item_id, name, about)
    output_T = _outputs(searcher, row, about, name)
    codec = CODECS.build(CODECS.resolve(about["codec"]))
    vectors_ND = torch.from_numpy(codec.decode(row[name])[0].astype(np.float32))
    sim_MN = (queries.tokens[0] @ vectors_ND.T).numpy()

    sim_MT = np.where(output_T < 0, np.nan, sim_MN[:, output_T])
    best_M = sim_MN.argmax(axis=1)
    credit_N = np.bincount(best_M, weights=sim_MN.max(axis=1), minlength=len(vectors_ND))
    credit_T = np.where(output_T < 0, 0.0, credit_N[output_T])
    words = _words(row, about, sim_MT, credit_T)
    score = float(sim_MN.max(axis=1).sum())
    return SimilarityMap(item_id, name, queries.token_texts[0], words, score)


class PageImages:
    """The page images of an index, rendered from the documents that its jobs read.

    Args:
        documents: where the documents lie now, if not where the jobs found them.
    """

    def __init__(self, index: Index, documents: str | None = None):
        self.index, self._documents = index, documents
        self._sources: dict[str, Pages] = {}

    def image(self, item_id: str, dpi: float | None = None) -> bytes:
        """The page of an item as a JPEG, by default with the resolution of the source's spec.

        Raises:
            SpecError: the item is no page, or its document is not there or cannot be rendered.
        """
        table = self.index.items([item_id], ["source", "parent_id", "modality", "span"])
        (row,) = table.to_pylist() or [None]
        if row is None or row["modality"] != "page":
            raise SpecError("item_id", item_id, "a page of the index", "is no page")
        source = self._source(row["source"])
        try:
            return source.image(row["parent_id"], int(row["span"]["start"]), dpi)
        except (Unreadable, OSError) as error:
            problem = f"has no readable {row['parent_id']} ({first_line(error)})"
            legal = "the folder where the documents lie now (--documents)"
            raise SpecError("documents", source.spec.path, legal, problem) from None

    def _source(self, collection: str) -> Pages:
        if collection not in self._sources:
            spec = next((s for s in self._specs() if Pages(s).collection == collection), None)
            if spec is None:
                legal = f"the folder of the collection {collection}"
                raise SpecError("documents", self._documents, legal, "is not known")
            if self._documents:
                with within("documents"):
                    existing_root(absolute(self._documents))
                spec = spec.model_copy(update={"path": absolute(self._documents)})
            self._sources[collection] = Pages(spec)
        return self._sources[collection]

    def _specs(self) -> Iterator[Pages.Spec]:
        """The sources of pages that the index's jobs read, the last first."""
        filesystem, path = open_folder(self.index.uri, JOBS)
        for file in sorted(filesystem.glob(f"{path}/*/spec.yaml"), reverse=True):
            with filesystem.open(file, "r", encoding="utf-8") as stream:
                source = yaml.safe_load(stream).get("source")
            if isinstance(source, dict) and source.get("name") == "pages":
                yield SOURCES.resolve(source)


def draw(image: bytes, map: SimilarityMap, query_token: int | None = None) -> bytes:
    """A page with its words lit by one query token, or by the whole query, as a PNG.

    For a query token only what is more similar than the page's middle word is lit, the most similar
    brightest; for the whole query every word with a part in the score.
    """
    page = Image.open(io.BytesIO(image)).convert("RGB")
    light = Image.new("RGBA", page.size, (*COLOUR, 0))
    pen = ImageDraw.Draw(light)
    size = np.array([*page.size, *page.size])
    for word, strength in zip(map.words, _strengths(map.values(query_token)), strict=True):
        if strength > 0:
            x0, y0, x1, y1 = np.array(word.box) * size
            opacity = round(MAX_OPACITY * strength)
            pen.rectangle((x0 - 2, y0 - 1, x1 + 2, y1 + 1), fill=(*COLOUR, opacity))
    best = map.best_word(query_token)
    x0, y0, x1, y1 = np.array(best.box) * size
    pen.rectangle((x0 - 3, y0 - 2, x1 + 3, y1 + 2), outline=(200, 30, 0, 255), width=2)
    lit = Image.alpha_composite(page.convert("RGBA"), light).convert("RGB")
    png = io.BytesIO()
    # 256 colours do for text on white, at a third of the bytes.
    lit.quantize(256).save(png, "PNG", optimize=True)
    return png.getvalue()


def page_maps(
    searcher: Searcher, query: str, hit: Hit, representation: str
) -> list[tuple[str, bytes]]:
    """The map of a hit under the whole query, with a caption; nothing for what is no page.

    A document that is not there any more has no map: a report can do without.
    """
    try:
        map = similarity_map(searcher, query, hit.item_id, representation)
        image = PageImages(searcher.index).image(hit.item_id, REPORT_DPI)
    except SpecError:
        return []
    return [(f"{hit.item_id}: what {representation} matches", draw(image, map))]


def write_maps(folder: str, number: int, image: bytes, map: SimilarityMap) -> list[str]:
    """Writes a hit's maps: of the whole query, of each query token, and the numbers as JSON.

    Returns:
        The names of the files, `<number>.png`, `<number>-<token>-<text>.png`, `<number>.json`.
    """
    files = {f"{number}.png": draw(image, map), f"{number}.json": map.to_json()}
    for token, text in enumerate(map.query_tokens):
        name = re.sub(r"\W+", "_", text)[:20]
        files[f"{number}-{token + 1:02d}-{name}.png"] = draw(image, map, token)
    for name, data in files.items():
        write_atomic(f"{folder}/{name}", data)
    return list(files)


def _strengths(values: np.ndarray) -> np.ndarray:
    """Values -> 0 (not above the middle one) to 1 (the highest)."""
    values = np.nan_to_num(values, nan=-np.inf)
    finite = values[np.isfinite(values)]
    middle = max(float(np.median(finite)), 0.0)
    highest = float(finite.max())
    if highest <= middle:
        return (values == highest).astype(float)
    return np.clip((values - middle) / (highest - middle), 0, 1) ** 2


def _row(searcher: Searcher, item_id: str, name: str, about: dict[str, Any]) -> Any:
    """The stored columns of an item that a map needs, as a table of one row."""
    schema = searcher.index.dataset.schema
    positions = about["positions"]
    needed = [positions.get("extents"), positions.get("spans"), about.get("support"), name, "text"]
    table = searcher.index.items([item_id], [c for c in needed if c in schema.names])
    if not table.num_rows:
        raise SpecError("item_id", item_id, "an item of the index", "is not in the index")
    extents = positions.get("extents")
    if extents not in table.column_names or not table[extents].is_valid()[0].as_py():
        legal = "an item whose words have boxes (a page), in an index that keeps positions"
        raise SpecError("item_id", item_id, legal, "has no boxes")
    if not table[name].is_valid()[0].as_py():
        raise SpecError("item_id", item_id, f"an item with vectors in {name}", "has none")
    return table.combine_chunks()


def _outputs(searcher: Searcher, row: Any, about: dict[str, Any], name: str) -> np.ndarray:
    """(T,) for each input token the vector that stands for it, or -1."""
    num_tokens = len(row[about["positions"]["extents"]][0])
    if about["compressor"]["name"] == "none":
        return np.arange(num_tokens)
    if about.get("support") not in row.column_names:
        legal = "a representation with its support (keep_support)"
        raise SpecError("representation", name, legal, "has no support")
    support = np.array(row[about["support"]][0].as_py(), np.int64)
    form = by_role(searcher.index.dataset.schema, "support")[about["support"]]["form"]
    if form == "assignment":
        return np.where(support == DROPPED, -1, support)
    outputs = np.full(num_tokens, -1)
    outputs[support] = np.arange(len(support))
    return outputs


def _words(row: Any, about: dict[str, Any], sim_MT: np.ndarray, credit_T: np.ndarray) -> list[Word]:
    """Neighbouring tokens in one box, as words."""
    extents_T4 = np.array(row[about["positions"]["extents"]][0].as_py())[:, :4]
    spans_T2 = np.array(row[about["positions"]["spans"]][0].as_py())
    text = row["text"][0].as_py()
    has_box_T = ~np.isnan(extents_T4).any(axis=1)
    starts = np.flatnonzero(np.r_[True, (extents_T4[1:] != extents_T4[:-1]).any(axis=1)])
    words = []
    for start, stop in zip(starts, [*starts[1:], len(extents_T4)], strict=True):
        if not has_box_T[start]:
            continue
        own = sim_MT[:, start:stop]
        there = ~np.isnan(own).all(axis=0)
        similarities = own[:, there].max(axis=1) if there.any() else np.full(len(own), np.nan)
        first, last = spans_T2[start, 0], spans_T2[stop - 1, 1]
        box = tuple(extents_T4[start].tolist())
        words.append(Word(text[first:last], box, similarities, float(credit_T[start:stop].max())))
    return words

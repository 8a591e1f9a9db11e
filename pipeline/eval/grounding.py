"""Whether compressed vectors still tell where something stands (SaMer, appendix C).

A phrase is compared with every input token of its item, through the vector that stands for the
token, and the similarities are laid on a grid over the page or photo. Three measures say how well
that relevance map fits the boxes in which the phrase stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from pipeline.config import Spec, SpecError
from pipeline.encoders import EncodedQueries
from pipeline.eval.topics import lines_of
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index, both
from pipeline.search.explain import outputs_of
from pipeline.search.searcher import Searcher

#: Cells along either side of the map.
SIDE = 48
THRESHOLDS = np.arange(1, 10) / 10
#: The overlap that counts as having found the region.
HIT = 0.05
EPSILON = 1e-6
#: Places in an item's text that are tried for a phrase.
TRIES = 20

Box = Sequence[float]


class Generated(Spec):
    """Phrases from the items' own texts: of consecutive words that occur once in their item.

    Attributes:
        num_phrases: at most so many.
        num_words: words of each.
    """

    num_phrases: PositiveInt = 200
    num_words: PositiveInt = 3
    seed: NonNegativeInt = 0
    """Seed of the phrases."""


class Phrase(NamedTuple):
    """What is to be found in an item, and the boxes x0 y0 x1 y1 in [0, 1] in which it stands."""

    item_id: str
    text: str
    boxes: list[Box]


class Grounding(NamedTuple):
    """The measures of one map, or their means (SaMer, equations 8 to 10)."""

    box_mass: float
    region_hit: float
    coverage_iou: float


def measure(map_YX: np.ndarray, region_YX: np.ndarray) -> Grounding:
    """How well a relevance map fits a region, S the map, G the region, T = 0.1, 0.2, ..., 0.9.

        BoxMass     = sum_x S(x) G(x) / (sum_x S(x) + eps)
        RegionHit   = mean over t in T of [IoU(S >= t, G) >= 0.05]
        CoverageIoU = mean over t in T of  IoU(S >= t, G)

    Args:
        map_YX: in [0, 1].
        region_YX: bool.

    >>> map, region = np.array([[1.0, 0.5], [0.0, 0.5]]), np.array([[True, False], [False, False]])
    >>> [round(value, 3) for value in measure(map, region)]  # five of nine t light three cells
    [0.5, 1.0, 0.63]
    """
    mass = float((map_YX * region_YX).sum() / (map_YX.sum() + EPSILON))
    lit_TYX = map_YX >= THRESHOLDS[:, None, None] - 1e-9  # 0.3 is 0.30000000000000004 of ten
    shared_T = (lit_TYX & region_YX).sum(axis=(1, 2))
    either_T = (lit_TYX | region_YX).sum(axis=(1, 2))
    iou_T = shared_T / np.maximum(either_T, 1)
    return Grounding(mass, float((iou_T >= HIT).mean()), float(iou_T.mean()))


def region(boxes: Sequence[Box], side: int = SIDE) -> np.ndarray:
    """(Y, X) bool: the union of boxes on the grid.

    A cell belongs to a box that it overlaps: lines of text are lower than a cell, and would fall
    between the centres.

    >>> region([(0.0, 0.0, 0.5, 0.1)], side=2).astype(int).tolist()
    [[1, 0], [0, 0]]
    """
    lit = np.zeros(side * side, bool)
    lit[_cells(np.array(boxes, float).reshape(-1, 4), side)[1]] = True
    return lit.reshape(side, side)


def relevance_map(similarity_T: np.ndarray, boxes_T4: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Computes the relevance of each grid cell: the maximum over the tokens that overlap it.

    Args:
        similarity_T: Similarity of each input token with the phrase (T,), NaN for a token without a
            vector. The map scales them to [0, 1] by minimum and maximum, to 1 if all are equal.
        boxes_T4: Box of each token as x0 y0 x1 y1 in [0, 1], NaN for a token without a location.
        side: Number of cells per axis.

    Returns:
        (side, side) float64 in [0, 1], rows from top to bottom; 0 where no token overlaps.
    """
    there = ~np.isnan(similarity_T)
    if not there.any():
        return np.zeros((side, side))
    low, high = similarity_T[there].min(), similarity_T[there].max()
    scaled_T = (similarity_T - low) / (high - low) if high > low else np.ones(len(similarity_T))
    there &= ~np.isnan(boxes_T4).any(axis=1)
    token_C, cell_C = _cells(boxes_T4[there], side)
    relevance = np.zeros(side * side)
    np.maximum.at(relevance, cell_C, scaled_T[there][token_C])
    return relevance.reshape(side, side)


def _cells(boxes_T4: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a box and a cell that it overlaps, at least one of each box; cells by their row.

    >>> _cells(np.array([[0.0, 0.0, 0.4, 0.4], [0.6, 0.0, 0.7, 1.0]]), side=2)
    (array([0, 1, 1]), array([0, 1, 3]))
    """
    scaled = np.clip(boxes_T4, 0, 1) * side
    first = np.minimum(np.floor(scaled[:, :2] + 1e-6), side - 1).astype(int)
    last = np.maximum(np.ceil(scaled[:, 2:] - 1e-6).astype(int) - 1, first)
    width, height = (last - first + 1).T
    box_C = np.repeat(np.arange(len(first)), width * height)
    number_C = np.arange(len(box_C)) - np.repeat(
        np.cumsum(width * height) - width * height, width * height
    )
    x_C = first[box_C, 0] + number_C % width[box_C]
    y_C = first[box_C, 1] + number_C // width[box_C]
    return box_C, y_C * side + x_C


def read_phrases(path: str) -> list[Phrase]:
    """Phrases of a file of lines {"item_id": ..., "phrase": ..., "boxes": [[x0, y0, x1, y1], ...]}.

    Raises:
        SpecError: no such file, no phrase in it, or a line of another form.
    """
    phrases = []
    for number, line in lines_of(path, "grounding"):
        try:
            row = json.loads(line)
            boxes = np.array(row["boxes"], float)
            item_id, text = row["item_id"], row["phrase"]
            whole = boxes.ndim == 2 and boxes.shape[1] == 4 and len(boxes) > 0
            is_valid = isinstance(item_id, str) and isinstance(text, str) and text.strip() and whole
        except (ValueError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            note = f" (line {number} of {path})"
            form = (
                'a line {"item_id": "a", "phrase": "two words", "boxes": [[x0, y0, x1, y1], ...]}'
            )
            raise SpecError("grounding", line[:80], form, note=note)
        inside = bool(((boxes >= 0) & (boxes <= 1)).all())
        if not inside or not (boxes[:, :2] < boxes[:, 2:]).all():
            note = f" (line {number} of {path})"
            limits = "boxes with 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1"
            raise SpecError("grounding", row["boxes"], limits, note=note)
        phrases.append(Phrase(item_id, text, boxes.tolist()))
    if not phrases:
        raise SpecError("grounding", path, "a file with at least one phrase", "is empty")
    return phrases


def check_phrases(phrases: Sequence[Phrase], index: Index, names: Sequence[str]) -> None:
    """Raises `SpecError` if an item is not in the index, or nothing says where its tokens stand."""
    columns = list(dict.fromkeys(filter(None, (_extents(index, name) for name in names))))
    wanted = list(dict.fromkeys(phrase.item_id for phrase in phrases))
    there = {row["item_id"]: row for row in index.items(wanted, ["item_id", *columns]).to_pylist()}
    for item_id in wanted:
        if item_id not in there:
            raise SpecError("grounding", item_id, "the id of an item in the index")
        if not any(_has_boxes(there[item_id][column]) for column in columns):
            rule = "an item with stored token positions (keep_positions)"
            raise SpecError("grounding", item_id, rule, "has none")


def generate_phrases(
    spec: Generated, index: Index, names: Sequence[str], filter: str | None
) -> list[Phrase]:
    """Phrases of the items' own words, and the boxes of their tokens.

    Items are drawn at random, each once before any is drawn again.

    Raises:
        SpecError: no item has words with places.
    """
    infos = [index.representation(name) for name in names if _extents(index, name)]
    rng = np.random.default_rng(spec.seed)
    found: list[Phrase] = []
    for info in infos[:1]:
        spans, extents = (info.positions[kind] for kind in ("spans", "extents"))
        has = both(filter, f"`{extents}` IS NOT NULL AND text IS NOT NULL")
        ids = [i for batch in index.batches(["item_id"], filter=has) for i in batch[0].to_pylist()]
        order = rng.permutation(len(ids)).tolist()
        for start in range(0, len(order), spec.num_phrases):
            if len(found) >= spec.num_phrases:
                break
            some = [ids[place] for place in order[start : start + spec.num_phrases]]
            rows = index.items(some, ["item_id", "text", spans, extents]).to_pylist()
            per_item = -(-spec.num_phrases // len(ids))
            for row in rows:
                words = _Words(row["text"], row[spans], row[extents])
                drawn = words.phrases(spec.num_words, per_item, rng)
                found += [Phrase(row["item_id"], text, boxes) for text, boxes in drawn]
    if not found:
        rule = "a file of phrases, unless the index has word positions"
        raise SpecError("grounding", spec.num_phrases, rule, "finds no item with words")
    return found[: spec.num_phrases]


class _Words:
    """The words of an item, and where their tokens stand."""

    def __init__(self, text: str, spans: list, extents: list):
        self._text = text
        self._words = [match.span() for match in re.finditer(r"\w+", text)]
        self._spans_T2 = np.array(spans).reshape(-1, 2)
        self._extents_T6 = np.array(extents, float).reshape(-1, 6)

    def phrases(
        self, num_words: int, number: int, rng: np.random.Generator
    ) -> Iterator[tuple[str, list[Box]]]:
        """Some phrases that occur once, with the boxes of their tokens."""
        starts = rng.permutation(max(0, len(self._words) - num_words + 1))[: TRIES * number]
        for start in starts.tolist():
            if number == 0:
                return
            begin, end = self._words[start][0], self._words[start + num_words - 1][1]
            phrase = self._text[begin:end]
            occurs = re.findall(rf"(?<!\w)(?={re.escape(phrase)}(?!\w))", self._text, re.IGNORECASE)
            inside = (self._spans_T2[:, 0] >= begin) & (self._spans_T2[:, 1] <= end)
            extents = self._extents_T6[inside]
            # A frame of a video is one of many planes: boxes without a time lie on one.
            flat = len(extents) and not np.isnan(extents[:, :4]).any()
            if len(occurs) == 1 and flat and np.isnan(extents[:, 4:]).all():
                number -= 1
                yield phrase, extents[:, :4].tolist()


class Grounder:
    """Measures how representations ground phrases, each phrase encoded once for an encoder."""

    def __init__(self, searcher: Searcher, phrases: Sequence[Phrase]):
        self._searcher, self._phrases = searcher, phrases
        self._encoded: dict[str, EncodedQueries] = {}
        self._places: dict[tuple[str, str], np.ndarray | None] = {}

    def columns(self, name: str) -> list[str] | None:
        """The columns that decide the measures; None if the representation keeps no places.

        Those are the extents of the input tokens, and of compressed ones the support.
        """
        index = self._searcher.index
        info, extents = index.representation(name), _extents(index, name)
        if extents is None:
            return None
        if info.is_uncompressed:
            return [name, extents]
        support = info.support_column
        if support is None or support not in index.schema.names:
            return None
        return [name, extents, support]

    def measure(self, name: str) -> dict[str, float]:
        """The means of the measures over the phrases whose items have vectors, and their number."""
        index = self._searcher.index
        info = index.representation(name)
        columns = self.columns(name)
        assert columns is not None, f"{name} stores no regions"
        ids = list(dict.fromkeys(phrase.item_id for phrase in self._phrases))
        table = index.items(ids, ["item_id", *columns]).combine_chunks()
        place = {item_id: i for i, item_id in enumerate(table["item_id"].to_pylist())}
        vectors_TD, lengths = index.codec(name).decode(table[name], info.dim)
        ends = np.cumsum(lengths)
        queries = self._queries(name, info.encoder.fingerprint)
        found = []
        for phrase, query_MD in zip(self._phrases, queries, strict=True):
            row = place[phrase.item_id]
            boxes_T4 = self._boxes(table, columns[1], row)
            if not lengths[row] or boxes_T4 is None:
                continue
            own_ND = vectors_TD[ends[row] - lengths[row] : ends[row]].astype(np.float32)
            similarity_N = (query_MD.numpy() @ own_ND.T).mean(axis=0).astype(np.float64)
            output_T = self._outputs(table, info, row, len(boxes_T4))
            similarity_T = np.where(output_T < 0, np.nan, similarity_N[output_T])
            map_YX = relevance_map(similarity_T, boxes_T4)
            found.append(measure(map_YX, region(phrase.boxes)))
        if not found:
            return {}
        means = Grounding(*np.mean(found, axis=0).tolist())
        return {**means._asdict(), "phrases": float(len(found))}

    def _queries(self, name: str, fingerprint: str) -> list[torch.Tensor]:
        """The phrases' token vectors, as a representation is searched with them."""
        if fingerprint not in self._encoded:
            texts = [phrase.text for phrase in self._phrases]
            self._encoded[fingerprint] = self._searcher.encoder(name).encode_queries(texts)
        return self._searcher.queries(self._encoded[fingerprint], name).tokens

    def _boxes(self, table: Any, column: str, row: int) -> np.ndarray | None:
        """(T, 4) the boxes of an item's tokens; None if it has none."""
        key = column, table["item_id"][row].as_py()
        if key not in self._places:
            extents = table[column][row].as_py()
            has_boxes = _has_boxes(extents)
            self._places[key] = np.array(extents, float)[:, :4] if has_boxes else None
        return self._places[key]

    def _outputs(
        self, table: Any, info: RepresentationInfo, row: int, num_tokens: int
    ) -> np.ndarray:
        """Returns the vector that stands for each input token, or -1, of shape (T,)."""
        if info.support_column is None or info.support_form is None:
            return np.arange(num_tokens)
        support = table[info.support_column][row].as_py()
        return outputs_of(support, info.support_form, num_tokens)


def _extents(index: Index, name: str) -> str | None:
    """The column of the places of a representation's input tokens, if it is stored."""
    column = index.representation(name).positions.get("extents")
    return column if column in index.schema.names else None


def _has_boxes(extents: list | None) -> bool:
    return bool(extents) and not np.isnan(np.array(extents, float)[:, :4]).any(axis=1).all()

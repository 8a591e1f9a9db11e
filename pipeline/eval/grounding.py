"""Grounding of phrases: how well compressed vectors preserve their locations.

A phrase is compared with every input token of its item, using the vector to which the token is
assigned. `pipeline.eval.relevance_maps` computes the metrics from these similarities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from pipeline.config import Spec, SpecError
from pipeline.data.texts import WORD
from pipeline.encoders import EncodedQueries
from pipeline.eval import Box, Phrase
from pipeline.eval.boxes import check_boxes
from pipeline.eval.relevance_maps import (
    GroundingMetrics,
    grounding_metrics,
    region_mask,
    relevance_map,
)
from pipeline.eval.topics import parse_row, read_lines
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader, combine_filters
from pipeline.schema import is_blank
from pipeline.search.explain import assigned_vectors, prefix_assignment
from pipeline.search.searcher import Searcher

#: Number of positions in the text that are tried per phrase.
ATTEMPTS_PER_PHRASE = 20

#: Value of the spec field `grounding` that selects the phrases of the benchmark.
BENCHMARK_PHRASES = "benchmark"


class GeneratedPhrases(Spec):
    """Phrases of consecutive words that occur exactly once in the text of an item."""

    num_phrases: PositiveInt = 200
    """Maximum number of phrases."""
    num_words: PositiveInt = 3
    """Number of words per phrase."""
    seed: NonNegativeInt = 0
    """Seed of the random selection."""


def read_phrases(path: str) -> list[Phrase]:
    """Reads phrases from lines {"item_id": ..., "phrase": ..., "boxes": [[x0, y0, x1, y1]]}."""
    phrases = []
    form = 'a line {"item_id": "a", "phrase": "two words", "boxes": [[x0, y0, x1, y1], ...]}'
    for number, line in read_lines(path, "grounding", "phrase"):
        location = f"line {number} of {path}"
        row = parse_row(line, "grounding", form, f" ({location})")
        item_id, text = row.get("item_id"), row.get("phrase")
        if not isinstance(item_id, str) or not isinstance(text, str) or is_blank(text):
            raise SpecError("grounding", line[:80], form, note=f" ({location})")
        boxes = check_boxes(row.get("boxes") or None, "grounding", location)
        phrases.append(Phrase(item_id, text, boxes.tolist()))
    return phrases


def indexed_phrases(
    phrases: Sequence[Phrase], index: IndexReader, filter: str | None
) -> list[Phrase]:
    """Returns the phrases whose items are in the index."""
    wanted = {phrase.item_id for phrase in phrases}
    found: set[str] = set()
    for batch in index.batches(["item_id"], filter=filter):
        found |= wanted & set(batch["item_id"].to_pylist())
    selected = [phrase for phrase in phrases if phrase.item_id in found]
    if not selected:
        problem = f"has none of its {len(wanted):,} items with boxes in the index"
        raise SpecError("grounding", BENCHMARK_PHRASES, "a benchmark of the indexed items", problem)
    return selected


def check_phrases(phrases: Sequence[Phrase], index: IndexReader, names: Sequence[str]) -> None:
    """Checks that the items of all phrases are in the index and have token locations."""
    columns = list(dict.fromkeys(filter(None, (_extents_column(index, name) for name in names))))
    wanted = list(dict.fromkeys(phrase.item_id for phrase in phrases))
    table = index.items(wanted, ["item_id", *columns])
    items = {row["item_id"]: row for row in table.to_pylist()}
    for item_id in wanted:
        if item_id not in items:
            raise SpecError("grounding", item_id, "the id of an item in the index")
        if not any(_has_boxes(items[item_id][column]) for column in columns):
            rule = "an item with stored token positions (keep_positions)"
            raise SpecError("grounding", item_id, rule, "has no token positions")


def generate_phrases(
    spec: GeneratedPhrases, index: IndexReader, names: Sequence[str], filter: str | None
) -> list[Phrase]:
    """Generates phrases from the texts of items and determines the boxes of their tokens.

    Items are sampled without replacement. When all items have been used, sampling starts again. The
    first of `names` with token positions provides the boxes.
    """
    info = next((index.representation(n) for n in names if _extents_column(index, n)), None)
    found = [] if info is None else _sample_phrases(spec, index, info, filter)
    if not found:
        rule = "a file of phrases if no item has word positions"
        raise SpecError("grounding", spec.num_phrases, rule)
    return found[: spec.num_phrases]


def _sample_phrases(
    spec: GeneratedPhrases, index: IndexReader, info: RepresentationInfo, filter: str | None
) -> list[Phrase]:
    spans, extents = (info.positions[kind] for kind in ("spans", "extents"))
    has = combine_filters(filter, f"`{extents}` IS NOT NULL AND text IS NOT NULL")
    # Sorted, because the order of the rows depends on the order in which units were written.
    ids = sorted(
        i for batch in index.batches(["item_id"], filter=has) for i in batch[0].to_pylist()
    )
    rng = np.random.default_rng(spec.seed)
    order = rng.permutation(len(ids)).tolist()
    found: list[Phrase] = []
    for start in range(0, len(order), spec.num_phrases):
        if len(found) >= spec.num_phrases:
            break
        sample = [ids[i] for i in order[start : start + spec.num_phrases]]
        rows = index.items(sample, ["item_id", "text", spans, extents]).to_pylist()
        per_item = -(-spec.num_phrases // len(ids))
        for row in rows:
            words = _Words(row["text"], row[spans], row[extents])
            phrases = words.phrases(spec.num_words, per_item, rng)
            found += [Phrase(row["item_id"], text, boxes) for text, boxes in phrases]
    return found


class _Words:
    def __init__(self, text: str, spans: list, extents: list):
        self._text = text
        self._words = [match.span() for match in WORD.finditer(text)]
        self._spans_T2 = np.array(spans).reshape(-1, 2)
        self._extents_T6 = np.array(extents, float).reshape(-1, 6)

    def phrases(
        self, num_words: int, number: int, rng: np.random.Generator
    ) -> Iterator[tuple[str, list[Box]]]:
        """Yields up to `number` random phrases that occur once, with the boxes of their tokens."""
        starts = rng.permutation(max(0, len(self._words) - num_words + 1))[
            : ATTEMPTS_PER_PHRASE * number
        ]
        for start in starts.tolist():
            if number == 0:
                return
            begin, end = self._words[start][0], self._words[start + num_words - 1][1]
            phrase = self._text[begin:end]
            matches = re.findall(
                rf"(?<!\w)(?={re.escape(phrase)}(?!\w))", self._text, re.IGNORECASE
            )
            inside = (self._spans_T2[:, 0] >= begin) & (self._spans_T2[:, 1] <= end)
            extents = self._extents_T6[inside]
            # Video frames are excluded: boxes with a time are not on one common plane.
            has_boxes = len(extents) and not np.isnan(extents[:, :4]).any()
            if len(matches) == 1 and has_boxes and np.isnan(extents[:, 4:]).all():
                number -= 1
                yield phrase, extents[:, :4].tolist()


class Grounder:
    """Computes grounding metrics of representations. Each phrase is encoded once per encoder."""

    def __init__(self, searcher: Searcher, phrases: Sequence[Phrase]):
        self._searcher, self._phrases = searcher, phrases
        self._encoded: dict[str, EncodedQueries] = {}
        self._token_boxes: dict[tuple[str, str], np.ndarray | None] = {}

    def columns(self, name: str) -> list[str] | None:
        """Returns the columns that the metrics depend on, or None if there are no token locations.

        They consist of the vectors and the extents of the input tokens. Compressed representations
        also need the assignments.
        """
        index = self._searcher.index
        info, extents = index.representation(name), _extents_column(index, name)
        if extents is None:
            return None
        if info.is_uncompressed:
            return [info.column, extents]
        assignment = info.assignment_column
        if assignment is None or assignment not in index.schema.names:
            return None
        return [info.column, extents, assignment]

    def measure(self, name: str) -> dict[str, float]:
        """Averages the metrics over the phrases whose items have vectors; also counts them."""
        index = self._searcher.index
        info = index.representation(name)
        columns = self.columns(name)
        assert columns is not None, f"{name} stores no regions"
        ids = list(dict.fromkeys(phrase.item_id for phrase in self._phrases))
        table = index.items(ids, ["item_id", *columns]).combine_chunks()
        row_numbers = {item_id: i for i, item_id in enumerate(table["item_id"].to_pylist())}
        vectors_TD, lengths = index.codec(name).decode(table[info.column], info.dim)
        ends = np.cumsum(lengths)
        queries = self._queries(name, info.encoder.fingerprint)
        found = []
        for phrase, query_MD in zip(self._phrases, queries, strict=True):
            row = row_numbers[phrase.item_id]
            boxes_T4 = self._item_boxes(table, columns[1], row)
            if not lengths[row] or boxes_T4 is None:
                continue
            item_ND = vectors_TD[ends[row] - lengths[row] : ends[row]].astype(np.float32)
            output_T = self._token_outputs(table, info, row, len(boxes_T4), item_ND)
            item_ND = item_ND[: info.max_vectors]
            similarity_N = (query_MD.numpy() @ item_ND.T).mean(axis=0).astype(np.float64)
            similarity_T = np.where(output_T < 0, np.nan, similarity_N[output_T])
            map_YX = relevance_map(similarity_T, boxes_T4)
            found.append(grounding_metrics(map_YX, region_mask(phrase.boxes)))
        if not found:
            return {}
        means = GroundingMetrics(*np.mean(found, axis=0).tolist())
        return {**means._asdict(), "phrases": float(len(found))}

    def _queries(self, name: str, fingerprint: str) -> list[torch.Tensor]:
        if fingerprint not in self._encoded:
            texts = [phrase.text for phrase in self._phrases]
            self._encoded[fingerprint] = self._searcher.encoder(name).encode_queries(texts)
        return self._searcher.queries(self._encoded[fingerprint], name).tokens

    def _item_boxes(self, table: Any, column: str, row: int) -> np.ndarray | None:
        """Returns the boxes of an item's tokens (T, 4), or None if no token has a box."""
        key = column, table["item_id"][row].as_py()
        if key not in self._token_boxes:
            extents = table[column][row].as_py()
            has_boxes = _has_boxes(extents)
            self._token_boxes[key] = np.array(extents, float)[:, :4] if has_boxes else None
        return self._token_boxes[key]

    def _token_outputs(
        self,
        table: Any,
        info: RepresentationInfo,
        row: int,
        num_tokens: int,
        stored_ND: np.ndarray,
    ) -> np.ndarray:
        """Returns the vector that each input token is assigned to (T,), -1 for none."""
        if info.assignment_column is None or info.assignment_form is None:
            return np.arange(num_tokens)
        assignment = table[info.assignment_column][row].as_py()
        form = info.assignment_form
        assignment = prefix_assignment(assignment, form, stored_ND, info.max_vectors)
        return assigned_vectors(assignment, form, num_tokens)


def _extents_column(index: IndexReader, name: str) -> str | None:
    column = index.representation(name).positions.get("extents")
    return column if column in index.schema.names else None


def _has_boxes(extents: list | None) -> bool:
    return bool(extents) and not np.isnan(np.array(extents, float)[:, :4]).any(axis=1).all()

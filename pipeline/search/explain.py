"""From the document vector that matched best to the words it stands for."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.schema import Match, Place

#: The characters of what is no word: of a patch of a picture.
NO_SPAN = (-1, -1)
DROPPED = 65535  # in a support of the form "assignment": no output stands for this input token


def input_tokens(token: int, support: Sequence[int], form: str) -> list[int]:
    """The input tokens that a compressor's output token stands for.

    Args:
        support: the stored support of the item.
        form: "assignment": for each input token its output, or 65535 for none; "indices": for each
            output the one input token it is.

    >>> input_tokens(1, [0, 1, 65535, 1], "assignment"), input_tokens(1, [4, 7], "indices")
    ([1, 3], [7])
    """
    if form == "indices":
        return [support[token]]
    return [i for i, output in enumerate(support) if output == token]


def outputs_of(support: Sequence[int], form: str, num_inputs: int) -> np.ndarray:
    """For each input token the compressor's output token that stands for it, or -1: (T,) int64.

    Args:
        support, form: as in `input_tokens`.

    >>> outputs_of([0, 1, 65535, 1], "assignment", 4).tolist()
    [0, 1, -1, 1]
    >>> outputs_of([2], "indices", 3).tolist()
    [-1, -1, 0]
    """
    support = np.array(support, np.int64)
    if form == "assignment":
        return np.where(support == DROPPED, -1, support)
    outputs = np.full(num_inputs, -1)
    outputs[support] = np.arange(len(support))
    return outputs


def merge(ranges: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Sorts character ranges and joins those that touch; negative and empty ones are left out.

    >>> merge([(5, 9), (0, 2), (2, 4), (-1, -1)])
    ((0, 4), (5, 9))
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted((start, end) for start, end in ranges if 0 <= start < end):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def place_of(span: Sequence[int], extent: Sequence[float]) -> Place | None:
    """A token's place from its characters and its extent x0 y0 x1 y1 t0 t1; None if it has none.

    >>> nan = float("nan")
    >>> place_of((0, 3), (nan, nan, nan, nan, 2.0, 2.5))
    Place(span=(0, 3), box=None, times=(2.0, 2.5))
    """
    box, times = (
        None if any(map(math.isnan, sides)) else tuple(sides) for sides in (extent[:4], extent[4:])
    )
    return Place(tuple(span), box, times) if box or times else None


def best_place(text: str | None, matches: Sequence[Match], *, width: int = 240) -> Place | None:
    """Where the words are that `snippet` shows and marks: what is shown together, or said.

    Of frames and of speech in one stretch of text the one with more marked words counts, and of
    frames the one; the box is around its marked words, the times are from the first to the last.
    Of patches, which are no words, it is the one that matched best.
    """
    best = best_half(matches)
    if not any(match.spans for match in best):
        seen = [match for match in best if match.places]
        return max(seen, key=lambda match: match.similarity).places[0] if seen else None
    text = text or ""
    start, end, _ = _shown(text, [span for match in best for span in match.spans], width)
    places = [
        place
        for place in dict.fromkeys(place for match in best for place in match.places)
        if start <= place.span[0] and place.span[1] <= end
    ]
    if not places:
        return None
    groups: dict[Any, list[Place]] = {}
    for place in places:
        groups.setdefault(place.times if place.box else "said", []).append(place)
    group = max(groups.values(), key=len)
    box = times = None
    if group[0].box:
        sides = list(zip(*(place.box for place in group), strict=True))
        box = (min(sides[0]), min(sides[1]), max(sides[2]), max(sides[3]))
    if group[0].times:
        times = (min(p.times[0] for p in group), max(p.times[1] for p in group))
    return Place((min(p.span[0] for p in group), max(p.span[1] for p in group)), box, times)


def best_half(matches: Sequence[Match]) -> list[Match]:
    """The matches at least as close as the median one: what is worth marking."""
    middle = statistics.median_low([match.similarity for match in matches]) if matches else 0.0
    return [match for match in matches if match.similarity >= middle]


def printable(text: str) -> str:
    """The text with a blank for each control character: none reaches a terminal, offsets stay.

    >>> printable("a\\tb\\x1b[2J")
    'a b [2J'
    """
    return "".join(c if c.isprintable() else " " for c in text)


def snippet(
    text: str,
    ranges: Iterable[Sequence[int]],
    *,
    width: int = 240,
    marks: tuple[str, str] = ("[", "]"),
) -> str:
    """The stretch of a text with the most marked characters, whole words, marked words marked.

    The ends are cut between words, so a shown text may be a little shorter than `width`.

    >>> snippet("the wing in a slipstream", [(4, 6), (14, 24)], width=100)
    'the [wing] in a [slipstream]'
    >>> snippet("aaa bbb ccc ddd eee fff", [(16, 17)], width=11)
    '... ddd [eee] fff'
    """
    text = printable(text)
    start, end, marked = _shown(text, ranges, width)
    pieces, done = [], start
    for word_start, word_end in marked:
        if start <= word_start and word_end <= end:
            pieces += [text[done:word_start], marks[0], text[word_start:word_end], marks[1]]
            done = word_end
    shown = "".join([*pieces, text[done:end]]).strip()
    return " ".join(["..."] * (start > 0) + [shown] + ["..."] * (end < len(text)))


def _shown(
    text: str, ranges: Iterable[Sequence[int]], width: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """The stretch of a text with the most marked characters, and every marked word of the text."""
    words = [(w.start(), w.end()) for w in re.finditer(r"\w+", text)]
    ranges = merge(ranges)
    marked = [w for w in words if any(start < w[1] and w[0] < end for start, end in ranges)]
    start, end = _densest_window(len(text), marked, width)
    # Never half a word at either end.
    start = next((w[1] for w in words if w[0] < start < w[1]), start)
    end = next((w[0] for w in words if w[0] < end < w[1]), end)
    return start, end, marked


def _densest_window(length: int, marked: list[tuple[int, int]], width: int) -> tuple[int, int]:
    """A window of `width` characters around the run of marked words that fills it best."""
    if length <= width or not marked:
        return 0, min(length, width)
    best, run, first, filled = -1, (0, 0), 0, 0
    for last, (start, end) in enumerate(marked):
        filled += end - start
        while end - marked[first][0] > width and first < last:
            filled -= marked[first][1] - marked[first][0]
            first += 1
        if filled > best:
            best, run = filled, (marked[first][0], end)
    start = max(0, min((run[0] + run[1] - width) // 2, length - width))
    return start, start + width

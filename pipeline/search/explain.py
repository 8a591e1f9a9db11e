"""Explains scores by the vectors, words and passages that match a query."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.data.texts import WORD, is_inside_word
from pipeline.search.results import Box, Highlight, Location, Passage, Times

#: Maximum number of passages per hit.
MAX_PASSAGES = 3
#: Minimum share of the total contribution that each passage after the first must add.
MIN_SHARE = 0.25
#: Length of a gap, in characters, that costs the mean contribution of a query token; about eight
#: English words.
TOKEN_CHARACTERS = 48
#: Characters of speech per second, which converts pauses to characters.
SPEECH_CHARACTERS = 15
#: Maximum number of query tokens used to find passages, by contribution. Image queries have
#: hundreds.
MAX_QUERY_TOKENS = 32
#: Maximum number of matching tokens per passage.
MAX_ANCHORS = 64
#: Minimum contribution of a highlighted word, relative to the best word of its passage.
MIN_HIGHLIGHT = 2 / 3

#: Span of image patches, which have no characters.
NO_SPAN = (-1, -1)
#: Stored assignment of an input token without a vector.
DROPPED = 65535


def input_tokens(token: int, assignment: Sequence[int], form: str) -> list[int]:
    """Returns the input tokens that were assigned to a compressed vector.

    Args:
        form: "assignment" if it contains the vector of each input token, or `DROPPED`. "indices" if
            it contains the only input token of each vector.

    >>> input_tokens(1, [0, 1, 65535, 1], "assignment"), input_tokens(1, [4, 7], "indices")
    ([1, 3], [7])
    """
    if form == "indices":
        return [assignment[token]]
    return [i for i, output in enumerate(assignment) if output == token]


def assigned_vectors(assignment: Sequence[int], form: str, num_inputs: int) -> np.ndarray:
    """Returns the compressed vector of each input token, (T,) int64. Unassigned tokens have -1.

    >>> assigned_vectors([0, 1, 65535, 1], "assignment", 4).tolist()
    [0, 1, -1, 1]
    >>> assigned_vectors([2], "indices", 3).tolist()
    [-1, -1, 0]
    """
    stored = np.array(assignment, np.int64)
    if form == "assignment":
        return np.where(stored == DROPPED, -1, stored)
    outputs = np.full(num_inputs, -1)
    outputs[stored] = np.arange(len(stored))
    return outputs


def prefix_assignment(
    assignment: Sequence[int], form: str, vectors_ND: np.ndarray, max_vectors: int | None
) -> Sequence[int]:
    """Returns the assignment of input tokens to the first vectors of an item.

    Tokens of later vectors are assigned to the first vector that is nearest to theirs, or to none
    if each vector has only one token.

    Args:
        max_vectors: Length of the prefix, or None to return the assignment unchanged.

    >>> vectors = np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 0.9]])
    >>> prefix_assignment([0, 2, 65535, 1], "assignment", vectors, 2)
    [0, 1, 65535, 1]
    >>> prefix_assignment([4, 7, 2], "indices", vectors, 2)
    [4, 7]
    """
    if max_vectors is None:
        return assignment
    if form == "indices":
        return assignment[:max_vectors]
    first_KD, later_ND = vectors_ND[:max_vectors], vectors_ND[max_vectors:]
    # |a - b|^2 / 2 without |a|^2, which is the same for all b.
    distance_NK = (first_KD**2).sum(axis=1) / 2 - later_ND @ first_KD.T
    outputs = [*range(len(first_KD)), *distance_NK.argmin(axis=1).tolist()]
    return [output if output == DROPPED else outputs[output] for output in assignment]


def merge(ranges: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Sorts character ranges and merges those that touch or overlap. Empty ranges are dropped.

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


def token_location(
    span: Sequence[int], extent: Sequence[float], confidence: float = math.nan
) -> Location | None:
    """Returns the location of a token, or None if it has neither a bounding box nor times.

    Args:
        extent: x0 y0 x1 y1 in [0, 1] and t0 t1 in seconds, or NaN for missing values.

    >>> nan = float("nan")
    >>> token_location((0, 3), (nan, nan, nan, nan, 2.0, 2.5), 0.75)
    Location(span=(0, 3), box=None, times=(2.0, 2.5), confidence=0.75)
    """
    start, end = span
    box, times = _box_and_times(extent)
    known = None if math.isnan(confidence) else confidence
    if box is None and times is None:
        return None
    return Location(span=(start, end), box=box, times=times, confidence=known)


def _box_and_times(extent: Sequence[float]) -> tuple[Box | None, Times | None]:
    """Splits an extent into a box and times. Each of them is None if it contains NaN."""
    x0, y0, x1, y1, t0, t1 = extent
    box = None if any(map(math.isnan, (x0, y0, x1, y1))) else (x0, y0, x1, y1)
    return box, None if math.isnan(t0) or math.isnan(t1) else (t0, t1)


def contributions(sim_MN: np.ndarray) -> np.ndarray:
    """Returns the contribution of each query token to the score of an item: (M,).

        c_m = max_n s_mn - mean_n s_mn

    The contributions sum to the MaxSim score minus the expected score of a random alignment of
    query tokens and item vectors. Stop words contribute little even if their MaxSim term is high,
    because they are about equally similar to all vectors of an item.

    >>> contributions(np.array([[0.9, 0.0, 0.0], [0.8, 0.7, 0.6]])).round(2).tolist()
    [0.6, 0.1]
    """
    return sim_MN.max(axis=1) - sim_MN.mean(axis=1)


def strengths(values: np.ndarray) -> np.ndarray:
    """Maps values to [0, 1] such that the median becomes 0 and the maximum becomes 1."""
    low, high = value_range(values)
    values = np.nan_to_num(values, nan=-np.inf)
    if high <= low:
        return (values == high).astype(float)
    return np.clip((values - low) / (high - low), 0, 1) ** 2


def value_range(values: np.ndarray) -> tuple[float, float]:
    """Returns the values drawn with zero opacity (the median) and full opacity (the maximum)."""
    finite = values[np.isfinite(values)]
    return max(float(np.median(finite)), 0.0), float(finite.max())


def find_passages(
    query_tokens: Sequence[str],
    sim_MN: np.ndarray,
    output_T: np.ndarray,
    spans_T2: np.ndarray | None,
    extents_T6: np.ndarray | None,
    text: str | None,
    confidence_T: np.ndarray | None = None,
) -> tuple[Passage, ...]:
    """Returns up to `MAX_PASSAGES` passages of an item that match a query, best first.

    The gain of a passage W is the contribution that it adds to the passages found before, and its
    cost is proportional to its length:

        gain(W) = sum over m of max(0, max_{t in W} e_mt - f_m)
        cost(W) = mean_m c_m * length(W) / `TOKEN_CHARACTERS`

    Here e_mt is s_mt - mean_n s_mn, or 0 if that is below c_m / 2 (the token does not match) or if
    the text of another token of the same vector equals the query token, and f_m is the highest e_mt
    inside the passages found before. Passages are selected greedily by gain minus cost. Every
    passage after the first must gain at least `MIN_SHARE` of the sum of all c_m.

    A passage is either a window of consecutive tokens in reading order, within one frame or within
    speech, or a region of adjacent image patches.

    Args:
        sim_MN: Similarities between the M query tokens and the N vectors of the item.
        output_T: Vector that each of the T input tokens is assigned to, or -1 for none.
        extents_T6: x0 y0 x1 y1 in [0, 1] and t0 t1 in seconds of each input token, or NaN.
        text: Text of the item. Passages are extended to whole words.
    """
    num_tokens = len(output_T)
    if (spans_T2 is None and extents_T6 is None) or (sim_MN.shape[1] == 1 and num_tokens > 1):
        return ()  # without locations, or with one vector for all tokens, parts are equal
    spans_T2 = np.full((num_tokens, 2), -1) if spans_T2 is None else spans_T2
    extents_T6 = np.full((num_tokens, 6), np.nan) if extents_T6 is None else extents_T6
    is_single = sim_MN.shape[1] == 1
    mean_M = np.zeros(len(sim_MN)) if is_single else sim_MN.mean(axis=1)
    best_M = sim_MN.max(axis=1) - mean_M
    selected = np.sort(np.argsort(-best_M, kind="stable")[:MAX_QUERY_TOKENS])
    selected = selected[best_M[selected] > 0]
    if not len(selected):
        return ()
    best_M = best_M[selected]
    e_MT = np.where(output_T < 0, 0.0, sim_MN[selected][:, output_T] - mean_M[selected, None])
    e_MT[e_MT < best_M[:, None] / 2] = 0.0
    e_MT[_other_words([query_tokens[m] for m in selected], output_T, spans_T2, text or "")] = 0.0
    words = _Words(e_MT, spans_T2, extents_T6, best_M.mean() / TOKEN_CHARACTERS)
    patches = _Patches(e_MT, spans_T2, extents_T6)
    floor_M = np.zeros(len(selected))
    taken_T = np.zeros(num_tokens, bool)
    passages: list[Passage] = []
    while len(passages) < MAX_PASSAGES:
        best_words, best_patches = words.best(floor_M, taken_T), patches.best(floor_M)
        candidates = [best for best in (best_words, best_patches) if best is not None]
        if not candidates:
            break
        gain, tokens = max(candidates, key=lambda candidate: candidate[0])
        if passages and gain < MIN_SHARE * best_M.sum():
            break
        inside_M = e_MT[:, tokens].max(axis=1)
        highlights = []
        if spans_T2[tokens[0], 0] >= 0:
            at_M = tokens[e_MT[:, tokens].argmax(axis=1)]
            highlights = [
                Highlight(
                    query_token=query_tokens[m],
                    span=tuple(spans_T2[t].tolist()),
                    contribution=float(contribution),
                )
                for m, t, contribution in zip(selected, at_M, inside_M, strict=True)
                if contribution > 0
            ]
        span, box, times = _location(tokens, spans_T2, extents_T6, text or "")
        passage = Passage(
            span=span,
            box=box,
            times=times,
            confidence=None if confidence_T is None else mean_or_none(confidence_T[tokens]),
            contribution=float(gain),
            highlights=tuple(highlights),
        )
        passages.append(passage)
        floor_M = np.maximum(floor_M, inside_M)
        taken_T[tokens] = True
    return tuple(passages)


def _other_words(
    query_tokens: Sequence[str], output_T: np.ndarray, spans_T2: np.ndarray, text: str
) -> np.ndarray:
    """Finds tokens (M, T) that share the vector of a token whose text equals a query token.

    The vector is equally similar to all of them, but represents the query token because of this
    one.
    """
    spans = spans_T2.tolist()
    words_T = np.array([text[start:end].lower() if start >= 0 else "" for start, end in spans])
    is_equal_MT = np.array([token.lower() for token in query_tokens])[:, None] == words_T
    tokens_M, tokens_T = np.nonzero(is_equal_MT & (output_T >= 0))
    # The last column is that of tokens without a vector, whose output is -1.
    is_shared_MN = np.zeros((len(query_tokens), output_T.max(initial=-1) + 2), bool)
    is_shared_MN[tokens_M, output_T[tokens_T]] = True
    return is_shared_MN[:, output_T] & ~is_equal_MT


class _Words:
    """Text tokens of an item, in which the best window of consecutive tokens is searched."""

    def __init__(
        self, e_MT: np.ndarray, spans_T2: np.ndarray, extents_T6: np.ndarray, price: float
    ):
        tokens = np.flatnonzero(spans_T2[:, 0] >= 0)
        spans, extents = spans_T2[tokens], extents_T6[tokens]
        step = np.r_[0, np.diff(spans[:, 0])].astype(float)
        is_seen = ~np.isnan(extents[:, 0])
        times = np.nan_to_num(extents[:, 4:], nan=-1.0)
        # A new frame, or a change between visible text and speech, ends a passage.
        breaks = np.r_[False, is_seen[1:] != is_seen[:-1]]
        breaks[1:] |= is_seen[1:] & (times[1:] != times[:-1]).any(axis=1)
        spoken = np.r_[0, np.diff(times[:, 0])] * SPEECH_CHARACTERS
        step = np.where(is_seen, step, np.maximum(step, spoken))
        # A jump up the page starts a new column, whose joint box would cover half a page. A gap
        # between lines only adds to the cost.
        height = np.maximum(extents[:, 3] - extents[:, 1], 1e-6)
        down = np.diff(extents[:, [1, 3]].mean(axis=1)) / (2 * np.maximum(height[1:], height[:-1]))
        breaks[1:] |= down < -1
        step[1:] += np.where(down > 1, TOKEN_CHARACTERS, 0)
        at = np.flatnonzero(e_MT[:, tokens].any(axis=0))  # windows begin and end with a match
        self._all, self._anchors = tokens, tokens[at]
        run_A, start_A = breaks.cumsum()[at], step.cumsum()[at]
        end_A = start_A + (spans[at, 1] - spans[at, 0])
        # Windows from each of A anchors to one of the next L, itself included.
        e_MA = e_MT[:, self._anchors]
        length_L1 = np.arange(min(len(at), MAX_ANCHORS))[:, None]
        last_LA = np.arange(len(at)) + length_L1
        is_window_LA = last_LA < len(at)
        last_LA[~is_window_LA] = 0
        cost_LA = price * (end_A[last_LA] - start_A)
        is_window_LA &= run_A[last_LA] == run_A
        is_window_LA &= cost_LA < e_MA.max(axis=1, initial=0.0).sum()
        num_lengths = 1 + np.flatnonzero(is_window_LA.any(axis=1)).max(initial=-1)
        self._is_window_LA, self._cost_LA = is_window_LA[:num_lengths], cost_LA[:num_lengths]
        self._last_LA = last_LA[:num_lengths]
        self._best_LMA = np.zeros((num_lengths, *e_MA.shape), e_MA.dtype)
        self._best_LMA[:1] = e_MA
        for length in range(1, num_lengths):
            shorter_MA = self._best_LMA[length - 1, :, :-length]
            np.maximum(shorter_MA, e_MA[:, length:], out=self._best_LMA[length, :, :-length])

    def best(self, floor_M: np.ndarray, taken_T: np.ndarray) -> tuple[float, np.ndarray] | None:
        """Finds the best window without tokens that are taken. Returns its gain and its tokens."""
        is_taken_A = taken_T[self._anchors]
        num_taken_A = is_taken_A.cumsum()
        is_free_LA = self._is_window_LA & (num_taken_A[self._last_LA] == num_taken_A - is_taken_A)
        gain_LA = np.maximum(self._best_LMA, floor_M[:, None]).sum(axis=1) - floor_M.sum()
        net_LA = np.where(is_free_LA, gain_LA - self._cost_LA, 0.0)
        if net_LA.max(initial=0.0) <= 0:
            return None
        length, first = np.unravel_index(net_LA.argmax(), net_LA.shape)
        start, end = self._anchors[first], self._anchors[first + length]
        is_inside = (self._all >= start) & (self._all <= end)
        return float(gain_LA[length, first]), self._all[is_inside]


class _Patches:
    """Image patches of an item, in which the best region is searched."""

    def __init__(self, e_MT: np.ndarray, spans_T2: np.ndarray, extents_T6: np.ndarray):
        is_patch = (spans_T2[:, 0] < 0) & ~np.isnan(extents_T6[:, 0])
        self._patches = np.flatnonzero(is_patch & e_MT.any(axis=0))
        self._e_MP = e_MT[:, self._patches]
        self._extents_P6 = np.nan_to_num(extents_T6[self._patches], nan=-1.0)

    def best(self, floor_M: np.ndarray) -> tuple[float, np.ndarray] | None:
        """Returns gain and tokens of the best patch and connected ones with half its gain."""
        gain_P = np.maximum(self._e_MP - floor_M[:, None], 0).sum(axis=0)
        if not gain_P.any():
            return None
        start = int(gain_P.argmax())
        left = gain_P >= gain_P[start] / 2
        left &= (self._extents_P6[:, 4:] == self._extents_P6[start, 4:]).all(axis=1)
        region, edge = [], [start]
        left[start] = False
        while edge:
            region += edge
            boxes = self._extents_P6[edge, :4]
            near = left & np.any([_touch(self._extents_P6[:, :4], box) for box in boxes], axis=0)
            left &= ~near
            edge = np.flatnonzero(near).tolist()
        gain = np.maximum(self._e_MP[:, region].max(axis=1) - floor_M, 0).sum()
        return float(gain), self._patches[np.sort(region)]


def _touch(boxes_P4: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Checks which boxes overlap with a box or share an edge with it, (P,) bool."""
    slack = 0.1 * (box[2:] - box[:2])
    gaps = np.maximum(boxes_P4[:, :2] - box[2:], box[:2] - boxes_P4[:, 2:])  # per axis
    return (gaps <= slack).all(axis=1) & (gaps <= -slack).any(axis=1)


def _location(
    tokens: np.ndarray, spans_T2: np.ndarray, extents_T6: np.ndarray, text: str
) -> tuple[tuple[int, int], Box | None, Times | None]:
    """Returns the span of consecutive tokens, extended to whole words, with its box and times."""
    start, end = int(spans_T2[tokens[0], 0]), int(spans_T2[tokens[-1], 1])
    if start >= 0:
        while is_inside_word(text, start):
            start -= 1
        while is_inside_word(text, end):
            end += 1
        tokens = np.flatnonzero((spans_T2[:, 0] >= start) & (spans_T2[:, 1] <= end))
    extents = extents_T6[tokens]
    low, high = extents.min(axis=0).tolist(), extents.max(axis=0).tolist()
    box, times = _box_and_times([*low[:2], *high[2:4], low[4], high[5]])
    return (start, end) if start >= 0 else NO_SPAN, box, times


def mean_or_none(values: np.ndarray) -> float | None:
    """Computes the mean of all values except NaN. Returns None if all values are NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def highlighted_spans(passage: Passage) -> list[tuple[int, int]]:
    """Returns the spans of a passage that should be highlighted, by their contributions.

    >>> the = Highlight(query_token="the", span=(0, 3), contribution=0.2)
    >>> wing = Highlight(query_token="wing", span=(4, 8), contribution=0.6)
    >>> highlighted_spans(Passage(span=(0, 8), contribution=0.8, highlights=(the, wing)))
    [(4, 8)]
    """
    most = max((word.contribution for word in passage.highlights), default=0.0)
    return [word.span for word in passage.highlights if word.contribution >= MIN_HIGHLIGHT * most]


def printable(text: str) -> str:
    r"""Replaces non-printable characters with spaces, for safe output on a terminal.

    >>> printable("a\tb\x1b[2J")
    'a b [2J'
    """
    return "".join(c if c.isprintable() else " " for c in text)


def snippet(
    text: str,
    ranges: Iterable[Sequence[int]],
    *,
    width: int = 240,
    delimiters: tuple[str, str] = ("[", "]"),
) -> str:
    """Returns the part of a text with the most highlighted characters.

    The part consists of whole words, so it may be shorter than `width`.

    >>> snippet("the wing in a slipstream", [(4, 6), (14, 24)], width=100)
    'the [wing] in a [slipstream]'
    >>> snippet("aaa bbb ccc ddd eee fff", [(16, 17)], width=11)
    '... ddd [eee] fff'
    """
    text = printable(text)
    start, end, highlighted = _shown(text, ranges, width)
    pieces, done = [], start
    before, after = delimiters
    for word_start, word_end in highlighted:
        if start <= word_start and word_end <= end:
            pieces += [text[done:word_start], before, text[word_start:word_end], after]
            done = word_end
    shown = "".join([*pieces, text[done:end]]).strip()
    return " ".join(["..."] * (start > 0) + [shown] + ["..."] * (end < len(text)))


def _shown(
    text: str, ranges: Iterable[Sequence[int]], width: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """Returns start and end of the part with the most highlights, and its highlighted words."""
    words = [(w.start(), w.end()) for w in WORD.finditer(text)]
    ranges = merge(ranges)
    highlighted = [w for w in words if any(start < w[1] and w[0] < end for start, end in ranges)]
    start, end = _densest_window(len(text), highlighted, width)
    # Partial words at either end are dropped.
    start = next((w[1] for w in words if w[0] < start < w[1]), start)
    end = next((w[0] for w in words if w[0] < end < w[1]), end)
    return start, end, highlighted


def _densest_window(length: int, highlighted: list[tuple[int, int]], width: int) -> tuple[int, int]:
    if length <= width or not highlighted:
        return 0, min(length, width)
    best, run, first, filled = -1, (0, 0), 0, 0
    for last, (start, end) in enumerate(highlighted):
        filled += end - start
        while end - highlighted[first][0] > width and first < last:
            filled -= highlighted[first][1] - highlighted[first][0]
            first += 1
        if filled > best:
            best, run = filled, (highlighted[first][0], end)
    start = max(0, min((run[0] + run[1] - width) // 2, length - width))
    return start, start + width

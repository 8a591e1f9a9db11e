"""Snippets, passages, and the mapping of vectors to characters."""

import numpy as np
import pytest

from pipeline.search.explain import NO_SPAN, find_passages, input_tokens, merge, snippet
from pipeline.search.results import Passage

TEXT = "The lift of a wing in a propeller slipstream was measured at low speed."


def test_dropped_tokens_have_no_vector():
    assignment = [0, 65535, 1, 0]
    inputs = [input_tokens(token, assignment, "assignment") for token in (0, 1, 2)]
    assert inputs == [[0, 3], [2], []]


def test_merge_drops_empty_ranges():
    assert merge([(-1, -1), (4, 4), (2, 3), (0, 2), (7, 9), (8, 12)]) == ((0, 3), (7, 12))


def test_partial_range_marks_whole_word():
    start = TEXT.index("slip") + 2
    assert snippet(TEXT, [(start, start + 3)], width=200) == TEXT.replace(
        "slipstream", "[slipstream]"
    )


def test_custom_marks():
    assert snippet("a wing", [(2, 6)], delimiters=("<b>", "</b>")) == "a <b>wing</b>"


def test_window_with_the_most_marked_characters():
    text = "drag " + "x " * 300 + "lift and wing " + "y " * 300
    ranges = [(text.index(word), text.index(word) + 4) for word in ("drag", "lift", "wing")]
    shown = snippet(text, ranges, width=60)
    assert "[lift] and [wing]" in shown
    assert "drag" not in shown
    assert shown.startswith("... x")
    assert shown.endswith("y ...")
    assert len(shown) <= 60 + len("[][] ... ...")


@pytest.mark.parametrize("width", [1, 10, 25, 71, 500])
def test_snippet_consists_of_whole_words(width):
    shown = snippet(TEXT, [(TEXT.index("wing"), TEXT.index("wing") + 4)], width=width)
    words = set(TEXT.rstrip(".").split())
    assert {word.strip("[].") for word in shown.split()} - {""} <= words


def test_control_characters_are_replaced():
    assert snippet("a\x1b[2J\twing\n", [(7, 9)]) == "a [2J [wing]"


def test_empty_text():
    assert snippet("", [(0, 3)]) == ""


# -- passages --------------------------------------------------------------------------------

#: Words of a video frame at 2 to 6 seconds, of another one at 8 to 9 seconds, and of speech.
WORDS = [
    ("road", (0.1, 0.2, 0.3, 0.4, 2.0, 6.0)),
    ("closed", (0.4, 0.2, 0.6, 0.5, 2.0, 6.0)),
    ("today", (0.0, 0.8, 0.2, 0.9, 8.0, 9.0)),
    *(
        (word, (*[np.nan] * 4, 4.0 + i / 2, 4.4 + i / 2))
        for i, word in enumerate(["the", "road", "is", "closed"])
    ),
]
TEXT_OF_WORDS = " ".join(word for word, _ in WORDS)


def layout(words: list[tuple[str, tuple[float, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the spans and the extents of words separated by spaces."""
    starts = np.cumsum([0, *(len(word) + 1 for word, _ in words)])[:-1]
    spans = np.array(
        [(start, start + len(word)) for start, (word, _) in zip(starts, words, strict=True)]
    )
    return spans, np.array([extent for _, extent in words], float)


def passages(
    sims: dict[str, dict[int, float]], words=WORDS, base: float = 0.1
) -> tuple[Passage, ...]:
    """Finds passages; `sims` maps query tokens to their similarities with words."""
    sim_MN = np.full((len(sims), len(words)), base)
    for row, similarities in zip(sim_MN, sims.values(), strict=True):
        for word, similarity in similarities.items():
            row[word] = similarity
    text = " ".join(word for word, _ in words)
    return find_passages(list(sims), sim_MN, np.arange(len(words)), *layout(words), text)


def test_passage_in_one_frame():
    (passage,) = passages({"road": {0: 0.9}, "closed": {1: 0.8}})
    assert passage.span == (0, 11) and TEXT_OF_WORDS[0:11] == "road closed"
    assert (passage.box, passage.times) == ((0.1, 0.2, 0.6, 0.5), (2.0, 6.0))
    assert [(word.query_token, word.span) for word in passage.highlights] == [
        ("road", (0, 4)),
        ("closed", (5, 11)),
    ]
    # Each similarity minus the mean of its row.
    expected = sum(s - (s + 6 * 0.1) / 7 for s in (0.9, 0.8))
    assert passage.contribution == pytest.approx(expected)


def test_frames_and_speech_are_separate_passages():
    first_frame, second_frame = passages({"road": {0: 0.9}, "closed": {1: 0.8}, "today": {2: 0.8}})
    assert (first_frame.span, second_frame.span) == ((0, 11), (12, 17))
    speech, frame = passages({"road": {4: 0.9}, "closed": {6: 0.8}, "today": {2: 0.7}})
    assert (speech.box, speech.times) == (None, (4.5, 5.9)) and frame.span == second_frame.span


def test_passage_with_more_matching_words_wins():
    (speech,) = passages({"the": {3: 0.6}, "road": {0: 0.9, 4: 0.85}, "closed": {1: 0.8, 6: 0.78}})
    assert speech.times == (4.0, 5.9)


def spoken_words(num_words: int) -> list[tuple[str, tuple[float, ...]]]:
    """Returns words of 0.4 seconds, two per second."""
    return [(f"word{i:03}", (*[np.nan] * 4, i / 2, i / 2 + 0.4)) for i in range(num_words)]


def test_stop_word_does_not_extend_a_passage():
    """The stop word matches all words and matches best far away from the passage."""
    words = spoken_words(60)
    sims = {"ask": {40: 0.9}, "your": {41: 0.85}, "country": {42: 0.9}}
    (passage,) = passages({**sims, "the": {i: 0.6 for i in range(60)} | {3: 0.75}}, words)
    assert passage.times == (20.0, 21.4)
    # A stop word that matches a single word is not a passage either.
    (passage,) = passages({**sims, "the": {3: 0.4}}, words)
    assert passage.times == (20.0, 21.4)


def test_pause_splits_passages():
    words = spoken_words(6)
    gap = [
        (word, (*extent[:4], *np.add(extent[4:], 30.0 * (i > 2))))
        for i, (word, extent) in enumerate(words)
    ]
    sims = {"a": {1: 0.9}, "b": {2: 0.9}, "c": {3: 0.9}}
    assert [p.times for p in passages(sims, words)] == [(0.5, 1.9)]
    assert [p.times for p in passages(sims, gap)] == [(0.5, 1.4), (31.5, 31.9)]


def test_passage_does_not_span_columns():
    column = [
        (f"w{i}", (x, y, x + 0.1, y + 0.02, *[np.nan] * 2))
        for i, (x, y) in enumerate([(0.1, 0.1), (0.1, 0.13), (0.1, 0.9), (0.6, 0.1), (0.6, 0.13)])
    ]
    first, second = passages({"a": {2: 0.9}, "b": {3: 0.9}, "c": {4: 0.9}}, column)
    assert first.box == (0.6, 0.1, 0.7, 0.15) and second.box == (0.1, 0.9, 0.2, 0.92)


def test_region_of_patches():
    """A region consists of adjacent patches with at least half the gain of the best patch."""
    grid = [
        (x / 4, y / 4, (x + 1) / 4, (y + 1) / 4, np.nan, np.nan) for y in range(4) for x in range(4)
    ]
    sim_MN = np.full((1, 16), 0.1)
    sim_MN[0, [5, 6, 15]] = 0.9, 0.8, 0.85
    (passage,) = find_passages(["#0"], sim_MN, np.arange(16), None, np.array(grid), None)
    assert passage.box == (0.25, 0.25, 0.75, 0.5)
    assert (passage.span, passage.times, passage.highlights) == (NO_SPAN, None, ())


def test_image_with_text_has_regions_and_windows():
    """The region is found first, then the window."""
    spans = np.array([(-1, -1), (0, 4), (5, 9)])
    extents = np.array([(0.0, 0.0, 0.5, 0.5, *[np.nan] * 2), *[(np.nan,) * 6] * 2])
    sim_MN = np.array([[0.9, 0.1, 0.1], [0.1, 0.1, 0.8]])
    region, window = find_passages(["a", "b"], sim_MN, np.arange(3), spans, extents, "text more")
    assert (region.box, region.span) == ((0.0, 0.0, 0.5, 0.5), NO_SPAN)
    assert (window.box, window.span) == (None, (5, 9))


def test_passage_consists_of_whole_words():
    spans, text = np.array([(0, 5), (5, 10), (11, 15)]), "slipstream wing"
    sim_MN = np.array([[0.1, 0.9, 0.1]])
    (passage,) = find_passages(["tream"], sim_MN, np.arange(3), spans, None, text)
    assert passage.span == (0, 10) and passage.highlights[0].span == (5, 10)


def test_passage_of_compressed_item():
    spans, _ = layout(words := spoken_words(5))
    text = " ".join(word for word, _ in words)
    sim_MN, outputs = np.array([[0.1, 0.9], [0.1, 0.8]]), np.array([0, 0, 1, 1, -1])
    (passage,) = find_passages(["a", "b"], sim_MN, outputs, spans, None, text)
    assert text[slice(*passage.span)] == "word002"


@pytest.mark.parametrize("sim_MN", [np.array([[0.9]]), np.zeros((2, 3))])
def test_no_passages_without_distinct_parts(sim_MN):
    spans, extents = layout(spoken_words(3))
    outputs = np.arange(3) % sim_MN.shape[1]
    assert find_passages(["a", "b"], sim_MN, outputs, spans, extents, "word000 word001") == ()
    assert find_passages(["a", "b"], sim_MN, outputs, None, None, None) == ()


def test_passage_of_item_with_one_token():
    (passage,) = find_passages(
        ["a"], np.array([[0.5]]), np.arange(1), np.array([(0, 6)]), None, "detour"
    )
    assert passage.span == (0, 6)

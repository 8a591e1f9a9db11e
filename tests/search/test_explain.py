"""Snippets and the way from a vector back to characters."""

import pytest

from pipeline.schema import Match, Place
from pipeline.search.explain import best_place, input_tokens, merge, snippet

TEXT = "The lift of a wing in a propeller slipstream was measured at low speed."


def test_dropped_tokens_belong_to_no_output():
    support = [0, 65535, 1, 0]
    assert [input_tokens(token, support, "assignment") for token in (0, 1, 2)] == [[0, 3], [2], []]


def test_ranges_without_characters_are_left_out():
    assert merge([(-1, -1), (4, 4), (2, 3), (0, 2), (7, 9), (8, 12)]) == ((0, 3), (7, 12))


def test_a_part_of_a_word_marks_the_word():
    start = TEXT.index("slip") + 2
    assert snippet(TEXT, [(start, start + 3)], width=200) == TEXT.replace(
        "slipstream", "[slipstream]"
    )


def test_marks_are_as_asked():
    assert snippet("a wing", [(2, 6)], marks=("<b>", "</b>")) == "a <b>wing</b>"


def test_window_lies_where_most_is_marked():
    text = "drag " + "x " * 300 + "lift and wing " + "y " * 300
    ranges = [(text.index(word), text.index(word) + 4) for word in ("drag", "lift", "wing")]
    shown = snippet(text, ranges, width=60)
    assert "[lift] and [wing]" in shown
    assert "drag" not in shown
    assert shown.startswith("... x")
    assert shown.endswith("y ...")
    assert len(shown) <= 60 + len("[][] ... ...")


@pytest.mark.parametrize("width", [1, 10, 25, 71, 500])
def test_words_are_never_cut(width):
    shown = snippet(TEXT, [(TEXT.index("wing"), TEXT.index("wing") + 4)], width=width)
    words = set(TEXT.rstrip(".").split())
    assert {word.strip("[].") for word in shown.split()} - {""} <= words


def test_no_control_character_reaches_the_terminal():
    assert snippet("a\x1b[2J\twing\n", [(7, 9)]) == "a [2J [wing]"


def test_empty_text():
    assert snippet("", [(0, 3)]) == ""


SCREEN = "road closed today"  # words shown from 2 to 6 seconds, the last one later
SPOKEN = "the road is closed"
PLACES = {
    "road": Place((0, 4), (0.1, 0.2, 0.3, 0.4), (2.0, 6.0)),
    "closed": Place((5, 11), (0.4, 0.2, 0.6, 0.5), (2.0, 6.0)),
    "today": Place((12, 17), (0.0, 0.8, 0.2, 0.9), (8.0, 9.0)),
    "heard road": Place((23, 27), None, (4.5, 4.9)),
    "heard closed": Place((31, 37), None, (5.2, 5.8)),
}


def where(*names: str) -> Place | None:
    matches = [Match(n, 1.0, i, (PLACES[n].span,), (PLACES[n],)) for i, n in enumerate(names)]
    return best_place(f"{SCREEN}\n\n{SPOKEN}", matches)


def test_the_place_of_what_is_shown_is_a_frame_and_a_box_around_its_words():
    assert where("road", "closed") == Place((0, 11), (0.1, 0.2, 0.6, 0.5), (2.0, 6.0))


def test_of_several_frames_the_one_with_most_words_counts():
    assert where("road", "today", "closed") == where("road", "closed")


def test_the_place_of_what_is_said_goes_from_the_first_word_to_the_last():
    spoken = Place((23, 37), None, (4.5, 5.8))
    assert where("heard road", "heard closed") == where("today", *list(PLACES)[3:]) == spoken


def test_words_without_a_place_have_none():
    assert best_place("a wing", [Match("wing", 1.0, 0, ((2, 6),))]) is None
    assert best_place("a wing", []) is None

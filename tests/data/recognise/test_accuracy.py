"""Word error rates of small examples."""

import pytest

from pipeline.data.recognise.accuracy import word_errors


@pytest.mark.parametrize(
    ("reference", "hypothesis", "errors", "words"),
    [
        ("ask not what", "ask not what", 0, 3),
        ("Ask, not WHAT?", "ask not what", 0, 3),
        ("ask not what", "", 3, 3),
        ("", "and so", 2, 0),
        ("a b c d", "a x c d", 1, 4),
        ("a b c d", "a c d", 1, 4),
        ("a b c d", "b c d e", 2, 4),
        ("ﬁne-grained", "fine grained", 0, 2),
    ],
)
def test_word_errors(reference, hypothesis, errors, words):
    assert word_errors(reference, hypothesis) == (errors, words)

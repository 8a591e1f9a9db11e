"""Word error rates of recognisers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Returns the number of word errors of a transcript, and the number of words of the reference.

    The errors are the minimum number of inserted, deleted and substituted words. Case, punctuation
    and white space are ignored. The ratio of the two numbers is the word error rate.

    >>> word_errors("Ask not what your country can do.", "and not what your country can do for")
    (2, 7)
    """
    expected, actual = normalised_words(reference), normalised_words(hypothesis)
    return num_edits(expected, actual), len(expected)


def num_edits(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the edit distance of two sequences of strings.

    >>> num_edits("evening", "evenlng"), num_edits(["not", "what"], ["and", "not", "what"])
    (1, 1)
    """
    row = list(range(len(second) + 1))
    for i, string in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(second, start=1):
            edits = min(row[j] + 1, row[j - 1] + 1, diagonal + (string != other))
            diagonal, row[j] = row[j], edits
    return row[-1]


def normalised_words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation.

    >>> normalised_words("Don’t stop: the 2nd HALF-time…")
    ["don't", 'stop', 'the', '2nd', 'half', 'time']
    """
    text = unicodedata.normalize("NFKC", text).replace("’", "'").casefold()
    return re.findall(r"\w+(?:'\w+)*", text)

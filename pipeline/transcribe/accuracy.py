"""How many words a recogniser got wrong."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """The errors of a transcript, and the number of words that it should have.

    Errors are the least number of words to put in, take out or replace. Case, punctuation and
    white space do not count. Errors / words is the word error rate; 1 - that the word accuracy.

    >>> word_errors("Ask not what your country can do.", "and not what your country can do for")
    (2, 7)
    """
    truth, heard = normalised_words(reference), normalised_words(hypothesis)
    return num_edits(truth, heard), len(truth)


def num_edits(first: Sequence[str], second: Sequence[str]) -> int:
    """The least number of strings to put in, take out or replace to make one sequence the other.

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
    """The words of a text in lower case, without punctuation.

    >>> normalised_words("Don’t stop: the 2nd HALF-time…")
    ["don't", 'stop', 'the', '2nd', 'half', 'time']
    """
    text = unicodedata.normalize("NFKC", text).replace("’", "'").casefold()
    return re.findall(r"\w+(?:'\w+)*", text)

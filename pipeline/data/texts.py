"""Words of texts in any script and Unicode form."""

from __future__ import annotations

import codecs
import re
import unicodedata

#: Characters of scripts without spaces between words, as the content of a character class: Thai and
#: Lao, Burmese, Khmer, and the Tai scripts.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aad\ua9e0-\ua9ff\uaa60-\uaadf"
)
_IS_UNSPACED = re.compile(f"[{UNSPACED}]").match
_MARKS = "".join(
    mark
    for mark in map(chr, range(0x300, 0x20000))
    if unicodedata.category(mark)[0] == "M" and not _IS_UNSPACED(mark)
)
#: A letter or digit, or one with the marks that follow it, such as accents and Indic vowel signs.
#: Words of scripts without spaces end at marks, because a word would otherwise be a sentence.
WORD = re.compile(rf"\w[\w{_MARKS}]*")
_INSIDE = re.compile(rf"(?:[^\W_]|[{_MARKS}]){{2}}")
#: Marks that are usually omitted (Hebrew points, Arabic vowel signs, kashida), and characters that
#: are not visible within a word (soft hyphens, joiners and directions).
_OPTIONAL = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u08d3-\u08e1\u08e3-\u08ff"
    "\u00ad\u200c-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
)


def fold(text: str) -> str:
    r"""Returns a text in lower case and in one Unicode form, for comparing words.

    Composed and decomposed accents, ligatures, widths and other compatible forms become equal.
    Arabic and Hebrew vowel signs, soft hyphens and joiners are removed.

    >>> fold("re\u0301sume\u0301 \ufb01n\xad\uff21") == "r\xe9sum\xe9 fina"
    True
    """
    text = text.lower()
    if text.isascii():
        return text
    text = _OPTIONAL.sub("", unicodedata.normalize("NFKC", text))
    return unicodedata.normalize("NFKC", text.lower())


def is_inside_word(text: str, position: int) -> bool:
    """Checks whether a position is between two characters of a word.

    >>> text = "e\u0301te\u0301 2"
    >>> [is_inside_word(text, position) for position in range(len(text))]
    [False, True, True, True, True, False, False]
    """
    return position > 0 and _INSIDE.fullmatch(text, position - 1, position + 1) is not None


def decode(content: bytes) -> str:
    r"""Decodes a text in UTF-8, or in UTF-16 or UTF-32 with a byte order mark, which is removed.

    Other encodings cannot be distinguished with certainty.

    Raises:
        UnicodeError: The content is in another encoding.

    >>> decode(b"\xef\xbb\xbfred"), decode("red".encode("utf-16"))
    ('red', 'red')
    """
    marks = {
        codecs.BOM_UTF32_LE: "utf-32",
        codecs.BOM_UTF32_BE: "utf-32",
        codecs.BOM_UTF16_LE: "utf-16",
        codecs.BOM_UTF16_BE: "utf-16",
    }
    encoding = next((name for mark, name in marks.items() if content.startswith(mark)), "utf-8-sig")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        rule = "text must be UTF-8, or UTF-16 or UTF-32 with a byte order mark"
        byte = f"0x{content[error.start]:02x}"
        raise UnicodeError(f"{rule}, got byte {byte} at position {error.start}") from None

"""Readers of HTML and of manual pages (roff) that yield sections of plain paragraphs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator


def words(text: str) -> set[str]:
    """Returns the words of a text as a set."""
    return set(text.split())


#: Elements without text to read, and comments.
_SKIPPED = re.compile(
    r"<!--.*?-->|<[!?][^>]*>|<(\w+)[^>]*\shidden\b[^>]*>[^<]*</\1>"
    r"|<(script|style|noscript|nav|footer|head|pre|form|button|select|svg)\b.*?</\2\s*>",
    re.S | re.I,
)
_END = re.compile(r'<a name="relatedtopics">|<footer|<div [^>]*class="(?:footer|navfooter)"', re.I)
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]*)\b[^>]*>", re.I)
_INLINE = words(
    "a abbr acronym b bdi bdo big cite code dfn em font i img kbd mark q s samp small span strong "
    "sub sup tt u var wbr"
)
#: A paragraph is part of a menu if more of its characters are in links.
_MAX_LINKED = 0.6


def read_html(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the headings of a page and the paragraphs below each. Code and menus are omitted.

    >>> list(read_html("<h1>A &amp; b</h1><p>First<br>x <b>y</b></p><a href=m>Menu</a><h2>C</h2>d"))
    [('A & b', ['First', 'x y']), ('C', ['d'])]
    """
    if end := _END.search(text):
        text = text[: end.start()]
    text = _SKIPPED.sub(" ", text)
    heading, paragraphs = "", list[str]()
    parts: list[str] = []
    linked = position = 0
    is_link = False
    for tag in [*_TAG.finditer(text), None]:
        part = text[position : tag.start() if tag else None]
        parts.append(part)
        linked += len(part) if is_link else 0
        if tag is None:
            name, is_end = "", True
        else:
            name, is_end, position = tag[2].lower(), bool(tag[1]), tag.end()
        if name == "a":
            is_link = not is_end and "href" in tag[0]  # type: ignore[index]
        if name in _INLINE:
            continue
        joined = "".join(parts)
        paragraph = " ".join(html.unescape(joined).split())
        if is_end and re.fullmatch("h[1-6]", name):
            if paragraphs:
                yield heading, paragraphs
            heading, paragraphs = paragraph.rstrip("¶ #"), []
        elif paragraph and linked <= _MAX_LINKED * len(joined):
            paragraphs.append(paragraph)
        parts, linked = [], 0
    if paragraphs:
        yield heading, paragraphs


_ESCAPES = {"-": "-", "e": "\\", "(aq": "'", "(cq": "’", "(oq": "‘", "(lq": "“", "(rq": "”"}
_ESCAPES |= {"(em": "—", "(en": "–", "(bu": "•", "(co": "©", "(dq": '"', "(ti": "~", "(ha": "^"}
_ESCAPES |= {" ": " ", "~": " ", "'": "'", "`": "`", "(hy": "-", "(mi": "-", "(bv": "|"}
_ESCAPE = re.compile(
    r"\\(?:[hvwlLDoZXbRxA]'[^']*'|[fFn*gkmM](?:\[[^]]*\]|\(..|.)|s[-+]?\d+|\[[^]]*\]|(?:\(..)|\".*|.)"
)
#: Macros that end a paragraph, and those that are ignored together with their arguments.
_BREAKS = words("PP P LP TP IP HP RS RE TQ Pp It Bl El sp br SY YS EX EE nf fi Bd Ed")
_IGNORED = words(
    "TH Dd Dt Os ad ft if ie el ds nr de hy na ne in ti so ta ll pl UE ME rm tr als PD . .. cc ig "
    "IX mso lg do fam nh Xo Xc Sm"
)


def read_man(text: str) -> Iterator[tuple[str, list[str]]]:
    r"""Yields the headings of a manual page and the paragraphs below each. Tables are omitted.

    >>> list(read_man(".SH NAME\nls \\- list\n.SH \"SEE ALSO\"\n.BR ls (1),\n.PP\n\\fBx\\fP y"))
    [('NAME', ['ls - list']), ('SEE ALSO', ['ls(1),', 'x y'])]
    """
    heading, paragraphs, lines = "", list[str](), list[str]()
    has_begun = False
    text = re.sub(r"^\.TS\b.*?^\.TE\b|^\.de\b.*?^\.\.$", "", text, flags=re.S | re.M)
    for line in [*text.splitlines(), ".SH"]:
        macro, rest = "", line
        if line[:1] in (".", "'"):
            macro, _, rest = line[1:].lstrip().partition(" ")
        if macro.startswith('\\"') or macro in _IGNORED:
            continue
        if macro in ("SH", "SS", "Sh", "Ss") or macro in _BREAKS or not line.strip():
            if paragraph := " ".join(" ".join(lines).split()):
                paragraphs.append(paragraph)
            lines = [] if macro not in ("IP", "It", "HP") else [" ".join(_arguments(rest)[:1])]
            if macro in ("SH", "SS", "Sh", "Ss"):
                if has_begun and paragraphs:
                    yield heading, paragraphs
                heading, paragraphs, has_begun = " ".join(_arguments(rest)), [], True
        elif not macro:
            lines.append(_plain(rest))
        else:
            separator = "" if re.fullmatch("[BIR]{2}", macro) else " "
            dash = "- " if macro == "Nd" else ""
            lines.append(dash + separator.join(_arguments(rest)))


def _arguments(rest: str) -> list[str]:
    """Returns the arguments of a macro.

    >>> _arguments('"a b" c')
    ['a b', 'c']
    """
    rest = re.sub(r'(?<!\\)\\".*', "", rest)
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\ |\S)+)', rest)
    return [_plain(quoted.replace('""', '"') or word) for quoted, word in found]


def _plain(text: str) -> str:
    def replace(found: re.Match[str]) -> str:
        name = found[0][1:]
        if name.startswith("[") and name.endswith("]"):
            name = "(" + name[1:-1]
        return _ESCAPES.get(name, "")

    return _ESCAPE.sub(replace, text)

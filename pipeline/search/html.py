"""HTML of hits and similarity maps for notebooks: escaped, and without external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from pipeline.search.explain import highlighted_spans, snippet, strengths
from pipeline.search.formatting import format_hits, format_location, format_span
from pipeline.search.results import Hit, Map, Word

#: Delimiters of highlighted words, which texts cannot contain: snippets are printable.
DELIMITERS = ("\x02", "\x03")
#: Minimum strength of a coloured word, which keeps maps of long texts small.
MIN_STRENGTH = 0.02
#: Colour of words, and the opacity of the strongest, as in `map_images`.
COLOUR, MAX_OPACITY = "255,120,0", 0.6


class Hits(list[Hit]):
    """Hits of a query, best first, which notebooks show as a table."""

    def __repr__(self) -> str:
        return format_hits(self, ("[", "]"))

    def _repr_html_(self) -> str:
        return hits_html(self)


def hits_html(hits: Sequence[Hit]) -> str:
    """Returns a table with rank, score, item and best passage of each hit."""
    rows = "".join(f"<tr>{''.join(map(_cell, _cells(hit)))}</tr>" for hit in hits)
    header = "".join(f"<th>{name}</th>" for name in ("", "score", "item", "best passage"))
    return f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(hit: Hit) -> tuple[str, ...]:
    passage = hit.passages[0] if hit.passages else None
    text = snippet(
        hit.text or "", highlighted_spans(passage) if passage else [], delimiters=DELIMITERS
    )
    start, end = DELIMITERS
    shown = escape(text).replace(start, "<mark>").replace(end, "</mark>")
    title = [f"<b>{escape(hit.title)}</b>"] if hit.title else []
    parts = [*title, shown] if shown else title
    parts += [escape(location)] if passage and (location := format_location(passage)) else []
    item = f"{hit.item_id} {format_span(hit.span)}".strip()
    return str(hit.rank), f"{hit.score:.3f}", escape(item), "<br>".join(parts)


def _cell(content: str) -> str:
    return f'<td style="text-align: left; vertical-align: top">{content}</td>'


def map_html(map: Map) -> str:
    """Returns the words of a map in the colours of their highlights, or a drawing of its patches.

    The tooltip of a word shows its highlight.
    """
    values = np.array([word.highlight for word in map.words])
    colours = [_colour(strength) for strength in strengths(values)] if len(values) else []
    words = list(zip(map.words, colours, strict=True))
    query = f"<p>{escape(' '.join(map.query_tokens))}</p>"
    if any(word.text for word in map.words):
        return f'{query}<p style="text-align: left; line-height: 1.6">{_text(words)}</p>'
    boxes = "".join(_box(word, colour) for word, colour in words if word.box)
    size = 'viewBox="0 0 100 100" width="320" height="320" preserveAspectRatio="none"'
    style = 'style="border: 1px solid"'
    return f'{query}<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{boxes}</svg>'


def _text(words: Sequence[tuple[Word, str]]) -> str:
    parts, end = [], 0
    for word, colour in words:
        if word.text:
            text, value = escape(word.text), f"{word.highlight:.3f}"
            style = f'style="background: {colour}" title="{value}"'
            parts.append(" " * (word.span[0] > end))
            parts.append(f"<span {style}>{text}</span>" if colour else text)
            end = word.span[1]
    return "".join(parts)


def _box(word: Word, colour: str) -> str:
    assert word.box is not None
    x0, y0, x1, y1 = (100 * side for side in word.box)
    place = f'x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
    title = f"<title>{word.highlight:.3f}</title>"
    return f'<rect {place} fill="{colour}">{title}</rect>' if colour else ""


def _colour(strength: float) -> str:
    """Returns the CSS colour of a word, or empty for a weak one."""
    if strength < MIN_STRENGTH:
        return ""
    return f"rgba({COLOUR},{MAX_OPACITY * strength:.2f})"

"""Hits and similarity maps in notebooks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from pipeline.search.html import Hits, map_html
from pipeline.search.results import Highlight, Hit, Map, Passage, Word

TEXT = "the <script>alert(1)</script> wing & flap"


def hit(rank: int) -> Hit:
    wing = Highlight(query_token="wing", span=(30, 34), contribution=0.6)
    passage = Passage(span=(0, 34), contribution=0.6, times=(1.0, 2.0), highlights=(wing,))
    fields = {"item_id": f"<b>{rank}", "parent_id": "p", "title": "a & b", "text": TEXT}
    return Hit(rank=rank, score=1 / rank, passages=(passage,), **fields)


def word(text: str, start: int, highlight: float, box=None) -> Word:
    numbers = {"credit": 0.0, "contribution": 0.0, "highlight": highlight}
    span = (start, start + len(text)) if text else (-1, -1)
    return Word(text=text, span=span, box=box, times=None, similarities=(0.5,), **numbers)


def test_hits_are_a_table_of_escaped_texts():
    page = Hits([hit(1), hit(2)])._repr_html_()
    root = ElementTree.fromstring(page.replace("<br>", "<br/>"))
    rows = root.findall("tbody/tr")
    assert ["".join(row[2].itertext()) for row in rows] == ["<b>1", "<b>2"]
    assert [mark.text for mark in root.iter("mark")] == ["wing", "wing"]
    assert "<script" not in page and "audio 1.0-2.0 s" in page
    assert Hits()._repr_html_().endswith("<tbody></tbody></table>")


def test_map_of_words():
    words = word("the", 0, 0.0), word("<wing", 4, 0.9), word("s>", 9, 0.0), word("fly", 12, 0.5)
    page = map_html(Map(query_tokens=("a<", "b"), words=words, evidence="full"))
    assert "a&lt; b" in page and page.count("<span") == 2
    assert re.search(r'the <span [^>]*title="0.900">&lt;wing</span>s&gt; <span', page)


def test_map_of_patches():
    boxes = [(x, 0.0, x + 0.25, 1.0) for x in (0.0, 0.25, 0.5, 0.75)]
    words = tuple(word("", 0, float(i), box) for i, box in enumerate(boxes))
    page = map_html(Map(query_tokens=(), words=words, evidence="full"))
    root = ElementTree.fromstring(page.removeprefix("<p></p>"))
    assert root[-1].attrib["x"] == "75.00" and len(root) == 2
    assert map_html(Map(query_tokens=(), words=(), evidence="full")).endswith("</svg>")

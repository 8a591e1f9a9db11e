"""HTML reports: self-contained, and escaped."""

import re
from dataclasses import replace
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest

from pipeline.eval.examples import Document, Example, HitImage
from pipeline.eval.report import html
from tests.eval.evaluations import evaluation_of, result

pytestmark = pytest.mark.usefixtures("blank_figures")

UNESCAPED = '<b>bold</b> & "quoted" <script>alert(1)</script>'


def document(**fields) -> Document:
    defaults = {"document_id": "d1", "title": "", "snippet": "", "grade": None, "ranks": {}}
    return Document(**{**defaults, "images": [], **fields})


@pytest.fixture
def examples():
    image = HitImage(caption=UNESCAPED, png="AAAA")
    hit = document(title=UNESCAPED, snippet="\x02<i>wing</i>\x03 lift", grade=2, images=[image])
    rows = {"full.maxsim": [hit], "hpool_32.maxsim": []}
    judged = [
        document(document_id=UNESCAPED, grade=0, ranks={"full.maxsim": 3, "hpool_32.maxsim": None})
    ]
    values = {"full.maxsim": 1.0, "hpool_32.maxsim": 0.25}
    lost = Example(
        reason="lost", query_id="q0", query=UNESCAPED, values=values, judged=judged, hits=rows
    )
    return [lost, lost.model_copy(update={"reason": "failed", "query": "plain"})]


@pytest.fixture
def with_examples(evaluation, examples):
    return replace(evaluation, examples=examples)


def test_page_is_self_contained(with_examples):
    page = html.report([with_examples])
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"@import|url\(\s*[\"']?http", page)
    assert "<script" not in page and "<link" not in page
    assert 'src="data:image/png;base64,AAAA"' in page
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_page_is_escaped(with_examples):
    page = html.report([with_examples])
    assert "<b>bold" not in page and "<i>" not in re.sub(
        "<i>(MaxSim|single_vector|hybrid|K|full|p, random|vectors|everything)</i>", "", page
    )
    assert page.count("&lt;b&gt;bold&lt;/b&gt; &amp;") >= 4  # query, title, id, caption
    assert "<mark>&lt;i&gt;wing&lt;/i&gt;</mark> lift" in page
    unescaped = evaluation_of(with_examples.results, notes=[UNESCAPED], versions={"os": UNESCAPED})
    assert "<b>bold" not in html.report([unescaped])


def test_examples_link_to_the_search_page(with_examples):
    assert "search page</a>" not in html.report([with_examples])
    spec = {**with_examples.spec, "search_page": "http://localhost:8000/?index=abstracts"}
    page = html.report([replace(with_examples, spec=spec)])
    links = [unescape(link) for link in re.findall('<a href="(http[^"]*)"', page)]
    assert [parse_qs(urlsplit(link).query) for link in links] == [
        {
            "index": ["abstracts"],
            "view": ["compare"],
            "q": [query],
            "rep": ["full"],
            "rep2": ["hpool_32"],
        }
        for query in (UNESCAPED, "plain")
    ]


def test_links_to_the_search_page_have_the_score_of_each_row(evaluation):
    rows = {"full.maxsim": [], "hpool_32.hybrid": []}
    values = dict.fromkeys(rows, 0.5)
    example = Example(
        reason="lost", query_id="q0", query="wing", values=values, judged=[], hits=rows
    )
    spec = {"search_page": "http://localhost:8000/"}
    url = html.side_by_side(replace(evaluation, spec=spec), example)
    assert "rep=full&rep2=hpool_32&score2=hybrid" in url
    reverse = example.model_copy(update={"hits": dict(reversed(rows.items()))})
    url = html.side_by_side(replace(evaluation, spec=spec), reverse)
    assert "rep=hpool_32&rep2=full&score=hybrid&score2=maxsim" in url


def test_page_names_the_templates(evaluation):
    templates = {"colpali": {"query": "<bos>Question: {query}", "image": "{image}"}}
    page = " ".join(html.report([replace(evaluation, templates=templates)]).split())
    assert "<dt>Templates of colpali</dt>" in page
    assert "query: <code>&lt;bos&gt;Question: {query}</code>; image: <code>{image}</code>" in page


def test_page_content(with_examples):
    page = html.report([with_examples])
    assert page.index("Largest losses by compression") < page.index("Failures of all rows")
    for word in ("grade 2", "grade 0", "not judged", "rank 3", "not found", "1,400 items"):
        assert (word in page) == (word != "not judged"), word
    assert page.count('title="on the Pareto front"') == 4 + 4  # by vectors, and by all bytes
    assert "below BM25, not significantly" in page
    assert "path: data/some" in page  # the spec
    assert page.count("<svg") == 4  # two scores, two sizes
    # Terms are explained before the tables that use them.
    for term, table in (("retention", "Methods and budgets"), ("nDCG@10", "Summary")):
        assert page.index(f"<dt>{term}</dt>") < page.index(f"<h3>{table}</h3>")


def test_rows_significantly_below_bm25_are_marked():
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.9] * 12)
    page = html.report([evaluation_of([bm25, result(quality=[0.5] * 12)])])
    assert re.search(r'<tr class="loses', page)
    assert re.search(r"<small>significantly below BM25 \(p (=|&lt;) 0\.00\d\)</small>", page)


def test_several_benchmarks(evaluation, with_examples):
    page = html.report([with_examples, evaluation])
    assert 'href="#benchmark-2"' in page and 'id="benchmark-2"' in page


def test_query_categories(evaluation):
    categories = {"kind": {"plain": ["q0"], "other": ["q1"]}}
    page = html.report([replace(evaluation, query_categories=categories)])
    table = page[page.index("By category of query: kind") :]
    table = table[: table.index("</table>")]
    assert "plain<small>1 query</small>" in table
    rows = re.findall(r'<td class="name">(\S+)</td>((?:\s*<td>[\d.]+</td>)+)', table)
    assert len(rows) == len(evaluation.results)
    assert re.findall(r"[\d.]+", rows[3][1]) == ["0.4100", "0.4000", "0.4200"]
    assert "By category" not in html.report([evaluation])

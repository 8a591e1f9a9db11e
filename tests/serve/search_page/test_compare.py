"""Tests of the side-by-side view and of the evaluations."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest

from pipeline.serve.client import Client
from tests.serve.search_page.conftest import PAGE

pytestmark = [pytest.mark.browser, pytest.mark.heavy]

QUERY = "fresh fish in the harbour of Lisbon"


#: Values of the controls of an evaluation.
SELECTED = """
    const ids = ['plot-measure', 'run-a', 'run-b'];
    return ids.map((id) => document.getElementById(id).value);
"""


def open_comparison(browser, page_url: str, **state: str) -> None:
    state = {"view": "compare", "q": QUERY, "k": "5", "rep": "full", "rep2": "random_1", **state}
    browser.open(f"{page_url}?{urlencode(state)}")
    browser.wait("document.querySelector('#comparison')")


def test_columns_and_measures(browser, page_url):
    open_comparison(browser, page_url)
    with Client(page_url, tries=3) as client:
        left, right = (
            [hit.item_id for hit in client.search(QUERY, index="items", representation=r, k=5).hits]
            for r in ("full", "random_1")
        )
    assert browser.hits("[data-side=a]") == left and browser.hits("[data-side=b]") == right
    overlap = len({*left} & {*right}) / 5
    assert browser.texts("#comparison dt")[0] == "overlap@5"
    assert browser.texts("#comparison dd")[0] == f"{round(100 * overlap)} %"
    badges = browser.texts("[data-side=b] .hit-title .change .visually-hidden")
    for item_id, text in zip(right, badges, strict=True):
        by = left.index(item_id) - right.index(item_id) if item_id in left else None
        expected = (
            "not among the hits on the left"
            if by is None
            else "same rank as on the left"
            if by == 0
            else f"{'up' if by > 0 else 'down'} {abs(by)} from rank {left.index(item_id) + 1} "
            "on the left"
        )
        assert text == expected
    assert browser.texts("#comparison dt")[2] == "time of a repeated search"
    browser.wait("document.querySelectorAll('#comparison dd')[2].textContent.includes(' → ')")
    assert browser.texts(".lost .id") == [item_id for item_id in left if item_id not in right]
    browser.wait("document.querySelector('#comparison').textContent.includes('vectors per item')")
    browser.wait(
        "document.querySelector('[data-side=b] .column-head').textContent.includes('1 vec')"
    )
    assert browser.errors() == []


def test_maps_of_both_representations(browser, page_url):
    open_comparison(browser, page_url, rep2="hpool_2", open=PAGE)
    browser.find("#viewer[open] .tokens .chip")
    browser.wait("document.querySelectorAll('.pane .word').length > 10")
    browser.wait("[...document.querySelectorAll('.image-area img')].every((e) => e.naturalWidth)")
    labels = {"full": "all vectors", "hpool_2": "2 vectors"}
    assert browser.texts(".pane figcaption") == [*labels.values()]
    with Client(page_url, tries=3) as client:
        shown = browser.texts(".details .scores")
        for (name, label), text in zip(labels.items(), shown, strict=True):
            hits = client.search(QUERY, index="items", representation=name, k=5).hits
            (hit,) = [hit for hit in hits if hit.item_id == PAGE]
            assert text.startswith(f"{label}rank {hit.rank}{hit.score:.3f} score")
    assert len(browser.all(".pane canvas")) == 2
    # Two vectors have two colours, and each word of the page has one of them.
    browser.find("#regions").click()
    colours = browser.run(
        """
        const canvas = document.querySelectorAll('.pane canvas')[1];
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const found = {};
        for (let i = 0; i < data.length; i += 4) {
          if (data[i + 3]) {
            const key = [...data.slice(i, i + 4)].join();
            found[key] = (found[key] ?? 0) + 1;
          }
        }
        return Object.values(found).filter((count) => count > 200).length;
        """
    )
    assert colours == 2
    assert browser.errors() == []


def test_view_chooses_a_second_representation(browser, page_url):
    browser.open(f"{page_url}?view=compare&q=harbour")
    browser.wait("document.querySelector('#comparison')")
    # The smallest representation of the same field, not captions.
    assert browser.texts(".column-head h2") == ["all vectors", "1 vector"]
    browser.choose("#rep2", "hpool_2")
    browser.wait("document.querySelectorAll('.column-head h2')[1]?.textContent === '2 vectors'")


def test_two_budgets_by_keyboard(browser, page_url):
    """From the address to the maps of both columns, with focus and keys alone."""
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        browser.driver.switch_to.active_element.send_keys(*keys)

    browser.open(f"{page_url}?rep=full")
    browser.find("nav a[data-view=compare]")
    browser.run("document.querySelector('nav a[data-view=compare]').focus()")
    press(Keys.ENTER)
    browser.wait("document.querySelector('nav a[data-view=compare][aria-current]')")
    press("/")
    press("fresh fish in Lisbon", Keys.ENTER)
    browser.wait("document.querySelector('#comparison')")
    assert len(browser.all(".column")) == 2
    press("j")
    press(Keys.ENTER)
    browser.find("#viewer[open] .sides-2 .pane + .pane")
    browser.find(".tokens .chip + .chip")
    press(Keys.TAB, Keys.ESCAPE)
    browser.wait("!document.querySelector('#viewer[open]')")
    assert browser.errors() == []


def test_error_of_the_right_column(browser, page_url):
    browser.open(f"{page_url}?view=compare&q=harbour&rep=full&rep2=nope")
    browser.wait("!document.querySelector('#rep2-error').hidden")
    assert "nope" in browser.find("#rep2-error").text


def test_evaluations(browser, page_url):
    browser.open(f"{page_url}?view=evaluations")
    browser.wait("document.querySelector('#results .empty, #results table')")
    queries = {"q1": "fish at the market", "q2": "lift of a wing", "q3": "golden crust"}
    qrels = {"q1": {"fish": 1}, "q2": {"wing": 1}, "q3": {"bread": 1}}
    # The ranks of several items differ between the representations.
    queries["q4"] = "boats in the harbour at dawn"
    qrels["q4"] = dict.fromkeys(("wing", "heat", "red.png"), 1)
    with Client(page_url, tries=3) as client:
        evaluation = client.evaluate(
            queries=queries,
            qrels=qrels,
            index="items",
            representations=["full", "random_1"],
            scores=["maxsim", "hybrid"],
            measures=["nDCG@10", "RR@10"],
            judged="item",
            k=50,
        )
        client.wait_for(evaluation.id)
    browser.open(f"{page_url}?view=evaluations")
    link = browser.find("#results table a")
    assert link.text == evaluation.id
    link.click()
    browser.wait("document.querySelectorAll('.plot circle[tabindex]').length === 4")
    assert browser.run(SELECTED) == ["nDCG@10", "full.maxsim", "random_1.maxsim"]
    rows = browser.texts("#results tbody th")
    assert {"full · maxsim reference", "random_1 · maxsim"} <= set(rows)
    # Ticks are round numbers in [0, 1], axes have labels, and the note has the row without bytes.
    ticks = browser.texts(".plot .tick[text-anchor=end]")
    assert ticks == sorted(ticks) and all(re.fullmatch(r"[01]\.\d{2,3}", tick) for tick in ticks)
    axes = browser.texts(".plot .axis")
    assert axes == ["stored bytes per item (logarithmic)", "nDCG@10"]
    assert len(browser.all(".plot circle.reference[tabindex]")) == 2  # by score
    front = browser.run(
        "return [...document.querySelectorAll('.plot circle.front[tabindex]')]"
        ".map((e) => e.getAttribute('aria-label').split(':')[0])"
    )
    starred = browser.texts("#results tr.front th")
    assert sorted(text.removesuffix(" reference") for text in starred) == sorted(front)
    assert "★" in browser.texts(".plot-legend li")[0]
    assert "bm25 (nDCG@10 " in browser.texts(".plot .note")[0]
    browser.choose("#plot-measure", "RR@10")
    assert browser.texts(".plot .axis")[1] == "RR@10"
    assert "Queries by change of RR@10" in browser.texts("h3")
    browser.choose("#run-b", "random_1.hybrid")
    browser.open(browser.driver.current_url)  # the address keeps the measure and the rows
    browser.find("#run-b")
    assert browser.run(SELECTED) == ["RR@10", "full.maxsim", "random_1.hybrid"]
    browser.choose("#run-b", "random_1.maxsim")
    browser.choose("#plot-measure", "nDCG@10")
    browser.run(
        "[...document.querySelectorAll('thead button')].find((b) => b.textContent === 'RR@10')"
        ".click()"
    )
    assert browser.find("th[aria-sort=descending]").text.startswith("RR@10")
    browser.run("document.querySelector('.plot circle').focus()")
    assert "nDCG@10" in browser.texts(".plot-label")[0]
    # A query of either list opens in the side-by-side view, with the scores of the two rows.
    browser.choose("#run-b", "random_1.hybrid")
    link = browser.find(".queries a")
    text = link.text
    link.click()
    browser.wait("document.querySelector('#comparison')")
    assert browser.run("return document.getElementById('q').value") == text
    assert browser.texts(".column-head h2") == ["all vectors · MaxSim", "1 vector · hybrid"]
    with Client(page_url, tries=3) as client:
        for side, row in (("a", ("full", "maxsim")), ("b", ("random_1", "hybrid"))):
            options = dict(zip(("representation", "score"), row, strict=True))
            hits = client.search(text, index="items", **options).hits
            assert browser.hits(f"[data-side={side}]") == [hit.item_id for hit in hits]
    browser.choose("#score2", "")
    browser.wait("document.querySelectorAll('.column-head h2')[1]?.textContent === '1 vector'")
    assert browser.errors() == []

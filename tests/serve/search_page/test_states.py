"""Tests of access keys, of failures, and of the accessibility of the page."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.serve.search_page.conftest import PAGE

FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.browser, pytest.mark.heavy]

VIEWS = [
    {},
    {"q": "harbour fish"},
    {"q": "harbour fish", "view": "compare", "rep": "full", "rep2": "random_1"},
    {"q": "harbour fish", "open": PAGE},
    {"q": "harbour fish", "filter": "modality ="},
    {"view": "evaluations"},
]


def open_view(browser, page_url: str, state: dict[str, str]) -> None:
    browser.open(f"{page_url}?{urlencode(state)}")
    browser.wait_for_results()
    if "open" in state:
        browser.find("#viewer[open] .tokens .chip")
    if state.get("view") != "evaluations":
        browser.wait("document.querySelector('.facet .chip')")


# -- access keys -----------------------------------------------------------------------------------


def test_access_key(browser, page_url, url):
    browser.open(f"{url}/")
    browser.find("#key-dialog[open]")
    assert "requires an access key" in browser.texts(".empty p")[0]
    browser.find("#key-input").send_keys("mr_wrong\n")
    browser.wait("document.querySelector('.empty p')?.textContent.includes('rejected')")
    browser.wait("document.querySelector('#key-dialog[open] #key-error')?.checkVisibility()")
    assert "The server rejected the key" in browser.texts("#key-error")[0]
    assert browser.run("return document.activeElement.id") == "key-input"
    browser.find("#key-input").send_keys("mr_few\n")
    browser.wait("document.querySelector('#results h2')?.textContent.includes('items in texts')")
    assert browser.run("return sessionStorage.length") == 1
    assert browser.run("return localStorage.length + document.cookie.length") == 0
    assert browser.texts("#index option") == ["texts"]  # the key cannot access `whole`
    browser.find("#q").send_keys("the lift of a wing\n")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 8")
    assert "mr_few" not in browser.driver.current_url
    browser.find("#key-button").click()
    assert not browser.find("#key-error").is_displayed()
    browser.find("#key-remove").click()
    browser.wait(
        "document.querySelector('.empty p')?.textContent.includes('requires an access key')"
    )
    assert browser.run("return sessionStorage.length") == 0


def test_rate_limit(browser, page_url, url):
    """The page reports that a key has sent too many requests, and offers to try again."""
    browser.open(f"{url}/")
    browser.find("#key-dialog[open] #key-input").send_keys("mr_limited\n")
    for _ in range(6):
        browser.run("document.querySelector('#key-dialog').close()")
        browser.open(f"{url}/?q=wing&index=texts")
        browser.wait(
            "document.querySelectorAll('li.hit[data-item]').length || "
            "!document.querySelector('#banner').hidden"
        )
    assert "too many requests" in browser.find("#banner").text
    assert browser.find("#banner button").text == "Try again"


# -- failures --------------------------------------------------------------------------------------


def test_failing_server(browser, page_url):
    browser.open(page_url)
    browser.find("#results h2")
    browser.block("*/v1/search*")
    browser.find("#q").send_keys("harbour\n")
    browser.wait("!document.querySelector('#banner').hidden")
    assert "cannot be reached" in browser.find("#banner").text
    assert not browser.all("#results[aria-busy]")
    browser.block()
    browser.find("#banner button").click()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert browser.find("#banner").get_attribute("hidden")


def test_slow_server_shows_progress_and_the_last_search_wins(browser, page_url):
    browser.open(page_url)
    browser.find("#results h2")
    browser.slow_down(600)
    browser.find("#q").send_keys("bread\n")
    browser.wait("document.querySelector('#results[aria-busy] .skeleton')")
    assert browser.texts("#status") == ["Searching …"]
    browser.run(
        "document.getElementById('q').value = 'hypersonic heat';"
        "document.getElementById('search-form').requestSubmit();"
    )
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert browser.hits()[0] == "heat"
    browser.slow_down(0)
    browser.wait("document.querySelector('.facet .chip')")
    assert browser.hits()[0] == "heat" and browser.errors() == []


def test_missing_previews(browser, page_url):
    browser.open(page_url)
    browser.find("#results h2")
    browser.block("*/v1/previews/*")
    browser.find("#q").send_keys("harbour of Lisbon\n")
    browser.wait("document.querySelector('.thumb .missing')")
    browser.errors()  # the browser reports the blocked requests


def test_facets_are_optional(browser, page_url):
    browser.block("*/facets")
    browser.open(f"{page_url}?q=harbour")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert browser.texts(".column-head h2") == ["contents and captions"]


# -- accessibility ---------------------------------------------------------------------------------

#: Controls without a name, images without a text alternative, and duplicate ids.
PROBLEMS = (FOLDER / "names.js").read_text("utf-8")
#: Texts whose contrast with their background is below that of WCAG AA.
CONTRAST = (FOLDER / "contrast.js").read_text("utf-8")


@pytest.mark.parametrize("state", VIEWS, ids=lambda state: state.get("view", "-".join(state)))
def test_names_and_labels(browser, page_url, state):
    open_view(browser, page_url, state)
    assert browser.run(PROBLEMS) == []
    assert browser.run("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", VIEWS, ids=lambda state: state.get("view", "-".join(state)))
def test_contrast(browser, page_url, state, scheme):
    browser.use_scheme(scheme)
    open_view(browser, page_url, state)
    assert browser.run(CONTRAST) == []


@pytest.mark.parametrize("width", [360, 768, 1280, 3840])
@pytest.mark.parametrize("state", VIEWS, ids=lambda state: state.get("view", "-".join(state)))
def test_no_horizontal_scrolling(browser, page_url, state, width):
    browser.resize(width)
    open_view(browser, page_url, state)
    browser.run("const o = document.querySelector('#options'); if (o) o.open = true;")
    widths = browser.run(
        "return [document.documentElement, document.querySelector('.viewer-body')].filter(Boolean)"
        ".map((e) => [e.scrollWidth, e.clientWidth])"
    )
    assert all(scroll <= client for scroll, client in widths)


def test_focus_moves_to_the_hits_of_a_submitted_query(browser, page_url):
    """Keys then move between the hits, and the query stays: Escape would empty a search field."""
    from selenium.webdriver.common.keys import Keys

    browser.open(page_url)
    browser.find("#results h2")
    browser.find("#q").send_keys("harbour fish", Keys.ENTER)
    browser.wait("document.activeElement.id === 'results'")

    def active():
        return browser.driver.switch_to.active_element

    active().send_keys(Keys.TAB)
    assert active() == browser.all(".hit-title a")[0]
    active().send_keys("j")
    assert active() == browser.all(".hit-title a")[1]
    active().send_keys("/")
    browser.wait("document.activeElement.id === 'q'")
    active().send_keys(Keys.ESCAPE)
    browser.wait("document.activeElement.id === 'results'")
    active().send_keys("j")
    assert active() == browser.all(".hit-title a")[0]
    assert browser.run("return document.getElementById('q').value") == "harbour fish"


def test_reference_of_the_api(browser, page_url):
    """The page needs no files from other servers, and describes all routes and types."""
    browser.open(f"{page_url}docs")
    browser.find("#reference h2")
    headings = browser.texts("#reference h3")
    assert {"POST /v1/search", "GET /v1/media/{item_id}", "SearchRequest", "Hit"} <= {*headings}
    links = browser.run(
        "return [...document.querySelectorAll('#reference a')]"
        ".filter((e) => !document.getElementById(e.hash.slice(1))).map((e) => e.outerHTML)"
    )
    assert links == [] and browser.errors() == []
    hosts = {urlsplit(url).netloc for url in browser.requested_urls()}
    assert hosts <= {urlsplit(page_url).netloc, ""}


def test_order_of_the_keyboard_focus(browser, page_url):
    """All controls can be reached with the tab key, in the order of the document."""
    from selenium.webdriver.common.keys import Keys

    open_view(browser, page_url, {"q": "harbour fish", "k": "2"})
    browser.run("document.querySelector('#options').open = true; document.activeElement.blur()")
    order = []
    for _ in range(60):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        order.append(
            browser.run(
                "const e = document.activeElement; return [e.id || e.className || e.textContent,"
                " [...document.querySelectorAll('*')].indexOf(e)]"
            )
        )
        if len(order) > 1 and order[-1][1] < order[-2][1]:
            break
    positions = [position for _, position in order[:-1]]
    assert positions == sorted(positions)
    names = [name for name, _ in order]
    assert {"q", "index", "rep", "rerank", "score", "k", "filter"} <= set(names)

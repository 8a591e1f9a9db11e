"""Tests of a first visit: from the address to a correct hit."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tests.serve.search_page.conftest import PAGE

pytestmark = [pytest.mark.browser, pytest.mark.heavy]

#: Loaded files of the page, in bytes as transferred, and time until the first hit is shown, in
#: milliseconds since the address was opened.
TIMES = r"""
    const isFile = (entry) => /[.](js|css|svg)$/.test(entry.name);
    const files = performance.getEntriesByType('resource').filter(isFile);
    const [document] = performance.getEntriesByType('navigation');
    const [drawn] = performance.getEntriesByName('maxray-draw').slice(-1);
    return {
      bytes: [document, ...files].reduce((sum, e) => sum + e.transferSize, 0),
      files: files.length + 1,
      ms: drawn.startTime + drawn.duration,
    };
"""


def start(browser, page_url: str, query: str = "") -> None:
    """Opens the start page of an index."""
    browser.open(f"{page_url}{query}")
    browser.wait("document.querySelector('.samples')")


def test_start_page(browser, page_url):
    """A box, items and examples, with the options folded away. Nothing is loaded from elsewhere."""
    start(browser, page_url)
    assert browser.run("return document.activeElement.id") == "q"
    assert len(browser.all(".samples li")) == 11 and len(browser.all("#examples a")) > 3
    for selector in ("#rep", "#filter", ".facet .chip"):
        assert not browser.find(selector).is_displayed()
    shown = [element.get_attribute("data-modality") for element in browser.all(".samples li")]
    assert {*shown[:4]} == {"image", "page", "video"} and {*shown[4:]} == {"text", "audio"}
    browser.wait("[...document.querySelectorAll('.samples img')].every((e) => e.naturalWidth)")
    assert browser.errors() == []
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(page_url))
    urls = [url for url in browser.requested_urls() if not url.startswith("data:")]
    assert urls and all(url.startswith(origin) for url in urls)


def test_example_by_mouse(browser, page_url):
    """Prints the weight of the page and the time to the first hit, which depend on the machine."""
    browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    start(browser, page_url)
    (example,) = [chip for chip in browser.all("#examples a") if "red photo" in chip.text]
    example.click()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert browser.hits()[0] == "red.png"
    times = browser.run(TIMES)
    browser.open(browser.driver.current_url)
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    ms = browser.run(TIMES)["ms"]
    print(f"{times['files']} files of the page, {times['bytes'] / 1000:.1f} kB transferred")
    print(f"first hit {ms:.0f} ms after the request of the address of a search")
    assert 0 < times["bytes"] < 100_000
    browser.find(".hit-title a").click()
    browser.find("#viewer[open] .tokens .chip")
    assert browser.errors() == []


def test_item_of_the_start_page(browser, page_url):
    """An item opens with similar items behind it."""
    start(browser, page_url)
    browser.find(f"[data-sample='{PAGE}'] a").click()
    browser.find("#viewer[open]")
    assert browser.texts("#viewer-title") == ["Port of Lisbon"]
    assert browser.find("#banner").get_attribute("hidden")
    browser.driver.switch_to.active_element.send_keys("j")
    browser.wait("document.querySelector('#viewer-title')?.textContent !== 'Port of Lisbon'")
    browser.driver.back()
    browser.wait("document.querySelector('.samples') && !document.querySelector('#viewer[open]')")
    # A photo without text has no vectors of contents, so its caption is the query.
    browser.find("[data-sample='red.png'] a").click()
    browser.find("#viewer[open]")
    assert "red.png" not in browser.hits() and len(browser.hits()) == 1
    assert all("422" in message for message in browser.errors())  # of the search by contents


def test_search_by_keyboard(browser, page_url):
    """The keys of the documentation, from the address to the opened hit and back."""
    from selenium.webdriver.common.keys import Keys

    start(browser, page_url)

    def press(*keys: str) -> None:
        browser.driver.switch_to.active_element.send_keys(*keys)

    def focused() -> str:
        return browser.run("return document.activeElement.closest('li')?.dataset.item")

    press("fresh fish in the harbour", Keys.ENTER)
    browser.wait("document.activeElement.id === 'results'")
    hits = browser.hits()
    press("j")
    assert focused() == hits[0]
    press("j")
    press("k")
    press(Keys.ENTER)
    browser.find("#viewer[open]")
    press("j")
    press(Keys.ARROW_LEFT)
    browser.wait("document.querySelector('#viewer .tokens .chip')")
    press(Keys.ESCAPE)
    browser.wait("!document.querySelector('#viewer[open]')")
    assert focused() == hits[0]
    press("/")
    browser.wait("document.activeElement.id === 'q'")
    press("crust", Keys.ENTER)
    browser.wait("document.querySelector('li.hit')?.dataset.item === 'bread'")


def test_phone(browser, page_url):
    """At 360 px, an example finds its item without horizontal scrolling, and options are folded."""
    browser.resize(360, 740)
    start(browser, page_url)
    assert browser.run("return document.activeElement.id") != "q"  # the keyboard would cover it
    browser.wait("document.querySelector('#examples a')")
    widths = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
    scroll, client = browser.run(widths)
    assert scroll <= client
    (example,) = [chip for chip in browser.all("#examples a") if "red photo" in chip.text]
    example.click()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert browser.hits()[0] == "red.png" and not browser.find("#rep").is_displayed()
    scroll, client = browser.run(widths)
    assert scroll <= client
    (top,) = browser.run("return [document.querySelector('li.hit').getBoundingClientRect().top]")
    assert top < 740


def test_empty_index(browser, page_url):
    browser.open(f"{page_url}?index=empty")
    browser.wait("document.querySelector('#results h2')")
    assert browser.texts("#results h2") == ["empty is empty"]
    assert "maxray index" in browser.texts("#results p")[0]
    browser.find("#q").send_keys("anything\n")
    browser.wait("document.querySelector('.empty h2')?.textContent === 'No hits'")
    assert browser.texts("#chosen") == [""]
    assert browser.errors() == []


def test_plain_labels(browser, page_url):
    browser.open(f"{page_url}?q=fish")
    browser.wait_for_results()
    assert browser.texts("#rep option") == [
        "contents and captions",
        "all vectors",
        "2 vectors",
        "1 vector",
        "captions: all vectors",
    ]
    browser.wait("document.querySelector('#chosen').textContent === ''")
    browser.choose("#rep", "hpool_2")
    browser.wait("document.querySelector('.column-head h2')?.textContent === '2 vectors'")
    browser.choose("#filter", "modality = 'text'")
    browser.wait("document.querySelector('#chosen').textContent.includes('modality')")
    assert browser.texts("#chosen") == [": 2 vectors · modality = 'text'"]


def test_keys(browser, page_url, url):
    """After the key is entered, the start page shows items and examples."""
    browser.open(f"{url}/")
    browser.find("#key-dialog[open] #key-input").send_keys("mr_few\n")
    browser.wait("document.querySelectorAll('.samples li').length === 8")
    browser.find("#examples a").click()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert "mr_few" not in browser.driver.current_url
    # The console lists the request without a key, whose answer makes the page ask for one.
    assert all("401 (Unauthorized)" in error for error in browser.errors())

"""Tests of the map of the collection."""

from __future__ import annotations

import csv
import io
import itertools

import httpx2
import pytest

from tests.serve.search_page.conftest import PAGE

pytestmark = [pytest.mark.browser, pytest.mark.heavy]

#: Distance of the outermost items from the border of the map, in pixels.
REACH = 12


@pytest.fixture
def points(page_url) -> dict[str, tuple[float, float]]:
    """Positions of the items by id."""
    text = httpx2.get(f"{page_url}v1/indexes/items/map", timeout=30).text
    return {row["item_id"]: (float(row["x"]), float(row["y"])) for row in csv_rows(text)}


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def show(browser, page_url: str) -> None:
    browser.open(f"{page_url}?view=map&index=items")
    browser.find("canvas.collection")
    browser.wait("document.querySelector('.plot-legend li')")


def offset(browser, x: float, y: float) -> tuple[int, int]:
    """Returns the offset of a position from the centre of the map, in pixels."""
    size = browser.find("canvas.collection").size
    return round(x * (size["width"] / 2 - REACH)), round(-y * (size["height"] / 2 - REACH))


def test_items_are_shown_and_opened(browser, page_url, points):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(browser, page_url)
    assert PAGE in points and len(points) == 11
    sources = [text.rstrip("0123456789") for text in browser.texts(".plot-legend li")]
    assert sources == ["texts", "photos", "clips", "pages", "sound"]  # by number, then by name
    canvas = browser.find("canvas.collection")
    actions = ActionChains(browser.driver)
    actions.move_to_element_with_offset(canvas, *offset(browser, *points[PAGE])).perform()
    browser.wait(
        "document.querySelector('.collection + .note').textContent.includes('harbour.pdf')"
    )
    actions.click().perform()
    browser.find("#viewer[open]")
    assert browser.texts("#viewer dl.item dd")[0] == PAGE
    browser.driver.back()
    browser.find("canvas.collection").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ENTER)
    browser.find("#viewer[open]")
    assert browser.errors() == []


def test_selected_items_are_searched(browser, page_url, points):
    from selenium.webdriver.common.action_chains import ActionChains

    show(browser, page_url)
    x, y = points["bread"]
    corners = [
        (x - 0.15, y - 0.15),
        (x + 0.15, y - 0.15),
        (x + 0.15, y + 0.15),
        (x - 0.15, y + 0.15),
    ]
    inside = [
        name for name, (left, top) in points.items() if abs(left - x) < 0.15 and abs(top - y) < 0.15
    ]
    places = [offset(browser, *corner) for corner in [*corners, corners[0]]]
    canvas = browser.find("canvas.collection")
    actions = ActionChains(browser.driver, duration=20)
    actions.move_to_element_with_offset(canvas, *places[0]).click_and_hold()
    for (left, top), (right, bottom) in itertools.pairwise(places):
        for _ in range(4):
            actions.move_by_offset(round((right - left) / 4), round((bottom - top) / 4))
    actions.release().perform()
    browser.wait("document.querySelector('.selected-items h3')")
    assert len(browser.texts(".selected-items li")) == len(inside)
    (button,) = [b for b in browser.all("button") if b.text == "Search among them"]
    button.click()
    browser.find("#q").send_keys("fish at the market\n")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert sorted(browser.hits()) == sorted(inside)
    browser.open(browser.driver.current_url)  # the address contains the area
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert sorted(browser.hits()) == sorted(inside)
    browser.find("button[aria-label='Search all items']").click()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length > 5")
    assert browser.errors() == []


def test_inside(browser, page_url):
    """Points inside a polygon that is not convex."""
    browser.open(page_url)
    corners = "[[0, 0], [4, 0], [4, 4], [2, 1], [0, 4]]"
    points = "[{x: 1, y: 1}, {x: 2, y: 2}, {x: 3.8, y: 3}, {x: 5, y: 1}]"
    inside = browser.module("collection.js", f"m.inside({points}, {corners})")
    assert inside == [{"x": 1, "y": 1}, {"x": 3.8, "y": 3}]
    assert browser.module("collection.js", "m.formatArea([[0.12345, -1], [1, 0.5]])") == (
        "0.123,-1.000,1.000,0.500"
    )

"""Tests of the item view: similarity maps, regions as queries, video and audio."""

from __future__ import annotations

import time
from urllib.parse import urlencode, urlsplit

import pytest

from pipeline.serve.client import Client
from pipeline.serve.wire import StoredItem
from tests.serve.search_page.conftest import AUDIO, CLIP, PAGE

pytestmark = [pytest.mark.browser, pytest.mark.heavy]

QUERY = "fresh fish in Lisbon"
CANVAS = ".image-area canvas"


def open_item(browser, page_url: str, item_id: str, query: str = QUERY, **state: str) -> None:
    state = {"q": query, "open": item_id, "k": "20", **state}
    browser.open(f"{page_url}?{urlencode(state)}")
    browser.find("#viewer[open] .tokens .chip")


def wait_for_image(browser) -> None:
    browser.wait("[...document.querySelectorAll('.image-area img')].every((e) => e.naturalWidth)")


def word_box(page_url: str, text: str, **options: str) -> list[float]:
    """Returns the box of a word of the page."""
    with Client(page_url, tries=3) as client:
        hits = client.search(QUERY, index="items", k=1, ids=[PAGE], explain="map", **options).hits
    (word,) = [word for word in hits[0].map.words if word.text == text]
    return list(word.box)


def hover_token(browser, text: str) -> None:
    browser.run(
        "[...document.querySelectorAll('.tokens .chip')]"
        ".find((e) => e.textContent === arguments[0])"
        ".dispatchEvent(new PointerEvent('pointerenter'))",
        text,
    )


def test_map_of_a_page(browser, page_url):
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    assert browser.texts(".tokens .chip") == ["All", "fresh", "fish", "in", "lisbon"] or (
        browser.texts(".tokens .chip") == ["All", "fresh", "fish", "in", "Lisbon"]
    )
    fish, other = word_box(page_url, "fish"), word_box(page_url, "every")
    hover_token(browser, "fish")
    red, green, blue, alpha = browser.pixels(CANVAS, fish)
    assert alpha > 120 and red > green > blue  # the upper end of the scale
    assert browser.pixels(CANVAS, other)[3] < alpha / 2
    assert browser.pixels(CANVAS, (0.9, 0.0, 1.0, 0.05))[3] == 0  # nothing outside of words
    browser.choose("#opacity", "0.2")
    assert browser.pixels(CANVAS, fish)[3] < alpha / 2
    browser.choose("#opacity", "0")
    assert browser.pixels(CANVAS, fish)[3] == 0
    assert browser.errors() == []


def test_tokens_are_pinned(browser, page_url):
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    chips = browser.all(".tokens .chip")
    assert [chip.get_attribute("aria-pressed") for chip in chips[:2]] == ["true", "false"]
    browser.run("arguments[0].click(); arguments[0].blur();", chips[2])
    pressed = browser.texts(".tokens .chip[aria-pressed=true]")
    assert pressed == ["fish"]
    assert "similarity" in browser.texts(".legend .what")[0]
    browser.run("arguments[0].click(); arguments[0].blur();", chips[2])
    assert browser.texts(".tokens .chip[aria-pressed=true]") == ["All"]
    assert "contribution" in browser.texts(".legend .what")[0]
    # The focus shows the map of a token, but does not pin it.
    browser.run("arguments[0].focus();", chips[2])
    assert browser.texts(".tokens .chip.shown") == ["fish"]
    assert browser.texts(".tokens .chip[aria-pressed=true]") == ["All"]


def test_scale_is_that_of_all_hits(browser, page_url):
    open_item(browser, page_url, PAGE)
    ranges = []
    for _ in range(2):
        hover_token(browser, "fish")
        ranges.append([browser.texts(f".legend .{end}")[0] for end in ("low", "high")])
        browser.find("#viewer header button[aria-label='Next hit']").click()
        browser.find("#viewer[open] .tokens .chip")
    assert ranges[0] == ranges[1]


def test_inverse_map(browser, page_url):
    """A word shows which query tokens it serves."""
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    x0, y0, x1, y1 = word_box(page_url, "fish")
    browser.run(
        """
        const canvas = document.querySelector(arguments[0]);
        const box = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new PointerEvent('pointermove', {bubbles: true,
          clientX: box.left + arguments[1] * box.width,
          clientY: box.top + arguments[2] * box.height}));
        """,
        CANVAS,
        (x0 + x1) / 2,
        (y0 + y1) / 2,
    )
    titles = browser.run(
        "return Object.fromEntries([...document.querySelectorAll('.tokens .chip')]"
        ".map((e) => [e.textContent, Number(e.title.split(' ')[1])]))"
    )
    assert titles["fish"] == max(titles[name] for name in ("fresh", "fish", "in"))
    assert "fish" in browser.texts(".word.selected")
    # The box of the word is outlined.
    assert browser.pixels(CANVAS, (x0, y0, x1, y1))[2] > 0


def test_text_items_are_coloured(browser, page_url):
    open_item(browser, page_url, "fish")
    hover_token(browser, "fish")
    colours = browser.run(
        "return Object.fromEntries([...document.querySelectorAll('.word')]"
        ".map((e) => [e.textContent, e.style.backgroundColor]))"
    )
    assert colours["fish"] and not colours["each"]
    assert "🐟 Fresh fish is sold" in browser.texts(".mapped")[0]


@pytest.mark.parametrize(("item_id", "rep"), [("fish", "hpool_2"), (PAGE, "hpool_2")])
def test_words_are_coloured_by_vector(browser, page_url, item_id, rep):
    with Client(page_url, tries=3) as client:
        options = {"representation": rep, "ids": [item_id], "k": 1, "explain": "map"}
        (hit,) = client.search(QUERY, index="items", **options).hits
    browser.open(f"{page_url}?{urlencode({'q': QUERY, 'k': 20, 'rep': rep, 'open': item_id})}")
    browser.find("#regions:enabled").click()
    script = (
        "return [...document.querySelectorAll('.word')]"
        ".map((e) => [e.textContent, e.style.backgroundColor])"
    )
    colours = dict(browser.run(script))
    vectors = {word.text: word.vector for word in hit.map.words}
    assert set(vectors.values()) == {0, 1} and all(colours.values())
    assert len(set(colours.values())) == 2
    for text, other in zip(vectors, list(vectors)[1:], strict=False):
        assert (vectors[text] == vectors[other]) == (colours[text] == colours[other])
    assert browser.texts(".legend .what") == ["one colour for each stored vector"]
    browser.find("#regions").click()
    assert dict(browser.run(script)) != colours


def test_words_of_merged_vectors(browser, page_url):
    """Words have the colours of the uncompressed map, and the matching vector is outlined."""
    rep = {"representation": "hpool_2"}
    with Client(page_url, tries=3) as client:
        options = {"ids": ["fish"], "k": 1, "explain": "map"}
        (hit,) = client.search(QUERY, index="items", **options, **rep).hits
        (full,) = client.search(QUERY, index="items", representation="full", **options).hits
    assert hit.map.evidence == full.map.evidence == "full"
    for word, other in zip(hit.map.words, full.map.words, strict=True):
        assert (word.similarities, word.highlight) == (other.similarities, other.highlight)
    for passage, other in zip(hit.passages, full.passages, strict=True):
        assert passage.span == other.span
        assert passage.contribution == pytest.approx(other.contribution)
    open_item(browser, page_url, "fish", rep="hpool_2")
    hover_token(browser, "fish")
    script = (
        "return [...document.querySelectorAll('.word')]"
        ".map((e) => [e.textContent, e.style.backgroundColor, e.classList.contains('selected')])"
    )
    shown = browser.run(script)
    coloured = [text for text, colour, _ in shown if colour]
    assert "fish" in coloured and not {"at", "near", "each"} & {*coloured}
    token = list(hit.map.query_tokens).index("fish")
    vector = hit.matches[token].document_token
    assert [text for text, _, is_outlined in shown if is_outlined] == [
        word.text for word in hit.map.words if word.vector == vector
    ]
    assert browser.texts(".legend .what") == ["similarity, scale of this item"]
    assert "own vectors (full)" in browser.texts(".steering .note")[0]
    hover_token(browser, "All")
    assert not any(is_outlined for *_, is_outlined in browser.run(script))
    assert browser.errors() == []


def test_image_patches(browser, page_url):
    open_item(browser, page_url, "red.png", "a red square", index="shapes")
    wait_for_image(browser)
    assert browser.pixels(CANVAS, (0, 0, 1, 1))[3] > 0
    browser.find("#regions").click()
    assert browser.pixels(CANVAS, (0, 0, 1, 1))[3] > 0
    assert browser.errors() == []


@pytest.mark.parametrize(("width", "expected"), [(1280, 480), (390, 340)])
def test_small_images_are_enlarged(browser, page_url, width, expected):
    browser.resize(width)
    open_item(browser, page_url, "red.png", "a red square", index="shapes")
    wait_for_image(browser)
    image, canvas = (
        browser.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]",
            selector,
        )
        for selector in (".image-area img", CANVAS)
    )
    assert image == pytest.approx(canvas, abs=1)
    assert image[2] >= expected and image[2] == pytest.approx(image[3], abs=1)


def test_tokens_stay_above_the_item_on_a_phone(browser, page_url):
    browser.resize(390, 844)
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    assert "page 1" in browser.find(".viewer-top .meta").text
    body = browser.find(".viewer-body")
    assert browser.run("arguments[0].scrollTop = 1e6; return arguments[0].scrollTop > 0;", body)
    for selector in (".tokens .chip", ".legend .what", "#opacity", "#regions"):
        top, bottom = browser.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.top, b.bottom]",
            selector,
        )
        assert 0 <= top < bottom <= 844 / 3
        assert browser.run(
            "const e = document.querySelector(arguments[0]);"
            "const b = e.getBoundingClientRect();"
            "return e.contains(document.elementFromPoint(b.left + 4, b.top + b.height / 2))",
            selector,
        )


def test_region_as_query(browser, page_url):
    from selenium.webdriver.common.action_chains import ActionChains

    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    canvas = browser.find(CANVAS)
    width, height = canvas.size["width"], canvas.size["height"]
    x0, y0, x1, y1 = word_box(page_url, "Lisbon")
    actions = ActionChains(browser.driver)
    left, top = (x0 - 0.02 - 0.5) * width, (y0 - 0.05 - 0.5) * height
    actions.move_to_element_with_offset(canvas, round(left), round(top)).click_and_hold()
    actions.move_by_offset(round((x1 - x0 + 0.04) * width), round((y1 - y0 + 0.1) * height))
    actions.release().perform()
    browser.find(".region-offer button").click()
    browser.wait("document.querySelector('.query-item')?.textContent.startsWith('part of')")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length > 0")
    assert PAGE not in browser.hits() and "boats" in browser.hits()[:3]
    assert browser.errors() == []


def test_region_by_keyboard(browser, page_url):
    from selenium.webdriver.common.keys import Keys

    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    (button,) = [b for b in browser.all("button") if b.text == "Select a region"]
    button.send_keys(Keys.ENTER)
    region = browser.find(".selection")
    assert browser.run("return document.activeElement === arguments[0]", region)
    style = "const s = arguments[0].style; return [s.left, s.top, s.width, s.height]"

    def box() -> list[float]:
        return [float(value.removesuffix("%")) for value in browser.run(style, region)]

    assert box() == pytest.approx([25, 25, 50, 50])
    region.send_keys(Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.ARROW_UP)
    assert box() == pytest.approx([23, 21, 50, 50])
    region.send_keys(*[Keys.SHIFT, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT])
    assert box() == pytest.approx([23, 21, 54, 52])
    region.send_keys(*[Keys.ARROW_LEFT] * 20)
    assert box() == pytest.approx([0, 21, 54, 52])  # it stays on the image
    region.send_keys(*[Keys.SHIFT] + [Keys.ARROW_UP] * 60)
    assert box() == pytest.approx([0, 21, 54, 2])  # and keeps a minimum size
    assert browser.find(".selection").is_displayed()  # arrow keys have not changed the item
    region.send_keys(Keys.SHIFT, *[Keys.ARROW_DOWN] * 20)
    region.send_keys(Keys.ENTER)
    browser.wait("document.querySelector('.query-item')?.textContent.startsWith('part of')")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length > 0")
    assert browser.errors() == []


def test_best_passages_are_framed(browser, page_url):
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    with Client(page_url, tries=3) as client:
        hits = client.search(QUERY, index="items", k=1, ids=[PAGE], explain="matches").hits
    passages = hits[0].passages
    area, *frames = browser.run(
        "return [...document.querySelectorAll(arguments[0])].map((e) => {"
        " const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })",
        ".image-area, .image-area .passage-frame",
    )
    assert len(frames) == len(passages) == len(browser.all(".passages li"))
    for frame, passage in zip(frames, passages, strict=True):
        scale = [
            (edge - area[i % 2]) / (area[2 + i % 2] - area[i % 2]) for i, edge in enumerate(frame)
        ]
        assert scale == pytest.approx(passage.box, abs=0.005)
    text = hits[0].text
    for number, passage in enumerate(passages):
        marks = browser.texts(f"mark.passage-frame[data-passage='{number}']")
        assert "".join(marks) == text[slice(*passage.span)]
    assert not browser.all(".passage-frame.active")
    browser.run("document.querySelector('.passages button').focus()")
    assert (
        len(browser.all(".passage-frame[data-passage='0'].active")) == 2
    )  # on the page, in the text


def test_item_view_scrolls_to_the_best_passage(browser, page_url):
    browser.resize(1280, 420)
    open_item(browser, page_url, "fish", "sold at the market near the harbour")
    browser.wait("document.querySelector('mark.passage-frame .word')")
    top, bottom = browser.run(
        "const b = document.querySelector('mark.passage-frame').getBoundingClientRect();"
        "return [b.top, b.bottom]"
    )
    assert 0 < top < bottom < 420
    browser.resize(390, 500)
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)
    browser.wait("document.querySelector('.image-area .passage-frame')")
    browser.wait(
        "document.querySelector('.image-area .passage-frame').getBoundingClientRect().bottom < 500"
    )


def test_part_of_a_passage_as_query(browser, page_url):
    open_item(browser, page_url, PAGE)
    browser.find(".passages .link").click()
    browser.wait("document.querySelector('.query-item')")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length > 0")
    assert browser.errors() == []


def test_keyboard(browser, page_url):
    from selenium.webdriver.common.keys import Keys

    browser.open(f"{page_url}?{urlencode({'q': QUERY})}")
    browser.wait_for_results()
    body = browser.find("body")
    body.send_keys("j")
    titles = browser.all(".hit-title a")
    assert browser.driver.switch_to.active_element == titles[0]
    titles[0].send_keys("j")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.find("#viewer[open] .tokens .chip")
    second = browser.hits()[1]
    assert browser.texts("#viewer dl.item dd")[0] == second
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    browser.wait(
        "document.querySelector('#viewer dl.item dd')?.textContent !== arguments[0]", second
    )
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.wait("!document.querySelector('#viewer[open]')")
    assert (
        browser.run("return document.activeElement.closest('li.hit').dataset.item")
        == (browser.hits()[2])
    )


def test_keys_after_a_click_on_the_checkbox(browser, page_url):
    from selenium.webdriver.common.keys import Keys

    open_item(browser, page_url, PAGE)
    for key in ("j", Keys.ARROW_LEFT):
        item_id = browser.texts("#viewer dl.item dd")[0]
        browser.find("#regions:enabled").click()
        browser.driver.switch_to.active_element.send_keys(key)
        browser.wait(
            "document.querySelector('#viewer dl.item dd')?.textContent !== arguments[0]", item_id
        )
    assert browser.texts("#viewer dl.item dd")[0] == PAGE


def test_back_button_closes_the_item(browser, page_url):
    browser.open(f"{page_url}?{urlencode({'q': QUERY})}")
    browser.wait_for_results()
    browser.find(".hit-title a").click()
    browser.find("#viewer[open]")
    browser.driver.back()
    browser.wait("!document.querySelector('#viewer[open]')")
    assert len(browser.hits()) == 10


def test_item_that_is_not_among_the_hits(browser, page_url):
    browser.open(f"{page_url}?{urlencode({'q': QUERY, 'open': 'nope', 'k': '3'})}")
    browser.wait_for_results()
    message = "The item nope is not among the hits of this search."
    browser.wait("!document.querySelector('#banner').hidden")
    assert browser.find("#banner").text == message
    assert len(browser.hits()) == 3 and not browser.all("#viewer[open]")
    browser.find(".hit-title a").click()
    browser.find("#viewer[open]")
    assert not browser.find("#banner").is_displayed()


def test_video_starts_at_its_best_passage(browser, page_url):
    open_item(browser, page_url, CLIP, "a storm at the lighthouse")
    wait_for_image(browser)
    browser.wait("document.querySelector('video').readyState >= 1")
    (start,) = [text for text in browser.texts(".passages .link") if text.startswith("Go to")][:1]
    assert start == "Go to 0:03"
    browser.wait("Math.abs(document.querySelector('video').currentTime - 3) < 0.1")
    assert browser.texts(".frame-label") == ["Still frame at 0:03, with its map"]
    parts = browser.run(
        "return [...document.querySelectorAll('video, .similarity-strip, .frame-label, "
        ".image-area img')].map((e) => e.localName)"
    )
    assert parts == ["video", "canvas", "p", "img"]
    assert "seconds=3" in browser.find(".image-area img").get_attribute("src")


def test_video(browser, page_url):
    open_item(browser, page_url, CLIP, "a storm at the lighthouse")
    wait_for_image(browser)
    browser.wait("document.querySelector('video').readyState >= 1")
    assert browser.run("return document.querySelector('video').duration") == pytest.approx(
        8, abs=1.1
    )
    # Speech is at 3 to 5 of 8 seconds.
    hover_token(browser, "lighthouse")
    assert browser.pixels(".similarity-strip", (0.4, 0, 0.6, 1))[3] > 0
    assert browser.pixels(".similarity-strip", (0, 0, 0.3, 1))[3] == 0
    strip = browser.find(".similarity-strip")
    browser.run(
        """
        const box = arguments[0].getBoundingClientRect();
        arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true,
          clientX: box.left + 0.75 * box.width, clientY: box.top + 5}));
        """,
        strip,
    )
    browser.wait("Math.abs(document.querySelector('video').currentTime - 6) < 0.3")
    browser.wait("document.querySelector('.image-area img').src.includes('seconds=6')")
    assert float(strip.get_attribute("aria-valuenow")) == pytest.approx(6.02, abs=0.1)
    browser.find("#viewer .viewer-top button[aria-label=Close]").send_keys(".")
    browser.wait("document.querySelector('video').currentTime > 6.5")
    assert browser.errors() == []


def test_audio(browser, page_url):
    from selenium.webdriver.common.keys import Keys

    open_item(browser, page_url, AUDIO, "what you can do for your country")
    browser.wait("document.querySelector('audio').readyState >= 1")
    assert browser.pixels(".similarity-strip", (0.55, 0, 0.7, 1))[3] > 0
    # The best passage is framed on the strip, from second 6 to 9 of 12.
    (left, width) = browser.run(
        "const { left, width } = document.querySelector('.strip-holder .passage-frame').style;"
        "return [parseFloat(left), parseFloat(width)]"
    )
    assert left >= 49 and left + width <= 76
    button = next(b for b in browser.all(".passages .link") if b.text.startswith("Go to 0:0"))
    button.click()
    browser.wait("Math.abs(document.querySelector('audio').currentTime - 6.5) < 1.2")
    strip = browser.find(".similarity-strip")
    strip.send_keys(Keys.HOME)
    browser.wait("document.querySelector('audio').currentTime === 0")
    assert browser.errors() == []


def test_metadata(browser, page_url):
    open_item(browser, page_url, PAGE)
    browser.find("dl.metadata")
    with Client(page_url, tries=3) as client:
        metadata = client.item(PAGE, index="items").metadata
    assert metadata["label"] is None
    names = browser.texts("dl.metadata dt")
    assert "label" not in names and {"width", "height"} <= set(names)
    assert "null" not in browser.texts("dl.metadata dd")


def press(browser, *keys: str) -> None:
    browser.driver.switch_to.active_element.send_keys(*keys)


def test_file_of_a_hit_by_keyboard(browser, page_url, corpus, tmp_path):
    """The original file is saved and opened, at the page of the hit."""
    from selenium.webdriver.common.keys import Keys

    browser.download_to(tmp_path)
    browser.open(page_url)
    browser.find("#q").send_keys(QUERY, Keys.ENTER)
    browser.wait("document.activeElement.id === 'results'")
    press(browser, "j")
    press(browser, Keys.ENTER)
    browser.find("#viewer[open] a[download]")
    links = {link.text: link.get_attribute("href") for link in browser.all("#viewer a")}
    assert links["Open the file"] == f"{links['Download']}#page=1"
    browser.run("document.querySelector('#viewer a[download]').focus()")
    press(browser, Keys.ENTER)
    saved = tmp_path / "harbour.pdf"
    end = time.monotonic() + 10
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert saved.read_bytes() == (corpus / "pages/harbour.pdf").read_bytes()
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(page_url))
    urls = [url for url in browser.requested_urls() if not url.startswith("data:")]
    assert urls and all(url.startswith(origin) for url in urls)
    assert browser.errors() == []


def test_text_of_a_hit_is_saved(browser, page_url, tmp_path):
    browser.download_to(tmp_path)
    open_item(browser, page_url, "fish")
    (button,) = [b for b in browser.all("#viewer button") if b.text == "Download the text"]
    button.click()
    end = time.monotonic() + 10
    while not (saved := tmp_path / "fish.txt").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert "🐟 Fresh fish is sold" in saved.read_text()


def test_similar_items(browser, page_url):
    open_item(browser, page_url, PAGE)
    browser.wait("document.querySelectorAll('.neighbours button').length > 3")
    with Client(page_url, tries=3) as client:
        hits = client.search(StoredItem(item=PAGE), index="items", k=9).hits
    expected = [hit.item_id for hit in hits if hit.item_id != PAGE]
    script = "return [...document.querySelectorAll('.neighbours button')].map((e) => e.title)"
    assert browser.run(script) == expected[:8] and "fish" in expected
    browser.find(".neighbours button[title=fish]").click()
    browser.wait("document.querySelector('#viewer dl.item dd')?.textContent === 'fish'")
    # The item is the query, so it has no map of its own, and its neighbours are the hits.
    assert not browser.find(".steering").is_displayed() and not browser.all(".passages")
    assert "fish" not in browser.hits() and PAGE in browser.hits()
    browser.driver.back()
    browser.wait("document.querySelector('#viewer dl.item dd')?.textContent !== 'fish'")
    assert browser.errors() == []


def test_zoom(browser, page_url):
    open_item(browser, page_url, PAGE)
    wait_for_image(browser)

    def width(selector: str) -> float:
        script = "return document.querySelector(arguments[0]).getBoundingClientRect().width"
        return browser.run(script, selector)

    before = width(".image-area img")
    browser.find("button[aria-label='Zoom in']").click()
    assert width(".image-area img") > 1.1 * before
    assert width(CANVAS) == pytest.approx(width(".image-area img"), abs=1)
    browser.find("button[aria-label='Zoom in']").send_keys("++")
    assert width(".image-area img") > 2 * before
    pane = browser.find(".pane")
    assert browser.run("return arguments[0].scrollWidth > arguments[0].clientWidth", pane)
    press(browser, "0")
    assert width(".image-area img") == pytest.approx(before)


def test_missing_media(browser, page_url, corpus):
    path = corpus / "photos/red.png"
    content, moved = path.read_bytes(), path.with_suffix(".moved")
    path.rename(moved)
    browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})  # has it from other tests
    try:
        open_item(browser, page_url, "red.png", "a red photo", rep="caption_full")
        browser.wait("document.querySelector('.image-area .missing')")
    finally:
        moved.rename(path)
        assert path.read_bytes() == content

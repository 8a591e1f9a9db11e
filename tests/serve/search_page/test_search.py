"""Tests of searching, of the results and of the state of the page."""

from __future__ import annotations

import base64
import io
import time
import zipfile
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
import soundfile

from pipeline.datasets import beir
from pipeline.search.results import Hit
from pipeline.serve.client import Client
from tests.browser import WAIT_SECONDS
from tests.serve.search_page.conftest import ATTACK, AUDIO, CLIP, PAGE

pytestmark = [pytest.mark.browser, pytest.mark.heavy]

QUERY = "fish at the harbour"


@pytest.fixture
def client(page_url) -> Client:
    return Client(page_url, tries=3)


def open_search(browser, page_url: str, **state: str) -> None:
    browser.open(f"{page_url}?{urlencode(state)}")
    browser.wait_for_results()


def best_of_both(client: Client, query: str) -> list[Hit]:
    """Returns the hits of contents and captions, each item with the better of its scores."""
    hits = [
        hit
        for representation in ("full", "caption_full")
        for hit in client.search(query, index="items", representation=representation).hits
    ]
    hits.sort(key=lambda hit: -hit.score)
    return list({hit.item_id: hit for hit in reversed(hits)}.values())[::-1][:10]


def state_of(browser) -> dict[str, str]:
    query = urlsplit(browser.driver.current_url).query
    return {name: values[0] for name, values in parse_qs(query).items()}


def test_search_by_text(browser, page_url, client):
    from selenium.webdriver.common.keys import Keys

    browser.open(page_url)
    browser.wait("document.querySelector('#results h2')")
    assert "11 items in items" in browser.texts("#results h2")
    browser.run("document.activeElement.blur()")
    browser.find("body").send_keys("/")  # focuses the search box
    assert browser.run("return document.activeElement.id") == "q"
    browser.find("#q").send_keys(QUERY, Keys.ENTER)
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    expected = best_of_both(client, QUERY)
    assert browser.hits() == [hit.item_id for hit in expected]
    assert browser.texts(".column-head h2") == ["contents and captions"]
    captioned = (
        "[...document.querySelectorAll('li.hit')].filter((e) => e.innerText.includes(arguments[0]))"
    )
    by_caption = browser.run(f"return {captioned}.map((e) => e.dataset.item)", "by its caption")
    assert by_caption and all(item_id.endswith(".png") for item_id in by_caption)
    assert state_of(browser)["q"] == QUERY
    first = browser.find("li.hit")
    assert f"{expected[0].score:.3f}" in first.text
    assert browser.texts("#status")[0].startswith("10 hits in ")
    assert browser.texts("li.hit mark")
    (measure,) = browser.run(
        "return performance.getEntriesByName('maxray-draw').map((e) => e.duration)"
    )
    assert measure < 150
    assert browser.errors() == []


def test_cards_of_all_modalities(browser, page_url):
    open_search(browser, page_url, q="harbour lighthouse country", k="20")
    modalities = browser.run(
        "return Object.fromEntries([...document.querySelectorAll('li.hit[data-item]')]"
        ".map((e) => [e.dataset.item, e.dataset.modality]))"
    )
    assert (modalities[PAGE], modalities[CLIP], modalities[AUDIO]) == ("page", "video", "audio")
    browser.run(
        "document.querySelectorAll('li.hit').forEach((e) => "
        "(e.style.contentVisibility = 'visible'));"
        "document.querySelectorAll('img').forEach((e) => (e.loading = 'eager'))"
    )
    browser.wait("[...document.querySelectorAll('.frame img')].every((e) => e.naturalWidth)")
    assert browser.all(f'[data-item="{PAGE}"] .frame .box')
    assert len(browser.all(f'[data-item="{CLIP}"] .strip img')) == 3
    assert browser.all(f'[data-item="{CLIP}"] .time-bar .hot')
    assert browser.all(f'[data-item="{AUDIO}"] .time-bar .hot')
    assert browser.errors() == []


def test_state_and_back_button(browser, page_url):
    open_search(browser, page_url, q=QUERY, rep="hpool_2", k="3", filter="modality = 'text'")
    first = browser.hits()
    assert len(first) == 3 and browser.texts(".column-head h2") == ["2 vectors"]
    assert browser.run("return document.getElementById('rep').value") == "hpool_2"
    browser.choose("#k", "2")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 2")
    assert state_of(browser)["k"] == "2"
    browser.driver.back()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 3")
    assert (
        browser.hits() == first and browser.run("return document.getElementById('k').value") == "3"
    )
    browser.driver.forward()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 2")


def test_facets_and_filter(browser, page_url, client):
    open_search(browser, page_url, q=QUERY)
    chip = ".facet[aria-label=modality] .chip"
    browser.find(chip)
    assert "text6" in browser.texts(chip)
    browser.run(
        "[...document.querySelectorAll(arguments[0])].find((e) => "
        "e.textContent.startsWith('page')).click()",
        chip,
    )
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 1")
    assert browser.hits() == [PAGE]
    assert browser.run("return document.getElementById('filter').value") == "modality = 'page'"
    browser.choose("#filter", "item_id = 'bread'")
    browser.wait("document.querySelector('li.hit')?.dataset.item === 'bread'")
    assert all(not element.is_enabled() for element in browser.all(chip))
    (note,) = browser.texts("#facets .note")
    assert "Clear it" in note and browser.find(chip).get_attribute("title") == note
    browser.choose("#filter", "item_id = 'nobody'")
    browser.wait("document.querySelector('.empty')")
    assert "No hits" in browser.texts(".empty h2")


@pytest.mark.parametrize(
    ("state", "control", "text"),
    [
        ({"filter": "modality ="}, "filter", "does not parse"),
        ({"k": "0"}, "k", "Hits must be"),
        ({"k": "51"}, "k", "at most 50"),
        ({"k": "many"}, "k", "Hits must be"),
        ({"rep": "nope"}, "rep", "nope"),
        ({"candidates": "ivf"}, "candidates", "ivf"),
        ({"rerank": "vectors:nope", "depth": "8"}, "rerank", "nope"),
        ({"rerank": "vectors:full", "depth": "99"}, "depth", "Rerank depth must be at most 50"),
        ({"score": "hybrid", "rep": "caption_full", "index": "nope"}, "index", "nope"),
    ],
)
def test_errors_at_their_fields(browser, page_url, state, control, text):
    open_search(browser, page_url, q=QUERY, **state)
    element = browser.find(f"#{control}-error")
    assert text in element.text and element.is_displayed()
    assert browser.find(f"#{control}").get_attribute("aria-invalid") == "true"
    assert browser.texts(".field-error:not([hidden])") == [element.text]


def test_empty_number_of_hits(browser, page_url):
    open_search(browser, page_url, q=QUERY, k="")
    assert len(browser.hits()) == 10 and not browser.all(".field-error:not([hidden])")
    open_search(browser, page_url, q=QUERY, k="2")
    browser.choose("#k", " ")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 10")
    assert "k" not in state_of(browser)


def test_more_results_order_and_layout(browser, page_url, client):
    """Further hits follow the shown ones. The order and the layout are part of the address."""
    open_search(browser, page_url, q=QUERY, k="3")
    first = browser.hits()
    browser.find("#more").click()
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 11")
    assert browser.hits()[:3] == first and state_of(browser)["k"] == "23"
    title = browser.run("return document.activeElement.closest('li').dataset.item")
    assert title == browser.hits()[3] and not browser.all("#more")
    ranked = browser.hits()
    browser.choose("#sort", "title")
    titles = browser.texts(".hit-title a")
    assert titles == sorted(titles, key=str.casefold) and browser.hits() != ranked
    assert browser.run("return document.activeElement.id") == "sort"
    browser.find("#layout-grid").click()
    browser.open(browser.driver.current_url)
    browser.find("ol.hits.grid")
    assert browser.texts(".hit-title a") == titles
    browser.choose("#sort", "")
    assert browser.hits() == ranked
    open_search(browser, page_url, q="square", index="shapes")
    assert browser.all("ol.hits.grid")  # all hits are images


def test_rerank_and_scores(browser, page_url, client):
    open_search(browser, page_url, q=QUERY, rep="random_1", rerank="vectors:full", depth="8", k="4")
    options = {"name": "vectors", "representation": "full", "top": 8}
    expected = client.search(
        QUERY, index="items", representation="random_1", rerank=options, k=4
    ).hits
    assert browser.hits() == [hit.item_id for hit in expected]
    assert f"first stage: rank {expected[0].first_stage.rank}" in browser.find("li.hit").text
    browser.choose("#score", "hybrid")
    browser.wait("document.querySelector('.scores')?.textContent.includes('single vector')")


def test_examples_find_their_items(browser, page_url, client):
    """A caption may match the beginning of another item better than its own text."""
    facets = client._http.get("/v1/indexes/items/facets").json()
    examples = {example["query"]: example["representation"] for example in facets["examples"]}
    assert set(examples.values()) == {"full", "caption_full"}
    for text, representation in examples.items():
        browser.open(page_url)
        browser.find("#examples a.chip")
        (chip,) = [chip for chip in browser.all("#examples a.chip") if chip.text == text]
        chip.click()
        browser.wait("document.querySelectorAll('li.hit[data-item]').length")
        assert state_of(browser)["q"] == text
        paths = [f"/v1/items/{quote(item_id, safe='')}" for item_id in browser.hits()[:2]]
        items = [client._http.get(path, params={"index": "items"}).json() for path in paths]
        if representation == "caption_full":
            assert ("red" in text) == (items[0]["item_id"] == "red.png")
            assert items[0]["modality"] == "image"
        else:
            assert any(text in (item["text"] or "") for item in items)


def test_more_like_this(browser, page_url, client):
    open_search(browser, page_url, q="the lift of a wing", k="3")
    item_id = browser.hits()[0]
    browser.find("li.hit .actions .link").click()
    browser.wait("document.querySelector('.query-item')")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 3")
    response = client._http.post(
        "/v1/search", json={"query": {"item": item_id}, "index": "items", "k": 4}
    )
    expected = [hit["item_id"] for hit in response.json()["hits"]]
    assert expected[0] == item_id and browser.hits() == expected[1:]
    assert state_of(browser)["item"] == item_id
    browser.find("#query-part button").click()
    browser.wait("!document.querySelector('.query-item')")


def drop(browser, image: bytes, name: str = "query.png", kind: str = "image/png") -> None:
    """Drops a file on the page."""
    browser.run(
        """
        const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], arguments[1], {type: arguments[2]}));
        for (const type of ['dragover', 'drop']) {
          document.body.dispatchEvent(new DragEvent(type, {dataTransfer: transfer, bubbles: true,
            cancelable: true}));
        }
        """,
        base64.b64encode(image).decode(),
        name,
        kind,
    )


def test_search_by_image(browser, page_url, corpus):
    browser.open(f"{page_url}?index=shapes")
    browser.wait("document.querySelector('#results h2')")
    drop(browser, (corpus / "squares/green.png").read_bytes())
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 5")
    assert browser.hits()[0] == "green.png"
    assert browser.find("#query-part img").is_displayed()
    browser.find("#query-part button").click()
    browser.wait("document.querySelector('#query-part').hidden")
    assert browser.errors() == []


def test_query_kinds(browser, page_url, corpus):
    """The page offers the kinds of queries that the representation supports."""
    browser.open(f"{page_url}?index=items")
    browser.wait("document.querySelector('#results h2')")
    assert browser.texts("#results p")[0].startswith("Search by text or by speech. Open")
    assert browser.find("#image-file").get_attribute("accept") == "audio/*,video/*"
    assert browser.find("#q").get_attribute("placeholder") == "Search by text"
    drop(browser, (corpus / "squares/green.png").read_bytes())
    browser.wait("document.querySelector('#q-error').textContent.includes('does not support')")
    browser.choose("#index", "shapes")
    browser.wait("document.querySelector('#image-file').accept.includes('image/png')")
    browser.wait("document.querySelector('#results h2')?.textContent.includes('shapes')")
    ways = "Search by text, by an image, or by speech. Open"
    assert browser.texts("#results p")[0].startswith(ways)
    assert "image" in browser.find("#q").get_attribute("placeholder")


def test_pasted_image_and_back_button(browser, page_url, corpus):
    """The encoder supports no composed queries, so image and text replace each other."""
    browser.open(f"{page_url}?index=shapes&q=square")
    browser.wait_for_results()
    browser.run(
        """
        const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], 'a.png', {type: 'image/png'}));
        document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: transfer,
          bubbles: true, cancelable: true}));
        """,
        base64.b64encode((corpus / "squares/red.png").read_bytes()).decode(),
    )
    browser.wait("!document.querySelector('#query-part').hidden")
    browser.wait("document.querySelector('li.hit')?.dataset.item === 'red.png'")
    assert "q" not in state_of(browser)
    browser.driver.back()
    browser.wait("document.querySelector('#query-part').hidden")
    assert state_of(browser)["q"] == "square"
    browser.driver.forward()
    browser.wait("document.querySelector('#query-part img')")
    browser.wait("document.querySelector('li.hit')?.dataset.item === 'red.png'")
    assert browser.find("#query-part img").is_displayed()
    browser.find("#q").send_keys("blue\n")
    browser.wait("document.querySelector('#query-part').hidden")
    browser.wait("document.querySelectorAll('li.hit[data-item]').length === 5")
    assert state_of(browser)["q"] == "blue"


def test_spoken_query(browser, page_url):
    browser.open(f"{page_url}?index=items")
    browser.wait("document.querySelector('#results h2')")
    samples, rate = soundfile.read("jobs/data/speech/jfk.flac", 3 * 44_100)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    drop(browser, file.getvalue(), "question.wav", "audio/wav")
    browser.wait("document.querySelector('li.hit[data-item]')", seconds=60)
    assert browser.texts("#query-part .query-item") == ["audio"]
    assert "recognised in the query: " in browser.find("#banner").text
    browser.find("#query-part button").click()
    browser.wait("document.querySelector('#query-part').hidden")
    assert browser.errors() == []


def test_recorded_query(browser, page_url):
    """The microphone of the tests beeps, in which a recogniser may find a word or none."""
    browser.open(f"{page_url}?index=items")
    browser.wait("document.querySelector('#results h2')")
    browser.find("#record-button").click()
    browser.wait("document.querySelector('#record-button').ariaPressed === 'true'")
    time.sleep(1.5)
    browser.find("#record-button").click()
    browser.wait(
        "document.querySelector('li.hit[data-item]') || "
        "document.querySelector('#q-error').textContent.includes('audio with speech')",
        seconds=60,
    )
    assert browser.find("#record-button").get_attribute("aria-pressed") == "false"
    assert browser.texts("#query-part .query-item") == ["audio"]


def test_rejects_files_that_are_no_images(browser, page_url):
    browser.open(f"{page_url}?index=shapes")
    browser.wait("document.querySelector('#results h2')")
    drop(browser, b"GIF89a?", "x.png")
    browser.wait("document.querySelector('#q-error').textContent.includes('not an image')")
    drop(browser, b"text", "x.txt", "text/plain")
    browser.wait("document.querySelector('#q-error').textContent.includes('must be an image')")


def test_markup_in_items_is_not_parsed(browser, page_url):
    open_search(browser, page_url, q="attack", k="20")
    assert any(ATTACK in text for text in browser.texts("li.hit .hit-title"))
    assert any("<script>" in text for text in browser.texts("li.hit .snippet"))
    for item_id in browser.hits()[:3]:
        browser.open(f"{page_url}?{urlencode({'q': 'attack', 'k': 20, 'open': item_id})}")
        browser.find("#viewer[open] .chip")
        browser.wait("document.querySelector('#viewer dl.item').children.length > 2")
    assert browser.run("return window.hacked") is None
    assert not browser.all("#results script, #viewer script, img[onerror]")
    open_search(browser, page_url, q=ATTACK, filter="1 = '<b>'", index="items")
    assert browser.run("return window.hacked") is None


def test_policy_is_enforced(browser, page_url):
    browser.open(page_url)
    browser.find("#results h2")
    assert browser.errors() == []
    browser.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        "document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'https://example.com/x.png';"
        "document.body.append(i);"
    )
    time.sleep(0.5)
    assert browser.run("return window.hacked") is None
    messages = "\n".join(browser.errors())
    assert "Content Security Policy" in messages and "script-src" in messages
    assert not any("example.com" in url for url in browser.requested_urls()) or (
        "img-src" in messages
    )


def test_judgments(browser, page_url):
    open_search(browser, page_url, q=QUERY, k="2")
    item_id = browser.hits()[0]
    buttons = browser.all("li.hit .judge button")
    buttons[0].click()
    assert buttons[0].get_attribute("aria-pressed") == "true"
    assert browser.find("#judge-export").text == "Export 1 judgment"
    open_search(browser, page_url, q=QUERY, k="2")
    assert browser.find("li.hit .judge button").get_attribute("aria-pressed") == "true"
    judged = browser.module("judge.js", "Object.values(m.judgments())[0].grades")
    assert judged == {item_id: 1}
    browser.find("li.hit .judge button").click()
    assert not browser.find("#judge-export").is_displayed()


def test_export_is_a_benchmark(browser, page_url, tmp_path):
    """Judgments of text queries are exported. Those of an item as the query are left out."""
    browser.download_to(tmp_path)
    open_search(browser, page_url, q=QUERY, k="2")
    relevant, other = browser.hits()
    browser.find("li.hit:nth-child(1) .judge button[value='1']").click()
    browser.find("li.hit:nth-child(2) .judge button[value='0']").click()
    open_search(browser, page_url, q=f"attack {ATTACK}", k="1")
    (attack,) = browser.hits()
    assert " " in attack
    browser.find("li.hit .judge button").click()
    assert not browser.find("#judge-note").is_displayed()
    open_search(browser, page_url, item=relevant)
    browser.find("li.hit .judge button").click()
    assert browser.find("#judge-export").text == "Export 3 judgments"
    assert browser.find("#judge-note").text == "1 judgment of image or item queries not exported"
    open_search(browser, page_url, item=relevant)  # also known after a reload
    assert browser.find("#judge-note").is_displayed()
    browser.find("#judge-export").click()
    path = tmp_path / "judgments.zip"
    end = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < end, "no file was downloaded"
        time.sleep(0.05)
    assert [file.name for file in tmp_path.iterdir()] == ["judgments.zip"]
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "judgments")
    benchmark = beir.Queries(beir.Queries.Spec(path=str(tmp_path / "judgments/items"))).load()
    assert benchmark.num_unjudged == benchmark.num_without_text == 0
    found = {text: benchmark.qrels[query_id] for query_id, text in benchmark.queries.items()}
    assert found == {QUERY: {relevant: 1, other: 0}, f"attack {ATTACK}": {attack: 1}}


def test_memory_is_stable(browser, page_url):
    """200 searches release their images and listeners."""
    open_search(browser, page_url, q="harbour")
    heap = []
    for number in range(200):
        browser.run(
            "document.getElementById('q').value = arguments[0];"
            "document.getElementById('search-form').requestSubmit();",
            f"harbour {number % 7}",
        )
        browser.wait("document.querySelectorAll('li.hit[data-item]').length === 10")
        if number in (50, 199):
            browser.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
            metrics = browser.driver.execute_cdp_cmd("Runtime.getHeapUsage", {})
            heap.append(metrics["usedSize"])
    assert heap[1] < 1.3 * heap[0] + 1e6
    assert browser.errors() == []


def test_a_federation(browser, page_url, client):
    browser.open(page_url)
    browser.wait("document.querySelector('#results h2')")
    browser.find("#options summary").click()
    browser.choose("#index", "all")
    browser.wait("document.querySelector('#results h2').textContent === 'all'")
    text = "things (items), captions (items), squares (shapes) are searched as one."
    assert browser.texts("#results .empty p") == [text]
    disabled = "return ['rep', 'score', 'k'].map((id) => document.getElementById(id).disabled)"
    assert browser.run(disabled) == [True, True, False]
    open_search(browser, page_url, index="all", q=QUERY, k="20")
    expected = client.search(QUERY, index="all", k=20)
    assert browser.hits() == [hit.item_id for hit in expected.hits]
    members = browser.texts("li.hit .member")
    assert len(members) == sum(len(hit.members) for hit in expected.hits)
    first = expected.hits[0].members[0]
    assert members[0] == f"{first.member} #{first.rank}: {first.score:.3f} → {first.value:.3f}"
    assert "things" in browser.texts("#status")[0] and not browser.texts("#banner span")
    browser.wait("[...document.querySelectorAll('.frame img')].every((e) => e.naturalWidth)")
    assert any("orange.png?index=shapes" in url for url in browser.requested_urls())
    browser.find("li.hit[data-item='orange.png'] .hit-title a").click()
    browser.wait("document.querySelector('#viewer[open]')")
    browser.wait("[...document.querySelectorAll('.image-area img')].every((e) => e.naturalWidth)")
    assert browser.errors() == []


def test_a_federation_without_some_members(browser, page_url, corpus):
    """An image is a query that only one of the encoders supports."""
    browser.open(page_url + "?index=all")
    browser.wait("document.querySelector('#image-file').accept.includes('image/png')")
    drop(browser, (corpus / "squares/blue.png").read_bytes())
    browser.wait("document.querySelectorAll('li.hit[data-item]').length")
    assert browser.hits()[0] == "blue.png"
    (banner,) = browser.texts("#banner span")
    assert banner.startswith("Incomplete hits: member things is left out: query must be ")
    assert "member captions is left out: " in banner and "squares" not in banner
    browser.open(page_url + "?index=all&view=compare&q=fish")
    browser.wait("document.querySelector('#results .empty')")
    assert browser.texts("#results h2") == ["This view needs an index"]
    assert browser.errors() == []

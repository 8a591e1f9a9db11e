"""Takes the screenshots of the documentation of the search page.

    maxray serve out/demo/index &
    python -m tests.screenshots http://127.0.0.1:8000 [FOLDER]

The server must serve the index of `maxray demo`.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image

from tests import browser as browsers
from tests.browser import Browser
from tests.conftest import ROOT

FOLDER = ROOT / "docs/tutorials/figures"
QUESTION = "how many people have a severe disability"
#: State of the page, width and height by the name of the file.
VIEWS: dict[str, tuple[dict[str, str], int, int]] = {
    "page-start": ({}, 1280, 900),
    "page-search": ({"q": QUESTION, "k": "6"}, 1280, 900),
    "page-map": ({"q": QUESTION, "open": "us-001.pdf#page=2"}, 1280, 900),
    "page-merged": ({"q": QUESTION, "open": "us-001.pdf#page=2", "rep": "hpool_16"}, 1280, 900),
    "page-collection": ({"view": "map"}, 1280, 900),
    "page-compare": (
        {"q": QUESTION, "view": "compare", "rep": "full", "rep2": "hpool_16", "k": "6"},
        1280,
        900,
    ),
    "page-phone": ({"q": QUESTION, "k": "6"}, 390, 844),
}


def take(browser: Browser, url: str, name: str, folder: Path) -> None:
    """Takes one screenshot and writes it with a palette of 255 colours, which is smaller."""
    state, width, height = VIEWS[name]
    browser.resize(width, height)
    browser.open(f"{url}/?{urlencode(state)}")
    browser.wait_for_results()
    browser.wait("document.querySelector('.facet .chip')")
    if not state:
        browser.wait("document.querySelector('.samples img')")
    if "open" in state:
        browser.find("#viewer[open] .tokens .chip")
        browser.wait("document.querySelector('.image-area img').naturalWidth")
        browser.run(
            "const chips = [...document.querySelectorAll('.tokens .chip')];"
            "chips.find((e) => e.textContent === 'disability').click();"
            "document.querySelector('.stage').scrollTop = 90;"
        )
    if state.get("view") == "compare":
        browser.wait("!document.querySelector('#comparison').textContent.includes('…')")
    browser.wait(
        "[...document.querySelectorAll('img')].every((e) => {"
        " const box = e.getBoundingClientRect();"
        " return e.naturalWidth || box.top > innerHeight || box.bottom < 0; })"
    )
    image = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    small = image.quantize(255, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(folder / f"{name}.png", optimize=True)


def main() -> None:
    """Takes all screenshots."""
    url = sys.argv[1].rstrip("/")
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with browsers.start() as browser:
        browser.open(f"{url}/?{urlencode({'q': QUESTION})}")
        browser.wait_for_results()  # the first search loads the encoder
        for name in VIEWS:
            take(browser, url, name, folder)
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main()

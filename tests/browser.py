"""A Chromium browser for tests of the search page, driven by selenium."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Names of the browser, in order of preference, and of its driver.
BROWSERS, DRIVER = ("chromium", "google-chrome"), "chromedriver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
    "--window-size=1280,900",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
#: Time limit for a condition, in seconds.
WAIT_SECONDS = 20.0


def missing() -> str | None:
    """Returns why no browser can be started, or None if one can."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed"
    if _browser_path() is None or shutil.which(DRIVER) is None:
        return "Chromium or its driver is not installed (chromium, chromium-driver of Debian)"
    return None


def _browser_path() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """Browser window.

    Args:
        driver: Driver of selenium.
    """

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> None:
        """Opens a URL and waits until the page has no request in progress."""
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page and returns its result."""
        return self.driver.execute_script(script, *arguments)

    def module(self, name: str, expression: str) -> Any:
        """Returns the value of an expression, or of its promise, of a module `m` of the page."""
        script = f"""
            const done = arguments[arguments.length - 1];
            import(new URL('page/{name}', document.baseURI))
              .then(async (m) => done(await ({expression})))
              .catch((error) => done('error: ' + error));
        """
        return self.driver.execute_async_script(script)

    def wait(self, condition: str, *arguments: Any, seconds: float = WAIT_SECONDS) -> Any:
        """Waits until an expression of JavaScript is true and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}", *arguments)):
            if time.monotonic() > end:
                text = self.run("return document.body.innerText.slice(0, 2000)")
                raise AssertionError(f"{condition} is still false; the page shows:\n{text}")
            time.sleep(0.05)
        return value

    def find(self, selector: str) -> Any:
        """Waits for an element and returns it."""
        self.wait("document.querySelector(arguments[0])", selector)
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        """Returns all elements that match a selector."""
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of all elements that match a selector."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.run(script, selector)

    def choose(self, selector: str, value: str) -> None:
        """Sets the value of a control as a user does."""
        self.find(selector)
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true}));",
            selector,
            value,
        )

    def wait_for_results(self) -> None:
        """Waits until hits, an empty result or an error are shown."""
        self.wait(
            "!document.querySelector('#results[aria-busy]') && "
            "document.querySelector('#results').children.length > 0"
        )

    def hits(self, column: str = "") -> list[str]:
        """Returns the item ids of the shown hits."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.dataset.item)"
        return self.run(script, f"{column} li.hit[data-item]")

    def pixels(self, selector: str, box: tuple[float, float, float, float]) -> list[float]:
        """Returns the mean red, green, blue and alpha of a part of a canvas.

        Args:
            selector: Selector of the canvas.
            box: x0, y0, x1, y1 in [0, 1].
        """
        return self.run(
            """
            const canvas = document.querySelector(arguments[0]);
            const [x0, y0, x1, y1] = arguments[1];
            const x = Math.floor(x0 * canvas.width), y = Math.floor(y0 * canvas.height);
            const width = Math.max(1, Math.floor((x1 - x0) * canvas.width));
            const height = Math.max(1, Math.floor((y1 - y0) * canvas.height));
            const {data} = canvas.getContext('2d').getImageData(x, y, width, height);
            const sums = [0, 0, 0, 0];
            data.forEach((value, i) => (sums[i % 4] += value));
            return sums.map((sum) => sum / (data.length / 4));
            """,
            selector,
            list(box),
        )

    def errors(self) -> list[str]:
        """Returns the messages of the console since the last call that are errors."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def requested_urls(self) -> list[str]:
        """Returns the URLs of all requests since the last call."""
        urls = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                urls.append(message["params"]["request"]["url"])
        return urls

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the viewport in pixels, which may be narrower than a window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def use_scheme(self, scheme: str) -> None:
        """Sets the preferred colour scheme, "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def block(self, *patterns: str) -> None:
        """Makes requests to URLs of the given patterns fail. Without patterns, none fail."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": list(patterns)})

    def download_to(self, folder: Path) -> None:
        """Saves downloads in a folder."""
        behaviour = {"behavior": "allow", "downloadPath": str(folder)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)

    def slow_down(self, latency_ms: float) -> None:
        """Delays all requests. 0 removes the delay."""
        conditions = {"offline": False, "latency": latency_ms}
        conditions |= {"downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)


@contextmanager
def start() -> Iterator[Browser]:
    """Starts a browser and ends it afterwards. Both programs are given, so none is downloaded."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _browser_path()
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which(DRIVER))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(WAIT_SECONDS)
    try:
        yield Browser(driver)
    finally:
        driver.quit()

"""What the server measures of itself: counters and histograms of Ray, which Prometheus reads.

Ray's agents export them on every node, beside Ray's own; `/metrics` of the gateway gathers those of
all nodes, so that one address does where nobody scrapes the nodes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

import httpx2
import ray
from ray.util.metrics import Counter, Gauge, Histogram

#: What is ours of what Ray's agents export, and of Ray Serve what an operator looks at.
SHOWN = re.compile(r"ray_(maxray|serve)_")
SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]
SIZES: list[float] = [1, 2, 4, 8, 16, 32, 64]


class Metrics:
    """The gateway's own."""

    def __init__(self) -> None:
        self._requests = Counter(
            "maxray_requests",
            "Requests answered.",
            tag_keys=("route", "method", "status", "key"),
        )
        self._seconds = Histogram(
            "maxray_request_seconds",
            "From the first byte in to the last one out.",
            boundaries=SECONDS,
            tag_keys=("route",),
        )
        self._stages = Histogram(
            "maxray_stage_seconds",
            "What a stage of a request took, waiting included.",
            boundaries=SECONDS,
            tag_keys=("stage",),
        )
        self._events = Counter(
            "maxray_events",
            "Stages asked again, answers without them, versions that could not be opened.",
            tag_keys=("event", "stage"),
        )
        self._in_flight = Gauge("maxray_in_flight", "Requests under way in a gateway.")

    def request(self, route: str, method: str, status: int, key: str, seconds: float) -> None:
        """A request was answered."""
        self._requests.inc(
            tags={"route": route, "method": method, "status": str(status), "key": key}
        )
        self._seconds.observe(seconds, tags={"route": route})

    def stage(self, stage: str, seconds: float) -> None:
        """A stage of a request is done."""
        self._stages.observe(max(seconds, 1e-9), tags={"stage": stage})

    def event(self, event: str, stage: str) -> None:
        """Something out of the ordinary."""
        self._events.inc(tags={"event": event, "stage": stage})

    def in_flight(self, number: int) -> None:
        """So many requests are under way."""
        self._in_flight.set(number)


def batch_sizes(stage: str) -> Histogram:
    """How many requests a stage answers together."""
    histogram = Histogram(
        "maxray_batch_size",
        "Requests that a stage answers together.",
        boundaries=SIZES,
        tag_keys=("stage",),
    )
    histogram.set_default_tags({"stage": stage})
    return histogram


async def gathered(timeout: float = 5.0) -> str:
    """What the agents of all nodes export of this application, in Prometheus' text form.

    Raises:
        OSError: no agent answers.
    """
    nodes = [n for n in await asyncio.to_thread(ray.nodes) if n["Alive"]]
    addresses = [(n["NodeManagerAddress"], n["MetricsExportPort"]) for n in nodes]
    async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as client:
        asked = (client.get(f"http://{host}:{port}/metrics") for host, port in addresses)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    texts = [a.text for a in answers if not isinstance(a, BaseException) and a.is_success]
    if not texts:
        raise OSError("no node's metrics can be read")
    return merge_texts(texts)


def merge_texts(texts: Sequence[str]) -> str:
    r"""Merges exports: the samples of each exported metric family stand together.

    >>> one = "# TYPE ray_maxray_a counter\nray_maxray_a{n='1'} 2\n# TYPE go gauge\ngo 1\n"
    >>> two = "# TYPE ray_maxray_a counter\nray_maxray_a{n='2'} 3\n"
    >>> print(merge_texts([one, two]), end="")
    # TYPE ray_maxray_a counter
    ray_maxray_a{n='1'} 2
    ray_maxray_a{n='2'} 3
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        for about, samples in _families(text):
            name = about[0].split(" ")[2]
            if SHOWN.match(name):
                there = families.setdefault(name, (about, []))
                there[1].extend(samples)
    lines = [line for about, samples in families.values() for line in (*about, *samples)]
    return "".join(f"{line}\n" for line in lines)


def _families(text: str) -> Iterable[tuple[list[str], list[str]]]:
    """The families of an export: what is said about each, and its samples."""
    about: list[str] = []
    samples: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            if samples:
                yield about, samples
                about, samples = [], []
            about.append(line)
        elif line and about:
            samples.append(line)
    if samples:
        yield about, samples

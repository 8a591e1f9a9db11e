"""Metrics of the server, which are counters and histograms that Ray exports for Prometheus.

The agents of Ray export them on every node, together with the metrics of Ray itself. In deployments
whose nodes are not scraped individually, the route `/metrics` of the gateway can be used instead.
It merges the metrics of all nodes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

import httpx2
import ray
from ray.util.metrics import Counter, Gauge, Histogram

#: Prefixes of the exported metrics: those of the server and of Ray Serve. The metrics of jobs on
#: the same cluster contain the URIs of indexes.
EXPORTED = re.compile(r"ray_(maxray_(?!job_|step_|commit_)|serve_)")
SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]
SIZES: list[float] = [1, 2, 4, 8, 16, 32, 64]


class Metrics:
    """Metrics of the gateway."""

    def __init__(self) -> None:
        self._requests = Counter(
            "maxray_requests",
            "Number of completed requests.",
            tag_keys=("route", "method", "status", "key"),
        )
        self._seconds = Histogram(
            "maxray_request_seconds",
            "Latency of a request from its first byte to the last byte of the response.",
            boundaries=SECONDS,
            tag_keys=("route",),
        )
        self._stages = Histogram(
            "maxray_stage_seconds",
            "Latency of a stage of a request, including queueing.",
            boundaries=SECONDS,
            tag_keys=("stage",),
        )
        self._events = Counter(
            "maxray_events",
            "Number of retries, incomplete responses, and failed reloads.",
            tag_keys=("event", "stage"),
        )
        self._in_flight = Gauge("maxray_in_flight", "Number of requests in progress.")

    def request(self, route: str, method: str, status: int, key: str, seconds: float) -> None:
        """Records a completed request."""
        self._requests.inc(
            tags={"route": route, "method": method, "status": str(status), "key": key}
        )
        self._seconds.observe(seconds, tags={"route": route})

    def stage(self, stage: str, seconds: float) -> None:
        """Records the latency of a stage of a request."""
        self._stages.observe(max(seconds, 1e-9), tags={"stage": stage})

    def event(self, event: str, stage: str) -> None:
        """Counts an event, which is one of "retry", "degraded" and "reload_failed"."""
        self._events.inc(tags={"event": event, "stage": stage})

    def in_flight(self, number: int) -> None:
        """Sets the number of requests in progress."""
        self._in_flight.set(number)


def batch_sizes(stage: str) -> Histogram:
    """Returns the histogram in which a stage records the sizes of its batches."""
    histogram = Histogram(
        "maxray_batch_size",
        "Number of requests in a batch of a stage.",
        boundaries=SIZES,
        tag_keys=("stage",),
    )
    histogram.set_default_tags({"stage": stage})
    return histogram


async def collect_metrics(timeout: float = 5.0) -> str:
    """Collects the metrics of all nodes in the text format of Prometheus."""
    nodes = [n for n in await asyncio.to_thread(ray.nodes) if n["Alive"]]
    addresses = [(n["NodeManagerAddress"], n["MetricsExportPort"]) for n in nodes]
    async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as client:
        requests = (client.get(f"http://{host}:{port}/metrics") for host, port in addresses)
        responses = await asyncio.gather(*requests, return_exceptions=True)
    texts = [r.text for r in responses if not isinstance(r, BaseException) and r.is_success]
    if not texts:
        raise OSError("the metrics of no node could be read")
    return merge_texts(texts)


def merge_texts(texts: Sequence[str]) -> str:
    r"""Merges metrics in text format, grouping the samples of each exported metric family.

    >>> one = "# TYPE ray_maxray_a counter\nray_maxray_a{n='1'} 2\n# TYPE go gauge\ngo 1\n"
    >>> two = "# TYPE ray_maxray_a counter\nray_maxray_a{n='2'} 3\n"
    >>> print(merge_texts([one, two]), end="")
    # TYPE ray_maxray_a counter
    ray_maxray_a{n='1'} 2
    ray_maxray_a{n='2'} 3
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        for comments, samples in _families(text):
            name = comments[0].split(" ")[2]
            if EXPORTED.match(name):
                _, merged = families.setdefault(name, (comments, []))
                merged.extend(samples)
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "".join(f"{line}\n" for line in lines)


def _families(text: str) -> Iterable[tuple[list[str], list[str]]]:
    """Splits metrics in text format into families, with their comment lines and samples."""
    comments: list[str] = []
    samples: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            if samples:
                yield comments, samples
                comments, samples = [], []
            comments.append(line)
        elif line and comments:
            samples.append(line)
    if samples:
        yield comments, samples

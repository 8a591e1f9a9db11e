"""Retries of HTTP requests: which failures are transient, and the delay before the next attempt."""

from __future__ import annotations

import random

import httpx2

#: Statuses of responses to requests that may succeed later.
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
#: Delay before the first retry, in seconds. It doubles with each further retry up to the maximum.
INITIAL_DELAY_S, MAX_DELAY_S = 0.25, 10.0


def is_transient(error: httpx2.TransportError) -> bool:
    """Checks whether to retry a request, which an error that the client has caused rules out."""
    return not isinstance(error, httpx2.LocalProtocolError | httpx2.UnsupportedProtocol)


def retry_delay(
    num_tries: int, response: httpx2.Response | None, max_retry_after_s: float = MAX_DELAY_S
) -> float:
    """Returns how long to wait before the next attempt of a request, in seconds.

    `max_retry_after_s` limits the delay that the server requests with `Retry-After`.
    """
    delay = min(INITIAL_DELAY_S * 2 ** (num_tries - 1), MAX_DELAY_S)
    delay *= 0.5 + random.random() / 2  # jitter spreads the retries of many clients
    try:
        retry_after = float(response.headers.get("retry-after", 0)) if response is not None else 0.0
    except ValueError:
        retry_after = 0.0
    return max(delay, min(retry_after, max_retry_after_s))

"""Conditional requests and requests for a range of bytes (RFC 9110)."""

from __future__ import annotations

import re

from fastapi import Request, Response

from pipeline.config import digest
from pipeline.search.previews import ByteRange
from pipeline.serve.served import Served

#: Largest position in a range that is parsed.
MAX_POSITION_DIGITS = 18


def entity_tag(*parts: object) -> str:
    """Returns the entity tag of the values that determine a response.

    >>> entity_tag("a", 1) == entity_tag("a", 1), entity_tag("a", 1) == entity_tag("a", 2)
    (True, False)
    """
    return f'"{digest([repr(part) for part in parts])}"'


def preview_tag(served: Served, *parts: object) -> str:
    """Returns the entity tag of a preview, which depends on the version of the index."""
    return entity_tag(served.name, tuple(served.edition), *parts)


def is_current(request: Request, etag: str) -> bool:
    """Checks whether a client has the current version. Proxies that compress add `W/`."""
    header = request.headers.get("if-none-match", "")
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag in tags or "*" in tags


def not_modified(etag: str, headers: dict[str, str]) -> Response:
    """Returns a response without a body for a client that has the current version."""
    return Response(status_code=304, headers={**headers, "ETag": etag})


def requested_range(request: Request) -> ByteRange | None:
    """Returns the requested range of bytes, or None for the whole file.

    Several ranges, other units and malformed ranges are ignored, as the standard permits.
    """
    header = request.headers.get("range", "") if request.method == "GET" else ""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip().lower())
    if not found or not any(found.groups()):
        return None
    first, last = found.groups()
    if max(len(first), len(last)) > MAX_POSITION_DIGITS:
        return None
    if not first:
        return ByteRange(None, int(last))
    if last and int(last) < int(first):
        return None
    return ByteRange(int(first), int(last) + 1 if last else None)

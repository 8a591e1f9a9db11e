"""Routes of the search page: a document, a style sheet and ES modules in the folder `page`.

The page is public, but contains no data. It calls the API with an access key that the user enters.
"""

from __future__ import annotations

import functools
import gzip
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from pipeline.serve.conditional import entity_tag, is_current, not_modified
from pipeline.serve.errors import ApiError

#: Media types of the files of the page by suffix. Other files are not served.
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: The page loads nothing from other origins and runs no inline scripts. Images, audio and video
#: that need an access key are fetched and then displayed from `blob:` URLs.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

page = APIRouter(include_in_schema=False)


class Asset(NamedTuple):
    """File of the page, plain and compressed by gzip, with an entity tag of each."""

    media_type: str
    content: bytes
    etag: str
    compressed: bytes
    compressed_etag: str


@functools.cache
def assets() -> dict[str, Asset]:
    """Reads the files of the page by name."""
    found = {}
    for file in resources.files("pipeline.serve").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            content = file.read_bytes()
            compressed = gzip.compress(content, mtime=0)
            tags = entity_tag(content), entity_tag(compressed)
            found[file.name] = Asset(media_type, content, tags[0], compressed, tags[1])
    return found


@page.api_route("/", methods=["GET", "HEAD"])
async def document(request: Request) -> Response:
    """Returns the document of the search page."""
    return _respond(request, "index.html")


@page.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """Returns the reference of the API, a page that is generated from `/openapi.json`."""
    return _respond(request, "docs.html")


@page.api_route("/page/{name}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str) -> Response:
    """Returns a style sheet, a module or an image of the search page."""
    return _respond(request, name)


def _respond(request: Request, name: str) -> Response:
    found = assets().get(name)
    if found is None:
        raise ApiError("not_found", f"unknown file {name!r} of the search page")
    is_compressed = "gzip" in request.headers.get("accept-encoding", "")
    content, etag = (
        (found.compressed, found.compressed_etag) if is_compressed else (found.content, found.etag)
    )
    headers = {**HEADERS, "Vary": "Accept-Encoding"}
    if is_current(request, etag):
        return not_modified(etag, headers)
    if is_compressed:
        headers["Content-Encoding"] = "gzip"
    headers["ETag"] = etag
    return Response(content, media_type=found.media_type, headers=headers)

"""Routes for browsing an index: facets, a map of the items, and their media files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Path, Request, Response
from fastapi.responses import StreamingResponse

from pipeline.search.previews import ByteRange, MediaPart
from pipeline.serve import wire
from pipeline.serve.conditional import entity_tag, is_current, not_modified, requested_range
from pipeline.serve.errors import ApiError, error_response
from pipeline.serve.routes import (
    PREVIEW_HEADERS,
    GatewayDependency,
    IndexName,
    ItemId,
    KeyDependency,
    api,
)

#: Headers of media files. A file that a browser opens as a page can neither run nor load anything.
MEDIA_HEADERS = {
    **PREVIEW_HEADERS,
    "Accept-Ranges": "bytes",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}
#: Media types of the files.
MEDIA_CONTENT: dict[str, dict] = {
    kind: {}
    for kind in ("application/pdf", "video/*", "audio/*", "image/*", "application/octet-stream")
}


@api.get("/indexes/{name}/facets", tags=["indexes"], summary="Get the facets of an index")
async def facets(
    request: Request,
    name: Annotated[str, Path(description="Name of the index.", max_length=256)],
    key: KeyDependency,
    gateway: GatewayDependency,
) -> wire.IndexFacets:
    """Returns the values of filterable columns, sizes, example queries and sample items."""
    served = gateway.served(key, name)
    request.state.log_fields = {"index": served.name}
    found = await gateway.engine.facets(served, key.name)
    return wire.IndexFacets(
        index=served.name,
        version=served.version,
        num_items=len(served.index),
        facets=[
            wire.Facet(
                column=facet.column,
                values=[wire.FacetValue(value=value, count=n) for value, n in facet.values],
                num_values=facet.num_values,
            )
            for facet in found.facets
        ],
        sizes=[wire.RepresentationSize.model_validate(vars(size)) for size in found.sizes],
        examples=[wire.ExampleQuery.model_validate(vars(example)) for example in found.examples],
        samples=[wire.SampleItem.model_validate(vars(sample)) for sample in found.samples],
    )


@api.get(
    "/indexes/{name}/map",
    tags=["indexes"],
    summary="Get a map of the items of an index",
    response_class=Response,
    responses={200: {"content": {"text/csv": {}}}},
)
async def item_map(
    request: Request,
    name: Annotated[str, Path(description="Name of the index.", max_length=256)],
    key: KeyDependency,
    gateway: GatewayDependency,
) -> Response:
    """Returns the positions of the items in a projection of their vectors onto a plane.

    The columns are `item_id`, `title`, `source`, `modality`, and `x` and `y` in [-1, 1]. Items
    without vectors are omitted, and of an index of more than 10,000 items it is a sample.
    """
    served = gateway.served(key, name)
    request.state.log_fields = {"index": served.name}
    text = await gateway.engine.item_map(served, key.name)
    return Response(text, media_type="text/csv")


@api.get(
    "/media/{item_id:path}",
    tags=["indexes"],
    summary="Get the media file of an item",
    response_class=Response,
    responses={
        200: {"content": MEDIA_CONTENT},
        206: {"description": "Part of the file", "content": MEDIA_CONTENT},
        304: {"description": "The client has the current file"},
    },
)
async def media(
    request: Request,
    item_id: ItemId,
    key: KeyDependency,
    gateway: GatewayDependency,
    index: IndexName = None,
) -> Response:
    """Returns the original file of an item (PDF, image, video or audio), or a range of its bytes.

    A response to a request with the header `Range` has at most 2 MiB, so it may end before the
    requested range does.
    """
    served = gateway.served(key, index)
    request.state.log_fields = {"index": served.name}
    range = requested_range(request)

    async def read(part: ByteRange) -> MediaPart:
        return await gateway.engine.media(served, item_id, part, key.name)

    part = await read(range or ByteRange())
    etag = entity_tag(part.content_hash)
    if is_current(request, etag):
        return not_modified(etag, MEDIA_HEADERS)
    headers = {**MEDIA_HEADERS, "ETag": etag}
    if range is not None and request.headers.get("if-range", etag) != etag:
        range, part = None, await read(ByteRange())  # the client has a part of another file
    if range is None:
        headers["Content-Length"] = str(part.size)
        if request.method == "HEAD":  # the file is not read for a response without a body
            return Response(media_type=part.media_type, headers=headers)

        async def stream() -> AsyncIterator[bytes]:
            end = len(part.data)
            yield part.data
            while end < part.size:
                following = await read(ByteRange(end))
                if following.content_hash != part.content_hash or not following.data:
                    raise ConnectionAbortedError("the file was modified while it was sent")
                end += len(following.data)
                yield following.data

        return StreamingResponse(stream(), media_type=part.media_type, headers=headers)
    if not part.data:
        message = f"the range must be in the file of {part.size:,} bytes"
        response = error_response(request, ApiError("range_not_satisfiable", message, "Range"))
        response.headers["Content-Range"] = f"bytes */{part.size}"
        return response
    end = part.start + len(part.data)
    headers["Content-Range"] = f"bytes {part.start}-{end - 1}/{part.size}"
    return Response(part.data, status_code=206, media_type=part.media_type, headers=headers)

"""The routes of the HTTP API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from pipeline.search.options import VECTORS
from pipeline.search.results import Hit
from pipeline.serve import wire
from pipeline.serve.conditional import is_current, not_modified, preview_tag
from pipeline.serve.engine import Timer
from pipeline.serve.errors import ApiError
from pipeline.serve.evaluations import EvaluationStore
from pipeline.serve.federations import FederationSearch
from pipeline.serve.gateway import Gateway
from pipeline.serve.inputs import (
    check_num_pairs,
    check_num_queries,
    check_reranker,
    search_options,
    with_request,
)
from pipeline.serve.keys import Key
from pipeline.serve.metrics import collect_metrics
from pipeline.serve.responses import federation_info, index_info

_bearer = HTTPBearer(auto_error=False, description="Access key")


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _key(
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Key:
    key = request.state.key
    await _gateway(request).auth.limit(key)
    return key


KeyDependency = Annotated[Key, Depends(_key)]
GatewayDependency = Annotated[Gateway, Depends(_gateway)]
#: Headers of previews, which a browser may keep for the user of the access key.
PREVIEW_HEADERS = {"Cache-Control": "private, max-age=300", "X-Content-Type-Options": "nosniff"}


class Route(APIRoute):
    """Route that answers HEAD like GET. The server sends no body."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        super().__init__(path, endpoint, **options)
        methods = self.methods or set()
        self.methods = methods | {"HEAD"} if "GET" in methods else methods


public = APIRouter(route_class=Route)
api = APIRouter(prefix="/v1", route_class=Route)


def _log(request: Request, **fields: Any) -> str:
    request.state.log_fields = {**getattr(request.state, "log_fields", {}), **fields}
    return request.scope["maxray_request_id"]


# -- operation: no access key required -------------------------------------------------------------


@public.get("/healthz", tags=["operation"], summary="Liveness check")
async def healthz() -> dict[str, str]:
    """Returns 200 if the gateway is running."""
    return {"status": "ok"}


@public.get("/readyz", tags=["operation"], summary="Readiness check")
async def readyz(gateway: GatewayDependency) -> dict[str, str]:
    """Returns 200 if all stages respond, else 503."""
    gateway.check_running()
    await gateway.engine.calls.check()
    return {"status": "ready"}


@public.get(
    "/metrics",
    tags=["operation"],
    summary="Get Prometheus metrics",
    response_class=PlainTextResponse,
)
async def metrics(request: Request, gateway: GatewayDependency) -> Response:
    """Returns the metrics of all nodes in the text format of Prometheus.

    Requires an access key if the server has access keys.
    """
    if gateway.auth.has_keys:
        gateway.auth.key(request)
    try:
        text = await collect_metrics()
    except OSError as error:
        raise ApiError("unavailable", str(error)) from None
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# -- search ----------------------------------------------------------------------------------------


@api.post("/search", tags=["search"], summary="Search with one query")
async def search(
    request: Request, body: wire.SearchRequest, key: KeyDependency, gateway: GatewayDependency
) -> wire.SearchResponse:
    """Returns the k best items for a query, optionally reranked and explained.

    The body can also be a form (`multipart/form-data`) with the parts `text`, the files `image`,
    `audio` and `video`, and `options`, a JSON object with the other fields.
    """
    (hits,), fields = await _search(request, [body.query], body, key, gateway)
    return wire.SearchResponse(hits=hits, **fields)


@api.post("/search:batch", tags=["search"], summary="Search with a batch of queries")
async def search_batch(
    request: Request, body: wire.BatchSearchRequest, key: KeyDependency, gateway: GatewayDependency
) -> wire.BatchSearchResponse:
    """Returns the k best items for each query. All queries share the same options."""
    check_num_queries(body.queries, gateway.settings.limits)
    results, fields = await _search(request, body.queries, body, key, gateway)
    return wire.BatchSearchResponse(results=results, **fields)


async def _search(
    request: Request,
    queries: Sequence[wire.Query],
    body: wire.SearchFields,
    key: Key,
    gateway: Gateway,
) -> tuple[list[list[Hit]], dict[str, Any]]:
    limits, timer = gateway.settings.limits, Timer(gateway.metrics.stage)
    if federation := gateway.federation(key, body.index):
        request_id = _log(request, index=federation.name, k=body.k, queries=len(queries))
        federation, options = with_request(federation, body, len(queries), limits)
        search = FederationSearch(gateway.engine, federation, queries, options, timer, key.name)
        result = await search.run()
        return result.hits, {
            "request_id": request_id,
            "index": federation.name,
            "version": None,
            "representation": None,
            "reranked": result.is_reranked,
            "degraded": any(member.error for member in result.members),
            "members": result.members,
            "warnings": result.warnings,
            "durations_ms": timer.all(),
        }
    served = gateway.served(key, body.index)
    request_id = _log(request, index=served.name, k=body.k, queries=len(queries))
    options = search_options(body, served, len(queries), limits)
    hits, is_reranked, warnings = await gateway.engine.search(
        served, queries, options, timer, key.name, body.negative
    )
    fields = {
        "request_id": request_id,
        "index": served.name,
        "version": served.version,
        "representation": options.column,
        "candidates": options.candidates,
        "reranked": is_reranked,
        "warnings": warnings,
        "durations_ms": timer.all(),
    }
    return hits, fields


@api.post("/encode", tags=["search"], summary="Encode queries")
async def encode(
    request: Request, body: wire.EncodeRequest, key: KeyDependency, gateway: GatewayDependency
) -> wire.EncodeResponse:
    """Returns the query vectors for searching a representation."""
    served = gateway.served(key, body.index)
    request_id = _log(request, index=served.name, queries=len(body.queries))
    check_num_queries(body.queries, gateway.settings.limits)
    info = served.representation(body.representation)
    encoded = await gateway.engine.encode(served, body.queries, info.name, key.name)
    return wire.EncodeResponse(
        request_id=request_id,
        index=served.name,
        representation=info.name,
        fingerprint=info.encoder.fingerprint,
        queries=[
            wire.EncodedQuery(
                vectors=query.tokens[0].tolist(),
                token_texts=query.token_texts[0],
                single_vector=None if query.pooled is None else query.pooled[0].tolist(),
            )
            for query in encoded
        ],
    )


@api.post("/rerank", tags=["search"], summary="Score items for a query")
async def rerank(
    request: Request, body: wire.RerankRequest, key: KeyDependency, gateway: GatewayDependency
) -> wire.RerankResponse:
    """Scores the given items for a query, by vectors or a reranker, and returns them best first."""
    served = gateway.served(key, body.index)
    request_id = _log(request, index=served.name, items=len(body.item_ids))
    name: str | None = None
    warnings: list[str] = []
    if body.name != VECTORS:
        check_reranker(served, body.name, "name")
        num_items = len(set(body.item_ids))
        check_num_pairs(num_items, 1, gateway.settings.limits, "item_ids")
        scores, warnings = await gateway.engine.score_by_model(
            served, body.name, body.query, body.item_ids, key.name
        )
    else:
        name = served.representation(body.representation).name
        scores = await gateway.engine.score_by_vectors(
            served, body.query, name, body.item_ids, key.name
        )
    best = list(scores.items())[: body.k]
    return wire.RerankResponse(
        request_id=request_id,
        index=served.name,
        version=served.version,
        representation=name,
        results=[wire.ScoredItem(item_id=item_id, score=score) for item_id, score in best],
        missing=[i for i in dict.fromkeys(body.item_ids) if i not in scores],
        warnings=warnings,
    )


# -- indexes and items -----------------------------------------------------------------------------

IndexName = Annotated[
    str | None,
    Query(
        description="Name of the index. Optional if the access key can access only one index.",
        max_length=256,
    ),
]
ItemId = Annotated[str, Path(description="Id of the item.")]
EvaluationId = Annotated[str, Path(description="Id of the evaluation.")]


@api.get("/indexes", tags=["indexes"], summary="List the indexes and federations")
async def indexes(key: KeyDependency, gateway: GatewayDependency) -> wire.IndexList:
    """Lists the indexes, with their representations, and federations that the key can access."""
    served, names = gateway.engine.indexes, gateway.visible_federations(key)
    return wire.IndexList(
        indexes=[index_info(served[name]) for name in gateway.visible_indexes(key)],
        federations=[federation_info(served.federation(name)) for name in names],
    )


@api.get("/items/{item_id:path}", tags=["indexes"], summary="Get an item")
async def item(
    request: Request,
    item_id: ItemId,
    key: KeyDependency,
    gateway: GatewayDependency,
    index: IndexName = None,
) -> wire.Item:
    """Returns the stored fields of an item, without its vectors."""
    served = gateway.served(key, index)
    _log(request, index=served.name)
    row = await gateway.engine.item(served, item_id, key.name)
    if row is None:
        raise ApiError("not_found", f"unknown item {item_id!r}", "item_id")
    return wire.Item(index=served.name, version=served.version, **row)


@api.delete("/items", tags=["indexes"], summary="Delete items")
async def delete_items(
    request: Request, body: wire.DeleteRequest, key: KeyDependency, gateway: GatewayDependency
) -> wire.DeleteResponse:
    """Deletes the given items, or all items that satisfy a filter, in the index itself.

    Requires an access key with `delete: true`. If a job is writing to the index, the response is
    409. If the source still lists a deleted item, the next run of the index job adds it again.
    """
    gateway.check_delete(key)
    served = gateway.served(key, body.index)
    request_id = _log(request, index=served.name, dry_run=body.dry_run)
    counts = await gateway.engine.delete(served, body.item_ids, body.filter, body.dry_run, key.name)
    version = gateway.engine.indexes[served.name].version
    return wire.DeleteResponse(request_id=request_id, index=served.name, version=version, **counts)


@api.get(
    "/previews/{item_id:path}",
    tags=["indexes"],
    summary="Get the image or audio of an item",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}, "image/png": {}, "image/webp": {}, "audio/wav": {}}}
    },
)
async def preview(
    request: Request,
    item_id: ItemId,
    key: KeyDependency,
    gateway: GatewayDependency,
    index: IndexName = None,
    media: Annotated[
        Literal["image", "audio"],
        Query(description="Type of the preview: an image or audio."),
    ] = "image",
    seconds: Annotated[
        float | None,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Time of the video frame in the parent, in seconds. "
            "Default: the middle of the item.",
        ),
    ] = None,
    width: Annotated[
        int | None,
        Query(
            ge=16,
            le=4096,
            description="Maximum width and height of the image in pixels, for thumbnails. "
            "Default: the full size.",
        ),
    ] = None,
) -> Response:
    """Returns the image (JPEG, PNG or WebP) or the audio (WAV) of an item."""
    served = gateway.served(key, index)
    _log(request, index=served.name, media=media)
    etag = preview_tag(served, item_id, media, seconds, width)
    if is_current(request, etag):
        return not_modified(etag, PREVIEW_HEADERS)
    data, media_type = await gateway.engine.preview(
        served, item_id, media, seconds, width, key.name
    )
    return Response(data, media_type=media_type, headers={**PREVIEW_HEADERS, "ETag": etag})


# -- evaluations -----------------------------------------------------------------------------------


@api.post("/evaluations", tags=["evaluations"], status_code=202, summary="Create an evaluation")
async def evaluate(
    request: Request,
    body: wire.EvaluationRequest,
    key: KeyDependency,
    gateway: GatewayDependency,
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=256,
            description="Unique key of the request. A repeated request with the same key returns "
            "the evaluation created by the first one.",
        ),
    ] = None,
) -> wire.Evaluation:
    """Queues an evaluation of an index and returns it. Poll it by its id for the results."""
    store, served = gateway.evaluations(key), gateway.served(key, body.index)
    for name in body.representations:
        served.representation(name)
    name = await run_in_threadpool(store.create, body, served.name, key.name, idempotency_key)
    _log(request, index=served.name, evaluation=name)
    return await _evaluation(store, key, name)


@api.get("/evaluations", tags=["evaluations"], summary="List evaluations")
async def evaluations(
    key: KeyDependency,
    gateway: GatewayDependency,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of evaluations.")] = 100,
) -> wire.EvaluationList:
    """Lists the evaluations created with the access key and those of jobs, newest first."""
    store = gateway.evaluations(key)
    return wire.EvaluationList(
        evaluations=await run_in_threadpool(_list_evaluations, store, key, limit)
    )


def _list_evaluations(store: EvaluationStore, key: Key, limit: int) -> list[wire.Evaluation]:
    evaluations = []
    for name in store.names():
        with contextlib.suppress(ApiError):  # deleted concurrently
            request, evaluation = store.evaluation(name)
            if request["key"] in (key.name, None) and key.can_access(request["index"]):
                evaluations.append(evaluation)
        if len(evaluations) == limit:
            break
    return evaluations


@api.get("/evaluations/{name}", tags=["evaluations"], summary="Get an evaluation")
async def evaluation(
    name: EvaluationId, key: KeyDependency, gateway: GatewayDependency
) -> wire.Evaluation:
    """Returns the state of an evaluation and, if it is done, its results."""
    return await _evaluation(gateway.evaluations(key), key, name)


async def _evaluation(store: EvaluationStore, key: Key, name: str) -> wire.Evaluation:
    """Returns an evaluation of the access key or of a job, whose key is None."""
    request, evaluation = await run_in_threadpool(store.evaluation, name)
    if request["key"] not in (key.name, None) or not key.can_access(request["index"]):
        raise ApiError("not_found", f"unknown evaluation {name!r}")
    return evaluation


@api.get(
    "/evaluations/{name}/files/{path:path}",
    tags=["evaluations"],
    summary="Download a file of an evaluation",
    response_class=Response,
)
async def evaluation_file(
    name: EvaluationId,
    path: Annotated[str, Path(description="Name of the file, from `files` of the evaluation.")],
    key: KeyDependency,
    gateway: GatewayDependency,
) -> Response:
    """Returns a file of a finished evaluation, such as its report."""
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    data, media_type = await run_in_threadpool(store.file, name, path)
    # A browser displays the report as a page of this server, so scripts and requests are disabled.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=media_type, headers=headers)


@api.post("/evaluations/{name}:cancel", tags=["evaluations"], summary="Cancel an evaluation")
async def cancel(
    name: EvaluationId, key: KeyDependency, gateway: GatewayDependency
) -> wire.Evaluation:
    """Cancels a queued or running evaluation."""
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    await run_in_threadpool(store.cancel, name)
    return await _evaluation(store, key, name)


@api.delete(
    "/evaluations/{name}", tags=["evaluations"], status_code=204, summary="Delete an evaluation"
)
async def delete(name: EvaluationId, key: KeyDependency, gateway: GatewayDependency) -> None:
    """Deletes a finished evaluation."""
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    await run_in_threadpool(store.delete, name)

"""The routes of the HTTP API."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from pipeline.serve import wire
from pipeline.serve.answers import index_info
from pipeline.serve.engine import Timer
from pipeline.serve.errors import ApiError
from pipeline.serve.evaluations import Store
from pipeline.serve.gateway import Gateway
from pipeline.serve.inputs import check_num_pairs, check_num_queries, search_options
from pipeline.serve.keys import Key
from pipeline.serve.metrics import gathered

_bearer = HTTPBearer(auto_error=False, description="an access key")


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


def _key(
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Key:
    key = request.state.key
    _gateway(request).auth.limit(key)
    return key


Allowed = Annotated[Key, Depends(_key)]
With = Annotated[Gateway, Depends(_gateway)]
public = APIRouter()
api = APIRouter(prefix="/v1")


def _log(request: Request, **fields: Any) -> str:
    """Adds fields to the log entry of a request; returns its id."""
    request.state.about = {**getattr(request.state, "about", {}), **fields}
    return request.scope["maxray_request_id"]


# -- routes without a key --------------------------------------------------------------------------


@public.get("/healthz", tags=["operation"], summary="Check that the gateway runs")
async def healthz() -> dict[str, str]:
    """Returns 200 while the gateway runs."""
    return {"status": "ok"}


@public.get("/readyz", tags=["operation"], summary="Check that every stage answers")
async def readyz(gateway: With) -> dict[str, str]:
    """Returns 200 if every stage answers."""
    gateway.check_running()
    await gateway.engine.calls.check()
    return {"status": "ready"}


@public.get(
    "/metrics",
    tags=["operation"],
    summary="Prometheus metrics of all nodes",
    response_class=PlainTextResponse,
)
async def metrics(request: Request, gateway: With) -> Response:
    """Returns the metrics of all nodes in the text format of Prometheus."""
    if gateway.auth.has_keys:
        gateway.auth.key(request)
    try:
        text = await gathered()
    except OSError as error:
        raise ApiError("unavailable", str(error)) from None
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# -- search ----------------------------------------------------------------------------------------


@api.post("/search", tags=["search"], summary="Search with one query")
async def search(
    request: Request, asked: wire.SearchRequest, key: Allowed, gateway: With
) -> wire.SearchAnswer:
    """Returns the best items for a query."""
    (hits,), fields = await _search(request, [asked.query], asked, key, gateway)
    return wire.SearchAnswer(hits=hits, **fields)


@api.post("/search:batch", tags=["search"], summary="Search with many queries")
async def search_batch(
    request: Request, asked: wire.BatchRequest, key: Allowed, gateway: With
) -> wire.BatchAnswer:
    """Returns the best items for each of many queries."""
    check_num_queries(asked.queries, gateway.settings.limits)
    results, fields = await _search(request, asked.queries, asked, key, gateway)
    return wire.BatchAnswer(results=results, **fields)


async def _search(
    request: Request,
    queries: Sequence[wire.Query],
    asked: wire.SearchOptions,
    key: Key,
    gateway: Gateway,
) -> tuple[list[list[wire.Hit]], dict[str, Any]]:
    """Returns the hits of each query, and the other fields of the answer."""
    served = gateway.served(key, asked.index)
    request_id = _log(request, index=served.name, k=asked.k, queries=len(queries))
    options = search_options(asked, served, len(queries), gateway.settings.limits)
    timer = Timer(gateway.metrics.stage)
    hits, is_reranked, warnings = await gateway.engine.search(
        served, queries, options, timer, key.name
    )
    fields = {
        "request_id": request_id,
        "index": served.name,
        "version": served.version,
        "representation": options.column,
        "reranked": is_reranked,
        "warnings": warnings,
        "milliseconds": timer.all(),
    }
    return hits, fields


@api.post("/encode", tags=["search"], summary="Encode queries")
async def encode(
    request: Request, asked: wire.EncodeRequest, key: Allowed, gateway: With
) -> wire.EncodeAnswer:
    """Encodes queries for a representation."""
    served = gateway.served(key, asked.index)
    request_id = _log(request, index=served.name, queries=len(asked.queries))
    check_num_queries(asked.queries, gateway.settings.limits)
    info = served.representation(asked.representation)
    encoded = await gateway.engine.encode(served, asked.queries, info.name, key.name)
    return wire.EncodeAnswer(
        request_id=request_id,
        index=served.name,
        representation=info.name,
        fingerprint=info.encoder.fingerprint,
        queries=[
            wire.EncodedQuery(
                vectors=query.tokens[0].tolist(),
                token_texts=query.token_texts[0],
                pooled=None if query.pooled is None else query.pooled[0].tolist(),
            )
            for query in encoded
        ],
    )


@api.post("/rerank", tags=["search"], summary="Rerank given items")
async def rerank(
    request: Request, asked: wire.RerankRequest, key: Allowed, gateway: With
) -> wire.RerankAnswer:
    """Scores the given items for a query."""
    served = gateway.served(key, asked.index)
    request_id = _log(request, index=served.name, items=len(asked.item_ids))
    name: str | None = None
    warnings: list[str] = []
    if asked.by == "edje":
        num_items = len(set(asked.item_ids))
        check_num_pairs(num_items, 1, gateway.settings.limits, "item_ids")
        scores, warnings = await gateway.engine.score_by_edje(
            served, asked.query, asked.item_ids, key.name
        )
    else:
        name = served.representation(asked.representation).name
        scores = await gateway.engine.score_by_vectors(
            served, asked.query, name, asked.item_ids, key.name
        )
    best = list(scores.items())[: asked.k]
    return wire.RerankAnswer(
        request_id=request_id,
        index=served.name,
        version=served.version,
        representation=name,
        results=[wire.Scored(item_id=item_id, score=score) for item_id, score in best],
        missing=[i for i in dict.fromkeys(asked.item_ids) if i not in scores],
        warnings=warnings,
    )


# -- indexes and items -----------------------------------------------------------------------------

IndexName = Annotated[
    str | None, Query(description="Name of the index; default: the only one", max_length=256)
]


@api.get("/indexes", tags=["indexes"], summary="List the indexes")
async def indexes(key: Allowed, gateway: With) -> wire.IndexList:
    """Lists the served indexes that the access key may see."""
    served = [gateway.engine.indexes[name] for name in gateway.visible_indexes(key)]
    return wire.IndexList(indexes=[index_info(each) for each in served])


@api.get("/items/{item_id:path}", tags=["indexes"], summary="Get an item")
async def item(
    request: Request, item_id: str, key: Allowed, gateway: With, index: IndexName = None
) -> wire.Item:
    """Returns the stored columns of an item, without its vectors."""
    served = gateway.served(key, index)
    _log(request, index=served.name)
    row = await gateway.engine.item(served, item_id, key.name)
    if row is None:
        raise ApiError(
            "not_found",
            f"item_id must be the id of an item in the index, got {item_id!r}",
            "item_id",
        )
    return wire.Item(index=served.name, version=served.version, **row)


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
    item_id: str,
    key: Allowed,
    gateway: With,
    index: IndexName = None,
    media: Literal["image", "audio"] = "image",
    seconds: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
) -> Response:
    """Returns the image or the audio of an item."""
    served = gateway.served(key, index)
    _log(request, index=served.name, media=media)
    data, media_type = await gateway.engine.preview(served, item_id, media, seconds, key.name)
    headers = {"Cache-Control": "private, max-age=300", "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=media_type, headers=headers)


# -- evaluations -----------------------------------------------------------------------------------


@api.post("/evaluations", tags=["evaluations"], status_code=202, summary="Create an evaluation")
async def evaluate(
    request: Request,
    asked: wire.EvaluationRequest,
    key: Allowed,
    gateway: With,
    idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> wire.Evaluation:
    """Queues an evaluation."""
    store, served = gateway.evaluations(key), gateway.served(key, asked.index)
    for name in asked.representations:
        served.representation(name)
    name = await run_in_threadpool(store.create, asked, served.name, key.name, idempotency_key)
    _log(request, index=served.name, evaluation=name)
    return await _evaluation(store, key, name)


@api.get("/evaluations", tags=["evaluations"], summary="List evaluations")
async def evaluations(
    key: Allowed, gateway: With, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> wire.EvaluationList:
    """Lists the evaluations of the access key, newest first."""
    store = gateway.evaluations(key)
    return wire.EvaluationList(evaluations=await run_in_threadpool(_list, store, key, limit))


def _list(store: Store, key: Key, limit: int) -> list[wire.Evaluation]:
    found = []
    for name in store.names():
        with contextlib.suppress(ApiError):  # it was deleted meanwhile
            request, evaluation = store.evaluation(name)
            if request["key"] == key.name and key.may_see(request["index"]):
                found.append(evaluation)
        if len(found) == limit:
            break
    return found


@api.get("/evaluations/{name}", tags=["evaluations"], summary="Get an evaluation")
async def evaluation(name: str, key: Allowed, gateway: With) -> wire.Evaluation:
    """Returns the state of an evaluation, and its results when it is done."""
    return await _evaluation(gateway.evaluations(key), key, name)


async def _evaluation(store: Store, key: Key, name: str) -> wire.Evaluation:
    """Returns an evaluation of this key; those of others are unknown to it."""
    request, found = await run_in_threadpool(store.evaluation, name)
    if request["key"] != key.name or not key.may_see(request["index"]):
        raise ApiError("not_found", f"unknown evaluation {name!r}")
    return found


@api.get(
    "/evaluations/{name}/files/{path:path}",
    tags=["evaluations"],
    summary="Download a file of an evaluation",
    response_class=Response,
)
async def evaluation_file(name: str, path: str, key: Allowed, gateway: With) -> Response:
    """Returns a file of a finished evaluation, such as its report."""
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    data, media_type = await run_in_threadpool(store.file, name, path)
    # The browser shows the report as a page of this server: it may run and load nothing.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=media_type, headers=headers)


@api.post("/evaluations/{name}:cancel", tags=["evaluations"], summary="Cancel an evaluation")
async def cancel(name: str, key: Allowed, gateway: With) -> wire.Evaluation:
    """Cancels a queued or running evaluation."""
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    await run_in_threadpool(store.cancel, name)
    return await _evaluation(store, key, name)


@api.delete(
    "/evaluations/{name}", tags=["evaluations"], status_code=204, summary="Delete an evaluation"
)
async def delete(name: str, key: Allowed, gateway: With) -> None:
    """Deletes an evaluation that has ended."""
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    await run_in_threadpool(store.delete, name)

"""The HTTP API: who may ask, what is asked, and the answer or the error in one form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import pipeline
from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.schema import ITEM
from pipeline.search.searcher import check_weights
from pipeline.serve import wire
from pipeline.serve.engine import Engine, Served, Timer
from pipeline.serve.errors import CODES, ApiError, of_spec_error, of_validation
from pipeline.serve.evaluations import Store
from pipeline.serve.front import REQUEST_ID
from pipeline.serve.keys import ANYBODY, VARIABLE, Key, Keys, Rates
from pipeline.serve.metrics import Metrics, gathered
from pipeline.serve.settings import ServeSpec, is_loopback
from pipeline.serve.turns import Shares

log = logging.getLogger("ray.serve")

#: Seconds between two looks at whether all requests are answered.
DRAIN_LOOK_EVERY = 0.05
#: Methods that a path can have.
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
#: Headers of what asks for somebody else.
RELAYED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Gateway:
    """What the routes need: the engine, the keys, the rates, and how much is under way.

    Args:
        store: of the evaluations; None where the settings have no folder for them.
    """

    def __init__(
        self, settings: ServeSpec, engine: Engine, metrics: Metrics, store: Store | None = None
    ):
        self.settings, self.engine, self.metrics, self.store = settings, engine, metrics, store
        self.keys = Keys(settings.keys) if settings.keys or VARIABLE in os.environ else None
        self.rates = Rates(settings.limits.requests_per_second, settings.limits.burst)
        are_shared = self.keys is not None
        self.in_flight = Shares(settings.limits.in_flight, are_shared=are_shared)
        self.bodies = Shares(settings.limits.bodies, are_shared=are_shared)
        self.drains = False

    def check_running(self) -> None:
        """Raises `ApiError` if the server takes no more requests."""
        if self.drains:
            raise ApiError("unavailable", "the server is being stopped")

    @contextlib.contextmanager
    def place(self, places: Shares, key: Key, what: str) -> Iterator[None]:
        """Holds one of the places that keys share.

        Raises:
            ApiError: there is none for this key at the moment.
        """
        if not places.take(key.name):
            held = "the server" if places.taken >= places.number else f"the key {key.name}"
            raise ApiError("unavailable", f"{held} has too many requests {what}")
        try:
            yield
        finally:
            places.give_back(key.name)

    async def drain(self) -> None:
        """Takes no more requests, and waits until those under way are answered."""
        self.drains = True
        end = time.monotonic() + self.settings.seconds.drain
        while self.in_flight.taken + self.bodies.taken and time.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK_EVERY)

    def key_of(self, request: Request) -> Key:
        """Who asks.

        Raises:
            ApiError: nobody who may.
        """
        if self.keys is None:
            # Whoever can reach this address without being on this machine needs a key. A proxy in
            # front of it is on this machine, and says for whom it asks.
            # So may a page in a browser on this machine be, under a name that leads here.
            server = (request.scope.get("server") or ("",))[0]
            client = (request.scope.get("client") or ("",))[0]
            names = [server, client, request.url.hostname]
            relayed = any(name in request.headers for name in RELAYED)
            if relayed or not all(map(is_loopback, names)):
                message = "this server has no access keys, and answers its own machine alone"
                raise ApiError("forbidden", message)
            return ANYBODY
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise ApiError("unauthenticated", "an access key is needed: Authorization: Bearer KEY")
        try:
            key = self.keys.of(given.strip())
        except SpecError as error:
            log.error("access keys: %s", error)
            raise of_spec_error(error) from None
        if key is None:
            raise ApiError("unauthenticated", "the access key is not known, or has expired")
        return key

    def served(self, key: Key, name: str | None) -> Served:
        """An index that the key may see."""
        seen = self.seen(key)
        if name is None and len(seen) == 1:
            return self.engine.served(seen[0])
        if name is None:
            legal = ", ".join(seen) or "none for this key"
            raise ApiError("invalid_argument", f"index: is missing; legal: {legal}", "index")
        if name not in seen:  # one that the key may not see is said not to be there
            raise ApiError("not_found", f"index: {name!r} is not served here", "index")
        return self.engine.served(name)

    def seen(self, key: Key) -> list[str]:
        """The names of the indexes that a key may see."""
        return [name for name in self.engine.names if key.may_see(name)]

    def evaluations(self, key: Key) -> Store:
        """The evaluations.

        Raises:
            ApiError: the server has none, or the key may not ask for any.
        """
        if self.store is None:
            raise ApiError("not_found", "this server runs no evaluations (evaluations.folder)")
        if not key.evaluate:
            raise ApiError("forbidden", f"the key {key.name} may not ask for evaluations")
        return self.store

    def limit(self, key: Key, cost: float = 1.0) -> None:
        """Counts a request of a key.

        Raises:
            ApiError: it has sent too many.
        """
        if waits := self.rates.take(key, cost):
            message = f"the key {key.name} has sent too many requests"
            raise ApiError("rate_limited", message, retry_after=waits)


def create_app(make: Callable[[], Awaitable[Gateway]]) -> FastAPI:
    """The application.

    Args:
        make: gives what the routes need, when the application starts.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        app.state.gateway = gateway = await make()
        yield
        await gateway.engine.stop()

    app = FastAPI(
        title="Maxray",
        summary="Multi-vector search, reranking and evaluation.",
        version=pipeline.__version__,
        lifespan=lifespan,
        responses={"default": {"model": wire.ErrorAnswer, "description": "any error"}},
    )
    app.include_router(_public)
    app.include_router(_api)
    app.add_middleware(Guard)
    app.add_exception_handler(ApiError, lambda request, error: _failed(request, error))
    app.add_exception_handler(
        SpecError, lambda request, error: _failed(request, of_spec_error(error))
    )
    app.add_exception_handler(
        RequestValidationError,
        lambda request, error: _failed(request, of_validation(list(error.errors()))),
    )
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unexpected)
    return app


# -- errors ----------------------------------------------------------------------------------------


def _failed(request: Request, error: ApiError) -> Response:
    body = error.answer(request.scope.get("maxray_request_id"))
    return JSONResponse(body.model_dump(), error.status, error.headers())


def _of_http(request: Request, error: HTTPException) -> Response:
    code = CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal")
    response = _failed(request, ApiError(code, str(error.detail)))
    if error.headers:
        response.headers.update(error.headers)
    if error.status_code == 405:  # Starlette names the methods of one route only
        scopes = {method: {**request.scope, "method": method} for method in METHODS}
        allowed = [
            method
            for method, scope in scopes.items()
            if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
        ]
        response.headers["Allow"] = ", ".join(allowed)
    return response


def _unexpected(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return _failed(request, ApiError("internal", "something went wrong on the server"))


# -- what holds for every request ------------------------------------------------------------------


class Guard:
    """Asks who sends a request, bounds its size and how many are in progress, and logs it.

    Queries are not logged.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        headers = {name: value for name, value in scope["headers"]}
        # Ray's proxy sends the id back, which the front gave to the request.
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not REQUEST_ID.fullmatch(request_id):  # without the front
            request_id = str(uuid.uuid4())
        scope["maxray_request_id"] = request_id
        start, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admitted(scope, receive, sending, headers, gateway)
        except ApiError as error:
            await _failed(Request(scope), error)(scope, receive, sending)
        if not scope["path"].endswith(("/healthz", "/readyz", "/metrics")):
            _note(gateway, scope, status, time.perf_counter() - start)

    async def _admitted(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        gateway: Gateway,
    ) -> None:
        """Passes a request on, its body read, if its key lets it in and has a place for it.

        Raises:
            ApiError: it is refused.
        """
        if "/v1/" not in scope["path"]:  # small, without a body and without a key
            await self._app(scope, receive, send)
            return
        gateway.check_running()
        key = gateway.key_of(Request(scope))
        scope.setdefault("state", {})["key"] = key
        with gateway.place(gateway.bodies, key, "whose body has not arrived"):
            body = await _body(receive, headers, gateway.settings)
        if body is None:  # nobody waits for the answer any more
            return
        given = False

        async def receiving() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        with gateway.place(gateway.in_flight, key, "in progress"):
            gateway.metrics.in_flight(gateway.in_flight.taken)
            try:
                await self._app(scope, receiving, send)
            finally:
                gateway.metrics.in_flight(gateway.in_flight.taken - 1)


async def _body(
    receive: Receive, headers: Mapping[bytes, bytes], settings: ServeSpec
) -> bytes | None:
    """The body of a request; None if the client gave up.

    Raises:
        ApiError: it is too large, which is said before all of it has come, or it comes too slowly.
    """
    most, seconds = settings.limits.body_bytes, settings.seconds.body
    too_large = ApiError("too_large", f"the body is larger than {most:,} bytes")
    said = headers.get(b"content-length", b"")
    if said.isdigit() and int(said) > most:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError("bad_request", f"the body took longer than {seconds:g} s to come") from None
    return bytes(body)


def _note(gateway: Gateway, scope: Scope, status: int, seconds: float) -> None:
    """Counts and logs an answered request."""
    route = getattr(scope.get("route"), "path", "none")
    key: Key | None = scope.get("state", {}).get("key")
    status = status or 499  # nobody waited for the answer
    label = key.label if key else ""
    gateway.metrics.request(route, scope["method"], status, label, seconds)
    said = {
        "event": "request",
        "request_id": scope["maxray_request_id"],
        "key": key.name if key else "",
        "method": scope["method"],
        "route": route,
        "status": status,
        "milliseconds": round(1e3 * seconds, 1),
        **scope.get("state", {}).get("about", {}),
    }
    log.info(json.dumps(said))


# -- who asks --------------------------------------------------------------------------------------

_bearer = HTTPBearer(auto_error=False, description="an access key")


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


def _key(
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Key:
    gateway, key = _gateway(request), request.state.key
    gateway.limit(key)
    return key


Allowed = Annotated[Key, Depends(_key)]
With = Annotated[Gateway, Depends(_gateway)]
_public = APIRouter()
_api = APIRouter(prefix="/v1")


def _about(request: Request, **said: Any) -> str:
    """Adds to what is logged of a request; returns its id."""
    request.state.about = {**getattr(request.state, "about", {}), **said}
    return request.scope["maxray_request_id"]


# -- routes without a key --------------------------------------------------------------------------


@_public.get("/healthz", tags=["operation"], summary="Whether the gateway runs")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@_public.get("/readyz", tags=["operation"], summary="Whether every stage answers")
async def readyz(gateway: With) -> dict[str, str]:
    gateway.check_running()
    await gateway.engine.check()
    return {"status": "ready"}


@_public.get(
    "/metrics",
    tags=["operation"],
    summary="Prometheus metrics of all nodes",
    response_class=PlainTextResponse,
)
async def metrics(request: Request, gateway: With) -> Response:
    if gateway.keys is not None:
        gateway.key_of(request)
    try:
        text = await gathered()
    except OSError as error:
        raise ApiError("unavailable", str(error)) from None
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# -- search ----------------------------------------------------------------------------------------


def _check_options(gateway: Gateway, asked: wire.SearchOptions, num_queries: int) -> None:
    limits = gateway.settings.limits
    depth = max(asked.k, asked.rerank.pool if asked.rerank else 0)
    field = "k" if asked.k >= depth else "rerank.depth"
    most = min(limits.k, max(limits.batch_hits // num_queries, 1))
    if depth > most:
        raise ApiError("invalid_argument", f"{field}: {depth} is too many; legal: {most}", field)
    if asked.rerank and asked.rerank.by == "edje":
        _check_pairs(gateway, asked.rerank.pool, num_queries, "rerank.depth")
    check_weights(asked.weights, asked.score)


def _check_pairs(gateway: Gateway, num_items: int, num_queries: int, field: str) -> None:
    most = gateway.settings.limits.pairs // num_queries
    if num_items > most:
        message = f"{field}: EDJE is to read too many items, {num_items}; legal: {most} at most"
        raise ApiError("invalid_argument", message, field)


@_api.post("/search", tags=["search"], summary="The best items for a query")
async def search(
    request: Request, asked: wire.SearchRequest, key: Allowed, gateway: With
) -> wire.SearchAnswer:
    about, (hits,) = await _found(request, [asked.query], asked, key, gateway)
    return wire.SearchAnswer(hits=hits, **about)


@_api.post("/search:batch", tags=["search"], summary="The best items for each of many queries")
async def search_batch(
    request: Request, asked: wire.BatchRequest, key: Allowed, gateway: With
) -> wire.BatchAnswer:
    _check_many(gateway, asked.queries)
    about, results = await _found(request, asked.queries, asked, key, gateway)
    return wire.BatchAnswer(results=results, **about)


async def _found(
    request: Request,
    queries: Sequence[wire.Query],
    asked: wire.SearchOptions,
    key: Key,
    gateway: Gateway,
) -> tuple[dict[str, Any], list[list[wire.Hit]]]:
    """What an answer says beside its hits, and the hits of each query."""
    served = gateway.served(key, asked.index)
    request_id = _about(request, index=served.name, k=asked.k, queries=len(queries))
    _check_options(gateway, asked, len(queries))
    timer = Timer(gateway.metrics.stage)
    name, reranked, hits, warnings = await gateway.engine.search(
        served, queries, asked, timer, key.name
    )
    about = {
        "request_id": request_id,
        "index": served.name,
        "version": served.version,
        "representation": name,
        "reranked": reranked,
        "warnings": warnings,
        "milliseconds": timer.all(),
    }
    return about, hits


def _check_many(gateway: Gateway, queries: Sequence[wire.Query]) -> None:
    limits = gateway.settings.limits
    num_chars = sum(len(text) for text in map(wire.text_of, queries) if text)
    for number, most, what in (
        (len(queries), limits.batch, ""),
        (num_chars, limits.batch_chars, " characters"),
    ):
        if number > most:
            message = f"queries: {number:,}{what} are too many; legal: {most:,} at most"
            raise ApiError("invalid_argument", message, "queries")


@_api.post("/encode", tags=["search"], summary="Queries as vectors")
async def encode(
    request: Request, asked: wire.EncodeRequest, key: Allowed, gateway: With
) -> wire.EncodeAnswer:
    served = gateway.served(key, asked.index)
    request_id = _about(request, index=served.name, queries=len(asked.queries))
    _check_many(gateway, asked.queries)
    name, info = served.representation(asked.representation)
    encoded = await gateway.engine.encode(asked.queries, name, info, key.name)
    return wire.EncodeAnswer(
        request_id=request_id,
        index=served.name,
        representation=name,
        fingerprint=info.encoder.fingerprint,
        queries=[
            wire.EncodedQuery(
                vectors=e.tokens_MD.tolist(),
                token_texts=e.token_texts,
                pooled=None if e.pooled_P is None else e.pooled_P.tolist(),
            )
            for e in encoded
        ],
    )


@_api.post("/rerank", tags=["search"], summary="Scores of given items")
async def rerank(
    request: Request, asked: wire.RerankRequest, key: Allowed, gateway: With
) -> wire.RerankAnswer:
    served = gateway.served(key, asked.index)
    request_id = _about(request, index=served.name, items=len(asked.item_ids))
    name, warnings = None, []
    if asked.by == "edje":
        _check_pairs(gateway, len(set(asked.item_ids)), 1, "item_ids")
        scores, warnings = await gateway.engine.read_jointly(
            served, asked.query, asked.item_ids, key.name
        )
    else:
        second = served.representation(asked.representation)
        name = second[0]
        (scores,) = await gateway.engine.score_again(
            served, [asked.query], None, second, [asked.item_ids], key.name
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

IndexName = Annotated[str | None, Query(description="default: the only one", max_length=256)]


@_api.get("/indexes", tags=["indexes"], summary="What is served")
async def indexes(key: Allowed, gateway: With) -> wire.IndexList:
    served = [gateway.engine.served(name) for name in gateway.seen(key)]
    return wire.IndexList(indexes=[_index_info(each) for each in served])


def _index_info(served: Served) -> wire.IndexInfo:
    index = served.searcher.index
    representations = [_representation(info) for info in index.representations().values()]
    for info in index.rerank_columns.values():
        representations.append(
            wire.Representation(
                name=info.name,
                role="rerank",
                dim=info.dim,
                scores=[],
                queries=[],
                encoder=info.encoder,
                compressor=None,
                codec=None,
            )
        )
    return wire.IndexInfo(
        name=served.name,
        version=served.version,
        num_items=len(index),
        default_representation=(
            served.representation(None)[0] if index.representations() else None
        ),
        representations=representations,
        edje=served.spec.edje is not None,
        columns={f.name: str(f.type) for f in index.schema if f.name in ITEM.names},
    )


def _representation(info: RepresentationInfo) -> wire.Representation:
    """Describes a searchable representation."""
    return wire.Representation(
        name=info.name,
        role="search",
        dim=info.dim,
        scores=["late", "single", "hybrid"] if info.pooled_column else ["late"],
        queries=[*info.encoder.query_kinds, "vectors"],
        encoder=info.encoder.name,
        compressor=info.compressor["name"],
        codec=info.codec["name"],
    )


@_api.get("/items/{item_id:path}", tags=["indexes"], summary="What is stored of an item")
async def item(
    request: Request, item_id: str, key: Allowed, gateway: With, index: IndexName = None
) -> wire.Item:
    served = gateway.served(key, index)
    _about(request, index=served.name)
    row = await gateway.engine.item(served, item_id, key.name)
    if row is None:
        raise ApiError("not_found", f"item_id: {item_id!r} is not in the index", "item_id")
    return wire.Item(index=served.name, version=served.version, **row)


@_api.get(
    "/previews/{item_id:path}",
    tags=["indexes"],
    summary="What an item looks or sounds like",
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
    what: Literal["picture", "sound"] = "picture",
    seconds: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
) -> Response:
    served = gateway.served(key, index)
    _about(request, index=served.name, what=what)
    data, media_type = await gateway.engine.preview(served, item_id, what, seconds, key.name)
    headers = {"Cache-Control": "private, max-age=300", "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=media_type, headers=headers)


# -- evaluations -----------------------------------------------------------------------------------


@_api.post("/evaluations", tags=["evaluations"], status_code=202, summary="Asks for an evaluation")
async def evaluate(
    request: Request,
    asked: wire.EvaluationRequest,
    key: Allowed,
    gateway: With,
    idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> wire.Evaluation:
    store, served = gateway.evaluations(key), gateway.served(key, asked.index)
    for name in asked.representations:
        served.representation(name)
    create = store.create, asked, served.name, key.name, idempotency_key
    name = await run_in_threadpool(*create)
    _about(request, index=served.name, evaluation=name)
    return await _evaluation(store, key, name)


@_api.get("/evaluations", tags=["evaluations"], summary="Your evaluations, the newest first")
async def evaluations(
    key: Allowed, gateway: With, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> wire.EvaluationList:
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


@_api.get("/evaluations/{name}", tags=["evaluations"], summary="How far an evaluation is")
async def evaluation(name: str, key: Allowed, gateway: With) -> wire.Evaluation:
    return await _evaluation(gateway.evaluations(key), key, name)


async def _evaluation(store: Store, key: Key, name: str) -> wire.Evaluation:
    """An evaluation of this key; those of others are not known to it."""
    request, found = await run_in_threadpool(store.evaluation, name)
    if request["key"] != key.name or not key.may_see(request["index"]):
        raise ApiError("not_found", f"evaluation: {name!r} is not known")
    return found


@_api.get(
    "/evaluations/{name}/files/{path:path}",
    tags=["evaluations"],
    summary="A run, the report, a table of an evaluation",
    response_class=Response,
)
async def evaluation_file(name: str, path: str, key: Allowed, gateway: With) -> Response:
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    data, media_type = await run_in_threadpool(store.file, name, path)
    # The report is a page of this server's: it may run nothing, and load nothing.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(data, media_type=media_type, headers=headers)


@_api.post("/evaluations/{name}:cancel", tags=["evaluations"], summary="Ends an evaluation")
async def cancel(name: str, key: Allowed, gateway: With) -> wire.Evaluation:
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    await run_in_threadpool(store.cancel, name)
    return await _evaluation(store, key, name)


@_api.delete(
    "/evaluations/{name}", tags=["evaluations"], status_code=204, summary="Removes an evaluation"
)
async def delete(name: str, key: Allowed, gateway: With) -> None:
    store = gateway.evaluations(key)
    await _evaluation(store, key, name)
    await run_in_threadpool(store.delete, name)

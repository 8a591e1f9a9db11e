"""Application that handles HTTP requests, with its routes, middleware and error handlers."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from pipeline import __version__
from pipeline.config import SpecError
from pipeline.serve import browse, routes, search_page, wire
from pipeline.serve.errors import (
    CODES,
    ApiError,
    error_response,
    from_spec_error,
    from_validation_errors,
)
from pipeline.serve.gateway import Gateway
from pipeline.serve.guard import Guard

log = logging.getLogger("ray.serve")

#: HTTP methods that a route can have.
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class Application(FastAPI):
    """Application whose OpenAPI schema omits HEAD, which every GET route answers as well."""

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI schema."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Duplicate Operation ID")  # of GET and HEAD
            schema = super().openapi()
        for operations in schema["paths"].values():
            operations.pop("head", None)
        return schema


def _operation_id(route: APIRoute) -> str:
    method = min(route.methods or ["GET"]).lower()
    return re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method}")


def create_app(create_gateway: Callable[[], Awaitable[Gateway]]) -> FastAPI:
    """Returns the HTTP application, which creates its gateway when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.gateway = gateway = await create_gateway()
        yield
        await gateway.engine.indexes.stop()

    app = Application(
        title="Maxray",
        summary="Multimodal multi-vector search, reranking and evaluation.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # the pages of FastAPI load scripts from the internet
        redoc_url=None,
        responses={"default": {"model": wire.ErrorResponse, "description": "Error"}},
        generate_unique_id_function=_operation_id,
        telemetry={"tracing": False},  # its spans would not belong to the traces of Ray Serve
    )
    app.include_router(routes.public)
    app.include_router(browse.api)
    app.include_router(search_page.page)
    app.add_middleware(Guard)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


# FastAPI declares errors as `Exception` but calls each handler only for its registered class.


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request, error)


def _spec_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    return error_response(request, from_spec_error(error))


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(request, from_validation_errors(list(error.errors())))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal")
    response = error_response(request, ApiError(code, str(error.detail)))
    if error.headers:
        response.headers.update(error.headers)
    if error.status_code == 405:  # Starlette lists the methods of only one of the routes
        scopes = {method: {**request.scope, "method": method} for method in METHODS}
        allowed = [
            method
            for method, scope in scopes.items()
            if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
        ]
        response.headers["Allow"] = ", ".join(allowed)
    return response


def _unexpected_error(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error, extra={"event": "request_failed"})
    return error_response(request, ApiError("internal", "internal server error"))

"""Errors of the HTTP API. All of them use the same response schema."""

from __future__ import annotations

import re
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.config import SpecError, describe, field_path
from pipeline.serve.wire import QUERY_KINDS, ErrorCode, ErrorResponse, Problem

STATUS: dict[ErrorCode, int] = {
    "invalid_argument": 422,
    "bad_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "gone": 410,
    "too_large": 413,
    "unsupported_media_type": 415,
    "range_not_satisfiable": 416,
    "rate_limited": 429,
    "internal": 500,
    "unavailable": 503,
    "timeout": 504,
}
assert set(STATUS) == set(get_args(ErrorCode))
CODES = {status: code for code, status in STATUS.items()}

#: Name of the request body in messages.
BODY = "the body"
#: Default of the `Retry-After` header, in seconds.
RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """Error response of the API.

    Args:
        code: Error code, which determines the HTTP status.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        field: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        if retry_after is None and code == "unavailable":
            retry_after = RETRY_AFTER_SECONDS
        self.code, self.message, self.field, self.retry_after = code, message, field, retry_after

    @property
    def status(self) -> int:
        """HTTP status."""
        return STATUS[self.code]

    def response(self, request_id: str | None) -> ErrorResponse:
        """Returns the body of the response."""
        return ErrorResponse(
            error=Problem(
                code=self.code, message=self.message, field=self.field, request_id=request_id
            )
        )

    def headers(self) -> dict[str, str]:
        """Returns the response headers that depend on the error, such as `Retry-After`."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.code == "unauthenticated":
            headers["WWW-Authenticate"] = "Bearer"
        if self.code == "unsupported_media_type":
            headers["Accept-Encoding"] = "identity"
        return headers


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """Returns the response for a failed request."""
    body = error.response(request.scope.get("maxray_request_id"))
    # Browsers would keep the status 410 for ever, also if the file comes back.
    headers = {**error.headers(), "Cache-Control": "no-store"}
    return JSONResponse(body.model_dump(), error.status, headers)


def from_spec_error(error: SpecError) -> ApiError:
    """Converts a `SpecError` to an error of the API.

    Fields have the same names as the arguments of a searcher. Paths of the server are removed from
    the message, and errors in its settings or files are reported without details.
    """
    field = error.field
    if field == "documents":
        message = "the file of the item was changed or removed after it was indexed"
        return ApiError("gone", message)
    if field in SERVER_FIELDS:
        return ApiError("unavailable", f"the server cannot currently read {SERVER_FIELDS[field]}")
    return ApiError("invalid_argument", _message(field, error), field)


#: Fields of errors that concern the server rather than the request, and their descriptions.
SERVER_FIELDS = {
    "index": "the index",
    "cache": "the local cache of the index",
    "keys": "the access keys",
    "device": "the device",
    "name": "a component of the index",
    "reranker": "a reranker, its endpoint or its tokens in the index",
}


#: Pattern of file paths in the error messages of Lance.
_PATH = re.compile(r"/?(?:[\w.-]+/){2,}[\w.-]*")


def _message(field: str, error: SpecError) -> str:
    rule = _PATH.sub("...", error.rule)
    problem = error.problem and _PATH.sub("...", error.problem)
    return str(type(error)(field, error.value, rule, problem, error.note))


def from_validation_errors(errors: list[dict[str, Any]]) -> ApiError:
    """Converts the first of several validation errors to an error of the API.

    >>> error = {"type": "less_than", "loc": ("body", "k"), "msg": "Should be < 5", "input": 9}
    >>> from_validation_errors([error]).field
    'k'
    """
    first = errors[0]
    path = list(first.get("loc", ())[1:])  # without "body", "query" or "path"
    tag = {"query": 1, "negative": 1, "queries": 2}.get(path[0], 0) if path else 0
    if tag and path[tag : tag + 1] and path[tag] in QUERY_KINDS:
        del path[tag]  # tag of the union, not a field of the request
    if first.get("type") == "json_invalid":
        return ApiError("bad_request", f"{BODY} must be JSON: {first['ctx']['error']}")
    if first.get("type") == "extra_forbidden":
        field = field_path(*path)
        return ApiError("invalid_argument", f"unknown field {field!r}", field)
    if not path and first.get("type") == "missing":
        return ApiError("invalid_argument", f"{BODY} is required")
    cause = describe([{**first, "loc": path}], BODY)
    return ApiError("invalid_argument", str(cause), None if cause.field == BODY else cause.field)

"""What goes wrong, as HTTP says it: every answer that is no success has one form."""

from __future__ import annotations

import re
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.config import SpecError, rule_text
from pipeline.serve.wire import QUERY_FORMS, Code, ErrorAnswer, Problem

STATUS: dict[Code, int] = {
    "invalid_argument": 422,
    "bad_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "gone": 410,
    "too_large": 413,
    "rate_limited": 429,
    "internal": 500,
    "unavailable": 503,
    "timeout": 504,
}
assert set(STATUS) == set(get_args(Code))
CODES = {status: code for code, status in STATUS.items()}

#: Seconds after which a client may ask again, where nothing better is known.
RETRY_AFTER = 1


class ApiError(Exception):
    """An answer that is no success.

    Args:
        field: Name of the invalid field of the request.
        retry_after: seconds after which it may be asked again.
    """

    def __init__(
        self, code: Code, message: str, field: str | None = None, retry_after: float | None = None
    ):
        super().__init__(message)
        if retry_after is None and code == "unavailable":
            retry_after = RETRY_AFTER
        self.code, self.message, self.field, self.retry_after = code, message, field, retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    def answer(self, request_id: str | None) -> ErrorAnswer:
        """The body."""
        return ErrorAnswer(
            error=Problem(
                code=self.code, message=self.message, field=self.field, request_id=request_id
            )
        )

    def headers(self) -> dict[str, str]:
        """The headers that belong to it."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.code == "unauthenticated":
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """Returns the response to a request that failed."""
    body = error.answer(request.scope.get("maxray_request_id"))
    return JSONResponse(body.model_dump(), error.status, error.headers())


def of_spec_error(error: SpecError) -> ApiError:
    """Returns the error for an invalid value, without the paths of the server.

    The searcher's arguments have the names of the request's fields. What is wrong with the server's
    own settings or files is none of the caller's business.
    """
    field = error.field
    if field == "documents":
        message = "the file of the item was changed or removed after it was indexed"
        return ApiError("gone", message)
    if field in OF_SERVER:
        return ApiError("unavailable", f"the server cannot read {OF_SERVER[field]} at the moment")
    return ApiError("invalid_argument", _sentence(field, error), field)


#: Fields of errors that are about the server, and what they are about.
OF_SERVER = {
    "index": "the index",
    "cache": "its local files of the index",
    "keys": "its access keys",
    "device": "its device",
    "name": "a component of the index",
    "edje": "its EDJE, or its tokens of the index,",
}


#: A path of the server, as Lance names one in what it says.
_PATH = re.compile(r"/?(?:[\w.-]+/){2,}[\w.-]*")


def _sentence(field: str, error: SpecError) -> str:
    rule = _PATH.sub("...", error.rule)
    problem = error.problem and _PATH.sub("...", error.problem)
    return str(SpecError(field, error.value, rule, problem, error.note))


def of_validation(errors: list[dict[str, Any]]) -> ApiError:
    """What is wrong with a body, by its first error.

    >>> of_validation([{"loc": ("body", "k"), "msg": "Input should be < 5", "input": 9}]).field
    'k'
    """
    first = errors[0]
    place = [str(part) for part in first.get("loc", ())[1:]]  # behind body, query or path
    form = {"query": 1, "queries": 2}.get(place[0], 0) if place else 0
    if form and place[form : form + 1] and place[form] in QUERY_FORMS:
        del place[form]  # which is no field of the request
    if first.get("type") == "json_invalid":
        return ApiError("bad_request", f"the body must be JSON: {first['ctx']['error']}")
    field = ".".join(place)
    value = repr(first.get("input"))
    value = value if len(value) <= 80 else value[:80] + "…"
    if first.get("type") == "extra_forbidden":
        message = f"unknown field {field!r}"
    elif first.get("type") == "missing":
        message = f"field {field!r} is required" if field else "the body is required"
    else:
        message = f"{field or 'the body'} must be {rule_text(str(first['msg']))}, got {value}"
    return ApiError("invalid_argument", message, field or None)

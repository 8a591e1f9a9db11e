"""Client of the HTTP API.

    with Client("http://127.0.0.1:8000", key="mr_...") as client:
        for hit in client.search("a question", k=5).hits:
            print(hit.score, hit.item_id)

Transient failures are retried: refused and broken connections, the statuses 429 and 502 to 504, and
a 500 that was not sent by the gateway. The delay is exponential, or that of `Retry-After` if it is
longer; by default, retries span about half a minute (a failed proxy or replica restarts within
seconds). Retries are safe: searches have no side effects, and evaluations have an idempotency key.
"""

from __future__ import annotations

import base64
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from pipeline.runtime.retries import RETRIED_STATUSES, is_transient, retry_delay
from pipeline.schema import Composed
from pipeline.serve import wire

ResponseT = TypeVar("ResponseT", bound=wire.Response)
AnyQuery = str | bytes | Composed | Sequence[Sequence[float]] | wire.Query

#: Environment variable of the default access key.
KEY_VARIABLE = "MAXRAY_KEY"
#: Default of the maximum number of attempts per request.
MAX_TRIES = 9


class ServerError(Exception):
    """Error response of the server.

    Attributes:
        status: HTTP status.
        problem: Code and message of the error, the invalid field and the request id.
    """

    def __init__(self, status: int, problem: wire.Problem):
        super().__init__(f"{problem.message} ({status} {problem.code})")
        self.status, self.problem = status, problem


@dataclass(frozen=True)
class _Call(Generic[ResponseT]):
    method: str
    path: str
    schema: type[ResponseT]
    body: BaseModel | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        parameters = {name: value for name, value in self.parameters.items() if value is not None}
        arguments: dict[str, Any] = {"method": self.method, "url": self.path, "params": parameters}
        arguments["headers"] = dict(self.headers)
        if self.body is not None:
            arguments["content"] = self.body.model_dump_json(exclude_unset=True)
            arguments["headers"]["Content-Type"] = "application/json"
        return arguments


def _search(query: AnyQuery, options: Mapping[str, Any]) -> _Call[wire.SearchResponse]:
    body = wire.SearchRequest(query=_query(query), **_with_negative(options))
    return _Call("POST", "/v1/search", wire.SearchResponse, body)


def _search_batch(
    queries: Sequence[AnyQuery], options: Mapping[str, Any]
) -> _Call[wire.BatchSearchResponse]:
    fields = _with_negative(options)
    body = wire.BatchSearchRequest(queries=[_query(query) for query in queries], **fields)
    return _Call("POST", "/v1/search:batch", wire.BatchSearchResponse, body)


def _encode(queries: Sequence[AnyQuery], options: Mapping[str, Any]) -> _Call[wire.EncodeResponse]:
    body = wire.EncodeRequest(queries=[_query(query) for query in queries], **options)
    return _Call("POST", "/v1/encode", wire.EncodeResponse, body)


def _rerank(
    query: AnyQuery, item_ids: Sequence[str], options: Mapping[str, Any]
) -> _Call[wire.RerankResponse]:
    body = wire.RerankRequest(query=_query(query), item_ids=list(item_ids), **options)
    return _Call("POST", "/v1/rerank", wire.RerankResponse, body)


def _item(item_id: str, index: str | None) -> _Call[wire.Item]:
    return _Call("GET", f"/v1/items/{_quoted(item_id)}", wire.Item, parameters={"index": index})


def _delete(options: Mapping[str, Any]) -> _Call[wire.DeleteResponse]:
    return _Call("DELETE", "/v1/items", wire.DeleteResponse, wire.DeleteRequest(**options))


def _indexes() -> _Call[wire.IndexList]:
    return _Call("GET", "/v1/indexes", wire.IndexList)


def _evaluate(options: Mapping[str, Any]) -> _Call[wire.Evaluation]:
    body = wire.EvaluationRequest(**options)
    headers = {"Idempotency-Key": uuid.uuid4().hex}  # a retry does not create another evaluation
    return _Call("POST", "/v1/evaluations", wire.Evaluation, body, headers=headers)


def _evaluation(method: str, name: str) -> _Call[wire.Evaluation]:
    return _Call(method, f"/v1/evaluations/{name}", wire.Evaluation)


def _evaluations() -> _Call[wire.EvaluationList]:
    return _Call("GET", "/v1/evaluations", wire.EvaluationList)


def _file(name: str, path: str) -> _Call[wire.Response]:
    return _Call("GET", f"/v1/evaluations/{name}/files/{quote(path)}", wire.Response)


def _with_negative(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a search with the negative query as the server reads it."""
    negative = options.get("negative")
    return {**options, **({} if negative is None else {"negative": _query(negative)})}


def _query(query: AnyQuery) -> wire.Query:
    if isinstance(query, str | wire.Vectors | wire.Media | wire.StoredItem):
        return query
    if isinstance(query, bytes):
        query = Composed(image=query)
    if isinstance(query, Composed):
        parts: dict[str, Any] = {part: getattr(query, part) for part in query.parts}
        files = {part: base64.b64encode(parts[part]).decode() for part in parts if part != "text"}
        return wire.Media(**parts | files)
    rows = query.tolist() if hasattr(query, "tolist") else [list(row) for row in query]
    return wire.Vectors(vectors=rows)


def _quoted(item_id: str) -> str:
    return quote(item_id, safe="")


def _read(response: httpx2.Response, schema: type[ResponseT]) -> ResponseT:
    try:
        return schema.model_validate_json(response.content)
    except ValidationError as error:
        reason = f"the response is not a valid {schema.__name__}: {error.errors()[0]['msg']}"
        problem = wire.Problem(code="internal", message=reason)
        raise ServerError(response.status_code, problem) from None


def raise_for_error(response: httpx2.Response) -> None:
    """Raises `ServerError` for an error response."""
    if response.is_success:
        return
    try:
        problem = wire.ErrorResponse.model_validate_json(response.content).error
    except ValidationError:  # sent by a proxy rather than the server
        text = response.text.strip()[:200] or response.reason_phrase
        code: wire.ErrorCode = "unavailable" if response.status_code >= 500 else "bad_request"
        problem = wire.Problem(code=code, message=text)
    raise ServerError(response.status_code, problem)


def _is_retryable(response: httpx2.Response) -> bool:
    # Ray's proxy sends a 500 without a JSON error if the replica dies during the request.
    is_proxy_error = response.status_code == 500 and not _is_api_error(response)
    return response.status_code in RETRIED_STATUSES or is_proxy_error


def _is_api_error(response: httpx2.Response) -> bool:
    try:
        return bool(wire.ErrorResponse.model_validate_json(response.content))
    except ValidationError:
        return False


class Client:
    """Synchronous client of the HTTP API.

    All methods raise `ServerError` if the server returns an error, and `httpx2.TransportError` if
    the server cannot be reached. Errors are raised after the last attempt.

    Args:
        url: URL of the server, such as http://127.0.0.1:8000.
        key: Access key. Default: the environment variable MAXRAY_KEY.
        tries: Maximum number of attempts per request.
        timeout: Time limit of an attempt, in seconds.
        transport: Transport of httpx. Tests replace it.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        tries: int = MAX_TRIES,
        timeout: float = 60.0,
        transport: httpx2.BaseTransport | None = None,
    ):
        self._tries = tries
        options = _http_options(url, key, timeout)
        self._http = httpx2.Client(transport=transport, **options)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def search(self, query: AnyQuery, **options: Any) -> wire.SearchResponse:
        """Returns the best items for a query.

        Args:
            query: A text, the bytes of an image file, a `Composed` query with audio, a video or
                several parts, or token vectors (M, D).
            options: `index`, which may be a federation, `negative`, a query as `query`, and fields
                of `SearchOptions`, for example `k`, `representation`, `negative_weight` or
                `rerank={"top": 100}`. `rerank={"name": "edje"}` requires
                an index that is served with that reranker. A federation also has `join` and
                `members={"NAME": {"weight": 0.5}}`, see `wire.MemberOptions`.

        Raises:
            ServerError: The server returned an error.
            httpx2.TransportError: The server cannot be reached.
            pydantic.ValidationError: An option is invalid.
        """
        return self._send(_search(query, options))

    def search_batch(self, queries: Sequence[AnyQuery], **options: Any) -> wire.BatchSearchResponse:
        """Searches for the best items for each of several queries. See `search`."""
        return self._send(_search_batch(queries, options))

    def encode(self, queries: Sequence[AnyQuery], **options: Any) -> wire.EncodeResponse:
        """Encodes queries.

        Args:
            queries: Queries as in `search`.
            options: Fields of `wire.EncodeRequest`: `index`, `representation`.
        """
        return self._send(_encode(queries, options))

    def rerank(
        self, query: AnyQuery, item_ids: Sequence[str], **options: Any
    ) -> wire.RerankResponse:
        """Scores the given items for a query and returns them in descending order of their scores.

        Args:
            query: A query as in `search`.
            item_ids: Ids of the items.
            options: Fields of `wire.RerankRequest`: `index`, `representation`, `k`, `name`.
        """
        return self._send(_rerank(query, item_ids, options))

    def item(self, item_id: str, index: str | None = None) -> wire.Item:
        """Returns the stored fields of an item."""
        return self._send(_item(item_id, index))

    def preview(
        self,
        item_id: str,
        index: str | None = None,
        *,
        media: Literal["image", "audio"] = "image",
        seconds: float | None = None,
    ) -> bytes:
        """Downloads the image (JPEG, PNG or WebP) or the audio (WAV) of an item.

        Args:
            item_id: Id of the item.
            index: Name of the index. Defaults to the only one.
            media: "image" or "audio".
            seconds: Time of a video frame in the parent, in seconds. Defaults to the middle.
        """
        return self._response(_preview(item_id, index, media, seconds).arguments()).content

    def delete_items(self, **options: Any) -> wire.DeleteResponse:
        """Deletes items. Requires an access key with `delete: true`.

        Args:
            options: Fields of `wire.DeleteRequest`.
        """
        return self._send(_delete(options))

    def indexes(self) -> list[wire.IndexInfo]:
        """Returns the indexes to which the access key has access."""
        return self._send(_indexes()).indexes

    def federations(self) -> list[wire.FederationInfo]:
        """Returns the federations to which the access key has access."""
        return self._send(_indexes()).federations

    def evaluate(self, **options: Any) -> wire.Evaluation:
        """Queues an evaluation.

        Args:
            options: Fields of `wire.EvaluationRequest`.
        """
        return self._send(_evaluate(options))

    def evaluation(self, name: str) -> wire.Evaluation:
        """Returns the state of an evaluation, and its results if it is done."""
        return self._send(_evaluation("GET", name))

    def evaluations(self) -> list[wire.Evaluation]:
        """Returns the evaluations that were created with the access key, newest first."""
        return self._send(_evaluations()).evaluations

    def evaluation_file(self, name: str, path: str) -> bytes:
        """Downloads a file of an evaluation, see `wire.Evaluation.files`."""
        return self._response(_file(name, path).arguments()).content

    def cancel_evaluation(self, name: str) -> wire.Evaluation:
        """Cancels a queued or running evaluation."""
        return self._send(_evaluation("POST", f"{name}:cancel"))

    def delete_evaluation(self, name: str) -> None:
        """Deletes a finished evaluation."""
        self._response(_evaluation("DELETE", name).arguments())

    def wait_for(
        self, name: str, timeout: float = 3600, poll_interval: float = 1.0
    ) -> wire.Evaluation:
        """Waits until an evaluation has finished and returns it.

        Args:
            name: Id of the evaluation.
            timeout: Time limit, in seconds.
            poll_interval: Interval between requests, in seconds.

        Raises:
            TimeoutError: The time limit has passed.
        """
        end = time.monotonic() + timeout
        while (evaluation := self.evaluation(name)).state in ("queued", "running"):
            if time.monotonic() > end:
                raise TimeoutError(f"evaluation {name} is {evaluation.state} after {timeout:g} s")
            time.sleep(poll_interval)
        return evaluation

    def _send(self, call: _Call[ResponseT]) -> ResponseT:
        return _read(self._response(call.arguments()), call.schema)

    def _response(self, arguments: Mapping[str, Any]) -> httpx2.Response:
        num_tries = 0
        while True:
            num_tries += 1
            response: httpx2.Response | None = None
            try:
                response = self._http.request(**arguments)
            except httpx2.TransportError as error:
                if num_tries >= self._tries or not is_transient(error):
                    raise
            else:
                if num_tries >= self._tries or not _is_retryable(response):
                    raise_for_error(response)
                    return response
            time.sleep(retry_delay(num_tries, response))


def _http_options(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    if not re.match(r"https?://\w", url):
        raise ValueError(f"url must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    key = (key or os.environ.get(KEY_VARIABLE) or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("key must consist of printable ASCII characters")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _preview(
    item_id: str, index: str | None, media: str, seconds: float | None
) -> _Call[wire.Response]:
    parameters = {"index": index, "media": media, "seconds": seconds}
    path = f"/v1/previews/{_quoted(item_id)}"
    return _Call("GET", path, wire.Response, parameters=parameters)

"""A client of the API, for scripts and services: `Client` waits, `AsyncClient` is awaited.

    with Client("http://127.0.0.1:8000", key="mr_...") as client:
        for hit in client.search("a question", k=5).hits:
            print(hit.score, hit.item_id)

What failed for a moment is asked again: a connection that was refused or broke, 429, 502 to 504,
and a 500 that is not the server's own, after what its `Retry-After` says or a growing while, for
half a minute in all (a proxy or replica that died takes some seconds to start). Searches change
nothing and may be sent twice; an evaluation carries a key by which the server knows it again.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import ValidationError

from pipeline.schema import Composed
from pipeline.serve import wire

AnswerT = TypeVar("AnswerT", bound=wire.Answer)
AnyQuery = str | bytes | Composed | Sequence[Sequence[float]] | wire.Query

#: Where the key is looked for if none is given.
VARIABLE = "MAXRAY_KEY"
RETRIED = frozenset({429, 502, 503, 504})
#: Seconds before the second try; each later one waits twice as long, up to a bound.
FIRST_WAIT, LONGEST_WAIT = 0.25, 10.0
#: How often a request is sent at most, unless the client says otherwise.
TRIES = 9


class ServerError(Exception):
    """The server answered that it did not do what was asked.

    Attributes:
        status: of HTTP.
        problem: what went wrong: its code, a sentence, the field, and the id of the request.
    """

    def __init__(self, status: int, problem: wire.Problem):
        super().__init__(f"{problem.message} ({status} {problem.code})")
        self.status, self.problem = status, problem


@dataclass(frozen=True)
class _Call(Generic[AnswerT]):
    """A request that is to be sent, and what its answer is read as."""

    method: str
    path: str
    kind: type[AnswerT]
    body: wire.Request | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """What httpx takes."""
        given = {name: value for name, value in self.parameters.items() if value is not None}
        made: dict[str, Any] = {"method": self.method, "url": self.path, "params": given}
        made["headers"] = dict(self.headers)
        if self.body is not None:
            made["content"] = self.body.model_dump_json(exclude_unset=True)
            made["headers"]["Content-Type"] = "application/json"
        return made


def _search(query: AnyQuery, options: Mapping[str, Any]) -> _Call[wire.SearchAnswer]:
    body = wire.SearchRequest(query=_query(query), **options)
    return _Call("POST", "/v1/search", wire.SearchAnswer, body)


def _search_batch(
    queries: Sequence[AnyQuery], options: Mapping[str, Any]
) -> _Call[wire.BatchAnswer]:
    body = wire.BatchRequest(queries=[_query(query) for query in queries], **options)
    return _Call("POST", "/v1/search:batch", wire.BatchAnswer, body)


def _encode(queries: Sequence[AnyQuery], options: Mapping[str, Any]) -> _Call[wire.EncodeAnswer]:
    body = wire.EncodeRequest(queries=[_query(query) for query in queries], **options)
    return _Call("POST", "/v1/encode", wire.EncodeAnswer, body)


def _rerank(
    query: AnyQuery, item_ids: Sequence[str], options: Mapping[str, Any]
) -> _Call[wire.RerankAnswer]:
    body = wire.RerankRequest(query=_query(query), item_ids=list(item_ids), **options)
    return _Call("POST", "/v1/rerank", wire.RerankAnswer, body)


def _item(item_id: str, index: str | None) -> _Call[wire.Item]:
    return _Call("GET", f"/v1/items/{_quoted(item_id)}", wire.Item, parameters={"index": index})


def _indexes() -> _Call[wire.IndexList]:
    return _Call("GET", "/v1/indexes", wire.IndexList)


def _evaluate(options: Mapping[str, Any]) -> _Call[wire.Evaluation]:
    body = wire.EvaluationRequest(**options)
    headers = {"Idempotency-Key": uuid.uuid4().hex}  # sent again, it is the same evaluation
    return _Call("POST", "/v1/evaluations", wire.Evaluation, body, headers=headers)


def _evaluation(method: str, name: str) -> _Call[wire.Evaluation]:
    return _Call(method, f"/v1/evaluations/{name}", wire.Evaluation)


def _evaluations() -> _Call[wire.EvaluationList]:
    return _Call("GET", "/v1/evaluations", wire.EvaluationList)


def _file(name: str, path: str) -> _Call[wire.Answer]:
    return _Call("GET", f"/v1/evaluations/{name}/files/{quote(path)}", wire.Answer)


def _query(query: AnyQuery) -> wire.Query:
    """A text, a picture's file, both together, or vectors of any kind of array."""
    if isinstance(query, str | wire.Vectors | wire.Image):
        return query
    if isinstance(query, bytes):
        return wire.Image(image=base64.b64encode(query).decode())
    if isinstance(query, Composed):
        return wire.Composed(text=query.text, image=base64.b64encode(query.image).decode())
    rows = query.tolist() if hasattr(query, "tolist") else [list(row) for row in query]
    return wire.Vectors(vectors=rows)


def _quoted(item_id: str) -> str:
    """An id as a part of a URL; the server takes all that follows as one id."""
    return quote(item_id, safe="")


def _read(response: httpx2.Response, kind: type[AnswerT]) -> AnswerT:
    """The answer of a response.

    Raises:
        ServerError: it is no answer of this API.
    """
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        reason = f"the answer is no {kind.__name__}: {error.errors()[0]['msg']}"
        problem = wire.Problem(code="internal", message=reason)
        raise ServerError(response.status_code, problem) from None


def raise_for_error(response: httpx2.Response) -> None:
    """Raises `ServerError` if a response is no success."""
    if response.is_success:
        return
    try:
        problem = wire.ErrorAnswer.model_validate_json(response.content).error
    except ValidationError:  # of something between here and the server
        text = response.text.strip()[:200] or response.reason_phrase
        code: wire.Code = "unavailable" if response.status_code >= 500 else "bad_request"
        problem = wire.Problem(code=code, message=text)
    raise ServerError(response.status_code, problem)


def _is_retryable(response: httpx2.Response) -> bool:
    """Returns whether a request is sent again after this response."""
    # A 500 of the server says what is wrong. Another one comes from Ray's proxy, whose replica died
    # with the request.
    is_of_proxy = response.status_code == 500 and not _is_ours(response)
    return response.status_code in RETRIED or is_of_proxy


def _is_temporary(error: httpx2.TransportError) -> bool:
    """Returns whether a request is sent again after this error; errors of the client repeat."""
    return not isinstance(error, httpx2.LocalProtocolError | httpx2.UnsupportedProtocol)


def _is_ours(response: httpx2.Response) -> bool:
    """Whether an error is in the form of this API."""
    try:
        return bool(wire.ErrorAnswer.model_validate_json(response.content))
    except ValidationError:
        return False


def wait_before(tried: int, response: httpx2.Response | None) -> float:
    """Seconds to wait before a request is sent again that was sent `tried` times."""
    waits = min(FIRST_WAIT * 2 ** (tried - 1), LONGEST_WAIT)
    waits *= 0.5 + random.random() / 2  # or all clients come back at once
    try:
        said = float(response.headers.get("retry-after", 0)) if response is not None else 0.0
    except ValueError:
        said = 0.0
    return max(waits, min(said, LONGEST_WAIT))


class Client:
    """The API, one request at a time.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        key: the access key; default: that of the variable MAXRAY_KEY.
        tries: how often a request is sent at most.
        timeout: seconds until a try is given up.
        transport: for tests: what sends the requests.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        tries: int = TRIES,
        timeout: float = 60.0,
        transport: httpx2.BaseTransport | None = None,
    ):
        self._tries = tries
        how = _how(url, key, timeout)
        self._http = httpx2.Client(transport=transport, **how)

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
        """Ends the connections."""
        self._http.close()

    def search(self, query: AnyQuery, **options: Any) -> wire.SearchAnswer:
        """The best items for a query.

        Args:
            query: a text, a picture as the bytes of its file, a `Composed` of both, or token
                vectors (M, D).
            options: the fields of `wire.SearchOptions`, such as k, representation, rerank:
                `{"rerank_depth": 100}`, or `{"by": "edje"}` where the index is served with an EDJE.

        Raises:
            ServerError: the server says that something is wrong, after all tries.
            httpx2.TransportError: it does not answer.
            pydantic.ValidationError: An option is invalid.
        """
        return self._send(_search(query, options))

    def search_batch(self, queries: Sequence[AnyQuery], **options: Any) -> wire.BatchAnswer:
        """The best items for each of many queries; options as in `search`."""
        return self._send(_search_batch(queries, options))

    def encode(self, queries: Sequence[AnyQuery], **options: Any) -> wire.EncodeAnswer:
        """Queries as vectors; options: index, representation."""
        return self._send(_encode(queries, options))

    def rerank(self, query: AnyQuery, item_ids: Sequence[str], **options: Any) -> wire.RerankAnswer:
        """Scores of given items; options: index, representation, k, by: vectors or edje."""
        return self._send(_rerank(query, item_ids, options))

    def item(self, item_id: str, index: str | None = None) -> wire.Item:
        """What is stored of an item."""
        return self._send(_item(item_id, index))

    def preview(
        self,
        item_id: str,
        index: str | None = None,
        *,
        media: Literal["image", "audio"] = "image",
        seconds: float | None = None,
    ) -> bytes:
        """Returns the image (JPEG, PNG or WebP) or the audio (WAV) of an item.

        Args:
            item_id: Id of the item.
            index: Name of the index; default: the only one.
            media: "image" or "audio".
            seconds: Time of a video frame in the parent, in seconds; default: the middle.
        """
        return self._response(_preview(item_id, index, media, seconds).arguments()).content

    def indexes(self) -> list[wire.IndexInfo]:
        """What is served."""
        return self._send(_indexes()).indexes

    def evaluate(self, **options: Any) -> wire.Evaluation:
        """Asks for an evaluation; options: the fields of `wire.EvaluationRequest`."""
        return self._send(_evaluate(options))

    def evaluation(self, name: str) -> wire.Evaluation:
        """How far an evaluation is, and its results when it is done."""
        return self._send(_evaluation("GET", name))

    def evaluations(self) -> list[wire.Evaluation]:
        """Those of this key, the newest first."""
        return self._send(_evaluations()).evaluations

    def evaluation_file(self, name: str, path: str) -> bytes:
        """One of an evaluation's `files`."""
        return self._response(_file(name, path).arguments()).content

    def cancel_evaluation(self, name: str) -> wire.Evaluation:
        """Ends an evaluation that has not ended."""
        return self._send(_evaluation("POST", f"{name}:cancel"))

    def delete_evaluation(self, name: str) -> None:
        """Removes an evaluation that has ended."""
        self._response(_evaluation("DELETE", name).arguments())

    def wait_for(self, name: str, seconds: float = 3600, every: float = 1.0) -> wire.Evaluation:
        """An evaluation when it has ended.

        Raises:
            TimeoutError: it takes longer.
        """
        end = time.monotonic() + seconds
        while (found := self.evaluation(name)).state in ("queued", "running"):
            if time.monotonic() > end:
                raise TimeoutError(f"the evaluation {name} is {found.state} after {seconds:g} s")
            time.sleep(every)
        return found

    def _send(self, call: _Call[AnswerT]) -> AnswerT:
        return _read(self._response(call.arguments()), call.kind)

    def _response(self, arguments: Mapping[str, Any]) -> httpx2.Response:
        num_tries = 0
        while True:
            num_tries += 1
            response: httpx2.Response | None = None
            try:
                response = self._http.request(**arguments)
            except httpx2.TransportError as error:
                if num_tries >= self._tries or not _is_temporary(error):
                    raise
            else:
                if num_tries >= self._tries or not _is_retryable(response):
                    raise_for_error(response)
                    return response
            time.sleep(wait_before(num_tries, response))


class AsyncClient:
    """The API with many requests under way; arguments and methods as those of `Client`."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        tries: int = TRIES,
        timeout: float = 60.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ):
        self._tries = tries
        how = _how(url, key, timeout)
        self._http = httpx2.AsyncClient(transport=transport, **how)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections."""
        await self._http.aclose()

    async def search(self, query: AnyQuery, **options: Any) -> wire.SearchAnswer:
        """As `Client.search`."""
        return await self._send(_search(query, options))

    async def search_batch(self, queries: Sequence[AnyQuery], **options: Any) -> wire.BatchAnswer:
        """As `Client.search_batch`."""
        return await self._send(_search_batch(queries, options))

    async def encode(self, queries: Sequence[AnyQuery], **options: Any) -> wire.EncodeAnswer:
        """As `Client.encode`."""
        return await self._send(_encode(queries, options))

    async def rerank(
        self, query: AnyQuery, item_ids: Sequence[str], **options: Any
    ) -> wire.RerankAnswer:
        """As `Client.rerank`."""
        return await self._send(_rerank(query, item_ids, options))

    async def item(self, item_id: str, index: str | None = None) -> wire.Item:
        """As `Client.item`."""
        return await self._send(_item(item_id, index))

    async def preview(
        self,
        item_id: str,
        index: str | None = None,
        *,
        media: Literal["image", "audio"] = "image",
        seconds: float | None = None,
    ) -> bytes:
        """As `Client.preview`."""
        return (await self._response(_preview(item_id, index, media, seconds).arguments())).content

    async def indexes(self) -> list[wire.IndexInfo]:
        """As `Client.indexes`."""
        return (await self._send(_indexes())).indexes

    async def evaluate(self, **options: Any) -> wire.Evaluation:
        """As `Client.evaluate`."""
        return await self._send(_evaluate(options))

    async def evaluation(self, name: str) -> wire.Evaluation:
        """As `Client.evaluation`."""
        return await self._send(_evaluation("GET", name))

    async def evaluations(self) -> list[wire.Evaluation]:
        """As `Client.evaluations`."""
        return (await self._send(_evaluations())).evaluations

    async def evaluation_file(self, name: str, path: str) -> bytes:
        """As `Client.evaluation_file`."""
        return (await self._response(_file(name, path).arguments())).content

    async def cancel_evaluation(self, name: str) -> wire.Evaluation:
        """As `Client.cancel_evaluation`."""
        return await self._send(_evaluation("POST", f"{name}:cancel"))

    async def delete_evaluation(self, name: str) -> None:
        """As `Client.delete_evaluation`."""
        await self._response(_evaluation("DELETE", name).arguments())

    async def wait_for(
        self, name: str, seconds: float = 3600, every: float = 1.0
    ) -> wire.Evaluation:
        """As `Client.wait_for`."""
        end = time.monotonic() + seconds
        while (found := await self.evaluation(name)).state in ("queued", "running"):
            if time.monotonic() > end:
                raise TimeoutError(f"the evaluation {name} is {found.state} after {seconds:g} s")
            await asyncio.sleep(every)
        return found

    async def _send(self, call: _Call[AnswerT]) -> AnswerT:
        return _read(await self._response(call.arguments()), call.kind)

    async def _response(self, arguments: Mapping[str, Any]) -> httpx2.Response:
        num_tries = 0
        while True:
            num_tries += 1
            response: httpx2.Response | None = None
            try:
                response = await self._http.request(**arguments)
            except httpx2.TransportError as error:
                if num_tries >= self._tries or not _is_temporary(error):
                    raise
            else:
                if num_tries >= self._tries or not _is_retryable(response):
                    raise_for_error(response)
                    return response
            await asyncio.sleep(wait_before(num_tries, response))


def _how(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    if not re.match(r"https?://\w", url):
        raise ValueError(f"url must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    key = (key or os.environ.get(VARIABLE) or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("key must consist of printable ASCII characters")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _preview(
    item_id: str, index: str | None, media: str, seconds: float | None
) -> _Call[wire.Answer]:
    parameters = {"index": index, "media": media, "seconds": seconds}
    path = f"/v1/previews/{_quoted(item_id)}"
    return _Call("GET", path, wire.Answer, parameters=parameters)

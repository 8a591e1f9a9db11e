"""Client of endpoints of models, such as OpenAI's `/v1/embeddings` and vLLM's `/pooling`.

Requests are repeated after statuses 429 and 5xx, timeouts and broken connections, with an
exponential delay or the one that the server requests with `Retry-After`. Every response is checked
against the spec, because a model that was replaced would silently make an index useless.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2
import numpy as np
from pydantic import Field, PositiveFloat, field_validator

from pipeline.config import ComponentSpec, JobError, Spec, SpecError
from pipeline.data.decode import Unreadable
from pipeline.runtime.retries import is_transient, retry_delay

#: Paths of the supported interfaces.
PATHS = {"embeddings": "/v1/embeddings", "pooling": "/pooling"}
#: Maximum delay that a server can request with `Retry-After`, in seconds.
MAX_RETRY_AFTER_S = 300.0
#: Time after a failed connection in which requests fail at once. Otherwise an index job would
#: repeat all attempts for each item of a unit before it stops.
OUTAGE_S = 30.0
#: Maximum number of characters of a server's error message that is shown.
MAX_DETAIL = 300


class EndpointFields(Spec):
    """Server, model and limits of requests."""

    url: str
    """URL of the server without the path of the interface, such as `http://gpu-1:8000`. It is not
    part of the fingerprint.
    """
    model: str = Field(min_length=1)
    """Name of the model, which the server must report with every response."""
    max_concurrency: int = Field(8, ge=1)
    """Maximum number of concurrent requests per actor."""
    timeout_s: PositiveFloat = 60.0
    """Timeout of connecting, and of waiting for the response, in seconds."""
    max_tries: int = Field(6, ge=1)
    """Maximum number of attempts per request."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key, which must be set on all machines. The key
    itself is stored nowhere.
    """

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            rule = "a URL without credentials and parameters (use api_key_variable)"
            raise SpecError("", "(hidden)", rule)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SpecError("", url, "a URL such as http://host:8000")
        url = url.rstrip("/")
        if url.endswith("/v1"):
            raise SpecError("", url, "the URL of the server without /v1")
        return url

    @field_validator("api_key_variable")
    @classmethod
    def _check_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            rule = "the name of an environment variable in upper case, not the key itself"
            raise SpecError("", "(hidden)", rule)
        return name


class EndpointSpec(EndpointFields, ComponentSpec):
    """Server, model and width of the vectors."""

    api: Literal["embeddings", "pooling"] = "embeddings"
    """Interface of the server: OpenAI's `/v1/embeddings` with one vector per item, or vLLM's
    `/pooling` with one vector per token."""
    dim: int = Field(ge=1)
    """Width of the vectors, which every response must have."""


class EndpointError(JobError, OSError):
    """Raised if an endpoint cannot be reached or fails after all attempts."""


class ResponseError(JobError):
    """Raised if the response of an endpoint is malformed or contradicts the spec."""


class Endpoint:
    """Client of one model behind an endpoint."""

    def __init__(self, spec: EndpointFields):
        self._spec = spec
        self._key = _api_key(spec)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = httpx2.Client(
            base_url=spec.url,
            headers=headers,
            timeout=spec.timeout_s,
            limits=httpx2.Limits(max_connections=spec.max_concurrency),
        )
        self._pool = ThreadPoolExecutor(spec.max_concurrency)
        self._outage: tuple[float, EndpointError] | None = None

    def check_model(self) -> None:
        """Checks that the server serves the model. Servers without `/v1/models` are not checked.

        Raises:
            SpecError: The server cannot be reached, rejects the key, or serves other models.
        """
        spec = self._spec
        try:
            response = self._request("GET", "/v1/models", max_tries=2)
        except EndpointError as error:
            rule = "the URL of a server that answers"
            raise SpecError("url", spec.url, rule, note=f" ({error})") from None
        if response.status_code == 404:
            return
        self._check_status(response)
        content = parse_json(response.content)
        try:
            names = [str(model["id"]) for model in content["data"]]
        except (KeyError, TypeError):
            raise ResponseError(f"{spec.url}/v1/models must list models with an id") from None
        if spec.model not in names:
            raise SpecError.unknown_name("model", spec.model, names, "is not served at url")

    def post(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yields the responses to requests, in order. Requests are concurrent.

        Raises:
            EndpointError: The endpoint fails after all attempts.
            Unreadable: The endpoint rejects a request.
            SpecError: The endpoint rejects the API key or the model.
        """
        return self._pool.map(lambda body: self._post(path, body), bodies)

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        response = self._request("POST", path, {"model": self._spec.model, **body})
        self._check_status(response)
        return response.content

    def embed(self, bodies: Sequence[Mapping[str, Any]]) -> Iterator[list[np.ndarray]]:
        """Yields the vectors of requests, (M, dim) per input, in order. Requests are concurrent.

        Args:
            bodies: Bodies of the requests, with `input` (several texts) or `messages` (one input).

        Raises:
            EndpointError: The endpoint fails after all attempts.
            ResponseError: A response is invalid.
            Unreadable: The endpoint rejects an input.
            SpecError: The endpoint rejects the API key or the model.
        """
        return self._pool.map(self._embed, bodies)

    def _embed(self, body: Mapping[str, Any]) -> list[np.ndarray]:
        spec: Any = self._spec
        options: dict[str, Any] = {"encoding_format": "float"}
        if spec.api == "pooling":
            options["task"] = "token_embed"
        content = self._post(PATHS[spec.api], {**options, **body})
        return read_vectors(content, len(body.get("input", [0])), spec)

    def _request(
        self, method: str, path: str, body: Any = None, max_tries: int | None = None
    ) -> httpx2.Response:
        """Sends a request until it succeeds, and returns responses that are not to be retried."""
        if self._outage is not None and time.monotonic() < self._outage[0]:
            raise self._outage[1]
        max_tries = max_tries or self._spec.max_tries
        for num_tries in itertools.count(1):
            response, error = None, None
            try:
                response = self._http.request(method, path, json=body)
            except httpx2.TransportError as transport_error:
                error = transport_error
            if response is not None and not _is_retried(response):
                self._outage = None
                return response
            if num_tries >= max_tries or (error is not None and not is_transient(error)):
                break
            time.sleep(retry_delay(num_tries, response, MAX_RETRY_AFTER_S))
        problem = self._detail(response) if response is not None else _describe(error)
        failure = EndpointError(f"{self._spec.url}{path} failed {num_tries} times: {problem}")
        if response is None:
            self._outage = (time.monotonic() + OUTAGE_S, failure)
        raise failure

    def _check_status(self, response: httpx2.Response) -> None:
        if response.is_success:
            return
        spec, status, detail = self._spec, response.status_code, self._detail(response)
        if status in (401, 403):
            rule = "the name of an environment variable with a valid API key"
            variable = spec.api_key_variable
            raise SpecError("api_key_variable", variable, rule, note=f" ({spec.url}: {detail})")
        if status == 404:
            path = urlsplit(str(response.url)).path
            rule = f"a model that {spec.url} serves at {path}"
            raise SpecError("model", spec.model, rule, note=f" ({detail})")
        if 400 <= status < 500:
            raise Unreadable("rejected by the endpoint", detail)
        raise EndpointError(f"{response.url} failed: {detail}")

    def _detail(self, response: httpx2.Response) -> str:
        """Returns the status and the beginning of a response, without the API key."""
        text = " ".join(response.text.split())[:MAX_DETAIL]
        if self._key:
            text = text.replace(self._key, "***")
        return f"status {response.status_code} {text}".rstrip()


def _api_key(spec: EndpointFields) -> str | None:
    if spec.api_key_variable is None:
        return None
    key = os.environ.get(spec.api_key_variable)
    if not key:
        rule = "the name of an environment variable that contains the API key"
        raise SpecError("api_key_variable", spec.api_key_variable, rule, "is not set")
    return key


def _is_retried(response: httpx2.Response) -> bool:
    return response.status_code in (408, 429) or response.status_code >= 500


def _describe(error: httpx2.TransportError | None) -> str:
    return f"{type(error).__name__} ({error})" if str(error) else type(error).__name__


def parse_json(content: bytes) -> Any:
    """Parses a response, or raises `ResponseError`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        size = f"{len(content):,} bytes"
        raise ResponseError(f"the response of the endpoint must be JSON, got {size}") from None


def read_vectors(content: bytes, num_inputs: int, spec: EndpointSpec) -> list[np.ndarray]:
    """Reads the vectors (M, dim) of each input from a response, in the order of the request.

    Raises:
        ResponseError: The model, the number of results, the shape or the values are not valid.
    """
    response = parse_json(content)
    try:
        model, results = response["model"], response["data"]
        values = {
            result["index"]: result.get("embedding", result.get("data")) for result in results
        }
    except (KeyError, TypeError, AttributeError):
        problem = "must contain model and data, a list of objects with an index"
        raise ResponseError(f"the response of the endpoint {problem}") from None
    if model != spec.model:
        raise ResponseError(f"the endpoint must answer with the model {spec.model}, got {model}")
    if len(results) != num_inputs or values.keys() != set(range(num_inputs)):
        expected = f"one result for each of {num_inputs} inputs"
        raise ResponseError(f"the endpoint must return {expected}, got {len(results)}")
    return [_read_matrix(values[number], spec) for number in range(num_inputs)]


def _read_matrix(value: Any, spec: EndpointSpec) -> np.ndarray:
    """Returns the vectors (M, dim) of one result, a list of numbers or base64."""
    try:
        if isinstance(value, str):
            array = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
            array = array.reshape(-1, spec.dim) if spec.api == "pooling" else array
        else:
            with np.errstate(over="ignore"):  # reported below
                array = np.array(value, dtype=np.float32)
    except (ValueError, TypeError):
        raise ResponseError("the endpoint must return vectors of equal width") from None
    expected, axes = ("a vector", 1) if spec.api == "embeddings" else ("a vector per token", 2)
    if array.ndim != axes or not array.size:
        shape = " x ".join(map(str, array.shape))
        problem = f"an array of shape {shape or 'scalar'}"
        raise ResponseError(f"the endpoint must return {expected} for each input, got {problem}")
    if array.shape[-1] != spec.dim:
        problem = f"vectors of width {array.shape[-1]}"
        raise ResponseError(f"the endpoint must return vectors of width {spec.dim}, got {problem}")
    if not np.isfinite(array).all():
        raise ResponseError("the endpoint must return finite numbers, got NaN or infinity")
    return array.reshape(-1, spec.dim)

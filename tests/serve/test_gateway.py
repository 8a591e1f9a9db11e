"""Tests of validation, authentication, limits, logging and metrics over HTTP."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from PIL import Image

from pipeline.serve import wire
from pipeline.serve.api import create_app
from pipeline.serve.browse import api
from pipeline.serve.keys import hash_key
from pipeline.serve.routes import public
from pipeline.serve.search_page import page
from tests.serve.conftest import KEYS, write_keys

SEARCH = {"query": "the lift of a wing", "index": "texts"}


def problem(response: httpx2.Response) -> wire.Problem:
    """Returns the error of a response after validating its schema."""
    assert response.headers["content-type"] == "application/json"
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert error.request_id == response.headers["x-request-id"]
    assert set(response.json()) == {"error"}
    return error


def error_message(
    response: httpx2.Response, status: int, code: str, field: str | None = None
) -> str:
    error = problem(response)
    assert (response.status_code, error.code, error.field) == (status, code, field), error
    return error.message


# -- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"k": 0}, "k", "0"),
        ({"k": 101}, "k", "at most 100, got 101"),
        ({"k": "many"}, "k", "'many'"),
        ({"query": ""}, "query", "at least"),
        ({"query": "  "}, "query", "at least one word"),
        ({"query": "\u200b\u200b"}, "query", "at least one word"),
        ({"query": "\ufeff\u2060\x00"}, "query", "at least one word"),
        ({"query": "x" * 20_000}, "query", "20,000 characters"),
        ({"query": {"image": "AAAA"}}, "query.image", "cannot be read"),
        ({"query": {"vectors": [[1, 2], [3]]}}, "query", "of equal length"),
        ({"query": {"vectors": [[1, 2]]}}, "query", "vectors of dimension 2"),
        ({"query": {"vectors": [[0.0] * 384]}}, "query", "only zeros"),
        ({"query": {"image": "!"}}, "query.image", "cannot be read"),
        ({"representation": "nope"}, "representation", "hpool_2"),
        ({"representation": "rerank_tokens"}, "representation", "only for reranking"),
        ({"score": "best"}, "score", "'maxsim'"),
        ({"weights": [1, 2]}, "weights", "for the score maxsim"),
        ({"weights": [0, 0], "score": "hybrid"}, "weights", "not both 0"),
        ({"filter": "modality = "}, "filter", "does not parse at its end"),
        ({"filter": "nope = 1"}, "filter", "nope"),
        ({"filter": "1=1; DROP TABLE items"}, "filter", "does not parse"),
        ({"filter": "1" + "+1" * 4900 + "=1"}, "filter", "at most 400 operators"),
        ({"filter": "`repeat`(text, 1000000) = 'x'"}, "filter", "does not parse"),
        ({"group_by": "source"}, "group_by", "parent"),
        ({"rerank": {"top": 101}}, "rerank.top", "at most 100, got 101"),
        ({"rerank": {"representation": "nope"}}, "rerank.representation", "nope"),
        ({"rerank": {"name": "edje"}}, "rerank.name", "indexes.texts.rerank"),
        ({"surprise": 1}, "surprise", "unknown field"),
        ({"rerank": {"depth": 5}}, "rerank.depth", "unknown field"),
    ],
)
def test_error_names_invalid_field(http, change, field, message):
    response = http.post("/v1/search", json={**SEARCH, **change})
    assert message in error_message(response, 422, "invalid_argument", field)


def test_rejects_query_of_invalid_type(http):
    response = http.post("/v1/search", json={**SEARCH, "query": 7})
    assert problem(response).code == "invalid_argument"
    assert problem(response).field.startswith("query")


def image(width: int, height: int) -> str:
    data = io.BytesIO()
    Image.new("1", (width, height)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def test_rejects_images_before_decoding(http):
    response = http.post("/v1/search", json={**SEARCH, "query": {"image": image(9000, 9000)}})
    assert "9000 x 9000" in error_message(response, 422, "invalid_argument", "query.image")
    response = http.post("/v1/search", json={**SEARCH, "query": {"image": image(2, 2)}})
    assert "not supported by the encoder of full" in error_message(
        response, 422, "invalid_argument", "query"
    )


@pytest.mark.parametrize("name", ["nobody", "a" * 300, "../texts", "te\x00xts", "💥"])
def test_rejects_unknown_index(http, name):
    response = http.post("/v1/search", json={**SEARCH, "index": name})
    assert response.status_code in (404, 422) and problem(response).field == "index"


def test_requires_index_if_there_are_several(http):
    response = http.post("/v1/search", json={"query": "heat"})
    assert "texts, whole" in error_message(response, 422, "invalid_argument", "index")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"query": NaN}']
)
def test_rejects_malformed_bodies(http, body):
    response = http.post("/v1/search", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert problem(response).code in ("bad_request", "invalid_argument")


def test_rejects_lone_surrogates(http):
    response = http.post(
        "/v1/search",
        content=b'{"query": "\\ud800", "index": "texts"}',
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code in (400, 422) and problem(response)


def test_accepts_filter_with_maximum_number_of_operators(http):
    for where in ("1" + "+1" * 399 + "=1", " AND ".join(["1"] * 2 + ["k=k"] * 2)):
        assert http.post("/v1/search", json={**SEARCH, "filter": where}).status_code in (200, 422)
    chain = " OR ".join(["item_id = 'flow'"] * 200)
    response = http.post("/v1/search", json={**SEARCH, "filter": chain}).json()
    assert [hit["item_id"] for hit in response["hits"]] == ["flow"]


def test_limits_total_text(http):
    body = {"queries": ["x" * 3_999] * 11, "index": "texts"}
    for route in ("encode", "search:batch"):
        response = http.post(f"/v1/{route}", json=body)
        assert "at most 40,000 characters, got 43,989" in error_message(
            response, 422, "invalid_argument", "queries"
        )


def test_limits_number_of_queries(http):
    response = http.post("/v1/search:batch", json={"queries": ["x"] * 151, "index": "texts"})
    assert "at most 150" in error_message(response, 422, "invalid_argument", "queries")


def test_limits_size_of_bodies(http):
    large = json.dumps({**SEARCH, "ids": ["x" * 1000] * 200}).encode()
    response = http.post("/v1/search", content=large)
    assert "100,000 bytes" in error_message(response, 413, "too_large")

    # 50 MB are rejected before they are read.
    response = http.post("/v1/search", content=b" " * 50_000_000)
    assert response.status_code == 413

    def chunks():
        for start in range(0, len(large), 1 << 14):
            yield large[start : start + (1 << 14)]

    error_message(http.post("/v1/search", content=chunks()), 413, "too_large")


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_rejects_compressed_bodies(http, encoding):
    content = gzip.compress(json.dumps(SEARCH).encode())
    response = http.post("/v1/search", content=content, headers={"Content-Encoding": encoding})
    error = error_message(response, 415, "unsupported_media_type", "Content-Encoding")
    assert error == f"the body must not be compressed, got Content-Encoding {encoding!r}"
    assert response.headers["accept-encoding"] == "identity"


def test_accepts_identity_encoding(http):
    response = http.post("/v1/search", json=SEARCH, headers={"Content-Encoding": "identity"})
    assert response.status_code == 200


# -- paths -----------------------------------------------------------------------------------------


def test_rejects_unknown_paths_and_methods(http):
    error_message(http.get("/nothing"), 404, "not_found")
    error_message(http.get("/v1/search"), 405, "method_not_allowed")
    error_message(http.delete("/v1/indexes"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/healthz", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/v1/search", "POST"),
        ("/v1/search:batch", "POST"),
        ("/v1/encode", "POST"),
        ("/v1/rerank", "POST"),
        ("/v1/indexes", "GET, HEAD"),
        ("/v1/items/a/b", "GET, HEAD"),
        ("/v1/previews/a", "GET, HEAD"),
        ("/v1/evaluations", "GET, HEAD, POST"),
        ("/v1/evaluations/0", "DELETE, GET, HEAD"),
        ("/v1/evaluations/0/files/table.md", "GET, HEAD"),
        ("/docs", "GET, HEAD"),
    ],
)
def test_allow_header_lists_methods(http, path, methods):
    for method in ("PUT", "OPTIONS"):
        response = http.request(method, path)
        error_message(response, 405, "method_not_allowed")
        assert response.headers.get_list("allow") == [methods]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/page/app.js",
        "/page/nothing.js",
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/indexes",
        "/v1/indexes/texts/facets",
        "/v1/items/wing/1?index=texts",
        "/v1/items/nobody?index=texts",
        "/v1/evaluations",
    ],
)
def test_head_is_answered_like_get(http, path):
    get, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_every_get_route_answers_head():
    schema = create_app(lambda: None).openapi()
    for route in (*public.routes, *api.routes, *page.routes):
        assert "GET" not in route.methods or "HEAD" in route.methods
    assert not any("head" in operations for operations in schema["paths"].values())


@pytest.mark.parametrize("name", ["nobody", "../../etc/passwd", "wing%2F..%2F..", "x" * 500, "'"])
def test_rejects_unknown_items(http, name):
    response = http.get(f"/v1/items/{name}", params={"index": "texts"})
    assert response.status_code == 404 and problem(response).code == "not_found"


def test_accepts_item_ids_with_slashes(http):
    for name in ("wing/1", "wing%2F1"):
        response = http.get(f"/v1/items/{name}", params={"index": "texts"})
        assert response.json()["item_id"] == "wing/1"


def test_preview_requires_location_of_files(http):
    response = http.get("/v1/previews/wing/1", params={"index": "texts"})
    assert "changed or removed" in error_message(response, 410, "gone")


# -- authentication and fair sharing ---------------------------------------------------------------


def search(url: str, key: str | None, index: str | None = "texts") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
    body = {"query": "heat", "index": index} if index else {"query": "heat"}
    return httpx2.post(f"{url}/v1/search", json=body, headers=headers, timeout=30)


def test_keys_restrict_access_to_indexes(url):
    assert search(url, "mr_all").status_code == 200
    assert search(url, "mr_few").status_code == 200
    assert search(url, "mr_few", None).json()["index"] == "texts"  # the only one that it can access
    error_message(search(url, "mr_few", "whole"), 404, "not_found", "index")
    error_message(search(url, "mr_none"), 404, "not_found", "index")
    for key in (None, "mr_unknown", "", "mr_old", hash_key("mr_all"), "ключ"):
        response = search(url, key)
        error_message(response, 401, "unauthenticated")
        assert response.headers["www-authenticate"] == "Bearer"
    response = httpx2.get(f"{url}/v1/indexes", headers={"Authorization": "Bearer mr_few"})
    assert [info["name"] for info in response.json()["indexes"]] == ["texts"]


def slow_bodies(stack, url: str, number: int, key: str | None = None) -> list[socket.socket]:
    """Opens connections with requests whose bodies do not arrive."""
    host, _, rest = url.removeprefix("http://").partition("/")
    head = f"POST /{rest}/v1/search HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    connections = []
    for _ in range(number):
        connections.append(stack.enter_context(socket.create_connection(address, timeout=10)))
        connections[-1].sendall(f"{head}\r\n{{".encode())
    return connections


def test_rejects_requests_without_key_before_body(url):
    with contextlib.ExitStack() as stack:
        connections = slow_bodies(stack, url, 140)  # more than `max_pending_bodies`
        assert b"401" in connections[-1].recv(100)
        assert search(url, "mr_all").status_code == 200
    error_message(httpx2.post(f"{url}/v1/search", content=b"{"), 401, "unauthenticated")


def test_slow_bodies_do_not_block_other_keys(url):
    """A key gets at most half of the slots; further requests are rejected immediately."""
    with contextlib.ExitStack() as stack:
        connections = slow_bodies(stack, url, 140, "mr_all")
        assert b"503" in connections[-1].recv(100)
        assert search(url, "mr_other").status_code == 200
        message = error_message(search(url, "mr_all"), 503, "unavailable")
        assert message == "the key all has too many requests with incomplete bodies"
    wait_until(lambda: search(url, "mr_all").status_code == 200)


def test_proxy_closes_connections_with_incomplete_headers(url):
    """The time limit is two seconds in the tests."""
    host = url.removeprefix("http://").partition("/")[0]
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(50):
            connections.append(stack.enter_context(socket.create_connection(address, timeout=10)))
            connections[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: h")
        assert search(url, "mr_all").status_code == 200
        assert all(b"headers took longer" in connection.recv(1000) for connection in connections)


def test_health_checks_need_no_key(url):
    assert httpx2.get(f"{url}/healthz").json() == {"status": "ok"}
    assert httpx2.get(f"{url}/readyz", timeout=30).json() == {"status": "ready"}
    error_message(httpx2.get(f"{url}/metrics"), 401, "unauthenticated")


def test_adds_and_revokes_keys_without_restart(url, keys_file):
    content = keys_file.read_text()
    try:
        write_keys(keys_file, {**KEYS, "mr_new": {"name": "new"}})
        wait_until(lambda: search(url, "mr_new").status_code == 200)
        keys_file.write_text(content)
        wait_until(lambda: search(url, "mr_new").status_code == 401)
        keys_file.write_text("keys: [")
        wait_until(lambda: search(url, "mr_all").status_code == 503)
        error_message(search(url, "mr_all"), 503, "unavailable", None)
    finally:
        keys_file.write_text(content)
    wait_until(lambda: search(url, "mr_all").status_code == 200)


def wait_until(condition: Callable[[], bool], timeout_s: float = 15) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_rate_limit(url):
    responses = [search(url, "mr_slow") for _ in range(7)]
    assert [r.status_code for r in responses] == [200] * 5 + [429] * 2
    error_message(responses[-1], 429, "rate_limited")
    assert int(responses[-1].headers["retry-after"]) > 50
    assert search(url, "mr_all").status_code == 200


# -- request ids, logs, metrics and schema ---------------------------------------------------------


def test_request_ids(http):
    response = http.post("/v1/search", json=SEARCH, headers={"X-Request-ID": "mine-1"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert response.json()["request_id"] == "mine-1"
    response = http.post("/v1/search", json=SEARCH, headers={"X-Request-ID": "mine-1"})
    (second,) = response.headers.get_list("x-request-id")
    assert second == response.json()["request_id"] and second.startswith("mine-1.")
    response = http.post("/v1/search", json={}, headers={"X-Request-ID": "not valid"})
    assert problem(response).request_id != "not valid"
    assert len(response.headers.get_list("x-request-id")) == 1
    assert http.post("/v1/search", json=SEARCH).json()["request_id"]


def test_logs_of_all_stages_contain_request_id_but_not_query(http):
    import ray

    query = {
        **SEARCH,
        "query": "zeppelin",
        "representation": "hpool_2",
        "rerank": {"top": 3},
    }
    http.post("/v1/search", json=query, headers={"X-Request-ID": "trace-7"})
    session = ray._private.worker.global_worker.node.get_session_dir_path()

    def read_logs() -> str:
        return "".join(p.read_text("utf-8") for p in Path(session, "logs/serve").glob("*.log"))

    def lines() -> list[dict]:
        logged = [line for line in read_logs().splitlines() if '"request_id": "trace-7"' in line]
        return [json.loads(line) for line in logged]

    wait_until(lambda: any(line.get("event") == "request" for line in lines()))
    assert "zeppelin" not in read_logs()
    entries = [line for line in lines() if "event" in line]
    assert {"encode", "rank", "describe"} <= {entry.get("stage") for entry in entries}
    (request,) = [entry for entry in entries if entry["event"] == "request"]
    assert (request["key"], request["status"], request["k"]) == ("all", 200, 10)
    assert (request["index"], request["route"]) == ("texts", "/both/v1/search")


def test_disconnected_clients_release_slots(url):
    """Clients disconnect before the end of their body or before the response."""
    host, _, rest = url.removeprefix("http://").partition("/")
    body = json.dumps(SEARCH).encode()
    head = f"POST /{rest}/v1/search HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer mr_all\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    for sent in (head.encode(), head.encode() + body[:5], head.encode() + body):
        for _ in range(140):  # more than `max_in_flight_requests`
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(sent)
    wait_until(lambda: search(url, "mr_all").status_code == 200)
    assert all(search(url, "mr_all").status_code == 200 for _ in range(5))


def test_responses_contain_no_paths_of_the_server(http, index_uri):
    for response in (
        http.post("/v1/search", json={**SEARCH, "explain": "map"}),
        http.get("/v1/indexes"),
        http.get("/v1/items/wing/1", params={"index": "texts"}),
        http.get("/v1/previews/wing/1", params={"index": "texts"}),
        http.post("/v1/search", json={**SEARCH, "filter": "x ="}),
    ):
        assert index_uri not in response.text and "/tmp" not in response.text


def test_metrics_count_requests(http):
    for _ in range(3):
        http.post("/v1/search", json=SEARCH)
    texts = []

    def collected():
        texts.append(http.get("/metrics").text)
        return "maxray_request_seconds" in texts[-1]

    wait_until(collected, 60)  # processes export once in a while, and busy nodes respond late
    text = texts[-1]
    assert 'stage="encode"' in text and 'route="/v1/search"' in text
    assert "# TYPE ray_maxray_requests" in text
    assert f'key="{hash_key("mr_all")[:8]}"' in text and 'key="all"' not in text


def test_openapi_schema_lists_routes(http):
    schema = http.get("/openapi.json").json()
    routes = "search search:batch encode rerank items/{item_id} previews/{item_id} indexes"
    paths = {f"/v1/{route}" for route in (*routes.split(), "evaluations")}
    paths |= {"/healthz", "/readyz", "/metrics"}
    assert paths <= set(schema["paths"])


def test_openapi_schema_describes_all_fields(http):
    schema = http.get("/openapi.json").json()
    for name, component in schema["components"]["schemas"].items():
        if name not in ("HTTPValidationError", "ValidationError"):  # defined by FastAPI
            for field, definition in component.get("properties", {}).items():
                assert "description" in definition, f"{name}.{field}"

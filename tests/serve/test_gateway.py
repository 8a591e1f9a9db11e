"""Who may ask, what may be asked, and that every error has one form."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
from pathlib import Path

import httpx2
import pytest
from PIL import Image

from pipeline.serve import wire
from pipeline.serve.keys import hash_of
from tests.serve.conftest import KEYS, write_keys

SEARCH = {"query": "the lift of a wing", "index": "texts"}


def problem(response: httpx2.Response) -> wire.Problem:
    """The error of an answer; its form is checked on the way."""
    assert response.headers["content-type"] == "application/json"
    error = wire.ErrorAnswer.model_validate_json(response.content).error
    assert error.request_id == response.headers["x-request-id"]
    assert set(response.json()) == {"error"}
    return error


def refused(response: httpx2.Response, status: int, code: str, field: str | None = None) -> str:
    error = problem(response)
    assert (response.status_code, error.code, error.field) == (status, code, field), error
    return error.message


# -- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"k": 0}, "k", "0"),
        ({"k": 101}, "k", "at most 100, got 101"),
        ({"k": "many"}, "k", "'many'"),
        ({"query": ""}, "query", "at least"),
        ({"query": "  "}, "query", "at least one word"),
        ({"query": "x" * 20_000}, "query", "20,000 characters"),
        ({"query": {"image": "AAAA"}}, "query.image", "cannot be read"),
        ({"query": {"vectors": [[1, 2], [3]]}}, "query", "of equal length"),
        ({"query": {"vectors": [[1, 2]]}}, "query", "vectors of 2 numbers"),
        ({"query": {"vectors": [[0.0] * 384]}}, "query", "zeros"),
        ({"query": {"image": "!"}}, "query.image", "cannot be read"),
        ({"representation": "nope"}, "representation", "hpool_2"),
        ({"representation": "rerank_tokens"}, "representation", "only for reranking"),
        ({"score": "best"}, "score", "'late'"),
        ({"weights": [1, 2]}, "weights", "hybrid"),
        ({"weights": [0, 0], "score": "hybrid"}, "weights", "not both 0"),
        ({"filter": "modality = "}, "filter", "does not parse at its end"),
        ({"filter": "nope = 1"}, "filter", "nope"),
        ({"filter": "1=1; DROP TABLE items"}, "filter", "does not parse"),
        ({"filter": "1" + "+1" * 4900 + "=1"}, "filter", "at most 400 operators"),
        ({"filter": "`repeat`(text, 1000000) = 'x'"}, "filter", "does not parse"),
        ({"group_by": "source"}, "group_by", "parent"),
        ({"rerank": {"rerank_depth": 101}}, "rerank.rerank_depth", "at most 100, got 101"),
        ({"rerank": {"representation": "nope"}}, "rerank.representation", "nope"),
        ({"rerank": {"by": "edje"}}, "rerank.by", "indexes.texts.edje"),
        ({"surprise": 1}, "surprise", "unknown field"),
    ],
)
def test_an_invalid_request_names_its_field(http, change, field, says):
    response = http.post("/v1/search", json={**SEARCH, **change})
    assert says in refused(response, 422, "invalid_argument", field)


def test_a_query_of_another_kind_names_the_query(http):
    response = http.post("/v1/search", json={**SEARCH, "query": 7})
    assert problem(response).code == "invalid_argument"
    assert problem(response).field.startswith("query")


def image(width: int, height: int) -> str:
    data = io.BytesIO()
    Image.new("1", (width, height)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def test_images_are_looked_at_before_they_are_decoded(http):
    response = http.post("/v1/search", json={**SEARCH, "query": {"image": image(9000, 9000)}})
    assert "9000 x 9000" in refused(response, 422, "invalid_argument", "query.image")
    response = http.post("/v1/search", json={**SEARCH, "query": {"image": image(2, 2)}})
    assert "is not read by the encoder of full" in refused(
        response, 422, "invalid_argument", "query"
    )


@pytest.mark.parametrize("name", ["nobody", "a" * 300, "../texts", "te\x00xts", "💥"])
def test_an_unknown_index(http, name):
    response = http.post("/v1/search", json={**SEARCH, "index": name})
    assert response.status_code in (404, 422) and problem(response).field == "index"


def test_several_indexes_and_none_named(http):
    response = http.post("/v1/search", json={"query": "heat"})
    assert "texts, whole" in refused(response, 422, "invalid_argument", "index")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"query": NaN}']
)
def test_bodies_that_are_no_request(http, body):
    response = http.post("/v1/search", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert problem(response).code in ("bad_request", "invalid_argument")


def test_lone_surrogates_are_no_text(http):
    response = http.post(
        "/v1/search",
        content=b'{"query": "\\ud800", "index": "texts"}',
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code in (400, 422) and problem(response)


def test_filters_of_as_many_operators_as_there_may_be(http):
    for where in ("1" + "+1" * 399 + "=1", " AND ".join(["1"] * 2 + ["k=k"] * 2)):
        assert http.post("/v1/search", json={**SEARCH, "filter": where}).status_code in (200, 422)
    chain = " OR ".join(["item_id = 'flow'"] * 200)
    found = http.post("/v1/search", json={**SEARCH, "filter": chain}).json()
    assert [hit["item_id"] for hit in found["hits"]] == ["flow"]


def test_more_text_than_a_server_allows(http):
    asked = {"queries": ["x" * 3_999] * 11, "index": "texts"}
    for route in ("encode", "search:batch"):
        response = http.post(f"/v1/{route}", json=asked)
        assert "43,989 characters" in refused(response, 422, "invalid_argument", "queries")


def test_more_queries_than_a_server_allows(http):
    response = http.post("/v1/search:batch", json={"queries": ["x"] * 151, "index": "texts"})
    assert "at most 150" in refused(response, 422, "invalid_argument", "queries")


def test_bodies_that_are_too_large(http):
    large = json.dumps({**SEARCH, "ids": ["x" * 1000] * 200}).encode()
    response = http.post("/v1/search", content=large)
    assert "100,000 bytes" in refused(response, 413, "too_large")

    # Fifty megabytes are refused before they are read.
    response = http.post("/v1/search", content=b" " * 50_000_000)
    assert response.status_code == 413

    def chunks():
        for start in range(0, len(large), 1 << 14):
            yield large[start : start + (1 << 14)]

    refused(http.post("/v1/search", content=chunks()), 413, "too_large")


# -- paths -----------------------------------------------------------------------------------------


def test_unknown_paths_and_methods(http):
    refused(http.get("/nothing"), 404, "not_found")
    refused(http.get("/v1/search"), 405, "method_not_allowed")
    refused(http.delete("/v1/indexes"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/healthz", "GET"),
        ("/metrics", "GET"),
        ("/v1/search", "POST"),
        ("/v1/search:batch", "POST"),
        ("/v1/encode", "POST"),
        ("/v1/rerank", "POST"),
        ("/v1/indexes", "GET"),
        ("/v1/items/a/b", "GET"),
        ("/v1/previews/a", "GET"),
        ("/v1/evaluations", "GET, POST"),
        ("/v1/evaluations/0", "DELETE, GET"),
        ("/v1/evaluations/0/files/table.md", "GET"),
    ],
)
def test_methods_of_a_path(http, path, methods):
    for method in ("PUT", "OPTIONS"):
        response = http.request(method, path)
        refused(response, 405, "method_not_allowed")
        assert response.headers.get_list("allow") == [methods]


@pytest.mark.parametrize("name", ["nobody", "../../etc/passwd", "wing%2F..%2F..", "x" * 500, "'"])
def test_unknown_items(http, name):
    response = http.get(f"/v1/items/{name}", params={"index": "texts"})
    assert response.status_code == 404 and problem(response).code == "not_found"


def test_ids_with_slashes(http):
    for name in ("wing/1", "wing%2F1"):
        response = http.get(f"/v1/items/{name}", params={"index": "texts"})
        assert response.json()["item_id"] == "wing/1"


def test_an_index_of_which_no_job_says_where_its_files_lie(http):
    response = http.get("/v1/previews/wing/1", params={"index": "texts"})
    assert "not there any more" in refused(response, 410, "gone")


# -- who may ask -----------------------------------------------------------------------------------


def ask(url: str, key: str | None, index: str | None = "texts") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
    body = {"query": "heat", "index": index} if index else {"query": "heat"}
    return httpx2.post(f"{url}/v1/search", json=body, headers=headers, timeout=30)


def test_keys_open_what_they_are_for(url):
    assert ask(url, "mr_all").status_code == 200
    assert ask(url, "mr_few").status_code == 200
    assert ask(url, "mr_few", None).json()["index"] == "texts"  # the only one it sees
    refused(ask(url, "mr_few", "whole"), 404, "not_found", "index")
    refused(ask(url, "mr_none"), 404, "not_found", "index")
    for key in (None, "mr_unknown", "", "mr_old", hash_of("mr_all"), "ключ"):
        response = ask(url, key)
        refused(response, 401, "unauthenticated")
        assert response.headers["www-authenticate"] == "Bearer"
    response = httpx2.get(f"{url}/v1/indexes", headers={"Authorization": "Bearer mr_few"})
    assert [info["name"] for info in response.json()["indexes"]] == ["texts"]


def slow_bodies(stack, url: str, number: int, key: str | None = None) -> list[socket.socket]:
    """Connections with requests whose bodies do not arrive."""
    host, _, rest = url.removeprefix("http://").partition("/")
    head = f"POST /{rest}/v1/search HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    connections = []
    for _ in range(number):
        connections.append(stack.enter_context(socket.create_connection(address, timeout=10)))
        connections[-1].sendall(f"{head}\r\n{{".encode())
    return connections


def test_nobody_without_a_key_takes_a_place(url):
    """What is to come in is not waited for."""
    with contextlib.ExitStack() as stack:
        connections = slow_bodies(stack, url, 140)  # more than are waited for
        assert b"401" in connections[-1].recv(100)
        assert ask(url, "mr_all").status_code == 200
    refused(httpx2.post(f"{url}/v1/search", content=b"{"), 401, "unauthenticated")


def test_slow_bodies_of_a_key_lock_nobody_out(url):
    """One key gets half of the places; those who have none are told at once."""
    with contextlib.ExitStack() as stack:
        connections = slow_bodies(stack, url, 140, "mr_all")
        assert b"503" in connections[-1].recv(100)
        assert ask(url, "mr_other").status_code == 200
        message = refused(ask(url, "mr_all"), 503, "unavailable")
        assert message == "the key all has too many requests whose body has not arrived"
    wait_until(lambda: ask(url, "mr_all").status_code == 200)


def test_connections_without_complete_headers_are_closed(url):
    """By Ray's proxy too, after the two seconds of the tests."""
    host = url.removeprefix("http://").partition("/")[0]
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(50):
            connections.append(stack.enter_context(socket.create_connection(address, timeout=10)))
            connections[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: h")
        assert ask(url, "mr_all").status_code == 200
        assert all(b"headers took longer" in each.recv(1000) for each in connections)


def test_operation_needs_no_key(url):
    assert httpx2.get(f"{url}/healthz").json() == {"status": "ok"}
    assert httpx2.get(f"{url}/readyz", timeout=30).json() == {"status": "ready"}
    refused(httpx2.get(f"{url}/metrics"), 401, "unauthenticated")


def test_a_key_is_revoked_and_added_without_a_restart(url, keys_file):
    kept = keys_file.read_text()
    try:
        write_keys(keys_file, {**KEYS, "mr_new": {"name": "new"}})
        wait_until(lambda: ask(url, "mr_new").status_code == 200)
        keys_file.write_text(kept)
        wait_until(lambda: ask(url, "mr_new").status_code == 401)
        keys_file.write_text("keys: [")
        wait_until(lambda: ask(url, "mr_all").status_code == 503)
        refused(ask(url, "mr_all"), 503, "unavailable", None)
    finally:
        keys_file.write_text(kept)
    wait_until(lambda: ask(url, "mr_all").status_code == 200)


def wait_until(holds, seconds: float = 15) -> None:
    import time

    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_key_that_asks_too_often(url):
    answers = [ask(url, "mr_slow") for _ in range(7)]
    assert [a.status_code for a in answers] == [200] * 5 + [429] * 2
    refused(answers[-1], 429, "rate_limited")
    assert int(answers[-1].headers["retry-after"]) > 50
    assert ask(url, "mr_all").status_code == 200


# -- what is said ----------------------------------------------------------------------------------


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


def test_one_id_in_the_logs_of_all_stages(http):
    """And none of them holds the query."""
    import ray

    query = {
        **SEARCH,
        "query": "zeppelin",
        "representation": "hpool_2",
        "rerank": {"rerank_depth": 3},
    }
    http.post("/v1/search", json=query, headers={"X-Request-ID": "trace-7"})
    session = ray._private.worker.global_worker.node.get_session_dir_path()

    def written() -> str:
        return "".join(p.read_text("utf-8") for p in Path(session, "logs/serve").glob("*.log"))

    def lines() -> list[dict]:
        own = [line for line in written().splitlines() if '"request_id": "trace-7"' in line]
        return [json.loads(line) for line in own]

    wait_until(lambda: any('"request"' in line["message"] for line in lines()))
    assert "zeppelin" not in written()
    said = [json.loads(line["message"]) for line in lines() if line["message"].startswith("{")]
    assert {"encode", "rank", "describe"} <= {each.get("stage") for each in said}
    (request,) = [each for each in said if each["event"] == "request"]
    assert (request["key"], request["status"], request["k"]) == ("all", 200, 10)


def test_clients_that_hang_up(url):
    """Before their body has come, or before their answer: they take nobody's place."""
    host, _, rest = url.removeprefix("http://").partition("/")
    body = json.dumps(SEARCH).encode()
    head = f"POST /{rest}/v1/search HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer mr_all\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    for sent in (head.encode(), head.encode() + body[:5], head.encode() + body):
        for _ in range(140):  # more than may be in progress
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(sent)
    wait_until(lambda: ask(url, "mr_all").status_code == 200)
    assert all(ask(url, "mr_all").status_code == 200 for _ in range(5))


def test_nothing_tells_where_the_server_keeps_things(http, index_uri):
    for response in (
        http.post("/v1/search", json={**SEARCH, "explain": "map"}),
        http.get("/v1/indexes"),
        http.get("/v1/items/wing/1", params={"index": "texts"}),
        http.get("/v1/previews/wing/1", params={"index": "texts"}),
        http.post("/v1/search", json={**SEARCH, "filter": "x ="}),
    ):
        assert index_uri not in response.text and "/tmp" not in response.text


def test_metrics_count_what_was_asked(http):
    for _ in range(3):
        http.post("/v1/search", json=SEARCH)
    wait_until(lambda: "maxray_request_seconds" in http.get("/metrics").text, 60)
    text = http.get("/metrics").text
    assert 'stage="encode"' in text and 'route="/v1/search"' in text
    assert "# TYPE ray_maxray_requests" in text
    assert f'key="{hash_of("mr_all")[:8]}"' in text and 'key="all"' not in text


def test_the_api_describes_itself(http):
    described = http.get("/openapi.json").json()
    routes = "search search:batch encode rerank items/{item_id} previews/{item_id} indexes"
    paths = {f"/v1/{route}" for route in (*routes.split(), "evaluations")}
    paths |= {"/healthz", "/readyz", "/metrics"}
    assert paths <= set(described["paths"])

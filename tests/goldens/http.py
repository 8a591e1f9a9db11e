"""Requests to a server of the small indexes, and its responses."""

from __future__ import annotations

import base64
import shutil
import time
from typing import Any

import httpx2
import numpy as np

from pipeline.config import parse
from tests.conftest import ROOT
from tests.goldens.files import DIGEST, digest, summary
from tests.goldens.indexes import INDEXES, folder, inputs
from tests.serve.conftest import free_port, write_keys

KEYS = {
    "mr_all": {"name": "all", "evaluate": True, "delete": True},
    "mr_few": {"name": "few", "indexes": ["demo"]},
    "mr_slow": {"name": "slow", "requests_per_second": 0.001},
    "mr_old": {"name": "old", "expires": "2020-01-01"},
}
#: Fields that differ between runs: ids, times, and the number of commits.
VOLATILE = ("request_id", "version", "durations_ms", "created", "finished", "progress")
HEADERS = ("content-type", "content-range", "allow", "cache-control", "www-authenticate")
#: Length from which a list of numbers is summarised.
LONG = 16
#: Length from which a text is shortened.
LONG_TEXT = 100


def requests() -> dict[str, dict[str, Any]]:
    """Reads the requests by name."""
    image = base64.b64encode((folder() / "shapes-data/images/scene-00003.png").read_bytes())
    found = inputs("requests", SCENE_IMAGE=image.decode())
    return {name: {"send": r} if isinstance(r, str) else r for name, r in found.items()}


def plain(value: Any) -> Any:
    """Removes the fields that differ between runs, and summarises long lists of numbers."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return f"{value[:LONG_TEXT]}... {len(value)} characters {digest(value.encode())}"
    if not isinstance(value, list):
        return value
    if len(value) > LONG and all(isinstance(inner, float) for inner in value):
        return summary(np.array(value))
    return [plain(inner) for inner in value]


def answer(response: httpx2.Response) -> dict[str, Any]:
    """Returns the status, some headers and the body of a response."""
    found = {"status": response.status_code}
    found |= {name: response.headers[name] for name in HEADERS if name in response.headers}
    kind, path = found.get("content-type", ""), response.url.path
    if path == "/openapi.json":
        found["paths"] = sorted(response.json()["paths"])  # the part `surface` has the rest
    elif kind == "application/json" and response.content:
        found["body"] = plain(response.json())
    elif path.startswith("/v1/"):
        found["body"] = {DIGEST: digest(response.content), "bytes": len(response.content)}
    return found


def responses() -> dict[str, Any]:
    """Starts a server, sends the requests and returns the answers by the names of the requests."""
    from ray import serve

    from pipeline.serve.app import build
    from pipeline.serve.settings import ServeSpec

    uris = {name: create() for name, create in INDEXES.items()}
    uris["copy"] = str(shutil.copytree(uris["shapes"], folder() / "copy"))
    indexes: dict[str, Any] = {name: {"uri": uri} for name, uri in uris.items()}
    indexes["demo"]["num_shards"] = 2
    model = str(ROOT / "jobs/data/models/shapes_edje")
    indexes["shapes"]["rerank"] = {"name": "edje", "model": model}
    write_keys(folder() / "keys.yaml", KEYS)
    members = {"demo": {"index": "demo"}, "methods": {"index": "methods", "weight": 0.5}}
    settings = {
        "indexes": indexes,
        "federations": {"joined": {"members": members}},
        "keys": str(folder() / "keys.yaml"),
        "single_process": True,
        "limits": {"max_k": 100, "max_body_bytes": 100_000, "burst": 1},
        "evaluations": {"folder": str(folder() / "evaluations-of-server")},
        "timeouts": {"encode_s": 60, "search_s": 60, "filter_s": 60, "describe_s": 60},
    }
    port, found = free_port(), {}
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(parse(ServeSpec, settings)))
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        for name, request in requests().items():
            method, path = request.get("send", "POST /v1/search").split(" ")
            headers = dict(request.get("headers", ()))
            if key := request.get("key", "mr_all"):
                headers["Authorization"] = f"Bearer {key}"
            content = request.get("content", b" " * request.get("size", 0))
            body = {"json": request["body"]} if "body" in request else {"content": content}
            response = client.request(method, path, headers=headers, **body)
            while request.get("wait") and response.json()["state"] in ("queued", "running"):
                time.sleep(1)
                response = client.request(method, path, headers=headers)
            found[name] = answer(response)
    serve.delete("default")
    return found

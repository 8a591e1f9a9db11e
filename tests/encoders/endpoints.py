"""Local HTTP server with a tiny model and the interfaces of OpenAI and vLLM."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from PIL import Image
from transformers import AutoModel, AutoTokenizer, ColPaliForRetrieval, ColPaliProcessor

from tests.hub import running

#: Name under which the server serves its model.
MODEL = "tiny/model"


class TextModel:
    """Text encoder of transformers, with unit vectors of all tokens."""

    def __init__(self, folder: str):
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()
        self.dim = self._model.config.hidden_size

    @torch.no_grad()
    def tokens(self, text: str) -> torch.Tensor:
        """Returns unit vectors (M, D)."""
        inputs = self._tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
        states = self._model(inputs["input_ids"]).last_hidden_state[0]
        return torch.nn.functional.normalize(states, dim=-1)


class ImageModel:
    """ColPali of transformers for images and raw texts."""

    dim = 16

    def __init__(self, folder: str):
        self._model = ColPaliForRetrieval.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = ColPaliProcessor.from_pretrained(folder)

    @torch.no_grad()
    def tokens(self, content: str | Image.Image) -> torch.Tensor:
        """Returns unit vectors (M, D)."""
        if isinstance(content, str):
            inputs = self._processor.tokenizer(content, return_tensors="pt")
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        else:
            inputs = self._processor.process_images([content], return_tensors="pt")
            inputs.pop("labels", None)
        return self._model(**inputs).embeddings[0]


class Server(ThreadingHTTPServer):
    """Server of one model.

    Attributes:
        faults: Statuses and headers of the next responses, before the server answers normally.
        delay_s: Delay of responses.
        change: Function that changes the content of responses.
        key: Required API key, or None.
        requests: Bodies of all requests that were answered.
        concurrent, max_concurrent: Number of requests in progress, and its maximum.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, model: Any):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.lock = model, threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Removes faults and recorded requests."""
        self.faults: list[tuple[int, dict[str, str]]] = []
        self.delay_s, self.key, self.num_requests = 0.0, None, 0
        self.change: Callable[[dict[str, Any]], Any] = lambda content: content
        self.requests: list[dict[str, Any]] = []
        self.names = [MODEL]
        self.concurrent = self.max_concurrent = 0

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def results(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Computes the results of a request."""
        if "messages" in body:
            (message,) = body["messages"]
            url = message["content"][0]["image_url"]["url"]
            header, _, data = url.partition(",")
            assert header in ("data:image/png;base64", "data:image/jpeg;base64"), header
            inputs: list[Any] = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")]
        else:
            inputs = body["input"]
        matrices = [self.model.tokens(content) for content in inputs]
        if path == "/pooling":
            assert body["task"] == "token_embed"
            return [{"index": i, "data": m.tolist()} for i, m in enumerate(matrices)]
        vectors = [torch.nn.functional.normalize(m.mean(dim=0), dim=0) for m in matrices]
        return [{"index": i, "embedding": v.tolist()} for i, v in enumerate(vectors)]


class Handler(BaseHTTPRequestHandler):
    """Handler of requests."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._is_refused():
            return
        if self.path != "/v1/models" or not self.server.names:
            self._send(404, {"detail": "Not Found"})
            return
        self._send(200, {"object": "list", "data": [{"id": name} for name in self.server.names]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.concurrent += 1
            server.max_concurrent = max(server.max_concurrent, server.concurrent)
        time.sleep(server.delay_s)
        try:
            if self._is_refused():
                return
            with server.lock:
                server.requests.append(body)
                results = server.results(self.path, body)
            content = server.change({"object": "list", "model": body["model"], "data": results})
            self._send(200, content)
        finally:
            with server.lock:
                server.concurrent -= 1

    def _is_refused(self) -> bool:
        """Sends the next fault, if any, and checks the key."""
        server = self.server
        with server.lock:
            server.num_requests += 1
            fault = server.faults.pop(0) if server.faults else None
        if fault is not None:
            self._send(fault[0], {"error": {"message": "fault"}}, fault[1])
            return True
        given = self.headers["Authorization"]
        if server.key is not None and given != f"Bearer {server.key}":
            self._send(401, {"error": {"message": f"invalid key {given}"}})
            return True
        return False

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # after a timeout
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no log."""


def serve(model: Any) -> contextlib.AbstractContextManager[Server]:
    """Serves a model at a free port."""
    return running(Server(model))

"""Collector of OpenTelemetry traces, which receives OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector has received it.

    Attributes:
        name: Name of the span.
        trace: Id of the trace.
        id: Id of the span.
        parent: Id of the parent, or empty bytes.
        start: Start, in nanoseconds since 1970.
        end: End, in nanoseconds since 1970.
        attributes: Attributes of the span and of its resource.
    """

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: int
    end: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    """Spans that were received at `endpoint`."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def named(self, prefix: str) -> list[ReceivedSpan]:
        """Returns the spans whose name starts with a prefix."""
        return [span for span in self.spans if span.name.startswith(prefix)]

    def add(self, body: bytes) -> None:
        """Adds the spans of an export request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = _attributes([*resource.resource.attributes, *span.attributes])
                    self.spans.append(
                        ReceivedSpan(
                            span.name,
                            span.trace_id,
                            span.span_id,
                            span.parent_span_id,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            attributes,
                        )
                    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Runs a collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()

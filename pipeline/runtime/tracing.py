"""OpenTelemetry traces of searches and of index jobs.

Traces are exported with OTLP over HTTP if the standard variables of OpenTelemetry name a collector:

    pip install "maxray[otel]"
    export OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318

A server uses the tracing of Ray Serve, which opens the spans of proxies, gateways and stages and
propagates the context between them; `span` adds the steps of a search. `maxray serve` turns
it on. On a cluster, also set these variables on every node before `ray start`:

    export RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=pipeline.runtime.tracing:span_processors
    export RAY_SERVE_TRACING_SAMPLING_RATIO=1

A job exports its trace from the driver, which receives the times of the steps of each unit. Its
workers need neither the variables nor the extra.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.extras import require

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

#: Variables of OpenTelemetry with the address of a collector.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: Module of the exporter, which the extra `otel` installs.
EXPORTER = "opentelemetry.exporter.otlp"
#: Name of the service in traces, unless `OTEL_SERVICE_NAME` is set.
SERVICE_NAME = "maxray"


def is_configured() -> bool:
    """Checks whether the variables of OpenTelemetry name a collector of traces."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    has_exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    has_endpoint = any(map(os.environ.get, ENDPOINT_VARIABLES))
    return has_endpoint and has_exporter and not is_disabled


def span_processors() -> list[SpanProcessor]:
    """Returns the processors that export spans. Called by Ray Serve in each of its processes."""
    if not is_configured():
        return []
    require(EXPORTER)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SERVICE_NAME", SERVICE_NAME)
    return [BatchSpanProcessor(OTLPSpanExporter())]


@contextlib.contextmanager
def job_span(kind: str, job: str, index: str) -> Iterator[None]:
    """Opens the span of a job, to which the spans of its phases, units and commits belong.

    Raises:
        MissingExtra: A collector is configured, and the exporter is not installed.
    """
    if not is_configured():
        yield
        return
    require(EXPORTER)
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if not isinstance(provider := trace.get_tracer_provider(), TracerProvider):
        processors = span_processors()  # sets the name of the service
        provider = TracerProvider()
        for processor in processors:
            provider.add_span_processor(processor)
        trace.set_tracer_provider(provider)
    try:
        with _started(f"{kind} job", {"job": job, "index": index}):
            yield
    finally:
        provider.force_flush()


@contextlib.contextmanager
def span(name: str, **attributes: Any) -> Iterator[None]:
    """Adds a span to the current trace. Does nothing outside of a sampled trace."""
    if not _is_recording():
        yield
        return
    with _started(name, attributes):
        yield


def record_steps(name: str, steps: Mapping[str, tuple[float, float]], **attributes: Any) -> None:
    """Adds the span of a unit and those of its steps, which other processes have measured.

    `steps` has the start, in seconds since 1970, and the duration in seconds of each.
    """
    if not steps or not _is_recording():
        return
    from opentelemetry import trace

    tracer, prefixed = trace.get_tracer(SERVICE_NAME), _prefixed(attributes)
    times = {step: (_ns(start), _ns(start + seconds)) for step, (start, seconds) in steps.items()}
    first, last = min(start for start, _ in times.values()), max(end for _, end in times.values())
    parent = tracer.start_span(name, attributes=prefixed, start_time=first)
    context = trace.set_span_in_context(parent)
    for step, (start, end) in times.items():
        tracer.start_span(step, context, attributes=prefixed, start_time=start).end(end)
    parent.end(last)


def _is_recording() -> bool:
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:  # it comes with Ray Serve
        return False
    return trace.get_current_span().is_recording()


@contextlib.contextmanager
def _started(name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
    from opentelemetry import trace

    # The messages of errors may contain parts of queries, which traces must not.
    with trace.get_tracer(SERVICE_NAME).start_as_current_span(
        name,
        attributes=_prefixed(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield
        except Exception as error:
            current.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"maxray.{name}": value for name, value in attributes.items() if value is not None}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)

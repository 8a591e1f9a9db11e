"""Traces of real jobs and servers, as a collector receives them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import yaml
from opentelemetry import trace

from pipeline.index import EXECUTOR
from pipeline.index.reader import IndexReader
from pipeline.runtime import tracing
from tests.collector import Collector, ReceivedSpan, running_collector
from tests.conftest import run_jobs, start_job
from tests.jobs.test_serve import wait_until_it_answers
from tests.runtime.test_logs import SPEC
from tests.serve.conftest import free_port

ENDPOINT = tracing.ENDPOINT_VARIABLES[1]


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip(tracing.EXPORTER)
    with running_collector() as collector:
        yield collector


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({ENDPOINT: "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({ENDPOINT: "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_standard_variables_configure_traces(monkeypatch, variables, expected):
    for name in (*tracing.ENDPOINT_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing.is_configured() == expected


def test_nothing_is_recorded_without_a_collector(monkeypatch):
    for name in tracing.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = trace.get_tracer_provider()
    with tracing.job_span("index", "job", "index"), tracing.span("phase"):
        assert not trace.get_current_span().is_recording()
        tracing.record_steps("unit", {"read": (0.0, 1.0)})
    assert trace.get_tracer_provider() is before


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    """Returns the spans directly below a span, in the order of their start."""
    return sorted((s for s in spans if s.parent == parent.id), key=lambda span: span.start)


@pytest.mark.parametrize("executor", ["process", pytest.param("ray", marks=pytest.mark.heavy)])
def test_trace_of_an_index_job(collector, collection: Callable[..., Path], tmp_path, executor):
    documents = {f"d{number}": f"text {number}" for number in range(10)}
    source = {"name": "text", "path": str(collection(**documents))}
    uri, spec = str(tmp_path / "index"), str(tmp_path / "spec.yaml")
    Path(spec).write_text(yaml.safe_dump({"index": uri, "source": source, **SPEC}))
    environment = {EXECUTOR: executor, ENDPOINT: collector.endpoint}
    environment |= {"OTEL_RESOURCE_ATTRIBUTES": "team=search"}
    done = run_jobs(["index", spec], **environment)
    assert done.returncode == 0, done.stderr
    assert len({span.trace for span in collector.spans}) == 1

    (root,) = collector.named("index job")
    assert root.parent == b"" and root.attributes["maxray.index"] == uri
    assert (root.attributes["service.name"], root.attributes["team"]) == ("maxray", "search")
    phases = [span.name for span in children(collector.spans, root)]
    assert phases[0] == "index ids" and {"list", "load encoder", "index", "finish"} <= set(phases)

    job = root.attributes["maxray.job"]
    units = collector.named("unit")
    names = {f"000000-00000{number}" for number in range(3)}
    assert {span.attributes["maxray.unit"] for span in units} == names
    assert (
        sum(span.attributes["maxray.items"] for span in units)
        == IndexReader(uri).dataset.count_rows()
    )
    for unit in units:
        steps = children(collector.spans, unit)
        assert [step.name for step in steps] == ["read", "encode", "compress", "write"]
        for span in (unit, *steps):
            assert span.attributes["maxray.job"] == job
            assert span.attributes["maxray.unit"] == unit.attributes["maxray.unit"]
            assert root.start <= span.start <= span.end <= root.end
    commits = collector.named("commit")
    assert {unit for span in commits for unit in span.attributes["maxray.units"]} == names


@pytest.mark.heavy
def test_trace_of_a_search(collector, lexical_uri, tmp_path):
    """One trace contains the spans of the proxy, the gateway and the replicas of all stages."""
    port = free_port()
    served = {"uri": lexical_uri, "num_shards": 2}
    (tmp_path / "serve.yaml").write_text(
        yaml.safe_dump({"indexes": {"texts": served}, "single_process": False})
    )
    process = start_job(
        *("jobs.serve", "--spec", str(tmp_path / "serve.yaml"), "--port", str(port)),
        **{ENDPOINT: collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"},
    )
    url = f"http://127.0.0.1:{port}"
    trace_id = bytes(range(16))
    body = {
        "query": "the lift of a wing",
        "k": 2,
        "representation": "hpool_2",
        "candidates": "bm25",
        "num_candidates": 2,
        "rerank": {"top": 2},
    }
    try:
        wait_until_it_answers(process, url)
        headers = {
            "X-Request-ID": "traced",
            "traceparent": f"00-{trace_id.hex()}-{'01' * 8}-01",  # of a client that traces
        }
        response = httpx2.post(f"{url}/v1/search", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        end = time.monotonic() + 30
        while not collector.named("proxy_http_request") and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1)
    finally:
        process.kill()
        process.wait()

    spans = [span for span in collector.spans if span.trace == trace_id]
    by_id = {span.id: span for span in spans}

    def path(span: ReceivedSpan) -> list[str]:
        return [*(path(by_id[span.parent]) if span.parent in by_id else []), span.name]

    paths = [" > ".join(path(span)) for span in spans]
    for stages in (
        "replica_handle_request Gateway .* > encode > .*Encoder encode > encode",
        "replica_handle_request Gateway .* > search > .*Searcher-texts-0 rank > rank > candidates",
        "replica_handle_request Gateway .* > search > .*Searcher-texts-1 rank > rank > score",
        "replica_handle_request Gateway .* > rerank > .*Reranker-texts rank_each > rank > score",
        "replica_handle_request Gateway .* > describe > .*Searcher-texts-. describe > describe",
    ):
        assert any(re.search(stages, found) for found in paths), (stages, paths)
    assert {span.attributes["service.name"] for span in spans} == {"maxray"}
    replicas = [s for s in spans if s.name.startswith("replica_handle_request")]
    assert {span.attributes["request_id"] for span in replicas} == {"traced"}
    assert "lift" not in str(spans)

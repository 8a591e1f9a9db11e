"""Tests of evaluations over HTTP, their store and the evaluator."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from pipeline.config import parse
from pipeline.eval.evaluation import run as evaluate
from pipeline.eval.report.files import write
from pipeline.eval.spec import EvaluateSpec
from pipeline.serve import wire
from pipeline.serve.client import Client, ServerError
from pipeline.serve.errors import ApiError
from pipeline.serve.evaluations import EvaluationStore, Evaluator, set_state
from pipeline.serve.settings import ServeSpec

QUERIES = {"q1": "the lift of a wing", "q2": "heat", "q3": "bread", "q4": "nobody judged this"}
QRELS = {"q1": {"wing": 2, "flow": 1}, "q2": {"heat": 1}, "q3": {"bread": 1}, "q9": {"wing": 1}}
BODY = {"queries": QUERIES, "qrels": QRELS, "measures": ["nDCG@10", "R@2"], "k": 10}


def run_job(index_uri, tmp_path, **options):
    """Returns the results of `jobs.evaluate` for the same queries."""
    (tmp_path / "qrels").mkdir(exist_ok=True)
    lines = [json.dumps({"_id": i, "text": text}) for i, text in QUERIES.items()]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    rows = [f"{q}\t{d}\t{g}\n" for q, graded in QRELS.items() for d, g in graded.items()]
    (tmp_path / "qrels/test.tsv").write_text("".join(rows))
    spec = {
        "index": index_uri,
        "benchmark": {"name": "beir", "path": str(tmp_path)},
        "output": str(tmp_path / "out"),
        "measures": BODY["measures"],
        "k": 10,
        "diagnostics": False,
        **options,
    }
    return evaluate(parse(EvaluateSpec, spec), lambda line: None)


@pytest.mark.heavy
def test_results_equal_those_of_the_job(client, index_uri, tmp_path):
    queued = client.evaluate(index="texts", **BODY)
    assert queued.state == "queued" and queued.index == "texts"
    done = client.wait_for(queued.id, 180)
    assert done.state == "done", done.error
    job = run_job(index_uri, tmp_path)
    rows = {(row.representation, row.score): row for row in done.results}
    assert len(rows) == len(job.results) > 6
    for result in job.results:
        row = rows[result.representation, result.score]
        assert row.measures == pytest.approx(result.means, abs=1e-9)
        assert row.bytes_per_item == pytest.approx(result.all_bytes)
    assert any("nDCG@10" in line for line in done.progress)
    run = client.evaluation_file(done.id, "runs/full.maxsim.trec").decode()
    assert run == (tmp_path / "out/runs/full.maxsim.trec").read_text()
    for name in done.files:
        data = client.evaluation_file(done.id, name)
        assert data and index_uri.encode() not in data
    assert done.id in {evaluation.id for evaluation in client.evaluations()}
    client.delete_evaluation(done.id)
    with pytest.raises(ServerError, match="unknown evaluation"):
        client.evaluation(done.id)


def test_lists_evaluations_of_jobs(index_uri, tmp_path):
    """Their folders have names of their own, and a client cannot delete them."""
    evaluations = tmp_path / "evaluations"
    (tmp_path / "queries").mkdir()
    job = run_job(index_uri, tmp_path / "queries")
    for folder in (evaluations / "texts_2026.1", tmp_path / "elsewhere"):
        write(job, str(folder))
    settings = {
        "indexes": {"texts": {"uri": index_uri}},
        "evaluations": {"folder": str(evaluations)},
    }
    store = EvaluationStore(parse(ServeSpec, settings))
    assert store.names() == ["texts_2026.1"]
    request, found = store.evaluation("texts_2026.1")
    assert request == {"key": None, "index": "texts"} and found.state == "done"
    assert [row.measures for row in found.results] == [row.means for row in job.results]
    for name in found.files:
        data, _ = store.file(found.id, name)
        assert data and index_uri.encode() not in data
    assert {"report.html", "metrics.csv", "per_query.csv"} <= {*found.files}
    with pytest.raises(ApiError, match="only be deleted on the server"):
        store.delete(found.id)
    with pytest.raises(ApiError, match="is done"):
        store.cancel(found.id)
    other = {**settings, "indexes": {"texts": {"uri": str(tmp_path)}}}
    with pytest.raises(ApiError, match="unknown evaluation"):
        EvaluationStore(parse(ServeSpec, other)).evaluation("texts_2026.1")
    for name in ("../elsewhere", "..", "texts_2026.1/runs", ""):
        with pytest.raises(ApiError, match="unknown evaluation"):
            store.evaluation(name)


def test_other_keys_have_no_access(url, client):
    evaluation = client.evaluate(index="texts", **BODY)
    with Client(url, "mr_other") as other:
        for method in (other.evaluation, other.cancel_evaluation, other.delete_evaluation):
            with pytest.raises(ServerError, match="unknown evaluation"):
                method(evaluation.id)
        assert other.evaluations() == []
    with Client(url, "mr_few") as few, pytest.raises(ServerError, match="not allowed to run"):
        few.evaluate(index="texts", **BODY)
    if client.evaluation(evaluation.id).state in ("queued", "running"):
        client.cancel_evaluation(evaluation.id)
        assert client.wait_for(evaluation.id, 60).state == "cancelled"


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"queries": None, "qrels": None, "benchmark": "nope"}, "benchmark", "unknown"),
        ({"queries": None}, None, "both queries and qrels"),
        ({"qrels": {"q1": {"a\tb": 1}}}, "qrels", "tabs"),
        ({"qrels": {"q7": {"a": 1}}}, "qrels", "at least one of the queries"),
        ({"qrels": {"q1": {"a": "good"}}}, "qrels.q1.a", "integer"),
        ({"measures": ["nDCG@@"]}, "measures", "nDCG@@"),
        ({"measures": ["nDCG@0"]}, "measures", "nDCG@0"),
        ({"qrels": {"q1": {"wing": 2**70}}}, "qrels.q1.wing", "less than or equal"),
        ({"queries": {"q1": "x", "q\0": "y"}}, "qrels", "tabs"),
        ({"queries": {"q1": "  "}}, "queries", "non-blank texts"),
        ({"queries": {"q1": "x" * 5_000}}, "queries", "4,000 characters"),
        ({"k": 101}, "k", "at most 100, got 101"),
        ({"k": 1}, "k", "at least 10"),
        ({"representations": ["nope"]}, "representation", "nope"),
    ],
)
def test_rejects_invalid_request(http, change, field, message):
    body = {"index": "texts", **BODY, **change}
    response = http.post("/v1/evaluations", json={k: v for k, v in body.items() if v is not None})
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert response.status_code == 422 and error.code == "invalid_argument"
    assert error.field == field and message in error.message


def test_idempotency_key_prevents_duplicates(http):
    headers = {"Idempotency-Key": "once"}
    body = {"index": "texts", **BODY}
    first, second = (http.post("/v1/evaluations", json=body, headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == 202
    assert first.json()["id"] == second.json()["id"]
    response = http.post("/v1/evaluations", json={**body, "k": 11}, headers=headers)
    error = wire.ErrorResponse.model_validate_json(response.content).error
    assert (response.status_code, error.code) == (422, "invalid_argument")
    assert error.field == "Idempotency-Key" and "must be unique" in error.message


# -- store and evaluator ---------------------------------------------------------------------------


@pytest.fixture
def settings(index_uri, tmp_path) -> ServeSpec:
    folder = str(tmp_path / "evaluations")
    spec = {
        "indexes": {"i": {"uri": index_uri}},
        "evaluations": {"folder": folder, "max_finished": 2},
    }
    return parse(ServeSpec, spec)


REQUEST = wire.EvaluationRequest(index="i", bm25=False, representations=["full"], **BODY)


def wait_for(store: EvaluationStore, name: str, *states: str) -> wire.Evaluation:
    end = time.monotonic() + 120
    while (evaluation := store.evaluation(name)[1]).state not in states:
        assert time.monotonic() < end, evaluation
        time.sleep(0.1)
    return evaluation


def stop(evaluator: Evaluator) -> None:
    evaluator._is_stopping.set()
    evaluator._thread.join(60)


@pytest.mark.heavy
def test_next_evaluator_resumes_evaluations(settings):
    store = EvaluationStore(settings)
    first = store.create(REQUEST, "i", "ann", None)
    second = store.create(REQUEST, "i", "ann", None)
    evaluator = Evaluator(settings)
    wait_for(store, first, "running")
    stop(evaluator)  # requeues the unfinished evaluation
    assert {store.evaluation(n)[1].state for n in (first, second)} <= {"queued", "done"}
    set_state(store._folder / second, "running")  # state after its evaluator was killed
    evaluator = Evaluator(EvaluationStore(settings)._settings)
    for name in (first, second):
        assert wait_for(store, name, "done", "failed").state == "done"
    stop(evaluator)


def test_cancels_queued_and_running_evaluations(settings):
    store = EvaluationStore(settings)
    queued, running = (store.create(REQUEST, "i", "ann", None) for _ in range(2))
    store.cancel(queued)
    assert store.evaluation(queued)[1].state == "cancelled"
    with pytest.raises(ApiError, match="is cancelled"):
        store.cancel(queued)
    evaluator = Evaluator(settings)
    wait_for(store, running, "running")
    with pytest.raises(ApiError, match="cancel it first"):
        store.delete(running)
    store.cancel(running)
    assert wait_for(store, running, "cancelled", "done").state == "cancelled"
    stop(evaluator)
    store.delete(running)
    assert store.names() == [queued]


def test_failed_evaluation_has_error_message(settings, index_uri):
    store = EvaluationStore(settings)
    name = store.create(REQUEST, "i", "ann", None)
    spec = store._folder / name / "spec.yaml"
    assert yaml.safe_load(spec.read_text())["search_page"] == "../../../../?index=i"
    spec.write_text(
        spec.read_text().replace("representations:\n- full", "representations:\n- nope")
    )
    evaluator = Evaluator(settings)
    evaluation = wait_for(store, name, "failed", "done")
    stop(evaluator)
    assert evaluation.state == "failed"
    assert "'nope'" in evaluation.error and index_uri not in evaluation.error


def test_limits_numbers_of_finished_and_queued_evaluations(settings):
    store = EvaluationStore(settings)
    names = []
    for _ in range(5):
        names.append(store.create(REQUEST, "i", "ann", None))
        set_state(store._folder / names[-1], "failed")
        time.sleep(0.005)  # distinct creation times
    store.create(REQUEST, "i", "ann", None)
    assert set(names[-2:]) <= set(store.names()) and len(store.names()) == 3
    limited = settings.model_copy(
        update={"evaluations": settings.evaluations.model_copy(update={"max_queued": 1})}
    )
    with pytest.raises(ApiError, match="already queued"):
        EvaluationStore(limited).create(REQUEST, "i", "ann", None)


def test_concurrent_deletes(settings):
    """One call succeeds; the others report an unknown or a finished evaluation."""
    store = EvaluationStore(settings)
    for _ in range(5):
        name = store.create(REQUEST, "i", "ann", None)
        set_state(store._folder / name, "failed")
        methods = [store.delete, store.delete, store.evaluation, store.cancel, store.delete]
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(method, name) for method in methods * 3]
        errors = [error for future in futures if (error := future.exception()) is not None]
        assert {type(error) for error in errors} == {ApiError}
        assert {error.code for error in errors} <= {"not_found", "conflict"}
        assert name not in store.names()


@pytest.mark.parametrize("name", ["..", "0" * 16, "state.json", "../x", "a/b", ""])
def test_rejects_unknown_names(settings, name):
    store = EvaluationStore(settings)
    methods = store.evaluation, store.cancel, store.delete, lambda n: store.file(n, "table.md")
    for method in methods:
        with pytest.raises(ApiError, match="unknown evaluation"):
            method(name)

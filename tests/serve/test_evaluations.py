"""Evaluations by HTTP, and that they survive every process."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.config import parse
from pipeline.eval.evaluation import run as evaluate
from pipeline.eval.spec import EvaluateSpec
from pipeline.serve import wire
from pipeline.serve.client import Client, ServerError
from pipeline.serve.errors import ApiError
from pipeline.serve.evaluations import Evaluator, Store, end
from pipeline.serve.settings import ServeSpec

QUERIES = {"q1": "the lift of a wing", "q2": "heat", "q3": "bread", "q4": "nobody judged this"}
QRELS = {"q1": {"wing": 2, "flow": 1}, "q2": {"heat": 1}, "q3": {"bread": 1}, "q9": {"wing": 1}}
ASKED = {"queries": QUERIES, "qrels": QRELS, "measures": ["nDCG@10", "R@2"], "k": 10}


def expected(index_uri, tmp_path, **options):
    """What `jobs.evaluate` computes of the same."""
    (tmp_path / "qrels").mkdir()
    lines = [json.dumps({"_id": i, "text": text}) for i, text in QUERIES.items()]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    rows = [f"{q}\t{d}\t{g}\n" for q, graded in QRELS.items() for d, g in graded.items()]
    (tmp_path / "qrels/test.tsv").write_text("".join(rows))
    spec = {
        "index": index_uri,
        "benchmark": {"name": "beir", "path": str(tmp_path)},
        "output": str(tmp_path / "out"),
        "measures": ASKED["measures"],
        "k": 10,
        "diagnostics": False,
        **options,
    }
    return evaluate(parse(EvaluateSpec, spec), lambda line: None)


def test_equals_the_job(client, index_uri, tmp_path):
    asked = client.evaluate(index="texts", **ASKED)
    assert asked.state == "queued" and asked.index == "texts"
    found = client.wait_for(asked.id, 180)
    assert found.state == "done", found.error
    job = expected(index_uri, tmp_path)
    rows = {(row.representation, row.score): row for row in found.results}
    assert len(rows) == len(job.results) > 6
    for result in job.results:
        row = rows[result.representation, result.score]
        assert row.measures == pytest.approx(result.means, abs=1e-9)
        assert row.bytes_per_item == pytest.approx(result.all_bytes)
    assert any("nDCG@10" in line for line in found.progress)
    run = client.evaluation_file(found.id, "runs/full.late.trec").decode()
    assert run == (tmp_path / "out/runs/full.late.trec").read_text()
    for name in found.files:
        data = client.evaluation_file(found.id, name)
        assert data and index_uri.encode() not in data
    assert found.id in {each.id for each in client.evaluations()}
    client.delete_evaluation(found.id)
    with pytest.raises(ServerError, match="unknown evaluation"):
        client.evaluation(found.id)


def test_others_do_not_see_it(url, client):
    asked = client.evaluate(index="texts", **ASKED)
    with Client(url, "mr_other") as other:
        for ask in (other.evaluation, other.cancel_evaluation, other.delete_evaluation):
            with pytest.raises(ServerError, match="unknown evaluation"):
                ask(asked.id)
        assert other.evaluations() == []
    with Client(url, "mr_few") as few, pytest.raises(ServerError, match="may not ask"):
        few.evaluate(index="texts", **ASKED)
    if client.evaluation(asked.id).state in ("queued", "running"):
        client.cancel_evaluation(asked.id)
        assert client.wait_for(asked.id, 60).state == "cancelled"


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"queries": None, "qrels": None, "benchmark": "nope"}, "benchmark", "not known"),
        ({"queries": None}, None, "both queries and qrels"),
        ({"qrels": {"q1": {"a\tb": 1}}}, "qrels", "tabs"),
        ({"qrels": {"q7": {"a": 1}}}, "qrels", "no query is judged"),
        ({"qrels": {"q1": {"a": "good"}}}, "qrels.q1.a", "integer"),
        ({"measures": ["nDCG@@"]}, "measures", "nDCG@@"),
        ({"measures": ["nDCG@0"]}, "measures", "nDCG@0"),
        ({"qrels": {"q1": {"wing": 2**70}}}, "qrels.q1.wing", "less than or equal"),
        ({"queries": {"q1": "x", "q\0": "y"}}, "qrels", "tabs"),
        ({"queries": {"q1": "  "}}, "queries", "texts with a word"),
        ({"queries": {"q1": "x" * 5_000}}, "queries", "4,000 characters"),
        ({"k": 101}, "k", "at most 100, got 101"),
        ({"k": 1}, "k", "at least 10"),
        ({"representations": ["nope"]}, "representation", "nope"),
    ],
)
def test_an_invalid_request(http, change, field, says):
    asked = {"index": "texts", **ASKED, **change}
    response = http.post("/v1/evaluations", json={k: v for k, v in asked.items() if v is not None})
    error = wire.ErrorAnswer.model_validate_json(response.content).error
    assert response.status_code == 422 and error.code == "invalid_argument"
    assert error.field == field and says in error.message


def test_sent_twice_it_is_one(http):
    headers = {"Idempotency-Key": "once"}
    asked = {"index": "texts", **ASKED}
    first, second = (http.post("/v1/evaluations", json=asked, headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == 202
    assert first.json()["id"] == second.json()["id"]
    response = http.post("/v1/evaluations", json={**asked, "k": 11}, headers=headers)
    error = wire.ErrorAnswer.model_validate_json(response.content).error
    assert (response.status_code, error.code) == (422, "invalid_argument")
    assert error.field == "Idempotency-Key" and "must be new" in error.message


# -- the folder ------------------------------------------------------------------------------------


@pytest.fixture
def settings(index_uri, tmp_path) -> ServeSpec:
    folder = str(tmp_path / "evaluations")
    given = {
        "indexes": {"i": {"uri": index_uri}},
        "evaluations": {"folder": folder, "max_finished": 2},
    }
    return parse(ServeSpec, given)


REQUEST = wire.EvaluationRequest(index="i", bm25=False, representations=["full"], **ASKED)


def wait_for(store: Store, name: str, *states: str) -> wire.Evaluation:
    end = time.monotonic() + 120
    while (found := store.evaluation(name)[1]).state not in states:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def stop(evaluator: Evaluator) -> None:
    evaluator._ends.set()
    evaluator._thread.join(60)


@pytest.mark.heavy
def test_what_waits_is_run_by_whoever_is_started_next(settings):
    store = Store(settings)
    first = store.create(REQUEST, "i", "ann", None)
    second = store.create(REQUEST, "i", "ann", None)
    evaluator = Evaluator(settings)
    wait_for(store, first, "running")
    stop(evaluator)  # it gives back what it has not finished
    assert {store.evaluation(n)[1].state for n in (first, second)} <= {"queued", "done"}
    end(store._folder / second, "running")  # as if its evaluator had been killed
    evaluator = Evaluator(Store(settings)._settings)
    for name in (first, second):
        assert wait_for(store, name, "done", "failed").state == "done"
    stop(evaluator)


def test_cancelled_before_and_while_it_runs(settings):
    store = Store(settings)
    waits, runs = (store.create(REQUEST, "i", "ann", None) for _ in range(2))
    store.cancel(waits)
    assert store.evaluation(waits)[1].state == "cancelled"
    with pytest.raises(ApiError, match="is cancelled"):
        store.cancel(waits)
    evaluator = Evaluator(settings)
    wait_for(store, runs, "running")
    with pytest.raises(ApiError, match="cancel it first"):
        store.delete(runs)
    store.cancel(runs)
    assert wait_for(store, runs, "cancelled", "done").state == "cancelled"
    stop(evaluator)
    store.delete(runs)
    assert store.names() == [waits]


def test_one_that_fails_says_why(settings, index_uri):
    store = Store(settings)
    name = store.create(REQUEST, "i", "ann", None)
    spec = store._folder / name / "spec.yaml"
    spec.write_text(
        spec.read_text().replace("representations:\n- full", "representations:\n- nope")
    )
    evaluator = Evaluator(settings)
    found = wait_for(store, name, "failed", "done")
    stop(evaluator)
    assert found.state == "failed" and "'nope'" in found.error and index_uri not in found.error


def test_old_ones_are_removed_and_too_many_refused(settings):
    store = Store(settings)
    made = []
    for _ in range(5):
        made.append(store.create(REQUEST, "i", "ann", None))
        end(store._folder / made[-1], "failed")
        time.sleep(0.005)  # the next one is newer
    store.create(REQUEST, "i", "ann", None)
    assert set(made[-2:]) <= set(store.names()) and len(store.names()) == 3
    few = settings.model_copy(
        update={"evaluations": settings.evaluations.model_copy(update={"max_queued": 1})}
    )
    with pytest.raises(ApiError, match="wait already"):
        Store(few).create(REQUEST, "i", "ann", None)


def test_deleted_by_several_at_once(settings):
    """One of them did it; to the others it is not known, or was not any more."""
    store = Store(settings)
    for _ in range(5):
        name = store.create(REQUEST, "i", "ann", None)
        end(store._folder / name, "failed")
        asked = [store.delete, store.delete, store.evaluation, store.cancel, store.delete]
        with ThreadPoolExecutor(16) as pool:
            submitted = [pool.submit(do, name) for do in asked * 3]
        outcomes = [each.exception() for each in submitted]
        errors = [error for error in outcomes if error is not None]
        assert {type(error) for error in errors} == {ApiError}
        assert {error.code for error in errors} <= {"not_found", "conflict"}
        assert name not in store.names()


@pytest.mark.parametrize("name", ["..", "0" * 16, "state.json", "../x", "a/b", ""])
def test_names_that_are_none(settings, name):
    store = Store(settings)
    for ask in (store.evaluation, store.cancel, store.delete, lambda n: store.file(n, "table.md")):
        with pytest.raises(ApiError, match="unknown evaluation"):
            ask(name)

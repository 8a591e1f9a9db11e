"""Structured logs of real jobs: all lines parse, and contain the ids of the job and its units."""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.config import Spec, SpecError
from pipeline.index import EXECUTOR
from pipeline.index.session import Session
from pipeline.index.writer import IndexWriter
from pipeline.runtime import logs
from pipeline.runtime.logs import FORMAT_VARIABLE, JsonFormatter
from tests.conftest import run_jobs
from tests.tiny import SLEEPING

SPEC = {
    "encoder": {"class": SLEEPING, "seconds": 0.0, "num_tokens": 4, "dim": 8},
    "representations": [{"compressor": "none"}],
    "unit_items": 4,
    "fragment_items": 8,
}


@pytest.fixture
def spec(tmp_path: Path, collection: Callable[..., Path]) -> str:
    """Spec of ten items in three units. An item has no text, and one has the id of another."""
    folder = collection(**{f"d{number}": f"text {number}" for number in range(8)}, empty="")
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('\n{"_id": "d0", "text": "again"}')
    source = {"name": "text", "path": str(folder)}
    fields = {"index": str(tmp_path / "index"), "source": source, **SPEC}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(fields))
    return str(tmp_path / "spec.yaml")


def parsed(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_formatter_adds_fields_of_the_record_and_the_process():
    formatter = JsonFormatter()
    record = logging.makeLogRecord({"msg": "%d items", "args": (3,), "unit": "a", "_secret": 1})
    before = formatter.format(record)
    with logs.bound(job="j", index="i"):
        entry = json.loads(formatter.format(record))
    assert entry["message"] == "3 items" and entry["event"] == "message"
    assert (entry["job"], entry["index"], entry["unit"]) == ("j", "i", "a")
    assert "_secret" not in entry and "args" not in entry
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", entry["asctime"])
    assert formatter.format(record) == before


def test_formatter_adds_the_traceback_to_one_line():
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    (entry,) = parsed(JsonFormatter().format(record))
    assert entry["exc_text"].startswith("Traceback") and "ValueError: x" in entry["exc_text"]


def test_unknown_format_is_an_error(monkeypatch):
    monkeypatch.setenv(FORMAT_VARIABLE, "xml")
    with pytest.raises(SpecError, match="^MAXRAY_LOG_FORMAT must be one of text, json, got 'xml'$"):
        logs.configure()


@pytest.fixture
def session_folder() -> Iterator[Path]:
    """Folder for the session of a Ray cluster, whose sockets need short paths."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.parametrize("executor", ["process", pytest.param("ray", marks=pytest.mark.heavy)])
def test_index_job_logs_json_lines_with_ids(spec, tmp_path, session_folder, executor):
    environment = {FORMAT_VARIABLE: "json", EXECUTOR: executor}
    environment["RAY_TMPDIR"] = str(session_folder)
    done = run_jobs(["index", spec], ["index", spec], **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = parsed(done.stderr)
    assert all({"asctime", "levelname", "event", "message"} <= line.keys() for line in lines)
    jobs = [line["job"] for line in lines if line["event"] == "job_started"]
    assert len(set(jobs)) == 2

    first = [line for line in lines if line.get("job") == jobs[0]]
    assert {line["index"] for line in first} == {str(tmp_path / "index")}
    events = [line["event"] for line in first]
    for event in ("lease_taken", "listed", "committed", "lease_released", "job_ended"):
        assert events.count(event) >= 1, event
    units = {line["unit"]: line["items"] for line in first if line["event"] == "unit_committed"}
    assert units == {"000000-000000": 4, "000000-000001": 4, "000000-000002": 0}
    rejected = {x["unit"]: x["reasons"] for x in first if x["event"] == "items_rejected"}
    assert rejected == {None: {"empty text": 1}, "000000-000002": {"duplicate id": 1}}

    (listed,) = [x for x in lines if x["event"] == "listed" and x["job"] == jobs[1]]
    assert (listed["unchanged"], listed["rejected"], listed["to_do"]) == (8, 1, 1)

    if executor == "ray":
        files = session_folder.glob("ray/session_*/logs/worker-*.err")
        logged = [line for file in files for line in file.read_text().splitlines()]
        lines = [json.loads(line) for line in logged if line.startswith("{")]
        assert any(line.get("event") == "actor_started" for line in lines)
    started = [line for line in lines if line.get("event") == "unit_started"]
    assert {line["unit"] for line in started} == units.keys()
    assert {line["job"] for line in started} == set(jobs)  # duplicate ids are read by each run
    assert executor == "process" or all(line["actor_id"] for line in started)


def test_errors_are_json_lines(tmp_path):
    done = run_jobs(["index", str(tmp_path / "missing.yaml")], **{FORMAT_VARIABLE: "json"})
    assert done.returncode == 2
    (line,) = parsed(done.stderr)
    assert (line["event"], line["levelname"], line["exit_code"]) == ("failed", "ERROR", 2)
    assert "missing.yaml" in line["message"]


@pytest.mark.heavy
def test_text_format_has_no_events(spec):
    done = run_jobs(["index", spec])
    assert done.returncode == 0, done.stderr
    assert "unit_committed" not in done.stdout + done.stderr
    assert "listed 10 items" in done.stdout


def test_resumed_job_logs_the_interrupted_job(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    caplog.set_level(logging.INFO)
    uri = str(tmp_path / "index")
    IndexWriter(uri, "first", ttl=0.0)  # its lease expires without being released
    with Session(uri, Spec(), "test", "second", dict):
        pass
    taken = [r for r in caplog.records if getattr(r, "event", "") == "lease_taken"]
    assert [vars(record)["interrupted_job"] for record in taken] == [None, "first"]
    (ended,) = [r for r in caplog.records if getattr(r, "event", "") == "job_ended"]
    assert vars(ended)["state"] == "done"

"""Evaluations requested over HTTP, each stored in a persistent folder.

    FOLDER/ID/request.json   access key, index, time and digest of the request
             /state.json     queued, running, done, failed or cancelled
             /cancel         present if the evaluation is to be cancelled
             /queries.jsonl, qrels/test.tsv, spec.yaml   inputs of `jobs.evaluate`
             /log            output of `jobs.evaluate`
             /out/           results, and the cache entries from which a restart resumes
          /NAME/             output of a run of `jobs.evaluate` on a served index, which is listed

The gateway writes requests and reads states. A single `Evaluator` runs one evaluation at a time.
Both restart independently because all state is in the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from pipeline.config import SpecError, absolute, digest, dump, parse
from pipeline.eval.results import RESULTS, read_results
from pipeline.eval.results import Evaluation as EvaluationResults
from pipeline.runtime.logs import FORMAT_VARIABLE
from pipeline.schema import is_blank
from pipeline.search.fusion import FUSED
from pipeline.serve import wire
from pipeline.serve.errors import ApiError
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.settings import (
    MAX_QUERY_CHARS,
    MAX_QUEUED_PER_KEY,
    NAME,
    ServeSpec,
)

log = logging.getLogger("ray.serve")

FINAL_STATES = ("done", "failed", "cancelled")
#: Maximum number of lines of the log in a response.
NUM_PROGRESS_LINES = 20
TRACEBACK_PREFIXES = ("Traceback ", '  File "')
#: Pattern of the files that can be downloaded. Other files contain paths of the server.
FILES = re.compile(
    r"(report\.html|metrics\.csv|per_query\.csv|table\.md|[a-z_]+\.png|runs/[^/]+\.trec)"
)
#: File with the texts of the queries of a request. Those of a benchmark are not stored.
QUERIES = "queries.jsonl"
_TEXT_SUFFIXES = (".html", ".csv", ".md")
#: Interval at which the evaluator polls the folder, in seconds.
POLL_SECONDS = 0.5
#: Time limit for the termination of a cancelled evaluation before it is killed, in seconds.
TERMINATION_SECONDS = 20


class EvaluationStore:
    """Evaluations stored in a folder, which must be local or mounted."""

    def __init__(self, settings: ServeSpec):
        self._settings, self._evaluations = settings, settings.evaluations
        self._folder = Path(absolute(self._evaluations.folder))
        self._folder.mkdir(parents=True, exist_ok=True)

    def create(
        self, request: wire.EvaluationRequest, index: str, key: str, idempotency: str | None
    ) -> str:
        """Queues an evaluation and returns its id.

        Args:
            idempotency: A repeated request with this key returns the id of the existing evaluation.

        Raises:
            ApiError: The request is invalid, too many evaluations are queued, or the idempotency
                key belongs to a different request.
        """
        if request.benchmark is not None and request.benchmark not in self._evaluations.benchmarks:
            if names := self._evaluations.benchmarks:
                message = str(SpecError.unknown_name("benchmark", request.benchmark, names))
            else:
                message = f"unknown benchmark {request.benchmark!r}; this server has no benchmarks"
            raise ApiError("invalid_argument", message, "benchmark")
        self._check(request)
        name = secrets.token_hex(8)
        if idempotency:
            name = hashlib.sha256(f"{key}\n{idempotency}".encode()).hexdigest()[:16]
        folder = self._folder / name
        content = digest([index, request.model_dump(mode="json")])
        if (folder / "state.json").exists():
            return self._existing(folder, content)
        queued = [name for name, state in self._states() if state["state"] == "queued"]
        num_queued_by_key = sum(self._key(name) == key for name in queued)
        for number, maximum in (
            (len(queued), self._evaluations.max_queued),
            (num_queued_by_key, MAX_QUEUED_PER_KEY),
        ):
            if number >= maximum:
                message = f"{number} evaluations are already queued"
                raise ApiError("unavailable", message, retry_after=30)
        created = _now()
        new = self._folder / f".{name}-{secrets.token_hex(4)}"
        new.mkdir()
        try:
            self._write_inputs(new, folder, request, index)
            info = {"key": key, "index": index, "created": created, "content": content}
            _write(new / "request.json", info)
            _write(new / "state.json", {"state": "queued"})
            new.rename(folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            if not (folder / "state.json").exists():
                raise
            return self._existing(folder, content)  # a concurrent request with the same key
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        self._remove_old()
        return name

    def _existing(self, folder: Path, content: str) -> str:
        """Looks up the evaluation with an idempotency key, which must be of the same request."""
        if self._read_file(folder, "request.json")["content"] != content:
            field = "Idempotency-Key"
            message = f"{field} must be unique per request, got the key of evaluation"
            raise ApiError("invalid_argument", f"{message} {folder.name}", field)
        return folder.name

    def _check(self, request: wire.EvaluationRequest) -> None:
        limits = self._settings.limits
        if request.k > limits.max_k:
            raise ApiError(
                "invalid_argument", f"k must be at most {limits.max_k}, got {request.k}", "k"
            )
        for name, text in (request.queries or {}).items():
            if len(text) > MAX_QUERY_CHARS or is_blank(text):
                rule = f"non-blank texts of at most {MAX_QUERY_CHARS:,} characters"
                value = f"{len(text):,} characters for {name!r}"
                value = repr(text) if is_blank(text) else value
                raise ApiError(
                    "invalid_argument", f"queries must be {rule}, got {value}", "queries"
                )

    def _key(self, name: str) -> str | None:
        return (_read_or_none(self._folder / name / "request.json") or {}).get("key")

    def _write_inputs(
        self, new: Path, folder: Path, request: wire.EvaluationRequest, index: str
    ) -> None:
        """Writes the input files of `jobs.evaluate`. Their paths are those in the final folder."""
        from pipeline.eval.spec import EvaluateSpec  # slow to import

        benchmark: Any = {
            "name": "beir",
            "path": str(folder),
            "ignore_identical_ids": request.ignore_identical_ids,
        }
        if request.benchmark is not None:
            benchmark = dump(self._evaluations.benchmarks[request.benchmark])
        else:
            _write_queries(new, request.queries or {}, request.qrels or {})
        spec = {
            "index": self._settings.indexes[index].uri,
            "benchmark": benchmark,
            "output": str(folder / "out"),
            "representations": request.representations,
            "scores": request.scores,
            "k": request.k,
            "judged": request.judged,
            "diagnostics": request.diagnostics,
            "bm25": request.bm25,
            # The report is a file of /v1/evaluations/NAME/files/.
            "search_page": f"../../../../?{urlencode({'index': index})}",
        }
        if FUSED in request.scores:
            spec["fusion"] = dump(request.fusion or self._settings.indexes[index].fusion)
        if request.measures:
            spec["measures"] = request.measures
        parse(EvaluateSpec, spec)  # reports invalid fields now
        (new / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), "utf-8")

    def evaluation(self, name: str) -> tuple[dict[str, Any], wire.Evaluation]:
        """Returns the stored request of an evaluation and its representation in the HTTP API."""
        folder = self._path(name)
        if _is_job(folder):
            return self._job(folder)
        request = self._read_file(folder, "request.json")
        state = self._read_file(folder, "state.json")
        redact = self._redactor(request["index"], folder)
        progress = _lines(folder / "log")[-NUM_PROGRESS_LINES:]
        if any(line.startswith(TRACEBACK_PREFIXES) for line in progress):
            progress = []  # tracebacks are not shown to clients
        is_done = state["state"] == "done"
        return request, wire.Evaluation(
            id=name,
            state=state["state"],
            index=request["index"],
            created=request["created"],
            finished=state.get("finished"),
            progress=[redact(line) for line in progress],
            error=redact(state["error"]) if state.get("error") else None,
            results=_results(read_results(str(folder / "out"), "evaluation")) if is_done else [],
            files=sorted(_files(folder)) if is_done else [],
        )

    def _job(self, folder: Path) -> tuple[dict[str, Any], wire.Evaluation]:
        """Returns the evaluation of a job, whose key is None."""
        try:
            found = read_results(str(folder), "evaluation")
        except SpecError:
            raise _unknown(folder.name) from None
        uri, served = absolute(str(found.spec.get("index"))), self._settings.indexes
        index = next((name for name, spec in served.items() if absolute(spec.uri) == uri), None)
        if index is None:
            raise _unknown(folder.name)
        created = _job_time(folder)
        return {"key": None, "index": index}, wire.Evaluation(
            id=folder.name,
            state="done",
            index=index,
            created=created,
            finished=created,
            progress=[],
            error=None,
            results=_results(found),
            files=sorted(_files(folder)),
        )

    def names(self) -> list[str]:
        """Returns the ids of all evaluations, newest first."""
        created = {
            name: request["created"]
            for name in self._all()
            if (request := _read_or_none(self._folder / name / "request.json"))
        }
        created |= {p.name: _job_time(p) for p in self._folder.iterdir() if _is_job(p)}
        return sorted(created, key=lambda name: (created[name], name), reverse=True)

    def file(self, name: str, path: str) -> tuple[bytes, str]:
        """Returns the content of a file of a finished evaluation, and its media type."""
        folder = self._path(name)
        if path not in _files(folder):
            raise ApiError("not_found", f"unknown file {path!r} of the evaluation")
        index = self.evaluation(name)[0]["index"]
        try:
            data = ((folder if path == QUERIES else _output(folder)) / path).read_bytes()
        except FileNotFoundError:  # deleted concurrently
            raise _unknown(name) from None
        if path.endswith(_TEXT_SUFFIXES):
            data = self._redactor(index, folder)(data.decode()).encode()
        types = {
            "html": "text/html",
            "csv": "text/csv",
            "md": "text/markdown",
            "png": "image/png",
            "jsonl": "application/jsonl",
        }
        return data, types.get(path.rpartition(".")[2], "text/plain")

    def cancel(self, name: str) -> None:
        """Cancels a queued or running evaluation."""
        folder = self._path(name)
        if _is_job(folder):
            raise ApiError("conflict", "the evaluation is done")
        state = self._read_file(folder, "state.json")["state"]
        if state in FINAL_STATES:
            raise ApiError("conflict", f"the evaluation is {state}")
        try:
            (folder / "cancel").touch()
            if state == "queued":
                set_state(folder, "cancelled")
        except FileNotFoundError:  # deleted concurrently
            raise _unknown(name) from None

    def delete(self, name: str) -> None:
        """Deletes a finished evaluation, unless a job created it."""
        folder = self._path(name)
        if _is_job(folder):
            raise ApiError("forbidden", "the output of a job can only be deleted on the server")
        state = self._read_file(folder, "state.json")["state"]
        if state not in FINAL_STATES:
            raise ApiError("conflict", f"the evaluation is {state}; cancel it first")
        _remove(folder)

    def _path(self, name: str) -> Path:
        folder = self._folder / name
        if not re.fullmatch(NAME, name) or not (name in self._all() or _is_job(folder)):
            raise _unknown(name)
        return folder

    def _read_file(self, folder: Path, file: str) -> dict[str, Any]:
        """Reads a JSON file of an evaluation. The evaluation may be deleted at the same time."""
        try:
            return _read(folder / file)
        except FileNotFoundError:
            raise _unknown(folder.name) from None

    def _all(self) -> list[str]:
        return [p.name for p in self._folder.iterdir() if re.fullmatch("[0-9a-f]{16}", p.name)]

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in self._all():
            if state := _read_or_none(self._folder / name / "state.json"):
                yield name, state

    def _redactor(self, index: str, folder: Path) -> Callable[[str], str]:
        """Returns a function that replaces the server's paths in a text by names."""
        served = self._settings.indexes.get(index)
        names = {str(folder): "evaluation", str(self._folder): "evaluations"}
        if served:
            names |= {absolute(served.uri): index, served.uri: index}
        for benchmark, spec in self._evaluations.benchmarks.items():
            if path := getattr(spec, "path", None):
                names |= {absolute(path): benchmark, path: benchmark}
        paths = sorted(names, key=len, reverse=True)
        pattern = re.compile("|".join(re.escape(path) for path in paths))
        return lambda text: pattern.sub(lambda match: names[match[0]], text)

    def _remove_old(self) -> None:
        finished = {name for name, state in self._states() if state["state"] in FINAL_STATES}
        names = [name for name in self.names() if name in finished]
        for name in names[self._evaluations.max_finished :]:
            _remove(self._folder / name)


class Evaluator:
    """Stage that runs the evaluations of a folder one after another."""

    def __init__(self, settings: ServeSpec):
        bind_to_loopback()
        self._folder = Path(absolute(settings.evaluations.folder))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)
        self._thread.start()

    async def ping(self) -> bool:
        """Responds to a readiness check."""
        return self._thread.is_alive()

    def check_health(self) -> None:
        """Raises an error if the worker thread has stopped, so that Ray replaces the replica."""
        if not self._thread.is_alive():
            raise RuntimeError("the evaluation thread has stopped")

    def __del__(self) -> None:  # called by Ray Serve when the replica shuts down
        self._is_stopping.set()
        self._thread.join(TERMINATION_SECONDS)

    def _run(self) -> None:
        for folder, state in self._unfinished():
            if state["state"] == "running":  # interrupted; it resumes from its cache entries
                set_state(folder, "queued")
        while not self._is_stopping.is_set():
            queued = [folder for folder, state in self._unfinished() if state["state"] == "queued"]
            if not queued:
                self._is_stopping.wait(POLL_SECONDS)
                continue
            try:
                self._evaluate(
                    min(queued, key=lambda folder: _read(folder / "request.json")["created"])
                )
            except FileNotFoundError:  # deleted concurrently
                continue

    def _unfinished(self) -> list[tuple[Path, dict[str, Any]]]:
        states = ((p, _read_or_none(p / "state.json")) for p in self._folder.iterdir())
        return [(p, s) for p, s in states if s and s["state"] in ("queued", "running")]

    def _evaluate(self, folder: Path) -> None:
        if (folder / "cancel").exists():
            set_state(folder, "cancelled")
            return
        _write(folder / "state.json", {"state": "running"})
        command = [sys.executable, "-P", "-m", "jobs.evaluate", str(folder / "spec.yaml")]
        # Its last line is read as text.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", FORMAT_VARIABLE: "text"}
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL
            )
        code = self._wait(process, folder)
        if self._is_stopping.is_set() and code != 0:
            set_state(folder, "queued")  # the next evaluator resumes it
        elif (folder / "cancel").exists():
            set_state(folder, "cancelled")
        elif code == 0:
            set_state(folder, "done")
        else:
            lines = _lines(folder / "log")
            message = lines[-1] if lines and lines[-1].startswith("error: ") else ""
            error = message or f"the evaluation failed with exit code {code}"
            set_state(folder, "failed", error=error)

    def _wait(self, process: subprocess.Popen, folder: Path) -> int:
        """Waits for a process, and terminates it on a cancellation or shutdown."""
        while (code := process.poll()) is None:
            if self._is_stopping.wait(POLL_SECONDS) or (folder / "cancel").exists():
                process.send_signal(signal.SIGTERM)
                try:
                    return process.wait(TERMINATION_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return process.wait()
        return code


def set_state(folder: Path, state: str, error: str | None = None) -> None:
    """Writes the state of an evaluation."""
    content: dict[str, Any] = {"state": state}
    if state in FINAL_STATES:
        content["finished"] = _now()
    if error:
        content["error"] = error
    _write(folder / "state.json", content)


def _write_queries(folder: Path, queries: dict[str, str], qrels: dict[str, dict[str, int]]) -> None:
    ids = {*qrels, *(document for graded in qrels.values() for document in graded)}
    ids |= queries.keys()
    if wrong := next((i for i in ids if re.search(r"[\0\t\r\n]", i) or i != i.strip()), None):
        message = (
            f"qrels must have ids without tabs, line breaks or surrounding spaces, got {wrong!r}"
        )
        raise ApiError("invalid_argument", message, "qrels")
    if not qrels.keys() & queries.keys():
        message = "qrels must have grades for at least one of the queries"
        raise ApiError("invalid_argument", message, "qrels")
    lines = (json.dumps({"_id": i, "text": text}, ensure_ascii=True) for i, text in queries.items())
    (folder / QUERIES).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (folder / "qrels").mkdir()
    rows = [f"{q}\t{d}\t{g}\n" for q, graded in qrels.items() for d, g in graded.items()]
    table = "".join(["query-id\tcorpus-id\tscore\n", *rows])
    (folder / "qrels" / "test.tsv").write_text(table, "utf-8")


def _is_job(folder: Path) -> bool:
    has_name = re.fullmatch(NAME, folder.name) and (folder / RESULTS).is_file()
    return bool(has_name) and not (folder / "request.json").exists()


def _job_time(folder: Path) -> str:
    seconds = (folder / RESULTS).stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _output(folder: Path) -> Path:
    return folder if _is_job(folder) else folder / "out"


def _results(evaluation: EvaluationResults) -> list[wire.EvaluationResult]:
    return [
        wire.EvaluationResult(
            representation=row.representation,
            score=row.score,
            measures=row.means,
            bytes_per_item=row.all_bytes,
        )
        for row in evaluation.results
    ]


def _files(folder: Path) -> set[str]:
    out = _output(folder)
    if not out.is_dir():
        return set()
    queries = {QUERIES} if (folder / QUERIES).is_file() else set()
    paths = (
        [*out.iterdir(), *(out / "runs").glob("*")] if (out / "runs").is_dir() else out.iterdir()
    )
    names = {path.relative_to(out).as_posix() for path in paths if path.is_file()}
    return queries | {name for name in names if FILES.fullmatch(name)}


def _remove(folder: Path) -> None:
    """Removes a folder. Renaming it first makes the removal atomic."""
    renamed = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # removed concurrently
        folder.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def _unknown(name: str) -> ApiError:
    return ApiError("not_found", f"unknown evaluation {name!r}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _write(path: Path, value: Any) -> None:
    """Writes atomically. Unlike `write_atomic`, does not recreate a folder that was deleted."""
    new = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    new.write_text(json.dumps(value), "utf-8")
    new.replace(path)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _read_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return _read(path)
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()]

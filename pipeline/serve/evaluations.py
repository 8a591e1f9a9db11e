"""Evaluations that are asked for over HTTP: a folder each, which outlives every process.

    FOLDER/ID/request.json   what was asked, by whom and when
             /state.json     queued, running, done, failed or cancelled
             /cancel         it is there when somebody wants it to end
             /queries.jsonl, qrels/test.tsv, spec.yaml   what `jobs.evaluate` is run with
             /log            what it said
             /out/           its results, and the cells by which it goes on after a restart

The gateway writes requests and reads states; one `Evaluator` runs `python -m jobs.evaluate` for one
evaluation after the other. Neither needs to be there for the other: whichever is started again
finds everything in the folder.
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
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import SpecError, absolute, digest, dump, parse
from pipeline.eval.results import read_results
from pipeline.serve import wire
from pipeline.serve.errors import ApiError
from pipeline.serve.replica import bind_to_loopback
from pipeline.serve.settings import Evaluations, ServeSpec

log = logging.getLogger("ray.serve")

ENDED = ("done", "failed", "cancelled")
#: Lines of progress in an answer, the last ones.
PROGRESS_LINES = 20
TRACEBACK = ("Traceback ", '  File "')
#: What of the results can be downloaded; others tell where things lie on the server.
FILES = re.compile(
    r"(report\.html|metrics\.csv|per_query\.csv|table\.md|[a-z_]+\.png|runs/[^/]+\.trec)"
)
_TEXTS = (".html", ".csv", ".md")
#: Seconds between two looks for something to do.
LOOK_EVERY = 0.5
#: Seconds that an evaluation has to end when it is cancelled.
END_SECONDS = 20


class Store:
    """The evaluations of a folder.

    Args:
        settings: of the server; its folder of evaluations is a local one, or mounted.
    """

    def __init__(self, settings: ServeSpec):
        self._settings, self._own = settings, settings.evaluations
        self._folder = _local(self._own)
        self._folder.mkdir(parents=True, exist_ok=True)

    def create(
        self, asked: wire.EvaluationRequest, index: str, key: str, idempotency: str | None
    ) -> str:
        """Queues an evaluation, once if the client sends the request twice, and returns its id.

        Args:
            asked: The request.
            index: Name of the index.
            key: Name of the access key.
            idempotency: Idempotency key of the request: equal if the request is sent again.

        Raises:
            ApiError: too many wait, the request is invalid, or the client called another
                request so.
        """
        if asked.benchmark is not None and asked.benchmark not in self._own.benchmarks:
            names = self._own.benchmarks
            error = SpecError.unknown_name("benchmark", asked.benchmark, names)
            raise ApiError("invalid_argument", str(error), "benchmark")
        self._check(asked)
        name = secrets.token_hex(8)
        if idempotency:
            name = hashlib.sha256(f"{key}\n{idempotency}".encode()).hexdigest()[:16]
        folder = self._folder / name
        content = digest([index, asked.model_dump(mode="json")])
        if (folder / "state.json").exists():
            return self._same(folder, content)
        waiting = [name for name, state in self._states() if state["state"] == "queued"]
        own = sum(self._key_of(name) == key for name in waiting)
        for number, most in (
            (len(waiting), self._own.max_queued),
            (own, self._own.max_queued_per_key),
        ):
            if number >= most:
                message = f"{number} evaluations are already waiting"
                raise ApiError("unavailable", message, retry_after=30)
        created = _now()
        new = self._folder / f".{name}-{secrets.token_hex(4)}"
        new.mkdir()
        try:
            self._write_inputs(new, folder, asked, index)
            request = {"key": key, "index": index, "created": created, "content": content}
            _write(new / "request.json", request)
            _write(new / "state.json", {"state": "queued"})
            new.rename(folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            if not (folder / "state.json").exists():
                raise
            return self._same(folder, content)  # the same request came twice at once
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        self._remove_old()
        return name

    def _same(self, folder: Path, content: str) -> str:
        """The name of an evaluation that a request with the same idempotency key asked for.

        Raises:
            ApiError: that request was another one.
        """
        if self._said(folder, "request.json").get("content", content) != content:
            field = "Idempotency-Key"
            message = f"{field} must be new for a new request, got the key of evaluation"
            raise ApiError("invalid_argument", f"{message} {folder.name}", field)
        return folder.name

    def _check(self, asked: wire.EvaluationRequest) -> None:
        """Raises `ApiError` for what the limits of the server do not allow, or no job takes."""
        limits = self._settings.limits
        if asked.k > limits.max_k:
            raise ApiError(
                "invalid_argument", f"k must be at most {limits.max_k}, got {asked.k}", "k"
            )
        for name, text in (asked.queries or {}).items():
            if len(text) > limits.max_query_chars or not text.strip():
                rule = f"texts with a word and at most {limits.max_query_chars:,} characters"
                message = f"queries must be {rule}, got another for {name!r}"
                raise ApiError("invalid_argument", message, "queries")

    def _key_of(self, name: str) -> str | None:
        return (_read_or_none(self._folder / name / "request.json") or {}).get("key")

    def _write_inputs(
        self, new: Path, folder: Path, asked: wire.EvaluationRequest, index: str
    ) -> None:
        """Writes what `jobs.evaluate` is run with; paths are those of the final folder."""
        from pipeline.eval.spec import EvaluateSpec  # slow to import

        benchmark: Any = {"name": "beir", "path": str(folder)}
        if asked.benchmark is not None:
            benchmark = dump(self._own.benchmarks[asked.benchmark])
        else:
            _write_queries(new, asked.queries or {}, asked.qrels or {})
        given = {
            "index": self._settings.indexes[index].uri,
            "benchmark": benchmark,
            "output": str(folder / "out"),
            "representations": asked.representations,
            "scores": asked.scores,
            "k": asked.k,
            "judged": asked.judged,
            "diagnostics": asked.diagnostics,
            "bm25": asked.bm25,
        }
        if asked.measures:
            given["measures"] = asked.measures
        parse(EvaluateSpec, given)  # reports invalid fields now
        (new / "spec.yaml").write_text(yaml.safe_dump(given, sort_keys=False), "utf-8")

    def evaluation(self, name: str) -> tuple[dict[str, Any], wire.Evaluation]:
        """What was asked and by whom, and how far it is.

        Raises:
            ApiError: there is none of that name.
        """
        folder = self._of(name)
        request, state = self._said(folder, "request.json"), self._said(folder, "state.json")
        hidden = self._hidden(request["index"], folder)
        progress = _lines(folder / "log")[-PROGRESS_LINES:]
        if any(line.startswith(TRACEBACK) for line in progress):
            progress = []  # where a program fails is no business of the caller's
        done = state["state"] == "done"
        return request, wire.Evaluation(
            id=name,
            state=state["state"],
            index=request["index"],
            created=request["created"],
            finished=state.get("finished"),
            progress=[hidden(line) for line in progress],
            error=hidden(state["error"]) if state.get("error") else None,
            results=_results(folder / "out") if done else [],
            files=sorted(_files(folder / "out")) if done else [],
        )

    def names(self) -> list[str]:
        """Of all evaluations, the newest first."""
        created = {
            name: _read_or_none(self._folder / name / "request.json") for name in self._all()
        }
        there = {name: request for name, request in created.items() if request}
        return sorted(there, key=lambda name: (there[name]["created"], name), reverse=True)

    def file(self, name: str, path: str) -> tuple[bytes, str]:
        """A result for download, and its media type.

        Raises:
            ApiError: there is none of that name.
        """
        folder = self._of(name)
        if path not in _files(folder / "out"):
            raise ApiError("not_found", f"unknown file {path!r} of the evaluation")
        index = self._said(folder, "request.json")["index"]
        try:
            data = (folder / "out" / path).read_bytes()
        except FileNotFoundError:  # it is being deleted
            raise _unknown(name) from None
        if path.endswith(_TEXTS):
            data = self._hidden(index, folder)(data.decode()).encode()
        kinds = {"html": "text/html", "csv": "text/csv", "md": "text/markdown", "png": "image/png"}
        kind = kinds.get(path.rpartition(".")[2], "text/plain")
        return data, kind

    def cancel(self, name: str) -> None:
        """Ends an evaluation that has not ended.

        Raises:
            ApiError: there is none of that name, or it has ended.
        """
        folder = self._of(name)
        state = self._said(folder, "state.json")["state"]
        if state in ENDED:
            raise ApiError("conflict", f"the evaluation is {state}")
        try:
            (folder / "cancel").touch()
            if state == "queued":
                end(folder, "cancelled")
        except FileNotFoundError:  # it is being deleted
            raise _unknown(name) from None

    def delete(self, name: str) -> None:
        """Removes an evaluation that has ended.

        Raises:
            ApiError: there is none of that name, or it has not ended.
        """
        folder = self._of(name)
        state = self._said(folder, "state.json")["state"]
        if state not in ENDED:
            raise ApiError("conflict", f"the evaluation is {state}; cancel it first")
        _remove(folder)

    def _of(self, name: str) -> Path:
        if not re.fullmatch("[0-9a-f]{16}", name) or not (self._folder / name).is_dir():
            raise _unknown(name)
        return self._folder / name

    def _said(self, folder: Path, file: str) -> dict[str, Any]:
        """A file of an evaluation, which somebody may delete at any time."""
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

    def _hidden(self, index: str, folder: Path):
        """A function that says names in place of where things lie on the server."""
        served = self._settings.indexes.get(index)
        places = {str(folder): "evaluation", str(self._folder): "evaluations"}
        if served:
            places |= {absolute(served.uri): index, served.uri: index}
        for benchmark, spec in self._own.benchmarks.items():
            if path := getattr(spec, "path", None):
                places |= {absolute(path): benchmark, path: benchmark}
        ordered = sorted(places, key=len, reverse=True)
        pattern = re.compile("|".join(re.escape(place) for place in ordered))
        return lambda text: pattern.sub(lambda found: places[found[0]], text)

    def _remove_old(self) -> None:
        ended = {name for name, state in self._states() if state["state"] in ENDED}
        names = [name for name in self.names() if name in ended]
        for name in names[self._own.max_finished :]:
            _remove(self._folder / name)


class Evaluator:
    """Runs the evaluations of a folder, one after the other, as long as it lives."""

    def __init__(self, settings: ServeSpec):
        bind_to_loopback()
        self._folder = _local(settings.evaluations)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)
        self._thread.start()

    async def is_there(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def check_health(self) -> None:
        """Raises if evaluations are no longer run, upon which Ray starts another one."""
        if not self._thread.is_alive():
            raise RuntimeError("evaluations are no longer run")

    def __del__(self) -> None:  # Ray's name for the end of a replica
        self._ends.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        for folder, state in self._waiting():
            if state["state"] == "running":  # by one that died: the cells it made are there
                end(folder, "queued")
        while not self._ends.is_set():
            waiting = [folder for folder, state in self._waiting() if state["state"] == "queued"]
            if not waiting:
                self._ends.wait(LOOK_EVERY)
                continue
            try:
                self._evaluate(
                    min(waiting, key=lambda folder: _read(folder / "request.json")["created"])
                )
            except FileNotFoundError:  # it was deleted
                continue

    def _waiting(self) -> list[tuple[Path, dict[str, Any]]]:
        states = ((p, _read_or_none(p / "state.json")) for p in self._folder.iterdir())
        return [(p, s) for p, s in states if s and s["state"] in ("queued", "running")]

    def _evaluate(self, folder: Path) -> None:
        if (folder / "cancel").exists():
            end(folder, "cancelled")
            return
        _write(folder / "state.json", {"state": "running"})
        command = [sys.executable, "-m", "jobs.evaluate", str(folder / "spec.yaml")]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL
            )
        code = self._wait(process, folder)
        if self._ends.is_set() and code != 0:
            end(folder, "queued")  # the next one goes on with it
        elif (folder / "cancel").exists():
            end(folder, "cancelled")
        elif code == 0:
            end(folder, "done")
        else:
            lines = _lines(folder / "log")
            message = lines[-1] if lines and lines[-1].startswith("error: ") else ""
            end(folder, "failed", error=message or f"the evaluation ended with exit code {code}")

    def _wait(self, process: subprocess.Popen, folder: Path) -> int:
        """Waits for the end of a process; ends it if it is cancelled, or this replica ends."""
        while (code := process.poll()) is None:
            if self._ends.wait(LOOK_EVERY) or (folder / "cancel").exists():
                process.send_signal(signal.SIGTERM)
                try:
                    return process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return process.wait()
        return code


def end(folder: Path, state: str, error: str | None = None) -> None:
    """Notes how an evaluation ended, or that it waits again."""
    said: dict[str, Any] = {"state": state}
    if state in ENDED:
        said["finished"] = _now()
    if error:
        said["error"] = error
    _write(folder / "state.json", said)


def check_folder(settings: Evaluations) -> None:
    """Raises `SpecError` if there is a folder and it is no local one."""
    if settings.folder:
        _local(settings)


def _local(settings: Evaluations) -> Path:
    """The folder as a path.

    Raises:
        SpecError: it is no local folder.
    """
    if "://" in settings.folder:
        rule = "a local folder that the gateway and the evaluator share"
        raise SpecError("evaluations.folder", settings.folder, rule)
    return Path(absolute(settings.folder))


def _write_queries(folder: Path, queries: dict[str, str], qrels: dict[str, dict[str, int]]) -> None:
    """Judged queries in the form of BEIR.

    Raises:
        ApiError: an id cannot stand in a line of a table, or no query is judged.
    """
    ids = {*qrels, *(document for graded in qrels.values() for document in graded)}
    ids |= queries.keys()
    if wrong := next((i for i in ids if re.search(r"[\0\t\r\n]", i) or i != i.strip()), None):
        message = f"qrels must have ids without tabs, line breaks or outer spaces, got {wrong!r}"
        raise ApiError("invalid_argument", message, "qrels")
    if not qrels.keys() & queries.keys():
        message = "qrels must have grades for at least one of the queries"
        raise ApiError("invalid_argument", message, "qrels")
    lines = (json.dumps({"_id": i, "text": text}, ensure_ascii=True) for i, text in queries.items())
    (folder / "queries.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (folder / "qrels").mkdir()
    rows = [f"{q}\t{d}\t{g}\n" for q, graded in qrels.items() for d, g in graded.items()]
    table = "".join(["query-id\tcorpus-id\tscore\n", *rows])
    (folder / "qrels" / "test.tsv").write_text(table, "utf-8")


def _results(out: Path) -> list[wire.Measured]:
    """The rows of an evaluation's table."""
    return [
        wire.Measured(
            representation=row.representation,
            score=row.score,
            measures=row.means,
            bytes_per_item=row.all_bytes,
        )
        for row in read_results(str(out), "evaluation").results
    ]


def _files(out: Path) -> set[str]:
    if not out.is_dir():
        return set()
    there = (
        [*out.iterdir(), *(out / "runs").glob("*")] if (out / "runs").is_dir() else out.iterdir()
    )
    names = {path.relative_to(out).as_posix() for path in there if path.is_file()}
    return {name for name in names if FILES.fullmatch(name)}


def _remove(folder: Path) -> None:
    """Removes a folder: at once as others see it."""
    gone = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # somebody else did
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _unknown(name: str) -> ApiError:
    return ApiError("not_found", f"unknown evaluation {name!r}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _write(path: Path, value: Any) -> None:
    """Writes JSON that is there as a whole, or not.

    Not `write_atomic`: it would make the folder of an evaluation anew that was just deleted.
    """
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

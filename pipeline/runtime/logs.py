"""Structured logs: JSON lines with the event and the ids of the job, the unit and the index.

    export MAXRAY_LOG_FORMAT=json        # text (default) or json

Jobs then write their log to standard error, one JSON object per line, and only results to standard
output. The keys are those of Ray's JSON logs, which Ray writes for the workers of the job and the
processes of a server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.config import SpecError

#: Environment variable with the format of the log, and its values. The first is the default.
FORMAT_VARIABLE, FORMATS = "MAXRAY_LOG_FORMAT", ("text", "json")
#: Loggers of this package, whose children are those of its modules and jobs.
LOGGERS = ("pipeline", "maxray")

#: Attributes that all log records have.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: Fields of all lines of this process.
_fields: dict[str, Any] = {}


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object, with the fields of its argument `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        entry = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "name": record.name,
            "event": "message",
            "message": record.getMessage(),
            **_fields,
            **{name: value for name, value in extra.items() if not name.startswith("_")},
        }
        if record.exc_info:
            entry["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Handler(logging.StreamHandler):
    """Writes to the present standard output or error, which a display may have replaced."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self._name)
        super().emit(record)


def is_json() -> bool:
    """Checks whether jobs log JSON lines."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def configure() -> None:
    """Configures the log of a job. Raises `SpecError` if `MAXRAY_LOG_FORMAT` is invalid."""
    value = os.environ.get(FORMAT_VARIABLE, FORMATS[0])
    if value not in FORMATS:
        raise SpecError(FORMAT_VARIABLE, value, f"one of {', '.join(FORMATS)}")
    handler = _Handler("stderr" if is_json() else "stdout")
    if is_json():
        handler.setFormatter(JsonFormatter())
        sys.excepthook = _log_exception
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[handler])
    for name in LOGGERS:  # libraries also log where they found credentials, for example
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)


def event(log: logging.Logger, name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Logs an event, named in the past tense, if jobs log JSON lines. Text logs have sentences."""
    if is_json():
        log.log(level, name.replace("_", " "), extra={"event": name, **fields})


@contextlib.contextmanager
def warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Also passes the warnings of this package, such as unreadable files, to a function."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Adds fields to all JSON lines that this process logs inside the block."""
    before = dict(_fields)
    _fields.update(fields)
    try:
        yield
    finally:
        _fields.clear()
        _fields.update(before)


def _log_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    fields = {"event": "failed"}
    logging.getLogger("maxray").critical(error, exc_info=(kind, error, trace), extra=fields)

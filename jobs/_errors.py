"""Exit codes of jobs, and the messages of the errors that end them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from pipeline.config import Stopped
from pipeline.runtime import logs
from pipeline.runtime.progress import close_display

log = logging.getLogger("maxray.jobs")

#: Exit codes: invalid input; stopped cleanly by Ctrl-C; stopped cleanly by SIGTERM.
BAD_INPUT, INTERRUPTED, STOPPED = 2, 130, 143


def report_stop(error: Stopped | KeyboardInterrupt) -> int:
    """Reports that the job has been stopped and returns the exit code."""
    if isinstance(error, Stopped):
        return report_error(error, STOPPED)
    return report_error("interrupted", INTERRUPTED)


def report_missing(sentences: Sequence[str]) -> int:
    """Prints one sentence per missing file to stderr and returns the exit code."""
    for sentence in sentences:
        print(f"error: {sentence}", file=sys.stderr)
    return BAD_INPUT


def report_error(error: object, code: int) -> int:
    """Prints an error to stderr, or logs it as JSON, and returns `code`."""
    close_display()
    error = getattr(error, "cause", error)  # Ray wraps errors raised in tasks
    is_stop = isinstance(error, Stopped)
    if logs.is_json():
        fields = {"event": "stopped" if is_stop else "failed", "exit_code": code}
        log.log(logging.INFO if is_stop else logging.ERROR, str(error), extra=fields)
    else:
        print(error if is_stop else f"error: {error}", file=sys.stderr, flush=True)
    return code

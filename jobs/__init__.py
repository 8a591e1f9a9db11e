"""Command line jobs, run with `python -m jobs.VERB`.

The docstring of each module is its `--help` text and begins with the exact commands.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import inspect
import io
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from pipeline import config, logs
from pipeline.config import JobError, SpecError, Stopped
from pipeline.extras import MissingExtra, as_missing_extra
from pipeline.index import check_index
from pipeline.index import job_id as job_id
from pipeline.paths import is_uri
from pipeline.progress import MODES, close_display
from pipeline.progress import say as say
from pipeline.registry import check_fields

log = logging.getLogger("maxray.jobs")

#: Times after which the driver tests a connection on which it waits for a task, and gives it up, in
#: milliseconds. With Ray's own (300 s and 120 s), a job waits for five to seven minutes for a task
#: whose result was lost by a network partition. Nodes accept one test per minute.
KEEPALIVE = {
    "RAY_grpc_client_keepalive_time_ms": 70_000,
    "RAY_grpc_client_keepalive_timeout_ms": 20_000,
}
#: Exit codes: invalid input; stopped cleanly by Ctrl-C; stopped cleanly by SIGTERM.
BAD_INPUT, INTERRUPTED, STOPPED = 2, 130, 143

#: Parses the command line of one form of a verb, such as `add candidates`, and runs it. Its
#: docstring is the help text.
Form = Callable[[Sequence[str]], None]


def run(
    main: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None
) -> None:
    """Runs the main function of a job and converts expected errors to exit codes.

    For invalid input, the error is printed as one sentence and the exit code is 2. Other expected
    failures have exit code 1.

    Args:
        main: Main function of the job.
        arguments: Command line, or None for that of this process.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # progress bars clutter logs
    # Otherwise, a thread of Ray Data that outlives a stopped job starts another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    for name, milliseconds in KEEPALIVE.items():
        os.environ.setdefault(name, str(milliseconds))
    # Ray reads the mode on import, so that setting it later would only affect child processes. A
    # cluster that the job joins has a mode of its own.
    if "ray" not in sys.modules and not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray's setting for binding to the loopback interface only. Also read on import.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    prepare_output()
    try:
        logs.configure()
        with _sigterm_as_stopped():
            main(arguments)
        sys.stdout.flush()
    except (SpecError, MissingExtra) as error:
        sys.exit(_report_error(error, BAD_INPUT))
    except ModuleNotFoundError as error:
        if (missing := as_missing_extra(error)) is error:
            raise
        sys.exit(_report_error(missing, BAD_INPUT))
    except (Stopped, KeyboardInterrupt) as stopped:
        sys.exit(_stopped(stopped))
    except JobError as error:
        sys.exit(_report_error(error, 1))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if hasattr(error, "cause"):  # raised in a Ray task: its traceback matters
            raise
        sys.exit(_report_error(error, 1))


def run_form(forms: Mapping[str, Form], arguments: Sequence[str] | None) -> bool:
    """Runs the form of a verb that the first argument names.

    Args:
        forms: Forms of the verb, by name.
        arguments: Command line, or None for that of this process.

    Returns:
        False if the first argument is not the name of a form.

    Raises:
        SpecError: The first argument is similar to the name of a form, and no such file exists.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if form := forms.get(name):
        form(arguments[1:])
        return True
    if config.close_match(name, forms) and not (name.startswith("-") or Path(name).exists()):
        raise SpecError.unknown_name("form", name, forms, "does not exist")
    return False


def prepare_output() -> None:
    """Makes printing safe in any encoding, and if the standard output or error is closed.

    Characters that the encoding lacks are printed as escapes.
    """
    for fd, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(fd)
        except OSError:  # otherwise the next file that is opened would become the output
            null = os.open(os.devnull, os.O_WRONLY)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _sigterm_as_stopped() -> Iterator[None]:
    """Raises `Stopped` on SIGTERM, also while modules load and Ray starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(error: Stopped | KeyboardInterrupt) -> int:
    """Reports that the job has been stopped and returns the exit code."""
    if isinstance(error, Stopped):
        return _report_error(error, STOPPED)
    return _report_error("interrupted", INTERRUPTED)


def report_missing(sentences: Sequence[str]) -> int:
    """Prints one sentence per missing file to stderr and returns the exit code."""
    for sentence in sentences:
        print(f"error: {sentence}", file=sys.stderr)
    return BAD_INPUT


def _report_error(error: object, code: int) -> int:
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


class Parser(argparse.ArgumentParser):
    """Argument parser that accepts options at any position and exits with code 2 on errors.

    Args:
        doc: Docstring of the job's module or of the form, shown by `--help`.
        form: Name of the form of the verb.
    """

    def __init__(self, doc: str | None, form: str | None = None):
        super().__init__(
            prog=form and f"{Path(sys.argv[0]).name} {form}",
            description=inspect.cleandoc(doc or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses command line arguments, which default to those of this process."""
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Prints the error together with the most similar valid name and exits with code 2."""
        self.exit(BAD_INPUT, f"error: {message}{self._close_match(message)}; see --help\n")

    def _close_match(self, message: str) -> str:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            return config.close_match(choice[1], re.findall(r"'([^']*)'", choice[2]))
        if option := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            return config.close_match(option[1], self._option_string_actions)
        return ""


def parser(doc: str | None, form: str | None = None) -> Parser:
    """Creates a parser whose help text is the docstring of the job's module or of a form."""
    return Parser(doc, form)


class SpecParser(Parser):
    """Argument parser that also checks the paths and the fields of components in a spec.

    Validating a complete spec imports its components, which takes seconds. Checking the paths and
    the names of fields first reports the most common mistakes without this delay.
    """

    has_index = False  # True if the index of the spec must exist

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses the arguments and checks the paths and the fields of components in the spec.

        Raises:
            SpecError: A file or folder does not exist, a component has no field of that name, or
                the spec is not a YAML mapping.
        """
        args = super().parse(arguments)
        spec = _guessed(config.override(config.read(args.spec, "spec"), args.overrides))
        if vars(args).get("resources"):
            config.read(args.resources, "resources")
        check_paths(spec)
        check_fields(spec)
        if self.has_index and isinstance(spec.get("index"), str):
            check_index(spec["index"])
        return args


def _guessed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Parses assigned values of fields, whose types are not loaded, if they are no text."""
    guessed = dict(spec)
    for field, value in spec.items():
        with contextlib.suppress(SpecError):
            if isinstance(value, config.Assigned) and not isinstance(value.parsed(), str):
                guessed[field] = value.parsed()
    return guessed


def check_paths(spec: Mapping[str, Any]) -> None:
    """Raises `SpecError` if a spec refers to a file, a folder or an index that does not exist."""
    for field in ("source", "data", "benchmark"):
        value = spec.get(field)
        components = {field: value}
        if isinstance(value, list):
            components = {f"{field}[{number}]": item for number, item in enumerate(value)}
        for name, component in components.items():
            path = component.get("path") if isinstance(component, Mapping) else None
            is_glob = field == "data" and isinstance(path, str) and glob.has_magic(path)
            if isinstance(path, str) and path and not is_glob:
                config.check_exists(path, f"{name}.path", "an existing file or folder")
    _check_collections(spec.get("source"))
    if isinstance(folder := spec.get("rerank"), str):
        config.check_exists(folder, "rerank", "the folder of a trained EDJE")
    if isinstance(index := spec.get("fit_index"), str):
        try:
            check_index(index)
        except SpecError as error:
            raise error.at("fit_index") from None


def _check_collections(sources: Any) -> None:
    """Raises `SpecError` if two sources of a list are in the same collection."""
    first: dict[str, int] = {}
    for number, source in enumerate(sources if isinstance(sources, list) else ()):
        if not isinstance(source, Mapping) or not isinstance(path := source.get("path"), str):
            continue
        name = source.get("collection") or PurePosixPath(config.absolute(path)).name
        if first.setdefault(name, number) != number:
            field, rule = f"source[{number}].collection", "unique for each source"
            note = f", first in source[{first[name]}]; set `collection` of one of them"
            raise SpecError(field, name, rule, "occurs twice", note)


def check_outputs(outputs: Sequence[str], field: str) -> None:
    """Raises `SpecError` if a folder does not contain results of `jobs.evaluate`."""
    for output in outputs:
        if not is_uri(output) and not Path(config.absolute(output), "results.json").exists():
            rule = "the output folder of jobs.evaluate"
            raise SpecError(field, output, rule, "contains no results.json")


def spec_parser(
    doc: str | None, form: str | None = None, *, profiles: bool = True, has_index: bool = False
) -> Parser:
    """Creates a parser with the arguments that all jobs with a spec have in common.

    Args:
        doc: Docstring of the job's module or of the form, shown by `--help`.
        form: Name of the form of the verb.
        profiles: True if the job accepts a resources profile.
        has_index: True if the index of the spec must exist.
    """
    parser = SpecParser(doc, form)
    parser.has_index = has_index
    parser.add_argument("spec", help="YAML spec; see jobs/specs")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="assignments of the form dotted.field=value"
    )
    if profiles:
        parser.add_argument("--resources", help="resources profile; see cluster/profiles")
    return parser


def load_profile(profile_class: type[config.SpecT], path: str | None) -> config.SpecT:
    """Loads the resources profile of a job, or returns the default."""
    return config.load(profile_class, path, role="resources") if path else profile_class()


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--progress`, whose value is passed to `open_display`."""
    parser.add_argument(
        "--progress",
        choices=MODES,
        default="auto",
        help="a live display, plain lines or JSON lines (default: live on a terminal, else plain)",
    )


def positive(text: str) -> int:
    """Parses a positive integer. Used as the `type` of an argument."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number


@contextlib.contextmanager
def cluster(object_store_bytes: int | None = None) -> Iterator[None]:
    """Connects to the Ray cluster at `RAY_ADDRESS`, or starts a local cluster if it is not set.

    Args:
        object_store_bytes: Memory of the object store if a cluster is started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The C++ core logs an error for every actor pool of Ray Data. Real errors are exceptions.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    local = {}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_reachable(address)  # before Ray is imported, which takes seconds
    else:
        # While Ray starts, its own SIGTERM handler would drain the node for 30 s.
        os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
        # With Ray's own niceness of 15, other programs leave a job a third of a core.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Without the address, Ray would join a cluster of `ray start`, or fail if it has died.
        local = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": object_store_bytes,
        }
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are also raised
    if ray.is_initialized():  # a test run shares its cluster
        yield
        return
    _start_ray(local)
    try:
        with _ray_processes_watched() if local else contextlib.nullcontext():
            yield
    except (Stopped, KeyboardInterrupt) as stopped:
        # While actors start, ray.shutdown() may end this process with code 1. The processes of a
        # local cluster exit with this one.
        code = _stopped(stopped)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def _start_ray(options: Mapping[str, Any]) -> None:
    """Connects to Ray and restores the SIGTERM handler of this process, which Ray has replaced.

    Raises:
        SpecError: The cluster at `RAY_ADDRESS` cannot be joined.
        JobError: No cluster can be started on this machine.
        Stopped: SIGTERM arrived while Ray was starting.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS")
    # Workers would import modules from the working directory first, in which another project may
    # have folders named `jobs` or `pipeline`, even if this process does not (`maxray`).
    is_separate = not address and not {"", os.getcwd()} & {*sys.path}
    if is_separate or logs.is_json():
        # Ray adds the working directory to the path of the workers except for jobs of Ray Client.
        options = {**options, "job_config": ray.job_config.JobConfig(_client_job=is_separate)}
    if logs.is_json():
        # `ray.init(logging_config=...)` would configure the log of this process as well.
        options["job_config"].set_py_logging_config(ray.LoggingConfig(encoding="JSON"))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _without_stderr():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:  # raised by Ray's SIGTERM handler
        raise Stopped("stopped by SIGTERM") from None
    except Stopped:
        raise
    except Exception as error:  # TimeoutError, ConnectionError, RuntimeError and others
        reason = config.first_line(error)
        if address:
            rule, problem = "the address of a running Ray cluster", f"cannot be joined ({reason})"
            raise SpecError("RAY_ADDRESS", address, rule, problem) from None
        raise JobError(f"Ray cannot be started on this machine: {reason}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str) -> None:
    """Checks that a server listens at `host:port`. Without this check, Ray would retry for minutes.

    Raises:
        SpecError: Nothing accepts a connection at the address within 10 seconds.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():  # such as "auto", which Ray resolves
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        rule, problem = "the address of a running Ray cluster", f"cannot be reached ({error})"
        raise SpecError("RAY_ADDRESS", address, rule, problem) from None


@contextlib.contextmanager
def _ray_processes_watched() -> Iterator[None]:
    """Exits with one sentence if the GCS server or the raylet of the local cluster dies.

    Without this function, Ray notices their death after a minute. It then prints its logs and exits
    from its C++ core, where no exception can be caught. The function requires pidfd, which is only
    available on Linux.
    """
    if sys.platform != "linux":
        yield
        return
    names = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if name in ("gcs_server", "raylet"):
                names[os.pidfd_open(int(child))] = name
    end, ended = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([end, *names], [], [])
        if end not in ready:
            problem = f"Ray's {names[ready[0]]} died, perhaps because memory ran out"
            sys.stdout.flush()
            os._exit(_report_error(f"{problem}; rerun the same command to resume", 1))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(ended)
        watcher.join()
        for descriptor in (end, *names):
            os.close(descriptor)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hides the messages that Ray's C++ core prints about its log level."""
    sys.stderr.flush()
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)

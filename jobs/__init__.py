"""The jobs: `python -m jobs.VERB`, each a docstring with the exact command and a thin main."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline import config
from pipeline.config import JobError, SpecError, Stopped
from pipeline.extras import MissingExtra, explained
from pipeline.index import check_index

#: Exit codes: bad input; stopped by Ctrl-C or SIGTERM, with everything left in order.
BAD_INPUT, INTERRUPTED, STOPPED = 2, 130, 143


def run(
    main: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None
) -> None:
    """Runs a job's main: what the user can mend is one sentence and exit code 2."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # no bars in the logs of jobs
    # Else a thread of Ray Data that outlives a stopped job would start another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    # Ray reads the mode when it is imported: set later, this process would differ from those that
    # it starts. A cluster that is joined has its own mode.
    if "ray" not in sys.modules and not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray's name for "the loopback interface alone"; also read when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        with _sigterm_as_stopped():
            main(arguments)
    except (SpecError, MissingExtra) as error:
        sys.exit(_said(error, BAD_INPUT))
    except ModuleNotFoundError as error:
        if (missing := explained(error)) is error:
            raise
        sys.exit(_said(missing, BAD_INPUT))
    except (Stopped, KeyboardInterrupt) as stopped:
        sys.exit(_stopped(stopped))
    except JobError as error:
        sys.exit(_said(error, 1))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if hasattr(error, "cause"):  # of a Ray task: where it happened matters
            raise
        sys.exit(_said(error, 1))


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
    if isinstance(error, Stopped):
        return _said(error, STOPPED)
    return _said("interrupted", INTERRUPTED)


def _said(error: object, code: int) -> int:
    error = getattr(error, "cause", error)  # as it was before Ray carried it out of a task
    said = error if isinstance(error, Stopped) else f"error: {error}"
    print(said, file=sys.stderr, flush=True)
    return code


class Parser(argparse.ArgumentParser):
    """A parser that accepts options anywhere and exits with code 2 on invalid arguments."""

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses a command line, that of this process if it is None."""
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong, with the closest valid name, and exits."""
        self.exit(BAD_INPUT, f"error: {message}{self._close_match(message)}; see --help\n")

    def _close_match(self, message: str) -> str:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            return config.close_match(choice[1], re.findall(r"'([^']*)'", choice[2]))
        if option := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            return config.close_match(option[1], self._option_string_actions)
        return ""


def parser(doc: str) -> Parser:
    """A parser whose help is the job's docstring."""
    return Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


class SpecParser(Parser):
    """A parser that also checks the files and folders that a spec names.

    Checking a whole spec needs its components, and importing those takes seconds: wrong paths are
    reported before that.
    """

    has_index = False  # whether the spec's index must exist already

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses a command line and checks the paths in its spec.

        Raises:
            SpecError: A file or folder does not exist, or the spec is no YAML mapping.
        """
        args = super().parse(arguments)
        spec = config.override(config.read(args.spec, "spec"), args.overrides)
        if vars(args).get("resources"):
            config.read(args.resources, "resources")
        check_paths(spec)
        if self.has_index and isinstance(spec.get("index"), str):
            check_index(spec["index"])
        return args


def check_paths(spec: Mapping[str, Any]) -> None:
    """Raises `SpecError` if a file, folder or index that a spec names does not exist."""
    for field in ("source", "data", "benchmark"):
        given = spec.get(field)
        named = {field: given}
        if isinstance(given, list):
            named = {f"{field}.{number}": each for number, each in enumerate(given)}
        for name, each in named.items():
            path = each.get("path") if isinstance(each, Mapping) else None
            if isinstance(path, str) and path and not set(path) & set("*?["):  # those are globs
                config.check_exists(path, f"{name}.path", "an existing file or folder")
    if isinstance(folder := spec.get("rerank"), str):
        config.check_exists(folder, "rerank", "the folder of a trained EDJE")
    if isinstance(index := spec.get("fit_index"), str):
        try:
            check_index(index)
        except SpecError as error:
            raise error.at("fit_index") from None


def check_outputs(outputs: Sequence[str], field: str) -> None:
    """Raises `SpecError` if a folder holds no results of `jobs.evaluate`."""
    for output in outputs:
        if "://" not in output and not Path(config.absolute(output), "results.json").exists():
            rule = "the output folder of jobs.evaluate"
            raise SpecError(field, output, rule, "contains no results.json")


def spec_parser(doc: str, *, profiles: bool = True, has_index: bool = False) -> Parser:
    """Returns a parser for jobs that run a spec, with the arguments that all of them have.

    Args:
        doc: Docstring of the job's module, shown by `--help`.
        profiles: Whether the job takes a resources profile.
        has_index: Whether the spec's index must exist already.
    """
    made = SpecParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.has_index = has_index
    made.add_argument("spec", help="a YAML file, see jobs/specs")
    made.add_argument("overrides", nargs="*", default=[], help="dotted.field=value")
    if profiles:
        made.add_argument("--resources", help="a profile, see cluster/profiles")
    return made


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number


def say(line: str) -> None:
    """Prints a line of progress at once, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def job_id() -> str:
    """A new id: the time, and a few random digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


@contextlib.contextmanager
def cluster(object_store_bytes: int | None = None) -> Iterator[None]:
    """Joins the Ray cluster that `RAY_ADDRESS` names, else starts one on this machine.

    Args:
        object_store_bytes: memory of the object store of a cluster that is started here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_reachable(address)  # before Ray is imported, which takes seconds
    else:
        # The C++ core says "ERROR" of every actor pool of Ray Data; real errors are exceptions.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        # While Ray starts, SIGTERM is handled by Ray, which would drain the node for 30 s.
        os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
        local = {"include_dashboard": False, "object_store_memory": object_store_bytes}
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised as well
    if ray.is_initialized():  # a test run shares its cluster
        yield
        return
    _start_ray(local)
    try:
        with _ray_processes_watched() if local else contextlib.nullcontext():
            yield
    except (Stopped, KeyboardInterrupt) as stopped:
        # While actors are starting, Ray's shutdown may end this process at once and with code 1.
        # What Ray started here ends by itself when this process does.
        code = _stopped(stopped)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def _start_ray(options: Mapping[str, Any]) -> None:
    """Connects to Ray and keeps this process's handler of SIGTERM, which Ray replaces.

    Raises:
        SpecError: The cluster that `RAY_ADDRESS` names cannot be joined.
        JobError: No cluster can be started on this machine.
        Stopped: SIGTERM came while Ray was starting.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _without_stderr():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:  # how Ray's handler of SIGTERM ends a process
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
    """Checks that something listens at a `host:port`, for which Ray would wait several minutes.

    Raises:
        SpecError: Nothing accepts a connection at the address within 10 seconds.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():  # "auto", for one, which Ray looks up
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        rule, problem = "the address of a running Ray cluster", f"cannot be reached ({error})"
        raise SpecError("RAY_ADDRESS", address, rule, problem) from None


@contextlib.contextmanager
def _ray_processes_watched() -> Iterator[None]:
    """Ends this process with one sentence when a process of the Ray that it started dies.

    Without it Ray notices after a minute, prints its logs and exits from its C++ core, where no
    exception can be caught. Only Linux has the file descriptors of processes that this needs.
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
            os._exit(_said(f"{problem}; rerun the same command to resume", 1))

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
    """Hides what Ray's C++ core says of its own log level; what goes wrong is an exception."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

"""Start of Ray for jobs: a local cluster, or a connection to a running one.

Each workaround links to the issue or pull request of Ray that explains it, if there is one.
`tests/jobs/test__ray_cluster.py` tests the behaviour of Ray that makes them necessary.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs._errors import report_error, report_stop
from pipeline import config
from pipeline.config import JobError, SpecError, Stopped
from pipeline.extras import is_installed, require
from pipeline.index import EXECUTOR
from pipeline.runtime import logs
from pipeline.runtime.progress import Display

#: Times after which the driver tests a connection on which it waits for a task, and gives it up, in
#: milliseconds. With Ray's own (300 s and 120 s), a job waits for five to seven minutes for a task
#: whose result was lost by a network partition. Nodes accept one test per minute.
#: https://github.com/ray-project/ray/pull/44692
KEEPALIVE = {
    "RAY_grpc_client_keepalive_time_ms": 70_000,
    "RAY_grpc_client_keepalive_timeout_ms": 20_000,
}


def configure_ray() -> None:
    """Sets the environment variables that Ray reads when it is imported."""
    # Otherwise, a thread of Ray Data that outlives a stopped job starts another cluster.
    # https://github.com/ray-project/ray/issues/64206
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    for name, milliseconds in KEEPALIVE.items():
        os.environ.setdefault(name, str(milliseconds))
    # A cluster that the job joins has a mode of its own.
    if "ray" not in sys.modules and not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray's setting for binding to the loopback interface only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@contextlib.contextmanager
def cluster_unless(
    is_small: Callable[[], bool],
    resources: str | None,
    object_store_bytes: int | None = None,
    display: Display | None = None,
) -> Iterator[None]:
    """Connects to Ray as `cluster` does, unless a job is small enough for this process.

    Without Ray, this process runs jobs of any size. Ray is required if a resources profile is
    given, if `RAY_ADDRESS` is set, or if the environment variable `MAXRAY_EXECUTOR` is `ray`.
    """
    name = os.environ.get(EXECUTOR)
    wants_ray = name == "ray" or resources is not None or bool(os.environ.get("RAY_ADDRESS"))
    if name == "process" or (not wants_ray and (not is_installed("ray") or is_small())):
        yield
        return
    if display is not None:
        display.phase("start Ray")
    with cluster(object_store_bytes):
        yield


@contextlib.contextmanager
def cluster(object_store_bytes: int | None = None) -> Iterator[None]:
    """Connects to the Ray cluster at `RAY_ADDRESS`, or starts a local cluster if it is not set.

    Raises:
        MissingExtra: Ray is not installed.
    """
    require("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The C++ core logs an error for every actor pool of Ray Data. Real errors are exceptions.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    local = {}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_reachable(address)  # before Ray is imported, which takes seconds
    else:
        # While Ray starts, its own SIGTERM handler would drain the node for 30 s.
        # https://github.com/ray-project/ray/pull/64454
        os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
        # With Ray's own niceness of 15, other programs leave a job a third of a core.
        # https://github.com/ray-project/ray/pull/24928
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Without the address, Ray would join a cluster of `ray start`, or fail if it has died.
        # https://github.com/ray-project/ray/pull/27666
        local = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": object_store_bytes,
        }
    import ray

    if ray.is_initialized():  # a test run shares its cluster
        yield
        return
    _start_ray(local)
    try:
        with _ray_processes_watched() if local else contextlib.nullcontext():
            yield
    except (Stopped, KeyboardInterrupt) as stopped:
        # While actors start, ray.shutdown() may end this process with code 1. The processes of a
        # local cluster exit with this one. https://github.com/ray-project/ray/issues/37288
        code = report_stop(stopped)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def _start_ray(options: Mapping[str, Any]) -> None:
    """Connects to Ray and restores the SIGTERM handler of this process, which Ray has replaced.

    See https://github.com/ray-project/ray/issues/17308.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS")
    # Workers would import modules from the working directory first, in which another project may
    # have folders named `jobs` or `pipeline`, even if this process does not (`maxray`).
    # https://github.com/ray-project/ray/pull/31383
    is_separate = not address and not {"", os.getcwd()} & {*sys.path}
    if is_separate or logs.is_json():
        # Ray adds the working directory to the path of the workers except for jobs of Ray Client.
        options = {**options, "job_config": ray.job_config.JobConfig(_client_job=is_separate)}
    if logs.is_json():
        # `ray.init(logging_config=...)` would configure the log of this process as well.
        options["job_config"].set_py_logging_config(ray.LoggingConfig(encoding="JSON"))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        start = functools.partial(
            ray.init, log_to_driver=False, logging_level=logging.ERROR, **options
        )
        if not address:
            _start_fewer_processes()
        with _without_stderr():
            try:
                start()
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
                # Ray waits for 30 s, which is too short on a busy machine.
                ray.shutdown()
                start()
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


def _start_fewer_processes() -> None:
    """Lets Ray start a local cluster without processes that jobs do not use.

    Without the dashboard, its server only reports usage statistics, but Ray waits a second for it.
    The other processes add nodes, and pass on logs, which `log_to_driver=False` hides. They take
    two seconds of a core and 170 MB, and Ray has no settings for them.
    """
    from ray._private.node import Node

    for method in ("start_api_server", "start_monitor", "start_log_monitor"):
        setattr(Node, method, lambda *_, **__: None)


def _check_reachable(address: str) -> None:
    """Checks that a server listens at `host:port`. Without this check, Ray would retry for minutes.

    See https://github.com/ray-project/ray/issues/22413.
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
    available on Linux. See https://github.com/ray-project/ray/pull/20777.
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
            os._exit(report_error(f"{problem}; rerun the same command to resume", 1))

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

r"""Serves indexes over HTTP: search page, search, reranking, encoding and evaluation.

    maxray serve papers/                                    # the index papers.maxray
    maxray serve out/cranfield/index                        # on 127.0.0.1:8000
    maxray serve out/cranfield/index out/pages/index --port 8123
    maxray serve federation.yaml                            # several indexes as one, and each
    maxray serve out/cranfield/index --keys keys.yaml --host 0.0.0.0 limits.max_k=100
    maxray serve --spec settings.yaml timeouts.search_s=5
    maxray serve out/photos/index 'indexes.photos.rerank={name: edje, model: out/edje/model}'
    maxray serve key --name ann >> keys.yaml                # create an access key
    curl -s localhost:8000/v1/search -H 'Content-Type: application/json' \
         -d '{"query": "how does a slipstream change the lift of a wing", "k": 3}'

Each index has the name of its folder, or of the parent of a folder `index`, and each federation
that of its file. Without access keys
(--keys), the server listens only on the loopback interface. On Ctrl-C or SIGTERM, it drains
in-flight requests and exits. The search page is at /, and the API is documented at /docs and
/openapi.json. All stages run in one process, unless RAY_ADDRESS or settings of other deployments
are set. To start the same application on a cluster, with a deployment per stage, run
`serve deploy cluster/serve/cranfield.yaml`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import jobs
from pipeline.config import (
    JobError,
    MissingField,
    SpecError,
    Stopped,
    absolute,
    check_exists,
    first_line,
    load,
    override,
    parse,
    read,
    within,
)
from pipeline.extras import require
from pipeline.index import SUFFIX, check_index, find_index
from pipeline.runtime import logs, tracing

if TYPE_CHECKING:  # imported on use, so --help is fast
    from pipeline.serve.settings import ServeSpec

APPLICATION = "maxray"
#: Interval at which the deployments are checked while the server starts, in seconds.
STATUS_SECONDS = 0.2


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and serves until the process is stopped."""
    if jobs.run_form(FORMS, arguments):
        return
    args = _parser().parse(arguments)
    require("ray")
    settings = _settings(args)
    if settings.single_process is None and not os.environ.get("RAY_ADDRESS"):
        settings = settings.model_copy(update={"single_process": not settings.scaled})
    _check_address(args.host, args.port, settings)
    _check_indexes(settings)
    start = time.monotonic()
    signal.signal(signal.SIGTERM, _stop)
    set_ray_serve_env()
    jobs.say("starting Ray")
    with jobs.cluster():
        serve(settings, args.host, args.port, start)


def _parser() -> jobs.Parser:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "indexes",
        nargs="*",
        default=[],
        help="URIs of indexes or their folders, federations (.yaml), and settings in the form "
        "dotted.field=value",
    )
    parser.add_argument("--spec", help="YAML file with the settings of the server")
    parser.add_argument(
        "--keys", metavar="FILE", help="file of access keys, see pipeline.serve.keys"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, help="port (default: 8000)")
    return parser


def _port(text: str) -> int:
    number = jobs.positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 65535, got {text!r}")
    return number


def _settings(args: Any) -> ServeSpec:
    overrides = [a for a in args.indexes if re.match(r"[a-z_]+(\.[^/=]+)*=", a)]
    given = [a for a in args.indexes if a not in overrides]
    indexes: dict[str, dict[str, str]] = {}
    for uri in given:
        if not jobs.is_spec(uri):
            _add_index(indexes, find_index(uri))
    federations = {}
    for path in filter(jobs.is_spec, given):
        name = index_name(path.rpartition(".")[0])
        if name in federations:
            raise SpecError("federations", path, "a file with a unique name")
        federations[name] = _federation(path, indexes)
    if args.spec:
        read(args.spec, "spec")
    if args.keys:
        check_exists(args.keys, "keys")

    from pipeline.serve.settings import ServeSpec

    settings: dict[str, Any] = {"indexes": indexes} if indexes else {}
    if federations:
        settings["federations"] = federations
    if args.keys:
        settings["keys"] = args.keys
    if args.spec:
        if indexes:
            raise SpecError("indexes", given[0], "omitted when --spec is given")
        overrides += [f"keys={args.keys}"] if args.keys else []
        return load(ServeSpec, args.spec, overrides)
    if not indexes:
        raise MissingField("indexes", None, "an index or its folder, unless --spec is given")
    return parse(ServeSpec, override(settings, overrides))


def _add_index(indexes: dict[str, dict[str, str]], uri: str) -> str:
    """Adds an index to those that are served, and returns its name."""
    name = index_name(uri)
    if name in indexes:
        note = "; rename its folder, or name each index in a file for --spec"
        problem = f"is another index named {name}"
        raise SpecError("indexes", uri, "an index with a unique name", problem, note)
    check_index(uri)
    indexes[name] = {"uri": uri}
    return name


def _federation(path: str, indexes: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Reads a federation, adds its indexes, and returns it with their names as those of members."""
    from pipeline.search.federation import Federation

    check_exists(path, "federation")
    federation = load(Federation, path, role="federation")
    names = {absolute(served["uri"]).rstrip("/"): name for name, served in indexes.items()}
    members = {}
    for name, member in federation.members.items():
        with within(f"members.{name}"):
            uri = find_index(member.index)
            place = absolute(uri).rstrip("/")
            if place not in names:
                names[place] = _add_index(indexes, uri)
        members[name] = {**member.model_dump(exclude_unset=True), "index": names[place]}
    return {**federation.model_dump(exclude_unset=True), "members": members}


def index_name(uri: str) -> str:
    """Derives the name of an index from its folder, or from the parent of a folder called `index`.

    >>> index_name("out/cranfield/index"), index_name("s3://bucket/pages/"), index_name("a.maxray")
    ('cranfield', 'pages', 'a')
    """
    path = PurePosixPath(uri.rstrip("/"))
    name = path.parent.name if path.name == "index" and path.parent.name else path.name
    name = name.removesuffix(SUFFIX) or name
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip("_.-") or "index"


def _check_address(host: str, port: int, settings: ServeSpec) -> None:
    from pipeline.serve.settings import is_loopback

    if not (settings.keys or is_loopback(host)):
        rule = "a loopback address unless --keys is given"
        raise SpecError("host", host, rule, "allows access without a key")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        rule = "an address of this machine and a free port"
        raise SpecError("port", f"{host}:{port}", rule, f"cannot be used ({error})") from None


def _check_indexes(settings: ServeSpec) -> None:
    from pipeline.index.filters import check_filter
    from pipeline.index.reader import IndexReader
    from pipeline.registry import RERANKERS
    from pipeline.search.candidates import EXACT, generator_columns, slow_search_hint
    from pipeline.search.federation import join_notes
    from pipeline.search.options import SearchOptions, representation_info
    from pipeline.serve.keys import Keys

    for name, served in settings.indexes.items():
        index = IndexReader(served.uri)
        for _ in index.batches(["item_id"]):  # raises if a data file is missing
            pass
        for representation in served.preload:
            representation_info(index, representation)
        if index.representations() and not served.candidates:
            info = representation_info(index)
            if hint := slow_search_hint(index, info, served.device):
                jobs.say(f"{name}: {hint}")
        for number, example in enumerate(served.examples):
            with within(f"indexes.{name}.examples[{number}]"):
                representation_info(index, example.representation)
        for representation, candidates in served.candidates.items():
            with within(f"indexes.{name}.candidates.{representation}"):
                info = representation_info(index, representation)
                if candidates.generator == EXACT:
                    continue
                try:
                    generator_columns(index, info, candidates.generator)
                except SpecError as error:
                    raise error.at("generator") from None
        for number, spec in enumerate(served.rerank):
            with within(f"indexes.{name}.rerank[{number}]"):
                RERANKERS.load(spec.name).check_spec(spec)
                if spec.name == "edje":
                    from pipeline.encoders.edje.model import read_metadata
                    from pipeline.search.rerankers.edje import check_stored

                    folder = vars(spec)["model"]
                    check_stored(read_metadata(folder, "model"), folder, index, "model")
    for name, federation in settings.federations.items():
        readers = {}
        for key, member in federation.members.items():
            served = settings.indexes[settings.member_index(member)]
            readers[key] = IndexReader(served.uri)
            with within(f"federations.{name}.members.{key}"):
                if member.filter is not None:
                    check_filter(readers[key], member.filter)
                federation.member_options(key, SearchOptions()).resolve(readers[key])
        for note in join_notes(readers, federation.join):
            jobs.say(f"{name}: {note}")
    if settings.keys:
        Keys(settings.keys)


def set_ray_serve_env() -> None:
    """Sets environment variables of Ray Serve, unless they have been set by the user."""
    from pipeline.serve.environment import PROXY_ENV, RAY_SERVE_ENV, TRACING_ENV

    variables = RAY_SERVE_ENV | PROXY_ENV
    if tracing.is_configured():
        require(tracing.EXPORTER)
        variables |= TRACING_ENV
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def serve(settings: ServeSpec, host: str, port: int, start: float) -> None:
    """Runs the application on Ray until this process stops; `start` is on the monotonic clock."""
    from ray import serve as ray_serve

    from pipeline.serve.app import build

    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # does not affect the replicas
    # The log of the replicas is always JSON.
    logging_config = {"encoding": "JSON"} if logs.is_json() else None
    jobs.say(f"starting the HTTP proxy ({time.monotonic() - start:.0f} s)")
    ray_serve.start(http_options={"host": host, "port": port}, logging_config=logging_config)
    try:
        names = ", ".join([*settings.indexes, *settings.federations])
        jobs.say(f"loading {names} ({time.monotonic() - start:.0f} s)")
        target = ray_serve.RunTarget(build(settings), name=APPLICATION, route_prefix="/")
        ray_serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running(start)
        jobs.say(f"serving {names}; search page: {address}/; API documentation: {address}/docs")
        threading.Event().wait()
    finally:
        jobs.say("draining in-flight requests")
        asyncio.run(_shut_down(settings.timeouts.drain_s))


def _start_error(messages: Sequence[str]) -> JobError:
    r"""Returns the error of deployments that did not start, from the messages of their states.

    >>> str(_start_error(["", "It failed 3 times. Error:\nray::init()\nOSError: no file"]))
    'the server did not start: OSError: no file'
    """
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    name = f"{SpecError.__module__}.{SpecError.__name__}: "
    causes = [line.removeprefix(name) for line in lines if line.startswith(name)] or lines[-1:]
    return JobError(f"the server did not start: {causes[0] if causes else 'see the log of Ray'}")


def _wait_until_running(start: float) -> None:
    """Waits until the application runs and prints a line when a deployment has started."""
    from ray import serve as ray_serve

    ready: set[str] = set()
    status = None
    while status != "RUNNING":
        time.sleep(STATUS_SECONDS)
        application = ray_serve.status().applications[APPLICATION]
        deployments, status = application.deployments, application.status
        for name, deployment in deployments.items():
            if deployment.status == "HEALTHY" and name not in ready:
                ready.add(name)
                jobs.say(f"started {name} ({time.monotonic() - start:.0f} s)")
        if status == "DEPLOY_FAILED":
            raise _start_error([deployment.message for deployment in deployments.values()])


async def _shut_down(drain_s: float) -> None:
    from ray import serve as ray_serve

    from pipeline.serve.app import drain

    with contextlib.suppress(Exception):  # shut down even if draining fails
        await drain(APPLICATION, drain_s)
    # Until this process exits, a thread of Ray prints that calls of the killed controller have
    # failed and are retried infinitely often.
    sys.stdout.flush()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        await ray_serve.shutdown_async()
    except Exception as error:  # Ray Serve may not have started yet
        print(f"Ray Serve did not shut down: {first_line(error)}", file=sys.stderr)


def _stop(*_: object) -> None:
    raise Stopped("stopped after draining in-flight requests")


def _print_key(arguments: Sequence[str]) -> None:
    """Creates an access key.

        maxray serve key --name ann >> keys.yaml

    Standard output receives the entry for the file of keys, standard error the key itself.
    """
    parser = jobs.parser(_print_key.__doc__, "key")
    parser.add_argument("--name", required=True, help="name of the key in logs")
    parser.add_argument(
        "--indexes", nargs="+", help="indexes that the key can access (default: all)"
    )
    parser.add_argument("--expires", metavar="YYYY-MM-DD", help="expiry date (default: never)")
    parser.add_argument(
        "--requests-per-second",
        type=float,
        help="rate limit of the key (default: the rate limit of the server)",
    )
    parser.add_argument("--evaluate", action="store_true", help="allow the key to run evaluations")
    parser.add_argument("--delete", action="store_true", help="allow the key to delete items")
    args = vars(parser.parse(arguments))

    from pipeline.serve.keys import Key, hash_key, new_key

    key = new_key()
    entry = {
        name: value for name, value in args.items() if value is not None and value is not False
    }
    entry["sha256"] = hash_key(key)
    parse(Key, entry)
    lines = [f"{name}: {value}" for name, value in entry.items()]
    print("  - " + "\n    ".join(lines))
    print(f"access key of {args['name']} (not stored): {key}", file=sys.stderr)


FORMS: dict[str, jobs.Form] = {"key": _print_key}


if __name__ == "__main__":
    jobs.run(main)

r"""Serves indexes over HTTP: search, reranking, encoding, evaluations.

    python -m jobs.serve out/cranfield/index                        # on 127.0.0.1:8000
    python -m jobs.serve out/cranfield/index out/pages/index --port 8123
    python -m jobs.serve out/cranfield/index --keys keys.yaml --host 0.0.0.0 limits.max_k=100
    python -m jobs.serve --spec settings.yaml timeouts.search_s=5
    python -m jobs.serve out/photos/index indexes.photos.edje=out/edje/model   # reranks by EDJE too
    python -m jobs.serve key --name ann >> keys.yaml      # an access key
    curl -s localhost:8000/v1/search -H 'Content-Type: application/json' \
         -d '{"query": "how does a slipstream change the lift of a wing", "k": 3}'

An index is named by its folder. Without access keys (--keys) it listens on this machine alone. On a
cluster `serve deploy cluster/serve/cranfield.yaml` starts the same application. Ctrl-C or SIGTERM
ends it when the requests under way are answered. The API is described at /docs and /openapi.json.
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
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import jobs
from pipeline.config import (
    MissingField,
    SpecError,
    Stopped,
    check_exists,
    first_line,
    load,
    override,
    parse,
    read,
)
from pipeline.index import check_index

if TYPE_CHECKING:  # loaded when a server is started: --help is quick
    from pipeline.serve.settings import ServeSpec

APPLICATION = "maxray"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, and serves until it is stopped."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["key"]:
        _print_key(arguments[1:])
        return
    args = _parser().parse(arguments)
    settings = _settings(args)
    _check_address(args.host, args.port, settings)
    _check_indexes(settings)
    signal.signal(signal.SIGTERM, _stop)
    be_lean()
    with jobs.cluster():
        serve(settings, args.host, args.port)


def _parser() -> jobs.Parser:
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "indexes", nargs="*", default=[], help="URIs of indexes, and dotted.field=value"
    )
    parser.add_argument("--spec", help="settings of the server, a YAML file")
    parser.add_argument("--keys", metavar="FILE", help="access keys, see pipeline.serve.keys")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="default: 8000")
    return parser


def _port(text: str) -> int:
    number = jobs.positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 65535, got {text!r}")
    return number


def _settings(args: Any) -> ServeSpec:
    """The settings of the command line, over those of the file."""
    overrides = [a for a in args.indexes if re.match(r"[a-z_]+(\.[^/=]+)*=", a)]
    uris = [a for a in args.indexes if a not in overrides]
    named: dict[str, dict[str, str]] = {}
    for uri in uris:
        name = name_of(uri)
        if name in named:
            note = "; rename its folder, or name each index in a file for --spec"
            problem = f"is another index named {name}"
            raise SpecError("indexes", uri, "an index with a unique name", problem, note)
        named[name] = {"uri": uri}
        check_index(uri)
    if args.spec:
        read(args.spec, "spec")
    if args.keys:
        check_exists(args.keys, "keys")

    from pipeline.serve.settings import ServeSpec

    given: dict[str, Any] = {"indexes": named} if named else {}
    if args.keys:
        given["keys"] = args.keys
    if args.spec:
        if named:
            raise SpecError("indexes", uris[0], "omitted when --spec is given")
        overrides += [f"keys={args.keys}"] if args.keys else []
        return load(ServeSpec, args.spec, overrides)
    if not named:
        raise MissingField("indexes", None, "the URI of an index, unless --spec is given")
    return parse(ServeSpec, override(given, overrides))


def name_of(uri: str) -> str:
    """What an index is called: its folder, or where that is just `index`, the one above.

    >>> name_of("out/cranfield/index"), name_of("s3://bucket/pages/")
    ('cranfield', 'pages')
    """
    path = PurePosixPath(uri.rstrip("/"))
    name = path.parent.name if path.name == "index" and path.parent.name else path.name
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip("_.-") or "index"


def _check_address(host: str, port: int, settings: ServeSpec) -> None:
    """Raises `SpecError` if nobody may listen there."""
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
    """Raises `SpecError` if an index, a representation or the keys are not there."""
    from pipeline.search.searcher import open_index
    from pipeline.serve.evaluations import check_folder
    from pipeline.serve.keys import Keys

    for index, served in settings.indexes.items():
        searcher = open_index(served.uri)
        for name in served.preload:
            searcher.representation(name)
        if served.edje is not None:
            from pipeline.rerank.edje import read_metadata
            from pipeline.search.rerank import check_stored

            field = f"indexes.{index}.edje"
            check_stored(read_metadata(served.edje, field), served.edje, searcher.index, field)
    check_folder(settings.evaluations)
    if settings.keys:
        Keys(settings.keys)


def be_lean() -> None:
    """Sets what Ray Serve reads when a cluster is started here, unless it is set already."""
    from pipeline.serve.settings import FRONT, LEAN

    for name, value in (LEAN | FRONT).items():
        os.environ.setdefault(name, value)


def serve(settings: ServeSpec, host: str, port: int) -> None:
    """Starts the application on the Ray cluster of this process, until it is asked to stop."""
    from ray import serve as ray_serve

    from pipeline.serve.app import build

    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # here; replicas have their own
    ray_serve.start(http_options={"host": host, "port": port})
    try:
        ray_serve.run(build(settings), name=APPLICATION, route_prefix="/")
        names = ", ".join(settings.indexes)
        jobs.say(f"serving {names} on {address}; the API is described at {address}/docs")
        threading.Event().wait()
    finally:
        jobs.say("finishing the requests under way")
        asyncio.run(_end(settings.timeouts.drain_s))


async def _end(seconds: float) -> None:
    """Ends the application when its gateways have answered."""
    from ray import serve as ray_serve

    from pipeline.serve.app import drain

    with contextlib.suppress(Exception):  # whatever is wrong with them, they are to end
        await drain(APPLICATION, seconds)
    try:
        await ray_serve.shutdown_async()
    except Exception as error:  # it may not have started yet
        jobs.say(f"Ray Serve did not shut down: {first_line(error)}")


def _stop(*_: object) -> None:
    raise Stopped("stopped; all requests are answered")


def _print_key(arguments: Sequence[str]) -> None:
    """Prints a new key's entry for the file, and to standard error the key."""
    from pipeline.serve.keys import Key, hash_of, new_key

    parser = jobs.parser("Makes an access key: its entry goes to the file, the key to its user.")
    parser.add_argument("--name", required=True, help="its name in logs")
    parser.add_argument("--indexes", nargs="+", help="default: all")
    parser.add_argument("--expires", metavar="YYYY-MM-DD", help="default: never")
    parser.add_argument("--requests-per-second", type=float)
    parser.add_argument("--evaluate", action="store_true", help="it may ask for evaluations")
    args = vars(parser.parse(arguments))
    key = new_key()
    entry = {
        name: value for name, value in args.items() if value is not None and value is not False
    }
    entry["sha256"] = hash_of(key)
    parse(Key, entry)
    lines = [f"{name}: {value}" for name, value in entry.items()]
    print("  - " + "\n    ".join(lines))
    print(f"the key of {args['name']}, shown once: {key}", file=sys.stderr)


if __name__ == "__main__":
    jobs.run(main)

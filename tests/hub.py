"""Local server with the HTTP interface of the Hugging Face Hub, for its real client."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

#: Files that the hub stores outside of git and serves by redirection.
LARGE = (".safetensors", ".bin")
#: Token of an account that has accepted the terms of gated repositories.
TOKEN = "hf_accepted"
ServerT = TypeVar("ServerT", bound=ThreadingHTTPServer)


@dataclass
class Repository:
    """Files of a repository by commit.

    Attributes:
        name: Name with the namespace.
        kind: "models" or "datasets".
        gated: Whether the files require `TOKEN`.
        license: License field of the card.
        commits: Folders by commit.
        refs: Commits by branch, tag or pull request.
    """

    name: str
    kind: str = "models"
    gated: bool = False
    license: str | None = "apache-2.0"
    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> str | None:
        """Returns the commit of a revision, or None if it does not exist."""
        return self.refs.get(revision, revision if revision in self.commits else None)


class Hub(ThreadingHTTPServer):
    """Server of repositories.

    Attributes:
        repositories: Repositories by kind and name.
        cuts: Numbers of bytes after which the next responses with this file end without an error in
            the headers, by file name.
        short: Names of files whose responses are complete but shorter than announced by HEAD.
        requests: Method, path and range of all requests.
        sent: Bytes of file contents that were sent, by file name.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.cuts: dict[str, list[int]] = {}
        self.short: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent: dict[str, int] = {}
        self.blobs: dict[str, Path] = {}

    @property
    def url(self) -> str:
        """Value of `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage(self) -> str:
        """URL of the storage of large files, which is another host to the client."""
        return self.url.replace("127.0.0.1", "localhost")

    def publish(
        self,
        name: str,
        source: str | Path,
        *refs: str,
        kind: str = "models",
        commit: str | None = None,
        **fields: Any,
    ) -> str:
        """Adds a copy of a folder as a commit of a repository and returns the commit.

        The refs, by default `main`, point to it. A README.md with the license is added.
        """
        repository = self.repositories.setdefault((kind, name), Repository(name, kind))
        for key, value in fields.items():
            setattr(repository, key, value)
        number = len(repository.commits)
        commit = commit or hashlib.sha1(f"{kind}/{name}/{number}".encode()).hexdigest()
        folder = self.folder / commit
        shutil.copytree(source, folder)
        if repository.license and not (folder / "README.md").exists():
            (folder / "README.md").write_text(f"---\nlicense: {repository.license}\n---\n", "utf-8")
        repository.commits[commit] = folder
        repository.refs |= dict.fromkeys(refs or ("main",), commit)
        return commit


class Handler(BaseHTTPRequestHandler):
    """Handler of requests."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.server.requests.append((self.command, url.path, self.headers.get("Range")))
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "blobs":
            return self._send_file(self.server.blobs[parts[1]], {})
        is_api = parts[0] == "api"
        parts = parts[is_api:]
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        length = next(
            (i for i, part in enumerate(parts) if part in ("revision", "tree", "resolve")),
            len(parts),
        )
        name, rest = "/".join(parts[:length]), parts[length:]
        repository = self.server.repositories.get((kind, name))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None:
            # Without a token, a missing repository may be a private one.
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        action, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        commit = repository.resolve(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        folder = repository.commits[commit]
        if action == "revision":
            return self._send_json(self._info(repository, commit))
        if action == "tree":
            return self._send_json([_entry(folder, path) for path in _files(folder)])
        if repository.gated and token != TOKEN:
            message = f"Access to model {name} is restricted."
            return self._refuse(403 if token else 401, "GatedRepo", message)
        path = folder.joinpath(*rest[2:])
        if not path.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        entry = _entry(folder, path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            return self._send_file(path, headers)
        digest = entry["lfs"]["oid"]
        self.server.blobs[digest] = path
        headers |= {"X-Linked-Size": str(entry["size"]), "X-Linked-ETag": f'"{digest}"'}
        self._send(302, b"", {**headers, "Location": f"{self.server.storage}/blobs/{digest}"})

    def _info(self, repository: Repository, commit: str) -> dict[str, Any]:
        files = _files(folder := repository.commits[commit])
        return {
            "_id": commit[:24],
            "id": repository.name,
            "sha": commit,
            "private": False,
            "disabled": False,
            "gated": "auto" if repository.gated else False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "createdAt": "2026-01-01T00:00:00.000Z",
            "lastModified": "2026-01-01T00:00:00.000Z",
            "cardData": {"license": repository.license} if repository.license else {},
            "siblings": [{"rfilename": path.relative_to(folder).as_posix()} for path in files],
        }

    def _send_file(self, path: Path, headers: dict[str, str]) -> None:
        content, status = path.read_bytes(), 200
        if path.name in self.server.short and self.command == "GET":
            content = content[: len(content) // 2]
        if requested := self.headers.get("Range"):
            first, _, last = requested.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content, status = content[int(first) : stop], 206
        cuts = self.server.cuts.get(path.name)
        limit = cuts.pop(0) if cuts and self.command == "GET" else len(content)
        sent = 0 if self.command == "HEAD" else min(limit, len(content))
        self.server.sent[path.name] = self.server.sent.get(path.name, 0) + sent
        self._send(status, content, headers, limit)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], limit: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Accept-Ranges": "bytes", **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[:limit])
        if limit is not None and limit < len(content):
            self.wfile.flush()
            self.close_connection = True


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    entry: dict[str, Any] = {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "size": len(content),
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if path.suffix in LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry


@contextlib.contextmanager
def running(server: ServerT) -> Iterator[ServerT]:
    """Runs a server in a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serve(folder: Path) -> contextlib.AbstractContextManager[Hub]:
    """Runs a hub whose repositories are copied to `folder`."""
    return running(Hub(folder))


@contextlib.contextmanager
def connected(server: Hub | None, cache: Path) -> Iterator[None]:
    """Sets the client of this process to a hub, or offline, with a cache folder of its own.

    The settings are those that the client reads from `HF_ENDPOINT`, `HF_HUB_CACHE` and
    `HF_HUB_OFFLINE` when it is imported.
    """
    from huggingface_hub import constants

    url = server.url if server else constants.ENDPOINT
    settings = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": server is None,
    }
    before = {name: getattr(constants, name) for name in settings}
    for name, value in settings.items():
        setattr(constants, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)

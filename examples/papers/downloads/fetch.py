"""Downloads of files by URL and of repositories of the hub. Both resume and are verified."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
import huggingface_hub
from huggingface_hub.errors import DryRunError

from pipeline.config import SpecError
from pipeline.runtime import retries
from pipeline.runtime.checkpoint import reading_hub

#: Number of consecutive attempts without progress before a download fails.
NUM_TRIES = 5
#: Interval of reports of progress, in seconds.
REPORT_S = 30.0
BLOCK = 1 << 20
#: Bytes are requested as they are stored, so that their positions are known.
HEADERS = {"User-Agent": "maxray", "Accept-Encoding": "identity"}
RULE = "a source that can be downloaded"


class Remote(NamedTuple):
    """Files that a download obtains.

    Attributes:
        revision: Commit of a repository, or a text that changes with the file at a URL.
        num_bytes: Number of bytes that are not on this machine yet, or None if unknown.
        files: Names of the files.
    """

    revision: str
    num_bytes: int | None
    files: tuple[str, ...]


# -- files at URLs ---------------------------------------------------------------------------------


def probe_url(url: str) -> Remote:
    """Returns the size of the file at a URL. Only its first byte is requested.

    Raises:
        SpecError: For `url`: the server cannot be reached, or refuses the file.
    """
    try:
        with _request(url, 0, 0) as response:
            headers = response.headers
            length = headers.get("content-range", "").rpartition("/")[2]
            length = length or headers.get("content-length", "")
            version = headers.get("etag") or headers.get("last-modified") or ""
            return Remote(version, int(length) if length.isdigit() else None, (url,))
    except httpx2.TransportError as error:
        raise SpecError("url", url, RULE, f"cannot be reached ({type(error).__name__})") from None


def fetch_url(url: str, path: Path, expected: str | None, report: Callable[[str], None]) -> str:
    """Downloads a file, unless it exists, verifies it and returns its hash.

    An interrupted download resumes if the file on the server is the same.

    Args:
        expected: Published hash such as `md5:...`, or None to return the SHA-256.
        report: Function that prints a line.

    Raises:
        SpecError: For `url`: the file does not exist, is truncated or has another hash.
    """
    algorithm = (expected or "sha256:").partition(":")[0]
    if path.exists():
        if (found := f"{algorithm}:{file_hash(path, algorithm)}") == (expected or found):
            return found
        path.unlink()
    remote = probe_url(url)
    version = hashlib.sha256(f"{url} {remote.revision} {remote.num_bytes}".encode()).hexdigest()[:8]
    part = path.with_name(f".{path.name}.{version}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    num_tries = 0
    while (size := part.stat().st_size) != remote.num_bytes:
        error: httpx2.TransportError | None = None
        try:
            _fetch_rest(url, part, size, report)
        except httpx2.TransportError as caught:
            error = caught
        if error is None and remote.num_bytes is None:
            break
        num_tries = 0 if part.stat().st_size > size else num_tries + 1
        if num_tries == NUM_TRIES:
            problem = f"broke off after {size:,} bytes ({error})"
            raise SpecError("url", url, RULE, problem, "; run the command again to resume")
        time.sleep(retries.retry_delay(num_tries, None) if num_tries else 0)
    found = f"{algorithm}:{file_hash(part, algorithm)}"
    if found != (expected or found):
        part.unlink()
        problem = f"has the hash {found} instead of {expected}"
        raise SpecError("url", url, RULE, problem, "; its content has changed, or it was damaged")
    part.rename(path)
    return found


def _fetch_rest(url: str, part: Path, start: int, report: Callable[[str], None]) -> None:
    """Appends the bytes from `start` on, or writes all if the server does not send a part."""
    with _request(url, start, None) as response:
        is_part = response.status_code == httpx2.codes.PARTIAL_CONTENT
        reported = time.monotonic()
        with part.open("ab" if is_part else "wb") as file:
            for block in response.iter_raw():  # a size would lose the last bytes of a broken answer
                file.write(block)
                if time.monotonic() > reported + REPORT_S:
                    report(f"{part.name}: {file.tell() / 1e9:.1f} GB")
                    reported = time.monotonic()


@functools.cache
def _client() -> httpx2.Client:
    return httpx2.Client(follow_redirects=True, timeout=60, headers=HEADERS)


@contextmanager
def _request(url: str, first: int, last: int | None) -> Iterator[httpx2.Response]:
    headers = {"Range": f"bytes={first}-{'' if last is None else last}"}
    with _client().stream("GET", url, headers=headers) as response:
        if response.status_code in retries.RETRIED_STATUSES:
            raise httpx2.RemoteProtocolError(f"status {response.status_code}")
        if response.is_error:
            problem = f"is refused by the server (status {response.status_code})"
            raise SpecError("url", url, RULE, problem)
        yield response


def file_hash(path: Path, algorithm: str) -> str:
    """Returns the hash of a file: `md5`, `sha256`, or `git`, as git names its content."""
    digest = hashlib.new("sha1" if algorithm == "git" else algorithm)
    if algorithm == "git":
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# -- repositories of the hub -----------------------------------------------------------------------


class Repository(NamedTuple):
    """Files of a repository of the hub.

    Attributes:
        patterns: Glob patterns of the files, or None for all.
        folder: Folder of the files, or None for the cache of the hub.
    """

    name: str
    kind: Literal["dataset", "model"]
    revision: str | None
    patterns: list[str] | None
    folder: Path | None = None

    def probe(self) -> Remote:
        """Returns the commit and the size of the files.

        Raises:
            SpecError: The files cannot be downloaded.
        """
        with self._reading():
            try:
                files = self._download(dry_run=True)
            except DryRunError as error:  # hides the error that names the problem
                raise error.__cause__ or error from None
        if not files:
            rule = f"a repository with files that match {', '.join(self.patterns or ['*'])}"
            raise SpecError("patterns", self.name, rule, "has none")
        size = sum(file.file_size or 0 for file in files if file.will_download)
        return Remote(files[0].commit_hash, size, tuple(file.filename for file in files))

    def fetch(self) -> Path:
        """Downloads the files, verifies their hashes and returns their folder.

        Raises:
            SpecError: The files cannot be downloaded, or differ from those of the hub.
        """
        with self._reading():
            path = Path(self._download(dry_run=False))
            found = huggingface_hub.HfApi().verify_repo_checksums(
                self.name, repo_type=self.kind, revision=self.revision, local_dir=path
            )
        for file in found.mismatches:
            (path / file["path"]).unlink()
        if found.mismatches:
            problem = f"has another hash than {found.mismatches[0]['path']} here"
            raise SpecError("hub", self.name, RULE, problem, "; run the command again")
        return path

    def _download(self, dry_run: bool) -> Any:
        return huggingface_hub.snapshot_download(
            self.name,
            repo_type=self.kind,
            revision=self.revision,
            allow_patterns=self.patterns,
            local_dir=self.folder,
            dry_run=dry_run,
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with reading_hub(self.name, self.revision, RULE, "hub"):
                yield
        except httpx2.TransportError as error:
            problem = f"cannot be reached ({type(error).__name__})"
            raise SpecError("hub", self.name, RULE, problem) from None

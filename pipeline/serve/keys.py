"""Access keys: who may ask, for which indexes, until when.

A key is 32 random bytes behind `mr_`; a server keeps its SHA-256 alone, which of so many random
bits gives nothing back. The file is YAML, looked at again when it changes, so that a key is revoked
by removing its entry. A list, with or without `keys:` above it:

    keys:
      - name: ann                    # its name in logs; metrics have the hash's beginning
        sha256: 5e88...              # python -m jobs.serve key --name ann
        indexes: [cranfield]         # default: all
        expires: 2027-01-01          # default: never
        requests_per_second: 20      # default: that of the server
        evaluate: true               # whether it may ask for evaluations; default: no

The variable MAXRAY_KEYS may hold the same text in place of a file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from datetime import UTC, date, datetime

import fsspec
import yaml
from pydantic import Field, PositiveFloat

from pipeline.config import Spec, SpecError, parse
from pipeline.extras import require_storage

PREFIX = "mr_"
VARIABLE = "MAXRAY_KEYS"
#: Seconds between two looks at the file.
LOOK_EVERY = 1.0


class Key(Spec):
    """An access key, of which only the hash is known."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    indexes: list[str] | None = None
    expires: datetime | date | None = None
    requests_per_second: PositiveFloat | None = None
    evaluate: bool = False

    @property
    def label(self) -> str:
        """The label of the key in metrics, which Ray exports on every node to anybody.

        It is the beginning of the key's hash: unlike a name it cannot be guessed, and whoever has
        the file of keys can tell whose it is.
        """
        return self.name if self is ANYBODY else self.sha256[:8]

    def may_see(self, index: str) -> bool:
        """Whether it is for this index."""
        return self.indexes is None or index in self.indexes

    def has_expired(self, now: datetime) -> bool:
        """Whether it is no longer valid; a day without a time ends when it begins, in UTC."""
        if self.expires is None:
            return False
        end = self.expires
        if not isinstance(end, datetime):
            end = datetime(end.year, end.month, end.day, tzinfo=UTC)
        return now >= (end if end.tzinfo else end.replace(tzinfo=UTC))


#: Who asks where no key is needed.
ANYBODY = Key(name="anybody", sha256="0" * 64, evaluate=True)


class _File(Spec):
    keys: list[Key]


def new_key() -> str:
    """A new key; it is shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What a server keeps of a key.

    >>> hash_of("mr_abc")[:8]
    '3ab8fb3c'
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """The keys of a file, or of the variable MAXRAY_KEYS, as they are now.

    A file that is gone or cannot be read lets nobody in: `of` raises then.

    Args:
        uri: of the file; empty: the variable.
        clock: for tests.

    Raises:
        SpecError: there is no such file, or it is not of the form.
    """

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic):
        self._uri, self._clock = uri, clock
        self._state: object = None
        self._keys: list[Key] = []
        self._looked = -float("inf")
        self._refresh()

    def of(self, given: str) -> Key | None:
        """The key that was given, None if there is no such one or it has expired.

        Raises:
            SpecError: the file can no longer be read.
        """
        self._refresh()
        hashed, found = hash_of(given), None
        for key in self._keys:  # all of them, however early one is found
            if hmac.compare_digest(key.sha256, hashed):
                found = key
        return None if found is None or found.has_expired(datetime.now(UTC)) else found

    def _refresh(self) -> None:
        if self._clock() - self._looked < LOOK_EVERY:
            return
        try:
            text = self._read()
            if text is not None:
                self._keys = read_keys(text)
        except BaseException:
            self._keys, self._state = [], None
            raise
        self._looked = self._clock()

    def _read(self) -> str | None:
        """The text of the file; None if it has not changed since it was read."""
        state: str | tuple[str, ...]
        text: str | None
        if not self._uri:
            state = text = os.environ.get(VARIABLE, "")
        else:
            require_storage(self._uri)
            try:
                files, path = fsspec.url_to_fs(self._uri, use_listings_cache=False)
                info = files.info(path)
                marks = ("mtime", "LastModified", "ETag", "etag", "updated", "ino", "size")
                state = tuple(str(info[name]) for name in marks if name in info)
                text = None if state == self._state else files.cat_file(path).decode()
            except (OSError, UnicodeError) as error:
                problem = f"cannot be read ({error})"
                raise SpecError("keys", self._uri, "a file of access keys", problem) from None
        if state == self._state:
            return None
        self._state = state
        return text


def read_keys(text: str) -> list[Key]:
    """The keys that a YAML text lists.

    Raises:
        SpecError: it is not of the form, two have one name, or a hash stands twice.
    """
    rule = "a list of entries with name and sha256"
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise SpecError("keys", "the file", rule, f"is not valid YAML ({reason})") from None
    if not isinstance(data, list | dict):
        raise SpecError("keys", "the file", rule, "contains no list")
    keys = parse(_File, {"keys": data} if isinstance(data, list) else data).keys
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise SpecError(f"keys.{field}", twice, "unique", "occurs twice")
    return keys


class Rates:
    """How many requests each key may still send: a bucket each, refilled at its rate.

    Args:
        default: requests a second of a key without its own rate; None: any.
        burst: what a full bucket holds.
    """

    def __init__(
        self, default: float | None, burst: int, clock: Callable[[], float] = time.monotonic
    ):
        self._default, self._burst, self._clock = default, burst, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left, and when that was so

    def take(self, key: Key, cost: float = 1.0) -> float:
        """Takes a request from the key's bucket; else the seconds until one is there.

        >>> now = [0.0]
        >>> rates = Rates(2, burst=1, clock=lambda: now[0])
        >>> rates.take(ANYBODY), rates.take(ANYBODY)
        (0.0, 0.5)
        """
        rate = key.requests_per_second or self._default
        if rate is None:
            return 0.0
        now = self._clock()
        left, then = self._buckets.get(key.name, (float(self._burst), now))
        left = min(left + (now - then) * rate, float(self._burst))
        cost = min(cost, float(self._burst))  # what is larger than the bucket waits for a full one
        waits = max(cost - left, 0.0) / rate
        self._buckets[key.name] = (left if waits else left - cost, now)
        return waits

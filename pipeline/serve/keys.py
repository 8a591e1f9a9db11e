"""Access keys.

A key consists of the prefix `mr_` and 32 random bytes. The server stores only its SHA-256 hash,
from which a random key of this length cannot be recovered. The file of the keys is a YAML list,
optionally below `keys:`. It is reloaded when it changes, so removing an entry revokes a key:

    keys:
      - name: ann                  # name in logs; metrics contain the first digits of the hash
        sha256: 5e88...            # maxray serve key --name ann
        indexes: [cranfield]       # default: all
        expires: 2027-01-01        # default: never
        requests_per_second: 20    # default: limits.requests_per_second of the server
        evaluate: true             # allows evaluations; default: false
        delete: true               # allows deletions; default: false

The environment variable MAXRAY_KEYS can contain the same text instead of a file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from datetime import UTC, date, datetime

import yaml
from pydantic import Field, PositiveFloat

from pipeline.config import Spec, SpecError, parse, reading
from pipeline.paths import locate

PREFIX = "mr_"
KEYS_VARIABLE = "MAXRAY_KEYS"
#: Minimum interval between checks of the file for changes, in seconds.
REFRESH_SECONDS = 1.0


class Key(Spec):
    """Access key, identified by its hash."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")
    """Name of the key in logs."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 hash of the key, in hexadecimal."""
    indexes: list[str] | None = None
    """Indexes that the key can access. Null means all."""
    expires: datetime | date | None = None
    """Time or date at which the key expires, in UTC unless it has a time zone. Null means that it
    does not expire."""
    requests_per_second: PositiveFloat | None = None
    """Rate limit of the key. If null, the rate limit of the server is used."""
    evaluate: bool = False
    """Allows the key to run evaluations."""
    delete: bool = False
    """Allows the key to delete items."""

    @property
    def label(self) -> str:
        """Beginning of the hash of the key.

        Ray exports metrics without authentication, and unlike a name, a hash reveals the owner only
        to those who can read the file of the keys.
        """
        return self.name if self is ANONYMOUS else self.sha256[:8]

    def can_access(self, index: str) -> bool:
        """Checks whether the key can access an index."""
        return self.indexes is None or index in self.indexes

    def has_expired(self, now: datetime) -> bool:
        """Checks whether the key has expired. A key expires at the beginning of its date in UTC."""
        if self.expires is None:
            return False
        end = self.expires
        if not isinstance(end, datetime):
            end = datetime(end.year, end.month, end.day, tzinfo=UTC)
        return now >= (end if end.tzinfo else end.replace(tzinfo=UTC))


#: Key of all requests if the server has no access keys.
ANONYMOUS = Key(name="anonymous", sha256="0" * 64, evaluate=True)


class _File(Spec):
    keys: list[Key]


def new_key() -> str:
    """Returns a new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Returns the SHA-256 hash of a key, in hexadecimal.

    >>> hash_key("mr_abc")[:8]
    '3ab8fb3c'
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """Access keys from a file or from the environment variable MAXRAY_KEYS.

    The keys are reloaded when the file changes. If the file becomes unreadable, all keys are
    rejected and `find` raises an error.

    Raises:
        SpecError: The file does not exist or is invalid.
    """

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic):
        self._uri, self._clock = uri, clock
        self._state: object = None
        self._keys: list[Key] = []
        self._checked_at = -float("inf")
        self._refresh()

    def find(self, secret: str) -> Key | None:
        """Returns the key with a secret, or None if it does not exist or has expired."""
        self._refresh()
        hashed, match = hash_key(secret), None
        for key in self._keys:  # no early exit: constant time
            if hmac.compare_digest(key.sha256, hashed):
                match = key
        return None if match is None or match.has_expired(datetime.now(UTC)) else match

    def _refresh(self) -> None:
        if self._clock() - self._checked_at < REFRESH_SECONDS:
            return
        try:
            text = self._read()
            if text is not None:
                self._keys = read_keys(text)
        except BaseException:
            self._keys, self._state = [], None
            raise
        self._checked_at = self._clock()

    def _read(self) -> str | None:
        """Reads the file. Returns None if it has not changed since it was read last."""
        state: str | tuple[str, ...]
        text: str | None
        if not self._uri:
            state = text = os.environ.get(KEYS_VARIABLE, "")
        else:
            try:
                files, path = locate(self._uri)
                info = files.info(path)
                fields = ("mtime", "LastModified", "ETag", "etag", "updated", "ino", "size")
                state = tuple(str(info[name]) for name in fields if name in info)
                text = None if state == self._state else files.cat_file(path).decode()
            except (OSError, UnicodeError) as error:
                problem = f"cannot be read ({error})"
                raise SpecError("keys", self._uri, "a file of access keys", problem) from None
        if state == self._state:
            return None
        self._state = state
        return text


def read_keys(text: str) -> list[Key]:
    """Returns the keys listed in a YAML text, which must have distinct names and hashes."""
    rule = "a list of entries with name and sha256"
    with reading("keys", "the file", rule, yaml.YAMLError, problem="is not valid YAML"):
        data = yaml.safe_load(text)
    if not isinstance(data, list | dict):
        raise SpecError("keys", "the file", rule, "contains no list")
    keys = parse(_File, {"keys": data} if isinstance(data, list) else data).keys
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            duplicate = next(value for value in values if values.count(value) > 1)
            raise SpecError(f"keys.{field}", duplicate, "unique", "occurs twice")
    return keys

"""Cache of evaluation results. Its keys are hashes of everything that a result depends on."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from pipeline.config import absolute, digest
from pipeline.paths import is_uri, locate, open_file
from pipeline.runtime.atomic import write_atomic

#: Version of the code that computes the entries. Increase it when their values change.
VERSION = 2


class CacheEntry(BaseModel):
    """Base class of cached records. Files with missing, unknown or mistyped fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Measurements(CacheEntry):
    """Measurements of one row of an evaluation. See `Result` for the fields.

    Attributes:
        rankings: Scores by document id, best first, of each query.
    """

    rankings: dict[str, dict[str, float]]
    values: dict[str, dict[str, float]]
    vectors_per_item: float
    vector_bytes: float
    assignment_bytes: float
    position_bytes: float
    all_bytes: float
    queries_per_second: float
    median_ms: float
    p95_ms: float
    maxsim_ops: float
    rerank_usage: dict[str, float] = {}


T = TypeVar("T")


def cache_key(**dependencies: Any) -> str:
    """Computes a hash of the inputs of a value and of the version of the code."""
    return digest({**dependencies, "logic": VERSION})


class Cache:
    """Cache that is stored in the folder `entries` of the output of an evaluation."""

    def __init__(self, output: str):
        self._folder = posixpath.join(absolute(output), "entries")

    def get(self, key: str, value_type: type[T], compute: Callable[[], T]) -> T:
        """Returns the value of a key. Computes and writes it if it is missing or corrupted."""
        value = self.read(key, value_type)
        if value is None:
            value = compute()
            self.write(key, value)
        return value

    def read(self, key: str, value_type: type[T]) -> T | None:
        """Returns the value of a key, or None if it is missing or corrupted.

        Records the use of an entry in a local folder, for `remove_unused`.
        """
        with (
            contextlib.suppress(FileNotFoundError, UnicodeDecodeError, ValidationError),
            open_file(self._path(key), "r") as file,
        ):
            value = TypeAdapter(value_type).validate_json(file.read(), strict=True)
            if not is_uri(self._folder):
                with contextlib.suppress(OSError):  # a folder that is read-only
                    os.utime(self._path(key))
            return value
        return None

    def remove_unused(self, age: timedelta, *, is_dry: bool = False) -> tuple[int, int]:
        """Removes entries without use for `age` and returns their number and size in bytes.

        In object storage, that is the time since they were written.
        """
        files, folder = locate(self._folder)
        if not files.exists(folder):
            return 0, 0
        oldest = datetime.now(UTC) - age
        removed = num_bytes = 0
        for name, info in files.find(folder, detail=True).items():
            modified = files.modified(name)
            modified = modified if modified.tzinfo else modified.replace(tzinfo=UTC)
            if not name.endswith(".json") or modified > oldest:
                continue
            if not is_dry:
                files.rm_file(name)
            removed += 1
            num_bytes += info["size"]
        return removed, num_bytes

    def write(self, key: str, value: Any) -> None:
        """Writes a value atomically as JSON."""
        write_atomic(self._path(key), to_json(value, inf_nan_mode="null"))

    def _path(self, key: str) -> str:
        return posixpath.join(self._folder, f"{key}.json")

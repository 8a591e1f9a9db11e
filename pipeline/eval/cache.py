"""Cache of evaluation results. Its keys are hashes of everything that a result depends on."""

from __future__ import annotations

import contextlib
import posixpath
from typing import Any, TypeVar

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.atomic import write_atomic
from pipeline.config import absolute, digest
from pipeline.eval.diagnostics import Diagnosis

#: Version of the code that computes the entries. Increase it when their values change.
VERSION = 2


class CacheEntry(BaseModel):
    """Base class of cached values. Files with missing, unknown or mistyped fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CachedResult(CacheEntry):
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
    maxsim_ops: float = 0.0  # unknown in the entries of earlier versions


class CachedDiagnosis(CacheEntry):
    """Diagnosis of one representation."""

    diagnosis: Diagnosis


class CachedGrounding(CacheEntry):
    """Grounding metrics of a representation, if they apply to it."""

    numbers: dict[str, float]


class CachedTemplates(CacheEntry):
    """Templates of an encoder by name, see `Templates`. Empty for encoders without any."""

    templates: dict[str, str]


EntryT = TypeVar("EntryT", bound=CacheEntry)


def cache_key(**dependencies: Any) -> str:
    """Computes a hash of the inputs of a value and of the version of the code."""
    return digest({**dependencies, "logic": VERSION})


class Cache:
    """Cache that is stored in the folder `entries` of the output of an evaluation.

    A folder of an earlier version, named `cells`, is renamed.
    """

    def __init__(self, output: str):
        self._folder = posixpath.join(absolute(output), "entries")
        files, former = fsspec.url_to_fs(posixpath.join(absolute(output), "cells"))
        if files.exists(former) and not files.exists(self._folder):
            files.mv(former, self._folder, recursive=True)

    def read(self, key: str, entry_type: type[EntryT]) -> EntryT | None:
        """Returns the entry of a key, or None if it is missing or corrupted."""
        with (
            contextlib.suppress(FileNotFoundError, UnicodeDecodeError, ValidationError),
            fsspec.open(self._path(key), "r", encoding="utf-8") as file,
        ):
            return entry_type.model_validate_json(file.read())
        return None

    def write(self, key: str, entry: CacheEntry) -> None:
        """Writes an entry atomically."""
        write_atomic(self._path(key), entry.model_dump_json())

    def _path(self, key: str) -> str:
        return posixpath.join(self._folder, f"{key}.json")

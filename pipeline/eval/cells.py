"""Cells: what a row of the table took to compute, kept by the hash of all that decides it."""

from __future__ import annotations

import contextlib
import posixpath
from typing import Any, TypeVar

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.atomic import write_atomic
from pipeline.config import absolute, digest
from pipeline.eval.diagnostics import Diagnosis

#: Raise it when a change to the code lets equal keys stand for other numbers.
LOGIC = 2


class Kept(BaseModel):
    """Base of what is kept in a file: anything missing, unknown or of another type is damage."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Cell(Kept):
    """One row as it was measured; the attributes are those of `Result`.

    Attributes:
        rankings: scores by document for each query, best first.
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


class Diagnosed(Kept):
    """What the diagnostics say of one representation."""

    diagnosis: Diagnosis


class Grounded(Kept):
    """The grounding measures of one representation; empty if they do not apply to it."""

    numbers: dict[str, float]


KeptT = TypeVar("KeptT", bound=Kept)


class Cells:
    """The folder `cells` of an output."""

    def __init__(self, output: str):
        self._folder = posixpath.join(absolute(output), "cells")

    @staticmethod
    def key(**decides: Any) -> str:
        """The hash of everything that decides what is kept, and of the code that computes it."""
        return digest({**decides, "logic": LOGIC})

    def read(self, key: str, kind: type[KeptT]) -> KeptT | None:
        """What was kept under the key; None if there is nothing, or it is damaged."""
        with (
            contextlib.suppress(FileNotFoundError, UnicodeDecodeError, ValidationError),
            fsspec.open(self._path(key), "r", encoding="utf-8") as file,
        ):
            return kind.model_validate_json(file.read())
        return None

    def write(self, key: str, kept: Kept) -> None:
        """Keeps it, whole or not at all."""
        write_atomic(self._path(key), kept.model_dump_json())

    def _path(self, key: str) -> str:
        return posixpath.join(self._folder, f"{key}.json")

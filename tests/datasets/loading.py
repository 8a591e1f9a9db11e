"""Helpers that load benchmarks by name."""

from __future__ import annotations

from typing import Any

from pipeline.eval import JudgedQueries
from pipeline.registry import BENCHMARKS


def benchmark(name: str, **fields: Any) -> Any:
    return BENCHMARKS.build(BENCHMARKS.resolve({"name": name, **fields}))


def load(name: str, **fields: Any) -> JudgedQueries:
    return benchmark(name, **fields).load()

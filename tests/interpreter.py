"""Runs tests of Triton kernels on a GPU or in Triton's interpreter.

The interpreter verifies results, not performance or instructions. It must be enabled before Triton
is imported, so it runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def kernel_test(test):
    """Marks a test to run on a GPU and in the interpreter."""
    return needs_triton(test if INTERPRETED else pytest.mark.gpu(test))


def run_in_interpreter(file: str) -> None:
    """Runs the tests of a file in the interpreter and asserts that they pass."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider", "--no-header"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout and "failed" not in result.stdout

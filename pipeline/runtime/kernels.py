"""Modules of Triton kernels, which are imported only where they can run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch


def triton_module(name: str, device: torch.device) -> ModuleType | None:
    """Returns a module of Triton kernels, or None without a CUDA device or without Triton."""
    return importlib.import_module(name) if device.type == "cuda" and _has_triton() else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

"""Maxray builds fixed-budget multi-vector indexes for text, pages, images, video and audio.

A folder `pipeline` in the working directory shadows this package, see docs/installation.md. The
command `maxray` is not affected.
"""

from typing import Any

__version__ = "0.1.0"

__all__ = ["Composed", "Index", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported lazily, because torch and Lance take seconds.
    if name == "Index":
        from pipeline.search.library import Index

        return Index
    if name == "Composed":
        from pipeline.schema import Composed

        return Composed
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")

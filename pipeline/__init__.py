"""Maxray builds fixed-budget multi-vector indexes for text, pages, images, video and audio.

A folder `pipeline` in the working directory shadows this package, see docs/installation.md. The
command `maxray` is not affected.
"""

from typing import Any

__version__ = "0.1.0"

__all__ = ["Composed", "__version__", "open_index"]


def __getattr__(name: str) -> Any:
    # Ray and Lance are imported lazily because the core also runs without them.
    if name == "open_index":
        from pipeline.search.searcher import open_index

        return open_index
    if name == "Composed":
        from pipeline.schema import Composed

        return Composed
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")

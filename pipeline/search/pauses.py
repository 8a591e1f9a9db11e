"""Pauses in long computations, at which a server continues with the request of another key.

Functions call `pause` after each part of their work that takes a fraction of a second. Without a
scheduler, it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

#: What a pause does in the context of the caller. `pipeline.serve.scheduler` sets it.
action: ContextVar[Callable[[], None]] = ContextVar("pause", default=lambda: None)


def pause() -> None:
    """Lets other requests continue, and returns when it is the caller's turn again."""
    action.get()()

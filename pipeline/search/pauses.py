"""Pauses in long computations, at which a server continues with the request of another key.

Functions call `pause` after each part of their work that takes a fraction of a second. Without a
scheduler (`pipeline.serve.scheduler`), it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

#: What a pause does in the present context, or None without a scheduler, for which large operations
#: are divided.
action: ContextVar[Callable[[], None] | None] = ContextVar("pause", default=None)


def pause() -> None:
    """Lets other requests continue, and returns when it is the turn of the caller again."""
    if (run := action.get()) is not None:
        run()

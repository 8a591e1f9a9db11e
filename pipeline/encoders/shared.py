"""Encoders that several stages of one process share, so that each model is loaded once."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from pipeline.config import ComponentSpec, digest, dump
from pipeline.encoders import Encoder
from pipeline.registry import ENCODERS

#: Loaded encoders by the hash of their settings.
Encoders = dict[str, Encoder]

_SHARED: contextvars.ContextVar[Encoders | None] = contextvars.ContextVar("encoders", default=None)


@contextlib.contextmanager
def shared_encoders(encoders: Encoders | None) -> Iterator[None]:
    """Has `load_encoder` use and complete the encoders inside the block.

    None means those of the block outside of it, if there is one.
    """
    token = _SHARED.set(_SHARED.get() if encoders is None else encoders)
    try:
        yield
    finally:
        _SHARED.reset(token)


def load_encoder(spec: ComponentSpec, **placement: Any) -> Encoder:
    """Builds an encoder, or returns the one that is shared.

    Args:
        placement: Options of the constructor that place the weights on devices.
    """
    encoders = _SHARED.get()
    if encoders is None:
        return ENCODERS.build(spec, **placement)
    key = digest([dump(spec), placement])
    if key not in encoders:
        encoders[key] = ENCODERS.build(spec, **placement)
    return encoders[key]

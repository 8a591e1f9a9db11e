"""What compressors learned from a sample of the corpus, stored in the index under its own hash."""

from __future__ import annotations

import hashlib

import fsspec
import numpy as np

from pipeline.config import SpecError
from pipeline.index.reader import ARTEFACTS, part


def save_artefact(index: str, artefact: dict[str, np.ndarray]) -> str:
    """Stores an artefact and returns its hash, by which a representation's metadata names it."""
    content = hashlib.blake2b(digest_size=8)
    for key, values in sorted(artefact.items()):
        content.update(f"{key} {values.dtype} {values.shape}".encode() + values.tobytes())
    name = content.hexdigest()
    with fsspec.open(part(index, ARTEFACTS, f"{name}.npz"), "wb", auto_mkdir=True) as file:
        np.savez(file, **artefact)
    return name


def load_artefact(index: str, name: str) -> dict[str, np.ndarray]:
    """What `save_artefact` stored.

    Raises:
        SpecError: the index has lost it.
    """
    try:
        with fsspec.open(part(index, ARTEFACTS, f"{name}.npz"), "rb") as file:
            stored = np.load(file, allow_pickle=False)
            return {key: stored[key] for key in stored.files}
    except FileNotFoundError:
        raise SpecError("index", index, f"artefact {name} in it", "is damaged") from None

"""What was learned from a sample of the corpus, stored in the index under its own hash."""

from __future__ import annotations

import hashlib
import json
import posixpath
import zipfile
import zlib
from typing import Any, NamedTuple

import fsspec
import numpy as np

from pipeline.config import SpecError, absolute
from pipeline.index import ARTEFACTS

#: The entry of the file that says what the artefact was fitted for.
ABOUT = "about"
#: The entry with the hashes of the items that it was fitted on, and where in `about` they are from.
SAMPLE_ITEMS, SAMPLE_ORIGIN = "sample_items", "sample_origin"


class Sample(NamedTuple):
    """The items that something was fitted on.

    Attributes:
        origin: Source, or index and filter, of a separate sample; empty for the items that were
            indexed.
        items_N: Sorted uint64 hashes of the items, see `listing.content_hashes`.
    """

    origin: dict[str, Any]
    items_N: np.ndarray


def save_artefact(
    index: str,
    artefact: dict[str, np.ndarray],
    about: dict[str, Any],
    sample: Sample | None = None,
) -> str:
    """Stores an artefact and returns its hash, by which a representation's metadata names it.

    Args:
        index: URI of the index.
        artefact: Arrays by name.
        about: Origin of the artefact as JSON values: the encoder's fingerprint and the compressor's
            settings; for a codec also the artefact of the compressor, and the codec's settings.
        sample: Items that it was fitted on.
    """
    stored = dict(artefact)
    if sample is not None:
        about = {**about, SAMPLE_ORIGIN: sample.origin}
        stored[SAMPLE_ITEMS] = sample.items_N
    stored[ABOUT] = np.array(json.dumps(about, sort_keys=True))
    name = _hash(stored)
    with fsspec.open(_path(index, name), "wb", auto_mkdir=True) as file:
        np.savez(file, allow_pickle=False, **stored)
    return name


def load_artefact(index: str, name: str, about: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns what `save_artefact` stored.

    Raises:
        SpecError: the index has lost it, or a file of another corpus lies in its place, or it was
            fitted for another encoder or other settings than `about` says.
    """
    stored = _read(index, name)
    there = json.loads(str(stored.pop(ABOUT)))
    stored.pop(SAMPLE_ITEMS, None)
    for key, value in about.items():
        if there.get(key) != value:
            rule = f"{there.get(key)}, for which it was fitted"
            raise SpecError(f"artefact {name}.{key}", value, rule)
    return stored


def load_sample(index: str, name: str) -> Sample | None:
    """Returns the items that an artefact was fitted on; None if an older version did not say.

    Raises:
        SpecError: the index has lost it, or a file of another corpus lies in its place.
    """
    stored = _read(index, name)
    if SAMPLE_ITEMS not in stored:
        return None
    return Sample(json.loads(str(stored[ABOUT]))[SAMPLE_ORIGIN], stored[SAMPLE_ITEMS])


def _read(index: str, name: str) -> dict[str, np.ndarray]:
    path = _path(index, name)
    rule = f"an index with the artefact {name}"
    note = f"; restore {path} from a copy or rebuild the columns"
    try:
        with fsspec.open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            stored = {key: archive[key] for key in archive.files}
    # What numpy and zipfile say of a damaged file; NotImplementedError is a RuntimeError.
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, KeyError):
        raise SpecError("index", index, rule, "is corrupted", note) from None
    if _hash(stored) != name:
        problem = f"is corrupted ({name}.npz contains another artefact)"
        raise SpecError("index", index, rule, problem, note)
    return stored


def _path(index: str, name: str) -> str:
    return posixpath.join(absolute(index), ARTEFACTS, f"{name}.npz")


def _hash(stored: dict[str, np.ndarray]) -> str:
    content = hashlib.blake2b(digest_size=8)
    for key, values in sorted(stored.items()):
        content.update(f"{key} {values.dtype} {values.shape}".encode() + values.tobytes())
    return content.hexdigest()

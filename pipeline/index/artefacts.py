"""Fitted state of compressors and codecs, which the index stores by content hash."""

from __future__ import annotations

import hashlib
import json
import posixpath
import zipfile
import zlib
from typing import Any, NamedTuple

import numpy as np

from pipeline.config import SpecError, absolute
from pipeline.index import ARTEFACTS
from pipeline.paths import open_file

#: Entry of the file with the settings that the artefact was fitted for, as JSON.
METADATA = "about"
#: Entry with the hashes of the sample items, and the metadata key of their origin.
SAMPLE_ITEMS, SAMPLE_ORIGIN = "sample_items", "sample_origin"


class Sample(NamedTuple):
    """Items to which a compressor or a codec was fitted.

    Attributes:
        origin: Source, or index and filter, of a separate calibration sample. Empty if the sample
            was drawn from the indexed items.
        items_N: Sorted uint64 content hashes of the items, see `listing.content_hashes`.
    """

    origin: dict[str, Any]
    items_N: np.ndarray


def save_artefact(
    index: str,
    artefact: dict[str, np.ndarray],
    metadata: dict[str, Any],
    sample: Sample | None = None,
) -> str:
    """Stores an artefact under the hash of its content and returns the hash.

    Args:
        metadata: JSON-serializable settings of the encoder, compressor and codec that it was fitted
            for.
    """
    stored = dict(artefact)
    if sample is not None:
        metadata = {**metadata, SAMPLE_ORIGIN: sample.origin}
        stored[SAMPLE_ITEMS] = sample.items_N
    stored[METADATA] = np.array(json.dumps(metadata, sort_keys=True))
    name = _hash(stored)
    with open_file(_path(index, name), "wb") as file:
        np.savez(file, allow_pickle=False, **stored)
    return name


def load_artefact(index: str, name: str, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """Loads the arrays of an artefact by name.

    Args:
        metadata: Settings that it must have been fitted for, see `save_artefact`.

    Raises:
        SpecError: The file is missing or corrupted, or the artefact was fitted for another encoder
            or other settings.
    """
    stored = _read(index, name)
    stored_metadata = json.loads(str(stored.pop(METADATA)))
    stored.pop(SAMPLE_ITEMS, None)
    for key, value in metadata.items():
        if stored_metadata.get(key) != value:
            rule = f"{stored_metadata.get(key)}, the value it was fitted for"
            raise SpecError(f"artefact {name}.{key}", value, rule)
    return stored


def load_sample(index: str, name: str) -> Sample:
    """Loads the sample to which an artefact was fitted."""
    stored = _read(index, name)
    return Sample(json.loads(str(stored[METADATA]))[SAMPLE_ORIGIN], stored[SAMPLE_ITEMS])


def _read(index: str, name: str) -> dict[str, np.ndarray]:
    path = _path(index, name)
    rule = f"an index with the artefact {name}"
    note = f"; restore {path} from a backup or rebuild its columns"
    try:
        with open_file(path) as file:
            archive = np.load(file, allow_pickle=False)
            stored = {key: archive[key] for key in archive.files}
    # Errors of NumPy and zipfile on corrupted files. NotImplementedError is a RuntimeError.
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

"""The Lance columnar index: a folder that holds one dataset of items and what its jobs recorded.

<index>/items.lance      a row an item, a column a representation
<index>/rejects.lance    what did not become a row, and why
<index>/artefacts/       what compressors learned from a sample, by hash
<index>/jobs/<job>/      resolved spec, listing, progress and summary of each job
"""

from __future__ import annotations

from pathlib import Path

from pipeline.config import SpecError, absolute, within

ITEMS, REJECTS, ARTEFACTS, JOBS = "items.lance", "rejects.lance", "artefacts", "jobs"
PARTS = (ITEMS, REJECTS, ARTEFACTS, JOBS)


def no_index(uri: str) -> SpecError:
    """The error of a URI that should be that of an index."""
    return SpecError("index", uri, "the URI of an index made by jobs.index", "contains no index")


def check_index(uri: str) -> None:
    """Checks that a local folder holds a part of an index; a URI with a scheme is not looked at.

    It imports nothing slow, so that a wrong path is reported at once.

    Raises:
        SpecError: The folder does not exist or holds none.
    """
    with within("index"):
        folder = absolute(uri)
    if "://" not in uri and not any(Path(folder, name).exists() for name in PARTS):
        raise no_index(uri)

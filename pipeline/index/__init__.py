"""Columnar index: a folder with a Lance dataset of items and the records of its jobs.

<index>/items.lance      one row per item, one column per representation
<index>/rejects.lance    rejected items with the reason
<index>/artefacts/       fitted state of compressors and codecs, named by hash
<index>/jobs/<job>/      resolved spec, listing, progress and summary of each job
<index>/lease/           expiry of the lease of the current writer
"""

from __future__ import annotations

import posixpath
import secrets
import shlex
import time
from contextlib import suppress
from pathlib import Path

from pipeline.config import SpecError, absolute, location, reading, within
from pipeline.paths import is_uri, locate

ITEMS, REJECTS, ARTEFACTS, JOBS = "items.lance", "rejects.lance", "artefacts", "jobs"
#: State of a running job in its folder.
PROGRESS = "progress.json"
LEASE = "lease"
PARTS = (ITEMS, REJECTS, ARTEFACTS, JOBS)
#: Suffix of the index of a folder, which is beside the folder.
SUFFIX = ".maxray"
#: Encoder of images and frames that `maxray index FOLDER --see` uses without the name of another.
SEE_MODEL = "google/siglip2-base-patch16-224"
#: Environment variable that names the executor of jobs: `ray` or `process`.
EXECUTOR = "MAXRAY_EXECUTOR"


def job_id() -> str:
    """Creates a job id, which consists of the UTC time and four random hexadecimal digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


def missing_index(uri: str) -> SpecError:
    """Returns the error for a URI that does not exist or contains no index."""
    is_missing = not is_uri(uri) and not Path(absolute(uri)).exists()
    problem = "does not exist" if is_missing else "contains no index"
    folder = "FOLDER" if is_missing or is_uri(uri) else shlex.quote(uri)
    note = f" (no {ITEMS} in {absolute(uri)}); `maxray index {folder}` makes one"
    if not is_uri(uri):
        found = sorted(path.parent.name for path in Path(absolute(uri)).glob(f"*/{ITEMS}"))
        if found:
            note += f"; did you mean {posixpath.join(uri, found[0])!r}?"
    return SpecError("index", uri, "the URI of an index of Maxray", problem, note)


def find_index(uri: str) -> str:
    """Returns a URI, or that of the index beside it for a folder that contains no index.

    The folder may have been deleted or moved.

    Raises:
        SpecError: The URI is not a path, or its storage cannot be reached.
    """
    folder = location(uri, "index").rstrip("/")
    if is_uri(uri):
        with reading("index", uri, "a reachable URI", Exception, problem="cannot be reached"):
            storage, path = locate(folder)
            is_beside = not storage.exists(f"{path}/{ITEMS}")
            is_beside = is_beside and storage.exists(f"{path}{SUFFIX}/{ITEMS}")
    else:
        folder, is_beside = posixpath.normpath(folder), False
        with suppress(OSError):  # the name of the folder has more than 248 bytes
            is_beside = Path(f"{folder}{SUFFIX}", ITEMS).exists()
            is_beside = is_beside and not Path(folder, ITEMS).exists()
    return f"{folder}{SUFFIX}" if is_beside else uri


def check_index(uri: str) -> None:
    """Checks that a local folder contains an index.

    URIs with a scheme are not checked. Imports no slow module, so that jobs report a wrong path
    immediately.
    """
    with within("index"):
        folder = absolute(uri)
    if not is_uri(uri) and not any(Path(folder, name).exists() for name in PARTS):
        raise missing_index(uri)

"""Records which revisions of data sets and checkpoints a data folder has.

`revisions.json` in the data folder has the commit of each repository of the hub and the hash of
each file, by data set and source, and the commits of checkpoints. Later downloads obtain the same
revisions; delete an entry to obtain the latest one. Results can cite the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from examples.papers.downloads.spec import DataSet, Download, Pin
from pipeline.config import reading
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.checkpoint import SETTINGS

FILE = "revisions.json"
#: Folders below the data folder: of checkpoints that were converted, and of unfinished downloads.
CONVERTED, STAGING = "models", ".downloads"


class Revisions:
    """Revisions of the data sets and checkpoints in a data folder.

    Attributes:
        data: Commit or hash by data set and source.
        models: Commits by checkpoint.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        found: dict[str, Any] = {}
        if (path := self.folder / FILE).is_file():
            with reading(FILE, str(path), "a JSON object, or be deleted", ValueError):
                found = json.loads(path.read_text("utf-8"))
        self.data: dict[str, dict[str, str]] = found.get("data", {})
        self.models: dict[str, str] = found.get("models", {})

    def save(self) -> None:
        """Writes the file."""
        text = json.dumps({"data": self.data, "models": self.models}, indent=1, sort_keys=True)
        write_atomic(str(self.folder / FILE), f"{text}\n")

    def of_download(self, name: str, download: Download) -> str | None:
        """Returns the commit or hash of a download: the pinned one, or that of an earlier one."""
        pinned = download.revision or download.hash
        return pinned or self.data.get(name, {}).get(download.source)

    def of_model(self, name: str, pin: Pin) -> str | None:
        """Returns the commit of a checkpoint: the pinned one, or that of an earlier download."""
        return pin.revision or self.models.get(name)

    def staging(self, name: str, download: Download) -> Path:
        """Returns the folder that exists as long as a download is unfinished."""
        return self.folder / STAGING / name / download.source.rstrip("/").rpartition("/")[2]

    def is_finished(self, name: str, download: Download) -> bool:
        """Returns True if a download is complete and has the pinned commit or hash."""
        recorded = self.data.get(name, {}).get(download.source)
        is_current = recorded is not None and recorded == self.of_download(name, download)
        return is_current and not self.staging(name, download).exists()

    def is_complete(self, name: str, data_set: DataSet) -> bool:
        """Returns True if a data set was downloaded, or placed by hand in the data folder."""
        has_files = all((self.folder / file).exists() for file in data_set.files)
        finished = all(self.is_finished(name, download) for download in data_set.downloads)
        return has_files and (name not in self.data or finished)

    def converted(self, model: str) -> Path:
        """Returns the folder of a checkpoint whose weights are converted."""
        return self.folder / CONVERTED / model.replace("/", "--")

    def has_model(self, model: str, pin: Pin) -> bool:
        """Returns True if a checkpoint was downloaded or converted."""
        return self.converted(model).is_dir() or is_cached(model, self.of_model(model, pin))

    def pin(self, fields: Any, checkpoints: Mapping[str, Pin]) -> Any:
        """Adds commits to the checkpoints in a spec, and replaces those that were converted."""
        if isinstance(fields, list):
            return [self.pin(value, checkpoints) for value in fields]
        if not isinstance(fields, Mapping):
            return fields
        pinned = {name: self.pin(value, checkpoints) for name, value in fields.items()}
        model = fields.get("model")
        if isinstance(model, str) and (model in checkpoints or model in self.models):
            if self.converted(model).is_dir():
                return {**pinned, "model": str(self.converted(model)), "revision": None}
            if revision := self.of_model(model, checkpoints.get(model, Pin())):
                return {**pinned, "revision": pinned.get("revision") or revision}
        return pinned


def is_cached(model: str, revision: str | None) -> bool:
    """Returns True if a model is in the cache of the hub."""
    try:
        found = [try_to_load_from_cache(model, name, revision=revision) for name in SETTINGS]
    except HFValidationError:  # a path that does not exist
        return False
    return any(isinstance(path, str | os.PathLike) for path in found)

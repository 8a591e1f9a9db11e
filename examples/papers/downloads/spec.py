"""Origins of data sets and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline import config
from pipeline.config import Spec, SpecError

#: File below the folder of the papers that lists the checkpoints.
CHECKPOINTS = "models.yaml"
#: A hash with its algorithm. `git` is the hash of a file in a git repository.
HASH = r"(md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}|git:[0-9a-f]{40})"
COMMIT = r"[0-9a-f]{40}"


class Pin(Spec):
    """Commit and size of something that is downloaded."""

    revision: str | None = Field(None, pattern=COMMIT)
    """Commit on the hub, or null if it was not known: no hub was reachable when this was written.
    `get` records the commit that it downloads."""
    gigabytes: float | None = Field(None, gt=0)
    """Approximate size, or null if it was not known."""


class Download(Pin):
    """A repository of the hub, or a file at a URL."""

    hub: str | None = None
    """Name of a data set on the Hugging Face Hub."""
    patterns: list[str] | None = None
    """Glob patterns of the files in the repository, or null for all."""
    url: str | None = None
    """URL of a file, instead of `hub`."""
    hash: str | None = Field(None, pattern=HASH)
    """Published hash of the file at `url`, such as `md5:...`."""
    to: str | None = None
    """Folder of the repository, or path of the file, below the data folder."""
    members: dict[str, str] | None = None
    """Instead of `to`: paths of the members of archives, by regular expressions of their names.
    Other members are not unpacked, and the archive is deleted."""
    convert: Literal["distillation_lists", "video_queries"] | None = None
    """Function in `examples.papers.downloads.convert` that writes the folder `to`."""

    @property
    def source(self) -> str:
        """Name of the repository, or URL."""
        return self.hub or self.url or ""

    @model_validator(mode="after")
    def _check(self) -> Download:
        for names in (("hub", "url"), ("to", "members")):
            if sum(getattr(self, name) is not None for name in names) != 1:
                rule = f"a mapping with either {names[0]} or {names[1]}"
                raise SpecError("downloads", self.source, rule)
        return self


class DataSet(Spec):
    """A data set that is not shipped."""

    files: list[str] = Field(min_length=1)
    """Paths of files or folders below the data folder, which must exist."""
    downloads: list[Download] = Field(default_factory=list)
    """Where to obtain the files."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Numbers of rows, lines or files, by path below the data folder."""
    note: str | None = None
    """Sentence about what cannot be downloaded without a request or by a command."""

    @model_validator(mode="after")
    def _check(self) -> DataSet:
        if not self.downloads and not self.note:
            raise SpecError("downloads", [], "a list that is not empty, unless `note` is set")
        return self


def load_checkpoints(folder: Path) -> dict[str, Pin]:
    """Loads the pins of the checkpoints by name on the hub."""
    data: dict[str, Any] = config.read(str(folder / CHECKPOINTS), "checkpoints")
    with config.within(CHECKPOINTS):
        return {name: config.parse(Pin, fields or {}) for name, fields in data.items()}


def is_hub_name(model: str) -> bool:
    """Returns True for the name of a model on the hub.

    >>> is_hub_name("openai/clip-vit-base-patch16"), is_hub_name("/data/models/clip")
    (True, False)
    """
    return re.fullmatch(r"\w[\w.-]*/[\w.-]*\w", model) is not None and not Path(model).exists()

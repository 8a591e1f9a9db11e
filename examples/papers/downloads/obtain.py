"""Obtains data sets and checkpoints: downloads, verifies, unpacks and converts them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from examples.papers.downloads import convert
from examples.papers.downloads.fetch import Remote, Repository, fetch_url, probe_url
from examples.papers.downloads.revisions import Revisions
from examples.papers.downloads.spec import DataSet, Download, Pin, is_hub_name
from examples.papers.downloads.unpack import count, unpack
from pipeline.config import SpecError
from pipeline.runtime import conversion
from pipeline.runtime.checkpoint import OPEN_CLIP_WEIGHTS

#: Files of checkpoints except for pickled weights.
MODEL_FILES = [*conversion.HUB_FILES, "*.safetensors"]
#: Files of checkpoints.
ALL_FILES = [*conversion.HUB_FILES, *conversion.WEIGHTS]


class Task(NamedTuple):
    """A download that is necessary.

    Attributes:
        name: Name of the data set or checkpoint.
        download: Its source, or None for a checkpoint.
        remote: What it obtains.
    """

    name: str
    download: Download | None
    remote: Remote

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.download.source if self.download else "the hub"

    @property
    def num_bytes(self) -> int | None:
        """Number of bytes to download, which may be approximate, or None if unknown."""
        assumed = self.download and self.download.gigabytes
        return int(1e9 * assumed) if self.remote.num_bytes is None and assumed else self.remote[1]


def plan(
    data_sets: Mapping[str, DataSet], models: Mapping[str, Pin], revisions: Revisions
) -> tuple[list[Task], list[str]]:
    """Asks the servers for the sizes of missing downloads. Returns these, and problems."""
    wanted: list[tuple[str, Download | None]] = []
    for name, data_set in data_sets.items():
        if not revisions.is_complete(name, data_set):
            unfinished = [d for d in data_set.downloads if not revisions.is_finished(name, d)]
            wanted += [(name, d) for d in unfinished or data_set.downloads]  # a file was deleted
    for name, pin in models.items():
        is_recorded = revisions.models.get(name, "") == revisions.of_model(name, pin)
        if not (is_recorded and revisions.has_model(name, pin)):
            wanted.append((name, None))
    tasks, problems = [], []
    for name, download in wanted:
        try:
            if download is None:
                remote = _probe_model(name, revisions.of_model(name, models[name]))
            elif download.hub is None:
                remote = probe_url(download.source)
            else:
                commit = revisions.of_download(name, download)
                remote = _repository(name, download, commit, revisions).probe()
            tasks.append(Task(name, download, remote))
        except SpecError as error:
            problems.append(f"{name}: {error}.")
    return tasks, problems


def _repository(
    name: str, download: Download, commit: str | None, revisions: Revisions
) -> Repository:
    folder = _target(name, download, revisions)
    return Repository(download.source, "dataset", commit, download.patterns, folder)


def _target(name: str, download: Download, revisions: Revisions) -> Path:
    """Returns the folder or file to which a download is written."""
    if download.to is not None and download.convert is None:
        return revisions.folder / download.to
    folder = revisions.staging(name, download)
    return folder if download.hub else folder / folder.name


def _probe_model(name: str, commit: str | None) -> Remote:
    remote = Repository(name, "model", commit, ALL_FILES).probe()
    if not _has_weights(remote):
        return remote
    return Repository(name, "model", commit, MODEL_FILES).probe()


def _has_weights(remote: Remote) -> bool:
    """Returns True if a checkpoint has weights that are loaded without a conversion."""
    names = {Path(file).name for file in remote.files} - {OPEN_CLIP_WEIGHTS}
    return any(name.endswith(".safetensors") for name in names)


def check_space(tasks: list[Task], folder: Path) -> None:
    """Raises `SpecError` if a disk is too small for downloads and what is unpacked from them."""
    cache = Path(constants.HF_HUB_CACHE)
    needed: Counter[Path] = Counter()
    for task in tasks:
        needed[folder if task.download else cache] += task.num_bytes or 0
        if task.download.to is None if task.download else not _has_weights(task.remote):
            needed[folder] += task.num_bytes or 0
    for field, place in (("--data", folder), ("HF_HOME", cache)):
        parent = next(path for path in (place, *place.absolute().parents) if path.exists())
        if (free := shutil.disk_usage(parent).free) < needed[place]:
            rule = f"on a disk with {needed[place] / 1e9:,.1f} GB of free space"
            raise SpecError(field, str(place), rule, f"has {free / 1e9:,.1f} GB")


def obtain(task: Task, revisions: Revisions, say: Callable[[str], None]) -> None:
    """Downloads a data set or a checkpoint.

    Raises:
        SpecError: The files cannot be obtained.
    """
    say(f"{task.name}: downloading from {task.source}")
    if task.download is None:
        _obtain_model(task, revisions, say)
        return
    name, download, commit = task.name, task.download, task.remote.revision
    staging, recorded = revisions.staging(name, download), revisions.data.setdefault(name, {})
    staging.mkdir(parents=True, exist_ok=True)
    revisions.save()  # data sets that are not recorded were placed by hand
    target = _target(name, download, revisions)
    files = [target]
    if download.hub is not None:
        recorded[download.source] = commit
        revisions.save()
        _repository(name, download, commit, revisions).fetch()
        files = [target / file for file in task.remote.files]
    else:
        recorded[download.source] = fetch_url(download.source, target, download.hash, say)
    for file in files if download.members else []:
        say(f"{name}: unpacking {file.name}")
        unpack(file, download.members or {}, revisions.folder)
    if download.convert is not None and download.to is not None:
        getattr(convert, download.convert)(target, revisions.folder / download.to)
    shutil.rmtree(staging)
    revisions.save()


def _obtain_model(task: Task, revisions: Revisions, say: Callable[[str], None]) -> None:
    name, commit, is_loaded = task.name, task.remote.revision, _has_weights(task.remote)
    patterns = MODEL_FILES if is_loaded else ALL_FILES
    folder = Repository(name, "model", commit, patterns).fetch()
    settings = folder / "adapter_config.json"
    if settings.is_file() and not (folder / "config.json").is_file():
        fields = json.loads(settings.read_text("utf-8"))
        if is_hub_name(base := str(fields.get("base_model_name_or_path"))):
            say(f"{name}: downloading its base model {base}")
            # The revision with which the adapter is loaded.
            Repository(base, "model", fields.get("revision"), MODEL_FILES).fetch()
    target = revisions.converted(name)
    if not is_loaded and not target.exists():
        conversion.convert(name, str(target), commit, _convert_to_clip, say)
    revisions.models[name] = commit
    revisions.save()


def _convert_to_clip(model: str, folder: Path) -> None:
    from pipeline.encoders.open_clip import convert_to_clip  # transformers takes seconds to import

    convert_to_clip(model, folder)


def verify(name: str, data_set: DataSet, folder: Path) -> Iterator[str]:
    """Yields a sentence per file that is missing or has another number of rows than published."""
    for file in data_set.files:
        if not (folder / file).exists():
            yield f"{name}: {folder / file} is missing. {data_set.note or ''}".rstrip()
    for file, expected in data_set.counts.items():
        path = folder / file
        if path.exists() and (found := count(path)) != expected:
            problem = f"has {found:,} rows or files instead of {expected:,}"
            yield f"{name}: {path} {problem}; delete it and run the command again."

"""Retrieval tasks of mteb, loaded by mteb from a local folder or from the hub.

mteb and its dependencies are imported when the first task is used, because this takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import config, extras
from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.paths import is_uri

if TYPE_CHECKING:
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

#: Modalities of queries and documents, which are also the names of their columns.
MODALITIES = ("text", "image", "audio", "video")
#: Number of tasks whose data a process keeps open. The data are memory-mapped.
NUM_OPEN_TASKS = 4


class TaskSpec(config.ComponentSpec):
    """Options that select the data of a task."""

    task: str
    """Name of a retrieval task of mteb, such as Vidore3HrRetrieval."""
    subset: str | None = None
    """Subset of the task, such as english. Optional if the task has only one."""
    split: str | None = None
    """Split of the task, such as test. Optional if mteb evaluates only one."""
    data: config.Uri | None = None
    """Local folder with the files of the task's dataset, as on the hub."""
    download: bool = False
    """Whether to read the dataset from the hub, or from the cache of the library `datasets`, if
    `data` is null."""


@dataclass(frozen=True)
class TaskData:
    """Data of one subset and split of a task.

    Attributes:
        corpus: Documents with the column `id` and one column per modality. Files are not decoded.
        queries: Judged queries with the column `id`, likewise.
        qrels: Grades by document id, by query id.
        top_ranked: Ids of the documents to rank, by query id, or None to rank all documents.
    """

    corpus: Dataset
    queries: Dataset
    qrels: dict[str, dict[str, int]]
    top_ranked: dict[str, list[str]] | None


class Task:
    """A retrieval task of mteb, restricted to one subset and one split.

    Args:
        spec: Selection of the task and its data.

    Attributes:
        spec: The spec.
        mteb: Task object of mteb. It reads the dataset from `spec.data`.
        subset: Name of the subset.
        split: Name of the split.

    Raises:
        MissingExtra: mteb is not installed.
        SpecError: The task, the subset or the split does not exist, or no data are selected.
    """

    def __init__(self, spec: TaskSpec):
        self.spec = spec
        self.mteb = _create(spec.task)
        metadata = self.mteb.metadata
        self.subset = _choose("subset", spec.subset, metadata.hf_subsets, spec.task)
        self.split = _choose("split", spec.split, metadata.eval_splits, spec.task)
        # Tasks read their dataset and splits from the metadata, which belong to the class.
        update: dict[str, Any] = {"eval_splits": [self.split]}
        if spec.data is not None:
            update["dataset"] = {**metadata.dataset, "path": spec.data}
        self.mteb.metadata = metadata.model_copy(update=update)
        self.mteb.filter_eval_splits([self.split])
        self.mteb.filter_languages(None, hf_subsets=[self.subset])
        self._source = metadata.dataset["path"], metadata.dataset["revision"]

    @property
    def query_modalities(self) -> tuple[str, ...]:
        """Modalities of the queries."""
        return self._modalities("query")

    @property
    def corpus_modalities(self) -> tuple[str, ...]:
        """Modalities of the documents."""
        return self._modalities("document")

    def _modalities(self, part: str) -> tuple[str, ...]:
        from mteb.types import PromptType

        found = self.mteb.metadata.get_modalities(PromptType(part))
        return tuple(name for name in MODALITIES if name in found)

    @property
    def has_pages(self) -> bool:
        """True if the images of the documents are pages."""
        modalities = {"text", "image"}
        is_page = self.mteb.metadata.type == "DocumentUnderstanding"
        return is_page or modalities <= set(self.corpus_modalities)

    @property
    def instruction(self) -> str | None:
        """Instruction of the task for queries, or None if it has none."""
        prompt: Any = self.mteb.metadata.prompt
        return prompt.get("query") if isinstance(prompt, Mapping) else prompt

    def load(self) -> TaskData:
        """Loads the data with mteb.

        Raises:
            SpecError: The dataset is missing or incomplete.
        """
        self._check_folder()
        try:
            with _datasets_settings(self.spec), _without_decoding():
                if not self.mteb.data_loaded:
                    self.mteb.load_data()
                self.mteb.convert_v1_dataset_format_to_v2(num_proc=None)
            dataset: Any = self.mteb.dataset
            data = dataset[self.subset if self.subset in dataset else self.split]
            data = data.get(self.split, data)
            return _task_data(data, (*self.query_modalities, *self.corpus_modalities))
        except Exception as error:  # any exception of mteb, datasets or the task
            lines = str(error).strip().splitlines() or [""]
            problem = f"cannot be loaded ({type(error).__name__}: {lines[0][:200]})"
            raise self._missing(problem) from error

    def _check_folder(self) -> None:
        folder = self.spec.data
        if folder is None:
            if not self.spec.download:
                raise self._missing(None)
        elif is_uri(folder) or not Path(folder).is_dir():
            raise self._missing("is not a local folder")
        elif not any(path.is_file() for path in Path(folder).rglob("*")):
            raise self._missing("is empty")

    def _missing(self, problem: str | None) -> SpecError:
        """Builds the error for missing data, with the command that downloads them."""
        path, revision = self._source
        rule = f"a folder with all files of the dataset {path} at revision {revision}"
        command = f"hf download {path} --repo-type dataset --revision {revision} --local-dir FOLDER"
        note = f"; get them with `{command}`"
        if self.spec.data is None:
            note += ", or set download: true"
        elif Path(self.spec.data).is_dir() and not (Path(self.spec.data) / "README.md").exists():
            problem = f"{problem} and has no README.md, which defines its configurations"
        return SpecError("data", self.spec.data, rule, problem, note)


def load(spec: TaskSpec) -> TaskData:
    """Returns the data of a task. A process loads them once, unless the files have changed.

    Raises:
        MissingExtra: mteb is not installed.
        SpecError: The task does not exist, or its dataset is missing or incomplete.
    """
    selection = TaskSpec(**spec.model_dump(include=set(TaskSpec.model_fields)))
    return _load(selection, _state(spec.data))


@functools.lru_cache(NUM_OPEN_TASKS)
def _load(spec: TaskSpec, state: tuple[Any, ...]) -> TaskData:
    return Task(spec).load()


def _state(folder: str | None) -> tuple[Any, ...]:
    """Returns the name, size and date of all files of a folder."""
    files = []
    for parent, _, names in os.walk(folder) if folder else ():
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(parent, name))
                files.append((parent, name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(files))


def _create(name: str) -> AbsTaskRetrieval:
    """Returns a new task object of mteb.

    Raises:
        SpecError: The task does not exist or is not a retrieval task.
    """
    extras.require("mteb")
    import mteb
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    rule = "the name of a retrieval task of mteb"
    try:
        with warnings.catch_warnings():  # about renamed tasks and beta versions
            warnings.simplefilter("ignore")
            task = mteb.get_task(name)
    except KeyError as error:
        similar = re.search("Did you mean: '([^']+)'", str(error))
        note = f"; did you mean {similar[1]!r}?" if similar else ""
        raise SpecError("task", name, rule, note=note) from None
    if not isinstance(task, AbsTaskRetrieval):
        raise SpecError("task", name, rule, f"has the type {task.metadata.type}")
    return task


def _choose(field: str, value: str | None, names: Sequence[str], task: str) -> str:
    """Returns the selected subset or split, or the only one."""
    if value is None and len(names) == 1:
        return names[0]
    if value is None:
        rule = f"one of {', '.join(names)}, because the task {task} has several"
        raise SpecError(field, None, rule)
    if value not in names:
        raise SpecError.unknown_name(field, value, names)
    return value


@contextlib.contextmanager
def _datasets_settings(spec: TaskSpec) -> Iterator[None]:
    """Prevents progress bars inside the block, and requests to the hub that a spec does not allow.

    Local data are cached in a folder of their own, because `datasets` identifies them only by the
    name of their folder and would return the data of another one, or of an earlier version.
    """
    import datasets
    import huggingface_hub

    changes: list[tuple[Any, str, Any]] = []
    if spec.data is not None:
        folder = f"maxray-{config.digest(_state(spec.data))}"
        cache = Path(datasets.config.HF_DATASETS_CACHE) / folder
        changes.append((datasets.config, "HF_DATASETS_CACHE", cache))
    if spec.data is not None or not spec.download:
        changes += [
            (module, "HF_HUB_OFFLINE", True)
            for module in (huggingface_hub.constants, datasets.config)
        ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    has_progress_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        if has_progress_bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _without_decoding() -> Iterator[None]:
    """Prevents `datasets` from decoding audio and videos inside the block.

    The loaders of some tasks iterate over all rows. Decoding would take minutes and require
    torchcodec, and the decoded values are not used.
    """
    from datasets import Audio, Video

    before = [(feature, feature.decode_example) for feature in (Audio, Video)]
    try:
        for feature, _ in before:
            feature.decode_example = lambda self, value, token_per_repo_id=None: value
        yield
    finally:
        for feature, method in before:
            feature.decode_example = method


def _task_data(data: Any, modalities: Sequence[str]) -> TaskData:
    qrels = {str(q): dict(grades) for q, grades in data["relevant_docs"].items() if grades}
    queries = _undecoded(data["queries"])
    rows = [row for row, query_id in enumerate(queries["id"]) if query_id in qrels]
    return TaskData(_undecoded(data["corpus"]), queries.select(rows), qrels, data["top_ranked"])


def _undecoded(dataset: Dataset) -> Dataset:
    """Returns a dataset whose images, audio and videos are files instead of decoded."""
    from datasets import Audio, Image, Video

    for name, feature in dataset.features.items():
        if isinstance(feature, Audio | Image | Video):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


# -- rows --------------------------------------------------------------------------------------


def document_text(row: Mapping[str, Any]) -> str:
    """Joins the title and the text of a document as mteb does.

    >>> document_text({"title": "On wings", "text": "They lift. "})
    'On wings They lift.'
    """
    title, text = row.get("title") or "", row.get("text") or ""
    return f"{title} {text}".strip() if title else text.strip()


def query_text(row: Mapping[str, Any]) -> str:
    """Returns the text of a query as mteb passes it to models, with the instruction of its row.

    The turns of a conversation are joined.

    >>> query_text({"text": "What lifts?", "instruction": "Ignore birds."})
    'What lifts? Ignore birds.'
    >>> query_text({"text": [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Yes"}]})
    'user: Hi; bot: Yes'
    """
    text, instruction = row.get("text") or "", row.get("instruction")
    if isinstance(text, str):
        return text if instruction is None else f"{text} {instruction}"
    turns = [
        turn if isinstance(turn, str) else f"{turn['role']}: {turn['content']}" for turn in text
    ]
    conversation = "; ".join(turns)
    return conversation if instruction is None else f"{instruction} {conversation}"


def file_content(value: Any, column: str) -> bytes | None:
    """Returns the content of an image, an audio file or a video in a row, or None without one.

    Args:
        value: Value of the row: bytes, or a mapping with `bytes` or `path`.
        column: Name of the column, for errors.

    Raises:
        Unreadable: The value is not a file.
        OSError: The file cannot be read.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
        if value.get("bytes") is not None:
            return value["bytes"]
        return Path(value["path"]).read_bytes() if value.get("path") else None
    raise Unreadable(f"{column} is not a file", f"got a {type(value).__name__}")

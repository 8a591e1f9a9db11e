"""Retrieval tasks of mteb, loaded by mteb from a local folder or from the hub.

mteb and its dependencies are imported when the first task is used, because this takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pydantic import Field

from pipeline import config, extras
from pipeline.config import SpecError, reading
from pipeline.data.audio import Audio
from pipeline.data.base import ItemSize, Source, make_revision
from pipeline.data.decode import Unreadable
from pipeline.data.images import Images
from pipeline.data.manifests import to_json_value
from pipeline.data.media import ByteStream, MediaFile, MediaSource
from pipeline.data.video import FramesSpec, Video
from pipeline.data.windows import AudioSpec
from pipeline.datasets import mteb_results
from pipeline.datasets.queries import CollectionQueries
from pipeline.eval import BenchmarkRow
from pipeline.eval.topics import group_categories
from pipeline.paths import is_uri
from pipeline.schema import Item, Reject, is_blank, item_id_problem

if TYPE_CHECKING:
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

#: Modalities of queries and documents, which are also the names of their columns.
MODALITIES = ("text", "image", "audio", "video")
#: Number of tasks whose data a process keeps open. The data are memory-mapped.
NUM_OPEN_TASKS = 4
#: Rows per shard, by modality. Decoding a video takes seconds.
ROWS_PER_SHARD = {"text": 2000, "image": 256, "audio": 64, "video": 16}
#: Rows that are read at the same time.
ROWS_PER_BATCH = {"text": 500, "image": 16, "audio": 4, "video": 1}
#: Inputs of encoders that a column provides.
PROVIDED = {
    "text": ("text",),
    "image": ("image", "scan"),
    "audio": ("audio",),
    "video": ("frames", "audio"),
}


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
        """Loads the data with mteb."""
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
    """Returns the data of a task. A process loads them once, unless the files have changed."""
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
        problem, note = f"has the type {task.metadata.type}", ""
        if task.is_aggregate:
            names = ", ".join(part.metadata.name for part in task.metadata.tasks)
            problem, note = "is a mean over tasks", f"; evaluate each of them: {names}"
        raise SpecError("task", name, rule, problem, note)
    return task


def _choose(field: str, value: str | None, names: Sequence[str], task: str) -> str:
    if value is None and len(names) == 1:
        return names[0]
    if value is None or value not in names:
        problem = None if value is None else f"the task {task} does not have"
        raise SpecError.unknown_name(field, value, names, problem)
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
    """Returns the file in a row as bytes, given as bytes or a mapping with `bytes` or `path`.

    Raises:
        Unreadable: The value is not a file. The error names the column.
        OSError: The file cannot be read.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
        if value.get("bytes") is not None:
            return value["bytes"]
        return Path(value["path"]).read_bytes() if value.get("path") else None
    raise Unreadable(f"{column} is not a file", f"got a {type(value).__name__}")


# -- items ----------------------------------------------------------------------------------------


class Items(Source["Items.Spec"]):
    """Documents of a retrieval task of mteb: texts, images, pages, audio or videos.

    **Data.** mteb loads the dataset of the task from the folder `data`, which contains the files of
    the dataset on the hub including its README.md. Nothing is downloaded unless `download` is set.

    **Items.** Each document is one item, whose id is that of the corpus. Its text is the title and
    the text, joined by a space as in mteb. Columns of modalities that the task does not have are
    ignored. A document may have a text and an image, or a video and its audio. An encoder reads
    those of them that it supports. Audio and videos are not divided into windows.

    **Modality.** `page` for the images of document understanding tasks and of documents with a
    text, otherwise that of the column.

    **Metadata.** All other columns of the corpus, and the `row` of the document.

    **Revision.** A hash of the text, of the files and of the options that affect them.
    """

    class Spec(TaskSpec):
        """Options of the mteb source."""

        name: Literal["mteb"] = "mteb"
        collection: str = ""
        """Name of the collection. Defaults to the name of the task."""
        max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
        """Maximum size of an image, in pixels. Larger images are scaled down."""
        frames: FramesSpec = FramesSpec()
        """Selection of the frames of videos."""
        audio: AudioSpec = AudioSpec()
        """Options of decoded audio."""

    location_field = "data"
    provides = ("item_id",)  # and those of the task, see `provided_inputs`

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the spec only. The data are loaded again."""
        return type(self), (self.spec, self.wants)

    @classmethod
    def provided_inputs(cls, spec: Spec) -> tuple[str, ...]:
        """Returns the inputs that the documents of the task provide."""
        inputs = [name for column in Task(spec).corpus_modalities for name in PROVIDED[column]]
        return tuple(dict.fromkeys([*cls.provides, *inputs]))

    @property
    def collection(self) -> str:
        """The name of the collection."""
        return self.spec.collection or self.spec.task

    @property
    def stores_listing(self) -> bool:
        """True if documents contain files, which listing hashes."""
        return self._modalities != ("text",)

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """Returns the maximum number of items per unit."""
        return min([self.max_unit_items, *(s.unit_limit(shard) for s in self._media.values())])

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the size of the text and of all files of a document."""
        size = super().item_size(shard, item)
        files = replace(item, text=None)
        media = [source.item_size(shard, files) for source in self._media.values()]
        return size._replace(num_bytes=size.num_bytes + sum(s.num_bytes for s in media))

    @functools.cached_property
    def payload(self) -> pa.Schema:
        """The payload columns of all modalities of the task."""
        columns = {f.name: f for source in self._media.values() for f in source.payload}
        return pa.schema(list(columns.values()))

    @functools.cached_property
    def _task(self) -> Task:
        return Task(self.spec)

    @property
    def _modalities(self) -> tuple[str, ...]:
        return self._task.corpus_modalities

    @functools.cached_property
    def _data(self) -> TaskData:
        return load(self.spec)

    @functools.cached_property
    def _media(self) -> dict[str, MediaSource[Any]]:
        """Sources that decode the files of the columns with media."""
        spec = self.spec
        common = {"path": spec.data or ".", "collection": self.collection}
        if "image" in self._modalities:
            images = Images.Spec(**common, max_pixels=spec.max_pixels)
            return {"image": _RowImages(images, self.wants, self)}
        options = {**common, **spec.audio.model_dump(), "window_seconds": None}
        sources: dict[str, MediaSource[Any]] = {}
        if "video" in self._modalities:
            wants = self.wants
            if "audio" in self._modalities:  # has a column of its own
                wants = tuple(name for name in wants if name != "audio")
            videos = Video.Spec(**options, **spec.frames.model_dump())
            sources["video"] = _RowVideos(videos, wants, self)
        if "audio" in self._modalities:
            sources["audio"] = _RowAudio(Audio.Spec(**options), self.wants, self)
        return sources

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if the task or its data are missing."""
        corpus = self._data.corpus
        if not set(self._modalities) & set(corpus.column_names):
            columns = " or ".join(self._modalities)
            rule = f"a dataset whose corpus has a column {columns}"
            problem = f"has the columns {', '.join(corpus.column_names)}"
            raise config.SpecError("data", self.spec.data, rule, problem)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields ranges of rows, `{"rows": [start, end]}`."""
        num_rows, size = len(self._data.corpus), ROWS_PER_SHARD[self._modalities[-1]]
        for start in range(0, num_rows, size):
            yield {"rows": [start, min(start + size, num_rows)]}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the documents of a range of rows."""
        corpus, size = self._data.corpus, ROWS_PER_BATCH[self._modalities[-1]]
        first, end = shard["rows"]
        for start in range(first, end, size):
            batch = corpus[start : min(start + size, end)]
            for offset, values in enumerate(zip(*batch.values(), strict=True)):
                yield self._list(start + offset, dict(zip(batch, values, strict=True)))

    def row(self, number: int) -> dict[str, Any]:
        """Returns the values of a row of the corpus."""
        if number >= len(self._data.corpus):
            raise Unreadable("missing document", f"the corpus has no row {number}")
        return self._data.corpus[number]

    def _list(self, number: int, row: dict[str, Any]) -> Item | Reject:
        item_id, revision = str(row["id"]), ""
        try:
            if problem := item_id_problem(item_id):
                raise Unreadable("bad id", problem)
            content = self._content(row)
            files = [file_content(row.get(name), name) for name in self._media]
            settings = {name: source.settings() for name, source in self._media.items()}
            title = row.get("title") if "text" in self._modalities else None
            text = document_text(row) if "text" in self._modalities else ""
            others = {k: v for k, v in row.items() if k not in ("id", "title", *MODALITIES)}
            metadata = {k: v for k, v in to_json_value(others).items() if v is not None}
            revision = make_revision([title, text, metadata, settings], content)
            present = [name for name in self._modalities if name != "text" and row.get(name)]
            if not text and not present:
                raise Unreadable("empty document", f"no {' or '.join(self._modalities)}")
        except (Unreadable, OSError) as error:
            known = item_id if not item_id_problem(item_id) else f"row {number}"
            return self.reject(known, revision, error, "list")
        file = MediaFile(item_id, item_id, sum(len(f or b"") for f in files), row=number)
        return Item(
            item_id=item_id,
            parent_id=item_id,
            source=self.collection,
            modality=self._modality(present),
            revision=revision,
            title=title or None,
            text=text or None,
            metadata={**metadata, "row": number},
            handle=asdict(file),
        )

    def _modality(self, present: Sequence[str]) -> str:
        if not present:
            return "text"
        return "page" if present[-1] == "image" and self._task.has_pages else present[-1]

    def _content(self, row: dict[str, Any]) -> list[str]:
        """Returns hashes of the text and of the files of a row."""
        values = {name: file_content(row.get(name), name) for name in self._media}
        files = [hashlib.blake2b(data or b"").hexdigest() for data in values.values()]
        return [document_text(row), *files] if "text" in self._modalities else files

    def read_content_hash(self, item: dict[str, Any]) -> str:
        """Returns the hash of the current content of an indexed document."""
        return config.digest(self._content(self.row(item["metadata"]["row"])))

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes the images, videos and audio of documents."""
        for position, item in items:
            yield self._decode(position, item)

    def _decode(self, position: int, item: Item) -> Item | Reject:
        for source in self._media.values() if self.payload.names else ():
            (result,) = source.decode({}, [(position, item)])
            if isinstance(result, Reject):
                return result
            item = replace(result, payload={**item.payload, **result.payload})
        return item

    def preview_image(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """Returns the image of an indexed document, or a frame of its video."""
        for modality in ("image", "video"):
            if modality in self._media:
                return self._media[modality].preview_image(item, seconds)
        return super().preview_image(item, seconds)

    def preview_audio(self, item: dict[str, Any]) -> Any:
        """Returns the audio of an indexed document."""
        for modality in ("audio", "video"):
            if modality in self._media:
                return self._media[modality].preview_audio(item)
        return super().preview_audio(item)


class _RowFiles:
    """Base class that replaces the files of a source by the values of a column of a corpus."""

    column: str

    def __init__(self, spec: Any, wants: tuple[str, ...], documents: Items):
        super().__init__(spec, wants)  # type: ignore[call-arg]
        self._documents = documents

    @contextlib.contextmanager
    def _open(self, file: MediaFile) -> Iterator[ByteStream]:
        assert file.row is not None
        data = file_content(self._documents.row(file.row).get(self.column), self.column)
        if data is None:
            raise Unreadable(f"no {self.column}")
        yield io.BytesIO(data)


class _RowImages(_RowFiles, Images):
    column = "image"


class _RowAudio(_RowFiles, Audio):
    column = "audio"


class _RowVideos(_RowFiles, Video):
    column = "video"


# -- queries --------------------------------------------------------------------------------------


class QueryFiles(Mapping[str, bytes]):
    """Files in a column of the queries of a task, by query id. Each is read when it is needed.

    `rows` are the numbers of the rows of the queries that have a file.
    """

    def __init__(self, task: str, column: str, queries: Dataset, rows: Mapping[str, int]):
        self._task, self._column, self._rows = task, column, rows
        self._queries = queries.select_columns([column]) if rows else queries

    def __getitem__(self, query_id: str) -> bytes:
        value = self._queries[self._rows[query_id]][self._column]
        rule = "a task whose queries are readable"
        problem = f"has no readable {self._column} for the query {query_id!r}"
        with reading("task", self._task, rule, Unreadable, problem=problem):
            data = file_content(value, self._column)
        if data is None:
            raise SpecError("task", self._task, rule, problem)
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Queries(CollectionQueries["Queries.Spec"]):
    """Queries and judgments of a retrieval task of mteb.

    **Queries.** Texts, images, audio, videos, or several of these, which the encoder must support.
    An audio column replaces the audio of the video. The instruction of a single query is appended
    to its text, as in mteb. The instruction of the task replaces that of the encoder's query
    template; encoders whose template has none ignore it. Queries without text and files are left
    out.

    **Judgments.** All grades are preserved. Queries without judgments are left out.

    **Pools.** If the task contains the documents to rank for each query (`top_ranked`), rows rank
    only these. A reranker reranks the best of them.

    **Metrics.** The main score of the task is computed in addition to the metrics of the spec. The
    scores of all rows are also written in mteb's format, as computed by mteb, to
    `mteb/<model>/<encoder>/<task>.json` in the output folder. They contain the cutoffs up to `k`.
    """

    class Spec(TaskSpec):
        """Options of the mteb benchmark."""

        name: Literal["mteb"] = "mteb"
        instruction: Literal["task", "none"] = "task"
        """Instruction in the query template: that of the `task`, or `none` for the encoder's."""
        results: config.Uri | None = None
        """Local folder of the results in mteb's format, or null for `mteb` in the output folder.
        Results of other subsets and splits of the task in the folder are kept."""

    location_field = "task"

    @functools.cached_property
    def _task(self) -> Task:
        return Task(self.spec)

    @functools.cached_property
    def _inputs(self) -> tuple[dict[str, str], dict[str, QueryFiles]]:
        """The texts of the queries by id, and their files by part."""
        modalities, queries = self._task.query_modalities, load(self.spec).queries
        texts: dict[str, str] = {}
        rows: dict[str, dict[str, int]] = {part: {} for part in modalities if part != "text"}
        for number, row in enumerate(queries):
            query_id = str(row["id"])
            text = query_text(row) if "text" in modalities else ""
            parts = [part for part in rows if row.get(part) is not None]
            if is_blank(text) and not parts:
                continue  # some tasks have empty queries
            texts[query_id] = "" if is_blank(text) else text
            for part in parts:
                rows[part][query_id] = number
        return texts, {part: QueryFiles(self.spec.task, part, queries, rows[part]) for part in rows}

    def queries(self) -> dict[str, str]:
        """Returns the texts of the judged queries, without queries whose text is empty."""
        return self._inputs[0]

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns the grades of the task."""
        return load(self.spec).qrels

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Groups the queries by columns such as their language."""
        queries = load(self.spec).queries
        excluded = {"id", "title", "instruction", "modality", *MODALITIES}
        names = [name for name in queries.column_names if name not in excluded]
        columns = queries.select_columns(["id", *names])
        fields: dict[str, dict[str, Any]] = {}
        for row in columns:
            values: Mapping[str, Any] = to_json_value({name: row[name] for name in names})
            for name, value in values.items():
                fields.setdefault(name, {})[str(row["id"])] = value
        return group_categories(fields, query_ids)

    def options(self) -> dict[str, Any]:
        """Returns the images, the pools, the instruction and other properties of the task."""
        task, pools = self._task, load(self.spec).top_ranked
        texts, media = self._inputs
        return {
            "media": {part: files for part, files in media.items() if files},
            "pools": pools and {query_id: pools.get(query_id, []) for query_id in texts},
            "instruction": task.instruction if self.spec.instruction == "task" else None,
            "measure": mteb_results.measure_name(task.mteb.metadata.main_score),
            "ignore_query_id": task.mteb.ignore_identical_ids,
            "skip_first": task.mteb.skip_first_result,
        }

    def write_result(self, folder: str, row: BenchmarkRow) -> str:
        """Writes the scores of a row as `TaskResult` of mteb."""
        task, results = self._task, self.spec.results
        task.load()
        parent = Path(results or Path(config.absolute(folder)) / "mteb")
        return mteb_results.write(task.mteb, task.subset, task.split, row, parent)

"""Source of the documents of mteb's retrieval tasks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from pipeline import config
from pipeline.decoding import Unreadable
from pipeline.schema import Item, Reject, item_id_problem
from pipeline.sources import ItemSize, Source, make_revision
from pipeline.sources.audio import Audio
from pipeline.sources.images import Images
from pipeline.sources.manifests import to_json_value
from pipeline.sources.media import ByteStream, MediaFile, MediaSource
from pipeline.sources.mteb_tasks import (
    MODALITIES,
    Task,
    TaskData,
    TaskSpec,
    document_text,
    file_content,
    load,
)
from pipeline.sources.video import FramesSpec, Video
from pipeline.sources.windows import AudioSpec

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


class Mteb(Source["Mteb.Spec"]):
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
        """Returns the values of a row of the corpus.

        Raises:
            Unreadable: The corpus has fewer rows.
        """
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

    def __init__(self, spec: Any, wants: tuple[str, ...], documents: Mteb):
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

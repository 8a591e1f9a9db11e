"""Bases of the sources of published collections of images and videos."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from pipeline import config
from pipeline.config import SpecError
from pipeline.data.base import make_revision
from pipeline.data.files import existing_root, open_root, walk
from pipeline.data.images import Images
from pipeline.data.manifests import ROWS_PER_SHARD
from pipeline.data.media import MediaFile
from pipeline.data.video import Video
from pipeline.datasets.files import check_number
from pipeline.schema import Item, Reject, item_id_problem

#: Treatment of missing files: an error, or the other files are indexed.
MissingFiles = Literal["error", "skip"]
#: Number of missing files that an error names.
MAX_NAMES = 5


def check_files(field: str, location: str, names: Mapping[str, str], found: Iterable[str]) -> None:
    """Raises `SpecError` that names the first missing files. `names` are those of all by id."""
    missing = sorted(names[item] for item in names.keys() - set(found))
    if missing:
        examples = ", ".join(missing[:MAX_NAMES]) + ", ..." * (len(missing) > MAX_NAMES)
        rule = f"the location of all {len(names):,} files of the data set"
        problem = f"lacks {len(missing):,} of them: {examples}"
        note = "; add them, or set missing: skip"
        raise SpecError(field, location, rule, problem, note)


class SelectedVideos(Video):
    """Base class of sources of some of the videos below a folder.

    The id of a video is the name of its file without folder and suffix.
    """

    @functools.cached_property
    def video_ids(self) -> frozenset[str] | None:
        """Ids of the videos to list, or None for all."""
        return None

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the selected videos of a shard, and unreadable archives as rejects."""
        for file in super().list_files(shard):
            if isinstance(file, Reject):
                yield file
                continue
            video = PurePosixPath(file.id).name.removesuffix(file.suffix)
            if self.video_ids is None or video in self.video_ids:
                yield replace(file, id=video)


class ListedImagesSpec(Images.Spec):
    """Options of sources whose items are listed in an annotation file."""

    images: config.Uri | None = None
    """Folder or ZIP archive of the images, or null for the folder of `path`."""
    num_documents: PositiveInt | None = None
    """Expected number of documents; another number is an error. Null to accept any."""
    missing: MissingFiles = "error"
    """Treatment of missing images: an `error`, or `skip` to record them as rejects."""


class ListedImages(Images):
    """Base class of sources whose items are listed in an annotation file.

    A document has the fields `id`, `file_name` of its image relative to `images`, and optionally
    `text`, `captions` and metadata. A document without `file_name` is a text.
    """

    provides: ClassVar[tuple[str, ...]] = ("item_id", "text", "image", "scan", "caption")
    containers = ()
    spec: ListedImagesSpec

    @abstractmethod
    def documents(self) -> Iterator[dict[str, Any]]:
        """Yields the documents in a stable order.

        Raises:
            SpecError: The annotation file is missing or malformed.
        """

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the stored content. The selection does not."""
        added = set(type(self.spec).model_fields) - set(Images.Spec.model_fields)
        return {name: value for name, value in super().settings().items() if name not in added}

    def check(self) -> None:
        """Raises `SpecError` if the annotations are malformed or files are missing."""
        names, number = {}, 0
        for document in self.documents():
            number += 1
            if name := document.get("file_name"):
                names[name] = name
        if not number:
            raise SpecError("path", self.spec.path, "a file with at least one document", "has none")
        check_number("num_documents", self.spec.num_documents, number, "documents")
        if names:
            field = "images" if self.spec.images else "path"
            location = self.spec.images or self.spec.path
            existing_root(location, field)
            if self.spec.missing == "error":
                check_files(field, location, names, self._names())

    def _names(self) -> Iterator[str]:
        """Yields the names of the existing files, relative to the folder of the images."""
        if self._zip is not None:
            yield from self._zip
            return
        fs, folder = self._images or self._folder
        yield from (name for name, _ in walk(fs, folder))

    @functools.cached_property
    def _images(self) -> tuple[Any, str] | None:
        return None if self.spec.images is None else open_root(self.spec.images)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields groups of documents, `{"manifest": path, "listed": [[location, fields], ...]}`."""
        _, root = open_root(self.spec.path)
        manifest = root.rpartition("/")[2]
        group: list[Any] = []
        for number, document in enumerate(self.documents()):
            group.append((f"{manifest}#{number}", document))
            if len(group) == ROWS_PER_SHARD:
                yield {"manifest": manifest, "listed": group}
                group = []
        if group:
            yield {"manifest": manifest, "listed": group}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of a shard without payload, in the order of the documents."""
        for location, document in shard["listed"]:
            if document.get("file_name"):
                fields = {name: value for name, value in document.items() if name != "text"}
                part = {**shard, "listed": [(location, fields)]}
                text = document.get("text")
                for item in super().scan(part):
                    yield item if isinstance(item, Reject) or not text else _with_text(item, text)
            else:
                yield self._text_item(location, document)

    def _text_item(self, location: str, document: dict[str, Any]) -> Item | Reject:
        item_id, text = document["id"], document.get("text") or ""
        problem = item_id_problem(item_id) or ("" if text.strip() else "the text is empty")
        if problem:
            known = location if item_id_problem(item_id) else item_id
            return Reject(known, self.collection, "list", "bad document", problem)
        revision = make_revision([], text)
        others = {k: v for k, v in document.items() if k not in ("id", "text", "file_name")}
        return Item(item_id, item_id, self.collection, "text", revision, text=text, metadata=others)

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes images. Texts are yielded unchanged."""
        images = iter(super().decode(shard, [entry for entry in items if entry[1].handle]))
        for _, item in items:
            yield next(images) if item.handle else item


def _with_text(item: Item, text: str) -> Item:
    """Adds a text to an image, which changes its revision."""
    return replace(item, text=text, revision=make_revision([item.revision], text))

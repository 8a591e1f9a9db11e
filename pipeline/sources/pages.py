"""PDF documents page by page: the text layer as words with boxes, and images where asked for."""

from __future__ import annotations

import functools
import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from pipeline import config, extras
from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.process import DecodingProcess, Limits, decoding_process
from pipeline.decoding.untrusted import check_regular
from pipeline.schema import Item, Reject, item_id_problem, payload_schema
from pipeline.sources import Source, revision_of
from pipeline.sources.files import escaped, existing_root, files_below, folder_of

SUFFIX = ".pdf"
#: A shard is a task's work: some documents, few enough that tasks end at about the same time.
FILES_PER_SHARD = 8
BYTES_PER_SHARD = 16 << 20
#: Pages whose text has to be recognised take seconds each: what is done shows, and is committed,
#: sooner in small units.
SCANS_AT_ONCE = 16


class Pages(Source["Pages.Spec"]):
    """The pages of PDF documents: one item a page, the document its parent.

    `path` is a folder of .pdf files at any depth, or one such file.

    **Ids.** A document's id is its path below `path`; a page's is `<document>#page=<number>`,
    numbers from 1, which also opens the page in a browser.

    **Text.** The text layer in reading order: blocks of lines are ordered by cuts along the white
    space between columns and paragraphs. Payload for encoders that read text: `word_spans`, each
    word's characters in the text, and `word_boxes`, its box x0 y0 x1 y1 in [0, 1] of the page as it
    is displayed (rotated, cut to its crop box). A word that is divided by a hyphen has two.

    **Images.** Payload `image`, a JPEG, only for encoders that want it; `scan`, the same of pages
    without text alone, for encoders that recognise text. A page without text is then an item too;
    for others it is rejected: `no text layer`, or `empty page` if nothing is drawn on it.

    **Safety.** Pages are read in another process with limits of time and memory. After a crash or a
    time-out the rest of that document is rejected, and the job goes on.

    **Revision.** A hash of the file's bytes, the page and the settings that change what is stored.
    """

    class Spec(config.ComponentSpec):
        """Options of the pages source.

        Attributes:
            path: a local path or an fsspec URI.
            collection: the name of what is read here; default: the last part of the path.
            dpi: pixels per inch of page images.
            max_pixels: a larger image is made smaller.
            max_file_bytes: Maximum size of a document, in bytes.
            limits: what reading a page may take.
        """

        name: Literal["pages"] = "pages"
        path: config.Uri
        collection: str = ""
        dpi: float = Field(144.0, ge=1, le=2400)
        max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
        max_file_bytes: int = Field(4 << 30, ge=1024)
        limits: Limits = Limits()

    gives = ("item_id", "text", "image", "scan")

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        if "scan" in wants:
            self.max_unit_items = SCANS_AT_ONCE
        self.payload = payload_schema(self.gives, wants)

    def check(self) -> None:
        """Checks that there are documents, and what reads them.

        Raises:
            MissingExtra: pypdfium2 is not installed.
            SpecError: There is no document.
        """
        extras.require("pypdfium2")
        fs, root = existing_root(self.spec.path)
        if not fs.isdir(root) and not root.lower().endswith(SUFFIX):
            rule = f"a folder, or a file that ends in {SUFFIX}"
            raise SpecError("path", self.spec.path, rule)
        if next(self._files(), ("", None)) == ("", None):
            raise SpecError(
                "path", self.spec.path, f"a folder with {SUFFIX} files", "contains none"
            )

    def shards(self) -> Iterator[dict[str, Any]]:
        """Groups of documents `{"files": [...]}`."""
        group: list[str] = []
        size = 0
        for file, num_bytes in self._files():
            if group and (
                len(group) == FILES_PER_SHARD or size + (num_bytes or 0) > BYTES_PER_SHARD
            ):
                yield {"files": group}
                group, size = [], 0
            group.append(file)
            size += num_bytes or 0
        if group:
            yield {"files": group}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Lists the pages of each document; one that cannot be opened is one reject."""
        for file in shard["files"]:
            yield from self._scan_file(file)

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Reads the wanted pages: text, title, metadata and the payload."""
        for document, group in itertools.groupby(items, lambda entry: entry[1].parent_id):
            pages = [item for _, item in group]
            yield from self._decode_document(document, pages)

    def picture(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """A page as a JPEG, with the resolution of the spec."""
        document, number = item["parent_id"], int(item["span"]["start"])
        settings = {**self._settings, "text": False, "image": True}
        with self._local(document) as path:
            (page,) = self._process.stream(1, "read_pages", path, [number], settings)
        if isinstance(page, Unreadable):
            raise page
        return page["image"]

    @property
    def _settings(self) -> dict[str, Any]:
        scans = "no text" if "scan" in self.wants else False
        return {
            "text": True,
            "image": "image" in self.wants or scans,
            "dpi": self.spec.dpi,
            "max_pixels": self.spec.max_pixels,
        }

    @property
    def _process(self) -> DecodingProcess:
        extras.require("pypdfium2")  # which the process would not find
        return decoding_process("pdf", self.spec.limits)

    @functools.cached_property
    def _folder(self) -> tuple[Any, str]:
        return folder_of(self.spec.path)

    def _files(self) -> Iterator[tuple[str, int | None]]:
        """(path relative to the folder, bytes) of all that is read."""
        return files_below(self.spec.path, (SUFFIX,))

    @contextmanager
    def _local(self, file: str) -> Iterator[str]:
        """A local path of a document; one that lies elsewhere is copied for as long as needed."""
        fs, folder = self._folder
        place = f"{folder}/{file}"
        check_regular(fs, place)
        most, size = self.spec.max_file_bytes, fs.size(place)
        if size is not None and size > most:
            raise Unreadable("too large", f"must be at most {most:,} bytes, got {size:,}")
        if isinstance(fs, LocalFileSystem):
            yield place
            return
        with tempfile.NamedTemporaryFile(suffix=SUFFIX) as copy:
            fs.get_file(place, copy.name)
            yield copy.name

    def _scan_file(self, file: str) -> Iterator[Item | Reject]:
        problem = item_id_problem(f"{file}#page=100000")
        content = ""
        try:
            if problem:
                raise Unreadable("bad id", problem)
            with self._local(file) as path:
                content = _content(path)
                about = self._process.call("describe", path)
        except (Unreadable, OSError) as error:
            revision = revision_of(self._shown, content) if content else ""
            yield self.reject(escaped(file), revision, error, "list")
            return
        for number in range(1, about["num_pages"] + 1):
            yield Item(
                item_id=f"{file}#page={number}",
                parent_id=file,
                source=self.collection,
                modality="page",
                revision=revision_of([self._shown, number], content),
                span=("page", number, number),
                title=about["title"],
            )

    @property
    def _shown(self) -> list[float]:
        """The options that change what is decoded."""
        return [self.spec.dpi, self.spec.max_pixels] if "image" in self.wants else []

    def content_of(self, item: dict[str, Any]) -> str:
        """What the item's document holds now."""
        with self._local(item["parent_id"]) as path:
            return config.digest(_content(path))

    def _decode_document(self, document: str, items: Sequence[Item]) -> Iterator[Item | Reject]:
        numbers = [int(item.span[1]) for item in items if item.span]
        given = 0
        try:
            with self._local(document) as path:
                pages = self._process.stream(
                    len(numbers), "read_pages", path, numbers, self._settings
                )
                for item, page in zip(items, pages, strict=True):
                    yield self._item(item, page)
                    given += 1
        except (Unreadable, OSError) as error:  # of the storage
            for item in items[given:]:
                yield self.reject(item.item_id, item.revision, error, "decode")

    def _item(self, item: Item, page: dict[str, Any] | Unreadable) -> Item | Reject:
        if isinstance(page, Unreadable):
            return self.reject(item.item_id, item.revision, page, "decode")
        text = page["text"]
        image = page.get("image")
        if not text and not image:
            reason = "no text layer" if page["num_objects"] else "empty page"
            return self.reject(item.item_id, item.revision, Unreadable(reason), "decode")
        width, height = page["size"]
        metadata = {"label": page["label"], "width": width, "height": height}
        there = {**page, "scan": None if text else image}
        payload = {name: there[name] for name in self.payload.names}
        return replace(item, text=text or None, metadata=metadata, payload=payload)


def _content(path: str) -> str:
    """A hash of a document's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()

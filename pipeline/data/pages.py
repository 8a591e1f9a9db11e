"""Source of PDF documents, which are divided into pages."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO, Literal

from pydantic import Field

from pipeline import config
from pipeline.data.base import ItemSize, Source, make_revision
from pipeline.data.decode import Unreadable
from pipeline.data.decode.process import DecodingProcess, Limits, check_decoder, decoding_process
from pipeline.data.decode.untrusted import check_regular, open_file
from pipeline.data.files import (
    check_suffix,
    escape,
    existing_root,
    file_state,
    find_files,
    first_file,
    local_copy,
    resolve_folder,
)
from pipeline.schema import Item, Reject, item_id_problem, payload_schema

SUFFIX = ".pdf"
#: A shard is listed by one task, which reads its files. Other tasks read its pages.
FILES_PER_SHARD = 1024
BYTES_PER_SHARD = 256 << 20
#: Size of the JPEG file of a page per pixel, in bytes.
BYTES_PER_PIXEL = 0.25
#: Maximum number of pages per unit if their text is recognised, which takes seconds per page.
#: Small units make progress visible and are committed earlier.
MAX_UNIT_SCANS = 16


class Pages(Source["Pages.Spec"]):
    """The pages of PDF documents, one item per page. The parent of an item is the document.

    `path` is a folder that contains .pdf files at any depth, or a single .pdf file.

    **Ids.** The id of a document is its path relative to `path`. The id of a page is
    `<document>#page=<number>`, with numbers from 1; as part of a URL it opens the page in a
    browser.

    **Content.** What a reader displays: form fields with their values and other visible annotations
    are a part of the text and of the image. Hidden fields and pop-up notes are not.

    **Text.** The text layer in reading order. Blocks of lines are ordered by recursive cuts along
    the white space between columns and paragraphs. Payload for encoders that read text:
    `word_spans`, the characters of each word in the text, and `word_boxes`, the box x0 y0 x1 y1 of
    each word in [0, 1] of the page as displayed (rotated, and clipped to its crop box). A
    hyphenated word has two boxes.

    A text layer in which hardly any character is a letter or a digit is ignored. It comes from a
    font without a map to Unicode.

    **Images.** Payload `image`, a JPEG, only for encoders that read it. Payload `scan`, the image
    of a page whose text layer does not replace OCR, for encoders that recognise text: a page
    without text, or a page that images cover and that has only a few words, such as the stamp of a
    scan. For these encoders a page without text is an item; for others it is rejected with the
    reason `no text layer`, or `empty page` if nothing is drawn on it.

    **Isolation.** Pages are read in a separate process with limits of time and memory. After a
    crash or timeout, the remaining pages of the document are rejected and the job continues. Any
    other error rejects a single page.

    **Revision.** A hash of the content of the file, the page number and the options that affect the
    stored content.
    """

    class Spec(config.ComponentSpec):
        """Options of the pages source."""

        name: Literal["pages"] = "pages"
        path: config.Uri
        """Local path or fsspec URI."""
        collection: str = ""
        """Name of the collection. Defaults to the last part of the path."""
        dpi: float = Field(144.0, ge=1, le=2400)
        """Resolution of page images, in pixels per inch."""
        max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
        """Maximum size of a page image, in pixels. Larger images are scaled down."""
        max_file_bytes: int = Field(4 << 30, ge=1024)
        """Maximum size of a document, in bytes."""
        limits: Limits = Limits()
        """Limits of time and memory per page."""

    provides = ("item_id", "text", "image", "scan")

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        if "scan" in wants:
            self.max_unit_items = MAX_UNIT_SCANS
        self.payload = payload_schema(self.provides, wants)

    @property
    def stores_listing(self) -> bool:
        """Returns True, because listing hashes and opens all documents."""
        return True

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the estimated size of the image of a page."""
        has_image = bool({"image", "scan"} & set(self.payload.names))
        return ItemSize(int(BYTES_PER_PIXEL * self.spec.max_pixels) if has_image else 0)

    def check(self) -> None:
        """Checks that the source contains documents and that the PDF library is installed."""
        check_decoder("pdf")
        fs, root = existing_root(self.spec.path)
        check_suffix(fs, root, self.spec.path, (SUFFIX,))
        first_file(self._files(), self.spec.path, f"a folder with {SUFFIX} files")

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields groups of documents `{"files": [...]}`."""
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
        """Yields the pages of each document. A document that cannot be opened is one reject."""
        for file in shard["files"]:
            yield from self._scan_file(file)

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Yields pages with their text, title, metadata and payload."""
        for document, group in itertools.groupby(items, lambda entry: entry[1].parent_id):
            pages = [item for _, item in group]
            yield from self._decode_document(document, pages)

    def preview_image(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """Renders a page as a JPEG file with the resolution of the spec."""
        document, number = item["parent_id"], int(item["span"]["start"])
        settings = {**self._settings, "text": False, "image": True, "scan": False}
        with self._local_path(document) as path:
            (page,) = self._process.stream(1, "read_pages", path, [number], settings)
        if isinstance(page, Unreadable):
            raise page
        return page["image"]

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "text": True,
            "image": "image" in self.wants,
            "scan": "scan" in self.wants,
            "dpi": self.spec.dpi,
            "max_pixels": self.spec.max_pixels,
        }

    @property
    def _process(self) -> DecodingProcess:
        return decoding_process("pdf", self.spec.limits)

    @functools.cached_property
    def _folder(self) -> tuple[Any, str]:
        return resolve_folder(self.spec.path)

    def _files(self) -> Iterator[tuple[str, int | None]]:
        """Yields the path relative to the folder and the size in bytes of all documents."""
        return find_files(self.spec.path, (SUFFIX,))

    @contextmanager
    def _local_path(self, file: str) -> Iterator[str]:
        """Context manager for a local path of a document, which may be a temporary copy."""
        fs, folder = self._folder
        path_in_fs = f"{folder}/{file}"
        check_regular(fs, path_in_fs)
        max_bytes, size = self.spec.max_file_bytes, fs.size(path_in_fs)
        if size is not None and size > max_bytes:
            raise Unreadable("too large", f"must be at most {max_bytes:,} bytes, got {size:,}")
        with local_copy(fs, path_in_fs, SUFFIX) as path:
            yield path

    def _scan_file(self, file: str) -> Iterator[Item | Reject]:
        problem = item_id_problem(f"{file}#page=100000")
        content = ""
        try:
            if problem:
                raise Unreadable("bad id", problem)
            with self._local_path(file) as path:
                content = _content(path)
                info = self._process.call("describe", path)
        except (Unreadable, OSError) as error:
            revision = make_revision(self._decoding_options, content) if content else ""
            yield self.reject(escape(file), revision, error, "list")
            return
        for number in range(1, info["num_pages"] + 1):
            yield Item(
                item_id=f"{file}#page={number}",
                parent_id=file,
                source=self.collection,
                modality="page",
                revision=make_revision([self._decoding_options, number], content),
                span=("page", number, number),
                title=info["title"],
            )

    @property
    def _decoding_options(self) -> list[float]:
        return [self.spec.dpi, self.spec.max_pixels] if "image" in self.wants else []

    def read_content_hash(self, item: dict[str, Any]) -> str:
        """Returns the hash of the current content of the document to which an item belongs."""
        with self._local_path(item["parent_id"]) as path:
            return config.digest(_content(path))

    def file_state(self, item: dict[str, Any]) -> Any:
        """Returns a value that changes whenever the document of an item is written."""
        fs, folder = self._folder
        return file_state(fs, f"{folder}/{item['parent_id']}")

    @contextmanager
    def open_file(self, item: dict[str, Any]) -> Iterator[tuple[BinaryIO, int, int]]:
        """Opens the document of an indexed item."""
        fs, folder = self._folder
        with open_file(fs, f"{folder}/{item['parent_id']}") as stream:
            yield stream, 0, stream.seek(0, 2)

    def _decode_document(self, document: str, items: Sequence[Item]) -> Iterator[Item | Reject]:
        numbers = [int(item.span[1]) for item in items if item.span]
        num_done = 0
        try:
            with self._local_path(document) as path:
                pages = self._process.stream(
                    len(numbers), "read_pages", path, numbers, self._settings
                )
                for item, page in zip(items, pages, strict=True):
                    yield self._item(item, page)
                    num_done += 1
        except (Unreadable, OSError) as error:  # the storage may fail, too
            for item in items[num_done:]:
                yield self.reject(item.item_id, item.revision, error, "decode")

    def _item(self, item: Item, page: dict[str, Any] | Unreadable) -> Item | Reject:
        if isinstance(page, Unreadable):
            return self.reject(item.item_id, item.revision, page, "decode")
        text = page["text"]
        image = page.get("image")
        if not text and not image:
            reason = "no text layer" if page["num_objects"] else "empty page"
            detail = (
                "the characters of the text layer have no meaning" if page["is_garbled"] else ""
            )
            return self.reject(item.item_id, item.revision, Unreadable(reason, detail), "decode")
        width, height = page["size"]
        metadata = {"label": page["label"], "width": width, "height": height}
        columns = {**page, "scan": image if page["needs_ocr"] else None}
        payload = {name: columns[name] for name in self.payload.names}
        return replace(item, text=text or None, metadata=metadata, payload=payload)


def _content(path: str) -> str:
    """Returns a hash of the bytes of a document."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()

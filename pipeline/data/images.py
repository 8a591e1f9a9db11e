"""The source of images with optional captions."""

from __future__ import annotations

import contextlib
import functools
import io
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.data import manifests
from pipeline.data.base import ItemSize
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import open_file
from pipeline.data.files import escape, existing_root, open_root
from pipeline.data.manifests import MalformedEntry, ManifestEntry, Table, to_json_value
from pipeline.data.media import (
    ARCHIVE,
    SIDECARS,
    ZIP,
    ByteStream,
    MediaFile,
    MediaSource,
    MediaSpec,
    Member,
)
from pipeline.data.text import parse_line
from pipeline.data.zip_members import zip_members
from pipeline.paths import is_uri
from pipeline.schema import Item, Reject, item_id_problem

IMAGE_FIELDS = ("image", "file_name", "path")
CAPTION_FIELDS = ("captions", "caption", "text")
CAPTION_SUFFIXES = (".txt", ".caption")
#: Names of texts in archives that are no captions, without the suffix.
DOCUMENTATION = ("readme", "license", "licence", "notice", "changelog")
#: Maximum number of images per unit if their text is recognised, which takes seconds per image.
#: Small units make progress visible and are committed earlier.
MAX_UNIT_SCANS = 8
#: Suffixes of files that may have several pages.
PAGED_SUFFIXES = (".tif", ".tiff")
#: Size of an image of unknown size in memory, in bytes.
UNKNOWN_BYTES = 1 << 20
#: Metadata fields that locate the file of an item. Manifest fields with these names are renamed.
RESERVED = ("file", "bytes", "row", "deflated")


class Images(MediaSource["Images.Spec"]):
    """Images, one item each, with optional captions.

    `path` is a folder that contains images, tar archives (WebDataset) and ZIP archives of images,
    and Parquet files whose rows contain images, at any depth; or a single such file; or a
    manifest.

    **Manifests.** JSON lines and Parquet files with one image per row. `image`, `file_name` or
    `path` is the name of the file, relative to the folder of the manifest or to `images`; in
    Parquet files it may contain the bytes (a binary column, or `struct<bytes, path>`). The id is
    `_id`, `id` or the name of the file. `captions` (or `caption`, or `text`) is a string or a list
    of strings, and `title` a string. All other fields except bytes become metadata. A .json file is
    a list of such rows, or a file in the format of COCO (captions in the order of the file; other
    annotations are ignored) or Karpathy (the id is `cocoid`, or the name of the file without
    suffix).

    **Ids.** The path of a file relative to `path`, or the key of an archive member: see
    `MediaSource`.

    **Captions.** In archives, captions are the lines of the .txt or .caption file of the sample, or
    the captions of its .json file, whose other fields become metadata. The item's `caption` has one
    caption per line. `leave_out_caption` excludes one of them, for evaluations that use it as the
    query.

    **Images.** Payload `image` and `scan`, the same bytes, for encoders that read them: upright,
    RGB, at most `max_pixels`. Only the first frame of an animation is used (`frames` in the
    metadata). For other encoders, images are neither decoded nor checked.

    **Pages.** Each page of a multi-page TIFF file (.tif, .tiff) is an item with the id
    `<file>#page=<number>`, with numbers from 1. The parent is the file. Thumbnails and masks are
    not pages.

    **Revision.** A hash of the file, its captions and metadata, and the options.
    """

    class Spec(MediaSpec):
        """Options of the images source."""

        name: Literal["images"] = "images"
        images: config.Uri | None = None
        """Folder or ZIP archive of the files named by a manifest. Defaults to the folder of the
        manifest."""
        id_field: str | None = None
        """Manifest field with the id. Defaults to `_id` if present, else `id`."""
        max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
        """Maximum size of an image, in pixels. Larger images are scaled down."""
        max_input_pixels: int = Field(200_000_000, ge=10_000, le=1_000_000_000)
        """Images that declare more pixels are rejected before decoding."""
        leave_out_caption: int | None = Field(None, ge=0)
        """Number of the caption to exclude, from 0."""
        max_file_bytes: int = Field(1 << 30, ge=1024)
        """Maximum size of an image file, in bytes. Files are read into memory."""

    provides: ClassVar[tuple[str, ...]] = ("item_id", "image", "scan", "caption")
    suffixes = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
    containers: ClassVar[tuple[str, ...]] = (ARCHIVE, ZIP, manifests.TABLE_SUFFIX)
    lists = (*manifests.LINES_SUFFIXES, manifests.JSON_SUFFIX)
    module = "image"
    files_per_shard = 10_000
    decodes_to_list = False

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        self._table: Table | None = None  # open during listing and decoding of a shard

    @property
    def _columns(self) -> list[str]:
        """Payload columns with the image."""
        return [name for name in self.payload.names if name in ("image", "scan")]

    def decodes_file_to_list(self, file: MediaFile) -> bool:
        """Returns True if the file may have several pages."""
        return file.suffix in PAGED_SUFFIXES

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """Returns the maximum number of items of a shard per unit."""
        return MAX_UNIT_SCANS if "scan" in self.wants else self.max_unit_items

    def item_size(self, shard: dict[str, Any], item: Item) -> ItemSize:
        """Returns the size of an image, which is passed to the encoder as a file."""
        size = super().item_size(shard, item)
        if not self._columns:
            return size
        num_bytes = (item.handle or {}).get("size") or UNKNOWN_BYTES
        if item.span:  # a page, which is encoded as JPEG
            num_bytes = min(num_bytes, self.spec.max_pixels)
        return size._replace(num_bytes=size.num_bytes + num_bytes)

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the stored content. The locations of files do not."""
        settings = super().settings()
        excluded = {"images", "id_field"}
        if not self._columns:
            excluded |= {"max_pixels", "max_input_pixels"}
        return {name: value for name, value in settings.items() if name not in excluded}

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read."""
        super().check()
        fs, root = existing_root(self.spec.path)
        is_manifest = root.lower().endswith((manifests.TABLE_SUFFIX, *self.lists))
        if fs.isdir(root) or not is_manifest:
            if self.spec.images:
                rule = "null unless `path` is a manifest"
                raise SpecError("images", self.spec.images, rule)
            return
        if fs.size(root) == 0:
            raise SpecError("path", self.spec.path, "a manifest of at least one row", "is empty")
        if self.spec.images:
            fs, folder = existing_root(self.spec.images, "images")
            if not fs.isdir(folder) and not folder.lower().endswith(ZIP):
                rule = "a folder or a ZIP archive"
                raise SpecError("images", self.spec.images, rule, "is another file")

    def container_shards(self, container: str, num_bytes: int | None) -> Iterator[dict[str, Any]]:
        """Yields the shards of an archive or a manifest."""
        if container.lower().endswith((ARCHIVE, ZIP)):
            yield from super().container_shards(container, num_bytes)
        else:
            yield from manifests.shards(*self._folder, container, num_bytes)

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the images of a shard."""
        if "manifest" not in shard:
            yield from super().list_files(shard)
            return
        rows = self._table_rows(shard) if "rows" in shard else None
        for row in rows or manifests.read(*self._folder, shard):
            if isinstance(row, MalformedEntry):
                yield self.reject(escape(row.location), "", row.problem, "list")
                continue
            fields = dict(row.fields)
            data, name = _take_image(fields)
            item_id = self._id(fields)
            if item_id is None and not self.spec.id_field:
                item_id = name or row.location()
            try:
                if problem := item_id_problem(item_id):
                    raise Unreadable("bad id", f"{item_id!r}: {problem}")
                annotation = _parse_fields(fields)
                if row.number is not None and data is not None:
                    path, size, number = shard["manifest"], len(data), row.number
                elif name:
                    found = self._find(name, shard["manifest"])
                    yield replace(found, id=item_id, annotation=annotation)
                    continue
                else:
                    raise Unreadable("no image", f"none of {', '.join(IMAGE_FIELDS)} names one")
            except (Unreadable, OSError) as error:
                location = row.location() if item_id_problem(item_id) else item_id
                yield self.reject(escape(location), "", error, "list")
                continue
            suffix = PurePosixPath(name or "").suffix.lower()
            yield MediaFile(item_id, path, size, None, suffix, annotation=annotation, row=number)

    def _without_file(self, archive: str, key: str, members: list[Member]) -> Iterator[Reject]:
        if posixpath.basename(key).lower() not in DOCUMENTATION:
            for name in (member.name for member in members if member.suffix in SIDECARS):
                problem = Unreadable("no image", f"no image in {archive} is named {key}")
                yield self.reject(f"{archive}/{name}", "", problem, "list")

    def _table_rows(self, shard: dict[str, Any]) -> Iterator[ManifestEntry | MalformedEntry]:
        manifest = shard["manifest"]
        try:
            with self._open_table(manifest) as table:
                for number in range(*shard["rows"]):
                    location = f"{manifest}#row={number}"
                    try:
                        yield ManifestEntry(
                            functools.partial(str, location), table.row(number), number
                        )
                    except (Unreadable, OSError) as error:
                        yield MalformedEntry(location, error)
        except (Unreadable, OSError) as error:
            yield MalformedEntry(manifest, error)

    def _id(self, fields: dict[str, Any]) -> Any:
        """Removes the id from the fields of a manifest row and returns it, or None."""
        name = self.spec.id_field or ("_id" if "_id" in fields else "id")
        value = fields.pop(name, None)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number else value

    def _find(self, name: str, manifest: str) -> MediaFile:
        """Resolves the name of a file in a manifest, which must be inside the folder."""
        folder = "" if self.spec.images else posixpath.dirname(manifest)
        path = posixpath.normpath(posixpath.join(folder, name))
        if path.startswith(("/", "..")) or is_uri(name):
            location = "`images`" if self.spec.images else "the manifest's folder"
            raise Unreadable("bad path", f"{name!r}: expected a path below {location}")
        if self._zip is not None:
            if (found := self._zip.get(path)) is None:
                raise Unreadable("missing file", f"{path} is not in {self.spec.images}")
            return found
        fs, path_in_fs = self.resolve_path(MediaFile(name, path, None))
        try:
            info = fs.info(path_in_fs)
        except FileNotFoundError:
            raise Unreadable("missing file", f"{path} in {manifest} does not exist") from None
        if info["type"] == "other":
            raise Unreadable("not a regular file", f"{path} in {manifest} is a pipe or a device")
        if info["type"] != "file":
            raise Unreadable("missing file", f"{path} in {manifest} is a {info['type']}")
        return MediaFile(path, path, info["size"], suffix=PurePosixPath(path).suffix.lower())

    def list_items(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """Yields the item of an image, or one item per page."""
        annotation = file.annotation or _sidecars(file)
        captions = list(annotation.get("captions", ()))
        if self.spec.leave_out_caption is not None:
            del captions[self.spec.leave_out_caption : self.spec.leave_out_caption + 1]
        captions = [caption for caption in captions if caption]
        fields = annotation.get("fields", {})
        metadata = {f"own_{k}" if k in RESERVED else k: v for k, v in fields.items()}
        if captions:
            metadata["num_captions"] = len(captions)
        item = Item(
            item_id=file.id,
            parent_id=file.id,
            source=self.collection,
            modality="image",
            revision=revision,
            title=annotation.get("title"),
            caption="\n".join(captions) or None,
            metadata=metadata,
        )
        num_pages = self.process.call("count_pages", path)["num_pages"] if path else 1
        if num_pages == 1:
            yield item
            return
        for number in range(1, num_pages + 1):
            item_id, span = f"{file.id}#page={number}", ("page", number, number)
            yield replace(item, item_id=item_id, span=span)

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes images if the encoder reads them."""
        if not self._columns:
            yield from (item for _, item in items)
            return
        with contextlib.ExitStack() as stack:
            if "rows" in shard:
                with contextlib.suppress(Unreadable, OSError):  # raised again for each item
                    stack.enter_context(self._open_table(shard["manifest"]))
            yield from super().decode(shard, items)

    def decode_file(self, file: MediaFile, path: str, items: Sequence[Item]) -> Iterator[Any]:
        """Yields the requested images or pages of a file with their payload."""
        pages = [item.span and int(item.span[1]) for item in items]
        for item, page, result in zip(items, pages, self._read(path, pages), strict=True):
            if isinstance(result, Unreadable):
                yield result
                continue
            info = {"width": result["width"], "height": result["height"]}
            if result["frames"] > 1 and page is None:
                info["frames"] = result["frames"]
            payload = dict.fromkeys(self._columns, result["image"])
            if item.text and "scan" in payload:
                payload["scan"] = None  # needs no OCR
            yield replace(item, metadata={**(item.metadata or {}), **info}, payload=payload)

    def preview_image(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """Returns the image of an indexed item as an upright JPEG, PNG or WebP file."""
        file = self.find_file(item["parent_id"], item["metadata"] or {})
        page = int(item["span"]["start"]) if item.get("span") else None
        with self.local_path(file) as path:
            (result,) = self._read(path, [page])
        if isinstance(result, Unreadable):
            raise result
        return result["image"]

    def _read(
        self, path: str, pages: Sequence[int | None] = (None,)
    ) -> Iterator[dict[str, Any] | Unreadable]:
        names = ("max_pixels", "max_input_pixels")
        settings = {name: getattr(self.spec, name) for name in names}
        return self.process.stream(len(pages), "read_image", path, pages, settings)

    # -- locations of files ------------------------------------------------------------------

    @functools.cached_property
    def _images(self) -> tuple[Any, str] | None:
        """File system and folder of the images, or None if they are next to the manifest."""
        return None if self.spec.images is None else open_root(self.spec.images)

    @functools.cached_property
    def _zip(self) -> dict[str, MediaFile] | None:
        """Members of the ZIP archive of the images by name, or None if they are in a folder."""
        if self._images is None or not self._images[1].lower().endswith(ZIP):
            return None
        fs, archive = self._images
        name = PurePosixPath(archive).name
        with open_file(fs, archive) as stream:
            return {
                member.name: MediaFile(
                    member.name,
                    name,
                    member.size,
                    member.offset,
                    PurePosixPath(member.name).suffix.lower(),
                    deflated=member.deflated,
                )
                for member in zip_members(stream)
                if not member.problem
            }

    def resolve_path(self, file: MediaFile) -> tuple[Any, str]:
        """Returns the file system and the path of an image or of the table that contains it."""
        if file.row is not None or self._images is None:
            return super().resolve_path(file)
        if self._images[1].lower().endswith(ZIP):
            return self._images
        fs, folder = self._images
        return fs, f"{folder}/{file.path}"

    @contextlib.contextmanager
    def _open(self, file: MediaFile) -> Iterator[ByteStream]:
        if file.row is None:
            with super()._open(file) as stream:
                yield stream
            return
        with self._open_table(file.path) as table:
            data, _ = _take_image(table.row(file.row))
        yield io.BytesIO(data or b"")

    @contextlib.contextmanager
    def _open_table(self, path: str) -> Iterator[Table]:
        """Opens a table. Nested calls share it, because tables are read in ascending order."""
        fs, folder = self._folder
        if self._table is not None and self._table.path == f"{folder}/{path}":
            yield self._table
            return
        with Table(fs, f"{folder}/{path}") as table:
            previous, self._table = self._table, table
            try:
                yield table
            finally:
                self._table = previous


def _take_image(fields: dict[str, Any]) -> tuple[bytes | None, str | None]:
    """Removes the image from the fields of a row. Returns its bytes and its name.

    >>> _take_image({"image": {"bytes": b"x", "path": "a.jpg"}}), _take_image({"path": "b"})
    ((b'x', 'a.jpg'), (None, 'b'))
    """
    field = next((name for name in IMAGE_FIELDS if fields.get(name) is not None), None)
    value = fields.pop(field) if field else None
    data, name = value, value
    if isinstance(value, Mapping):
        data, name = value.get("bytes"), value.get("path")
    return data if isinstance(data, bytes) else None, name if isinstance(name, str) else None


def _sidecars(file: MediaFile) -> dict[str, Any]:
    """Reads the captions, the title and the metadata from the text files of a sample."""
    annotation: dict[str, Any] = {}
    if ".json" in file.sidecars:
        try:
            fields = parse_line(file.sidecars[".json"].encode())
        except ValueError as error:
            raise Unreadable("corrupted sidecar", f".json: {error}") from None
        if not isinstance(fields, dict):
            problem = f".json: must be an object, got a {type(fields).__name__}"
            raise Unreadable("corrupted sidecar", problem)
        annotation = _parse_fields(fields)
    for suffix in CAPTION_SUFFIXES:
        if suffix in file.sidecars:
            lines = file.sidecars[suffix].splitlines()
            return {**annotation, "captions": [" ".join(line.split()) for line in lines]}
    return annotation


def _parse_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Splits the fields of a row into `captions`, `title` and other `fields`.

    >>> _parse_fields({"caption": " A  cat. ", "title": "Cats", "licence": 4})
    {'captions': ['A cat.'], 'title': 'Cats', 'fields': {'licence': 4}}
    """
    fields = dict(fields)
    name = next((name for name in CAPTION_FIELDS if fields.get(name) is not None), None)
    captions = fields.pop(name) if name else []
    captions = [captions] if isinstance(captions, str) else captions
    title = fields.pop("title", None)
    if not isinstance(captions, list) or not all(isinstance(text, str) for text in captions):
        raise Unreadable("caption is not a string", f"field {name}")
    if not isinstance(title, str | None):
        raise Unreadable("title is not a string", f"field title: {type(title).__name__}")
    captions = [" ".join(text.split()) for text in captions]
    return {"captions": captions, "title": title or None, "fields": to_json_value(fields)}

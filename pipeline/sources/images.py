"""Photographs and other pictures, with captions where there are some."""

from __future__ import annotations

import contextlib
import functools
import io
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.schema import Item, Reject, item_id_problem
from pipeline.sources import manifests
from pipeline.sources.files import escaped, existing_root, open_root
from pipeline.sources.manifests import MalformedEntry, ManifestEntry, Table, plain
from pipeline.sources.media import ARCHIVE, ByteStream, MediaFile, MediaSource, MediaSpec
from pipeline.sources.text import parse_line

PICTURE_FIELDS = ("image", "file_name", "path")
CAPTION_FIELDS = ("captions", "caption", "text")
CAPTION_SUFFIXES = (".txt", ".caption")
#: Recognising their text takes seconds each: what is done shows, and is committed, sooner.
SCANS_AT_ONCE = 8
#: Of a few megabytes each.
PICTURES_AT_ONCE = 64
#: What finds a stored item's file again: a manifest's fields of these names get another one.
RESERVED = ("file", "bytes", "row")


class Images(MediaSource["Images.Spec"]):
    """Pictures: one item each, with what was said of it as its caption.

    `path` is a folder, at any depth, with pictures, with tar archives of them (WebDataset), and
    with Parquet files whose rows hold them; or one such file; or a manifest, which only it names.

    **Manifests.** JSON lines and Parquet, a row a picture: `image`, `file_name` or `path` names the
    file, below the manifest's folder or `images`; in Parquet it may hold the bytes (a column of
    bytes, or `struct<bytes, path>`). `_id` or `id` is the id, else the file's name. `captions` (or
    `caption`, or `text`) is a string or a list of them; `title` a string; all other fields are kept
    as metadata (bytes are not). A .json file is a list of such rows, COCO's form (the id is that of
    the image, captions in the file's order, other annotations are not read), or Karpathy's (the id
    is `cocoid`, or the file's name without suffix where there is none).

    **Ids.** Of a file its path below `path`, of an archive's member its key: see `MediaSource`.

    **Captions.** In an archive the lines of the sample's .txt or .caption, or the captions of its
    .json, whose other fields become metadata. The item's `caption` has one a line. With
    `leave_out_caption` one of them is held back: it is the query for the picture, and must not be
    found in it.

    **Pictures.** Payload `image` and `scan`, the same bytes, for encoders that want them: upright,
    RGB, no larger than `max_pixels`; the first frame of several (`frames` in the metadata). For
    others nothing is decoded, and what the file holds is not checked.

    **Revision.** A hash of the file, of all that is said of it, and of the options.
    """

    class Spec(MediaSpec):
        """Options of the images source.

        Attributes:
            images: the folder of the files that a manifest names; default: the manifest's own.
            id_field: the field of a row's id; None = `_id`, or `id` where there is no `_id`.
            max_pixels: a larger picture is made smaller.
            max_input_pixels: a picture that claims more is rejected before it is decoded.
            leave_out_caption: the number, from 0, of the caption that is held back.
            max_file_bytes: Maximum size of a picture's file, which is read as a whole, in bytes.
        """

        name: Literal["images"] = "images"
        images: config.Uri | None = None
        id_field: str | None = None
        max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
        max_input_pixels: int = Field(200_000_000, ge=10_000, le=1_000_000_000)
        leave_out_caption: int | None = Field(None, ge=0)
        max_file_bytes: int = Field(1 << 30, ge=1024)

    gives = ("item_id", "image", "scan", "caption")
    suffixes = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
    containers = (ARCHIVE, manifests.TABLE)
    lists = (*manifests.LINES, manifests.ONE_VALUE)
    module = "image"
    files_per_shard = 256
    opens_to_list = False

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        self._table: Table | None = None  # open while a shard is listed or decoded

    def unit_limit(self, shard: dict[str, Any]) -> int:
        """How many pictures may be in memory together; captions alone take next to none."""
        if "scan" in self.wants:
            return SCANS_AT_ONCE
        return PICTURES_AT_ONCE if self.payload.names else self.max_unit_items

    def settings(self) -> dict[str, Any]:
        """The options that change what is stored: not where files lie or what they are called."""
        settings = super().settings()
        left_out = {"images", "id_field"}
        if not self.payload.names:
            left_out |= {"max_pixels", "max_input_pixels"}
        return {name: value for name, value in settings.items() if name not in left_out}

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if there is nothing to read."""
        super().check()
        fs, root = existing_root(self.spec.path)
        is_manifest = root.lower().endswith((manifests.TABLE, *self.lists))
        if fs.isdir(root) or not is_manifest:
            if self.spec.images:
                rule = "null unless `path` is a manifest"
                raise SpecError("images", self.spec.images, rule)
            return
        if fs.size(root) == 0:
            raise SpecError("path", self.spec.path, "a manifest of at least one row", "is empty")
        if self.spec.images:
            try:
                fs, folder = existing_root(self.spec.images)
                if not fs.isdir(folder):
                    raise SpecError("path", self.spec.images, "a folder", "is a file")
            except SpecError as error:
                raise error.at("images") from None

    def shards_of(self, container: str, num_bytes: int | None) -> Iterator[dict[str, Any]]:
        """The shards of an archive or of a manifest."""
        if container.lower().endswith(ARCHIVE):
            yield from super().shards_of(container, num_bytes)
        else:
            yield from manifests.shards(*self._folder, container, num_bytes)

    def files_of(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """The pictures that a shard names; a row that names none is a reject."""
        if "manifest" not in shard:
            yield from super().files_of(shard)
            return
        rows = self._table_rows(shard) if "rows" in shard else None
        for row in rows or manifests.read(*self._folder, shard):
            if isinstance(row, MalformedEntry):
                yield self.reject(escaped(row.location), "", row.problem, "list")
                continue
            fields = dict(row.fields)
            data, name = _take_picture(fields)
            own = self._id(fields)
            own = (name or row.location()) if own is None and not self.spec.id_field else own
            try:
                if problem := item_id_problem(own):
                    raise Unreadable("bad id", f"{own!r}: {problem}")
                about = _about(fields)
                if row.number is not None and data is not None:
                    path, size, number = shard["manifest"], len(data), row.number
                elif name:
                    path, size = self._find(name, shard["manifest"])
                    number = None
                else:
                    raise Unreadable("no image", f"none of {', '.join(PICTURE_FIELDS)} names one")
            except (Unreadable, OSError) as error:
                location = row.location() if item_id_problem(own) else own
                yield self.reject(escaped(location), "", error, "list")
                continue
            suffix = PurePosixPath(name or "").suffix.lower()
            yield MediaFile(own, path, size, None, suffix, about=about, row=number)

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
        """Takes the id out of a row's fields; None if there is none."""
        name = self.spec.id_field or ("_id" if "_id" in fields else "id")
        value = fields.pop(name, None)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number else value

    def _find(self, name: str, manifest: str) -> tuple[str, int]:
        """Where a file that a manifest names lies, below the folder of the files; its bytes."""
        folder = "" if self.spec.images else posixpath.dirname(manifest)
        path = posixpath.normpath(posixpath.join(folder, name))
        if path.startswith(("/", "..")) or "://" in name:
            location = "`images`" if self.spec.images else "the manifest's folder"
            raise Unreadable("bad path", f"{name!r}: expected a path below {location}")
        fs, place = self.place_of(MediaFile(name, path, None))
        try:
            found = fs.info(place)
        except FileNotFoundError:
            found = {"type": "nothing"}
        if found["type"] == "other":
            raise Unreadable("not a regular file", f"{manifest} names {path}: a pipe or a device")
        if found["type"] != "file":
            raise Unreadable("missing file", f"{manifest} names {path}: {found['type']} there")
        return path, found["size"]

    def items_of(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """The one item of a picture."""
        about = file.about or _sidecars(file)
        captions = list(about.get("captions", ()))
        if self.spec.leave_out_caption is not None:
            del captions[self.spec.leave_out_caption : self.spec.leave_out_caption + 1]
        captions = [caption for caption in captions if caption]
        fields = about.get("fields", {})
        metadata = {f"own_{k}" if k in RESERVED else k: v for k, v in fields.items()}
        if captions:
            metadata["num_captions"] = len(captions)
        yield Item(
            item_id=file.id,
            parent_id=file.id,
            source=self.collection,
            modality="image",
            revision=revision,
            title=about.get("title"),
            caption="\n".join(captions) or None,
            metadata=metadata,
        )

    # -- decoding ----------------------------------------------------------------------------

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes the wanted pictures, if anybody wants to see them."""
        if not self.payload.names:
            yield from (item for _, item in items)
            return
        with contextlib.ExitStack() as stack:
            if "rows" in shard:
                with contextlib.suppress(Unreadable, OSError):  # each item will say why
                    stack.enter_context(self._open_table(shard["manifest"]))
            yield from super().decode(shard, items)

    def decode_file(self, file: MediaFile, path: str, items: Sequence[Item]) -> Iterator[Any]:
        """The item of a picture with its pixels, as often as it was listed."""
        (picture,) = self._read(path)
        if isinstance(picture, Unreadable):
            yield from (picture for _ in items)
            return
        about = {"width": picture["width"], "height": picture["height"]}
        if picture["frames"] > 1:
            about["frames"] = picture["frames"]
        payload = dict.fromkeys(self.payload.names, picture["image"])
        for item in items:
            yield replace(item, metadata={**(item.metadata or {}), **about}, payload=payload)

    def picture(self, item: dict[str, Any], seconds: float | None = None) -> bytes:
        """The picture of a stored item: upright, JPEG, PNG or WebP."""
        file = self.file_of(item["parent_id"], item["metadata"] or {})
        with self.local(file) as path:
            (picture,) = self._read(path)
        if isinstance(picture, Unreadable):
            raise picture
        return picture["image"]

    def _read(self, path: str) -> Iterator[dict[str, Any] | Unreadable]:
        names = ("max_pixels", "max_input_pixels")
        settings = {name: getattr(self.spec, name) for name in names}
        return self.process.stream(1, "read_picture", path, settings)

    # -- where files lie ---------------------------------------------------------------------

    @functools.cached_property
    def _images(self) -> tuple[Any, str] | None:
        """File system and folder of the images; None if they lie beside the captions."""
        return None if self.spec.images is None else open_root(self.spec.images)

    def place_of(self, file: MediaFile) -> tuple[Any, str]:
        """The file system of a picture and its path there; of the table, if that holds it."""
        if file.row is not None or self._images is None:
            return super().place_of(file)
        fs, folder = self._images
        return fs, f"{folder}/{file.path}"

    @contextlib.contextmanager
    def _open(self, file: MediaFile) -> Iterator[ByteStream]:
        if file.row is None:
            with super()._open(file) as stream:
                yield stream
            return
        with self._open_table(file.path) as table:
            data, _ = _take_picture(table.row(file.row))
        yield io.BytesIO(data or b"")

    @contextlib.contextmanager
    def _open_table(self, path: str) -> Iterator[Table]:
        """A table; inside another call for the same the one that is open, which reads forward."""
        fs, folder = self._folder
        if self._table is not None and self._table.path == f"{folder}/{path}":
            yield self._table
            return
        with Table(fs, f"{folder}/{path}") as table:
            before, self._table = self._table, table
            try:
                yield table
            finally:
                self._table = before


def _take_picture(fields: dict[str, Any]) -> tuple[bytes | None, str | None]:
    """Takes the picture out of a row's fields: its bytes, its name.

    >>> _take_picture({"image": {"bytes": b"x", "path": "a.jpg"}}), _take_picture({"path": "b"})
    ((b'x', 'a.jpg'), (None, 'b'))
    """
    field = next((name for name in PICTURE_FIELDS if fields.get(name) is not None), None)
    picture = fields.pop(field) if field else None
    data, name = picture, picture
    if isinstance(picture, Mapping):
        data, name = picture.get("bytes"), picture.get("path")
    return data if isinstance(data, bytes) else None, name if isinstance(name, str) else None


def _sidecars(file: MediaFile) -> dict[str, Any]:
    """What the texts beside an archive's member say of it."""
    about: dict[str, Any] = {}
    if ".json" in file.sidecars:
        try:
            fields = parse_line(file.sidecars[".json"].encode())
        except ValueError as error:
            raise Unreadable("damaged sidecar", f".json: {error}") from None
        if not isinstance(fields, dict):
            raise Unreadable("damaged sidecar", f".json: a {type(fields).__name__}, no object")
        about = _about(fields)
    for suffix in CAPTION_SUFFIXES:
        if suffix in file.sidecars:
            lines = file.sidecars[suffix].splitlines()
            return {**about, "captions": [" ".join(line.split()) for line in lines]}
    return about


def _about(fields: dict[str, Any]) -> dict[str, Any]:
    """`captions`, `title` and the other `fields` of a row.

    >>> _about({"caption": " A  cat. ", "title": "Cats", "licence": 4})
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
    return {"captions": captions, "title": title or None, "fields": plain(fields)}

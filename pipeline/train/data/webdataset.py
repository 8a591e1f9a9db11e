"""Training data of images with captions in WebDataset archives."""

from __future__ import annotations

import logging
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from pipeline.config import SpecError, reading
from pipeline.data.decode import Unreadable
from pipeline.data.text import parse_object
from pipeline.data.texts import decode
from pipeline.paths import open_file
from pipeline.train.data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.train.data.rows import Document, Listing, Row
from pipeline.train.data.tables import ArchiveMember, list_files

logger = logging.getLogger(__name__)
ARCHIVES = (".tar",)
IMAGES = ("jpg", "jpeg", "png", "webp")
#: Maximum size of a caption or of its metadata, in bytes.
MAX_CAPTION_BYTES = 1 << 20


@dataclass
class Sample:
    """Members of an archive with the same key.

    Attributes:
        key: Path of the members up to the first dot of the file name.
    """

    key: str
    image: ArchiveMember | None = None
    caption: bytes | None = None


class WebDataset(RowData["WebDataset.Spec"]):
    """Images as documents and their captions as queries, in the format of WebDataset.

    `path` is an uncompressed .tar archive, a folder of archives or a glob. The members of a sample
    have the same name up to the first dot, such as `0001.jpg` and `0001.txt`. Samples without an
    image or a caption are omitted, and a warning names the first of them. Archives are not
    unpacked: the listing has the position of each image, which is read when its batch is needed.
    The id of a document is `archive/key`.
    """

    class Spec(RowSpec):
        """Training data in WebDataset archives."""

        name: Literal["webdataset"] = "webdataset"
        caption: str = Field("txt", pattern=r"^\w+(\.\w+)*$")
        """Suffix of the members with the captions, or `json.FIELD` for a field of `<key>.json`."""

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads the samples of all archives."""
        listing, omitted = Listing(), list[str]()
        suffix, _, field = self.spec.caption.partition(".")
        is_field = suffix == "json" and field
        for archive in list_files(files.path, ARCHIVES):
            for sample in read_samples(archive, suffix if is_field else self.spec.caption):
                location = f"sample {sample.key} of {archive}"
                caption = _caption(sample.caption, field if is_field else "", location)
                if sample.image is None or not caption:
                    problem = "no image" if sample.image is None else "no caption"
                    omitted.append(f"{location} has {problem}")
                    continue
                name = f"{posixpath.basename(archive)}/{sample.key}"
                number = listing.add(Document(name, None, sample.image, location))
                listing.rows.append(Row(caption, number))
        if not listing.rows:
            rule = f"archives with samples of an image and a member .{self.spec.caption}"
            raise SpecError("path", files.path, rule, "have none")
        if omitted:
            logger.warning("%d samples are left out, such as: %s", len(omitted), omitted[0])
        return listing


def read_samples(archive: str, caption_suffix: str) -> Iterator[Sample]:
    """Yields the samples of an uncompressed archive in its order, without the images."""
    samples: dict[str, Sample] = {}
    with (
        reading("path", archive, "an uncompressed .tar archive", tarfile.TarError),
        open_file(archive) as stream,
        tarfile.open(fileobj=stream, mode="r:") as tar,
    ):
        for member in tar:
            folder, name = posixpath.split(member.name)
            stem, _, suffix = name.partition(".")
            if not member.isreg() or not suffix:
                continue
            key = posixpath.join(folder, stem)
            sample = samples.setdefault(key, Sample(key))
            if suffix.lower() in IMAGES:
                sample.image = ArchiveMember(archive, member.offset_data, member.size)
            elif suffix == caption_suffix and member.size <= MAX_CAPTION_BYTES:
                content = tar.extractfile(member)
                assert content is not None, "regular members have a content"
                sample.caption = content.read()
    yield from samples.values()


def _caption(content: bytes | None, field: str, location: str) -> str:
    """Returns the caption of a sample, or an empty string without one."""
    if content is None:
        return ""
    rule = f"a JSON object with the field {field}" if field else "text in UTF-8 or UTF-16"
    with reading("caption", location, rule, ValueError, Unreadable):
        value: Any = parse_object(content).get(field) or "" if field else decode(content)
    if not isinstance(value, str):
        raise SpecError("caption", location, rule, f"has {value!r}")
    return value.strip()

"""Training data of images with captions in the formats of COCO and Flickr30K."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pipeline.config import MissingField, SpecError, Uri
from pipeline.decoding import Unreadable
from pipeline.eval.boxes import NO_BOXES, Entities, Phrase, caption_phrases, read_coco_boxes
from pipeline.schema import is_blank
from pipeline.sources.annotations import read_file, read_json
from pipeline.sources.manifests import parse_rows
from pipeline.training_data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.training_data.rows import Document, Listing, Row


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """Image and its captions. The `location` is used in messages."""

    id: str
    file: str
    captions: list[str]
    location: str


class CaptionsValidationFiles(ValidationFiles):
    """Validation data in a file of the same format, or in splits of it."""

    splits: list[str] | None = None
    """Karpathy splits to validate on, or null for all."""


class Captions(RowData["Captions.Spec"]):
    """Images as documents and their captions as queries.

    `path` is COCO's captions JSON, Karpathy's JSON of COCO or Flickr30K, or for Flickr30K Entities
    a text file with one id per line, such as its train.txt. The id of a document is the image id in
    COCO (`id`, `cocoid`), or else the file name without suffix, as in the source `images`.

    **Boxes.** COCO instances belong to an image, independently of the captions. Boxes of Flickr30K
    Entities belong to the phrases of a caption. Phrases are ordered by their largest box. Boxes
    smaller than 0.005 of the image are ignored. Validation captions with phrases also measure
    grounding.
    """

    class Spec(RowSpec):
        """Training data from captioned images."""

        name: Literal["captions"] = "captions"
        images: Uri | None = None
        """Folder of the images, or null for that of `path`."""
        splits: list[str] | None = None
        """Karpathy splits to train on, such as [train, restval], or null for all."""
        instances: Uri | None = None
        """COCO instances JSON with boxes."""
        entities: Uri | None = None
        """Folder with `Sentences` and `Annotations` of Flickr30K Entities."""
        phrases: int = Field(4, ge=1)
        """Number of phrases per caption whose boxes are used, largest first."""
        validation: float | CaptionsValidationFiles | None = None
        """Validation data: a fraction of the documents with their queries, or {path: ..., splits:
        ...}; null for none."""

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads all captions of `path`."""
        assert isinstance(files, Captions.Spec | CaptionsValidationFiles)
        spec, uri, listing = self.spec, files.path, Listing()
        folder = spec.images or posixpath.dirname(uri)
        boxes = {}
        if spec.instances is not None:
            boxes = read_coco_boxes(read_json(spec.instances, "instances"), spec.instances)
        entities = None if spec.entities is None else Entities(spec.entities)
        for image in self._images(uri, files.splits, entities):
            file = posixpath.join(folder, image.file)
            image_boxes = boxes.get(image.id, NO_BOXES)
            number = listing.add(Document(image.id, None, file, image.location, image_boxes))
            phrases_per_caption = (
                image_phrases(image, entities) if entities else [[]] * len(image.captions)
            )
            for caption, phrases in zip(image.captions, phrases_per_caption, strict=True):
                largest = [boxes for _, boxes in phrases[: spec.phrases]]
                row_boxes = np.concatenate(largest) if largest else NO_BOXES
                listing.rows.append(Row(caption, number, boxes=row_boxes, phrases=tuple(phrases)))
        if not listing.rows:
            raise SpecError("path", uri, "a file with at least one caption", "has no captions")
        return listing

    def _images(
        self, uri: str, splits: list[str] | None, entities: Entities | None
    ) -> Iterator[CaptionedImage]:
        if uri.endswith(".txt"):
            yield from _read_ids(uri, entities)
            return
        value = read_json(uri, "path")
        try:
            rows = parse_rows(value)
        except Unreadable as error:
            rule = "COCO's {images, annotations} or Karpathy's {images: [{sentences}]}"
            raise SpecError("path", uri, rule, f"has another format ({error.detail})") from None
        names = sorted({str(row["split"]) for row in rows if "split" in row})
        for split in splits or ():
            if split not in names:
                problem = f"is not a split of {uri}"
                raise SpecError.unknown_name("splits", split, names, problem)
        for number, row in enumerate(rows):
            if splits is None or row.get("split") in splits:
                yield _captioned(row, f"image {row.get('id', number)} of {uri}")


def _captioned(row: Mapping[str, Any], location: str) -> CaptionedImage:
    name, captions = row.get("file_name"), row.get("captions", [])
    if not isinstance(name, str) or not name:
        raise SpecError("path", name, "a file name in file_name", note=f" ({location})")
    for caption in captions:
        if not isinstance(caption, str) or is_blank(caption):
            rule = "a text with at least one word"
            raise SpecError("path", caption, rule, note=f" (a caption of {location})")
    image_id = row.get("id", PurePosixPath(name).stem)
    return CaptionedImage(str(image_id), name, [caption.strip() for caption in captions], location)


def _read_ids(uri: str, entities: Entities | None) -> Iterator[CaptionedImage]:
    """Yields the images of a list of ids, with the captions of the entities."""
    if entities is None:
        rule = "a folder of Flickr30K Entities with the captions of the ids in `path`"
        raise MissingField("entities", None, rule)
    for number, line in enumerate(read_file(uri, "path").decode("utf-8-sig").splitlines(), start=1):
        if image_id := line.strip():
            captions = [text for text, _ in entities.read(image_id)]
            yield CaptionedImage(image_id, f"{image_id}.jpg", captions, f"line {number} of {uri}")


def image_phrases(image: CaptionedImage, entities: Entities) -> list[list[Phrase]]:
    """Returns the phrases of each caption of an image."""
    return caption_phrases(PurePosixPath(image.file).stem, image.captions, entities)

"""Pictures with captions, and boxes of what they speak of: COCO, Flickr30K and its Entities."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pipeline.config import MissingField, SpecError, Uri
from pipeline.decoding import Unreadable
from pipeline.sources.files import existing_root
from pipeline.sources.manifests import rows_of_value
from pipeline.sources.text import parse_line
from pipeline.training_data.boxes import Entities, Phrase, of_coco
from pipeline.training_data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.training_data.rows import NO_BOXES, Document, Listing, Row


@dataclass(frozen=True, slots=True)
class Captioned:
    """A picture and what is said of it; `location` names it in messages."""

    id: str
    file: str
    captions: list[str]
    location: str


class CaptionsValidationFiles(ValidationFiles):
    """A file of the same form, or splits of one."""

    splits: list[str] | None = None
    """Splits of the file; null: all."""


class Captions(RowData["Captions.Spec"]):
    """Pictures as documents, their captions as queries.

    `path` is COCO's JSON of captions; Karpathy's JSON of COCO or Flickr30K; or for Flickr30K
    Entities a text of ids, one a line, as its train.txt. A document's id is the picture's in COCO
    (`id`, `cocoid`), else the file's name without suffix, as the source `images` has it.

    **Boxes.** COCO's instances are of a picture, whatever is said of it. Those of Flickr30K
    Entities are of the phrases of a caption: of the largest, by the largest box of each. Shares of
    the picture below 0.005 are left out. Held-out captions with phrases also measure grounding.
    """

    class Spec(RowSpec):
        """Which files.

        Attributes:
            path: .json, or .txt with ids.
            images: the folder of the pictures; null: that of `path`.
            splits: which of Karpathy's splits, such as [train, restval]; null: all.
            instances: COCO's JSON of instances, with boxes.
            entities: a folder with `Sentences` and `Annotations` of Flickr30K Entities.
            phrases: so many of a caption's phrases have their boxes.
        """

        name: Literal["captions"] = "captions"
        images: Uri | None = None
        splits: list[str] | None = None
        instances: Uri | None = None
        entities: Uri | None = None
        phrases: int = Field(4, ge=1)
        validation: float | CaptionsValidationFiles | None = None

    def listing(self) -> Listing:
        """All captions of `path`."""
        return self._list(self.spec.path, self.spec.splits)

    def validation_listing(self) -> Listing:
        """Returns the captions of `validation.path`."""
        assert isinstance(self.spec.validation, CaptionsValidationFiles)
        return self._list(self.spec.validation.path, self.spec.validation.splits)

    def _list(self, uri: str, splits: list[str] | None) -> Listing:
        spec, listing = self.spec, Listing()
        folder = spec.images or posixpath.dirname(uri)
        boxes = {}
        if spec.instances is not None:
            boxes = of_coco(read_json(spec.instances, "instances"), spec.instances)
        entities = None if spec.entities is None else Entities(spec.entities)
        for picture in self._pictures(uri, splits, entities):
            place = posixpath.join(folder, picture.file)
            own = boxes.get(picture.id, NO_BOXES)
            number = listing.add(Document(picture.id, None, place, picture.location, own))
            phrases = phrases_of(picture, entities) if entities else [[]] * len(picture.captions)
            for caption, said in zip(picture.captions, phrases, strict=True):
                largest = [boxes for _, boxes in said[: spec.phrases]]
                row_boxes = np.concatenate(largest) if largest else NO_BOXES
                listing.rows.append(Row(caption, number, boxes=row_boxes, phrases=tuple(said)))
        if not listing.rows:
            raise SpecError("path", uri, "a file with at least one caption", "has none")
        return listing

    def _pictures(
        self, uri: str, splits: list[str] | None, entities: Entities | None
    ) -> Iterator[Captioned]:
        if uri.endswith(".txt"):
            yield from _of_ids(uri, entities)
            return
        value = read_json(uri, "path")
        try:
            rows = rows_of_value(value)
        except Unreadable as error:
            rule = "COCO's {images, annotations} or Karpathy's {images: [{sentences}]}"
            raise SpecError("path", uri, rule, f"has another format ({error.detail})") from None
        there = sorted({str(row["split"]) for row in rows if "split" in row})
        for split in splits or ():
            if split not in there:
                problem = f"is not a split of {uri}"
                raise SpecError.unknown_name("splits", split, there, problem)
        for number, row in enumerate(rows):
            if splits is None or row.get("split") in splits:
                yield _captioned(row, f"image {row.get('id', number)} of {uri}")


def _captioned(row: Mapping[str, Any], location: str) -> Captioned:
    name, captions = row.get("file_name"), row.get("captions", [])
    if not isinstance(name, str) or not name:
        raise SpecError("path", name, "a file name in file_name", note=f" ({location})")
    for caption in captions:
        if not isinstance(caption, str) or not caption.strip():
            rule = "a text with at least one word"
            raise SpecError("path", caption, rule, note=f" (a caption of {location})")
    own = row.get("id", PurePosixPath(name).stem)
    return Captioned(str(own), name, [caption.strip() for caption in captions], location)


def _of_ids(uri: str, entities: Entities | None) -> Iterator[Captioned]:
    """The pictures of a list of ids, with the captions of the entities."""
    if entities is None:
        rule = "a folder of Flickr30K Entities with the captions of the ids in `path`"
        raise MissingField("entities", None, rule)
    for number, line in enumerate(read_file(uri, "path").decode("utf-8-sig").splitlines(), start=1):
        if own := line.strip():
            captions = [text for text, _ in entities.read(own)]
            yield Captioned(own, f"{own}.jpg", captions, f"line {number} of {uri}")


def phrases_of(picture: Captioned, entities: Entities) -> list[list[Phrase]]:
    """The phrases of each caption, which the entities have in words alone, with blanks between."""
    known = {_words(text): said for text, said in entities.read(PurePosixPath(picture.file).stem)}
    return [known.get(_words(caption), []) for caption in picture.captions]


def _words(text: str) -> str:
    """A text without all that tokenising changes.

    >>> _words("Two men's shirts.") == _words("Two men 's shirts .")
    True
    """
    return "".join(character for character in text.lower() if character.isalnum())


def read_json(uri: str, field: str) -> Any:
    """The value of a JSON file.

    Raises:
        SpecError: for `field`: it is not there, or damaged; names the line.
    """
    data = read_file(uri, field)
    try:
        return parse_line(data)
    except json.JSONDecodeError as error:
        problem = f"is malformed in line {error.lineno}, column {error.colno} ({error.msg})"
        is_open = error.msg.startswith("Unterminated string")
        if is_open or not error.doc[error.pos :].strip():
            problem = f"ends in the middle of line {error.lineno}"
        raise SpecError(field, uri, "a complete JSON file", problem) from None
    except (ValueError, RecursionError) as error:
        raise SpecError(field, uri, "a JSON file", f"cannot be parsed ({error})") from None


def read_file(uri: str, field: str) -> bytes:
    """What a file holds.

    Raises:
        SpecError: for `field`: it is not there, or cannot be read.
    """
    try:
        fs, path = existing_root(uri)
        return fs.cat_file(path)
    except SpecError as error:
        raise error.at(field) from None
    except OSError as error:
        raise SpecError(field, uri, "a readable file", f"cannot be read ({error})") from None

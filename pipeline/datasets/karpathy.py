"""COCO and Flickr30K: images with five captions each.

- `dataset_coco.json` and `dataset_flickr30k.json` have Karpathy's splits and the captions.
- `captions_train2014.json` and the like have COCO's captions, `instances_train2014.json` its boxes.
- Flickr30K Entities has `Sentences/<id>.txt` and `Annotations/<id>.xml`: phrases and their boxes.
- Images are `train2014/<name>.jpg` and `val2014/<name>.jpg`, or `<id>.jpg`.
"""

from __future__ import annotations

import functools
import posixpath
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, PositiveInt, model_validator

from pipeline.config import MissingField, SpecError, Uri, reading, within
from pipeline.data.decode import Unreadable
from pipeline.data.manifests import parse_rows
from pipeline.data.texts import fold
from pipeline.datasets.files import check_text, read_file, read_json
from pipeline.datasets.items import ListedImages, ListedImagesSpec
from pipeline.datasets.queries import CollectionQueries, ImageFiles, QueriesSpec
from pipeline.eval import Phrase
from pipeline.eval.boxes import NO_BOXES, area, drop_small_boxes, normalise_box
from pipeline.paths import open_file
from pipeline.train.data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.train.data.rows import Document, Listing, Row

#: Phrase of a caption and its boxes (M, 4).
BoxedPhrase = tuple[str, np.ndarray]
_PHRASE = re.compile(r"\[/EN#(\d+)((?:/[^\s/\]]+)+) ([^\]]*)\]")

# -- captions --------------------------------------------------------------------------------------


class CaptionedImage(NamedTuple):
    """Image with its captions.

    Attributes:
        id: `id` or `cocoid`, or the name of the file without suffix.
        file_name: Path of the file relative to the folder of the images.
        captions: Captions, in the order of the file.
        location: Image or line, for messages.
    """

    id: str
    file_name: str
    captions: list[str]
    location: str

    def by_id(self, max_captions: int | None) -> dict[str, str]:
        """Returns the first captions by id, `<image id>#<number>` with numbers from 0."""
        captions = enumerate(self.captions[:max_captions])
        return {f"{self.id}#{number}": " ".join(text.split()) for number, text in captions}


def read_images(uri: str, splits: Collection[str] | None, field: str) -> Iterator[CaptionedImage]:
    """Yields the images of COCO's captions or of a file with Karpathy's splits.

    Raises:
        SpecError: The file is missing or malformed, or has no such split.
    """
    try:
        images = parse_rows(read_json(uri, "path"))
    except Unreadable as error:
        rule = "COCO's {images, annotations} or Karpathy's {images: [{sentences}]}"
        raise SpecError("path", uri, rule, f"has another format ({error.detail})") from None
    names = sorted({str(image["split"]) for image in images if "split" in image})
    for split in splits or ():
        if split not in names:
            raise SpecError.unknown_name(field, split, names, f"is not a split of {uri}")
    for number, image in enumerate(images):
        if splits is None or image.get("split") in splits:
            location = f"image {image.get('id', number)} of {uri}"
            name, captions = image.get("file_name"), image.get("captions") or []
            if not isinstance(name, str) or not name:
                raise SpecError("path", name, "a file name in file_name", note=f" ({location})")
            texts = [check_text(text, "path", f"a caption of {location}") for text in captions]
            image_id = str(image.get("id", PurePosixPath(name).stem))
            yield CaptionedImage(image_id, name, texts, location)


def read_split(uri: str, split: str) -> list[CaptionedImage]:
    """Returns the images of a Karpathy split.

    Raises:
        SpecError: See `read_images`; or an id occurs twice, or an image has no caption.
    """
    images: dict[str, CaptionedImage] = {}
    for image in read_images(uri, [split], "split"):
        if image.id in images or not image.captions:
            rule = "the unique id of an image with at least one caption"
            problem = "occurs twice" if image.id in images else "has no caption"
            raise SpecError("path", image.id, rule, problem, f" ({image.location})")
        images[image.id] = image
    return list(images.values())


def read_ids(uri: str, entities: Entities | None) -> Iterator[CaptionedImage]:
    """Yields the images of a text file with one id per line, with the captions of the entities."""
    if entities is None:
        rule = "a folder of Flickr30K Entities with the captions of the ids in `path`"
        raise MissingField("entities", None, rule)
    for number, line in enumerate(read_file(uri, "path").decode("utf-8-sig").splitlines(), start=1):
        if image_id := line.strip():
            captions = [text for text, _ in entities.read(image_id)]
            yield CaptionedImage(image_id, f"{image_id}.jpg", captions, f"line {number} of {uri}")


# -- boxes -----------------------------------------------------------------------------------------


class _Size(BaseModel):
    id: int | str
    width: float
    height: float


class _Annotation(BaseModel):
    id: int | str | None = None
    image_id: int | str
    bbox: tuple[float, float, float, float]
    iscrowd: int = 0


class _Instances(BaseModel):
    images: list[_Size]
    annotations: list[_Annotation]


def read_coco_boxes(file: str) -> dict[str, np.ndarray]:
    """Returns the boxes of each image by its id, from COCO instances. Crowds are ignored.

    Raises:
        SpecError: For `instances`: the file has another format, or a box is invalid.
    """
    rule = "COCO instances {images: [{id, width, height}], annotations: [{image_id, bbox}]}"
    instances: _Instances = read_json(file, "instances", _Instances, rule)
    sizes = {str(image.id): (image.width, image.height) for image in instances.images}
    boxes: dict[str, list[np.ndarray]] = {}
    largest = 0.0
    for number, annotation in enumerate(instances.annotations):
        if annotation.iscrowd:
            continue
        location = f"annotation {number if annotation.id is None else annotation.id} of {file}"
        image_id = str(annotation.image_id)
        if image_id not in sizes:
            rule = "the id of an image of the file"
            raise SpecError("instances", image_id, rule, note=f" ({location})")
        x, y, width, height = annotation.bbox
        largest = max(largest, x + width, y + height)
        corners = [x, y, x + width, y + height]
        box = normalise_box(corners, *sizes[image_id], "instances", location)
        boxes.setdefault(image_id, []).append(box)
    if boxes and largest <= 1:
        rule = "a file with bbox: [x, y, width, height] in pixels"
        raise SpecError("instances", file, rule, "has relative boxes")
    return {image_id: drop_small_boxes(np.stack(found)) for image_id, found in boxes.items()}


class Entities:
    """Phrases of the captions in Flickr30K Entities, and their boxes."""

    def __init__(self, folder: str):
        self._folder = folder
        self._last: tuple[str, list[tuple[str, list[BoxedPhrase]]]] | None = None

    def read(self, image_id: str) -> list[tuple[str, list[BoxedPhrase]]]:
        """Returns the captions of an image with their phrases, sorted by descending area.

        Phrases that have no boxes or only small ones are ignored. If a phrase occurs twice in a
        caption, it is returned once.

        Raises:
            SpecError: For `entities`: a file is missing or malformed.
        """
        if self._last is not None and self._last[0] == image_id:
            return self._last[1]
        boxes = self._boxes(image_id)
        file = posixpath.join(self._folder, "Sentences", f"{image_id}.txt")
        lines = [line for line in _read(file).decode("utf-8-sig").splitlines() if line.strip()]
        captions = []
        for number, line in enumerate(lines, start=1):
            text = _PHRASE.sub(r"\3", line)
            if "/EN#" in text or not text.strip():
                rule = "a line with phrases [/EN#<number>/<type> words]"
                raise SpecError("entities", line[:80], rule, note=f" (line {number} of {file})")
            found: dict[str, BoxedPhrase] = {}
            for chain, _, words in _PHRASE.findall(line):
                if len(boxes.get(chain, NO_BOXES)):
                    found.setdefault(chain, (words, boxes[chain]))
            phrases = sorted(found.values(), key=lambda phrase: -float(area(phrase[1]).max()))
            captions.append((text, phrases))
        self._last = image_id, captions
        return captions

    def _boxes(self, image_id: str) -> dict[str, np.ndarray]:
        """Returns the boxes of each coreference chain of phrases.

        In the annotations, pixels are numbered from 1, and boxes include their last pixel.
        """
        file = posixpath.join(self._folder, "Annotations", f"{image_id}.xml")
        rule = "an annotation file with size, and objects with name and bndbox"
        with reading("entities", file, rule, ElementTree.ParseError, ValueError):
            root = ElementTree.fromstring(_read(file))
            width, height = (_number(root, f"size/{side}") for side in ("width", "height"))
            boxes: dict[str, list[np.ndarray]] = {}
            for element in root.findall("object"):
                corners = element.find("bndbox")
                if corners is None:
                    continue
                names = ("xmin", "ymin", "xmax", "ymax")
                x0, y0, x1, y1 = (_number(corners, name) for name in names)
                box = normalise_box([x0 - 1, y0 - 1, x1, y1], width, height, "entities", file)
                for chain in element.findall("name"):
                    boxes.setdefault(chain.text or "", []).append(box)
        return {chain: drop_small_boxes(np.stack(found)) for chain, found in boxes.items()}


def caption_phrases(image: CaptionedImage, entities: Entities) -> list[list[BoxedPhrase]]:
    """Returns the phrases of each caption, matched by the letters of the tokenised captions.

    The id of an image in Flickr30K Entities is its file name without suffix.
    """
    found = entities.read(PurePosixPath(image.file_name).stem)
    by_text = {_letters(text): phrases for text, phrases in found}
    return [by_text.get(_letters(caption), []) for caption in image.captions]


def _letters(text: str) -> str:
    """Returns the lower-case letters and digits of a text, which tokenisation does not change.

    >>> _letters("Two men's shirts.") == _letters("Two men 's shirts .")
    True
    """
    return "".join(character for character in fold(text) if character.isalnum())


def _number(element: ElementTree.Element, path: str) -> float:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"{path} is missing")
    return float(text)


def _read(file: str) -> bytes:
    rule = "a folder with Sentences/<id>.txt and Annotations/<id>.xml for each image"
    with reading("entities", file, rule), open_file(file) as stream:
        return stream.read()


# -- items, queries, rows --------------------------------------------------------------------------


class Items(ListedImages):
    """Images or captions of a Karpathy split of COCO or Flickr30K, one item each.

    `path` is `dataset_coco.json` or `dataset_flickr30k.json`. `images` is the folder to which the
    file names are relative (for COCO, that of `train2014` and `val2014`), or a ZIP archive such as
    `val2014.zip`. The id of an image is its `cocoid`, or the name of its file without suffix. The
    id of a caption is `<image id>#<number>`, numbered from 0. The benchmark `karpathy` has the
    queries and judgments.
    """

    class Spec(ListedImagesSpec):
        """Options of the Karpathy source."""

        name: Literal["karpathy"] = "karpathy"  # type: ignore[assignment]
        split: str = "test"
        """Split of the images."""
        content: Literal["images", "captions"] = "images"
        """Documents: the images for text-to-image retrieval, or their captions for image-to-text
        retrieval."""
        max_captions: int | None = Field(None, ge=1)
        """Maximum number of captions per image, or null for all."""

    spec: Spec

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yields the images or the captions of the split."""
        for image in read_split(self.spec.path, self.spec.split):
            if self.spec.content == "images":
                yield {"id": image.id, "file_name": image.file_name}
            else:
                for caption_id, caption in image.by_id(self.spec.max_captions).items():
                    yield {"id": caption_id, "text": caption, "image": image.id}


class Queries(CollectionQueries["Queries.Spec"]):
    """Captions and images of a Karpathy split, in either direction.

    **Text to image.** Captions are the queries, and their image is relevant. The images are indexed
    with the source `karpathy`. The main metric is R@1.

    **Image to text.** Images are the queries, and their captions are relevant. The captions are
    indexed with `content: captions`. The papers count a query if at least one of its captions is
    among the first K, which is the metric Success@K; the main metric is Success@1.

    **Folds.** With `folds: 5`, the images of the split are divided into five equal parts in the
    order of the file, and each query ranks the documents of its fold. With `max_captions: 5`, the
    mean over the queries equals the mean of the folds. Folds are query categories.

    **Grounding.** With `entities`, `grounding: benchmark` measures the phrases of the captions in
    Flickr30K Entities with their boxes.
    """

    class Spec(QueriesSpec):
        """Options of the Karpathy benchmark."""

        name: Literal["karpathy"] = "karpathy"
        path: Uri
        """`dataset_coco.json` or `dataset_flickr30k.json`."""
        split: str = "test"
        """Split of the images."""
        direction: Literal["text_to_image", "image_to_text"] = "text_to_image"
        """Direction of retrieval."""
        images: Uri | None = None
        """Folder or ZIP archive of the images, for `image_to_text`; null for the folder of `path`.
        """
        max_captions: PositiveInt | None = None
        """Maximum number of captions per image, or null for all."""
        folds: PositiveInt = 1
        """Number of folds that are ranked separately."""
        entities: Uri | None = None
        """Folder with `Sentences` and `Annotations` of Flickr30K Entities, for grounding."""

        @model_validator(mode="after")
        def _check_direction(self) -> Queries.Spec:
            rule = "null for the direction text_to_image, whose queries are captions"
            self.require(self.images is None or self.direction != "text_to_image", "images", rule)
            return self

    measure = "R@1"

    @functools.cached_property
    def _images(self) -> list[CaptionedImage]:
        return read_split(self.spec.path, self.spec.split)

    @functools.cached_property
    def _folds(self) -> list[list[tuple[dict[str, str], list[str]]]]:
        """The queries of each image, and its documents, which are relevant, in each fold."""
        spec, pairs = self.spec, []
        for image in self._images:
            captions = image.by_id(spec.max_captions)
            if spec.direction == "text_to_image":
                pairs.append((captions, [image.id]))
            else:
                pairs.append(({image.id: ""}, list(captions)))
        rule = f"a divisor of the {len(pairs):,} images of the split"
        spec.require(len(pairs) % spec.folds == 0, "folds", rule)
        size = len(pairs) // spec.folds
        return [pairs[start : start + size] for start in range(0, len(pairs), size)]

    def queries(self) -> dict[str, str]:
        """Returns the captions, or an empty text per image."""
        return {q: text for part in self._folds for texts, _ in part for q, text in texts.items()}

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns the image of each caption, or the captions of each image."""
        pairs = [pair for part in self._folds for pair in part]
        return {q: dict.fromkeys(documents, 1) for texts, documents in pairs for q in texts}

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Groups the queries by fold, if there are several."""
        folds = {
            f"fold {number}": [query_id for texts, _ in pairs for query_id in texts]
            for number, pairs in enumerate(self._folds)
        }
        return {"fold": folds} if len(folds) > 1 else {}

    def options(self) -> dict[str, Any]:
        """Returns the query images, and the documents of the fold as pool."""
        options: dict[str, Any] = {}
        if self.spec.direction == "image_to_text":
            images = ImageFiles({image.id: self._uri(image) for image in self._images})
            options = {"measure": "Success@1", "media": {"image": images}}
        pools: dict[str, tuple[str, ...]] = {}
        for pairs in self._folds:
            pool = tuple(document for _, documents in pairs for document in documents)
            pools |= {query_id: pool for texts, _ in pairs for query_id in texts}
        return {**options, "pools": pools} if self.spec.folds > 1 else options

    def _uri(self, image: CaptionedImage) -> str:
        folder = self.spec.images or posixpath.dirname(self.spec.path)
        if folder.lower().endswith(".zip"):
            return f"zip://{image.file_name}::{folder}"
        return posixpath.join(folder, image.file_name)

    def phrases(self) -> list[Phrase]:
        """Loads the phrases of the captions with their boxes from Flickr30K Entities.

        A phrase of several captions with the same boxes is returned once.
        """
        if self.spec.entities is None:
            rule = "the folder of Flickr30K Entities if grounding is measured"
            raise MissingField("benchmark.entities", None, rule)
        if self.spec.direction != "text_to_image":
            rule = "text_to_image if grounding is measured"
            raise SpecError("benchmark.direction", self.spec.direction, rule)
        with within("benchmark"):
            entities = Entities(self.spec.entities)
            found: dict[tuple[str, str, bytes], Phrase] = {}
            for image in self._images:
                captions = image.captions[: self.spec.max_captions]
                for phrases in caption_phrases(image._replace(captions=captions), entities):
                    for text, boxes in phrases:
                        phrase = Phrase(image.id, text, boxes.astype(float).tolist())
                        found.setdefault((image.id, text.lower(), boxes.tobytes()), phrase)
        if not found:
            rule = "a folder with phrases of the captions that have boxes"
            raise SpecError("benchmark.entities", self.spec.entities, rule, "has no such phrase")
        return list(found.values())


class CaptionFiles(ValidationFiles):
    """Validation data in a file of the same format, or in splits of it."""

    splits: list[str] | None = None
    """Karpathy splits to validate on, or null for all."""


class Rows(RowData["Rows.Spec"]):
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
        validation: float | CaptionFiles | None = None
        """Validation data: a fraction of the documents with their queries, or {path: ..., splits:
        ...}; null for none."""

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads all captions of `path`."""
        assert isinstance(files, Rows.Spec | CaptionFiles)
        spec, uri, listing = self.spec, files.path, Listing()
        folder = spec.images or posixpath.dirname(uri)
        boxes = {}
        if spec.instances is not None:
            boxes = read_coco_boxes(spec.instances)
        entities = None if spec.entities is None else Entities(spec.entities)
        is_list = uri.endswith(".txt")
        images = read_ids(uri, entities) if is_list else read_images(uri, files.splits, "splits")
        for image in images:
            file = posixpath.join(folder, image.file_name)
            image_boxes = boxes.get(image.id, NO_BOXES)
            number = listing.add(Document(image.id, None, file, image.location, image_boxes))
            found = caption_phrases(image, entities) if entities else [[]] * len(image.captions)
            for caption, phrases in zip(image.captions, found, strict=True):
                largest = [boxes for _, boxes in phrases[: spec.phrases]]
                row_boxes = np.concatenate(largest) if largest else NO_BOXES
                row = Row(caption.strip(), number, boxes=row_boxes, phrases=tuple(phrases))
                listing.rows.append(row)
        if not listing.rows:
            raise SpecError("path", uri, "a file with at least one caption", "has no captions")
        return listing

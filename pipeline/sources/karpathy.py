"""The source of COCO and Flickr30K in the format of Karpathy's splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.sources.annotated import Annotated, AnnotatedSpec, Document
from pipeline.sources.annotations import read_json
from pipeline.sources.manifests import parse_rows


class CaptionedImage(NamedTuple):
    """Image with its captions.

    Attributes:
        id: Id of the image: `cocoid`, or the name of the file without suffix.
        file_name: Path of the file relative to the folder of the images.
        captions: Captions by id, which is `<image id>#<number>`.
    """

    id: str
    file_name: str
    captions: dict[str, str]


class Karpathy(Annotated):
    """Images or captions of a Karpathy split of COCO or Flickr30K, one item each.

    `path` is `dataset_coco.json` or `dataset_flickr30k.json`. `images` is the folder to which the
    file names are relative (for COCO, that of `train2014` and `val2014`), or a ZIP archive such as
    `val2014.zip`. The id of an image is its `cocoid`, or the name of its file without suffix. The
    id of a caption is `<image id>#<number>`, numbered from 0. The benchmark `karpathy` has the
    queries and judgments.
    """

    class Spec(AnnotatedSpec):
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

    def documents(self) -> Iterator[Document]:
        """Yields the images or the captions of the split."""
        images = read_karpathy(self.spec.path, self.spec.split, self.spec.max_captions, "path")
        for image in images:
            if self.spec.content == "images":
                yield {"id": image.id, "file_name": image.file_name}
            else:
                for caption_id, caption in image.captions.items():
                    yield {"id": caption_id, "text": caption, "image": image.id}


def read_karpathy(
    uri: str, split: str, max_captions: int | None, field: str
) -> list[CaptionedImage]:
    """Reads the images of a split, in the order of the file.

    Args:
        uri: Path or URI of the JSON file.
        split: Name of the split.
        max_captions: Maximum number of captions per image, or None for all.
        field: Spec field that errors name.

    Raises:
        SpecError: The file is missing or malformed, or has no such split.
    """
    rule = "Karpathy's {images: [{filename, split, sentences: [{raw}]}]}"
    try:
        rows = parse_rows(read_json(uri, field))
    except Unreadable as error:
        raise SpecError(field, uri, rule, f"has another format ({error.detail})") from None
    splits = sorted({str(row.get("split")) for row in rows})
    if split not in splits:
        raise SpecError.unknown_name("split", split, splits, f"is not a split of {uri}")
    images: dict[str, CaptionedImage] = {}
    for number, row in enumerate(rows):
        if str(row.get("split")) == split:
            image = _image(row, max_captions, field, f"image {number} of {uri}")
            if image.id in images:
                note = f" (image {number} of {uri})"
                raise SpecError(field, image.id, "a unique image id", "occurs twice", note)
            images[image.id] = image
    return list(images.values())


def _image(
    row: dict[str, Any], max_captions: int | None, field: str, location: str
) -> CaptionedImage:
    name, captions = row.get("file_name"), row.get("captions") or []
    if not isinstance(name, str) or not name:
        raise SpecError(field, name, "a file name in `filename`", note=f" ({location})")
    texts = [" ".join(c.split()) if isinstance(c, str) else "" for c in captions]
    if not texts or not all(texts):
        rule = "an image with at least one caption in `sentences`, none of them empty"
        raise SpecError(field, row.get("id"), rule, note=f" ({location})")
    image_id = str(row["id"])
    named = {f"{image_id}#{i}": text for i, text in enumerate(texts[:max_captions])}
    return CaptionedImage(image_id, name, named)

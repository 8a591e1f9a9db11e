"""The benchmarks COCO and Flickr30K in the format of Karpathy's splits, in both directions."""

from __future__ import annotations

import functools
import posixpath
from pathlib import PurePosixPath
from typing import Literal

from pydantic import PositiveInt, model_validator

from pipeline.config import MissingField, SpecError, Uri, within
from pipeline.eval import Benchmark, JudgedQueries, Phrase
from pipeline.eval.boxes import Entities, caption_phrases
from pipeline.eval.datasets import DatasetSpec, judged_queries
from pipeline.eval.query_images import ImageFiles
from pipeline.sources.karpathy import CaptionedImage, read_karpathy


class Karpathy(Benchmark["Karpathy.Spec"]):
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

    class Spec(DatasetSpec):
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
        def _check_direction(self) -> Karpathy.Spec:
            if self.images is not None and self.direction == "text_to_image":
                rule = "null for the direction text_to_image, whose queries are captions"
                raise SpecError("images", self.images, rule)
            return self

    @functools.cached_property
    def _images(self) -> list[CaptionedImage]:
        spec = self.spec
        with within("benchmark"):
            images = read_karpathy(spec.path, spec.split, spec.max_captions, "path")
        if len(images) % spec.folds:
            rule = f"a divisor of the {len(images):,} images of the split"
            raise SpecError("benchmark.folds", spec.folds, rule)
        return images

    def load(self) -> JudgedQueries:
        """Loads the queries and judgments."""
        texts: dict[str, str] = {}
        qrels: dict[str, dict[str, int]] = {}
        uris: dict[str, str] = {}
        pools: dict[str, tuple[str, ...]] = {}
        folds: dict[str, list[str]] = {}
        size = len(self._images) // self.spec.folds
        for number in range(self.spec.folds):
            fold = self._images[number * size : (number + 1) * size]
            queries = folds.setdefault(f"fold {number}", [])
            for image in fold:
                if self.spec.direction == "text_to_image":
                    texts |= image.captions
                    qrels |= {query_id: {image.id: 1} for query_id in image.captions}
                    queries += image.captions
                else:
                    texts[image.id] = ""
                    qrels[image.id] = dict.fromkeys(image.captions, 1)
                    uris[image.id] = self._uri(image)
                    queries.append(image.id)
            documents = _documents(fold, self.spec.direction)
            pools |= dict.fromkeys(queries, documents)
        has_folds = self.spec.folds > 1
        return judged_queries(
            self.spec,
            self.spec.path,
            texts,
            qrels,
            images=ImageFiles(uris) if uris else None,
            pools=pools if has_folds else None,
            categories={"fold": folds} if has_folds else {},
            measure="Success@1" if uris else "R@1",
        )

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
                stem = PurePosixPath(image.file_name).stem
                captions = list(image.captions.values())
                for phrases in caption_phrases(stem, captions, entities):
                    for text, boxes in phrases:
                        phrase = Phrase(image.id, text, boxes.astype(float).tolist())
                        found.setdefault((image.id, text.lower(), boxes.tobytes()), phrase)
        if not found:
            rule = "a folder with phrases of the captions that have boxes"
            raise SpecError("benchmark.entities", self.spec.entities, rule, "has no such phrase")
        return list(found.values())


def _documents(images: list[CaptionedImage], direction: str) -> tuple[str, ...]:
    """Returns the ids of the documents of some images."""
    if direction == "text_to_image":
        return tuple(image.id for image in images)
    return tuple(caption for image in images for caption in image.captions)

"""Training data of scenes of shapes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Self

import numpy as np
import torch
from PIL import Image
from pydantic import Field, PositiveInt, model_validator

from examples.papers.synthetic import SHAPES
from examples.papers.synthetic.shapes import (
    DEFAULT_LAYOUT,
    Captions,
    Layout,
    Scenes,
    describe,
    draw_captions,
    generate_scenes,
)
from pipeline import config
from pipeline.config import SpecError, digest
from pipeline.train.data.base import Batch, Phrases, TrainingData, worker_slice

#: First validation series. Training series are smaller. Series fit into one 32-bit word of a seed,
#: so that the words of a series and a scene number are unique.
VALIDATION_SERIES = 1 << 31

Fraction = Annotated[float, Field(ge=0, le=1)]


class Shapes(TrainingData["Shapes.Spec"]):
    """Infinite series of scenes. Each epoch uses a section of it."""

    class Spec(config.ComponentSpec):
        """Options of `Shapes`."""

        name: str = SHAPES
        num_scenes: int = Field(6400, ge=2)
        """Number of scenes per epoch."""
        fresh: bool = True
        """Whether each epoch uses new scenes. Otherwise all epochs use the same scenes and captions
        in a different order."""
        captions: int = Field(4, ge=1)
        """Number of captions per scene in a batch."""
        single: tuple[Fraction, Fraction] = (0.0, 0.0)
        """Fraction of captions that describe a single object, in the first epoch and in the last of
        `single_epochs`, with linear interpolation. Objects are easier to learn than relations."""
        single_epochs: int = Field(1, ge=1)
        """Number of epochs over which `single` is interpolated."""
        series: int | None = Field(None, ge=0, lt=VALIDATION_SERIES)
        """Series of the scenes. Defaults to the seed of the run."""
        validation: int = Field(1000, ge=2)
        """Number of validation scenes, with one caption of two objects each."""
        side: int = Field(DEFAULT_LAYOUT.side, ge=16)
        """Width and height of a scene, in pixels."""
        radii: tuple[PositiveInt, PositiveInt] = DEFAULT_LAYOUT.radii
        """Radius of small and large objects, in pixels."""
        objects: tuple[PositiveInt, PositiveInt] = DEFAULT_LAYOUT.objects
        """Minimum and maximum number of objects per scene."""

        @model_validator(mode="after")
        def _check_layout(self) -> Self:
            small, large = self.radii
            if not small <= large < self.side // 2 - 1:
                rule = f"ascending and less than {self.side // 2 - 1} (from side={self.side})"
                raise SpecError("radii", list(self.radii), rule)
            if not self.objects[0] <= self.objects[1]:
                raise SpecError("objects", list(self.objects), "ascending")
            return self

        @property
        def layout(self) -> Layout:
            """Layout of the scenes."""
            return Layout(self.side, self.radii, self.objects)

    @property
    def payload_kinds(self) -> frozenset[str]:
        """Kinds of payload: images."""
        return frozenset({"image"})

    @property
    def repeats(self) -> bool:
        """True if all epochs have the same scenes and captions."""
        return not self.spec.fresh and len(set(self.spec.single)) == 1

    @property
    def num_batches(self) -> int:
        """Number of complete batches per epoch."""
        return self.spec.num_scenes // self.batch_size

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields batches of scenes with captions."""
        spec = self.spec
        series = self.seed if spec.series is None else spec.series
        begin, end = spec.single
        single_fraction = begin + (end - begin) * min(1.0, epoch / max(1, spec.single_epochs - 1))
        scene_N = np.arange(spec.num_scenes)
        if spec.fresh:
            scene_N += epoch * spec.num_scenes
        else:
            scene_N = scene_N[: self.num_batches * self.batch_size]  # same scenes in all epochs
            np.random.default_rng([self.seed, epoch]).shuffle(scene_N)
        worker_rows = worker_slice(self.batch_size, worker, num_workers)
        for batch in range(first, self.num_batches):
            start = batch * self.batch_size
            numbers = scene_N[start : start + self.batch_size].tolist()
            scenes = generate_scenes(series, numbers, spec.layout)
            # Captions of repeated scenes do not depend on the batch. All workers draw the captions
            # of the whole batch, so that their number has no influence.
            rows = range(len(numbers))
            groups = [list(rows)] if spec.fresh else [[row] for row in rows]
            captions = Captions.concatenate(
                draw_captions(
                    scenes.take(group),
                    np.random.default_rng([self.seed, numbers[group[0]], spec.captions]),
                    spec.captions,
                    single_fraction,
                )[0]
                for group in groups
            ).take(slice(worker_rows.start * spec.captions, worker_rows.stop * spec.captions))
            keys = [self._key(series, number) for number in numbers[worker_rows]]
            yield make_batch(scenes.take(worker_rows), captions, keys)

    def validation(self) -> Batch:
        """Returns scenes from a second series, each with a caption of two objects and a phrase."""
        scenes, captions, scene_C = validation_scenes(self.spec.validation, layout=self.spec.layout)
        keys = [self._key(VALIDATION_SERIES, number) for number in range(len(scenes))]
        return make_batch(scenes, captions, keys, first_phrases(scenes, captions, scene_C))

    def _key(self, series: int, number: int) -> str:
        """Returns the cache key of a scene, which includes layouts other than the default."""
        layout = self.spec.layout
        key = f"{series}/{number}"
        return key if layout == DEFAULT_LAYOUT else f"{key}/{digest(asdict(layout))}"

    @staticmethod
    def relevant(query_labels: torch.Tensor, document_labels: torch.Tensor) -> torch.Tensor:
        """Computes the relevance matrix. A scene is relevant to all captions that it matches."""
        matches = _captions(query_labels.cpu().numpy()).match(
            _scenes(document_labels.cpu().numpy())
        )
        return torch.from_numpy(matches).to(query_labels.device)


def validation_scenes(
    count: int, series: int = 0, layout: Layout = DEFAULT_LAYOUT
) -> tuple[Scenes, Captions, np.ndarray]:
    """Returns unseen scenes, one caption of two objects each, and the scene (C,) of each."""
    scenes = generate_scenes(VALIDATION_SERIES + series, range(count), layout)
    captions, scene_C = draw_captions(
        scenes, np.random.default_rng([VALIDATION_SERIES + series, count])
    )
    return scenes, captions, scene_C


def first_phrases(scenes: Scenes, captions: Captions, scene_C: np.ndarray) -> Phrases:
    """Returns the phrase of the first object of each caption with the boxes of matching objects."""
    texts = [describe(attributes[0]) for attributes in captions.phrases]
    boxes = []
    for attributes, scene in zip(captions.phrases, scene_C, strict=True):
        single = scenes.take([scene])
        boxes.append(single.boxes[single.matching(attributes[0])])
    return Phrases(texts, scene_C.tolist(), boxes)


def make_batch(
    scenes: Scenes, captions: Captions, keys: list[str], phrases: Phrases | None = None
) -> Batch:
    """Builds a batch of training data."""
    is_object_ST = scenes.attributes[..., 2] >= 0
    return Batch(
        captions.texts,
        [{"image": png(scenes.render(row))} for row in range(len(scenes))],
        keys,
        torch.from_numpy(
            np.concatenate([captions.phrases.reshape(-1, 6), captions.relations[:, None]], axis=1)
        ),
        torch.from_numpy(
            np.concatenate([scenes.attributes, scenes.centres.astype(np.int64)], axis=2)
        ).flatten(1),
        boxes=[boxes[mask] for boxes, mask in zip(scenes.boxes, is_object_ST, strict=True)],
        phrases=phrases,
    )


def png(image: Image.Image) -> bytes:
    """Encodes an image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _captions(facts: np.ndarray) -> Captions:
    return Captions(facts[:, :6].reshape(-1, 2, 3), facts[:, 6])


def _scenes(facts: np.ndarray) -> Scenes:
    objects: Any = facts.reshape(len(facts), -1, 5)
    return Scenes(objects[..., :3], objects[..., 3:].astype(np.float64), np.zeros(len(facts)))

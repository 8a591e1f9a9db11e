"""Shapes as training data."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from PIL import Image
from pydantic import Field, PositiveInt, model_validator

from pipeline import config
from pipeline.config import SpecError, digest
from pipeline.synthetic.shapes import (
    DEFAULT_LAYOUT,
    Captions,
    Layout,
    Scenes,
    captions_of,
    phrase,
    scenes_of,
)
from pipeline.training_data.base import Batch, Phrases, TrainingData, own_share

#: First validation series; training series are below. Both fit into one 32-bit word of a
#: generator's seed: the words of larger numbers could equal those of a series and a scene's number.
VALIDATION_SERIES = 1 << 31

Share = Annotated[float, Field(ge=0, le=1)]


class Shapes(TrainingData["Shapes.Spec"]):
    """An endless series of scenes, of which an epoch is a part."""

    class Spec(config.ComponentSpec):
        """Which scenes, and what is said of them.

        Attributes:
            num_scenes: scenes of an epoch.
            fresh: whether each epoch has scenes of its own; else all have the same ones with the
                same captions, in another order.
            captions: of each scene in a batch.
            single: the share of captions of one object alone, in the first epoch and in the last
                of `single_epochs`; between them it falls evenly. To learn what things are called
                comes before where they lie.
            series: of the scenes; null: the run's seed.
            validation: Number of validation scenes, with one caption of two objects each.
            side: Width and height of a scene, in pixels.
            radii: Radius of small and of large objects, in pixels.
            objects: Smallest and largest number of objects of a scene.
        """

        renamed: ClassVar[Mapping[str, str]] = {"held_out": "validation"}

        name: Literal["shapes"] = "shapes"
        num_scenes: int = Field(6400, ge=2)
        fresh: bool = True
        captions: int = Field(4, ge=1)
        single: tuple[Share, Share] = (0.0, 0.0)
        single_epochs: int = Field(1, ge=1)
        series: int | None = Field(None, ge=0, lt=VALIDATION_SERIES)
        validation: int = Field(1000, ge=2)
        side: int = Field(DEFAULT_LAYOUT.side, ge=16)
        radii: tuple[PositiveInt, PositiveInt] = DEFAULT_LAYOUT.radii
        objects: tuple[PositiveInt, PositiveInt] = DEFAULT_LAYOUT.objects

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            small, large = self.radii
            if not small <= large < self.side // 2 - 1:
                rule = f"ascending and less than {self.side // 2 - 1} (from side={self.side})"
                raise SpecError("radii", list(self.radii), rule)
            if not self.objects[0] <= self.objects[1]:
                raise SpecError("objects", list(self.objects), "ascending")
            return self

        @property
        def layout(self) -> Layout:
            """The sizes of the scenes."""
            return Layout(self.side, self.radii, self.objects)

    @property
    def gives(self) -> frozenset[str]:
        """Pictures."""
        return frozenset({"image"})

    @property
    def repeats(self) -> bool:
        """Unless they are fresh, or their captions change from epoch to epoch."""
        return not self.spec.fresh and len(set(self.spec.single)) == 1

    @property
    def num_batches(self) -> int:
        """Batches of an epoch; scenes that fill none are left out."""
        return self.spec.num_scenes // self.batch_size

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Scenes with captions, as the spec says."""
        spec = self.spec
        series = self.seed if spec.series is None else spec.series
        begin, end = spec.single
        share = begin + (end - begin) * min(1.0, epoch / max(1, spec.single_epochs - 1))
        scene_N = np.arange(spec.num_scenes)
        if spec.fresh:
            scene_N += epoch * spec.num_scenes
        else:
            scene_N = scene_N[: self.num_batches * self.batch_size]  # in all epochs the same ones
            np.random.default_rng([self.seed, epoch]).shuffle(scene_N)
        own = own_share(self.batch_size, worker, num_workers)
        for batch in range(first, self.num_batches):
            start = batch * self.batch_size
            numbers = scene_N[start : start + self.batch_size].tolist()
            scenes = scenes_of(series, numbers, spec.layout)
            # Of repeated scenes each has captions of its own, whichever batch it is in. All workers
            # make those of the whole batch, so that their number changes none.
            rows = range(len(numbers))
            groups = [list(rows)] if spec.fresh else [[row] for row in rows]
            captions = Captions.of(
                captions_of(
                    scenes.take(group),
                    np.random.default_rng([self.seed, numbers[group[0]], spec.captions]),
                    spec.captions,
                    share,
                )[0]
                for group in groups
            ).take(slice(own.start * spec.captions, own.stop * spec.captions))
            keys = [self._key(series, number) for number in numbers[own]]
            yield batch_of(scenes.take(own), captions, keys)

    def validation(self) -> Batch:
        """Returns scenes of another series with a caption of two objects and a phrase each."""
        scenes, captions, scene_C = validation_scenes(self.spec.validation, layout=self.spec.layout)
        keys = [self._key(VALIDATION_SERIES, number) for number in range(len(scenes))]
        return batch_of(scenes, captions, keys, phrases_of(scenes, captions, scene_C))

    def _key(self, series: int, number: int) -> str:
        """The key of a scene's cached states, which differ between layouts."""
        layout = self.spec.layout
        key = f"{series}/{number}"
        return key if layout == DEFAULT_LAYOUT else f"{key}/{digest(asdict(layout))}"

    @staticmethod
    def relevant(query_facts: torch.Tensor, document_facts: torch.Tensor) -> torch.Tensor:
        """A scene is relevant to every caption that is true of it."""
        held = _captions(query_facts.cpu().numpy()).hold(_scenes(document_facts.cpu().numpy()))
        return torch.from_numpy(held).to(query_facts.device)


def validation_scenes(
    count: int, series: int = 0, layout: Layout = DEFAULT_LAYOUT
) -> tuple[Scenes, Captions, np.ndarray]:
    """Returns scenes that are never trained on.

    Args:
        count: Number of scenes.
        series: Number of the validation series, from 0.
        layout: Sizes of the scenes.

    Returns:
        The scenes, a caption of two objects for each, and the (C,) scene of each caption.
    """
    scenes = scenes_of(VALIDATION_SERIES + series, range(count), layout)
    captions, scene_C = captions_of(
        scenes, np.random.default_rng([VALIDATION_SERIES + series, count])
    )
    return scenes, captions, scene_C


def phrases_of(scenes: Scenes, captions: Captions, scene_C: np.ndarray) -> Phrases:
    """What each caption says of its first object, with the boxes of all objects that it fits."""
    texts = [phrase(said[0]) for said in captions.phrases]
    boxes = []
    for said, scene in zip(captions.phrases, scene_C, strict=True):
        own = scenes.take([scene])
        boxes.append(own.boxes[own.matching(said[0])])
    return Phrases(texts, scene_C.tolist(), boxes)


def batch_of(
    scenes: Scenes, captions: Captions, keys: list[str], phrases: Phrases | None = None
) -> Batch:
    """Scenes and captions as training reads them."""
    there = scenes.attributes[..., 2] >= 0
    return Batch(
        captions.texts,
        [{"image": png(scenes.picture(row))} for row in range(len(scenes))],
        keys,
        torch.from_numpy(
            np.concatenate([captions.phrases.reshape(-1, 6), captions.relations[:, None]], axis=1)
        ),
        torch.from_numpy(
            np.concatenate([scenes.attributes, scenes.centres.astype(np.int64)], axis=2)
        ).flatten(1),
        boxes=[boxes[own] for boxes, own in zip(scenes.boxes, there, strict=True)],
        phrases=phrases,
    )


def png(picture: Image.Image) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _captions(facts: np.ndarray) -> Captions:
    return Captions(facts[:, :6].reshape(-1, 2, 3), facts[:, 6])


def _scenes(facts: np.ndarray) -> Scenes:
    objects: Any = facts.reshape(len(facts), -1, 5)
    return Scenes(objects[..., :3], objects[..., 3:].astype(np.float64), np.zeros(len(facts)))

"""Shapes as training data, and as a collection on disk that jobs index, search and evaluate."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from pipeline import config
from pipeline.train.data import Batch, TrainingData, own_share
from pipeline.train.shapes import Captions, Scenes, captions_of, scenes_of

#: Series of scenes, apart from that of a training run's seed, which are never trained on.
HELD_OUT = 1 << 32


class Shapes(TrainingData):
    """An endless series of scenes, of which an epoch is a part."""

    class Spec(config.Spec):
        """Which scenes, and what is said of them.

        Attributes:
            num_scenes: scenes of an epoch.
            captions: of each scene in a batch.
            single: the share of captions of one object alone, in the first epoch and in the last
                of `single_epochs`; between them it falls evenly. To learn what things are called
                comes before where they lie.
            held_out: scenes on which quality is measured, with one caption of two objects each.
        """

        name: Literal["shapes"] = "shapes"
        num_scenes: int = Field(6400, ge=2)
        captions: int = Field(4, ge=1)
        single: tuple[float, float] = (0.0, 0.0)
        single_epochs: int = Field(1, ge=1)
        held_out: int = Field(1000, ge=2)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch; scenes that fill none are left out."""
        return self.spec.num_scenes // self.batch_size

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Scenes that no other epoch has."""
        begin, end = self.spec.single
        share = begin + (end - begin) * min(1.0, epoch / max(1, self.spec.single_epochs - 1))
        for number in range(first, self.num_batches):
            start = epoch * self.spec.num_scenes + number * self.batch_size
            own = own_share(self.batch_size, worker, num_workers)
            scenes = scenes_of(self.seed, start + own.start, own.stop - own.start)
            random = np.random.default_rng([self.seed, start + own.start, self.spec.captions])
            captions, _ = captions_of(scenes, random, self.spec.captions, share)
            yield batch_of(scenes, captions)

    def held_out(self) -> Batch:
        """Scenes of another series, a caption of two objects for each."""
        scenes, captions, _ = held_out(self.spec.held_out)
        return batch_of(scenes, captions)

    @staticmethod
    def relevant(query_facts: torch.Tensor, document_facts: torch.Tensor) -> torch.Tensor:
        """A scene is relevant to every caption that is true of it."""
        held = _captions(query_facts.cpu().numpy()).hold(_scenes(document_facts.cpu().numpy()))
        return torch.from_numpy(held).to(query_facts.device)


def held_out(count: int, series: int = 0) -> tuple[Scenes, Captions, np.ndarray]:
    """Scenes that nothing is trained on, a caption of two objects for each, and its scene."""
    scenes = scenes_of(HELD_OUT + series, 0, count)
    captions, scene_C = captions_of(scenes, np.random.default_rng([HELD_OUT + series, count]))
    return scenes, captions, scene_C


def batch_of(scenes: Scenes, captions: Captions) -> Batch:
    """Scenes and captions as training reads them."""
    there = scenes.attributes[..., 2] >= 0
    return Batch(
        captions.texts,
        [{"image": png(scenes.picture(row))} for row in range(len(scenes))],
        torch.from_numpy(
            np.concatenate([captions.phrases.reshape(-1, 6), captions.relations[:, None]], axis=1)
        ),
        torch.from_numpy(
            np.concatenate([scenes.attributes, scenes.centres.astype(np.int64)], axis=2)
        ).flatten(1),
        boxes=[boxes[own] for boxes, own in zip(scenes.boxes, there, strict=True)],
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

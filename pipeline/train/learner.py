"""What the loop trains: a module that embeds parts of a batch, and a loss on all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from pipeline.config import ComponentSpec, SpecError
from pipeline.registry import ENCODERS, EncoderSpec
from pipeline.training_data.base import Batch, TrainingData
from pipeline.training_data.quality import Quality

#: What a part of a batch becomes, by name; rows are queries or documents.
Embedded = dict[str, torch.Tensor]


class BaseSpec(ComponentSpec):
    """Base of the specs of learners.

    Attributes:
        encoder: The encoder that is trained, or whose output is.
    """

    encoder: EncoderSpec


BaseSpecT = TypeVar("BaseSpecT", bound=BaseSpec)


class Learner(torch.nn.Module, ABC, Generic[BaseSpecT]):
    """A model and its objective. Subclasses carry a nested `Spec`.

    A batch is embedded part by part and its loss is computed on the whole, so that the loop can
    have contrastive batches that are larger than what the memory holds at once.
    """

    Spec: ClassVar[type[BaseSpec]]
    spec: BaseSpecT
    model: torch.nn.Module  # with all parameters that `forward` uses; the loss may have its own

    @classmethod
    @abstractmethod
    def check(cls, spec: BaseSpecT) -> None:
        """Raises `SpecError` if it cannot be built here; no weights are loaded."""

    @classmethod
    def check_data(cls, spec: BaseSpecT, data: TrainingData) -> None:
        """Raises `SpecError` if its encoder reads nothing of what the data's documents are."""
        encoder = spec.encoder
        wants = ENCODERS.load(encoder.name).wants(encoder)
        if data.gives and not data.gives & set(wants):
            rule = f"an encoder of {' or '.join(sorted(data.gives))}, as in the data"
            problem = f"reads {', '.join(wants)}"
            raise SpecError("encoder.name", encoder.name, rule, problem)

    def prepare(self, data: TrainingData) -> None:
        """Does what is done once for each query and document, before the first step."""

    @abstractmethod
    def read(self, batch: Batch) -> Any:
        """What of a batch is work for the CPU, done while the step before it is computed."""

    @abstractmethod
    def parts(self, read: Any, size: int) -> Sequence[Any]:
        """The parts of a batch, of at most `size` documents each."""

    @abstractmethod
    def forward(self, part: Any) -> Embedded:
        """Embeds a part of a batch, with gradients."""

    @abstractmethod
    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of one worker's rows, whose mean over workers is what is minimised; and figures.

        Args:
            embedded: the rows of all parts.
        """

    @abstractmethod
    def evaluate(self, held_out: Batch, data: TrainingData) -> Quality:
        """Quality on what is not trained on, more is better; the first figure chooses the best.

        The loop puts the learner into evaluation mode before, and back into training mode after.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the trained artefact, as an encoder or a compressor reads it."""


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of parts whose second axes may differ in length, filled up with zeros."""
    if parts[0].ndim < 2:
        return torch.cat(list(parts))
    size = max(part.shape[1] for part in parts)
    filled = [
        torch.cat([part, part.new_zeros(len(part), size - part.shape[1], *part.shape[2:])], dim=1)
        for part in parts
    ]
    return torch.cat(filled)

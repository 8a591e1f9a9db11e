"""Base class of learners: a module that embeds mini-batches, and a loss on the whole batch."""

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

#: Embeddings of a mini-batch or a batch, by name. Rows are queries or documents.
Embedded = dict[str, torch.Tensor]


class BaseSpec(ComponentSpec):
    """Base of the specs of learners."""

    encoder: EncoderSpec
    """The encoder that is trained, or whose output is."""


BaseSpecT = TypeVar("BaseSpecT", bound=BaseSpec)


class Learner(torch.nn.Module, ABC, Generic[BaseSpecT]):
    """A model and its objective. Subclasses carry a nested `Spec`.

    A batch is embedded by mini-batches and its loss is computed on the whole, so that contrastive
    batches may exceed the memory (GradCache).
    """

    Spec: ClassVar[type[BaseSpec]]
    spec: BaseSpecT
    model: torch.nn.Module  # with all parameters that `forward` uses; the loss may have its own

    @classmethod
    @abstractmethod
    def check(cls, spec: BaseSpecT) -> None:
        """Raises `SpecError` if the learner cannot be built here, without loading weights."""

    @classmethod
    def check_data(cls, spec: BaseSpecT, data: TrainingData) -> None:
        """Raises `SpecError` if the encoder reads none of the modalities of the documents."""
        encoder = spec.encoder
        wants = ENCODERS.load(encoder.name).supported_inputs(encoder)
        if data.payload_kinds and not data.payload_kinds & set(wants):
            rule = f"an encoder of {' or '.join(sorted(data.payload_kinds))}, as in the data"
            problem = f"reads {', '.join(wants)}"
            raise SpecError("encoder.name", encoder.name, rule, problem)

    def prepare(self, data: TrainingData) -> None:
        """Does the work that is needed once per query and document, before the first step."""

    @abstractmethod
    def read(self, batch: Batch) -> Any:
        """Preprocesses a batch on the CPU, while the device computes the step before."""

    @abstractmethod
    def mini_batches(self, inputs: Any, size: int) -> Sequence[Any]:
        """Splits a preprocessed batch.

        Args:
            inputs: Preprocessed batch, as `read` returns it.
            size: Maximum number of documents per mini-batch.
        """

    @abstractmethod
    def forward(self, mini_batch: Any) -> Embedded:
        """Embeds a mini-batch, with gradients."""

    @abstractmethod
    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes the loss of this worker's rows.

        Args:
            embedded: Embeddings of the whole batch of this worker.
            batch: The batch.
            data: Training data, which defines the relevance of documents.

        Returns:
            The loss, whose mean over workers is minimised, and metrics by name.
        """

    @abstractmethod
    def evaluate(self, validation: Batch, data: TrainingData) -> Quality:
        """Evaluates the model on validation data.

        The loop switches the learner to evaluation mode before, and back to training mode after.

        Args:
            validation: All validation queries and documents.
            data: Training data, which defines the metrics.

        Returns:
            Metrics by name, higher is better. The first one selects the best model.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the trained weights in the form that an encoder or a compressor loads."""


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates rows, padding the second axis with zeros to the longest one."""
    if tensors[0].ndim < 2:
        return torch.cat(list(tensors))
    size = max(tensor.shape[1] for tensor in tensors)
    padded = [
        torch.cat([t, t.new_zeros(len(t), size - t.shape[1], *t.shape[2:])], dim=1) for t in tensors
    ]
    return torch.cat(padded)

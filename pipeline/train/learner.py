"""Base class of learners, which embed mini-batches and compute a loss over the whole batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from pipeline.config import ComponentSpec, SpecError
from pipeline.registry import ENCODERS, EncoderSpec
from pipeline.train.data.base import Batch, TrainingData
from pipeline.train.data.quality import Quality

#: Embeddings of a mini-batch or a batch, by name. Rows are queries or documents.
Embedded = dict[str, torch.Tensor]


class BaseSpec(ComponentSpec):
    """Base of the specs of learners."""

    encoder: EncoderSpec
    """The encoder that is trained, or whose output is."""


BaseSpecT = TypeVar("BaseSpecT", bound=BaseSpec)


class Learner(torch.nn.Module, ABC, Generic[BaseSpecT]):
    """Base class of learners, which consist of a model and its training objective.

    Subclasses have a nested `Spec`. The mini-batches of a batch are embedded separately, and the
    loss is computed over the whole batch. Contrastive batches can therefore be larger than the
    memory would allow (GradCache).
    """

    Spec: ClassVar[type[BaseSpec]]
    spec: BaseSpecT
    model: torch.nn.Module  # with all parameters that `forward` uses; the loss may have its own

    @classmethod
    @abstractmethod
    def check(cls, spec: BaseSpecT) -> None:
        """Raises `SpecError` if the learner cannot be built. Weights are not loaded."""

    @classmethod
    def check_data(cls, spec: BaseSpecT, data: TrainingData) -> None:
        """Raises `SpecError` if the encoder supports none of the modalities of the documents."""
        encoder = spec.encoder
        wants = ENCODERS.load(encoder.name).supported_inputs(encoder)
        if data.payload_kinds and not data.payload_kinds & set(wants):
            rule = f"an encoder of {' or '.join(sorted(data.payload_kinds))}, as in the data"
            problem = f"reads {', '.join(wants)}"
            raise SpecError("encoder.name", encoder.name, rule, problem)

    def prepare(self, data: TrainingData) -> None:
        """Performs work that is needed once per query and document, before the first step."""

    @abstractmethod
    def read(self, batch: Batch) -> Any:
        """Preprocesses a batch on the CPU while the device is busy with the previous step."""

    @abstractmethod
    def mini_batches(self, inputs: Any, size: int) -> Sequence[Any]:
        """Splits a batch that `read` returned into parts of at most `size` documents."""

    @abstractmethod
    def forward(self, mini_batch: Any) -> Embedded:
        """Embeds a mini-batch, with gradients."""

    @abstractmethod
    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns the loss of this worker's rows, to be averaged over workers, and its metrics."""

    @abstractmethod
    def evaluate(self, validation: Batch, data: TrainingData) -> Quality:
        """Evaluates the model on the validation data.

        The loop switches the learner to evaluation mode before the call and back to training mode
        afterwards.

        Returns:
            Metrics by name, higher is better. The first one selects the best model.

        Raises:
            FloatingPointError: The model computes non-finite values.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the trained weights in the form that an encoder or a compressor loads."""


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates rows. The second axis is padded with zeros to the longest row."""
    if tensors[0].ndim < 2:
        return torch.cat(list(tensors))
    size = max(tensor.shape[1] for tensor in tensors)
    padded = [
        torch.cat([t, t.new_zeros(len(t), size - t.shape[1], *t.shape[2:])], dim=1) for t in tensors
    ]
    return torch.cat(padded)

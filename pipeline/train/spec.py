"""The spec of a training run."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from pipeline import config
from pipeline.config import Uri
from pipeline.registry import LearnerSpec, TrainingDataSpec

#: Subfolder of a run with the metrics of every validation query, one file per evaluation.
VALIDATION = "validation"
Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(config.Spec):
    """AdamW and its learning rate schedule."""

    learning_rate: float = Field(2e-4, gt=0, le=1e30)
    """Peak learning rate."""
    weight_decay: float = Field(1e-5, ge=0, allow_inf_nan=False)
    """Decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Coefficients of the running means of gradients and of their squares."""
    warmup_ratio: float = Field(0.1, ge=0, le=1)
    """Fraction of all steps in which the learning rate rises linearly."""
    warmup_steps: int | None = Field(None, ge=0)
    """Number of steps in which the learning rate rises linearly, in place of `warmup_ratio`."""
    warmup_learning_rate: float = Field(0.0, ge=0, le=1e30)
    """Learning rate from which the warm-up starts."""
    schedule: Literal["cosine", "linear", "constant", "exponential"] = "cosine"
    """Decay after the warm-up: `cosine` or `linear` to `min_learning_rate`, `constant`, or
    `exponential`, which multiplies the learning rate by `decay_rate` after each epoch."""
    min_learning_rate: float = Field(0.0, ge=0, le=1e30)
    """Minimum learning rate after the warm-up."""
    decay_rate: float = Field(0.9, gt=0, le=1)
    """Factor of the schedule `exponential`."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum norm of all gradients together, to which larger gradients are clipped. Null disables
    gradient clipping."""

    def rate(self, step: int, num_steps: int, steps_per_epoch: int | None = None) -> float:
        """Returns the learning rate of a step.

        >>> spec = Optimiser(learning_rate=1.0, warmup_ratio=0.5)
        >>> [round(spec.rate(step, 8), 2) for step in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        num_warmup = self.warmup_steps
        if num_warmup is None:
            num_warmup = round(self.warmup_ratio * num_steps)
        if step < num_warmup:
            first = self.warmup_learning_rate
            return first + (self.learning_rate - first) * (step + 1) / num_warmup
        if self.schedule == "exponential":
            factor = self.decay_rate ** (step // (steps_per_epoch or num_steps))
            return max(self.min_learning_rate, self.learning_rate * factor)
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        factor = {
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "linear": 1 - progress,
            "constant": 1.0,
        }[self.schedule]
        lowest = min(self.min_learning_rate, self.learning_rate)
        return lowest + (self.learning_rate - lowest) * factor


class TrainSpec(config.Spec):
    """A training run."""

    name: str
    """Name of the run."""
    output: Uri
    """Output folder of the run."""
    learner: LearnerSpec
    """Model and objective."""
    data: TrainingDataSpec
    """Training and validation data."""
    seed: int = Field(0, ge=0, lt=1 << 31)
    """Seed of weight initialisation, dropout and the order of the data."""
    batch_size: int = Field(64, ge=2)
    """Documents per contrastive batch, over all workers."""
    mini_batch_size: int | None = Field(None, ge=1)
    """Maximum number of documents embedded at once by one worker. Null embeds its whole share of
    the batch. Smaller mini-batches are embedded twice, once for the loss and once for its gradients
    (GradCache, Gao et al., 2021), so that the batch may exceed the memory."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Batches per optimiser step. Their gradients are averaged."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the data."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum number of optimiser steps, or null for no limit beyond the epochs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass. Trained weights, their gradients, the optimiser states and
    losses are float32 in both cases, whatever dtype the encoder's spec names. Frozen weights have
    that dtype."""
    fsdp: bool = False
    """Shards weights, gradients and optimiser states over the workers (FSDP), instead of
    replicating them."""
    activation_checkpointing: bool = False
    """Recomputes activations in the backward pass instead of storing them, which is about a third
    slower."""
    optimiser: Optimiser = Optimiser()
    """Optimiser and learning rate schedule."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations on the validation data. Null disables them."""
    checkpoint_every: int = Field(500, ge=1)
    """Steps between checkpoints."""
    keep_last: int = Field(2, ge=1)
    """Number of checkpoints to keep, beside the best model."""
    log_every: int = Field(20, ge=1)
    """Steps between log lines."""

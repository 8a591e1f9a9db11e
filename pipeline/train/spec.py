"""The spec of a training run."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from pipeline import config
from pipeline.config import Uri
from pipeline.registry import LearnerSpec, TrainingDataSpec

#: The folder of a run that has each measure of each held-out query, a file a measured step.
HELD_OUT = "held_out"
Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(config.Spec):
    """AdamW and how its learning rate goes.

    Attributes:
        learning_rate: the largest.
        warmup: the share of all steps in which it rises from 0.
        schedule: how it goes on: `cosine` to 0, `linear` to 0, or `constant`.
        clip: the largest norm of all gradients together; null: any.
    """

    learning_rate: float = Field(2e-4, gt=0, le=1e30)
    weight_decay: float = Field(1e-5, ge=0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    warmup: float = Field(0.1, ge=0, le=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    clip: float | None = Field(1.0, gt=0)

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> spec = Optimiser(learning_rate=1.0, warmup=0.5)
        >>> [round(spec.rate(step, 8), 2) for step in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        num_warmup = round(self.warmup * num_steps)
        if step < num_warmup:
            return self.learning_rate * (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, num_steps - num_warmup)
        share = {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 - done,
            "constant": 1.0,
        }[self.schedule]
        return self.learning_rate * share


class TrainSpec(config.Spec):
    """A training run.

    Attributes:
        name: of the run.
        output: the folder of everything that it writes.
        learner: what is trained, and by which objective.
        data: what on.
        batch_size: documents of a contrastive batch, over all workers.
        part_size: documents that are embedded at once; null: all of a worker's. With fewer, each
            part is embedded twice (once for the loss, once for its gradients: GradCache, Gao et
            al., 2021), and the batch may be larger than what the memory holds.
        accumulate: batches whose gradients' mean makes one step.
        epochs: how often the data are seen.
        max_steps: at most so many steps; null: as many as the epochs have.
        precision: Precision of the forward pass. Trained weights, their gradients, the optimiser's
            states and losses are float32 in both cases, whatever dtype the encoder's spec names;
            weights that stay frozen have that dtype.
        shard: whether weights, their gradients and the states of the optimiser are spread over the
            workers (FSDP); else each worker has all of them. For what one cannot hold.
        recompute: whether a layer's activations are computed again for its gradients instead of
            being kept, about a third slower.
        evaluate_every: steps between measurements on held-out data; null: none.
        checkpoint_every: steps between checkpoints.
        keep: the last so many checkpoints are kept, and the best model.
        log_every: steps between lines of the log.
    """

    name: str
    output: Uri
    learner: LearnerSpec
    data: TrainingDataSpec
    seed: int = Field(0, ge=0, lt=1 << 31)
    batch_size: int = Field(64, ge=2)
    part_size: int | None = Field(None, ge=1)
    accumulate: int = Field(1, ge=1)
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    shard: bool = False
    recompute: bool = False
    optimiser: Optimiser = Optimiser()
    evaluate_every: int | None = Field(None, ge=1)
    checkpoint_every: int = Field(500, ge=1)
    keep: int = Field(2, ge=1)
    log_every: int = Field(20, ge=1)

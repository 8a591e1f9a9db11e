"""Contrastive training of encoders: late interaction, single vectors or both, also compressed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from pipeline import config
from pipeline.compression.samer import object_labels, places
from pipeline.encoders.sequences import ModelInput, SequenceEncoder
from pipeline.registry import COMPRESSORS, ENCODERS, CompressorSpec, EncoderSpec
from pipeline.tokens import TokenBatch, pad
from pipeline.train.data import Batch, TrainingData
from pipeline.train.distributed import gathered, num_workers
from pipeline.train.learner import Embedded, Learner
from pipeline.train.losses import info_nce, late_scores

Score = Literal["late", "single", "hybrid"]


@dataclass(frozen=True)
class Read:
    """A batch as the model reads it."""

    queries: list[list[ModelInput]]
    documents: list[list[ModelInput]]
    boxes: Sequence[Any] | None


class Contrastive(Learner):
    """An encoder, by InfoNCE over the scores of a batch's queries with its documents.

    With a compressor the documents' vectors go through it before they are scored, and gradients
    through its means: seeds, assignments and selections are constants (SaMer, section 4.3).
    """

    class Spec(config.Spec):
        """What is trained, and by which scores.

        Attributes:
            encoder: what is trained begins as this one.
            compressor: of the documents' vectors.
            score: what queries and documents are compared by: `late`, MaxSim as the mean over the
                query's tokens (SMART, eq. 4); `single`, the product of the single vectors (eq. 2);
                `hybrid`, their sum (eq. 5).
            temperature: tau of eq. 7.
            learn_temperature: whether tau is trained too, from there on.
            symmetric: whether documents also choose among queries, the mean of both.
        """

        name: Literal["contrastive"] = "contrastive"
        encoder: EncoderSpec
        compressor: CompressorSpec = Field(default="none", validate_default=True)
        score: Score = "late"
        temperature: float = Field(0.07, gt=0, allow_inf_nan=False)
        learn_temperature: bool = False
        symmetric: bool = False

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.encoder: SequenceEncoder = ENCODERS.build(spec.encoder)
        self.compressor = COMPRESSORS.build(spec.compressor)
        self.model = self.encoder.model
        self._reader = self.encoder.reader(spec.encoder)
        log_scale = torch.tensor(-math.log(spec.temperature), device=self.encoder.device)
        self.log_scale = torch.nn.Parameter(log_scale, requires_grad=spec.learn_temperature)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the encoder cannot be built here."""
        ENCODERS.load(spec.encoder.name).check(spec.encoder)

    # -- embedding ---------------------------------------------------------------------------------

    def read(self, batch: Batch) -> Read:
        """Queries and documents through the model's processor."""
        queries = [[self._reader.text(text)[0]] for text in batch.queries]
        return Read(queries, [self._reader.item(item) for item in batch.documents], batch.boxes)

    def parts(self, read: Read, size: int) -> list[Read]:
        """Documents in their order, and as many parts of the queries."""
        num_parts = max(1, math.ceil(len(read.documents) / size))
        each = math.ceil(len(read.queries) / num_parts)
        parts = []
        for number in range(num_parts):
            own = slice(number * size, (number + 1) * size)
            queries = read.queries[number * each : (number + 1) * each]
            boxes = None if read.boxes is None else read.boxes[own]
            parts.append(Read(queries, read.documents[own], boxes))
        return parts

    def forward(self, part: Read) -> Embedded:
        """Vectors, masks and single vectors of a part's queries and compressed documents."""
        embedded: Embedded = {}
        for name, inputs in (("query", part.queries), ("document", part.documents)):
            tokens = self.encoder.tokens(inputs)
            if name == "document":
                tokens = self._compressed(tokens, part.boxes)
            embedded[f"{name}_vectors"] = tokens.vectors.float()
            embedded[f"{name}_mask"] = tokens.mask
            if self.spec.score != "late":
                embedded[f"{name}_pooled"] = tokens.pooled
        return embedded

    def _compressed(self, tokens: TokenBatch, boxes: Sequence[Any] | None) -> TokenBatch:
        if boxes is not None and getattr(self.spec.compressor, "object_prior", False):
            tokens = with_objects(tokens, boxes)
        return self.compressor.compress(tokens)

    # -- objective ---------------------------------------------------------------------------------

    def scores(self, queries: Embedded, documents: Embedded) -> torch.Tensor:
        """(Q, B) by the spec's `score`."""
        total = 0.0
        if self.spec.score != "single":
            total = late_scores(
                queries["query_vectors"],
                queries["query_mask"],
                documents["document_vectors"],
                documents["document_mask"],
            )
        if self.spec.score != "late":
            total = total + queries["query_pooled"] @ documents["document_pooled"].T
        return total

    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """InfoNCE with the documents of all workers as candidates (SaMer, eq. 7)."""
        device = self.encoder.device
        facts = {"query": batch.query_facts.to(device), "document": batch.document_facts.to(device)}
        every = {name: gathered(tensor) for name, tensor in embedded.items()}
        every_fact = {name: gathered(tensor) for name, tensor in facts.items()}
        temperature = (-self.log_scale).exp()
        positive_QB = data.relevant(facts["query"], every_fact["document"])
        scores_QB = self.scores(embedded, every)
        loss = info_nce(scores_QB, positive_QB, temperature)
        if self.spec.symmetric:
            alone = num_workers() == 1
            backwards_BQ = (scores_QB if alone else self.scores(every, embedded)).T
            relevant_BQ = data.relevant(every_fact["query"], facts["document"]).T
            loss = (loss + info_nce(backwards_BQ, relevant_BQ, temperature)) / 2
        best_Q1 = scores_QB.detach().argmax(dim=1, keepdim=True)
        figures = {
            "in_batch_accuracy": positive_QB.gather(1, best_Q1).float().mean().item(),
            "temperature": temperature.item(),
        }
        return loss, figures

    # -- quality -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, held_out: Batch, data: TrainingData) -> dict[str, float]:
        """R@1, R@5 and R@10 of held-out queries among held-out documents."""
        embedded = self.embedded(self.read(held_out))
        device = self.encoder.device
        scores_QB = self.scores(embedded, embedded)
        facts = held_out.query_facts.to(device), held_out.document_facts.to(device)
        return recall(scores_QB, data.relevant(*facts))

    @torch.no_grad()
    def embedded(self, read: Read, size: int = 64) -> Embedded:
        """Vectors of any number of queries and documents, embedded part by part."""
        every: dict[str, list[torch.Tensor]] = {}
        for part in self.parts(read, size):
            for name, tensor in self(part).items():
                every.setdefault(name, []).append(tensor)
        return {name: joined(parts) for name, parts in every.items()}

    def save(self, folder: Path) -> None:
        """The model with its processor, as `save_pretrained` writes them."""
        self.model.save_pretrained(folder)
        self._reader.processor.save_pretrained(folder)


def with_objects(tokens: TokenBatch, boxes: Sequence[Any]) -> TokenBatch:
    """Tokens with the annotated object that each lies in (SaMer, section 4.2)."""
    import dataclasses

    import numpy as np

    lengths = np.array([len(own) for own in boxes])
    flat = np.concatenate([np.asarray(own, dtype=np.float32).reshape(-1, 4) for own in boxes])
    boxes_BM4, box_mask_BM = pad(torch.from_numpy(flat), lengths)
    device = tokens.mask.device
    objects = object_labels(places(tokens), boxes_BM4.to(device), box_mask_BM.to(device))
    return dataclasses.replace(tokens, objects=objects)


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


def recall(scores_QB: torch.Tensor, positive_QB: torch.Tensor) -> dict[str, float]:
    """The share of queries with a relevant document among the best 1, 5 and 10.

    >>> scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    >>> recall(scores, torch.tensor([[True, False], [True, False]]))["R@1"]
    0.5
    """
    order_QB = scores_QB.argsort(dim=1, descending=True, stable=True)
    found_QB = positive_QB.gather(1, order_QB)
    return {f"R@{k}": found_QB[:, :k].any(dim=1).float().mean().item() for k in (1, 5, 10)}

"""Contrastive training of encoders with late interaction, single vectors or both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.trained import trained_fields, weight_hashes, write_trained_compressor
from pipeline.registry import ENCODERS
from pipeline.runtime import distributed
from pipeline.runtime.atomic import check_writable
from pipeline.runtime.distributed import gather_rows, num_workers
from pipeline.tokens import TokenBatch, unit_vectors
from pipeline.train.compressors import Compressors, check_compressors
from pipeline.train.contrastive_spec import ContrastiveSpec, Distillation
from pipeline.train.data.base import NO_LABEL, Batch, Phrases, TrainingData
from pipeline.train.data.quality import Quality, grounding, utilisation
from pipeline.train.learner import Embedded, Learner, concatenate
from pipeline.train.losses import LOWEST, info_nce, kl_divergence, late_scores, margin_mse
from pipeline.train.trainables import TRAINABLES, Inputs


@dataclass(frozen=True)
class ModelInputs:
    """A batch as the model reads it.

    Attributes:
        boxes: (M, 4) annotated object boxes of each document, or None.
    """

    queries: Inputs
    documents: Inputs
    boxes: Sequence[np.ndarray] | None

    def split(self, size: int) -> list[ModelInputs]:
        """Splits the documents in groups of `size`, and the queries into as many groups."""
        count = max(1, math.ceil(len(self.documents) / size))
        num_queries = math.ceil(len(self.queries) / count)
        mini_batches = []
        for number in range(count):
            rows = slice(number * size, (number + 1) * size)
            query_rows = slice(number * num_queries, (number + 1) * num_queries)
            boxes = None if self.boxes is None else self.boxes[rows]
            queries, documents = select(self.queries, query_rows), select(self.documents, rows)
            mini_batches.append(ModelInputs(queries, documents, boxes))
        return mini_batches


class Contrastive(Learner[ContrastiveSpec]):
    """Trains an encoder with InfoNCE over the scores of the queries and documents of a batch.

    If a compressor is set, it is applied to the vectors of the documents before scoring. Gradients
    flow through the means that it computes and to its parameters. Seeds, assignments and selections
    are treated as constants (SaMer, section 4.3). Attention statistics are constants as well,
    except those of appended tokens, which are the weights of AGC's means.
    """

    Spec = ContrastiveSpec

    def __init__(self, spec: ContrastiveSpec):
        super().__init__()
        self.spec = spec
        self.tuning = TRAINABLES[spec.trainable](spec)
        self.encoder = self.tuning.encoder
        with config.within("learner"):
            _check_score(spec, self.encoder.pooled_dim)
        self.compressors = Compressors(spec, self.encoder)
        # Checkpoints contain the parameters in the order of these attributes.
        self.device, self.model = self.tuning.device, self.tuning.model
        # The gradients of both are synchronised like those of the loss.
        self.appended, self.head = self.tuning.appended, self.tuning.head
        self.compressor = self.compressors.by_label[""]
        self.compressor_module = self.compressor.module
        if self.compressor_module is not None:
            self.compressor_module.to(self.device)
        log_scale = torch.tensor(-math.log(spec.temperature), device=self.device)
        self.log_scale = torch.nn.Parameter(log_scale, requires_grad=spec.learn_temperature)

    @classmethod
    def check(cls, spec: ContrastiveSpec) -> None:
        """Raises `SpecError` if the encoder is not available, or cannot be trained in this way."""
        encoder_class = ENCODERS.load(spec.encoder.name)
        with config.within("encoder"):
            encoder_class.check(spec.encoder)
        _check_score(spec, getattr(encoder_class, "pooled_dim", 0))
        if spec.hidden_states_cache is not None:
            check_writable(spec.hidden_states_cache, "hidden_states_cache")
        check_compressors(spec)
        TRAINABLES[spec.trainable].check(spec, encoder_class)

    @classmethod
    def check_data(cls, spec: ContrastiveSpec, data: TrainingData) -> None:
        """Raises `SpecError` in the same cases, and if there is nothing to distill."""
        super().check_data(spec, data)
        if spec.distillation is not None and not data.has_teacher:
            rule = "null for data without teacher scores"
            raise SpecError("distillation", spec.distillation.kind, rule)

    def train(self, mode: bool = True) -> Self:
        """Switches between training and evaluation mode. Frozen models stay in the latter."""
        super().train(mode)
        self.tuning.train(mode)
        return self

    # -- embedding ---------------------------------------------------------------------------------

    def prepare(self, data: TrainingData) -> None:
        """Caches the missing hidden states, if the spec names a cache."""
        self.tuning.prepare(data, self.compressors.taps)

    def read(self, batch: Batch) -> ModelInputs:
        """Preprocesses queries and documents, or reads their cached hidden states."""
        queries = self.tuning.read_queries(batch.queries)
        documents = self.tuning.read_documents(batch.documents, batch.document_keys)
        return ModelInputs(queries, documents, batch.boxes)

    def mini_batches(self, inputs: ModelInputs, size: int) -> list[ModelInputs]:
        """Splits the documents in order, and the queries into the same number of groups."""
        return inputs.split(size)

    def forward(self, mini_batch: ModelInputs, labels: Iterable[str] = ("",)) -> Embedded:
        """Returns vectors, masks and single vectors; a label follows `document` in their names."""
        batches = {"query": self._queries(mini_batch.queries)}
        documents = self._documents(mini_batch.documents)
        for label in labels:
            compressed = self.compressors.compress(documents, mini_batch.boxes, label)
            batches[f"document{label}"] = compressed
        embedded: Embedded = {}
        for name, tokens in batches.items():
            embedded[f"{name}_vectors"] = tokens.vectors.float()
            embedded[f"{name}_mask"] = tokens.mask
            if self.spec.score != "maxsim":
                assert tokens.pooled is not None
                embedded[f"{name}_pooled"] = tokens.pooled
        return embedded

    def _queries(self, inputs: Inputs) -> TokenBatch:
        """Returns the token vectors of queries, normalised."""
        tokens = self.tuning.tokens(inputs)
        if tokens.normalised:
            return tokens
        return dataclasses.replace(tokens, vectors=unit_vectors(tokens), normalised=True)

    def _documents(self, inputs: Inputs) -> TokenBatch:
        """Returns the token vectors of documents, which must be finite in an evaluation."""
        tokens = self.tuning.tokens(inputs, self.compressors.taps)
        if not self.training:
            _check_finite(tokens)
        return tokens

    # -- objective ---------------------------------------------------------------------------------

    def scores(self, queries: Embedded, documents: Embedded) -> torch.Tensor:
        """Computes the (Q, B) scores of the type that is set in the spec."""
        total: Any = 0.0
        if self.spec.score != "single_vector":
            total = late_scores(
                queries["query_vectors"],
                queries["query_mask"],
                documents["document_vectors"],
                documents["document_mask"],
                reduction=self.spec.reduction,
            )
        if self.spec.score != "maxsim":
            total = total + queries["query_pooled"] @ documents["document_pooled"].T
        return total

    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes the contrastive loss over the documents of all workers, and distillation."""
        spec, device = self.spec, self.device
        labels = {
            "query": batch.query_labels.to(device),
            "document": batch.document_labels.to(device),
        }
        gathered_batch = {name: gather_rows(tensor) for name, tensor in embedded.items()}
        gathered_labels = {name: gather_rows(tensor) for name, tensor in labels.items()}
        temperature = (-self.log_scale).exp()
        positive_QB = data.relevant(labels["query"], gathered_labels["document"])
        # Padding documents are no candidates.
        is_filler_B = (gathered_labels["document"] == NO_LABEL).all(dim=1)
        scores_QB = self.scores(embedded, gathered_batch).masked_fill(is_filler_B, LOWEST)
        loss = scores_QB.new_zeros(())
        if spec.contrastive_weight:
            losses_A = info_nce(scores_QB, positive_QB, temperature, spec.positives)
            contrast = mean_over_workers(losses_A)
            if spec.symmetric:
                backwards_BQ = (
                    scores_QB if num_workers() == 1 else self.scores(gathered_batch, embedded)
                ).T
                relevant_BQ = data.relevant(gathered_labels["query"], labels["document"]).T
                losses_A = info_nce(backwards_BQ, relevant_BQ, temperature, spec.positives)
                contrast = (contrast + mean_over_workers(losses_A)) / 2
            loss = loss + spec.contrastive_weight * contrast
        if spec.distillation is not None:
            loss = loss + distillation_loss(
                spec.distillation, scores_QB, batch.teacher, is_filler_B, positive_QB, temperature
            )
        best_Q1 = scores_QB.detach().argmax(dim=1, keepdim=True)
        metrics = {
            "in_batch_accuracy": positive_QB.gather(1, best_Q1).float().mean().item(),
            "temperature": temperature.item(),
        }
        return loss, metrics

    # -- quality -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, validation: Batch, data: TrainingData) -> Quality:
        """Returns the metrics of the data. If there are phrases, grounding metrics are added.

        Raises:
            FloatingPointError: The model computes non-finite vectors.
        """
        # Inference has no boxes.
        inputs = dataclasses.replace(self.read(validation), boxes=None)
        by_label = self.embedded(inputs)
        quality = self._quality(by_label[""], validation, data)
        # Grounding needs the assignment of tokens to vectors.
        if validation.phrases is not None and self.compressor.assignment_form is not None:
            quality |= self._grounding(validation.phrases, inputs.documents)
        for label in list(by_label)[1:]:
            found = self._quality(by_label[label], validation, data)
            quality |= {f"{name} ({label})": values for name, values in found.items()}
        return quality

    def _quality(self, embedded: Embedded, validation: Batch, data: TrainingData) -> Quality:
        quality = data.quality(self.scores(embedded, embedded), validation)
        if self.spec.score == "single_vector":
            return quality
        queries, documents = (
            TokenBatch(embedded[f"{name}_vectors"], embedded[f"{name}_mask"], True)
            for name in ("query", "document")
        )
        labels = validation.query_labels, validation.document_labels
        return quality | utilisation(queries, documents, data.relevant(*labels))

    def embedded(self, inputs: ModelInputs, size: int = 64) -> dict[str, Embedded]:
        """Embeds a batch in chunks of `size` documents and returns embeddings by compressor label.

        The model runs once for all compressors.
        """
        labels = self.compressors.by_label
        chunks = [self(mini_batch, labels) for mini_batch in self.mini_batches(inputs, size)]
        whole = {name: concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return {
            label: {
                name.replace(f"document{label}_", "document_"): tensor
                for name, tensor in whole.items()
                if name.startswith(("query_", f"document{label}_"))
            }
            for label in labels
        }

    def _grounding(self, phrases: Phrases, documents: Inputs, size: int = 64) -> Quality:
        inputs = self.tuning.read_queries(phrases.texts)
        found: list[Quality] = []
        for start in range(0, len(phrases.texts), size):
            chunk = slice(start, start + size)
            rows = phrases.documents[chunk]
            tokens = self._documents(select(documents, rows))
            if tokens.extents is None:
                return {}
            queries = self._queries(select(inputs, chunk))
            vectors = self.compressors.compress(tokens)
            found.append(grounding(queries, vectors, tokens, phrases.boxes[chunk]))
        return {name: np.concatenate([metrics[name] for metrics in found]) for name in found[0]}

    def save(self, folder: Path) -> None:
        """Writes the model with its processor, or only its trained part, for an encoder to load.

        Appended tokens and the parameters of the compressor are written with the hashes of the
        weights that the encoder has with them.
        """
        if self.spec.score == "single_vector":
            _store_scale(self.model, self.log_scale.item())
        self.tuning.save(folder)
        if self.appended is None and self.compressor_module is None:
            return
        spec = self.spec.encoder
        trained = trained_fields(config.dump(spec), self.spec.trainable, str(folder))
        write_trained_compressor(
            folder,
            config.dump(self.spec.compressor),
            spec.name,
            weight_hashes(type(self.encoder), spec.model_copy(update=trained)),
            self.encoder.dim,
            self.appended,
            self.compressor_module,
        )


def _check_score(spec: ContrastiveSpec, pooled_dim: int | None) -> None:
    if spec.score != "maxsim" and pooled_dim is None:
        rule = f"maxsim for the encoder {spec.encoder.name}, which has no single vector"
        raise SpecError("score", spec.score, rule)


@torch.no_grad()
def _store_scale(model: torch.nn.Module, log_scale: float) -> None:
    """Stores the scale of the scores in a dual encoder; EDJE samples negatives with it."""
    scale = getattr(model, "logit_scale", None)
    if isinstance(scale, torch.Tensor):
        scale.fill_(log_scale)


def _check_finite(tokens: TokenBatch) -> None:
    values = [tokens.vectors[tokens.mask], *(tap[tokens.mask] for tap in tokens.taps.values())]
    if tokens.appended is not None:
        values.append(tokens.appended)
    if not all(bool(tensor.isfinite().all()) for tensor in values):
        raise FloatingPointError("non-finite vectors or attention of documents")


def distillation_loss(
    spec: Distillation,
    scores_QB: torch.Tensor,
    teacher_QB: torch.Tensor | None,
    is_filler_B: torch.Tensor,
    positive_QB: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Computes the weighted loss of distillation.

    `teacher_QB` is NaN where the teacher has no score. `is_filler_B` is True at padding documents.
    """
    if teacher_QB is None:
        rule = "null for data without teacher scores"
        raise SpecError("learner.distillation", spec.kind, rule)
    teacher_QB = teacher_QB.to(scores_QB.device).masked_fill(is_filler_B, torch.nan) * spec.scale
    if spec.kind == "kl":
        losses = kl_divergence(scores_QB, teacher_QB, temperature)
    else:
        losses = margin_mse(scores_QB, teacher_QB, positive_QB)
    return spec.weight * mean_over_workers(losses)


def mean_over_workers(losses_A: torch.Tensor) -> torch.Tensor:
    """Returns a loss whose mean over workers is the mean of the losses of all workers."""
    count = torch.tensor(float(len(losses_A)), device=losses_A.device)
    # A mean times a weight, so that the result on one worker is the rounded mean.
    weight = count / distributed.mean(count).clamp_min(1e-6)
    return losses_A.sum() / max(1, len(losses_A)) * weight


def select(inputs: Inputs, rows: slice | Sequence[int]) -> Inputs:
    """Returns some rows of model inputs."""
    if isinstance(inputs, TokenBatch):
        return inputs.take(rows if isinstance(rows, slice) else torch.tensor(rows))
    return inputs[rows] if isinstance(rows, slice) else [inputs[row] for row in rows]

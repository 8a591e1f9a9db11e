"""Contrastive training of encoders with late interaction, single vectors or both."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import safetensors.torch
import torch
from pydantic import Field, model_validator

from pipeline import config, distributed
from pipeline.atomic import check_writable
from pipeline.compression import Compressor
from pipeline.compression.memtok import MemTok
from pipeline.compression.samer import object_labels, token_coordinates
from pipeline.config import SpecError, TrainedSpec, Uri
from pipeline.distributed import gather_rows, num_workers
from pipeline.encoders import Trainable
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.loading import ADAPTER_SETTINGS, WEIGHTS, adapter_folder
from pipeline.encoders.smart import Adapter
from pipeline.encoders.trained import (
    TrainedCompressor,
    appended_shape,
    load_appended_tokens,
    load_parameters,
    supports_appended_tokens,
    weight_hashes,
    write_trained_compressor,
)
from pipeline.registry import COMPRESSORS, ENCODERS, CompressorSpec
from pipeline.scores import Score
from pipeline.taps import APPENDED_STATISTICS, Tap, average_layers, single_layer_taps
from pipeline.tokens import TokenBatch, normalise, pad
from pipeline.train import lora, sharding
from pipeline.train.frozen import cached_hidden_states, encoded, query_key
from pipeline.train.learner import BaseSpec, Embedded, Learner, concatenate
from pipeline.train.lora import Lora
from pipeline.train.losses import (
    LOWEST,
    Positives,
    Reduction,
    info_nce,
    kl_divergence,
    late_scores,
    margin_mse,
)
from pipeline.training_data.base import NO_LABEL, Batch, Phrases, TrainingData
from pipeline.training_data.quality import Quality, grounding, utilisation

if TYPE_CHECKING:
    from pipeline.train.hidden_states import HiddenStates

log = logging.getLogger("maxray.train")

#: Values of `trainable` for which the model itself has no gradients, so that its output can be
#: cached.
FREEZE = ("projection", "adapter")

#: Maximum number of appended tokens.
MAX_APPENDED = 1 << 16

#: Preprocessed sequences; texts or items themselves for an adapter; or cached hidden states.
Inputs = Sequence[Any] | Sequence[str] | Sequence[Mapping[str, Any]] | TokenBatch


@dataclass(frozen=True)
class ModelInputs:
    """A batch as the model reads it.

    Attributes:
        queries: Inputs of the queries.
        documents: Inputs of the documents.
        boxes: (M, 4) annotated object boxes of each document, or None.
    """

    queries: Inputs
    documents: Inputs
    boxes: Sequence[np.ndarray] | None


class Distillation(config.Spec):
    """Distillation from the scores of another model, the teacher."""

    kind: Literal["kl", "margin_mse"] = "kl"
    """`kl`, the divergence from the teacher's distribution over the documents that it scored for a
    query; or `margin_mse`, the squared error of its margins."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of this loss."""
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor on the teacher's scores, which corresponds to dividing this model's scores by the
    temperature for `kl`."""


class Contrastive(Learner["Contrastive.Spec"]):
    """Trains an encoder with InfoNCE over the scores of the queries and documents of a batch.

    If a compressor is set, it is applied to the vectors of the documents before scoring. Gradients
    flow through the means that it computes and to its parameters. Seeds, assignments and selections
    are treated as constants (SaMer, section 4.3). Attention statistics are constants as well,
    except those of appended tokens, which are the weights of AGC's means.
    """

    class Spec(BaseSpec):
        """Options of contrastive training.

        If the encoder has an `adapter`, it is merged into the weights before training. With
        `trainable: lora`, the adapter itself is trained further instead. The encoder's
        `appended_tokens` are trained further.
        """

        name: Literal["contrastive"] = "contrastive"
        trainable: Literal["all", "projection", "lora", "tokens", "adapter"] = "all"
        """Trainable parameters: `all` of the model and its projection; only the `projection`, which
        maps hidden states to vectors, for queries and documents alike; `lora`, low-rank matrices
        beside its layers; the appended `tokens` and the projection, if the encoder has one; or an
        `adapter` behind any frozen encoder (SMART, eq. 6). Appended tokens are trained with `all`
        and `lora` too, and the compressor's parameters always."""
        lora: Lora | None = None
        """LoRA settings."""
        adapter_dim: int = Field(128, ge=1)
        """Dimension of an adapter's vectors. For an encoder whose `layer` is a list, the adapter
        also learns the weight of each layer."""
        hidden_states_cache: Uri | None = None
        """Folder in which hidden states of the frozen model are cached, so that it runs once per
        query and document. Null runs it in each epoch. For `projection` and `adapter`."""
        hidden_states_dtype: Literal["float16", "float32"] = "float16"
        """Precision of the cached hidden states."""
        validation_compressors: tuple[CompressorSpec, ...] = ()
        """Additional compressors with which the validation documents are evaluated, for example
        other budgets. They must not have parameters, as these would not be trained. The names of
        their metrics end with the compressor in parentheses."""
        compressor: CompressorSpec = Field(default="none", validate_default=True)
        """Compressor of the documents' vectors."""
        num_appended_tokens: int | None = Field(None, ge=1, le=MAX_APPENDED)
        """Number of new learned tokens that are appended to each document, for AGC and MemTok. Null
        trains those of `encoder.appended_tokens`, if any."""
        score: Score = "maxsim"
        """Score of a query and a document: `maxsim` (SMART, eq. 4); `single_vector`, the inner
        product of the single vectors (eq. 2); `hybrid`, their sum (eq. 5)."""
        reduction: Reduction = "mean"
        """MaxSim as the `mean` or the `sum` over the query's tokens. Sums are larger by a factor of
        the query length; a temperature of 1 is common for them."""
        temperature: float = Field(0.07, gt=0, allow_inf_nan=False)
        """Temperature tau of eq. 7."""
        learn_temperature: bool = False
        """Trains the temperature, starting from `temperature`."""
        positives: Positives = "any"
        """Target for a query with several positives in the batch: `any` maximises their total
        probability (SaMer, eq. 7); `all` is the cross entropy with a target that they share
        equally."""
        symmetric: bool = False
        """Averages the loss of queries over documents with that of documents over queries."""
        contrastive_weight: float = Field(1.0, ge=0, allow_inf_nan=False)
        """Weight of the contrastive loss; 0 trains by distillation only."""
        distillation: Distillation | None = None
        """Distillation of the data's teacher scores, added to the contrastive loss."""

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            if self.hidden_states_cache is not None and self.trainable not in FREEZE:
                rule = f"null when trainable is {self.trainable}"
                raise SpecError("hidden_states_cache", self.hidden_states_cache, rule)
            if self.num_appended_tokens is not None and _appended_folder(self.encoder) is not None:
                rule = "null when encoder.appended_tokens is given"
                raise SpecError("num_appended_tokens", self.num_appended_tokens, rule)
            if self.has_appended_tokens and self.hidden_states_cache is not None:
                rule = "null with appended tokens, which pass through the model in each step"
                raise SpecError("hidden_states_cache", self.hidden_states_cache, rule)
            if self.has_appended_tokens and self.trainable in FREEZE:
                raise SpecError(
                    "trainable", self.trainable, "one of all, lora, tokens if tokens are appended"
                )
            if self.lora is not None and self.trainable != "lora":
                rule = "null unless trainable is lora"
                raise SpecError("lora", config.dump(self.lora), rule)
            if self.trainable == "projection" and self.score != "maxsim":
                raise SpecError("score", self.score, "maxsim when only the projection is trained")
            if self.contrastive_weight == 0 and self.distillation is None:
                rule = "greater than 0 without distillation"
                raise SpecError("contrastive_weight", self.contrastive_weight, rule)
            return self

        @property
        def has_appended_tokens(self) -> bool:
            """True if learned tokens are appended to documents."""
            return self.num_appended_tokens is not None or bool(_appended_folder(self.encoder))

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        encoder_spec = spec.encoder
        if spec.trainable == "lora":  # its adapter is trained, not merged
            encoder_spec = encoder_spec.model_copy(update={"adapter": None})
        if spec.has_appended_tokens:  # they are loaded below, with the hashes of the adapter
            encoder_spec = encoder_spec.model_copy(update={"appended_tokens": None})
        encoder = ENCODERS.build(encoder_spec)
        with config.within("learner"):
            _check_score(spec, encoder.pooled_dim)
        self.encoder: Any = encoder
        with config.within("learner.compressor"):
            self.compressor = _compressor(spec.compressor)
        self._validation_compressors = {
            compressor_label(other): COMPRESSORS.build(other)
            for other in spec.validation_compressors
        }
        self.appended: AppendedTokens | None = None
        self.head: torch.nn.Module | None = None
        self._tuned = None
        if spec.trainable == "adapter":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            width = encoder.dim // encoder.num_states
            self.model = Adapter(width, spec.adapter_dim, encoder.num_states).to(self.device)
        elif isinstance(encoder, Trainable):
            self.device, self.model = encoder.device, encoder.model
            if spec.has_appended_tokens:
                self.appended = self._appended_tokens(encoder)
                with config.within("learner.encoder"):
                    encoder.append_tokens(self.appended)
            self.head = encoder.head  # its gradients are synchronised like those of the loss
            if self.head is not None:
                self.head.requires_grad_(spec.trainable == "all")
            if spec.trainable in ("projection", "tokens"):
                self.model.requires_grad_(False)
                if encoder.has_projection:
                    encoder.projection.requires_grad_(True)
            elif spec.trainable == "lora":
                self._tuned = lora.attach(
                    self.model, spec.lora or Lora(), encoder.lora_target_modules
                )
                adapter = getattr(spec.encoder, "adapter", None)
                first = adapter_folder(adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
                if first is not None:
                    lora.load(self._tuned, first, encoder.checkpoint_prefix)
        else:
            raise _not_trainable(spec.encoder.name).below("learner")
        self.compressor_module = self.compressor.module
        if self.compressor_module is not None:
            self.compressor_module.to(self.device)
        self._taps: tuple[Tap, ...] = ()
        self._num_layers = 0
        compressors = (self.compressor, *self._validation_compressors.values())
        needed = [tap for compressor in compressors for tap in compressor.needs_taps]
        if needed:
            attention = encoder.attention(spec.encoder)
            if attention is None:
                rule = f"a compressor without attention ({spec.encoder.name} provides none)"
                raise SpecError("learner.compressor.name", spec.compressor.name, rule)
            self._num_layers = attention.num_layers
            self._taps = single_layer_taps(needed, self._num_layers)
        log_scale = torch.tensor(-math.log(spec.temperature), device=self.device)
        self.log_scale = torch.nn.Parameter(log_scale, requires_grad=spec.learn_temperature)
        self._states: HiddenStates | None = None
        self._has_remarked = False  # the compressor's remark on the items is logged once

    def _appended_tokens(self, encoder: Trainable[Any]) -> AppendedTokens:
        """Returns new appended tokens, or those that the encoder's spec names."""
        if self.spec.num_appended_tokens is not None:
            return AppendedTokens.create(self.spec.num_appended_tokens, encoder.embedding)
        with config.within("learner.encoder"):
            tokens = load_appended_tokens(type(encoder), self.spec.encoder)
        assert tokens is not None, "the spec names appended tokens"
        return tokens

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the encoder is not available, or cannot be trained in this way."""
        encoder_class = ENCODERS.load(spec.encoder.name)
        if spec.trainable != "adapter":
            if not issubclass(encoder_class, Trainable):
                raise _not_trainable(spec.encoder.name)
            if spec.trainable == "projection" and not encoder_class.has_projection:
                names = [
                    n for n in ENCODERS.names() if getattr(ENCODERS.load(n), "has_projection", 0)
                ]
                rule = f"all or lora (projection needs one of the encoders {', '.join(names)})"
                raise SpecError("trainable", "projection", rule)
        with config.within("encoder"):
            encoder_class.check(spec.encoder)
        _check_score(spec, getattr(encoder_class, "pooled_dim", 0))
        if spec.hidden_states_cache is not None:
            check_writable(spec.hidden_states_cache, "hidden_states_cache")
        if spec.trainable == "lora":
            lora.check()
            if getattr(encoder_class, "has_task_adapters", False):
                rule = f"another value for {spec.encoder.name}, which has one adapter per task"
                raise SpecError("trainable", "lora", rule)
        for compressor in (spec.compressor, *spec.validation_compressors):
            compressor_class = COMPRESSORS.load(compressor.name)
            if compressor_class.needs_fit:
                rule = "a compressor that needs no fitting (for the pruning of hpc, use eos)"
                raise SpecError("compressor.name", compressor.name, rule)
            if compressor_class.needs_appended and not spec.has_appended_tokens:
                rule = "a number of tokens, or encoder.appended_tokens a folder, for the compressor"
                raise SpecError("num_appended_tokens", None, f"{rule} {compressor.name}")
        num_appended = spec.num_appended_tokens
        if num_appended is not None and not supports_appended_tokens(encoder_class):
            names = [n for n in ENCODERS.names() if supports_appended_tokens(ENCODERS.load(n))]
            rule = f"null for the encoder {spec.encoder.name}; tokens can be appended to the items"
            raise SpecError("num_appended_tokens", num_appended, f"{rule} of {', '.join(names)}")
        _check_budgets(spec)
        _check_parameters(spec)
        has_parameters = issubclass(COMPRESSORS.load(spec.compressor.name).Spec, TrainedSpec)
        if has_parameters and spec.trainable == "adapter":
            rule = "all, projection, lora or tokens with a compressor that has parameters"
            raise SpecError("trainable", spec.trainable, rule)
        if spec.trainable == "tokens" and not (has_parameters or spec.has_appended_tokens):
            rule = "all, projection, lora or adapter without appended tokens"
            raise SpecError("trainable", spec.trainable, rule)

    @classmethod
    def check_data(cls, spec: Spec, data: TrainingData) -> None:
        """Raises `SpecError` in the same cases, and if there is nothing to distill."""
        super().check_data(spec, data)
        if spec.distillation is not None and not data.has_teacher:
            rule = "null for data without teacher scores"
            raise SpecError("distillation", spec.distillation.kind, rule)

    def train(self, mode: bool = True) -> Self:
        """Switches between training and evaluation mode.

        A frozen model remains in evaluation mode. With LoRA, only the dropout of `lora.dropout` is
        switched.
        """
        super().train(mode)
        if self.spec.trainable in ("projection", "lora", "tokens"):
            self.model.eval()
            lora.train(self.model, mode)
            sharding.switch_checkpointing(self.model, mode)
        return self

    # -- hidden states of a frozen model -----------------------------------------------------------

    def prepare(self, data: TrainingData) -> None:
        """Caches the missing hidden states, if the spec names a cache.

        Raises:
            SpecError: For `hidden_states_cache`: the data differ between epochs.
        """
        if self.spec.hidden_states_cache is None:
            return
        origin = {
            "encoder": config.dump(self.spec.encoder) | {"max_batch_tokens": None},
            "weights": self.encoder.fingerprint,
            "taps": [tap.name for tap in self._taps],
        }
        self._states = cached_hidden_states(
            self.spec.hidden_states_cache,
            self.spec.hidden_states_dtype,
            origin,
            data,
            queries=lambda texts: self._frozen(self._read_queries(texts), self._taps),
            documents=lambda items: self._frozen(self._read_documents(items), self._taps),
        )

    # -- embedding ---------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ModelInputs:
        """Preprocesses queries and documents, or reads their cached hidden states."""
        if self._states is not None:
            states = self._states.read([query_key(text) for text in batch.queries])
            return ModelInputs(states, self._states.read(batch.document_keys), batch.boxes)
        queries = self._read_queries(batch.queries)
        return ModelInputs(queries, self._read_documents(batch.documents), batch.boxes)

    def _read_queries(self, texts: Sequence[str]) -> Inputs:
        if self.spec.trainable == "adapter":  # the encoder reads them itself
            return texts
        return self.encoder.read_queries(texts)

    def _read_documents(self, items: Sequence[Mapping[str, Any]]) -> Inputs:
        if self.spec.trainable == "adapter":
            return items
        return self.encoder.read_items(items)

    def mini_batches(self, inputs: ModelInputs, size: int) -> list[ModelInputs]:
        """Splits the documents in order, and the queries into the same number of groups."""
        count = max(1, math.ceil(len(inputs.documents) / size))
        num_queries = math.ceil(len(inputs.queries) / count)
        mini_batches = []
        for number in range(count):
            rows = slice(number * size, (number + 1) * size)
            query_rows = slice(number * num_queries, (number + 1) * num_queries)
            boxes = None if inputs.boxes is None else inputs.boxes[rows]
            mini_batches.append(
                ModelInputs(
                    select(inputs.queries, query_rows), select(inputs.documents, rows), boxes
                )
            )
        return mini_batches

    def forward(
        self, mini_batch: ModelInputs, compressors: Mapping[str, Compressor[Any]] | None = None
    ) -> Embedded:
        """Returns vectors, masks and single vectors of queries and compressed documents.

        Args:
            mini_batch: Model inputs.
            compressors: Compressors of the documents by a suffix of the names of their tensors;
                None for that of the spec, without a suffix.
        """
        queries = self.tokens(mini_batch.queries)
        documents = self.tokens(mini_batch.documents, self._taps)
        named = {"query": queries}
        for suffix, compressor in (compressors or {"": self.compressor}).items():
            compressed = self.compressed(documents, mini_batch.boxes, compressor)
            named[f"document{suffix}"] = compressed
        embedded: Embedded = {}
        for name, tokens in named.items():
            embedded[f"{name}_vectors"] = tokens.vectors.float()
            embedded[f"{name}_mask"] = tokens.mask
            if self.spec.score != "maxsim":
                assert tokens.pooled is not None
                embedded[f"{name}_pooled"] = tokens.pooled
        return embedded

    def tokens(self, inputs: Inputs, taps: Sequence[Any] = ()) -> TokenBatch:
        """Returns the token vectors of preprocessed inputs or of cached hidden states."""
        if self.spec.trainable not in FREEZE:
            return self.encoder.tokens(inputs, taps)
        if not isinstance(inputs, TokenBatch):
            inputs = self._frozen(inputs, taps)
        states = inputs.to(self.device)
        layer = self.model if self.spec.trainable == "adapter" else self.encoder.projection
        dtype = next(layer.parameters()).dtype
        vectors = normalise(layer(states.vectors.to(dtype)).float())
        return dataclasses.replace(states, vectors=vectors, normalised=True)

    def _frozen(self, inputs: Any, taps: Sequence[Any]) -> TokenBatch:
        """Returns the output of the frozen part of the model."""
        if self.spec.trainable == "projection":
            return self.encoder.states(inputs, taps)
        return encoded(self.encoder, inputs, taps)

    def compressed(
        self,
        tokens: TokenBatch,
        boxes: Sequence[np.ndarray] | None = None,
        compressor: Compressor[Any] | None = None,
    ) -> TokenBatch:
        """Compresses documents before scoring.

        Object boxes are passed to compressors that use them.

        Raises:
            FloatingPointError: The model computes non-finite values in an evaluation. During
                training, the loss shows them.
        """
        if not self.training:
            _check_finite(tokens)
        compressor = compressor or self.compressor
        if boxes is not None and compressor.uses_objects:
            tokens = with_objects(tokens, boxes)
        if self._taps:
            taps = {}
            for tap in compressor.needs_taps:
                values = average_layers(tap, tokens.taps, self._num_layers)
                is_learned = tap.statistic in APPENDED_STATISTICS
                taps[tap.name] = values if is_learned else values.detach()
            tokens = dataclasses.replace(tokens, taps=taps)
        if tokens.extents is not None and not self._has_remarked and bool(tokens.mask[0].any()):
            self._has_remarked = True
            if sentence := compressor.remark(tokens.extents[0, tokens.mask[0]].cpu().numpy()):
                log.warning("learner.compressor: %s", sentence)
        return compressor.compress(tokens)

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
        if (distillation := spec.distillation) is not None:
            if batch.teacher is None:
                rule = "null for data without teacher scores"
                raise SpecError("learner.distillation", distillation.kind, rule)
            teacher_QB = batch.teacher.to(device).masked_fill(is_filler_B, torch.nan)
            teacher_QB = teacher_QB * distillation.scale
            if distillation.kind == "kl":
                losses = kl_divergence(scores_QB, teacher_QB, temperature)
            else:
                losses = margin_mse(scores_QB, teacher_QB, positive_QB)
            loss = loss + distillation.weight * mean_over_workers(losses)
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
            quality |= self._grounding(validation, validation.phrases, inputs)
        for label, embedded in by_label.items():
            if label:
                found = self._quality(embedded, validation, data)
                quality |= {f"{name} ({label})": values for name, values in found.items()}
        return quality

    def _quality(self, embedded: Embedded, validation: Batch, data: TrainingData) -> Quality:
        """Returns the metrics of the data, and for MaxSim those of the use of the vectors."""
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
        """Embeds queries and documents in chunks of `size` documents, for an evaluation.

        Returns:
            The embeddings by label of the compressor, with an empty label for the one of the spec.
            The model runs once for all compressors.
        """
        compressors = {"": self.compressor, **self._validation_compressors}
        tensors: dict[str, list[torch.Tensor]] = {}
        for mini_batch in self.mini_batches(inputs, size):
            for name, tensor in self(mini_batch, compressors).items():
                tensors.setdefault(name, []).append(tensor)
        whole = {name: concatenate(rows) for name, rows in tensors.items()}
        queries = {name: tensor for name, tensor in whole.items() if name.startswith("query_")}
        return {
            label: queries
            | {
                f"document_{kind}": whole[f"document{label}_{kind}"]
                for kind in ("vectors", "mask", "pooled")
                if f"document{label}_{kind}" in whole
            }
            for label in compressors
        }

    def _grounding(
        self, validation: Batch, phrases: Phrases, model_inputs: ModelInputs, size: int = 64
    ) -> Quality:
        """Computes the grounding metrics of each phrase in its document."""
        words = dataclasses.replace(
            validation, queries=phrases.texts, documents=[], document_keys=[], boxes=None
        )
        inputs = self.read(words).queries
        found: list[Quality] = []
        for start in range(0, len(phrases.texts), size):
            chunk = slice(start, start + size)
            rows = phrases.documents[chunk]
            tokens = self.tokens(select(model_inputs.documents, rows), self._taps)
            if tokens.extents is None:
                return {}
            queries = self.tokens(select(inputs, chunk))
            found.append(grounding(queries, self.compressed(tokens), tokens, phrases.boxes[chunk]))
        return {name: np.concatenate([metrics[name] for metrics in found]) for name in found[0]}

    def save(self, folder: Path) -> None:
        """Writes the model with its processor, or only its trained part, for an encoder to load.

        Appended tokens and the parameters of the compressor are written with the hashes of the
        weights that the encoder has with them.
        """
        trained = self._save_encoder(folder)
        if self.appended is None and self.compressor_module is None:
            return
        spec = self.spec.encoder
        write_trained_compressor(
            folder,
            config.dump(self.spec.compressor),
            spec.name,
            weight_hashes(type(self.encoder), spec.model_copy(update=trained)),
            self.encoder.dim,
            self.appended,
            self.compressor_module,
        )

    def _save_encoder(self, folder: Path) -> dict[str, str | None]:
        """Writes the trained weights of the encoder; returns the spec fields that load them."""
        if isinstance(self.model, Adapter):
            self.model.save(folder, self.encoder.fingerprint)
            return {}
        if self._tuned is not None:
            lora.save(self._tuned, folder, self.encoder.checkpoint_prefix)
            return {"adapter": str(folder)}
        if self.spec.trainable in ("projection", "tokens"):
            if not self.encoder.has_projection:
                return {}
            weights = {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in self.encoder.projection.state_dict().items()
            }
            safetensors.torch.save_file(weights, folder / "projection.safetensors")
            return {"projection": str(folder)}
        scale = getattr(self.model, "logit_scale", None)
        if self.spec.score == "single_vector" and isinstance(scale, torch.Tensor):
            # Dual encoders store the scale of their scores, with which EDJE samples negatives.
            with torch.no_grad():
                scale.fill_(self.log_scale.item())
        self.encoder.save(folder)
        return {"model": str(folder), "revision": None, "adapter": None, "projection": None}


def _appended_folder(encoder: config.ComponentSpec) -> str | None:
    """Returns the folder of the appended tokens that the spec of an encoder names, if any."""
    return getattr(encoder, "appended_tokens", None)


def _compressor(spec: config.ComponentSpec) -> Compressor[Any]:
    """Returns a compressor with the parameters that its spec names, or with new ones.

    Raises:
        SpecError: For `weights`: the folder has no such parameters.
    """
    if not isinstance(spec, TrainedSpec) or spec.weights is None:
        return COMPRESSORS.build(spec)
    return COMPRESSORS.build(spec, load_parameters(spec.weights))


def _check_parameters(spec: Contrastive.Spec) -> None:
    """Checks the parameters of the compressors.

    Raises:
        SpecError: Those of the compressor were trained with other settings, or an additional
            compressor has parameters, which no run would train.
    """
    for field, compressor in _compressors(spec).items():
        if not isinstance(compressor, TrainedSpec):
            continue
        with config.within(field):
            if field != "compressor":
                raise SpecError("name", compressor.name, "a compressor without parameters")
            if compressor.weights is not None:
                described, _ = TrainedCompressor.read(compressor.weights, "weights")
                described.check_settings(compressor)


def _check_budgets(spec: Contrastive.Spec) -> None:
    """Checks that the budget of MemTok is the number of appended tokens, if there are any.

    Raises:
        SpecError: It is not, or the folder of the encoder has no such tokens.
    """
    folder = _appended_folder(spec.encoder)
    if folder is not None:
        with config.within("encoder"):
            num_tokens, _ = appended_shape(folder)
    elif spec.num_appended_tokens is not None:
        num_tokens = spec.num_appended_tokens
    else:
        return
    for field, compressor in _compressors(spec).items():
        if isinstance(compressor, MemTok.Spec):
            with config.within(field):
                if folder is None and compressor.num_vectors not in (None, num_tokens):
                    rule = f"{num_tokens}, the value of learner.num_appended_tokens"
                    raise SpecError("num_vectors", compressor.num_vectors, rule)
                MemTok(compressor).check_budget(num_tokens)


def _compressors(spec: Contrastive.Spec) -> dict[str, CompressorSpec]:
    """Returns the compressor and the additional ones of the validation, by field."""
    additional = enumerate(spec.validation_compressors)
    numbered = {f"validation_compressors[{number}]": other for number, other in additional}
    return {"compressor": spec.compressor, **numbered}


def _check_score(spec: Contrastive.Spec, pooled_dim: int | None) -> None:
    """Checks that the encoder has single vectors if the score compares them.

    Raises:
        SpecError: For `score`: it has none.
    """
    if spec.score != "maxsim" and pooled_dim is None:
        rule = f"maxsim for the encoder {spec.encoder.name}, which has no single vector"
        raise SpecError("score", spec.score, rule)


def _check_finite(tokens: TokenBatch) -> None:
    """Raises `FloatingPointError` if vectors or attention statistics are not finite."""
    values = [tokens.vectors[tokens.mask], *(tap[tokens.mask] for tap in tokens.taps.values())]
    if tokens.appended is not None:
        values.append(tokens.appended)
    if not all(bool(tensor.isfinite().all()) for tensor in values):
        raise FloatingPointError("non-finite vectors or attention of documents")


def compressor_label(spec: CompressorSpec) -> str:
    """Returns the name of a compressor with the fields that differ from their defaults.

    >>> compressor_label(COMPRESSORS.resolve({"name": "hpool", "num_vectors": 16}))
    'hpool num_vectors 16'
    """
    values = {name: value for name, value in config.dump(spec).items() if name != "name"}
    changed = [
        f"{name} {value}"
        for name, value in values.items()
        if getattr(spec, name) != type(spec).model_fields[name].default
    ]
    return " ".join([spec.name, *changed])


def _not_trainable(encoder: str) -> SpecError:
    """Returns the error for an encoder that has no trainable model."""
    names = [n for n in ENCODERS.names() if issubclass(ENCODERS.load(n), Trainable)]
    rule = f"one of {', '.join(names)}, unless trainable is adapter"
    return SpecError("encoder.name", encoder, rule)


def mean_over_workers(losses_A: torch.Tensor) -> torch.Tensor:
    """Returns a loss whose mean over workers is the mean of the losses of all workers.

    Args:
        losses_A: Losses of this worker, of any number.
    """
    count = torch.tensor(float(len(losses_A)), device=losses_A.device)
    # A mean times a weight, so that the result on one worker is the rounded mean.
    weight = count / distributed.mean(count).clamp_min(1e-6)
    return losses_A.sum() / max(1, len(losses_A)) * weight


def select(inputs: Inputs, rows: slice | Sequence[int]) -> Inputs:
    """Returns some rows of model inputs."""
    if isinstance(inputs, TokenBatch):
        return inputs.take(rows if isinstance(rows, slice) else torch.tensor(rows))
    return inputs[rows] if isinstance(rows, slice) else [inputs[row] for row in rows]


def with_objects(tokens: TokenBatch, boxes: Sequence[np.ndarray]) -> TokenBatch:
    """Labels each token with the annotated object that contains it (SaMer, section 4.2)."""
    lengths = np.array([len(boxes_M4) for boxes_M4 in boxes])
    flat = np.concatenate([np.asarray(boxes_M4, np.float32).reshape(-1, 4) for boxes_M4 in boxes])
    boxes_BM4, box_mask_BM = pad(torch.from_numpy(flat), lengths)
    device = tokens.mask.device
    objects = object_labels(token_coordinates(tokens), boxes_BM4.to(device), box_mask_BM.to(device))
    return dataclasses.replace(tokens, objects=objects)

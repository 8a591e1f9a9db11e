"""Contrastive training of encoders: late interaction, single vectors or both, also compressed."""

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
from pipeline.compression.samer import object_labels, places
from pipeline.config import SpecError, Uri
from pipeline.distributed import gathered, num_workers
from pipeline.encoders import Trainable
from pipeline.encoders.loading import ADAPTER_SETTINGS, WEIGHTS, adapter_of
from pipeline.encoders.smart import Adapter
from pipeline.registry import COMPRESSORS, ENCODERS, CompressorSpec
from pipeline.taps import Tap, average, single_taps
from pipeline.tokens import TokenBatch, normalise, pad
from pipeline.train import lora, sharding
from pipeline.train.frozen import encoded, kept, query_key
from pipeline.train.learner import BaseSpec, Embedded, Learner, joined
from pipeline.train.lora import Lora
from pipeline.train.losses import LOWEST, info_nce, kl_divergence, late_scores, margin_mse
from pipeline.training_data.base import NOTHING, Batch, Phrases, TrainingData
from pipeline.training_data.quality import Quality, grounding

if TYPE_CHECKING:
    from pipeline.train.states import States

log = logging.getLogger("maxray.train")

Score = Literal["late", "single", "hybrid"]
#: What is trained behind a model that stays as it is.
FREEZE = ("projection", "adapter")

#: What the encoder reads; for an adapter the texts or items themselves; or kept states.
Inputs = Sequence[Any] | Sequence[str] | Sequence[Mapping[str, Any]] | TokenBatch


@dataclass(frozen=True)
class Read:
    """A batch as the model reads it: sequences, or the states that a frozen model gave of them."""

    queries: Inputs
    documents: Inputs
    boxes: Sequence[np.ndarray] | None


class Distillation(config.Spec):
    """Learning from the scores that another model, the teacher, gave.

    Attributes:
        kind: `kl`, the divergence from the teacher's distribution over the documents that it
            scored for a query; or `margin_mse`, the squared error of its margins.
        weight: of this loss beside the contrastive one, which counts once.
        scale: the teacher's scores are multiplied by it, as those of this model are divided by the
            temperature for `kl`.
    """

    kind: Literal["kl", "margin_mse"] = "kl"
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)


class Contrastive(Learner["Contrastive.Spec"]):
    """An encoder, by InfoNCE over the scores of a batch's queries with its documents.

    With a compressor the documents' vectors go through it before they are scored, and gradients
    through its means: seeds, assignments and selections are constants (SaMer, section 4.3).
    """

    class Spec(BaseSpec):
        """What is trained, and by which scores.

        Attributes:
            encoder: what is trained begins as this one. Its `adapter` is merged into its weights
                before; but where `lora` is trained, its matrices are what training begins with.
            trains: `all` weights of the model; or the `projection` alone, which makes vectors of
                its states, for queries as for documents; or `lora`, low-rank matrices beside its
                layers; or an `adapter` behind any encoder, which stays as it is (SMART, eq. 6).
            lora: of what rank, and beside which layers.
            adapter_dim: the width of the vectors that an adapter makes. Of an encoder whose `layer`
                is a list it also learns how much each layer counts.
            states: a folder in which the states of the frozen model are kept, so that it runs once
                for each query and document; null: it runs in each epoch. For `projection` and
                `adapter`.
            states_dtype: of the kept states.
            compressor: of the documents' vectors.
            score: what queries and documents are compared by: `late`, MaxSim as the mean over the
                query's tokens (SMART, eq. 4); `single`, the product of the single vectors (eq. 2);
                `hybrid`, their sum (eq. 5).
            temperature: tau of eq. 7.
            learn_temperature: whether tau is trained too, from there on.
            symmetric: whether documents also choose among queries, the mean of both.
            distillation: of the data's teacher scores, beside the contrastive loss.
        """

        name: Literal["contrastive"] = "contrastive"
        trains: Literal["all", "projection", "lora", "adapter"] = "all"
        lora: Lora | None = None
        adapter_dim: int = Field(128, ge=1)
        states: Uri | None = None
        states_dtype: Literal["float16", "float32"] = "float16"
        compressor: CompressorSpec = Field(default="none", validate_default=True)
        score: Score = "late"
        temperature: float = Field(0.07, gt=0, allow_inf_nan=False)
        learn_temperature: bool = False
        symmetric: bool = False
        distillation: Distillation | None = None

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            if self.states is not None and self.trains not in FREEZE:
                rule = f"null when trains is {self.trains}"
                raise SpecError("states", self.states, rule)
            if self.lora is not None and self.trains != "lora":
                rule = "null unless trains is lora"
                raise SpecError("lora", config.dump(self.lora), rule)
            if self.trains == "projection" and self.score != "late":
                raise SpecError("score", self.score, "late when only the projection is trained")
            return self

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        encoder_class = ENCODERS.load(spec.encoder.name)
        begins = spec.encoder
        if spec.trains == "lora":  # its adapter is trained on, not merged
            begins = begins.model_copy(update={"adapter": None})
        self.encoder: Any = ENCODERS.build(begins)
        self.compressor = COMPRESSORS.build(spec.compressor)
        if spec.trains == "adapter":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            num_layers = self.encoder.num_states
            width = self.encoder.dim // num_layers
            self.model = Adapter(width, spec.adapter_dim, num_layers).to(self.device)
        else:
            self.device = self.encoder.device
            self.model = self.encoder.model
        self._taps: tuple[Tap, ...] = ()
        self._num_layers = 0
        if self.compressor.needs_taps:
            self._num_layers = encoder_class.attention(spec.encoder).num_layers
            self._taps = single_taps(self.compressor.needs_taps, self._num_layers)
        if spec.trains == "projection":
            self.model.requires_grad_(False)
            self.encoder.projection.requires_grad_(True)
        self._tuned = None
        if spec.trains == "lora":
            self._tuned = lora.attach(self.model, spec.lora or Lora(), encoder_class.lora_layers)
            adapter = getattr(spec.encoder, "adapter", None)
            first = adapter_of(adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
            if first is not None:
                lora.load(self._tuned, first, self.encoder.part_of_checkpoint)
        log_scale = torch.tensor(-math.log(spec.temperature), device=self.device)
        self.log_scale = torch.nn.Parameter(log_scale, requires_grad=spec.learn_temperature)
        self._states: States | None = None
        self._is_judged = False  # whether the compressor's settings suit the items

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the encoder cannot be built here, or not trained so."""
        encoder_class = ENCODERS.load(spec.encoder.name)
        if spec.trains != "adapter" and not issubclass(encoder_class, Trainable):
            names = [n for n in ENCODERS.names() if issubclass(ENCODERS.load(n), Trainable)]
            rule = f"one of {', '.join(names)}, unless trains is adapter"
            raise SpecError("encoder.name", spec.encoder.name, rule)
        with config.within("encoder"):
            encoder_class.check(spec.encoder)
        if spec.states is not None:
            check_writable(spec.states, "states")
        if spec.trains == "lora":
            lora.check()
            if spec.encoder.name == "jina_v4":
                rule = "another value for jina_v4, which has one adapter per task"
                raise SpecError("trains", "lora", rule)
        if spec.trains == "projection" and not encoder_class.has_projection:
            names = [n for n in ENCODERS.names() if getattr(ENCODERS.load(n), "has_projection", 0)]
            rule = f"all or lora (projection needs one of the encoders {', '.join(names)})"
            raise SpecError("trains", "projection", rule)
        if COMPRESSORS.load(spec.compressor.name).needs_fit:
            rule = "a compressor that needs no fitting (for the pruning of hpc, use eos)"
            raise SpecError("compressor.name", spec.compressor.name, rule)

    @classmethod
    def check_data(cls, spec: Spec, data: TrainingData) -> None:
        """Also raises `SpecError` if there is nothing to distill."""
        super().check_data(spec, data)
        if spec.distillation is not None and not data.has_teacher:
            rule = "null for data without teacher scores"
            raise SpecError("distillation", spec.distillation.kind, rule)

    def train(self, mode: bool = True) -> Self:
        """Switches to training or evaluation mode; a frozen model stays in evaluation mode.

        Of a model with LoRA only the dropout of `lora.dropout` is switched.
        """
        super().train(mode)
        if self.spec.trains in ("projection", "lora"):
            self.model.eval()
            lora.train(self.model, mode)
            sharding.recompute_in_training(self.model, mode)
        return self

    # -- the states of a frozen model --------------------------------------------------------------

    def prepare(self, data: TrainingData) -> None:
        """Keeps the states of all that is not there yet, if the spec says so.

        Raises:
            SpecError: for `states`: the data have other queries and documents in each epoch.
        """
        if self.spec.states is None:
            return
        about = {
            "encoder": config.dump(self.spec.encoder) | {"max_batch_tokens": None},
            "weights": self.encoder.fingerprint,
            "taps": [tap.name for tap in self._taps],
        }
        self._states = kept(
            (self.spec.states, self.spec.states_dtype),
            about,
            data,
            queries=lambda texts: self._frozen(self._read_queries(texts), self._taps),
            documents=lambda items: self._frozen(self._read_documents(items), self._taps),
        )

    # -- embedding ---------------------------------------------------------------------------------

    def read(self, batch: Batch) -> Read:
        """Queries and documents through the model's processor, or their states."""
        if self._states is not None:
            states = self._states.read([query_key(text) for text in batch.queries])
            return Read(states, self._states.read(batch.document_keys), batch.boxes)
        queries = self._read_queries(batch.queries)
        return Read(queries, self._read_documents(batch.documents), batch.boxes)

    def _read_queries(self, texts: Sequence[str]) -> Inputs:
        if self.spec.trains == "adapter":  # the encoder reads them itself
            return texts
        return self.encoder.read_queries(texts)

    def _read_documents(self, items: Sequence[Mapping[str, Any]]) -> Inputs:
        if self.spec.trains == "adapter":
            return items
        return self.encoder.read_items(items)

    def parts(self, read: Read, size: int) -> list[Read]:
        """Documents in their order, and as many parts of the queries."""
        num_parts = max(1, math.ceil(len(read.documents) / size))
        each = math.ceil(len(read.queries) / num_parts)
        parts = []
        for number in range(num_parts):
            own = slice(number * size, (number + 1) * size)
            queries = taken(read.queries, slice(number * each, (number + 1) * each))
            boxes = None if read.boxes is None else read.boxes[own]
            parts.append(Read(queries, taken(read.documents, own), boxes))
        return parts

    def forward(self, part: Read) -> Embedded:
        """Vectors, masks and single vectors of a part's queries and compressed documents."""
        queries = self.tokens(part.queries)
        documents = self.compressed(self.tokens(part.documents, self._taps), part.boxes)
        embedded: Embedded = {}
        for name, tokens in (("query", queries), ("document", documents)):
            embedded[f"{name}_vectors"] = tokens.vectors.float()
            embedded[f"{name}_mask"] = tokens.mask
            if self.spec.score != "late":
                assert tokens.pooled is not None
                embedded[f"{name}_pooled"] = tokens.pooled
        return embedded

    def tokens(self, inputs: Inputs, taps: Sequence[Any] = ()) -> TokenBatch:
        """The token vectors of what was read, or of kept states."""
        if self.spec.trains not in FREEZE:
            return self.encoder.tokens(inputs, taps)
        if not isinstance(inputs, TokenBatch):
            inputs = self._frozen(inputs, taps)
        states = inputs.to(self.device)
        layer = self.model if self.spec.trains == "adapter" else self.encoder.projection
        dtype = next(layer.parameters()).dtype
        vectors = normalise(layer(states.vectors.to(dtype)).float())
        return dataclasses.replace(states, vectors=vectors, normalised=True)

    def _frozen(self, inputs: Any, taps: Sequence[Any]) -> TokenBatch:
        """What the part of the model gives that is not trained."""
        if self.spec.trains == "projection":
            return self.encoder.states(inputs, taps)
        return encoded(self.encoder, inputs, taps)

    def compressed(
        self, tokens: TokenBatch, boxes: Sequence[np.ndarray] | None = None
    ) -> TokenBatch:
        """Documents' tokens as they are scored; with boxes, where the compressor uses them."""
        spec = self.spec.compressor
        if boxes is not None and (
            getattr(spec, "object_prior", False)
            or getattr(spec, "centroid", "") == "object_weighted"
        ):
            tokens = with_objects(tokens, boxes)
        if self._taps:
            taps = {
                tap.name: average(tap, tokens.taps, self._num_layers).detach()
                for tap in self.compressor.needs_taps
            }
            tokens = dataclasses.replace(tokens, taps=taps)
        if tokens.extents is not None and not self._is_judged and bool(tokens.mask[0].any()):
            self._is_judged = True
            if sentence := self.compressor.remark(tokens.extents[0, tokens.mask[0]].cpu().numpy()):
                log.warning("learner.compressor: %s", sentence)
        return self.compressor.compress(tokens)

    # -- objective ---------------------------------------------------------------------------------

    def scores(self, queries: Embedded, documents: Embedded) -> torch.Tensor:
        """(Q, B) by the spec's `score`."""
        total: Any = 0.0
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
        device = self.device
        facts = {"query": batch.query_facts.to(device), "document": batch.document_facts.to(device)}
        every = {name: gathered(tensor) for name, tensor in embedded.items()}
        every_fact = {name: gathered(tensor) for name, tensor in facts.items()}
        temperature = (-self.log_scale).exp()
        positive_QB = data.relevant(facts["query"], every_fact["document"])
        # What only fills up a batch is nothing that a query could choose.
        is_filler_B = (every_fact["document"] == NOTHING).all(dim=1)
        scores_QB = self.scores(embedded, every).masked_fill(is_filler_B, LOWEST)
        loss = info_nce(scores_QB, positive_QB, temperature) * weight(positive_QB)
        if self.spec.symmetric:
            alone = num_workers() == 1
            backwards_BQ = (scores_QB if alone else self.scores(every, embedded)).T
            relevant_BQ = data.relevant(every_fact["query"], facts["document"]).T
            backwards = info_nce(backwards_BQ, relevant_BQ, temperature)
            loss = (loss + backwards * weight(relevant_BQ)) / 2
        if (distillation := self.spec.distillation) is not None:
            loss = loss + self._distilled(distillation, embedded, batch, data, temperature)
        best_Q1 = scores_QB.detach().argmax(dim=1, keepdim=True)
        figures = {
            "in_batch_accuracy": positive_QB.gather(1, best_Q1).float().mean().item(),
            "temperature": temperature.item(),
        }
        return loss, figures

    def _distilled(
        self,
        spec: Distillation,
        embedded: Embedded,
        batch: Batch,
        data: TrainingData,
        temperature: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the distance of this worker's scores from the teacher's."""
        if batch.teacher is None:
            rule = "null for data without teacher scores"
            raise SpecError("learner.distillation", spec.kind, rule)
        scores_QB, device = self.scores(embedded, embedded), self.device
        teacher_QB = batch.teacher.to(device) * spec.scale
        if spec.kind == "kl":
            return spec.weight * kl_divergence(scores_QB, teacher_QB, temperature)
        facts = batch.query_facts.to(device), batch.document_facts.to(device)
        return spec.weight * margin_mse(scores_QB, teacher_QB, data.relevant(*facts))

    # -- quality -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, held_out: Batch, data: TrainingData) -> Quality:
        """What the data measure; and how phrases are grounded, if there are any."""
        read = dataclasses.replace(self.read(held_out), boxes=None)  # at inference there are none
        embedded = self.embedded(read)
        quality = data.quality(self.scores(embedded, embedded), held_out)
        if held_out.phrases is not None:
            quality |= self._grounding(held_out, held_out.phrases, read)
        return quality

    def embedded(self, read: Read, size: int = 64) -> Embedded:
        """Vectors of any number of queries and documents, embedded part by part."""
        every: dict[str, list[torch.Tensor]] = {}
        for part in self.parts(read, size):
            for name, tensor in self(part).items():
                every.setdefault(name, []).append(tensor)
        return {name: joined(parts) for name, parts in every.items()}

    def _grounding(self, held_out: Batch, phrases: Phrases, read: Read, size: int = 64) -> Quality:
        """Compares each phrase with its document."""
        words = dataclasses.replace(
            held_out, queries=phrases.texts, documents=[], document_keys=[], boxes=None
        )
        inputs = self.read(words).queries
        found: list[Quality] = []
        for start in range(0, len(phrases.texts), size):
            own = slice(start, start + size)
            rows = phrases.documents[own]
            tokens = self.tokens(taken(read.documents, rows), self._taps)
            if tokens.extents is None:
                return {}
            queries = self.tokens(taken(inputs, own))
            found.append(grounding(queries, self.compressed(tokens), tokens, phrases.boxes[own]))
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]}

    def save(self, folder: Path) -> None:
        """The model with its processor, or what was trained of it, for an encoder's spec."""
        if isinstance(self.model, Adapter):
            self.model.save(folder, self.encoder.fingerprint)
            return
        if self._tuned is not None:
            lora.save(self._tuned, folder, self.encoder.part_of_checkpoint)
            return
        if self.spec.trains == "projection":
            weights = {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in self.encoder.projection.state_dict().items()
            }
            safetensors.torch.save_file(weights, folder / "projection.safetensors")
            return
        scale = getattr(self.model, "logit_scale", None)
        if self.spec.score == "single" and isinstance(scale, torch.Tensor):
            # Dual encoders keep the scale of their scores, by which EDJE draws negatives.
            with torch.no_grad():
                scale.fill_(self.log_scale.item())
        self.encoder.save(folder)


def weight(positive_QB: torch.Tensor) -> torch.Tensor:
    """What a worker's mean over its queries counts for in the mean over workers.

    So much that each query with a positive counts the same, whoever has how many.
    """
    count = positive_QB.any(dim=1).sum().float()
    return count / distributed.mean(count).clamp_min(1e-6)


def taken(inputs: Inputs, rows: slice | Sequence[int]) -> Inputs:
    """Some of the sequences, or of the states."""
    if isinstance(inputs, TokenBatch):
        return inputs.take(rows if isinstance(rows, slice) else torch.tensor(rows))
    return inputs[rows] if isinstance(rows, slice) else [inputs[row] for row in rows]


def with_objects(tokens: TokenBatch, boxes: Sequence[np.ndarray]) -> TokenBatch:
    """Tokens with the annotated object that each lies in (SaMer, section 4.2)."""
    lengths = np.array([len(own) for own in boxes])
    flat = np.concatenate([np.asarray(own, dtype=np.float32).reshape(-1, 4) for own in boxes])
    boxes_BM4, box_mask_BM = pad(torch.from_numpy(flat), lengths)
    device = tokens.mask.device
    objects = object_labels(places(tokens), boxes_BM4.to(device), box_mask_BM.to(device))
    return dataclasses.replace(tokens, objects=objects)

"""Parameters that contrastive training trains: one class per value of the field `trainable`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from pipeline import config
from pipeline.config import SpecError, TrainedSpec
from pipeline.encoders import Encoder, Trainable
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.loading import ADAPTER_SETTINGS, WEIGHTS, adapter_folder
from pipeline.encoders.smart import Adapter
from pipeline.encoders.trained import (
    PROJECTION,
    load_appended_tokens,
    supports_appended_tokens,
)
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise
from pipeline.train import lora, sharding
from pipeline.train.contrastive_spec import ContrastiveSpec
from pipeline.train.data.base import TrainingData
from pipeline.train.frozen import FrozenEncoder

#: Preprocessed sequences; texts or items that an encoder reads itself; or cached hidden states.
Inputs = Sequence[Any] | TokenBatch


class FineTuning:
    """Fine-tuning of an encoder. This class trains `all` parameters of the model.

    Attributes:
        model: Module of the forward pass that contains trainable parameters.
        head: Layers behind the model that are not part of it, or None.
        appended: Learned tokens that are appended to documents, or None.
    """

    encoder: Any
    model: torch.nn.Module
    head: torch.nn.Module | None = None
    appended: AppendedTokens | None = None
    device: torch.device

    def __init__(self, spec: ContrastiveSpec):
        self.encoder = ENCODERS.build(self.initial_encoder(spec))
        self.set_up(spec)

    @classmethod
    def check(cls, spec: ContrastiveSpec, encoder_class: type[Encoder]) -> None:
        """Raises `SpecError` if the encoder or the compressor does not support this training."""
        if not issubclass(encoder_class, Trainable):
            rule = f"one of {_names(_is_trainable)}, unless trainable is adapter"
            raise SpecError("encoder.name", spec.encoder.name, rule)
        if spec.num_appended_tokens is not None and not supports_appended_tokens(encoder_class):
            rule = f"null for the encoder {spec.encoder.name}; tokens can be appended to the items"
            rule = f"{rule} of {_names(supports_appended_tokens)}"
            raise SpecError("num_appended_tokens", spec.num_appended_tokens, rule)

    def initial_encoder(self, spec: ContrastiveSpec) -> Any:
        """Returns the spec of the encoder with the weights that are not trained further."""
        if not spec.has_appended_tokens:
            return spec.encoder
        return spec.encoder.model_copy(update={"appended_tokens": None})

    def set_up(self, spec: ContrastiveSpec) -> None:
        """Sets the attributes and selects the trainable parameters."""
        self.device, self.model = self.encoder.device, self.encoder.model
        with config.within("learner.encoder"):
            if spec.num_appended_tokens is not None:
                number, embedding = spec.num_appended_tokens, self.encoder.embedding
                self.appended = AppendedTokens.create(number, embedding)
            else:  # their folder has the hashes of the adapter
                self.appended = load_appended_tokens(self.encoder, spec.encoder)
            if self.appended is not None:
                self.encoder.append_tokens(self.appended)
        self.head = self.encoder.head
        if self.head is not None:
            self.head.requires_grad_(True)

    def train(self, mode: bool) -> None:
        """Corrects the mode of the model after the learner has switched all modules to `mode`."""

    def prepare(self, data: TrainingData, taps: Sequence[Tap]) -> None:
        """Performs work that is needed once per query and document, before the first step."""

    def read_queries(self, texts: Sequence[str]) -> Inputs:
        """Returns the inputs of queries for `tokens`."""
        return self.encoder.read_queries(texts)

    def read_documents(self, items: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Inputs:
        """Returns the inputs of documents for `tokens`; `keys` are those of the cache."""
        return self.encoder.read_items(items)

    def tokens(self, inputs: Inputs, taps: Sequence[Tap] = ()) -> TokenBatch:
        """Computes token vectors with gradients, and attention statistics."""
        return self.encoder.tokens(inputs, taps)

    def save(self, folder: Path) -> None:
        """Writes the trained weights. `trained_fields` returns the spec fields that load them."""
        self.encoder.save(folder)


class FrozenModelTuning(FineTuning):
    """Base of the classes that train few parameters of a model, which stays in evaluation mode."""

    def set_up(self, spec: ContrastiveSpec) -> None:
        """Freezes the parameters of the model. Appended tokens are trained."""
        super().set_up(spec)
        for module in (self.model, self.head):
            if module is not None:
                module.requires_grad_(False)

    def train(self, mode: bool) -> None:
        """Switches only activation checkpointing."""
        self.model.eval()
        sharding.switch_checkpointing(self.model, mode)


class LoraTuning(FrozenModelTuning):
    """`lora`: Training of low-rank matrices beside the layers of the model."""

    @classmethod
    def check(cls, spec: ContrastiveSpec, encoder_class: type[Encoder]) -> None:
        """Raises `SpecError` in the same cases, and for encoders with an adapter per task."""
        super().check(spec, encoder_class)
        lora.check()
        if getattr(encoder_class, "has_task_adapters", False):
            rule = f"another value for {spec.encoder.name}, which has one adapter per task"
            raise SpecError("trainable", "lora", rule)

    def initial_encoder(self, spec: ContrastiveSpec) -> Any:
        """Returns the spec without the adapter, which is trained further instead of merged."""
        return super().initial_encoder(spec).model_copy(update={"adapter": None})

    def set_up(self, spec: ContrastiveSpec) -> None:
        """Adds new matrices to the model, or those of the encoder's adapter."""
        super().set_up(spec)
        default = self.encoder.lora_target_modules
        self.tuned = lora.attach(self.model, spec.lora or lora.Lora(), default)
        if adapter := getattr(spec.encoder, "adapter", None):
            folder = adapter_folder("adapter", adapter, None, [*WEIGHTS, ADAPTER_SETTINGS])
            lora.load(self.tuned, folder, self.encoder.checkpoint_prefix)

    def train(self, mode: bool) -> None:
        """Switches activation checkpointing and the dropout of the matrices."""
        super().train(mode)
        lora.train(self.model, mode)

    def save(self, folder: Path) -> None:
        """Writes the matrices in the form that the field `adapter` of an encoder reads."""
        lora.save(self.tuned, folder, self.encoder.checkpoint_prefix)


class LastLayerTuning(FrozenModelTuning):
    """Base of the classes that train the projection of the model, if it has one."""

    def set_up(self, spec: ContrastiveSpec) -> None:
        """Selects the projection."""
        super().set_up(spec)
        if self.encoder.has_projection:
            self.encoder.projection.requires_grad_(True)

    def save(self, folder: Path) -> None:
        """Writes the projection in the form that the field `projection` of an encoder reads."""
        if not self.encoder.has_projection:
            return
        weights = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self.encoder.projection.state_dict().items()
        }
        safetensors.torch.save_file(weights, folder / PROJECTION)


class TokenTuning(LastLayerTuning):
    """`tokens`: Training of appended tokens and of the projection."""

    @classmethod
    def check(cls, spec: ContrastiveSpec, encoder_class: type[Encoder]) -> None:
        """Raises `SpecError` in the same cases, and if no tokens or compressor can be trained."""
        super().check(spec, encoder_class)
        if not (_has_parameters(spec) or spec.has_appended_tokens):
            rule = "all, projection, lora or adapter without appended tokens"
            raise SpecError("trainable", "tokens", rule)


class HiddenStatesTuning(FineTuning):
    """Base of the classes that train a layer on the hidden states of a frozen model.

    The hidden states can be cached.
    """

    frozen: FrozenEncoder
    layer: torch.nn.Module
    normalised = True

    def prepare(self, data: TrainingData, taps: Sequence[Tap]) -> None:
        """Caches the missing hidden states, if the spec names a cache."""
        self.frozen.prepare(data, taps)

    def read_queries(self, texts: Sequence[str]) -> Inputs:
        """Returns model inputs, or hidden states if they are cached."""
        return self.frozen.queries(texts)

    def read_documents(self, items: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Inputs:
        """Returns model inputs, or hidden states if they are cached."""
        return self.frozen.documents(items, keys)

    def tokens(self, inputs: Inputs, taps: Sequence[Tap] = ()) -> TokenBatch:
        """Applies the layer to the hidden states."""
        states = self.frozen.states(inputs, taps).to(self.device)
        dtype = next(self.layer.parameters()).dtype
        vectors = self.layer(states.vectors.to(dtype)).float()
        vectors = normalise(vectors) if self.normalised else vectors
        return dataclasses.replace(states, vectors=vectors, normalised=self.normalised)


class ProjectedEncoder(FrozenEncoder):
    """Frozen encoder whose hidden states are those before its projection."""

    def read_queries(self, texts: Sequence[str]) -> Sequence[Any]:
        """Preprocesses queries."""
        return self.encoder.read_queries(texts)

    def read_items(self, items: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """Preprocesses items."""
        return self.encoder.read_items(items)

    def compute(self, inputs: Sequence[Any], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Computes the states before the projection."""
        return self.encoder.states(inputs, taps)


class ProjectionTuning(HiddenStatesTuning, LastLayerTuning):
    """`projection`: Training of the projection of hidden states to token vectors."""

    @classmethod
    def check(cls, spec: ContrastiveSpec, encoder_class: type[Encoder]) -> None:
        """Raises `SpecError` in the same cases, and if the encoder has no projection."""
        super().check(spec, encoder_class)
        if not _has_projection(encoder_class):
            rule = f"all or lora (projection needs one of the encoders {_names(_has_projection)})"
            raise SpecError("trainable", "projection", rule)

    def set_up(self, spec: ContrastiveSpec) -> None:
        """Selects the projection."""
        super().set_up(spec)
        self.layer, self.normalised = self.encoder.projection, self.encoder.normalised
        cache = spec.hidden_states_cache, spec.hidden_states_dtype
        self.frozen = ProjectedEncoder(self.encoder, *cache)


class AdapterTuning(HiddenStatesTuning):
    """`adapter`: Training of SMART's adapter (eq. 6) behind an encoder of any kind."""

    layer: Adapter

    @classmethod
    def check(cls, spec: ContrastiveSpec, encoder_class: type[Encoder]) -> None:
        """Raises `SpecError` if the compressor has parameters."""
        if _has_parameters(spec):
            rule = "all, projection, lora or tokens with a compressor that has parameters"
            raise SpecError("trainable", "adapter", rule)

    def set_up(self, spec: ContrastiveSpec) -> None:
        """Creates an adapter."""
        num_layers = self.encoder.num_states
        adapter = Adapter(self.encoder.dim // num_layers, spec.adapter_dim, num_layers)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = self.layer = adapter.to(self.device)
        cache = spec.hidden_states_cache, spec.hidden_states_dtype
        self.frozen = FrozenEncoder(self.encoder, *cache)

    def save(self, folder: Path) -> None:
        """Writes the adapter, which the encoder `smart` reads."""
        self.layer.save(folder, self.encoder.fingerprint)


#: Classes by the value of the field `trainable`.
TRAINABLES: dict[str, type[FineTuning]] = {
    "all": FineTuning,
    "projection": ProjectionTuning,
    "lora": LoraTuning,
    "tokens": TokenTuning,
    "adapter": AdapterTuning,
}


def _names(has_property: Callable[[type[Encoder]], bool]) -> str:
    return ", ".join(name for name in ENCODERS.names() if has_property(ENCODERS.load(name)))


def _is_trainable(encoder_class: type[Encoder]) -> bool:
    return issubclass(encoder_class, Trainable)


def _has_projection(encoder_class: type[Encoder]) -> bool:
    return getattr(encoder_class, "has_projection", False)


def _has_parameters(spec: ContrastiveSpec) -> bool:
    return issubclass(COMPRESSORS.load(spec.compressor.name).Spec, TrainedSpec)

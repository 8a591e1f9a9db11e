"""SMART's adapter: a small trained layer on the hidden states of a frozen encoder (section 4.3).

    z = L2(Linear(LayerNorm(h)))                                          (SMART, eq. 6)

For hidden states h_1 ... h_N of several layers, which only the paper's public code describes, the
adapter computes a weighted mean per token with learned weights:

    u_l = LayerNorm(h_l),  a = softmax over l of <w_l, u_l>,  z = L2(Linear(sum over l of a_l u_l))

with w initialised to 0, so that all layers have equal weight before training.

The frozen encoder can be any encoder. Training with `trainable: adapter` writes the adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import safetensors
import safetensors.torch
import torch

from pipeline import config
from pipeline.config import SpecError, Uri, reading
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.loading import WEIGHTS, check_training_hashes, hash_files
from pipeline.encoders.templates import Templates
from pipeline.registry import ENCODERS, EncoderSpec
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise

#: File name of an adapter's weights, whose shapes define the adapter.
WEIGHTS_FILE = "adapter.safetensors"


class Adapter(torch.nn.Module):
    """Normalised linear projection of hidden states, as defined in the module documentation.

    >>> Adapter(8, 4)(torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 4])
    >>> Adapter(8, 4, num_layers=2)(torch.ones(2, 3, 16)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(self, width: int, dim: int, num_layers: int = 1):
        super().__init__()
        self.num_layers = num_layers
        if num_layers > 1:
            self.layers = torch.nn.Parameter(torch.zeros(num_layers, width))
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, dim, bias=False)
        torch.nn.init.xavier_uniform_(self.linear.weight)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps states (..., num_layers * width) to unit vectors (..., dim), float32."""
        normed = self.norm(states.float().unflatten(-1, (self.num_layers, -1)))
        if self.num_layers == 1:
            return normalise(self.linear(normed.squeeze(-2)))
        share = (normed * self.layers).sum(dim=-1).softmax(dim=-1)
        return normalise(self.linear((share.unsqueeze(-1) * normed).sum(dim=-2)))

    def save(self, folder: Path, encoder: str = "") -> None:
        """Saves the weights and the fingerprint of the frozen encoder to an existing folder."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        safetensors.torch.save_file(weights, folder / WEIGHTS_FILE, {"encoder": encoder})

    @classmethod
    def load(cls, folder: str, width: int, num_layers: int = 1, encoder: str = "") -> Adapter:
        """Loads the adapter of a folder that training wrote.

        Args:
            folder: Folder with the adapter.
            width: Width of the hidden states of one layer.
            num_layers: Number of layers of the frozen encoder's token vectors.
            encoder: Fingerprint of the frozen encoder. Empty to skip the check.

        Raises:
            SpecError: For `adapter`: it does not exist, was modified after training, or was trained
                on another encoder, width or number of layers.
        """
        size = _input_size(width, num_layers)
        rule = f"a folder with an adapter ({WEIGHTS_FILE}) for {size}"
        check_adapter_file(folder, rule)
        check_training_hashes(folder, "adapter")
        path = Path(folder) / WEIGHTS_FILE
        errors = (safetensors.SafetensorError, KeyError, ValueError, RuntimeError)
        with reading("adapter", folder, rule, *errors):
            weights = safetensors.torch.load_file(path)
            with safetensors.safe_open(path, "pt") as file:
                trained_on = (file.metadata() or {}).get("encoder")
            adapter_dim, adapter_width = weights["linear.weight"].shape
            adapter = cls(adapter_width, adapter_dim, len(weights.get("layers", [0])))
            adapter.load_state_dict(weights)
        found = adapter.linear.in_features, adapter.num_layers
        if found != (width, num_layers):
            problem = f"has one for {_input_size(*found)}"
            raise SpecError("adapter", folder, rule, problem)
        if encoder and trained_on and trained_on != encoder:
            rule = "a folder with an adapter trained on this encoder and layer"
            raise SpecError("adapter", folder, rule, "was trained on another")
        return adapter.eval().requires_grad_(False)


def check_adapter_file(folder: Path | str, rule: str) -> None:
    """Raises `SpecError` if a folder has no adapter."""
    if not (Path(folder) / WEIGHTS_FILE).is_file():
        raise SpecError("adapter", str(folder), rule, f"has no {WEIGHTS_FILE}")


def _input_size(width: int, num_layers: int) -> str:
    layers = "" if num_layers == 1 else f" of {num_layers} layers"
    return f"states{layers} of width {width}"


def _delegate(name: str) -> Any:
    """Returns a class method of `Smart` that calls that of the frozen encoder."""

    def call(cls: type[Smart], spec: Smart.Spec, *arguments: Any) -> Any:
        return getattr(cls._inner_class(spec), name)(spec.encoder, *arguments)

    return classmethod(call)


class Smart(Encoder["Smart.Spec"]):
    """Encoder that applies SMART's adapter to the token vectors of another, frozen encoder.

    Pooled vectors, extents, spans and attention statistics are those of the frozen encoder.
    """

    class Spec(config.ComponentSpec):
        """The frozen encoder and its adapter."""

        name: Literal["smart"] = "smart"
        encoder: EncoderSpec
        """Encoder whose token vectors are the hidden states of one layer, or of several layers
        concatenated.
        """
        adapter: Uri
        """Folder of the adapter, as training wrote it."""

    default_inputs = ()
    has_preprocessor = True
    normalised = True

    def __init__(self, spec: Spec):
        self.spec = spec
        self._inner: Encoder = ENCODERS.build(spec.encoder)
        num_layers = self._inner.num_states
        width, fingerprint = self._inner.dim // num_layers, self._inner.fingerprint
        self._adapter = Adapter.load(spec.adapter, width, num_layers, fingerprint)
        self.dim = self._adapter.linear.out_features
        self.pooled_dim = self._inner.pooled_dim
        self.has_spans, self.has_extents = self._inner.has_spans, self._inner.has_extents
        weights = hash_files(Path(spec.adapter), WEIGHTS)
        self.fingerprint = config.digest({"of": fingerprint, "adapter": weights})

    # -- delegation to the frozen encoder ----------------------------------------------------------

    @classmethod
    def _inner_class(cls, spec: Spec) -> type[Encoder]:
        return ENCODERS.load(spec.encoder.name)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the frozen encoder can be built and the adapter exists."""
        with config.within("encoder"):
            cls._inner_class(spec).check(spec.encoder)
        check_adapter_file(spec.adapter, "a folder written by training with `trainable: adapter`")

    @classmethod
    def check_queries(cls, spec: Spec) -> None:
        """Checks that the frozen encoder can encode queries on this machine."""
        with config.within("encoder"):
            cls._inner_class(spec).check_queries(spec.encoder)

    required_inputs = _delegate("required_inputs")
    supported_inputs = _delegate("supported_inputs")
    query_kinds = _delegate("query_kinds")
    attention = _delegate("attention")
    preprocessor = _delegate("preprocessor")
    has_warnings = _delegate("has_warnings")
    warnings = _delegate("warnings")

    # -- encoding ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _adapt(self, tokens: TokenBatch) -> TokenBatch:
        vectors = self._adapter.to(tokens.vectors.device)(tokens.vectors)
        return dataclasses.replace(tokens, vectors=vectors, normalised=True)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items with the frozen encoder and adapts their vectors."""
        for rows, batch in self._inner.encode(items, *([taps] if taps else [])):
            yield rows, self._adapt(batch)

    def _adapt_queries(self, encoded: EncodedQueries) -> EncodedQueries:
        return dataclasses.replace(encoded, tokens=self._adapt(encoded.tokens))

    def with_instruction(self, instruction: str) -> Self:
        """Returns the encoder with an instruction in the query template of the inner encoder."""
        instructed = super().with_instruction(instruction)
        instructed._inner = self._inner.with_instruction(instruction)
        return instructed

    def templates(self) -> Templates | None:
        """Returns the templates of the frozen encoder."""
        return self._inner.templates()

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order."""
        return self._adapt_queries(self._inner.encode_queries(texts))

    def encode_media(self, queries: Sequence[Mapping[str, Any]]) -> EncodedQueries:
        """Encodes queries with media, in order."""
        return self._adapt_queries(self._inner.encode_media(queries))

"""SMART's adapter: a frozen model's states through a small trained layer (section 4.3).

    z = L2(Linear(LayerNorm(h)))                                          (SMART, eq. 6)

Of several layers' states h_1 ... h_N of a token, which the paper leaves out and its public code
has, the adapter takes a mean whose weights it learns, for each token its own:

    u_l = LayerNorm(h_l),  a = softmax over l of <w_l, u_l>,  z = L2(Linear(sum over l of a_l u_l))

with w = 0 before training, so that all layers count alike.

Any encoder may be the frozen model; the adapter is what training with `trains: adapter` writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import safetensors
import safetensors.torch
import torch

from pipeline import config
from pipeline.config import SpecError, Uri
from pipeline.encoders import Attention, EncodedQueries, Encoder
from pipeline.encoders.loading import WEIGHTS, check_unchanged, hashed
from pipeline.registry import ENCODERS, EncoderSpec
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise

#: The file of an adapter's weights, whose shapes say all about it.
FILE = "adapter.safetensors"


class Adapter(torch.nn.Module):
    """LayerNorm, the mean over layers if there are several, a linear layer without bias, L2.

    Args:
        width: of a layer's states.
        dim: of the vectors.
        num_layers: N, whose states stand side by side.

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
        """States (..., N width) -> vectors (..., dim) of unit length, float32."""
        normed = self.norm(states.float().unflatten(-1, (self.num_layers, -1)))
        if self.num_layers == 1:
            return normalise(self.linear(normed.squeeze(-2)))
        share = (normed * self.layers).sum(dim=-1).softmax(dim=-1)
        return normalise(self.linear((share.unsqueeze(-1) * normed).sum(dim=-2)))

    def save(self, folder: Path, encoder: str = "") -> None:
        """Writes the weights into a folder, with the fingerprint of the encoder before it."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        safetensors.torch.save_file(weights, folder / FILE, {"encoder": encoder})

    @classmethod
    def load(cls, folder: str, width: int, num_layers: int = 1, encoder: str = "") -> Adapter:
        """Loads the adapter of a folder.

        Args:
            folder: Folder that training wrote.
            width: Expected dimension of the hidden states.
            num_layers: Expected number of layers.
            encoder: Fingerprint of the encoder in front of it.

        Raises:
            SpecError: For `adapter`: there is none; it is for another dimension, number of layers
                or encoder; or its weights are not those that training wrote.
        """
        rule = f"a folder with the {FILE} of an adapter of {_said(width, num_layers)}"
        path = Path(folder) / FILE
        if not path.is_file():
            raise SpecError("adapter", folder, rule, f"has no {FILE}")
        check_unchanged(folder, "adapter")
        try:
            weights = safetensors.torch.load_file(path)
            with safetensors.safe_open(path, "pt") as file:
                trained_on = (file.metadata() or {}).get("encoder")
            own_dim, own_width = weights["linear.weight"].shape
            own = cls(own_width, own_dim, len(weights.get("layers", [0])))
            own.load_state_dict(weights)
        except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
            problem = f"cannot be read ({str(error).splitlines()[0]})"
            raise SpecError("adapter", folder, rule, problem) from None
        there = own.linear.in_features, own.num_layers
        if there != (width, num_layers):
            problem = f"has one of {_said(*there)}"
            raise SpecError("adapter", folder, rule, problem)
        if encoder and trained_on and trained_on != encoder:
            rule = "a folder with an adapter trained on this encoder and layer"
            raise SpecError("adapter", folder, rule, "was trained on another")
        return own.eval().requires_grad_(False)


def _said(width: int, num_layers: int) -> str:
    return f"states of {width}" if num_layers == 1 else f"{num_layers} layers' states of {width}"


class Smart(Encoder["Smart.Spec"]):
    """Another encoder's tokens through SMART's adapter; its pooled vectors as they are.

    Places, texts and attention of the tokens are the other encoder's.
    """

    class Spec(config.ComponentSpec):
        """The frozen encoder, and the adapter.

        Attributes:
            encoder: whose token vectors are the states, of one layer or of several side by side.
            adapter: the folder that training wrote.
        """

        name: Literal["smart"] = "smart"
        encoder: EncoderSpec
        adapter: Uri

    needs = ()
    prepares = True
    normalised = True

    def __init__(self, spec: Spec):
        self.spec = spec
        self._inner: Encoder = ENCODERS.build(spec.encoder)
        num_layers = self._inner.num_states
        width, before = self._inner.dim // num_layers, self._inner.fingerprint
        self._adapter = Adapter.load(spec.adapter, width, num_layers, before)
        self.dim = self._adapter.linear.out_features
        self.pooled_dim = self._inner.pooled_dim
        self.has_spans, self.has_extents = self._inner.has_spans, self._inner.has_extents
        weights = hashed(Path(spec.adapter), WEIGHTS)
        self.fingerprint = config.digest({"of": self._inner.fingerprint, "adapter": weights})

    # -- what the other encoder says ---------------------------------------------------------------

    @classmethod
    def _inner_class(cls, spec: Spec) -> type[Encoder]:
        return ENCODERS.load(spec.encoder.name)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the other encoder cannot be built, or there is no adapter."""
        with config.within("encoder"):
            cls._inner_class(spec).check(spec.encoder)
        if not (Path(spec.adapter) / FILE).is_file():
            rule = "a folder written by training with `trains: adapter`"
            raise SpecError("adapter", spec.adapter, rule, f"has no {FILE}")

    @classmethod
    def check_queries(cls, spec: Spec) -> None:
        """Raises `SpecError` if queries cannot be encoded here."""
        with config.within("encoder"):
            cls._inner_class(spec).check_queries(spec.encoder)

    @classmethod
    def needs_of(cls, spec: Spec) -> tuple[str, ...]:
        """What the other encoder needs."""
        return cls._inner_class(spec).needs_of(spec.encoder)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """What the other encoder reads."""
        return cls._inner_class(spec).wants(spec.encoder)

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """What the other encoder takes."""
        return cls._inner_class(spec).query_kinds(spec.encoder)

    @classmethod
    def attention(cls, spec: Spec) -> Attention | None:
        """The other encoder's statistics."""
        return cls._inner_class(spec).attention(spec.encoder)

    @classmethod
    def preparer(cls, spec: Spec) -> Callable[[pa.Table], pa.Table]:
        """The other encoder's work apart from its model."""
        return cls._inner_class(spec).preparer(spec.encoder)

    @classmethod
    def has_remarks(cls, spec: Spec) -> bool:
        """Returns that of the encoder inside."""
        return cls._inner_class(spec).has_remarks(spec.encoder)

    @classmethod
    def remarks(cls, spec: Spec, ids: Callable[[], Iterable[str]]) -> list[str]:
        """What the other encoder has to say."""
        return cls._inner_class(spec).remarks(spec.encoder, ids)

    # -- encoding ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _adapted(self, tokens: TokenBatch) -> TokenBatch:
        vectors = self._adapter.to(tokens.vectors.device)(tokens.vectors)
        return dataclasses.replace(tokens, vectors=vectors, normalised=True)

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items as the other encoder does."""
        for rows, batch in self._inner.encode(items, *([taps] if taps else [])):
            yield rows, self._adapted(batch)

    def _queries(self, encoded: EncodedQueries) -> EncodedQueries:
        return dataclasses.replace(encoded, tokens=self._adapted(encoded.tokens))

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order."""
        return self._queries(self._inner.encode_queries(texts))

    def encode_pictures(self, pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes pictures as queries, in order."""
        return self._queries(self._inner.encode_pictures(pictures))

    def encode_composed(self, texts: Sequence[str], pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes texts with a picture each as queries, in order."""
        return self._queries(self._inner.encode_composed(texts, pictures))

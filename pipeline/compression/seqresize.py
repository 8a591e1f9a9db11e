"""SeqResize, sequence resizing (AGC paper, section 4.1)."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from pipeline.compression import Compressor, NumVectors
from pipeline.config import TrainedSpec
from pipeline.tokens import TokenBatch, masked_vectors, normalise

#: Type of the sizes of the layers.
Size = Annotated[int, Field(ge=1, le=1 << 16)]
#: Maximum number of weights, 1 GiB in float32.
MAX_WEIGHTS = 1 << 28


class SequenceMLP(torch.nn.Module):
    """Two-layer perceptron over the sequence axis, `W2 relu(W1 Z)`.

    Args:
        sequence_length: Number of input vectors n0.
        hidden_size: Number of hidden vectors d.
        num_vectors: Number of output vectors m.
        bias: Whether both layers have biases.

    >>> SequenceMLP(5, 4, 3, bias=False)(torch.ones(2, 5, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, sequence_length: int, hidden_size: int, num_vectors: int, bias: bool):
        super().__init__()
        self.hidden = torch.nn.Linear(sequence_length, hidden_size, bias)
        self.output = torch.nn.Linear(hidden_size, num_vectors, bias)

    def forward(self, vectors_BND: torch.Tensor) -> torch.Tensor:
        """Maps vectors (B, n0, D) to vectors (B, m, D)."""
        return self.output(self.hidden(vectors_BND.mT).relu()).mT


class SeqResize(Compressor["SeqResize.Spec"]):
    """Maps the token vectors of an item to m vectors by a perceptron over the sequence axis.

    The token vectors are truncated or zero-padded to the length n0, and the same perceptron maps
    the n0 values of each dimension to m values. The outputs are normalised to unit length as in the
    reference implementation. Every item has m vectors, also if it has fewer tokens.

    The perceptron is trained with the encoder. Its sizes, and so the budget, are those of its
    weights and cannot be changed.
    """

    class Spec(TrainedSpec):
        """Options of `SeqResize`."""

        name: Literal["seqresize"] = "seqresize"
        num_vectors: NumVectors
        """Number of vectors per item, m."""
        sequence_length: Size
        """Number of tokens to which items are truncated or padded, n0."""
        hidden_size: Size
        """Width of the hidden layer, d."""
        reading: Literal["paper", "code"] = "paper"
        """Details of the method. "paper" keeps the first n0 tokens, pads at the end and has no
        biases. "code" follows the reference implementation, which keeps the last n0 tokens, pads at
        the beginning and has biases."""

        @model_validator(mode="after")
        def _check_sizes(self) -> Self:
            is_valid = self.sequence_length >= self.num_vectors
            self.require(is_valid, "sequence_length", f"at least num_vectors={self.num_vectors}")
            inputs = self.sequence_length + self.num_vectors
            rule = f"at most {MAX_WEIGHTS // inputs} with sequence_length={self.sequence_length}"
            is_valid = self.hidden_size * inputs <= MAX_WEIGHTS
            self.require(is_valid, "hidden_size", f"{rule}, for 2^28 weights")
            return self

    assignment_form = None
    keeps_tokens = False

    @cached_property
    def module(self) -> SequenceMLP:
        """Perceptron with the weights of the artefact, or random ones without `weights`."""
        spec = self.spec
        assert self.artefact is not None or spec.weights is None, "load the weights first"
        sizes = spec.sequence_length, spec.hidden_size, spec.num_vectors
        module = SequenceMLP(*sizes, bias=spec.reading == "code")
        if self.artefact is not None:
            weights = {name: torch.from_numpy(array) for name, array in self.artefact.items()}
            module.load_state_dict(weights)
        return module

    def _compress(self, batch: TokenBatch) -> TokenBatch:
        module = self.module.to(batch.vectors.device)
        vectors_BMD = normalise(module(self.resized(batch)))
        mask_BM = batch.mask.any(dim=1, keepdim=True).expand(vectors_BMD.shape[:2])
        return TokenBatch(vectors_BMD, mask_BM, True, pooled=batch.pooled)

    def resized(self, batch: TokenBatch) -> torch.Tensor:
        """Returns the vectors (B, n0, D) of the items, truncated or padded with zeros."""
        size, (num_items, num_tokens, dim) = self.spec.sequence_length, batch.vectors.shape
        vectors_BND = masked_vectors(batch)
        if self.spec.reading == "paper":
            return torch.nn.functional.pad(vectors_BND, (0, 0, 0, size - num_tokens))
        # Output position p has the token n - n0 + p of the n tokens of the item.
        positions_S = torch.arange(size, device=batch.mask.device)
        index_BS = batch.lengths.unsqueeze(1) - size + positions_S
        is_padding_BS1 = (index_BS < 0).unsqueeze(2)
        if not num_tokens:
            return vectors_BND.new_zeros(num_items, size, dim)
        index_BSD = index_BS.clamp_min(0).unsqueeze(2).expand(-1, -1, dim)
        return vectors_BND.gather(1, index_BSD).masked_fill(is_padding_BS1, 0.0)

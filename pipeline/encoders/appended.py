"""Learned input tokens that an encoder appends to items (AGC paper, sections 4.2 and 5.1).

The states of the appended tokens are the vectors of MemTok, and their attention to the tokens of
the item is the saliency of AGC.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from pydantic import field_validator

from pipeline import config
from pipeline.encoders.model_inputs import ModelInput

#: Kind of the positions of appended tokens in model inputs. They are not tokens of the item, so
#: this is not an index into `tokens.KINDS`.
APPENDED = -1
#: Value of `appended_tokens` for tokens in the vocabulary of the checkpoint.
VOCABULARY = "vocabulary"


class AppendedTokensSpec(config.Spec):
    """Fields of the specs of encoders that can append learned tokens to items."""

    appended_tokens: str | None = None
    """Folder of a trained compressor with learned tokens, which are appended to each item; null
    appends none. `vocabulary` appends the tokens `<|mem0|>`, `<|mem1|>`, ... of the checkpoint's
    vocabulary, with which OmniColPress trains AGC and MemTok. Queries are never extended."""
    normalise: bool = True
    """Normalise token vectors to unit length before compression. If false, AGC, SeqResize and
    H-Pool with `average: raw` pool the raw vectors, as in the AGC paper (sections 4.1, 4.3 and
    5.3). Stored vectors of these methods have unit length in both cases."""

    @field_validator("appended_tokens")
    @classmethod
    def _make_appended_tokens_absolute(cls, folder: str | None) -> str | None:
        # Actors have other working directories.
        return folder if folder in (None, VOCABULARY) else config.absolute(folder)


class AppendedTokens(torch.nn.Module):
    """Learned input embeddings that an encoder appends to items.

    Args:
        weight_MH: Initial embeddings of M tokens, of the width of the model's input embeddings.
    """

    def __init__(self, weight_MH: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight_MH)

    def __len__(self) -> int:
        return len(self.weight)

    @classmethod
    def create(cls, num_tokens: int, embedding: torch.nn.Module) -> AppendedTokens:
        """Returns tokens from a normal distribution as wide as that of the model's embeddings."""
        weight: Any = embedding.weight
        with torch.no_grad():  # some models scale the output of the embedding
            ids = torch.arange(min(1024, len(weight)), device=weight.device)
            embedded = embedding(ids).float()
        drawn_MH = torch.randn(num_tokens, embedded.shape[1]) * embedded.std().cpu()
        return cls(drawn_MH.to(weight.device))

    @contextlib.contextmanager
    def inserted(self, embedding: torch.nn.Module, is_appended_BL: torch.Tensor) -> Iterator[None]:
        """Inserts the tokens into the output of the model's embedding inside the context.

        `is_appended_BL` has as many positions in each row as there are tokens.
        """

        def insert(_module: Any, _arguments: Any, output_BLH: torch.Tensor) -> torch.Tensor:
            tokens_TH = self.weight.to(output_BLH.dtype).repeat(len(output_BLH), 1)
            return output_BLH.masked_scatter(is_appended_BL.unsqueeze(2), tokens_TH)

        handle = embedding.register_forward_hook(insert)
        try:
            yield
        finally:
            handle.remove()


def append_positions(inputs: ModelInput, num_tokens: int) -> ModelInput:
    """Appends positions of learned tokens to a sequence. None of them is a token of the item."""

    def extend(name: str, values: torch.Tensor) -> torch.Tensor:
        last = values[-1:]
        if values.dtype == torch.bool:
            last = torch.zeros_like(last)
        added = last.expand(num_tokens, *values.shape[1:])
        if name == "position_ids":
            following = torch.arange(1, num_tokens + 1).reshape(-1, *[1] * (values.ndim - 1))
            added = following + last.max()
            added = added.expand(num_tokens, *values.shape[1:])
        return torch.cat([values, added.to(values.dtype)])

    def fill(values: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([values, values.new_full((num_tokens, *values.shape[1:]), value)])

    return replace(
        inputs,
        sequence={name: extend(name, values) for name, values in inputs.sequence.items()},
        kind=fill(inputs.kind, APPENDED),
        keep=fill(inputs.keep, False),
        extents=fill(inputs.extents, torch.nan),
        spans=fill(inputs.spans, -1),
    )

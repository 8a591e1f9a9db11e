"""Attention statistics of a model's layers, from each layer's own queries and keys.

A recording wraps the attention function of the transformers library: the forward pass goes through
the fused attention as before, bit for bit, and for the layers that are asked for the probabilities
are computed once more in blocks, summed up, and forgotten. No matrix of N x N numbers for all heads
and layers ever exists, as `output_attentions` would make it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.taps import Tap
from pipeline.tokens import AUDIO, TEXT, VISUAL

#: Numbers of the largest block of probabilities: on a CPU one that stays in its caches.
BLOCK_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 27}

#: The logit of what is not attended to: its probability is 0.
NOWHERE = -1e30
#: What some models add to the logits, and `weighted_rows` does not.
UNKNOWN = ("position_bias", "softcap", "s_aux")

_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class Recording:
    """What the layers of one forward pass have seen.

    Attributes:
        sums: by layer, (S, B, heads, N) float32: for each of S weightings of the rows, and each
            head, the weighted sum over rows i of the probabilities A_ij.
    """

    def __init__(self, row_weights: dict[int, torch.Tensor]):
        """Records the layers of `row_weights`, each with its (S, B, N) weights of the rows."""
        self._row_weights = row_weights
        self._num_seen = 0
        self.sums: dict[int, torch.Tensor] = {}

    def see(
        self,
        query_BHND: torch.Tensor,
        key_BGND: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> None:
        """Called by each attention layer in turn, with its queries and keys after positions."""
        layer, self._num_seen = self._num_seen, self._num_seen + 1
        if layer in self._row_weights:
            weights = self._row_weights[layer]
            self.sums[layer] = weighted_rows(query_BHND, key_BGND, mask, weights, **options)


def can_record(model_config: PretrainedConfig) -> bool:
    """Whether the attention of a model goes through the transformers library's interface."""
    model_class = MODEL_MAPPING.get(type(model_config), None)
    return getattr(model_class, "_supports_attention_backend", False)


@contextlib.contextmanager
def recording(model: PreTrainedModel, row_weights: dict[int, torch.Tensor]) -> Iterator[Recording]:
    """Records while `model` runs one forward pass.

    Raises:
        ValueError: a layer that was asked for did not pass by: the model's attention does not go
            through the transformers library's interface.
    """
    this = Recording(row_weights)
    name = model.config._attn_implementation
    token = _recording.set(this)
    model.config._attn_implementation = _wrapped(name)
    try:
        yield this
    finally:
        model.config._attn_implementation = name
        _recording.reset(token)
    if missing := row_weights.keys() - this.sums.keys():
        raise ValueError(
            f"{type(model).__name__} showed no attention of the layers"
            f" {', '.join(map(str, sorted(missing)))}: its attention is not the library's"
        )


def _wrapped(name: str) -> str:
    """The registered name of an attention implementation with the recording around it."""
    wrapped = f"recorded_{name}"
    if wrapped not in ALL_ATTENTION_FUNCTIONS:

        def attention(module, query, key, value, attention_mask, **options):
            if unknown := [o for o in UNKNOWN if options.get(o) is not None]:
                raise ValueError(f"{type(module).__name__} has a {unknown[0]} in its attention")
            is_causal = options.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", False)
            current = _recording.get()
            assert current is not None, "used outside of `recording`"
            current.see(
                query,
                key,
                attention_mask,
                scaling=options.get("scaling"),
                is_causal=bool(is_causal),
            )
            # The eager function is each model's own.
            eager: Any = getattr(
                sys.modules[type(module).__module__], "eager_attention_forward", None
            )
            inner = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
            return inner(module, query, key, value, attention_mask, **options)

        ALL_ATTENTION_FUNCTIONS.register(wrapped, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(wrapped, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return wrapped


@torch.no_grad()
def weighted_rows(
    query_BHND: torch.Tensor,
    key_BGND: torch.Tensor,
    mask: torch.Tensor | None,
    weights_SBN: torch.Tensor,
    *,
    scaling: float | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Computes `sum_i w_i softmax(q_i k^T scaling)_j` for S weightings w of the rows.

    A weighting that is 1 on some rows gives SAP's column sums (its equation 2), one that is 1 on a
    single row that row (equation 11). Rows that no weighting counts in any item are not computed.

    Args:
        query_BHND: Queries of H heads, after rotary positions if the model has them.
        key_BGND: Keys of G heads; G divides H, and each is shared by H / G heads.
        mask: bool (B, 1, N or 1, N), True where to attend, or a float mask that is added; or None.
        weights_SBN: Weights of the rows.
        scaling: Factor of the logits; None for the inverse square root of the head dimension.
        is_causal: Without a mask, rows attend only to columns up to their own.

    Returns:
        (S, B, H, N) float32 weighted sums of attention rows.
    """
    num_items, num_heads, _, dim = query_BHND.shape
    query_BHND = query_BHND.float() * (dim**-0.5 if scaling is None else scaling)
    key_BHDN = key_BGND.float().repeat_interleave(num_heads // key_BGND.shape[1], dim=1).mT
    num_columns = key_BHDN.shape[3]
    weights_BSN = weights_SBN.float().transpose(0, 1)
    num_sums = len(weights_SBN)
    sums = query_BHND.new_zeros(num_items, num_heads, num_sums, num_columns)
    rows_N = weights_SBN.any(dim=1).any(dim=0).nonzero().squeeze(1)
    if mask is None and is_causal:
        columns_N = torch.arange(num_columns, device=sums.device)
        mask = (columns_N <= columns_N.unsqueeze(1)).expand(num_items, 1, -1, -1)
    if mask is not None and mask.dtype == torch.bool and (mask == mask[:, :, :1]).all():
        # Equal for all rows, as that of padding is: a number more in each key adds it to the
        # logits, where a mask would be a pass over all of them.
        query_BHND = torch.nn.functional.pad(query_BHND, (0, 1), value=1.0)
        closed_B11N = torch.where(mask[:, :, :1], 0.0, NOWHERE)
        key_BHDN = torch.cat([key_BHDN, closed_B11N.expand(-1, num_heads, -1, -1)], dim=2)
        mask = None
    limit = BLOCK_NUMBERS.get(sums.device.type, BLOCK_NUMBERS["cpu"])
    rows_a_block = max(1, min(len(rows_N), limit // (num_heads * num_columns)))
    items_a_block = max(1, limit // (num_heads * num_columns * rows_a_block))
    # Two blocks for all: fresh memory for each would cost as much as the arithmetic.
    room = sums.new_empty(2, min(items_a_block, num_items) * num_heads * rows_a_block * num_columns)
    for first in range(0, num_items, items_a_block):
        items = slice(first, first + items_a_block)
        for rows_R in rows_N.split(rows_a_block):
            query_bHRD = query_BHND[items, :, rows_R]
            shape = (*query_bHRD.shape[:3], num_columns)
            logits, probabilities = (part[: math.prod(shape)].view(shape) for part in room)
            torch.matmul(query_bHRD, key_BHDN[items], out=logits)
            if mask is not None:
                own = mask[items]
                own = own if own.shape[2] == 1 else own[:, :, rows_R]
                # Not -inf: a row of padding may attend to nothing, and NaN times no weight is NaN.
                if own.dtype == torch.bool:
                    logits.masked_fill_(~own, NOWHERE)
                else:
                    logits.add_(own.float().clamp_min(NOWHERE))
            torch.softmax(logits, dim=3, out=probabilities)
            sums[items] += weights_BSN[items][:, :, rows_R].unsqueeze(1) @ probabilities
    return sums.permute(2, 0, 1, 3)


#: Kinds of tokens that are an item's content, as distinct from prompts and special tokens.
CONTENT = (VISUAL, AUDIO, TEXT)


def tap_statistics(taps: Sequence[Tap], layer: int) -> list[str]:
    """Returns the statistics that taps need of a layer, each once and in a fixed order."""
    return sorted({tap.statistic for tap in taps if int(tap.layers) == layer})


def tap_rows(
    kind_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    is_left: bool,
    taps: Sequence[Tap],
    pooled_position: Literal["first", "last"] = "last",
) -> dict[int, torch.Tensor]:
    """Returns the weight of each row of the attention for each statistic, (S, B, L), by layer."""
    lengths = mask_BL.sum(dim=1, keepdim=True)
    position = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    content = torch.isin(kind_BL, kind_BL.new_tensor(CONTENT)) & mask_BL
    last = (position == mask_BL.shape[1] - 1) if is_left else position == lengths - 1
    first = (position == mask_BL.shape[1] - lengths) if is_left else position == 0
    pooled = first if pooled_position == "first" else last
    weights = {"column_sums": content, "eos_row": last, "pooled_row": pooled}
    return {
        layer: torch.stack(
            [
                weights[statistic].float().expand_as(mask_BL)
                for statistic in tap_statistics(taps, layer)
            ]
        )
        for layer in {int(tap.layers) for tap in taps}
    }


def tap_values(recorded: Recording, taps: Sequence[Tap]) -> dict[str, torch.Tensor]:
    """Returns the values (B, L) of taps of one layer each, by name."""
    values = {}
    for tap in taps:
        statistics = tap_statistics(taps, int(tap.layers))
        sums_BHL = recorded.sums[int(tap.layers)][statistics.index(tap.statistic)]
        values[tap.name] = sums_BHL.mean(dim=1) if tap.heads == "mean" else sums_BHL.amax(dim=1)
    return values

"""Computes attention statistics from the queries and keys of each layer.

A recording wraps the attention function of transformers. The forward pass uses the fused kernel and
is bit-identical to one without recording. For the recorded layers, attention probabilities are
computed a second time in blocks and reduced immediately. Unlike `output_attentions`, this never
materialises the N x N attention matrix of all heads and layers.

The statistics of appended tokens (`ROW_STATISTICS`) need few rows of the matrix. They are
computed after the forward pass, from the queries and keys of the layer, and have gradients.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.runtime.kernels import triton_module
from pipeline.taps import APPENDED_MATRIX, APPENDED_STATISTICS, Tap
from pipeline.tokens import AUDIO, TEXT, VISUAL

#: Maximum number of elements per block of probabilities. On a CPU the block fits into the caches.
MAX_BLOCK_SIZE = {"cpu": 1 << 20, "cuda": 1 << 27}

#: Statistics of selected rows of the attention matrix, which are computed after the forward pass.
ROW_STATISTICS = (*APPENDED_STATISTICS, APPENDED_MATRIX)

#: Logit of masked positions, whose probability is 0.
MASKED_LOGIT = -1e30
#: Arguments of attention functions that modify the logits, which `weighted_rows` does not support.
UNSUPPORTED = ("position_bias", "softcap", "s_aux")

_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class AttentionInputs(NamedTuple):
    """Inputs of an attention layer, see `Recording.record`."""

    query_BHND: torch.Tensor
    key_BGND: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    is_causal: bool


class Recording:
    """Attention statistics that were recorded during a forward pass.

    Args:
        row_weights: Weights (S, B, N) of the rows of the attention matrix, by layer to record.
        input_layers: Layers whose inputs are recorded. No computation is added to the layer itself,
            so that activation checkpointing can repeat it without a recording.

    Attributes:
        sums: By layer, (S, B, heads, N) float32: for each of the S weightings and each head, the
            weighted sum over rows i of the probabilities A_ij.
        inputs: Inputs of the layers in `input_layers`.
    """

    def __init__(self, row_weights: dict[int, torch.Tensor], input_layers: Collection[int] = ()):
        self._row_weights = row_weights
        self._input_layers = input_layers
        self._num_layers = 0
        self.sums: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, AttentionInputs] = {}

    def record(
        self,
        query_BHND: torch.Tensor,
        key_BGND: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        is_causal: bool,
    ) -> None:
        """Records the next attention layer. Queries and keys have positional encoding."""
        layer, self._num_layers = self._num_layers, self._num_layers + 1
        if layer in self._row_weights:
            weights = self._row_weights[layer]
            self.sums[layer] = weighted_rows(
                query_BHND, key_BGND, mask, weights, scaling=scaling, is_causal=is_causal
            )
        if layer in self._input_layers:
            inputs = AttentionInputs(query_BHND, key_BGND, mask, scaling, is_causal)
            self.inputs[layer] = inputs


def can_record(model_config: PretrainedConfig) -> bool:
    """Checks whether the model's attention uses the attention interface of transformers."""
    model_class = MODEL_MAPPING.get(type(model_config), None)
    return getattr(model_class, "_supports_attention_backend", False)


@contextlib.contextmanager
def recording(
    model: PreTrainedModel,
    row_weights: dict[int, torch.Tensor],
    input_layers: Collection[int] = (),
) -> Iterator[Recording]:
    """Records attention statistics while `model` runs one forward pass, see `Recording`.

    Raises:
        ValueError: A requested layer was not recorded, because the model's attention does not use
            the attention interface of transformers.
    """
    recorded = Recording(row_weights, input_layers)
    name = model.config._attn_implementation
    token = _recording.set(recorded)
    model.config._attn_implementation = _register_recorded(name)
    try:
        yield recorded
    finally:
        model.config._attn_implementation = name
        _recording.reset(token)
    expected = {*row_weights, *input_layers}
    if missing := expected - recorded.sums.keys() - recorded.inputs.keys():
        raise ValueError(
            f"cannot record the attention of layers {', '.join(map(str, sorted(missing)))} of"
            f" {type(model).__name__}: it does not use the attention interface of transformers"
        )


def _register_recorded(name: str) -> str:
    """Registers an attention implementation that records statistics and returns its name."""
    recorded_name = f"recorded_{name}"
    if recorded_name not in ALL_ATTENTION_FUNCTIONS:

        def attention(module, query, key, value, attention_mask, **options):
            if unsupported := [o for o in UNSUPPORTED if options.get(o) is not None]:
                raise ValueError(
                    f"cannot record the attention of {type(module).__name__}:"
                    f" {unsupported[0]} is not supported"
                )
            is_causal = options.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", False)
            current = _recording.get()
            assert current is not None, "used outside of `recording`"
            current.record(
                query,
                key,
                attention_mask,
                scaling=options.get("scaling"),
                is_causal=bool(is_causal),
            )
            # Each model module defines its own eager function.
            eager: Any = getattr(
                sys.modules[type(module).__module__], "eager_attention_forward", None
            )
            inner = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
            return inner(module, query, key, value, attention_mask, **options)

        ALL_ATTENTION_FUNCTIONS.register(recorded_name, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(recorded_name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return recorded_name


def kernel_module(tensor: torch.Tensor) -> ModuleType | None:
    """Returns the module of Triton kernels if they can process the tensor, else None."""
    return triton_module("pipeline.encoders.triton_kernels", tensor.device)


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
    """Computes weighted sums over the rows of the attention matrix.

    The sum of column j is `sum_i w_i softmax(q_i k^T scaling)_j`. Weights of 1 on all content rows
    give the column sums of SAP (its equation 2). A weight of 1 on a single row gives that row
    (equation 11). Rows with zero weight in all items are skipped. A Triton kernel computes the sums
    of float16 and bfloat16 inputs on CUDA devices, see `kernel_module`.

    Args:
        query_BHND: Queries of H heads, after rotary position embedding if the model has it.
        key_BGND: Keys of G heads, where G divides H: each is shared by H / G query heads.
        mask: Boolean mask (B, 1, N or 1, N), True where attention is allowed, or a float mask that
            is added to the logits, or None for no mask.
        weights_SBN: S weightings of the rows.
        scaling: Factor of the logits, or None for one over the square root of the head width.
        is_causal: Whether, without a mask, each row attends only to columns up to its own position.

    Returns:
        Sums (S, B, H, N) float32.
    """
    num_items, num_heads, _, dim = query_BHND.shape
    scaling = dim**-0.5 if scaling is None else scaling
    is_causal = is_causal and mask is None
    kernels = kernel_module(query_BHND)
    if kernels and kernels.can_sum(query_BHND, key_BGND, mask):
        return kernels.weighted_rows(
            query_BHND, key_BGND, mask, weights_SBN, scaling=scaling, is_causal=is_causal
        )
    query_BHND = query_BHND.float() * scaling
    key_BHDN = key_BGND.float().repeat_interleave(num_heads // key_BGND.shape[1], dim=1).mT
    num_columns = key_BHDN.shape[3]
    weights_BSN = weights_SBN.float().transpose(0, 1)
    num_sums = len(weights_SBN)
    sums = query_BHND.new_zeros(num_items, num_heads, num_sums, num_columns)
    rows_N = weights_SBN.any(dim=1).any(dim=0).nonzero().squeeze(1)
    columns_N = torch.arange(num_columns, device=sums.device)
    if mask is not None and mask.dtype == torch.bool and (mask == mask[:, :, :1]).all():
        # A mask that is equal for all rows, like that of padding, is added to the logits through
        # one additional dimension of the keys, which saves a pass over all logits.
        query_BHND = torch.nn.functional.pad(query_BHND, (0, 1), value=1.0)
        bias_B11N = torch.where(mask[:, :, :1], 0.0, MASKED_LOGIT)
        key_BHDN = torch.cat([key_BHDN, bias_B11N.expand(-1, num_heads, -1, -1)], dim=2)
        mask = None
    limit = MAX_BLOCK_SIZE.get(sums.device.type, MAX_BLOCK_SIZE["cpu"])
    rows_per_block = max(1, min(len(rows_N), limit // (num_heads * num_columns)))
    items_per_block = max(1, limit // (num_heads * num_columns * rows_per_block))
    # Two reused blocks: allocating memory for each block would cost as much as the arithmetic.
    buffers = sums.new_empty(
        2, min(items_per_block, num_items) * num_heads * rows_per_block * num_columns
    )
    for first in range(0, num_items, items_per_block):
        items = slice(first, first + items_per_block)
        for rows_R in rows_N.split(rows_per_block):
            query_bHRD = query_BHND[items, :, rows_R]
            shape = (*query_bHRD.shape[:3], num_columns)
            logits, probabilities = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            torch.matmul(query_bHRD, key_BHDN[items], out=logits)
            if mask is not None:
                block_mask = mask[items]
                block_mask = block_mask if block_mask.shape[2] == 1 else block_mask[:, :, rows_R]
                # Not -inf: a fully masked row of padding would be NaN, even with weight 0.
                if block_mask.dtype == torch.bool:
                    logits.masked_fill_(~block_mask, MASKED_LOGIT)
                else:
                    logits.add_(block_mask.float().clamp_min(MASKED_LOGIT))
            if is_causal:  # by block, because a whole mask has N x N elements
                logits.masked_fill_(columns_N > rows_R.unsqueeze(1), MASKED_LOGIT)
            torch.softmax(logits, dim=3, out=probabilities)
            sums[items] += weights_BSN[items][:, :, rows_R].unsqueeze(1) @ probabilities
    return sums.permute(2, 0, 1, 3)


def selected_rows(inputs: AttentionInputs, rows_BR: torch.Tensor) -> torch.Tensor:
    """Computes rows (B, H, R, N) of the attention matrix at positions (B, R), with gradients.

    Memory and time are linear in the number of columns.
    """
    query_BHND, key_BGND, mask, scaling, is_causal = inputs
    num_items, num_heads, _, dim = query_BHND.shape
    num_groups, num_columns = key_BGND.shape[1:3]
    index_BHRD = rows_BR[:, None, :, None].expand(-1, num_heads, -1, dim)
    query_BHRD = query_BHND.gather(2, index_BHRD).float() * (scaling or dim**-0.5)
    # Each key is shared by the heads of its group.
    query_BGTD = query_BHRD.reshape(num_items, num_groups, -1, dim)
    logits = (query_BGTD @ key_BGND.float().mT).reshape(num_items, num_heads, -1, num_columns)
    if mask is None and is_causal:
        columns_N = torch.arange(num_columns, device=logits.device)
        mask = (columns_N <= rows_BR.unsqueeze(2)).unsqueeze(1)
    elif mask is not None and mask.ndim == 2:  # of flash attention: False at padding
        mask = mask.bool()[:, None, None]
        if is_causal:
            columns_N = torch.arange(num_columns, device=logits.device)
            mask = mask & (columns_N <= rows_BR.unsqueeze(2)).unsqueeze(1)
    elif mask is not None and mask.shape[2] > 1:
        mask = mask.expand(num_items, -1, -1, -1)
        index_BMRN = rows_BR[:, None, :, None].expand(-1, mask.shape[1], -1, num_columns)
        mask = mask.gather(2, index_BMRN)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, MASKED_LOGIT)
    elif mask is not None:
        logits = logits + mask.float().clamp_min(MASKED_LOGIT)
    return logits.softmax(dim=3)


#: Kinds of content tokens, as opposed to prompts and special tokens.
CONTENT = (VISUAL, AUDIO, TEXT)


def tap_statistics(taps: Sequence[Tap], layer: int) -> list[str]:
    """Returns the distinct statistics that the taps need from a layer, in a fixed order."""
    return sorted(
        {
            tap.statistic
            for tap in taps
            if int(tap.layers) == layer and tap.statistic not in ROW_STATISTICS
        }
    )


def tap_rows(
    kind_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    taps: Sequence[Tap],
    pooled_position: Literal["first", "last", "mean"] = "last",
) -> dict[int, torch.Tensor]:
    """Returns the weights (S, B, L) with which S statistics sum attention rows, by layer.

    `mask_BL` is False at padding and at appended tokens. Each tap has one layer. The model pools
    the hidden state at `pooled_position`, or the mean of all.
    """
    position = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    content = torch.isin(kind_BL, kind_BL.new_tensor(CONTENT)) & mask_BL
    last = position == (mask_BL * position).argmax(dim=1, keepdim=True)
    first = position == mask_BL.int().argmax(dim=1, keepdim=True)
    mean = mask_BL / mask_BL.sum(dim=1, keepdim=True)
    pooled = {"first": first, "last": last, "mean": mean}[pooled_position]
    weights = {"column_sums": content, "eos_row": last, "pooled_row": pooled}
    return {
        layer: torch.stack(
            [
                weights[statistic].float().expand_as(mask_BL)
                for statistic in tap_statistics(taps, layer)
            ]
        )
        for layer in {int(tap.layers) for tap in taps if tap.statistic in weights}
    }


def input_layers(taps: Sequence[Tap]) -> set[int]:
    """Returns the layers whose inputs the statistics of appended tokens need."""
    return {int(tap.layers) for tap in taps if tap.statistic in ROW_STATISTICS}


def tap_values(
    recorded: Recording,
    taps: Sequence[Tap],
    appended_BM: torch.Tensor | None = None,
    keep_BL: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the values (B, L) of taps of one layer each, by name; (B, L, M) of `APPENDED_MATRIX`.

    `ROW_STATISTICS` require the positions `appended_BM`, and `keep_BL`, True at tokens of the item.
    """
    values = {}
    for tap in taps:
        layer = int(tap.layers)
        if tap.statistic in ROW_STATISTICS:
            assert appended_BM is not None and keep_BL is not None
            rows_BHML = selected_rows(recorded.inputs[layer], appended_BM)
            rows_BML = rows_BHML.mean(dim=1) if tap.heads == "mean" else rows_BHML.amax(dim=1)
            if tap.statistic == "appended_softmax":
                rows_BML = rows_BML.masked_fill(~keep_BL.unsqueeze(1), MASKED_LOGIT).softmax(dim=2)
            is_matrix = tap.statistic == APPENDED_MATRIX
            values[tap.name] = rows_BML.mT if is_matrix else rows_BML.mean(dim=1)
            continue
        statistics = tap_statistics(taps, layer)
        sums_BHL = recorded.sums[layer][statistics.index(tap.statistic)]
        values[tap.name] = sums_BHL.mean(dim=1) if tap.heads == "mean" else sums_BHL.amax(dim=1)
    return values

"""Attention within the segments of a packed sequence, for vision and audio towers on a GPU.

The towers of the Qwen models pack all images of a batch into one sequence and attend only within an
image, a window or a chunk of audio. Without flash attention, transformers calls the attention
function once per segment, which for the windows of Qwen2.5-VL is dozens of calls per page and
layer. Torch computes all segments in one call.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: Name of the attention implementation. Transformers passes the segments to implementations whose
#: names contain "flash".
NAME = "varlen_flash"
DTYPES = (torch.bfloat16, torch.float16)


def attend(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention (1, T, H, D) within segments, in the interface of transformers.

    `cu_seq_lens_q` has the bounds of the S segments (S + 1,).
    """
    inputs = query_1HTD, key_1HTD, value_1HTD
    if query_1HTD.is_cuda and query_1HTD.dtype in DTYPES:
        from torch.nn.attention.varlen import varlen_attn

        query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in inputs)
        bounds, size = cu_seq_lens_q.to(torch.int32), max_length_q
        output = varlen_attn(query_THD, key_THD, value_THD, bounds, bounds, size, size)
        assert isinstance(output, torch.Tensor)
        return output.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in inputs)
    outputs = map(scaled_dot_product_attention, queries, keys, values)
    output_1HTD = torch.cat(list(outputs), dim=2)
    return output_1HTD.transpose(1, 2), None


def use_varlen_attention(model: PreTrainedModel) -> None:
    """Lets the towers of a model with "sdpa" attend to all segments in one call, if supported."""
    if model.device.type != "cuda" or model.dtype not in DTYPES:
        return
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    for module in model.modules():
        settings = getattr(module, "config", None)
        if settings is not None and "cu_seqlens" in inspect.signature(module.forward).parameters:
            settings._attn_implementation = NAME

"""Layers of the joint encoder on a CUDA device in 16 bits.

Matrix products take a third of the time of a forward pass of the usual implementation, because the
model is narrow. The rest reads and writes activations. Here, a product adds its result to the
residual in place, GELU is part of the product before it, and biases are added by the following
layer norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pipeline.runtime.kernels import triton_module


class _Layer(NamedTuple):
    """Weights (inputs, outputs) and biases of a layer."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    norm: torch.nn.LayerNorm
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    output_norm: torch.nn.LayerNorm


class CudaLayers:
    """Layers of a BERT-like language model. The last layer computes only one position.

    GELU is approximated by tanh, which changes an activation by less than half of the rounding
    error of bfloat16.
    """

    def __init__(self, base: Any):
        self.layers = []
        for layer in base.encoder.layer:
            attention, out = layer.attention.self, layer.attention.output
            self.heads = attention.num_attention_heads
            parts = attention.query, attention.key, attention.value
            up, down = layer.intermediate.dense, layer.output.dense
            weights = _Layer(
                torch.cat([part.weight.detach() for part in parts]).T,
                torch.cat([part.bias.detach() for part in parts]),
                out.dense.weight.detach().T,
                out.dense.bias.detach(),
                out.LayerNorm,
                up.weight.detach().T,
                up.bias.detach(),
                down.weight.detach().T,
                down.bias.detach(),
                layer.output.LayerNorm,
            )
            self.layers.append(weights)

    @staticmethod
    def supports(base: Any) -> bool:
        """Checks whether the device, the data type and the activation of a model are supported."""
        weight = base.get_input_embeddings().weight
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        return weight.is_cuda and is_half and base.config.hidden_act == "gelu"

    def __call__(
        self, states_PSH: torch.Tensor, mask_P11S: torch.Tensor | None, position: int
    ) -> torch.Tensor:
        """Computes the states (P, H) at one position of the last layer. May overwrite the input."""
        num_pairs, length, width = states_PSH.shape
        states_MH = states_PSH.reshape(-1, width)
        for number, layer in enumerate(self.layers, 1):
            qkv_MX = torch.addmm(layer.qkv_bias, states_MH, layer.qkv)
            split = qkv_MX.view(num_pairs, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value = split
            if number == len(self.layers):
                query = query[:, :, position : position + 1]
                states_MH = states_MH.view(states_PSH.shape)[:, position].contiguous()
            attended = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask_P11S
            )
            states_MH.addmm_(attended.transpose(1, 2).reshape(-1, width), layer.out)
            states_MH = _normalise(states_MH, layer.out_bias, layer.norm)
            hidden_MX = torch._addmm_activation(layer.up_bias, states_MH, layer.up, use_gelu=True)
            states_MH.addmm_(hidden_MX, layer.down)
            states_MH = _normalise(states_MH, layer.down_bias, layer.output_norm)
        return states_MH


def _normalise(
    states_MH: torch.Tensor, bias_H: torch.Tensor, norm: torch.nn.LayerNorm
) -> torch.Tensor:
    """Returns the layer norm of `states + bias`. May overwrite the states."""
    if kernels := triton_module("pipeline.encoders.edje.triton_kernels", states_MH.device):
        return kernels.add_bias_and_normalise(states_MH, bias_H, norm)
    return norm(states_MH + bias_H)

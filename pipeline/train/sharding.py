"""What lets models train that one worker's memory does not hold.

Weights, gradients and the states of the optimiser are spread over the workers (FSDP, Zhao et al.,
2023), and activations are computed a second time instead of being kept (Chen et al., 2016).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config import SpecError
from pipeline.distributed import num_workers, rank


def layers_of(module: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that a model of the transformers library repeats; of other modules none."""
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def recompute(model: torch.nn.Module) -> None:
    """Has each layer keep its input alone, and computed again for its gradients.

    Raises:
        SpecError: the model has no such layers.
    """
    layers = layers_of(model)
    if not layers:
        rule = "false for a model without transformers layers"
        raise SpecError("recompute", True, rule)
    # Layer by layer: the switch of whole models is missing for some that only wrap others.
    for layer in layers:
        layer.gradient_checkpointing = True
        # The library sets this attribute and does not declare it.
        setattr(layer, "_gradient_checkpointing_func", partial(checkpoint, use_reentrant=False))  # noqa: B010


def recompute_in_training(model: torch.nn.Module, mode: bool) -> None:
    """Has a model in evaluation mode recompute activations all the same, if `recompute` was called.

    The library does so in training mode only. The modules inside a layer are not switched, so that
    a frozen model has no dropout.
    """
    for layer in layers_of(model):
        layer.training = mode and layer.gradient_checkpointing


def shard(
    module: torch.nn.Module, whole_parameters: set[torch.nn.Parameter], dtype: torch.dtype | None
) -> None:
    """Spreads a module over the workers: a layer is put together while it is used.

    Args:
        whole_parameters: what each worker keeps for itself.
        dtype: that weights are put together in; None: their own.
    """
    device = next(module.parameters()).device
    mesh = torch.distributed.init_device_mesh(device.type, (num_workers(),))
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in layers_of(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole_parameters)


@contextlib.contextmanager
def whole(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the first worker has the whole of all weights; to be entered by all workers."""
    shares: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    gathered: dict[DTensor, torch.nn.Parameter] = {}  # a weight may stand in several places
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            if parameter not in gathered:
                full = parameter.detach().full_tensor()
                kept = full.cpu() if rank() == 0 else full.new_empty(0)
                gathered[parameter] = torch.nn.Parameter(kept, parameter.requires_grad)
            shares.append((part, name, parameter))
            part._parameters[name] = gathered[parameter]
    try:
        yield
    finally:
        for part, name, parameter in shares:
            part._parameters[name] = parameter


def norm(tensors: list[torch.Tensor]) -> float:
    """The length of all tensors together, of which some may be spread over the workers."""
    squares = 0.0
    for are_spread in (False, True):
        own = [tensor for tensor in tensors if isinstance(tensor, DTensor) == are_spread]
        total = torch.nn.utils.get_total_norm(own)
        squares += float(total.full_tensor() if isinstance(total, DTensor) else total) ** 2
    return squares**0.5


def whole_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimiser with nothing spread; to be called by all workers."""
    state = optimiser.state_dict()
    state["state"] = {
        number: {
            name: value.full_tensor().cpu() if isinstance(value, DTensor) else value
            for name, value in of_parameter.items()
        }
        for number, of_parameter in state["state"].items()
    }
    return state


def load_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `whole_state`, whatever is spread now."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    state["state"] = {
        number: {
            name: distribute_tensor(value, own.device_mesh, own.placements)
            if isinstance(own := parameters[number], DTensor) and value.shape == own.shape
            else value
            for name, value in of_parameter.items()
        }
        for number, of_parameter in state["state"].items()
    }
    optimiser.load_state_dict(state)

"""FSDP, activation checkpointing and float32 master weights.

FSDP distributes weights, gradients and optimiser states over the workers (Zhao et al., 2023). With
activation checkpointing, the backward pass recomputes activations instead of storing them (Chen et
al., 2016). Models that were loaded in half precision are trained in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config import SpecError
from pipeline.runtime.distributed import num_workers, rank


def layers_of(module: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """Returns the repeated layers of a transformers model. Other modules have none."""
    return [
        submodule
        for submodule in module.modules()
        if isinstance(submodule, GradientCheckpointingLayer)
    ]


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Enables activation checkpointing: the backward pass recomputes each layer from its input."""
    layers = layers_of(model)
    if not layers:
        rule = "false for a model without transformers layers"
        raise SpecError("activation_checkpointing", True, rule)
    # Layer by layer: the switch of whole models is missing for some that only wrap others.
    for layer in layers:
        layer.gradient_checkpointing = True
        # The library sets this attribute and does not declare it.
        setattr(layer, "_gradient_checkpointing_func", partial(checkpoint, use_reentrant=False))  # noqa: B010


def switch_checkpointing(model: torch.nn.Module, mode: bool) -> None:
    """Enables or disables activation checkpointing in a frozen model.

    Transformers only checkpoints activations in training mode. The modules inside a layer are not
    switched to training mode, so that dropout remains inactive.

    Args:
        model: The model; without `checkpoint_activations` before, nothing is switched on.
        mode: True for training, False for evaluation.
    """
    for layer in layers_of(model):
        layer.training = mode and layer.gradient_checkpointing


def shard(
    module: torch.nn.Module, whole_parameters: set[torch.nn.Parameter], dtype: torch.dtype | None
) -> None:
    """Distributes a module over the workers. Each layer is gathered only while it is used.

    Args:
        module: Module to shard.
        whole_parameters: Parameters that are replicated instead.
        dtype: Dtype of the gathered weights, or None for their own.
    """
    device = next(module.parameters()).device
    mesh = torch.distributed.init_device_mesh(device.type, (num_workers(),))
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in layers_of(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole_parameters)


@contextlib.contextmanager
def whole(module: torch.nn.Module) -> Iterator[None]:
    """Context in which the first worker has all weights. All workers must enter it."""
    shares: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    gathered: dict[DTensor, torch.nn.Parameter] = {}  # a weight may be shared
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
    for submodule in module.modules():
        for name, parameter in list(submodule._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            if parameter not in gathered:
                full = parameter.detach().full_tensor()
                copy = full.cpu() if rank() == 0 else full.new_empty(0)
                gathered[parameter] = torch.nn.Parameter(copy, parameter.requires_grad)
            shares.append((submodule, name, parameter))
            submodule._parameters[name] = gathered[parameter]
    try:
        yield
    finally:
        for submodule, name, parameter in shares:
            submodule._parameters[name] = parameter


def norm(tensors: list[torch.Tensor]) -> float:
    """Computes the L2 norm of all tensors together. They may be sharded."""
    squares = 0.0
    for are_spread in (False, True):
        group = [tensor for tensor in tensors if isinstance(tensor, DTensor) == are_spread]
        total = torch.nn.utils.get_total_norm(group)
        squares += float(total.full_tensor() if isinstance(total, DTensor) else total) ** 2
    return squares**0.5


def whole_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the complete state of an optimiser. All workers must call this function."""
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
    """Loads a state returned by `whole_state` into an optimiser, which may be sharded."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    state["state"] = {
        number: {
            name: distribute_tensor(value, parameter.device_mesh, parameter.placements)
            if isinstance(parameter := parameters[number], DTensor)
            and value.shape == parameter.shape
            else value
            for name, value in of_parameter.items()
        }
        for number, of_parameter in state["state"].items()
    }
    optimiser.load_state_dict(state)


def to_float32(module: torch.nn.Module) -> dict[str, torch.dtype]:
    """Converts trainable parameters to float32 and returns the previous dtypes of those converted.

    The states of AdamW have the dtype of the parameters, and most of its updates are too small to
    change a bfloat16 weight.
    """
    dtypes = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtypes[name] = parameter.dtype
            parameter.data = parameter.data.float()
    return dtypes


@contextlib.contextmanager
def as_loaded(module: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Context in which parameters have the given dtypes, for saving the model and for inference."""
    parameters = dict(module.named_parameters())
    masters = {name: parameters[name].data for name in dtypes}
    for name, dtype in dtypes.items():
        parameters[name].data = masters[name].to(dtype)
    try:
        yield
    finally:
        for name, master in masters.items():
            parameters[name].data = master

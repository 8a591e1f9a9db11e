"""Float32 master weights of models that were loaded in half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch


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

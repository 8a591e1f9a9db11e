"""Checkpoints that exceed the memory: their names and shapes, and copies with one layer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from pipeline.encoders.loading import (
    SETTINGS,
    WEIGHTS,
    Checkpoint,
    checkpoint_folder,
    processor_folder,
)
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.registry import ENCODERS

#: Memory that a model needs, as a multiple of its weights.
OVERHEAD = 1.3
#: Number of a layer in the name of a weight.
LAYER = re.compile(r"\b(?:layers?|blocks|deepstack_merger_list)\.(\d+)\.")
#: Settings with the number of layers, and with a value or a layer number for some of them.
COUNTS = {"num_hidden_layers", "depth", "encoder_layers"}
TYPES, NUMBERS = {"layer_types"}, {"deepstack_visual_indexes", "fullatt_block_indexes"}


def free_memory() -> float:
    """Returns the free bytes of the GPU, or without one those of the machine."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * float(available)


def exceeds_memory(spec: Checkpoint) -> bool:
    """Checks whether the weights of a checkpoint, as stored, do not fit into the memory."""
    files = checkpoint_folder(spec, [*WEIGHTS, *SETTINGS]).glob("*.safetensors")
    return OVERHEAD * sum(path.stat().st_size for path in files) > free_memory()


def check_names(spec: Any) -> None:
    """Checks the names and shapes of the weights of an encoder, without loading them.

    Raises:
        SpecError: Weights are missing, unknown, or have other shapes than the model.
    """
    encoder = ENCODERS.load(spec.name)
    encoder.check(spec)
    if issubclass(encoder, SequenceEncoder):
        encoder.load(spec.model_copy(update={"adapter": None}), "meta")


def write_first_layer(spec: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint with the first layer of each tower of another one."""
    source = checkpoint_folder(spec, [*WEIGHTS, *SETTINGS])
    folder.mkdir(parents=True)
    for path in (*processor_folder(spec).iterdir(), *source.iterdir()):
        is_copied = path.is_file() and "safetensors" not in path.name and path.name != "config.json"
        if is_copied and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    settings = json.loads((source / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(_with_one_layer(settings)), "utf-8")
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            names = [n for n in file.keys() if not any(map(int, LAYER.findall(n)))]  # noqa: SIM118
            weights |= {name: file.get_tensor(name) for name in names}
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _with_one_layer(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    changed = {name: _with_one_layer(value) for name, value in settings.items()}
    changed |= dict.fromkeys(COUNTS & settings.keys(), 1)
    changed |= {name: settings[name][:1] for name in TYPES & settings.keys() if settings[name]}
    return changed | {name: [0] for name in NUMBERS & settings.keys()}

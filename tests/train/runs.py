"""Small training runs on a tiny ColPali."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from examples.papers.synthetic import SHAPES
from pipeline import config
from pipeline.train.loop import Loop
from pipeline.train.spec import TrainSpec
from tests.conftest import ROOT


def spec_of(folder: Path, model: str, learner: dict[str, Any] | None = None, **more: Any):
    """The spec of a run of six steps of eight scenes."""
    given = {
        "name": "test",
        "output": str(folder),
        "learner": {
            "name": "contrastive",
            "encoder": {
                "name": "colpali",
                "model": model,
                "dtype": "float32",
                "output_tokens": "visual",
            },
            "temperature": 0.1,
            **(learner or {}),
        },
        "data": {
            "class": SHAPES,
            "num_scenes": 24,
            "captions": 2,
            "validation": 12,
        },
        "batch_size": 8,
        "epochs": 2,
        "optimiser": {"learning_rate": 1e-3},
        "log_every": 1,
        "checkpoint_every": 2,
    }
    return config.parse(TrainSpec, {**given, **more})


def trained(spec: TrainSpec) -> dict[str, torch.Tensor]:
    """The weights at the end of a run."""
    Loop(spec, say=lambda line: None).run()
    return weights_of(Path(spec.output) / "model")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder of safetensors files."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def logged(folder: Path, name: str) -> list[float]:
    """A figure of every step, as the log has it."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [row[name] for row in rows if name in row]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float):
    """Asserts that two runs ended with the same weights.

    A bias of keys shifts all scores of a softmax equally. Its gradient is rounding noise that Adam
    scales to full steps, so that it is compared only if `atol` is 0.
    """
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if atol and name.endswith("k_proj.bias"):
            continue
        torch.testing.assert_close(tensor, other[name], atol=atol, rtol=0, msg=name)


WORKER = """
import os, sys, torch.distributed as dist
from pipeline import config
from pipeline.train.loop import Loop
from pipeline.train.spec import TrainSpec
dist.init_process_group("gloo")
spec = config.load(TrainSpec, sys.argv[1])
Loop(spec, say=lambda line: None).run()
dist.destroy_process_group()
"""


def run_workers(spec, folder, num_workers: int) -> None:
    """Runs a spec in several processes that find each other as those of torchrun do."""
    path = folder / "spec.yaml"
    path.write_text(config.dump_yaml(spec), "utf-8")
    port = str(29600 + os.getpid() % 1000)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_workers)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            cwd=ROOT,
            env={**os.environ, **rendezvous, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(num_workers)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0] * num_workers

"""Training on a GPU against the same training on the CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.train.runs import logged, spec_of, trained

pytestmark = pytest.mark.gpu

LORA = {"trainable": "lora", "lora": {"rank": 4, "alpha": 8}}


@pytest.fixture
def process_group(tmp_path):
    """A process group of this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def on_cpu(spec) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        trained(spec)


@pytest.mark.parametrize(
    ("learner", "more"),
    [
        ({"symmetric": True, "learn_temperature": True}, {}),
        ({"compressor": {"name": "samer", "num_vectors": 4, "object_prior": True}}, {}),
        ({"compressor": {"name": "agc", "num_vectors": 4}, "num_appended_tokens": 3}, {}),
        (LORA, {"mini_batch_size": 3, "gradient_accumulation_steps": 3}),
        (LORA, {"activation_checkpointing": True}),
    ],
    ids=["all weights", "samer", "agc", "lora and GradCache", "activation checkpointing"],
)
def test_losses_equal_those_on_cpu(model, tmp_path, learner, more):
    trained(spec_of(tmp_path / "gpu", model, learner, **more))
    on_cpu(spec_of(tmp_path / "cpu", model, learner, **more))
    assert logged(tmp_path / "gpu", "loss") == pytest.approx(
        logged(tmp_path / "cpu", "loss"), rel=2e-3
    )


def test_bfloat16_with_float32_masters(model, tmp_path):
    encoder = {"name": "colpali", "model": model, "output_tokens": "visual", "dtype": "bfloat16"}
    learner = {**LORA, "encoder": encoder}
    weights = trained(spec_of(tmp_path / "gpu", model, learner, precision="bfloat16"))
    trained(spec_of(tmp_path / "exact", model, LORA))
    assert logged(tmp_path / "gpu", "loss") == pytest.approx(
        logged(tmp_path / "exact", "loss"), rel=5e-2
    )
    assert weights and all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("learner", [{}, LORA], ids=["all weights", "lora"])
def test_fsdp_on_one_gpu(model, tmp_path, learner, request):
    trained(spec_of(tmp_path / "whole", model, learner))
    request.getfixturevalue("process_group")
    trained(spec_of(tmp_path / "sharded", model, learner, fsdp=True))
    assert logged(tmp_path / "sharded", "loss") == pytest.approx(
        logged(tmp_path / "whole", "loss"), rel=1e-3
    )

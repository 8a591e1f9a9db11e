"""Layers for CUDA devices against the model's own layers, and their layer norm."""

from __future__ import annotations

import pytest
import torch

from pipeline.encoders.edje.cuda_layers import CudaLayers
from pipeline.encoders.edje.joint import JointEncoder
from tests.encoders.edje.models import FAMILIES, joint_encoder
from tests.encoders.edje.test_joint import ALL_PAIRS, TEXTS, tokens_of


@pytest.fixture(scope="module", params=FAMILIES)
def joint(request, tmp_path_factory) -> JointEncoder:
    return joint_encoder(tmp_path_factory.mktemp(request.param), request.param)


@torch.inference_mode()
def test_equals_the_layers_of_the_model_on_cpu(joint):
    tokens, mask = tokens_of(joint, 5, 2, 0)
    expected = joint.scores(TEXTS, tokens, mask, ALL_PAIRS)
    texts, base = joint.tokenise(TEXTS), joint.language.base_model
    arguments = texts, tokens, mask, ALL_PAIRS, joint.words(texts.ids)
    found = joint._optimised_logits(CudaLayers(base), True, *arguments)
    # GELU is approximated.
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_equal_those_in_float32(dtype, tmp_path):
    exact = joint_encoder(tmp_path, "bert")
    tokens, mask = tokens_of(exact, 5, 2, 0)
    expected = exact.scores(TEXTS, tokens, mask, ALL_PAIRS)
    joint = joint_encoder(tmp_path, "bert", dtype=dtype)
    joint.match.load_state_dict(exact.match.state_dict())
    assert isinstance(joint._layers(), CudaLayers)
    found = joint.scores(TEXTS, tokens, mask, ALL_PAIRS)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 100, 384, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_equals_that_in_float64(width, dtype):
    from pipeline.encoders.edje.triton_kernels import add_bias_and_normalise

    norm = torch.nn.LayerNorm(width).cuda().to(dtype)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    states, bias = (torch.randn(n, width, device="cuda").to(dtype) for n in (1003, 1))
    expected = norm.double()(states.double() + bias.double())
    found = add_bias_and_normalise(states, bias[0], norm.to(dtype))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, atol=eps, rtol=eps)

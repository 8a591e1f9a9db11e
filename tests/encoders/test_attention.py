"""Attention statistics, compared with the attention matrices of several kinds of models."""

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
)

from pipeline.encoders import attention
from pipeline.encoders.attention import can_record, recording, weighted_rows

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
CONFIGS = {
    "bert": BertConfig(num_hidden_layers=3, **SIZES),
    "roberta": RobertaConfig(num_hidden_layers=3, **SIZES),
    "distilbert": DistilBertConfig(n_layers=3, dim=32, n_heads=4, hidden_dim=48, vocab_size=50),
    # Rotary positions; windows of 4 tokens in two of three layers.
    "modernbert": ModernBertConfig(num_hidden_layers=3, local_attention=4, pad_token_id=0, **SIZES),
    # Causal, rotary, with two key heads for four query heads.
    "llama": LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, **SIZES),
}
LENGTHS = torch.tensor([11, 7, 1])


def load_model(name: str, implementation: str):
    torch.manual_seed(0)
    return AutoModel.from_config(CONFIGS[name], attn_implementation=implementation).eval()


@pytest.fixture(params=["right", "left", "none"])
def inputs(request):
    """Token ids with padding on the left or right, or without padding."""
    ids = torch.randint(3, 50, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(11) < LENGTHS.unsqueeze(1)
    if request.param == "none":
        mask = torch.ones_like(mask)
    return {"input_ids": ids, "attention_mask": mask.flip(1) if request.param == "left" else mask}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sums_match_eager_attention(name, implementation, inputs, monkeypatch):
    mask = inputs["attention_mask"]
    rows = torch.stack([mask.float(), torch.rand(3, 11) * mask])
    with torch.no_grad():
        eager = load_model(name, "eager")
        matrices = eager(**inputs, output_attentions=True).attentions
        model = load_model(name, implementation)
        plain = model(**inputs).last_hidden_state
        for numbers in (attention.MAX_BLOCK_SIZE["cpu"], 100):  # a single block, and small blocks
            monkeypatch.setitem(attention.MAX_BLOCK_SIZE, "cpu", numbers)
            with recording(model, {0: rows, 2: rows}) as recorded:
                output = model(**inputs).last_hidden_state
            assert torch.equal(output, plain)  # bit for bit
            assert recorded.sums.keys() == {0, 2}
            for layer, sums_SBHN in recorded.sums.items():
                expected = torch.einsum("sbi,bhij->sbhj", rows, matrices[layer])
                torch.testing.assert_close(sums_SBHN, expected, atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == implementation


def test_skips_rows_with_zero_weight():
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    weights = torch.zeros(1, 2, 5)
    weights[0, :, 2] = 1
    query[:, :, [0, 1, 3, 4]] = torch.nan
    expected = (query[:, :, 2:3] @ key.mT / 2).softmax(dim=3).squeeze(2)
    torch.testing.assert_close(weighted_rows(query, key, None, weights)[0], expected)
    assert (
        weighted_rows(query, key, None, torch.zeros(2, 2, 5)).tolist()
        == torch.zeros(2, 2, 3, 5).tolist()
    )


def test_rejects_models_without_attention_interface(inputs):
    model_config = MPNetConfig(num_hidden_layers=3, **SIZES)
    assert not can_record(model_config)
    assert all(can_record(other) for other in CONFIGS.values())
    model = AutoModel.from_config(model_config)
    expected = "cannot record the attention of layers 1 of MPNetModel"
    with pytest.raises(ValueError, match=expected), recording(model, {1: torch.ones(1, 3, 11)}):
        model(**inputs)

"""Learned tokens appended to items, in all families of sequence encoders."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.attention import recording
from pipeline.encoders.trained import (
    SUBFOLDER,
    supports_appended_tokens,
    weight_hashes,
    write_trained_compressor,
)
from pipeline.registry import ENCODERS
from pipeline.taps import Tap
from tests.encoders.batches import assert_close, encode_items
from tests.images import make_images

#: Encoders by the model family of their tiny checkpoint.
VISUAL = {
    "colpali": "colpali",
    "colqwen2": "colpali",
    "colmodernvbert": "colpali",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen2_5_omni": "qwen_omni",
    "jina_v4": "jina_v4",
}
TEXTUAL = {"colbert_bert": "colbert", "colbert_modernbert": "colbert", "minilm": "minilm"}
NUM_TOKENS = 5
SIZES = [(40, 40), (90, 30), (30, 70)]
TEXTS = ["wing", "a long text about the flow of air around a thin wing at high speed", ""]


@pytest.fixture(scope="module", params=[*VISUAL, *TEXTUAL])
def family(request, checkpoint):
    """Spec of an encoder and the items that it reads."""
    name = (VISUAL | TEXTUAL)[request.param]
    model = "bundled" if name == "minilm" else checkpoint(request.param)
    spec = ENCODERS.resolve({"name": name, "model": model, "dtype": "float32"})
    if request.param in VISUAL:
        return spec, make_images(*SIZES)[1]
    return spec, pa.table({"id": ["a", "b", "c"], "text": TEXTS})


def extended(spec, seed: int = 0):
    """Returns an encoder with new appended tokens."""
    encoder = ENCODERS.build(spec)
    torch.manual_seed(seed)
    encoder.append_tokens(AppendedTokens.create(NUM_TOKENS, encoder.embedding))
    return encoder


def write(folder: Path, spec, encoder) -> str:
    """Writes the appended tokens of an encoder like training; returns the folder."""
    hashes = weight_hashes(type(encoder), spec)
    folder.mkdir(exist_ok=True)
    write_trained_compressor(
        folder, {"name": "memtok"}, spec.name, hashes, encoder.dim, encoder.appended, None
    )
    return str(folder)


def test_items_are_independent_of_the_batch(family):
    spec, items = family
    encoder = extended(spec)
    together = encode_items(encoder, items)
    for row in range(len(items)):
        (alone,) = encode_items(encoder, items.slice(row, 1)).values()
        assert together[row].appended.shape == (1, NUM_TOKENS, encoder.dim)
        assert_close(together[row].appended, alone.appended, atol=1e-4)
        assert_close(
            together[row].vectors[together[row].mask], alone.vectors[alone.mask], atol=1e-4
        )


def test_tokens_of_items_keep_their_number_and_positions(family):
    spec, items = family
    plain, found = encode_items(ENCODERS.build(spec), items), encode_items(extended(spec), items)
    for row in range(len(items)):
        assert plain[row].appended is None
        assert found[row].lengths.tolist() == plain[row].lengths.tolist()
        for name in ("extents", "spans", "kind"):
            expected, actual = (getattr(batch[row], name) for batch in (plain, found))
            if expected is not None:
                torch.testing.assert_close(
                    actual[found[row].mask], expected[plain[row].mask], equal_nan=True
                )


def test_appended_tokens_read_the_item(family):
    spec, items = family
    found = encode_items(extended(spec), items)
    if found[1].lengths[0] > 1:
        assert (found[0].appended - found[1].appended).abs().max() > 1e-4


def test_queries_are_not_extended(family):
    spec, _ = family
    plain = ENCODERS.build(spec).encode_queries(["the flow of air"]).tokens
    found = extended(spec).encode_queries(["the flow of air"]).tokens
    assert found.appended is None
    assert torch.equal(found.vectors, plain.vectors)


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_of_appended_tokens(family, heads):
    """The statistics equal the rows of the model's own eager attention matrix."""
    spec, items = family
    eager = extended(spec.model_copy(update={"attention": "eager"}))
    taps = [Tap(name, heads, str(eager.attention(spec).num_layers - 1)) for name in STATISTICS]
    matrices = []
    module = eager.attention_module() if hasattr(eager, "attention_module") else eager.model
    for row in range(len(items)):
        inputs = eager.read_items(items.slice(row, 1).to_pylist())
        if len(inputs[0]) != 1 or not eager_matrix(eager, module, inputs, matrices):
            continue
        batch = extended(spec).tokens(inputs, taps)
        keep = torch.as_tensor(inputs[0][0].keep)
        attention_HLL = matrices[-1][0].double()
        rows_HML = attention_HLL[:, -NUM_TOKENS:]
        rows_ML = rows_HML.mean(dim=0) if heads == "mean" else rows_HML.amax(dim=0)
        assert_close(batch.taps[taps[0].name][0].double(), rows_ML.mean(dim=0)[keep])
        softmax_MN = rows_ML[:, keep].softmax(dim=1)
        assert_close(batch.taps[taps[1].name][0].double(), softmax_MN.mean(dim=0))
    assert matrices


STATISTICS = ("appended_rows", "appended_softmax")


def eager_matrix(encoder, module, inputs, matrices) -> bool:
    """Appends the attention matrix (B, H, L, L) of the last layer to `matrices`."""
    found = []

    def record(_module, _arguments, output):
        if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], torch.Tensor):
            found.append(output[1].detach())

    handles = [
        layer.register_forward_hook(record)
        for layer in module.modules()
        if type(layer).__name__.endswith(("Attention", "SelfAttention"))
    ]
    with torch.no_grad():
        encoder.tokens(inputs)
    for handle in handles:
        handle.remove()
    length = len(inputs[0][0].keep)
    square = [tensor for tensor in found if tensor.shape[-2:] == (length, length)]
    matrices.extend(square[-1:])
    return bool(square)


def test_gradients_reach_the_appended_tokens_through_attention_and_states(family):
    spec, items = family
    encoder = extended(spec)
    encoder.model.requires_grad_(False)
    tap = Tap("appended_rows", layers=str(encoder.attention(spec).num_layers - 1))
    inputs = encoder.read_items(items.slice(0, 2).to_pylist())
    for output in ("taps", "appended"):
        encoder.appended.weight.grad = None
        batch = encoder.tokens(inputs, [tap])
        value = batch.taps[tap.name].square() if output == "taps" else batch.appended[..., 0]
        value.sum().backward()
        gradient_MH = encoder.appended.weight.grad.clone()
        assert (gradient_MH.abs().sum(dim=1) > 0).all()
        direction_MH = gradient_MH / gradient_MH.norm()
        with torch.no_grad():
            sums = []
            for step in (1e-2, -1e-2):
                encoder.appended.weight += step * direction_MH
                batch = encoder.tokens(inputs, [tap])
                changed = batch.taps[tap.name].square() if output == "taps" else batch.appended
                changed = changed if output == "taps" else changed[..., 0]
                sums.append(changed.double().sum())
                encoder.appended.weight -= step * direction_MH
        expected = (sums[0] - sums[1]) / 2e-2
        assert expected.item() == pytest.approx(gradient_MH.norm().item(), rel=0.05, abs=1e-5)


def test_spec_with_appended_tokens(family, tmp_path):
    spec, items = family
    encoder = extended(spec)
    folder = write(tmp_path / "run", spec, encoder)
    named = ENCODERS.resolve({**config.dump(spec), "appended_tokens": folder})
    ENCODERS.load(spec.name).check(named)
    loaded = ENCODERS.build(named)
    assert loaded.fingerprint != encoder.fingerprint
    assert ENCODERS.build(spec).fingerprint == encoder.fingerprint
    assert set(STATISTICS) <= set(loaded.attention(named).statistics)
    expected, found = encode_items(encoder, items), encode_items(loaded, items)
    for row in range(len(items)):
        assert torch.equal(found[row].appended, expected[row].appended)
        assert torch.equal(found[row].vectors, expected[row].vectors)


def test_rejects_folders(tmp_path):
    spec = ENCODERS.resolve({"name": "minilm"})
    encoder = extended(spec)

    def error(folder) -> str:
        with pytest.raises(SpecError) as caught:
            named = ENCODERS.resolve({**config.dump(spec), "appended_tokens": str(folder)})
            ENCODERS.load("minilm").check(named)
            ENCODERS.build(named)
        return str(caught.value)

    assert "does not exist" in error(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no compressor.json" in error(tmp_path / "empty")

    write(tmp_path / "other", spec, encoder)
    described = tmp_path / "other" / SUBFOLDER / "compressor.json"
    fields = json.loads(described.read_text())
    described.write_text(json.dumps({**fields, "encoder_weights": ["0"]}))
    assert "was trained with other weights" in error(tmp_path / "other")
    described.write_text(json.dumps({**fields, "encoder": "colbert"}))
    assert "was trained with the encoder colbert" in error(tmp_path / "other")
    for content in ("{}", json.dumps({**fields, "compressor": "agc"})):
        described.write_text(content)
        assert "has an invalid compressor.json" in error(tmp_path / "other")

    folder = Path(write(tmp_path / "changed", spec, encoder)) / SUBFOLDER
    weights = folder / "appended_tokens.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    assert "has modified or corrupted weights" in error(tmp_path / "changed")

    encoder.append_tokens(AppendedTokens(torch.zeros(3, 7)))
    write(tmp_path / "narrow", spec, encoder)
    assert "has tokens of width 7" in error(tmp_path / "narrow")

    encoder.appended = AppendedTokens(torch.zeros(257, 384))
    write(tmp_path / "many", spec, encoder)
    assert error(tmp_path / "many").startswith(
        "window must be at most 255 with 257 appended tokens, got 256"
    )


@pytest.mark.parametrize(("name", "size"), [("minilm", "window"), ("colbert", "document_length")])
def test_rejects_more_tokens_than_positions(name, size, checkpoint):
    model = {} if name == "minilm" else {"model": checkpoint("colbert_bert"), "dtype": "float32"}
    model |= {"overlap_tokens": 0} if name == "minilm" else {}
    encoder = ENCODERS.build(ENCODERS.resolve({"name": name, **model, size: 64}))
    num_positions = encoder.model.config.max_position_embeddings
    num_tokens = num_positions - 63
    with pytest.raises(SpecError, match=f"^{size} must be at most 63 with {num_tokens} appended"):
        encoder.append_tokens(AppendedTokens.create(num_tokens, encoder.embedding))
    tokens = AppendedTokens.create(num_positions, encoder.embedding)
    rule = f"^appended_tokens must be fewer than {num_positions} tokens, .*, got {num_positions}$"
    with pytest.raises(SpecError, match=rule):
        encoder.append_tokens(tokens)


def test_windows_of_an_item_share_the_budget():
    """Vectors of appended tokens are means over the windows, weighted by their tokens."""
    spec = ENCODERS.resolve({"name": "minilm", "window": 16, "overlap_tokens": 0})
    encoder = extended(spec)
    text = " ".join(f"word{i}" for i in range(30))
    (windows,) = encoder.read_items([{"text": text}])
    assert len(windows) > 2
    whole = encoder.tokens([windows])
    assert whole.appended.shape == (1, NUM_TOKENS, encoder.dim)
    sums = torch.zeros(NUM_TOKENS, encoder.dim)
    for window in windows:
        single = encoder.tokens([[dataclasses.replace(window)]])
        sums += single.appended[0] * int(window.keep.sum())
    assert_close(whole.appended[0], torch.nn.functional.normalize(sums, dim=1))


def test_only_sequence_models_support_appended_tokens():
    supported = {n for n in ENCODERS.names() if supports_appended_tokens(ENCODERS.load(n))}
    assert supported == {*VISUAL.values(), *TEXTUAL.values()}
    with pytest.raises(SpecError, match="unknown field 'appended_tokens'"):
        ENCODERS.resolve({"name": "dual", "model": "x", "appended_tokens": "y"})


def test_initial_tokens_are_as_wide_as_the_embeddings():
    encoder = ENCODERS.build(ENCODERS.resolve({"name": "minilm"}))
    tokens = AppendedTokens.create(64, encoder.embedding)
    sigma = encoder.embedding.weight[:1024].std().item()
    assert tokens.weight.std().item() == pytest.approx(sigma, rel=0.05)
    assert tokens.weight.mean().abs().item() < 4 * sigma / math.sqrt(tokens.weight.numel())


def test_recording_without_statistics_of_appended_tokens_is_unchanged(checkpoint):
    encoder = ENCODERS.build(
        ENCODERS.resolve({"name": "colpali", "model": checkpoint("colpali"), "dtype": "float32"})
    )
    with recording(encoder.attention_module(), {}, {0}) as recorded:
        encoder.tokens(encoder.read_queries(["a query"]))
    assert set(recorded.inputs) == {0} and not recorded.sums

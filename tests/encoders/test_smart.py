"""SMART's adapter: the equation, the weights file, and an index built through it."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.smart import WEIGHTS_FILE, Adapter
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import ENCODERS
from pipeline.search.searcher import open_index
from pipeline.tokens import normalise


def resolve(folder, **more):
    return ENCODERS.resolve({"name": "smart", "encoder": "minilm", "adapter": str(folder), **more})


def test_adapter_matches_eq_6_in_float64():
    torch.manual_seed(0)
    adapter = Adapter(12, 5)
    torch.nn.init.normal_(adapter.norm.weight)
    torch.nn.init.normal_(adapter.norm.bias)
    states = torch.randn(3, 7, 12)
    h = states.double()
    mean, variance = h.mean(-1, keepdim=True), h.var(-1, unbiased=False, keepdim=True)
    norm = (h - mean) / (variance + 1e-5).sqrt() * adapter.norm.weight + adapter.norm.bias
    z = norm @ adapter.linear.weight.double().T
    expected = z / z.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(adapter(states).double(), expected, atol=1e-6, rtol=0)


def test_layer_mean_matches_formula_in_float64():
    torch.manual_seed(0)
    adapter = Adapter(12, 5, num_layers=3)
    for tensor in (adapter.norm.weight, adapter.norm.bias, adapter.layers):
        torch.nn.init.normal_(tensor)
    states = torch.randn(2, 4, 36)
    expected = torch.zeros(2, 4, 5, dtype=torch.float64)
    for item in range(2):
        for token in range(4):
            normed = []
            for h in states[item, token].double().split(12):
                scaled = (h - h.mean()) / (((h - h.mean()) ** 2).mean() + 1e-5).sqrt()
                normed.append(scaled * adapter.norm.weight.double() + adapter.norm.bias.double())
            odds = [(w @ u).exp() for w, u in zip(adapter.layers.double(), normed, strict=True)]
            mean = sum(odd / sum(odds) * u for odd, u in zip(odds, normed, strict=True))
            z = adapter.linear.weight.double() @ mean
            expected[item, token] = z / z.norm()
    torch.testing.assert_close(adapter(states).double(), expected, atol=1e-5, rtol=0)


def test_layer_weights_start_equal_and_are_trained():
    torch.manual_seed(0)
    adapter, states = Adapter(12, 5, num_layers=3), torch.randn(2, 4, 36)
    mean = adapter.norm(states.unflatten(-1, (3, 12))).mean(dim=2)
    torch.testing.assert_close(adapter(states), normalise(adapter.linear(mean)))
    (adapter(states) * torch.randn(2, 4, 5)).sum().backward()
    assert (adapter.layers.grad.abs().amax(dim=1) > 1e-3).all()


def test_weights_of_a_single_layer_adapter(tmp_path):
    Adapter(12, 5).save(tmp_path)
    assert {n: tuple(t.shape) for n, t in load_file(tmp_path / WEIGHTS_FILE).items()} == {
        "linear.weight": (5, 12),
        "norm.weight": (12,),
        "norm.bias": (12,),
    }


def test_loads_multi_layer_adapter(tmp_path):
    layers = [-1, 3, 0]
    adapter = Adapter(384, 16, num_layers=3)
    torch.nn.init.normal_(adapter.layers)
    adapter.save(tmp_path)
    inner = {"name": "minilm", "layer": layers}
    smart = ENCODERS.build(resolve(tmp_path, encoder=inner))
    texts = ["a wing in a slipstream", "drag"]
    encoders = [ENCODERS.build(ENCODERS.resolve({"name": "minilm", "layer": n})) for n in layers]
    states = torch.cat(
        [encoder.encode_queries(texts).tokens.vectors for encoder in encoders], dim=2
    )
    found = smart.encode_queries(texts).tokens
    with torch.no_grad():
        expected = adapter(states)[found.mask]
    torch.testing.assert_close(found.vectors[found.mask], expected, atol=1e-3, rtol=0)
    assert smart.dim == 16 and smart.pooled_dim == 384


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (
            "minilm",
            "adapter must be .* for states of width 384, got .* has one for states of 2 layers",
        ),
        (
            {"name": "minilm", "layer": [0, 1, 2]},
            "for states of 3 layers .* has one for states of 2 layers",
        ),
        ({"name": "minilm", "layer": [2, 9]}, "^encoder.layer must be from -7 to 6 .*, got 9"),
        (
            {"name": "minilm", "layer": []},
            r"^encoder.layer must be a layer number or a list of layer numbers, got \[\]",
        ),
        (
            {"name": "minilm", "layer": [1.5]},
            r"^encoder.layer must be a layer number or a"
            r" list of layer numbers, got \[1.5\]",
        ),
        (
            {"name": "dual", "model": "x", "layer": [1, 2]},
            r"^encoder.layer must be a valid integer, got \[1, 2\]",
        ),
        ({"name": "colpali", "model": "x", "layer": [1, 2]}, "^unknown field 'layer' in encoder"),
    ],
)
def test_rejects_layers_that_do_not_fit(tmp_path, encoder, message):
    Adapter(384, 16, num_layers=2).save(tmp_path)
    with pytest.raises(SpecError, match=message):
        spec = resolve(tmp_path, encoder=encoder)
        ENCODERS.load("smart").check(spec)
        ENCODERS.build(spec)


def test_adapts_the_tokens_of_the_frozen_encoder(tmp_path):
    Adapter(384, 16).save(tmp_path)
    plain, smart = ENCODERS.build(ENCODERS.resolve("minilm")), ENCODERS.build(resolve(tmp_path))
    adapter = Adapter.load(str(tmp_path), 384)
    items = pa.table({"item_id": ["a", "b"], "text": ["a wing in a slipstream", "drag"]})
    ((rows, ours),) = smart.encode(items)
    ((other, theirs),) = plain.encode(items)
    assert rows.tolist() == other.tolist() and smart.dim == 16
    assert torch.equal(ours.mask, theirs.mask) and torch.equal(ours.pooled, theirs.pooled)
    torch.testing.assert_close(ours.vectors, adapter(theirs.vectors.clone()))
    query = smart.encode_queries(["lift"]).tokens
    torch.testing.assert_close(
        query.vectors, adapter(plain.encode_queries(["lift"]).tokens.vectors.clone())
    )
    assert smart.fingerprint != plain.fingerprint
    Adapter(384, 16).save(tmp_path)
    assert ENCODERS.build(resolve(tmp_path)).fingerprint != smart.fingerprint


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, f"adapter must be .* has no {WEIGHTS_FILE}"),
        (
            lambda folder: Adapter(12, 4).save(folder),
            "adapter must be .*, which has one for states of width 12",
        ),
        (
            lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"x"),
            "adapter must be .* cannot be read",
        ),
    ],
)
def test_rejects_invalid_adapters(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(SpecError, match=message):
        ENCODERS.build(resolve(tmp_path))


@pytest.mark.heavy
def test_builds_and_searches_an_index(cluster, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in {"wing": "the lift of a wing", "heat": "heat flows in a plate"}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text, "utf-8")
    Adapter(384, 32).save(tmp_path)
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(tmp_path / "texts")},
        "encoder": config.dump(resolve(tmp_path)),
        "representations": [{"compressor": "none"}],
    }
    job.run(config.parse(IndexSpec, given), IndexResources(), job="1", report=lambda _: 0)
    searcher = open_index(str(tmp_path / "index"))
    assert searcher.index.representation("full").dim == 32
    assert searcher.search("lift of a wing", k=1)[0].item_id == "wing.txt"
    Adapter(384, 32).save(tmp_path)  # replaces the adapter of the index
    with pytest.raises(SpecError, match="encoder"):
        open_index(str(tmp_path / "index")).search("lift", k=1)

"""SMART's adapter: the equation, its file, and an index searched through it."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.smart import FILE, Adapter
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import ENCODERS
from pipeline.search.searcher import open_index
from pipeline.tokens import normalise


def of(folder, **more):
    return ENCODERS.resolve({"name": "smart", "encoder": "minilm", "adapter": str(folder), **more})


def test_the_adapter_is_eq_6_in_float64():
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


def test_the_mean_over_layers_is_its_formula_in_float64():
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


def test_layers_count_alike_at_first_and_their_weights_learn():
    torch.manual_seed(0)
    adapter, states = Adapter(12, 5, num_layers=3), torch.randn(2, 4, 36)
    mean = adapter.norm(states.unflatten(-1, (3, 12))).mean(dim=2)
    torch.testing.assert_close(adapter(states), normalise(adapter.linear(mean)))
    (adapter(states) * torch.randn(2, 4, 5)).sum().backward()
    assert (adapter.layers.grad.abs().amax(dim=1) > 1e-3).all()


def test_an_adapter_of_one_layer_is_kept_as_before(tmp_path):
    Adapter(12, 5).save(tmp_path)
    assert {n: tuple(t.shape) for n, t in load_file(tmp_path / FILE).items()} == {
        "linear.weight": (5, 12),
        "norm.weight": (12,),
        "norm.bias": (12,),
    }


def test_an_adapter_of_several_layers_is_read_back(tmp_path):
    layers = [-1, 3, 0]
    adapter = Adapter(384, 16, num_layers=3)
    torch.nn.init.normal_(adapter.layers)
    adapter.save(tmp_path)
    inner = {"name": "minilm", "layer": layers}
    smart = ENCODERS.build(of(tmp_path, encoder=inner))
    texts = ["a wing in a slipstream", "drag"]
    every = [ENCODERS.build(ENCODERS.resolve({"name": "minilm", "layer": n})) for n in layers]
    states = torch.cat([one.encode_queries(texts).tokens.vectors for one in every], dim=2)
    found = smart.encode_queries(texts).tokens
    with torch.no_grad():
        expected = adapter(states)[found.mask]
    torch.testing.assert_close(found.vectors[found.mask], expected, atol=1e-3, rtol=0)
    assert smart.dim == 16 and smart.pooled_dim == 384


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        (
            "minilm",
            "adapter must be .* of states of 384, got .*, which has one of 2 layers' states of 384",
        ),
        ({"name": "minilm", "layer": [0, 1, 2]}, "has one of 2 layers' .* of 3 layers' states"),
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
            r"^encoder.layer must be an"
            r" integer, got \[1, 2\]",
        ),
        ({"name": "colpali", "model": "x", "layer": [1, 2]}, "^unknown field 'layer' in encoder"),
    ],
)
def test_layers_that_do_not_fit_are_said(tmp_path, encoder, said):
    Adapter(384, 16, num_layers=2).save(tmp_path)
    with pytest.raises(SpecError, match=said):
        spec = of(tmp_path, encoder=encoder)
        ENCODERS.load("smart").check(spec)
        ENCODERS.build(spec)


def test_tokens_are_those_of_the_other_encoder_through_it(tmp_path):
    Adapter(384, 16).save(tmp_path)
    plain, smart = ENCODERS.build(ENCODERS.resolve("minilm")), ENCODERS.build(of(tmp_path))
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
    assert ENCODERS.build(of(tmp_path)).fingerprint != smart.fingerprint


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda folder: None, f"adapter must be .* has no {FILE}"),
        (
            lambda folder: Adapter(12, 4).save(folder),
            "adapter must be .*, which has one of states of 12",
        ),
        (lambda folder: (folder / FILE).write_bytes(b"x"), "adapter must be .* cannot be read"),
    ],
)
def test_what_is_no_adapter_of_it_is_refused(tmp_path, write, said):
    write(tmp_path)
    with pytest.raises(SpecError, match=said):
        ENCODERS.build(of(tmp_path))


@pytest.mark.heavy
def test_an_index_through_an_adapter_is_searched_through_it(cluster, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in {"wing": "the lift of a wing", "heat": "heat flows in a plate"}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text, "utf-8")
    Adapter(384, 32).save(tmp_path)
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(tmp_path / "texts")},
        "encoder": config.dump(of(tmp_path)),
        "representations": [{"compressor": "none"}],
    }
    job.run(config.parse(IndexSpec, given), IndexResources(), job="1", report=lambda _: 0)
    searcher = open_index(str(tmp_path / "index"))
    assert searcher.index.representation("full").dim == 32
    assert searcher.search("lift of a wing", k=1)[0].item_id == "wing.txt"
    Adapter(384, 32).save(tmp_path)  # another one in its place
    with pytest.raises(SpecError, match="encoder"):
        open_index(str(tmp_path / "index")).search("lift", k=1)

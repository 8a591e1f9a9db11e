"""SMART's adapter: the equation, its file, and an index searched through it."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.smart import FILE, Adapter
from pipeline.index import job
from pipeline.registry import ENCODERS
from pipeline.search.searcher import open_index


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
        (lambda folder: None, f"adapter: .* has no {FILE}"),
        (lambda folder: Adapter(12, 4).save(folder), "adapter: .* has one of states of 12"),
        (lambda folder: (folder / FILE).write_bytes(b"x"), "adapter: .* cannot be read"),
    ],
)
def test_what_is_no_adapter_of_it_is_refused(tmp_path, write, said):
    write(tmp_path)
    with pytest.raises(SpecError, match=said):
        ENCODERS.build(of(tmp_path))


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
    job.run(config.parse(job.IndexSpec, given), job.IndexResources(), job="1", report=lambda _: 0)
    searcher = open_index(str(tmp_path / "index"))
    assert searcher.index.representation("full")["dim"] == 32
    assert searcher.search("lift of a wing", k=1)[0].item_id == "wing.txt"
    Adapter(384, 32).save(tmp_path)  # another one in its place
    with pytest.raises(SpecError, match="encoder"):
        open_index(str(tmp_path / "index")).search("lift", k=1)

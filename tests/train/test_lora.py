"""LoRA: what it trains, how it is kept, and that an encoder reads it back."""

from __future__ import annotations

import pytest
import torch

from pipeline import config
from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from pipeline.train.loop import Loop, check
from tests.train.runs import assert_same, spec_of, trained

LORA = {"trains": "lora", "lora": {"rank": 2, "alpha": 4, "targets": ".*language_model.*q_proj"}}


def of_family(family: str, checkpoint):
    """The learner of a family's tiny checkpoint."""
    encoder = {"name": family, "model": checkpoint(family), "dtype": "float32"}
    if family == "qwen3_vl":
        encoder["name"] = "qwen_vl"
    return {**LORA, "encoder": encoder}


@pytest.mark.parametrize("family", ["colpali", "colqwen2", "qwen3_vl"])
def test_an_adapter_is_trained_kept_and_read_back(family, checkpoint, tmp_path):
    learner = of_family(family, checkpoint)
    if family == "qwen3_vl":
        learner["score"] = "hybrid"
    spec = spec_of(tmp_path, checkpoint("colpali"), learner, epochs=1)
    loop = Loop(spec, say=lambda line: None)
    trains = [name for name, p in loop.learner.named_parameters() if p.requires_grad]
    assert trains and all("lora_" in name and "q_proj" in name for name in trains)
    loop.run()
    model = loop.learner.encoder
    named = ENCODERS.resolve({**config.dump(spec.learner.encoder), "adapter": f"{tmp_path}/model"})
    ENCODERS.load(named.name).check(named)
    before, after = ENCODERS.build(spec.learner.encoder), ENCODERS.build(named)
    reader = before.reader(named)
    inputs = [[reader.text("a red star")[0]]]
    with torch.no_grad():
        found = after.tokens(inputs).vectors
        torch.testing.assert_close(found, model.tokens(inputs).vectors, atol=1e-5, rtol=0)
    assert (found - before.tokens(inputs).vectors).abs().max() > 1e-4
    assert before.fingerprint != after.fingerprint


def test_targets_that_match_nothing_name_what_there_is(checkpoint, tmp_path):
    learner = {"trains": "lora", "lora": {"targets": "query"}}
    spec = spec_of(tmp_path, checkpoint("colpali"), learner)
    with pytest.raises(SpecError, match=r"lora.targets: 'query' matches no .* end in .*q_proj"):
        Loop(spec, say=lambda line: None)
    with pytest.raises(SpecError, match=r"lora.targets: '\[' .* a regular expression"):
        spec_of(tmp_path, checkpoint("colpali"), {"trains": "lora", "lora": {"targets": "["}})


def test_settings_of_lora_need_lora(checkpoint, tmp_path):
    with pytest.raises(SpecError, match="learner.lora: .* null .trains is all"):
        spec_of(tmp_path, checkpoint("colpali"), {"lora": {"rank": 4}})


def test_adapters_for_several_tasks_are_not_trained(checkpoint, tmp_path):
    encoder = {"name": "jina_v4", "model": checkpoint("jina_v4"), "dtype": "float32"}
    spec = spec_of(tmp_path, checkpoint("colpali"), {**LORA, "encoder": encoder})
    with pytest.raises(SpecError, match="learner.trains: 'lora' .* another encoder"):
        check(spec)


def test_an_adapters_run_goes_on_where_it_was(checkpoint, tmp_path, monkeypatch):
    model = checkpoint("colpali")
    whole = trained(spec_of(tmp_path / "whole", model, LORA))
    spec, step = spec_of(tmp_path / "broken", model, LORA), Loop._step

    def breaking(self, batches):
        if self.step == 4:
            raise KeyboardInterrupt
        return step(self, batches)

    monkeypatch.setattr(Loop, "_step", breaking)
    with pytest.raises(KeyboardInterrupt):
        trained(spec)
    monkeypatch.setattr(Loop, "_step", step)
    assert_same(whole, trained(spec), atol=0)

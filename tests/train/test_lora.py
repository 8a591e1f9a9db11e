"""LoRA: what it trains, how it is kept, and that an encoder reads it back."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertModel

from examples.papers.synthetic import BINDING, SHAPES
from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.loading import ADAPTER_SETTINGS
from pipeline.registry import ENCODERS
from pipeline.train import lora
from pipeline.train.loop import Loop, check
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of

LORA = {"trainable": "lora", "lora": {"rank": 2, "alpha": 4, "targets": ".*language_model.*q_proj"}}


def of_family(family: str, checkpoint):
    """The learner of a family's tiny checkpoint."""
    encoder = {"name": family, "model": checkpoint(family), "dtype": "float32"}
    encoder["name"] = "qwen_vl" if family == "qwen3_vl" else "colpali"
    return {**LORA, "encoder": encoder}


@pytest.mark.parametrize("family", ["colpali", "colqwen2", "qwen3_vl"])
def test_adapter_is_trained_saved_and_loaded(family, checkpoint, tmp_path):
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
    inputs = [[reader.read_text_query("a red star")[0]]]
    with torch.no_grad():
        found = after.tokens(inputs).vectors
        torch.testing.assert_close(found, model.tokens(inputs).vectors, atol=1e-5, rtol=0)
    assert (found - before.tokens(inputs).vectors).abs().max() > 1e-4
    assert before.fingerprint != after.fingerprint


def test_unmatched_targets_list_layer_names(checkpoint, tmp_path):
    learner = {"trainable": "lora", "lora": {"targets": "query"}}
    spec = spec_of(tmp_path, checkpoint("colpali"), learner)
    with pytest.raises(
        SpecError,
        match=r"lora.targets must be .*'query'.*matches no .* names"
        r" end in .*q_proj",
    ):
        Loop(spec, say=lambda line: None)
    with pytest.raises(
        SpecError,
        match=r"lora.targets must be a regular expression, got"
        r" '\[', which does not compile",
    ):
        spec_of(tmp_path, checkpoint("colpali"), {"trainable": "lora", "lora": {"targets": "["}})


def test_lora_settings_require_lora(checkpoint, tmp_path):
    with pytest.raises(SpecError, match="learner.lora must be null unless trainable is lora"):
        spec_of(tmp_path, checkpoint("colpali"), {"lora": {"rank": 4}})


def test_rejects_encoders_with_task_adapters(checkpoint, tmp_path):
    encoder = {"name": "jina_v4", "model": checkpoint("jina_v4"), "dtype": "float32"}
    spec = spec_of(tmp_path, checkpoint("colpali"), {**LORA, "encoder": encoder})
    with pytest.raises(
        SpecError, match="learner.trainable must be another value for jina_v4, .*, got 'lora'"
    ):
        check(spec)


def test_adapter_run_resumes_exactly(checkpoint, tmp_path, monkeypatch):
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


# -- MiniLM ----------------------------------------------------------------------------------------

TEXTS = {
    "class": BINDING,
    "form": "text",
    "num_pairs": 4,
    "fresh": False,
    "queries": 2,
}
TEXTS["validation"] = 2
#: Windows shorter than a report, so that its tokens are of several.
MINILM = {"name": "minilm", "window": 128, "overlap_tokens": 32}


def text_run(folder, encoder=None, **learner):
    learner = {"encoder": encoder or MINILM, **learner}
    return spec_of(folder, "", learner, data=TEXTS, batch_size=4, epochs=1, eval_every=2)


@pytest.mark.parametrize(
    ("trainable", "score"),
    [
        ("lora", "maxsim"),
        pytest.param("all", "single_vector", marks=pytest.mark.heavy),
        pytest.param("lora", "single_vector", marks=pytest.mark.heavy),
        pytest.param("lora", "hybrid", marks=pytest.mark.heavy),
        pytest.param("all", "maxsim", marks=pytest.mark.heavy),
        pytest.param("all", "hybrid", marks=pytest.mark.heavy),
    ],
)
def test_minilm_is_trained_and_loaded(trainable, score, tmp_path):
    more = {"lora": {"rank": 2, "alpha": 4}} if trainable == "lora" else {}
    spec = text_run(tmp_path, trainable=trainable, score=score, **more)
    check(spec)
    loop = Loop(spec, say=lambda line: None)
    names = [name for name, p in loop.learner.model.named_parameters() if p.requires_grad]
    if trainable == "lora":  # six linear layers a layer, two matrices each
        assert len(names) == 6 * 6 * 2 and all("lora_" in name for name in names)
    loop.run()
    assert len(logged(tmp_path, "pairwise_accuracy")) == 2
    field = {"lora": "adapter", "all": "model"}[trainable]
    named = ENCODERS.resolve({**MINILM, field: f"{tmp_path}/model"})
    ENCODERS.load("minilm").check(named)
    before, after = ENCODERS.build(ENCODERS.resolve(MINILM)), ENCODERS.build(named)
    query = ["Find the report where code K7X labels the green star marker."]
    found = after.encode_queries(query).tokens
    loop.learner.eval()
    ours = loop.learner.tuning.tokens(after.read_queries(query))
    torch.testing.assert_close(found.vectors, ours.vectors.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.pooled, ours.pooled.detach(), atol=1e-5, rtol=0)
    assert (found.vectors - before.encode_queries(query).tokens.vectors).abs().max() > 1e-4
    assert before.fingerprint != after.fingerprint


@pytest.mark.heavy
def test_compressor_receives_attention_of_a_lora_model(tmp_path):
    learner = {"trainable": "lora", "compressor": {"name": "sap", "num_vectors": 8}}
    trained(text_run(tmp_path, **learner))
    assert len(logged(tmp_path, "loss")) == 2


@pytest.mark.parametrize("family", [pytest.param("minilm", marks=pytest.mark.heavy), "qwen3_vl"])
def test_training_continues_from_an_adapter(family, checkpoint, tmp_path):
    """The result is one adapter of the original model, without merging the first adapter."""
    learner = {"encoder": MINILM, "trainable": "lora", "lora": {"rank": 2, "alpha": 4}}
    data = TEXTS
    if family == "qwen3_vl":
        learner = of_family(family, checkpoint)
        data = {
            "class": SHAPES,
            "num_scenes": 4,
            "captions": 2,
            "validation": 4,
        }

    def run(name, **more):
        given = {"batch_size": 4, "epochs": 1, "data": data}
        encoder = learner["encoder"] | more
        return spec_of(tmp_path / name, "", {**learner, "encoder": encoder}, **given)

    def vectors(encoder):
        with torch.no_grad():
            return encoder.tokens(encoder.read_queries(["a red star"])).vectors

    def built(name):
        return ENCODERS.build(
            ENCODERS.resolve(learner["encoder"] | {"adapter": f"{tmp_path}/{name}/model"})
        )

    first = trained(run("first"))
    spec = run("second", adapter=f"{tmp_path}/first/model")
    check(spec)
    loop = Loop(spec, say=lambda line: None)
    tuned = loop.learner.encoder
    torch.testing.assert_close(vectors(tuned), vectors(built("first")), atol=1e-5, rtol=0)
    loop.run()
    second = weights_of(tmp_path / "second/model")
    assert first.keys() == second.keys()
    assert any((first[name] - second[name]).abs().max() > 1e-5 for name in first)
    torch.testing.assert_close(vectors(tuned), vectors(built("second")), atol=1e-5, rtol=0)


def test_rejects_invalid_settings_for_minilm(tmp_path, checkpoint):
    small = {"trainable": "lora", "lora": {"rank": 2, "alpha": 4}}
    wrong = {"trainable": "lora", "lora": {"targets": ".*language_model.*q_proj"}}
    with pytest.raises(
        SpecError,
        match=r"lora.targets must be .*matches no .* names end in"
        r" dense, key, query",
    ):
        Loop(text_run(tmp_path / "a", **wrong), say=lambda line: None)
    trained(text_run(tmp_path / "first", **small))
    begins = {**MINILM, "adapter": f"{tmp_path}/first/model"}
    other = {"trainable": "lora", "lora": {"rank": 4, "alpha": 4}}
    with pytest.raises(SpecError, match="lora.rank must be 2, as in the initial adapter, got 4"):
        Loop(text_run(tmp_path / "b", begins, **other), say=lambda line: None)
    with pytest.raises(SpecError, match="encoder.adapter must be .*nowhere"):
        check(text_run(tmp_path / "c", {**MINILM, "adapter": "./nowhere"}, **small))
    # Adapters of other backbones: of another family, and of another width.
    trained(spec_of(tmp_path / "colpali", checkpoint("colpali"), LORA, epochs=1))
    foreign = {**MINILM, "adapter": f"{tmp_path}/colpali/model"}
    with pytest.raises(SpecError, match="^adapter must be .*colpali/model"):
        ENCODERS.build(ENCODERS.resolve(foreign))
    narrow = tmp_path / "narrow"
    torch.manual_seed(0)
    settings = BertConfig(hidden_size=48, num_hidden_layers=6, num_attention_heads=4)
    BertModel(settings).save_pretrained(narrow)
    ENCODERS.build(ENCODERS.resolve(MINILM)).tokenizer.save_pretrained(narrow)
    with pytest.raises(
        SpecError, match="^adapter must be an adapter of .*narrow, got .*first/model"
    ):
        ENCODERS.build(ENCODERS.resolve({**begins, "model": str(narrow)}))
    # Base models are not compared if one is named by a folder and the other by a repository.
    settings_path = tmp_path / "first" / "model" / ADAPTER_SETTINGS
    settings_path.write_text(
        json.dumps(json.loads(settings_path.read_text()) | {"base_model_name_or_path": "a/model"})
    )
    with pytest.raises(
        SpecError, match="^adapter must be .*first/model.*cannot be read .*size mismatch"
    ):
        ENCODERS.build(ENCODERS.resolve({**begins, "model": str(narrow)}))
    with pytest.raises(
        SpecError, match="encoder.adapter must be an adapter of this model, .* has other weights"
    ):
        Loop(text_run(tmp_path / "d", {**begins, "model": str(narrow)}, **small), say=print)


def test_inputs_of_matrices_stay_in_bfloat16(checkpoint, tmp_path, monkeypatch):
    """Autocast would undo peft's conversion to float32, so that the weights are the same."""
    learner = of_family("colpali", checkpoint)
    learner["encoder"]["dtype"] = "bfloat16"
    weights, dtypes = {}, set()

    def record(layer, inputs):
        dtypes.add(inputs[0].dtype)

    for name in ("own", "peft"):
        if name == "peft":
            monkeypatch.setattr(lora, "leave_casts_to_autocast", lambda model: None)
        spec = spec_of(tmp_path / name, checkpoint("colpali"), learner, precision="bfloat16")
        loop = Loop(spec, say=lambda line: None)
        for layer, module in loop.learner.named_modules():
            if layer.endswith("lora_A.default"):
                module.register_forward_pre_hook(record)
        loop.run()
        assert dtypes == {torch.bfloat16 if name == "own" else torch.float32}
        dtypes.clear()
        weights[name] = weights_of(tmp_path / name / "model")
    assert weights["own"]
    assert_same(*weights.values(), atol=0)

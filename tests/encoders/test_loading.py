"""Loading of checkpoints and adapters, and the errors of invalid ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import ColPaliForRetrieval
from transformers.utils import is_flash_attn_2_available

from pipeline.config import SpecError
from pipeline.encoders.loading import presets
from pipeline.registry import ENCODERS
from tests.images import make_images
from tests.peers import remake


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A copy of a tiny ColPali that a test may modify."""
    shutil.copytree(checkpoint("colpali"), tmp_path / "model")
    return tmp_path / "model"


def resolve(folder: Path | str, **fields):
    return ENCODERS.resolve({"name": "colpali", "model": str(folder), "dtype": "float32", **fields})


def check_error(spec) -> SpecError:
    with pytest.raises(SpecError) as caught:
        ENCODERS.load(spec.name).check(spec)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    return caught.value


def test_check_rejects_other_model_types(checkpoint):
    error = check_error(resolve(checkpoint("siglip")))
    assert error.field == "model" and "is a siglip" in str(error)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "in its config.json"),
        ("model.safetensors", "has no safetensors file"),
        ("processor_config.json", "preprocessor_config.json, processor_config.json"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_check_rejects_missing_files(folder, file, message):
    (folder / file).unlink()
    error = check_error(resolve(folder))
    assert error.field == "model" and message in str(error)


def test_pickled_weights_are_not_loaded(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights are not loaded" in str(check_error(resolve(folder)))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}, "added_tokens": []}'),
        ("processor_config.json", "3"),
    ],
)
def test_check_rejects_invalid_processors(folder, file, content):
    (folder / file).write_text(content)
    assert "has no usable processor" in str(check_error(resolve(folder)))


@pytest.mark.parametrize(
    "fields", [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"vocab_size": -1}]
)
def test_rejects_invalid_settings(folder, fields):
    settings = json.loads((folder / "config.json").read_text())
    settings["vlm_config"]["text_config"] |= fields
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SpecError, match="cannot be loaded"):
        ENCODERS.build(resolve(folder))


def test_check_rejects_unknown_model_types(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "mystery"}))
    assert "cannot be loaded" in str(check_error(resolve(folder)))
    (folder / "config.json").write_text("null")
    assert "cannot be loaded" in str(check_error(resolve(folder)))


def test_rejects_remote_code(folder):
    with pytest.raises(SpecError, match="trust_remote_code"):
        resolve(folder, trust_remote_code=True)


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash attention is installed")
def test_rejects_unavailable_flash_attention(checkpoint):
    with pytest.raises(SpecError) as caught:
        ENCODERS.build(resolve(checkpoint("colpali"), attention="flash_attention_2"))
    assert caught.value.field == "attention"


@pytest.mark.parametrize("model", ["", "nobody/nothing", "no such folder", "../nowhere"])
def test_check_rejects_missing_checkpoints(model):
    error = check_error(resolve(model))
    assert error.field == "model" and error.value == model


@pytest.mark.parametrize(
    ("name", "model", "field", "value"),
    [
        ("colpali", "tencent/EVIE-8B", "bidirectional", True),
        ("colpali", "vidore/colqwen2-v1.0", "query_prefix", ""),
        ("qwen_omni", "Tevatron/OmniEmbed-v0.1", "interleave", False),
    ],
)
def test_published_models_need_what_their_files_do_not_tell(name, model, field, value):
    error = check_error(resolve(model, name=name))
    assert error.field == field and f"`maxray plan --model {model}` prints its spec" in str(error)
    error = check_error(resolve(model, name=name, **presets()[model] | {field: value}))
    assert error.field == "model" and "hub" in str(error)  # which is not reached here


def test_rejects_missing_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if name.startswith("embedding_proj")))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match="has no weights embedding_proj_layer"):
        ENCODERS.build(resolve(folder))


def test_rejects_weights_of_another_shape(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["embedding_proj_layer.weight"] = torch.zeros(3, 5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SpecError, match="has embedding_proj_layer.weight of shape 3 x 5 instead of 16 x 32"
    ):
        ENCODERS.build(resolve(folder))


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_rejects_truncated_weights(folder, fraction):
    truncate(folder / "model.safetensors", fraction)
    assert "has a truncated or corrupted model.safetensors" in str(check_error(resolve(folder)))


def truncate(path: Path, fraction: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: round(fraction * len(data))])


# -- image processors ------------------------------------------------------------------------------

QWEN = [("colpali", "colqwen2"), ("qwen_vl", "qwen3_vl"), ("qwen_omni", "qwen2_5_omni")]
QWEN += [("jina_v4", "jina_v4")]


@pytest.mark.parametrize(("name", "family"), QWEN)
def test_check_rejects_patches_of_another_model(checkpoint, tmp_path, name, family):
    shutil.copytree(checkpoint(family), tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*processor_config.json")
    path.write_text(path.read_text().replace('"patch_size": ', '"patch_size": 1'))
    error = check_error(resolve(tmp_path / "model", name=name))
    assert error.field == "model" and "image processor has the model's patch_size" in str(error)


@pytest.mark.parametrize(("name", "family"), QWEN)
@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"min_pixels": 1000, "max_pixels": 100}, "max_pixels"),
        ({"min_pixels": 10**9}, "min_pixels"),
        ({"max_pixels": 1}, "max_pixels"),
    ],
)
def test_check_rejects_contradictory_pixel_limits(checkpoint, name, family, limits, field):
    error = check_error(resolve(checkpoint(family), name=name, **limits))
    assert error.field == field and "_pixels)" in str(error)


@pytest.mark.parametrize("placeholder", ["<|image_pad|>", "<|AUDIO|>"])
def test_rejects_placeholders_in_prompts(checkpoint, placeholder):
    with pytest.raises(
        SpecError, match="document_prompt must be a text .* and no other placeholder"
    ):
        resolve(checkpoint("qwen2_vl"), name="qwen_vl", document_prompt=placeholder + "{content}")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *[("colpali", name) for name in ("colpali", "colmodernvbert")],
        *[("dual", "siglip"), ("dual", "siglip2"), ("dual", "clip")],
    ],
)
def test_image_processors_do_not_depend_on_torchvision(checkpoint, name, family):
    """Fails without the choice of the backend only where torchvision is installed."""
    spec = ENCODERS.resolve({"name": name, "model": str(checkpoint(family))})
    images = ENCODERS.load(name).reader(spec).processor.image_processor
    assert type(images).__name__.endswith("Pil")


# -- adapters --------------------------------------------------------------------------------------


@pytest.fixture
def adapter(checkpoint, tmp_path) -> Path:
    peft = pytest.importorskip("peft")
    model = ColPaliForRetrieval.from_pretrained(checkpoint("colpali"))
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "embedding_proj_layer"]
    )
    tuned = peft.get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as if trained: lora_B is initialised to zero
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_merges_adapter(checkpoint, adapter):
    from peft import PeftModel

    images, items = make_images((40, 40), (30, 60))
    plain = ENCODERS.build(resolve(checkpoint("colpali")))
    tuned = ENCODERS.build(resolve(checkpoint("colpali"), adapter=str(adapter)))
    assert tuned.fingerprint != plain.fingerprint
    reference = PeftModel.from_pretrained(
        ColPaliForRetrieval.from_pretrained(checkpoint("colpali")), str(adapter)
    ).eval()
    ((rows, batch),) = tuned.encode(items)
    ((_, plain_batch),) = plain.encode(items)
    assert not torch.allclose(batch.vectors, plain_batch.vectors, atol=0.05)
    processor = tuned.reader(tuned.spec).processor
    for vectors, row in zip(batch.vectors, rows, strict=True):
        inputs = processor.process_images([images[row]], return_tensors="pt")
        inputs.pop("labels")
        with torch.no_grad():
            expected = reference(**inputs).embeddings[0]
        torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=0)


def test_check_rejects_folders_without_adapter(checkpoint, folder, tmp_path):
    error = check_error(resolve(checkpoint("colpali"), adapter=str(tmp_path / "none")))
    assert error.field == "adapter"
    error = check_error(resolve(checkpoint("colpali"), adapter=str(folder)))
    assert error.field == "adapter" and "adapter_config.json" in str(error)


def test_rejects_adapter_of_another_model(checkpoint, adapter, folder):
    """Its layers have the same names and shapes."""
    edit_weights(folder, lambda w: w | {min(w): w[min(w)] + 1}, "model.safetensors")
    error = check_error(resolve(folder, adapter=str(adapter)))
    assert error.field == "adapter"
    assert f"is one of {checkpoint('colpali')}; pass {adapter} as model" in str(error)


@pytest.mark.parametrize("other", ["vidore/colpali-v1.2", "colpali"])
def test_rejects_adapter_of_another_hub_model(other, adapter):
    path = adapter / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "base_model_name_or_path": other}))
    error = check_error(resolve(adapter))
    assert error.field == "model" and f"pass the base model as model and {adapter}" in str(error)


def test_model_can_be_an_adapter(checkpoint, adapter):
    """It is loaded with the base model that it names."""
    _, items = make_images((40, 40))
    expected = ENCODERS.build(resolve(checkpoint("colpali"), adapter=str(adapter)))
    found = ENCODERS.build(resolve(adapter))
    assert found.fingerprint == expected.fingerprint
    ((_, batch),), ((_, other),) = found.encode(items), expected.encode(items)
    assert torch.equal(batch.vectors, other.vectors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "has the peft type IA3"),
        ({"peft_type": None}, "has the peft type None"),
        ({"base_model_name_or_path": "/nowhere"}, "names the base model '/nowhere', which is not"),
    ],
)
def test_check_rejects_adapters_before_weights_are_loaded(adapter, settings, message):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    error = check_error(resolve(adapter))
    assert error.field == "model" and message in str(error)


def test_names_the_folder_of_an_adapter_one_level_down(adapter, tmp_path):
    (tmp_path / "run").mkdir()
    adapter.rename(tmp_path / "run/checkpoint-10")
    assert f"use {tmp_path}/run/checkpoint-10" in str(check_error(resolve(tmp_path / "run")))


def test_rejects_adapter_of_a_missing_base(adapter):
    path = adapter / "adapter_config.json"
    settings = json.loads(path.read_text())
    for base in (None, "", 3):
        path.write_text(json.dumps({**settings, "base_model_name_or_path": base}))
        assert "base_model_name_or_path" in str(check_error(resolve(adapter)))


def test_rejects_unused_weights(checkpoint, folder):
    edit_weights(folder, lambda w: w | {"extra.weight": torch.zeros(2)}, "model.safetensors")
    with pytest.raises(SpecError, match="does not use: extra.weight"):
        ENCODERS.build(resolve(folder))


def test_names_the_encoder_of_a_late_interaction_model(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2_5_vl"), folder)
    edit_weights(
        folder, lambda w: w | {"custom_text_proj.weight": torch.zeros(8, 32)}, "model.safetensors"
    )
    error = check_error(resolve(folder, name="qwen_vl"))
    assert "custom_text_proj.weight; the encoder colpali reads ColQwen2.5" in str(error)


#: Name of the whole projection in an adapter.
PROJECTION = "base_model.model.embedding_proj_layer.weight"


def test_a_projection_of_jina_is_not_dropped(checkpoint):
    with pytest.raises(SpecError, match="does not use: multi_vector_projector"):
        ENCODERS.build(resolve(checkpoint("jina_v4"), name="qwen_vl"))


@pytest.mark.parametrize("shape", [(4, 4, 32), (32,), ()])
def test_rejects_a_projection_that_is_no_matrix(tmp_path, shape):
    folder = remake.checkpoint("colqwen2", tmp_path) / "base"
    projection = {"custom_text_proj.weight": torch.zeros(shape)}
    edit_weights(folder, lambda w: w | projection, "model.safetensors")
    with pytest.raises(SpecError, match="has custom_text_proj"):
        ENCODERS.build(resolve(folder))


def test_check_rejects_the_processor_of_another_family(tmp_path):
    folder = remake.checkpoint("colqwen2", tmp_path) / "base"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "idefics3"}))
    assert "a ColIdefics3 whose processor reads images" in str(check_error(resolve(folder)))


def edit_weights(folder: Path, change, name: str = "adapter_model.safetensors") -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(folder / name)), folder / name, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {name: w[name] for name in sorted(w)[::2]}, "has no weights .*lora_B"),
        (lambda w: {n.replace("vlm.", "x."): w[n] for n in w}, "unknown layer: .*q_proj.lora_A"),
        (lambda w: {n: w[n] for n in w if "layers.1." not in n}, "no weights of the layer .*rs.1"),
        (lambda w: w | {"base_model.model.nowhere.lora_A.weight": torch.zeros(4, 4)}, "nowhere"),
        (lambda w: w | {min(w): torch.zeros(3, 3)}, r"size mismatch .*\[3, 3\]"),
        (lambda w: w | {PROJECTION: torch.zeros(1)}, "of shape 1 instead of 16 x 32"),
    ],
    ids=[
        *("missing tensors", "other names", "missing layer", "additional layer", "other shape"),
        "whole layer of another shape",
    ],
)
def test_rejects_adapter_that_fits_partially(checkpoint, adapter, change, message):
    edit_weights(adapter, change)
    with pytest.raises(SpecError, match=message) as caught:
        ENCODERS.build(resolve(checkpoint("colpali"), adapter=str(adapter)))
    assert caught.value.field == "adapter" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": "(.*q_proj"}, "cannot be read"),
        ({"target_modules": 3}, "cannot be read"),
        ({"rank_pattern": [1]}, "cannot be read"),
        ({"r": "four"}, "cannot be read"),
    ],
)
def test_rejects_invalid_settings_of_an_adapter(checkpoint, adapter, settings, message):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(SpecError, match=message):
        ENCODERS.build(resolve(checkpoint("colpali"), adapter=str(adapter)))


def test_rejects_an_adapter_that_would_be_merged_twice(adapter):
    error = check_error(resolve(adapter, adapter=str(adapter)))
    assert error.field == "adapter" and "another adapter than model" in str(error)


def test_an_adapter_beside_a_whole_model(folder, checkpoint, adapter):
    """It is loaded with its base, as transformers does. Merging it here would apply it twice."""
    expected = ENCODERS.build(resolve(adapter))
    edit_weights(folder, lambda w: {n: t * 2 for n, t in w.items()}, "model.safetensors")
    for path in adapter.iterdir():
        shutil.copy(path, folder)
    _, items = make_images((40, 40))
    ((_, batch),), ((_, other),) = (
        ENCODERS.build(resolve(folder)).encode(items),
        expected.encode(items),
    )
    assert torch.equal(batch.vectors, other.vectors)
    (folder / "adapter_model.safetensors").unlink()
    assert "; if it is a whole model, remove its adapter_config" in str(
        check_error(resolve(folder))
    )


def test_rejects_an_adapter_without_the_projection_that_it_trained(tmp_path):
    folder = remake.checkpoint("colqwen2", tmp_path) / "adapter"
    edit_weights(folder, lambda w: {n: w[n] for n in w if "custom_text_proj" not in n})
    with pytest.raises(SpecError, match="has no weights of the layer custom_text_proj"):
        ENCODERS.build(resolve(folder))


def test_rejects_pickled_adapter(checkpoint, adapter):
    from safetensors.torch import load_file

    path = adapter / "adapter_model.safetensors"
    torch.save(load_file(path), adapter / "adapter_model.bin")
    path.unlink()
    error = check_error(resolve(checkpoint("colpali"), adapter=str(adapter)))
    assert error.field == "adapter" and "pickled weights are not loaded" in str(error)


def test_rejects_corrupted_adapter(checkpoint, adapter):
    spec = resolve(checkpoint("colpali"), adapter=str(adapter))
    truncate(adapter / "adapter_model.safetensors", 0.5)
    assert "has a truncated or corrupted adapter_model.saf" in str(check_error(spec))
    for settings in ("", "[]", "{}", "null", '{"peft_type": "IA3"}'):
        (adapter / "adapter_config.json").write_text(settings)
        with pytest.raises(SpecError) as caught:
            ENCODERS.build(spec)
        assert caught.value.field == "adapter"

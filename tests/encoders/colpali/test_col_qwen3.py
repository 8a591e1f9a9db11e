"""ColQwen3 of TomoroAI and OpenSearch-AI, whose types transformers does not know, and EVIE.

Expected vectors are computed by the steps of their public code on classes of transformers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3_5Model, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline.config import SpecError
from pipeline.registry import ENCODERS
from tests.encoders.batches import assert_close, encode_items, unit
from tests.images import make_images
from tests.peers import remake

PAGE = (
    "<|im_start|>user\n<|vision_start|>{}<|vision_end|>Describe the image.<|im_end|>{}<|endoftext|>"
)
#: By type: prefixes of the weights, name and width of the projection, end of the prompt of images,
#: and prefix of queries.
LAYOUTS = {
    "colqwen3": ("vlm.model.", "embedding_proj_layer", 20, "", ""),
    "ops_colqwen3": ("", "custom_text_proj", 32, "<|im_start|>assistant\n", "Query: "),
}
#: Dimensions that a checkpoint of OpenSearch-AI keeps.
DIMS = 24


@pytest.fixture(scope="module", params=LAYOUTS)
def published(request, checkpoint, tmp_path_factory) -> tuple[str, Path]:
    """Type and folder of a checkpoint with the names of the published ones."""
    kind = request.param
    prefix, projection, width, _, _ = LAYOUTS[kind]
    folder = tmp_path_factory.mktemp("published") / kind
    shutil.copytree(checkpoint("qwen3_vl"), folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": kind, "auto_map": {"AutoConfig": f"configuration_{kind}.Config"}}
    settings |= {"dims": DIMS} if kind == "ops_colqwen3" else {}
    (folder / "config.json").write_text(json.dumps(settings))
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", prefix, 1): weight
        for name, weight in weights.items()
        if name.startswith("model.")
    }
    torch.manual_seed(2)
    renamed[f"{projection}.weight"] = torch.randn(width, 32)
    renamed[f"{projection}.bias"] = torch.randn(width)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return kind, folder


@pytest.fixture(scope="module")
def expected(published, checkpoint):
    """Computes the vectors of an image or a query."""
    kind, folder = published
    _, projection, _, ending, prefix = LAYOUTS[kind]
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint("qwen3_vl")).model.eval()
    weights = load_file(folder / "model.safetensors")
    # The code of TomoroAI limits images to 1280 patches whatever the file says.
    limits = {"max_pixels": 1280 * 8 * 8} if kind == "colqwen3" else {}
    images = Qwen2VLImageProcessorPil.from_pretrained(folder, **limits)
    words = AutoTokenizer.from_pretrained(checkpoint("qwen3_vl"))

    @torch.no_grad()
    def run(image=None, text=""):
        media = {}
        prompt = prefix + text + "<|endoftext|>" * 10
        if image is not None:
            media = images([image], return_tensors="pt")
            pads = "<|image_pad|>" * (int(media["image_grid_thw"][0].prod()) // 4)
            prompt = PAGE.format(pads, ending)
        ids = words(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        types = (ids == model.config.image_token_id).long()
        states_NH = model(input_ids=ids, mm_token_type_ids=types, **media).last_hidden_state[0]
        vectors_NP = states_NH @ weights[f"{projection}.weight"].T + weights[f"{projection}.bias"]
        return unit(vectors_NP[:, :DIMS])

    return run


def test_vectors_match_the_published_code(published, expected):
    _, folder = published
    spec = {"name": "colpali", "model": str(folder), "dtype": "float32"}
    encoder = ENCODERS.build(ENCODERS.resolve(spec))
    images, items = make_images((64, 96), (20, 33))
    for row, batch in encode_items(encoder, items).items():
        assert_close(batch.vectors[0][batch.mask[0]], expected(images[row]))
    queries = encoder.encode_queries(["the flow of air"]).tokens
    assert_close(queries.vectors[0][queries.mask[0]], expected(text="the flow of air"))
    assert encoder.model.config.model_type == published[0]  # kept when a trained model is saved


def test_evie_attends_in_both_directions(tmp_path):
    """Its code clears `is_causal` in the settings and in the layers with full attention."""
    folder = remake.checkpoint("colqwen3_5", tmp_path) / "base"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "mrl_prefix": True}))
    spec = ENCODERS.resolve({"name": "colpali", "model": str(folder), "dtype": "float32"})
    with pytest.raises(SpecError, match="^bidirectional must be true for EVIE, got False"):
        ENCODERS.load("colpali").check(spec)
    encoder = ENCODERS.build(spec.model_copy(update={"bidirectional": True}))
    found = encoder.encode_queries(["the flow of air"]).tokens

    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("custom_text_proj.weight"))
    model = Qwen3_5Model.from_pretrained(folder, attn_implementation="eager").eval()
    model.config.text_config.is_causal = False
    for module in model.language_model.modules():
        if type(module).__name__ == "Qwen3_5Attention":
            module.is_causal = False
    words = AutoTokenizer.from_pretrained(folder)
    text = "the flow of air" + "<|endoftext|>" * 10
    with torch.no_grad():
        states_LH = model(**words(text, return_tensors="pt")).last_hidden_state[0]
    bias = weights[name.replace("weight", "bias")]
    assert_close(found.vectors[0], unit(states_LH @ weights[name].T + bias))


def test_code_of_a_checkpoint_is_not_executed(checkpoint, tmp_path):
    folder = tmp_path / "nemotron"
    shutil.copytree(checkpoint("qwen3_vl"), folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "qwen3_vl_nemotron_embed", "auto_map": {"AutoModel": "a.Model"}}
    (folder / "config.json").write_text(json.dumps(settings))
    for name in ("colpali", "qwen_vl"):
        spec = ENCODERS.resolve({"name": name, "model": str(folder)})
        with pytest.raises(
            SpecError, match="is a qwen3_vl_nemotron_embed, which needs the code of"
        ):
            ENCODERS.load(name).check(spec)

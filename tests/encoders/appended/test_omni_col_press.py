"""Checkpoints in the layout of OmniColPress, the code of the authors of AGC.

Expected vectors are computed by the steps of that code (commit 4a55967) on classes of transformers:
the tokens `<|mem0|>`, ... of the vocabulary follow the passage, attention is bidirectional, and the
saliency is a second softmax of the attention in the last layer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline.config import SpecError
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.taps import average_layers, single_layer_taps
from tests.encoders.batches import assert_close, encode_items, unit
from tests.images import make_images

NUM_TOKENS, BUDGET = 6, 3
#: The chat template of Qwen2.5-VL without a generation prompt, and the prefixes of the authors.
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}{{content}}<|im_end|>\n"
)
PASSAGE, QUERY = CHAT.format("Passage: "), CHAT.format("Query: ")
FIELDS = {
    "name": "qwen_vl",
    "appended_tokens": "vocabulary",
    "bidirectional": True,
    "normalise": False,
    "output_tokens": "all",
    "document_prompt": PASSAGE,
    "query_prompt": QUERY,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory) -> Path:
    """Checkpoint with additional tokens in its vocabulary and larger embeddings."""
    folder = tmp_path_factory.mktemp("omni-col-press") / "agc"
    shutil.copytree(checkpoint("qwen2_5_vl"), folder)
    words = AutoTokenizer.from_pretrained(folder)
    names = [f"<|mem{number}|>" for number in range(NUM_TOKENS)]
    words.add_special_tokens({"additional_special_tokens": names})
    words.save_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    torch.manual_seed(1)
    model.resize_token_embeddings(len(words), mean_resizing=False)
    model.save_pretrained(folder)
    return folder


class Reference:
    """The model with bidirectional attention, applied to one sequence at a time."""

    def __init__(self, folder: Path):
        loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager"
        )
        self.model = loaded.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, text: str, image=None):
        """Returns the last states (L, D) and the attention (L, L) of the last layer."""
        media = {}
        if image is not None:
            media = self.images([image], return_tensors="pt")
            pads = "<|image_pad|>" * (int(media["image_grid_thw"][0].prod()) // 4)
            text = text.replace("{content}", f"<|vision_start|>{pads}<|vision_end|>")
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        positions, _ = self.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.model.config.image_token_id).long(),
            image_grid_thw=media.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
        )
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1]),
            output_attentions=True,
            **media,
        )
        return output.last_hidden_state[0], output.attentions[-1][0].mean(dim=0)


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def encoder(folder):
    return ENCODERS.build(ENCODERS.resolve({**FIELDS, "model": str(folder)}))


SUFFIX = "".join(f"<|mem{number}|>" for number in range(NUM_TOKENS))


def test_agc_has_the_vectors_of_the_authors(encoder, reference):
    images, items = make_images((40, 40), (64, 32), (24, 56))
    method = COMPRESSORS.build(
        COMPRESSORS.resolve({"name": "agc", "reading": "code", "num_vectors": BUDGET})
    )
    num_layers = type(encoder).attention(encoder.spec).num_layers
    (tap,) = method.needs_taps
    for row, batch in encode_items(encoder, items, single_layer_taps([tap], num_layers)).items():
        states_ND, attention_NN = reference(PASSAGE + SUFFIX, images[row])
        document_ND, rows_MN = states_ND[:-NUM_TOKENS], attention_NN[-NUM_TOKENS:, :-NUM_TOKENS]
        assert_close(batch.vectors[0][batch.mask[0]], document_ND, atol=1e-4)
        assert_close(unit(batch.appended[0]), unit(states_ND[-NUM_TOKENS:]), atol=1e-5)
        saliency_N = rows_MN.softmax(dim=1).mean(dim=0)
        centroids_KD = document_ND[saliency_N.topk(BUDGET).indices]
        groups_N = (unit(document_ND) @ unit(centroids_KD).T).argmax(dim=1)
        weights_NK = torch.nn.functional.one_hot(groups_N, BUDGET) * saliency_N[:, None]
        means_KD = weights_NK.T @ document_ND / weights_NK.sum(dim=0)[:, None]
        batch.taps[tap.name] = average_layers(tap, batch.taps, num_layers)
        found_KD = method.compress(batch).vectors[0]
        distances_KK = torch.cdist(found_KD, unit(means_KD))
        assert found_KD.shape == means_KD.shape
        assert distances_KK.amin(dim=0).max() < 1e-5 and distances_KK.amin(dim=1).max() < 1e-5


def test_queries_have_unit_length_and_no_additional_tokens(encoder, reference):
    batch = encoder.encode_queries(["the flow of air"]).tokens
    states_ND, _ = reference(QUERY.replace("{content}", "the flow of air"))
    assert_close(batch.vectors[0][batch.mask[0]], unit(states_ND))


def test_fingerprint_names_the_tokens(encoder, folder):
    for change in ({"appended_tokens": None, "normalise": True}, {"normalise": True}):
        spec = ENCODERS.resolve({**FIELDS, "model": str(folder), **change})
        assert ENCODERS.build(spec).fingerprint != encoder.fingerprint


def test_rejects_models_that_do_not_fit(checkpoint, folder, tmp_path):
    def check(model, **fields):
        spec = ENCODERS.resolve({**FIELDS, "model": str(model), **fields})
        with pytest.raises(SpecError) as error:
            ENCODERS.load(spec.name).check(spec)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "unless the model has the token <|mem0|>" in check(checkpoint("qwen2_5_vl"))
    resized = tmp_path / "resized"
    shutil.copytree(folder, resized)
    weights = {"sequence_resizer.weight": torch.zeros(4, 8)}
    save_file(weights, resized / "extra_encoder_state.safetensors")
    message = check(resized)
    assert "has extra_encoder_state.safetensors, the SeqResize of OmniColPress" in message
    assert "AGC or MemTok" in message

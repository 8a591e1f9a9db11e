"""Tiny random checkpoints of every family, in the form and with the files that real ones have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.conftest import CRANFIELD

VOCABULARY = 600


def tokenizer(*special: str, pad: str, eos: str, bos: str | None = None, **more: str):
    """A byte-level tokenizer of a few hundred tokens, trained on abstracts."""
    lines = (CRANFIELD / "corpus.jsonl").read_text("utf-8").splitlines()[:200]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = list(dict.fromkeys([pad, eos, *([bos] if bos else []), *special, *more.values()]))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, eos_token=eos, bos_token=bos, **more
    )


def colpali(folder: Path) -> Path:
    """ColPali: 4 x 4 patches, two layers of two heads that share one key."""
    from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor
    from transformers.models.siglip import SiglipImageProcessorPil

    words = tokenizer("<image>", pad="<pad>", eos="<eos>", bos="<bos>")
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = ColPaliProcessor(images, words)
    text = {
        "model_type": "gemma",
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": processor.tokenizer.pad_token_id,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 32,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": processor.image_token_id,
        "projection_dim": 32,
        "hidden_size": 32,
    }
    return save(
        folder, ColPaliForRetrieval, ColPaliConfig(vlm_config=vlm, embedding_dim=16), processor
    )


def save(folder: Path, model_class: type, settings, *files) -> Path:
    """Writes a model of random weights, and what is to lie beside it."""
    torch.manual_seed(0)
    model = model_class(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start of training: attention
            if parameter.ndim > 1:  # that is nearly uniform would tell nothing
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    for each in files:
        each.save_pretrained(folder)
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {"colpali": colpali}


def qwen_files():
    """A tokenizer with Qwen's special tokens and a processor of pictures without torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = tokenizer(
        *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|image_pad|>", "<|video_pad|>"),
        pad="<|endoftext|>",
        eos="<|im_end|>",
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, min_pixels=8 * 8, max_pixels=32 * 32, merge_size=2, temporal_patch_size=2
    )
    return words, images


def _qwen_settings(config_class: type, words, text: dict, vision: dict, **more):
    return config_class(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": words.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": words.eos_token_id,
            **text,
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
        **more,
    )


def qwen2_vl(folder: Path) -> Path:
    """Qwen2-VL: three layers of four heads that share two keys."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    words, images = qwen_files()
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    settings = _qwen_settings(Qwen2VLConfig, words, rope, vision)
    return save(folder, Qwen2VLForConditionalGeneration, settings, words, images)


def _qwen2_5_settings(words, **more):
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    }
    return _qwen_settings(Qwen2_5_VLConfig, words, rope, vision, **more)


def qwen2_5_vl(folder: Path) -> Path:
    """Qwen2.5-VL: as above, with windows in the vision tower."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    words, images = qwen_files()
    settings = _qwen2_5_settings(words)
    return save(folder, Qwen2_5_VLForConditionalGeneration, settings, words, images)


def qwen3_vl(folder: Path) -> Path:
    """Qwen3-VL: as above, with features of the vision tower added between layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    words, images = qwen_files()
    text = {
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    settings = _qwen_settings(Qwen3VLConfig, words, text, vision)
    return save(folder, Qwen3VLForConditionalGeneration, settings, words, images)


#: The adapters of the tiny jina-embeddings-v4, and what they change.
JINA_TASKS = ("retrieval", "text-matching", "code")
JINA_RANK = 2


def jina_v4(folder: Path) -> Path:
    """jina-embeddings-v4: Qwen2.5-VL with a projector, and a file of adapters for three tasks."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2_5_VLForConditionalGeneration

    words, images = qwen_files()
    settings = _qwen2_5_settings(words, multi_vector_projector_dim=16)
    save(folder, Qwen2_5_VLForConditionalGeneration, settings, words, images)
    weights = load_file(folder / "model.safetensors")
    weights["multi_vector_projector.weight"] = torch.randn(16, 32) * 0.3
    weights["multi_vector_projector.bias"] = torch.randn(16) * 0.3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed = {
        f"model.language_model.layers.{layer}.{part}": shape
        for layer in range(3)
        for part, shape in {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "mlp.down_proj": (32, 64),
        }.items()
    } | {"multi_vector_projector": (16, 32)}
    adapters = {}
    for name, (num_out, num_in) in changed.items():
        for task in JINA_TASKS:
            below = f"base_model.model.{name}"
            adapters[f"{below}.lora_A.{task}.weight"] = torch.randn(JINA_RANK, num_in) * 0.2
            adapters[f"{below}.lora_B.{task}.weight"] = torch.randn(num_out, JINA_RANK) * 0.2
    (folder / "adapters").mkdir()
    save_file(adapters, folder / "adapters" / "adapter_model.safetensors", {"format": "pt"})
    described = {"peft_type": "LORA", "r": JINA_RANK, "lora_alpha": 4, "use_rslora": False}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(described))
    return folder


FAMILIES |= {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "jina_v4": jina_v4,
}

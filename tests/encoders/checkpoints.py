"""Tiny random checkpoints of every family, in the form and with the files that real ones have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


QWEN = {
    "special": (
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    ),
    "pad": "<|endoftext|>",
    "eos": "<|im_end|>",
}


def qwen_tokenizer():
    """A tokenizer with the special tokens of Qwen's models."""
    special = (*QWEN["special"], "<|video_pad|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    return tokenizer(*special, pad=QWEN["pad"], eos=QWEN["eos"])


def qwen_text(words: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    """A language model of two layers, four heads that share two keys."""
    return {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        **more,
    }


def colqwen2(folder: Path) -> Path:
    """ColQwen2: patches of 8 pixels, four merged into one token."""
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    words = qwen_tokenizer()
    size = {"shortest_edge": 4 * 16 * 16, "longest_edge": 24 * 16 * 16}
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size)
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    vlm = {
        "model_type": "qwen2_vl",
        "text_config": qwen_text(words),
        "vision_config": vision,
        **ids,
    }
    settings = ColQwen2Config(vlm_config=vlm, embedding_dim=16)
    return save(folder, ColQwen2ForRetrieval, settings, ColQwen2Processor(images, words))


def colmodernvbert(folder: Path) -> Path:
    """ColModernVBert: tiles of 4 x 4 patches, four of which become one token."""
    from transformers import (
        ColModernVBertConfig,
        ColModernVBertForRetrieval,
        ColModernVBertProcessor,
    )
    from transformers.models.idefics3 import Idefics3ImageProcessorPil

    tiles = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    words = tokenizer(
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        "<|begin_of_text|>",
        *tiles,
        pad="[PAD]",
        eos="[SEP]",
        bos="[CLS]",
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    processor = ColModernVBertProcessor(images, words, image_seq_len=4)
    text = {
        "model_type": "modernbert",
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "pad_token_id": words.pad_token_id,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    vlm = {
        "model_type": "modernvbert",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": processor.image_token_id,
        "pixel_shuffle_factor": 2,
    }
    settings = ColModernVBertConfig(vlm_config=vlm, embedding_dim=16)
    return save(folder, ColModernVBertForRetrieval, settings, processor)


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


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "colpali": colpali,
    "colqwen2": colqwen2,
    "colmodernvbert": colmodernvbert,
}

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

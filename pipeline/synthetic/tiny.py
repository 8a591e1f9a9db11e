"""Small untrained models with the classes and files of the large ones.

`make models` trains them on shapes (`pipeline.synthetic.shapes`), which allows every visual method
to be run where no weights can be downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
    SiglipProcessor,
)
from transformers.models.siglip import SiglipImageProcessorPil

from pipeline.synthetic.shapes import SIDE, words

PATCH = 8  # pixels: 14 x 14 patches
WIDTH = 128
HEADS = 4
#: A tower of patches; that of the dual encoder is deeper.
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def colpali(folder: Path, seed: int = 0) -> None:
    """A ColPali of 1.5 million weights: 196 patches through 3 and 6 layers, vectors of 64 numbers.

    Its layers are initialised as transformers does it; nothing of it is trained.
    """
    tokenizer = _tokenizer("<image>", *"Describe the image .".lower().split())
    processor = ColPaliProcessor(_images(), tokenizer)
    tokenizer = processor.tokenizer
    text = {
        "model_type": "gemma",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 6,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": WIDTH // HEADS,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "model_type": "siglip_vision_model",
        **VISION,
        "num_hidden_layers": 3,
        "projection_dim": WIDTH,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": processor.image_token_id,
        "projection_dim": WIDTH,
        "hidden_size": WIDTH,
    }
    settings = ColPaliConfig(vlm_config=vlm, embedding_dim=64)
    _made(ColPaliForRetrieval, settings, seed).save_pretrained(folder)
    processor.save_pretrained(folder)


def siglip(folder: Path, seed: int = 0) -> None:
    """A SigLIP of 1.5 million weights: 196 patches through 6 layers, texts through 3."""
    tokenizer = _tokenizer()
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 3,
        "max_position_embeddings": 16,
        "vocab_size": len(tokenizer),
        "projection_size": WIDTH,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    settings = SiglipConfig(text_config=text, vision_config={**VISION, "num_hidden_layers": 6})
    _made(SiglipModel, settings, seed).save_pretrained(folder)
    SiglipProcessor(_images(), tokenizer).save_pretrained(folder)


def bert(folder: Path, seed: int = 0) -> None:
    """A BERT of 0.3 million weights, 2 layers of 128 numbers, for EDJE's joint encoder."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer = _word_level(
        dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True)),
        processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]),
    )
    settings = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=2,
        initializer_range=WIDTH**-0.5,  # as wide models have with BERT's 0.02
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,  # what it is trained on does not end
        attention_probs_dropout_prob=0.0,
    )
    model = _made(BertForMaskedLM, settings, seed)
    for layer in model.bert.encoder.layer:  # to begin with, what is alike attends to each other
        attention = layer.attention.self
        attention.key.load_state_dict(attention.query.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _made(model_class: type, settings: object, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(settings)
    return model


def _images() -> SiglipImageProcessorPil:
    images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    # PaliGemma's processor reads it.
    setattr(images, "image_seq_length", (SIDE // PATCH) ** 2)  # noqa: B010
    return images


def _tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """A token a word of the captions."""
    special = {name: f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    return _word_level(special, None, *more)


def _word_level(
    special: dict[str, str], processor: processors.PostProcessor | None, *more: str
) -> PreTrainedTokenizerFast:
    every = dict.fromkeys([*special.values(), *more, *words()])
    vocabulary = {word: number for number, word in enumerate(every)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk"]))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        made.post_processor = processor
    names = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)

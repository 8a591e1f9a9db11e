"""Small untrained models with the classes and files of published models.

`make models` trains them on shapes (`examples.papers.synthetic.shapes`), so that all visual methods
can be run without downloading weights.
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

from examples.papers.synthetic.shapes import SIDE, vocabulary

PATCH = 8  # pixels, for 14 x 14 patches
WIDTH = 128
HEADS = 4
#: Configuration shared by the vision towers.
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def colpali(folder: Path, seed: int = 0) -> None:
    """Writes an untrained ColPali model with 1.5 million parameters.

    The model has 196 patches, 3 vision layers, 6 language layers and vectors of dimension 64.
    """
    tokenizer = _tokenizer("<image>", *"Describe the image .".lower().split())
    processor = ColPaliProcessor(_image_processor(), tokenizer)
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
    _initialise(ColPaliForRetrieval, settings, seed).save_pretrained(folder)
    processor.save_pretrained(folder)


def siglip(folder: Path, seed: int = 0) -> None:
    """Writes an untrained SigLIP model with 1.5 million parameters.

    The model has 196 patches, 6 vision layers and 3 text layers.
    """
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
    _initialise(SiglipModel, settings, seed).save_pretrained(folder)
    SiglipProcessor(_image_processor(), tokenizer).save_pretrained(folder)


def bert(folder: Path, seed: int = 0) -> None:
    """Writes an untrained BERT model with 0.3 million parameters for the joint encoder of EDJE.

    The model has 2 layers of width 128.
    """
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
        initializer_range=WIDTH**-0.5,  # same scale as 0.02 in wide models
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,  # the training data are infinite
        attention_probs_dropout_prob=0.0,
    )
    model = _initialise(BertForMaskedLM, settings, seed)
    for layer in model.bert.encoder.layer:  # initially, similar tokens attend to each other
        attention = layer.attention.self
        attention.key.load_state_dict(attention.query.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _initialise(model_class: type, settings: object, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(settings)
    return model


def _image_processor() -> SiglipImageProcessorPil:
    processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    # Required by the processor of PaliGemma.
    setattr(processor, "image_seq_length", (SIDE // PATCH) ** 2)  # noqa: B010
    return processor


def _tokenizer(*extra_words: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word of the captions."""
    special = {name: f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    return _word_level(special, None, *extra_words)


def _word_level(
    special: dict[str, str], processor: processors.PostProcessor | None, *extra_words: str
) -> PreTrainedTokenizerFast:
    words = dict.fromkeys([*special.values(), *extra_words, *vocabulary()])
    token_ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token=special["unk"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        tokenizer.post_processor = processor
    names = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)

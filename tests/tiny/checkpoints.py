"""Tiny random checkpoints of all model families, with the files of published ones."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

#: Abstracts on which tokenizers are trained.
CRANFIELD = Path(__file__).parents[2] / "jobs/data/cranfield"
VOCABULARY = 600
#: Settings of a vision tower of two layers with 4 x 4 patches.
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def abstracts(number: int = 200) -> list[str]:
    """Returns texts on which tokenizers are trained."""
    lines = (CRANFIELD / "corpus.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:number]]


def tokenizer(
    *special: str,
    pad: str,
    eos: str,
    bos: str | None = None,
    texts: list[str] | None = None,
    **more: Any,
):
    """Trains a byte-level tokenizer with a few hundred tokens, by default on abstracts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    roles = [value for key, value in more.items() if key.endswith("_token")]
    names = list(dict.fromkeys([pad, eos, *([bos] if bos else []), *special, *roles]))
    trainer = trainers.BpeTrainer(
        vocab_size=512 + len(names) if texts else VOCABULARY,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts or abstracts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=eos, bos_token=bos, **more
    )


def colpali(folder: Path) -> Path:
    """Writes a ColPali with 4 x 4 patches and three layers of two heads that share one key."""
    from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor
    from transformers.models.siglip import SiglipImageProcessorPil

    words = tokenizer("<image>", pad="<pad>", eos="<eos>", bos="<bos>")
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    setattr(images, "image_seq_length", 16)  # noqa: B010
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
    vision = {**SIGLIP, "projection_dim": 32, "vision_use_head": False}
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


def qwen_text(words: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    """Returns the settings of a language model of two layers, four heads and two key heads."""
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
    """Writes a ColQwen2 with patches of 8 pixels and one token per four patches."""
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    words, _ = qwen_files()
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
    """Writes a ColModernVBert with tiles of 4 x 4 patches and one token per four patches."""
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
    vlm = {
        "model_type": "modernvbert",
        "text_config": text,
        "vision_config": SIGLIP,
        "image_token_id": processor.image_token_id,
        "pixel_shuffle_factor": 2,
    }
    settings = ColModernVBertConfig(vlm_config=vlm, embedding_dim=16)
    return save(folder, ColModernVBertForRetrieval, settings, processor)


def save(folder: Path, model_class: type, settings, *files) -> Path:
    """Saves a model with random weights and its preprocessing files."""
    torch.manual_seed(0)
    model = model_class(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the default initialisation,
            if parameter.ndim > 1:  # whose attention is nearly uniform
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    for file in files:
        file.save_pretrained(folder)
    return folder


def tower_configs(
    family: str, words: PreTrainedTokenizerFast, text_width: int = 32
) -> dict[str, Any]:
    """Returns the settings of two towers: 4 x 4 patches of 8 x 8 pixels, and texts of 16 tokens."""
    both = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    text = {
        "hidden_size": text_width,
        "vocab_size": len(words),
        "max_position_embeddings": 16,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
    }
    vision = {"hidden_size": 32, "patch_size": 8}
    if family == "siglip2":
        vision["num_patches"] = 16
    else:
        vision["image_size"] = 32
    if family == "clip":
        text["projection_dim"] = vision["projection_dim"] = 24
    else:
        text["projection_size"] = 32
    return {"text_config": {**both, **text}, "vision_config": {**both, **vision}}


def siglip(folder: Path, text_width: int = 32) -> Path:
    """Writes a SigLIP, which is also the class of SigLIP 2 with fixed resolution."""
    from transformers import SiglipConfig, SiglipModel, SiglipProcessor
    from transformers.models.siglip import SiglipImageProcessorPil

    words = tokenizer(pad="<pad>", eos="<eos>")
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    settings = SiglipConfig(**tower_configs("siglip", words, text_width))
    return save(folder, SiglipModel, settings, SiglipProcessor(images, words))


def siglip2(folder: Path) -> Path:
    """Writes a SigLIP 2 NaFlex with at most 20 patches."""
    from transformers import Siglip2Config, Siglip2Model, Siglip2Processor, Siglip2Tokenizer
    from transformers.models.siglip2 import Siglip2ImageProcessorPil

    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    vocabulary = {name: number for number, name in enumerate([*names, *letters, "he", "at"])}
    merges: Any = [("h", "e"), ("a", "t")]  # annotated as a list of strings
    words = Siglip2Tokenizer(vocabulary, merges, padding_side="right")
    images = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=20)
    settings = Siglip2Config(**tower_configs("siglip2", words))
    return save(folder, Siglip2Model, settings, Siglip2Processor(images, words))


def clip(folder: Path, **text: int) -> Path:
    """Writes a CLIP whose towers and single vectors have three different widths."""
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor
    from transformers.models.clip import CLIPImageProcessorPil

    words = tokenizer(pad="<pad>", eos="<end>", bos="<start>")
    add_special_tokens(words, "<start>", "<end>")
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    towers = tower_configs("clip", words, text_width=48)
    towers["text_config"] |= text
    settings = CLIPConfig(**towers, projection_dim=24)
    return save(folder, CLIPModel, settings, CLIPProcessor(images, words))


def blip(folder: Path) -> Path:
    """Writes a BLIP for image-text matching with a text tower of two layers."""
    from transformers import BlipConfig, BlipForImageTextRetrieval, BlipProcessor
    from transformers.models.blip import BlipImageProcessorPil

    words = tokenizer("[ENC]", pad="[PAD]", eos="[SEP]", sep_token="[SEP]", cls_token="[CLS]")
    add_special_tokens(words, "[CLS]", "[SEP]")
    text = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "encoder_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": words.cls_token_id,
        "eos_token_id": words.sep_token_id,
        "sep_token_id": words.sep_token_id,
        "pad_token_id": words.pad_token_id,
    }
    vision = {name: value for name, value in SIGLIP.items() if name != "model_type"}
    settings = BlipConfig(text_config=text, vision_config=vision, image_text_hidden_size=16)
    images = BlipImageProcessorPil(size={"height": 32, "width": 32})
    return save(folder, BlipForImageTextRetrieval, settings, BlipProcessor(images, words))


def add_special_tokens(words, first: str, last: str) -> None:
    """Makes a tokenizer add a special token before and after each text."""
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        special_tokens=[(name, words.convert_tokens_to_ids(name)) for name in (first, last)],
    )


def colbert_bert(folder: Path) -> Path:
    """Writes a ColBERT in the original format, with the projection among the model's weights."""
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig, BertModel, BertTokenizer

    names = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    whole = ["wing", "lift", "##ing", "drag", "flow", *string.punctuation]
    words = BertTokenizer({name: i for i, name in enumerate([*names, *pieces, *whole])})
    save(
        folder, BertModel, BertConfig(**small_text_config(words), max_position_embeddings=64), words
    )
    weights = load_file(folder / "model.safetensors")
    named = {f"bert.{name}": tensor for name, tensor in weights.items() if "pooler" not in name}
    named["linear.weight"] = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["architectures"] = ["HF_ColBERT"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    usage = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 12,
        "doc_maxlen": 20,
        "attend_to_mask_tokens": False,
        "mask_punctuation": True,
    }
    (folder / "artifact.metadata").write_text(json.dumps(usage), "utf-8")
    return folder


def cross_encoder(folder: Path) -> Path:
    """Writes a cross-encoder that sentence-transformers has saved."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    words: Any = AutoTokenizer.from_pretrained(colbert_bert(folder / "words"))
    words.model_max_length = 64
    sizes = {**small_text_config(words), "max_position_embeddings": 64, "num_labels": 1}
    settings = BertConfig(**sizes)
    model = BertForSequenceClassification(settings)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(folder / "plain")
    words.save_pretrained(folder / "plain")
    CrossEncoder(str(folder / "plain")).save_pretrained(str(folder / "saved"))
    return folder / "saved"


def gte_modernbert(folder: Path) -> Path:
    """Writes a single-vector text encoder in the format of Sentence Transformers."""
    _modernbert(folder)
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{name}"}
        for idx, (path, name) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))
    ]
    usage: dict[str, Any] = {
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    (folder / "1_Pooling").mkdir()
    for name, value in {
        "modules.json": modules,
        "config_sentence_transformers.json": usage,
        "1_Pooling/config.json": pooling,
    }.items():
        (folder / name).write_text(json.dumps(value), "utf-8")
    return folder


def _modernbert(folder: Path) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    words = tokenizer(
        "[Q] ", "[D] ", "[UNK]", pad="[PAD]", eos="[SEP]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", unk_token="[UNK]",
    )  # fmt: skip
    add_special_tokens(words, "[CLS]", "[SEP]")
    settings = ModernBertConfig(
        **small_text_config(words),
        max_position_embeddings=128,
        local_attention=8,
        cls_token_id=words.cls_token_id,
        sep_token_id=words.sep_token_id,
        bos_token_id=words.cls_token_id,
        eos_token_id=words.sep_token_id,
    )
    save(folder, ModernBertModel, settings, words)


def colbert_modernbert(folder: Path) -> Path:
    """Writes a ColBERT in the format of PyLate, with the projection in a separate folder."""
    from safetensors.torch import save_file

    _modernbert(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    usage = {
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 16,
        "document_length": 32,
        "attend_to_expansion_tokens": True,
        "skiplist_words": [".", ",", "-"],
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(usage), "utf-8")
    dense = folder / "1_Dense"
    dense.mkdir()
    identity = "torch.nn.modules.linear.Identity"
    dense_config = {
        "in_features": 32,
        "out_features": 16,
        "bias": True,
        "activation_function": identity,
    }
    (dense / "config.json").write_text(json.dumps(dense_config), "utf-8")
    generator = torch.Generator().manual_seed(1)
    weights = {
        "linear.weight": torch.randn(16, 32, generator=generator),
        "linear.bias": torch.randn(16, generator=generator),
    }
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    return folder


def small_text_config(words: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Returns the settings of a tiny text encoder."""
    return {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "pad_token_id": words.pad_token_id,
    }


def qwen_files():
    """Returns a tokenizer with Qwen's special tokens and an image processor without torchvision."""
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


def qwen_settings(config_class: Any, words, text: dict, vision: dict, **more: Any) -> Any:
    """Returns the settings of a Qwen-VL."""
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
    """Writes a Qwen2-VL with three layers of four heads that share two keys."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    words, images = qwen_files()
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    settings = qwen_settings(Qwen2VLConfig, words, rope, vision)
    return save(folder, Qwen2VLForConditionalGeneration, settings, words, images)


#: Settings of the vision tower of Qwen2.5-VL.
QWEN2_5_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 4,
}


def _qwen2_5_settings(words, **more):
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return qwen_settings(Qwen2_5_VLConfig, words, rope, QWEN2_5_VISION, **more)


def qwen2_5_vl(folder: Path) -> Path:
    """Writes a Qwen2.5-VL, which has window attention in the vision tower."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    words, images = qwen_files()
    settings = _qwen2_5_settings(words)
    return save(folder, Qwen2_5_VLForConditionalGeneration, settings, words, images)


#: Settings of the two towers of Qwen3-VL.
QWEN3_TEXT = {
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def qwen3_vl(folder: Path) -> Path:
    """Writes a Qwen3-VL, which adds features of the vision tower between layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    words, images = qwen_files()
    settings = qwen_settings(Qwen3VLConfig, words, QWEN3_TEXT, QWEN3_VISION)
    return save(folder, Qwen3VLForConditionalGeneration, settings, words, images)


def omni_settings(words, text: dict, vision: dict) -> Any:
    """Returns the settings of the thinker of a Qwen2.5-Omni."""
    from transformers import Qwen2_5OmniThinkerConfig

    ids = words.convert_tokens_to_ids
    vision_tokens: dict[str, Any] = {  # no arguments of the class
        "vision_start_token_id": ids("<|vision_bos|>"),
        "vision_end_token_id": ids("<|vision_eos|>"),
    }
    return Qwen2_5OmniThinkerConfig(
        text_config={
            **small_text_config(words),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            **text,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            **vision,
        },
        audio_config={
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 32,
            "n_window": 50,
        },
        audio_token_index=ids("<|AUDIO|>"),
        image_token_index=ids("<|IMAGE|>"),
        video_token_index=ids("<|VIDEO|>"),
        audio_start_token_id=ids("<|audio_bos|>"),
        audio_end_token_id=ids("<|audio_eos|>"),
        **vision_tokens,
    )


def qwen2_5_omni(folder: Path) -> Path:
    """Writes the thinker of a Qwen2.5-Omni with an audio tower for up to 6 s."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor

    words = tokenizer(
        *("<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        *("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"),
        pad="<|endoftext|>",
        eos="<|im_end|>",
    )
    _, images = qwen_files()
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=6, return_attention_mask=True)
    save(folder, Qwen2_5OmniThinkerForConditionalGeneration, omni_settings(words, {}, {}), words)
    # Published checkpoints also have both in one file.
    both = {**extractor.to_dict(), **images.to_dict(), "processor_class": "Qwen2_5OmniProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(both), "utf-8")
    return folder


#: Tasks and rank of the adapters of the tiny jina-embeddings-v4.
JINA_TASKS = ("retrieval", "text-matching", "code")
JINA_RANK = 2


def jina_v4(folder: Path) -> Path:
    """Writes a jina-embeddings-v4: Qwen2.5-VL with a projector and adapters for three tasks."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2_5_VLForConditionalGeneration

    words, images = qwen_files()
    settings = _qwen2_5_settings(words, multi_vector_projector_dim=16)
    save(folder, Qwen2_5_VLForConditionalGeneration, settings, words, images)
    weights = load_file(folder / "model.safetensors")
    weights["multi_vector_projector.weight"] = torch.randn(16, 32) * 0.3
    weights["multi_vector_projector.bias"] = torch.randn(16) * 0.3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shapes = {
        f"model.language_model.layers.{layer}.{part}": shape
        for layer in range(3)
        for part, shape in {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "mlp.down_proj": (32, 64),
        }.items()
    } | {"multi_vector_projector": (16, 32)}
    adapters = {}
    for name, (num_out, num_in) in shapes.items():
        for task in JINA_TASKS:
            prefix = f"base_model.model.{name}"
            adapters[f"{prefix}.lora_A.{task}.weight"] = torch.randn(JINA_RANK, num_in) * 0.2
            adapters[f"{prefix}.lora_B.{task}.weight"] = torch.randn(num_out, JINA_RANK) * 0.2
    (folder / "adapters").mkdir()
    save_file(adapters, folder / "adapters" / "adapter_model.safetensors", {"format": "pt"})
    adapter_config = {"peft_type": "LORA", "r": JINA_RANK, "lora_alpha": 4, "use_rslora": False}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(adapter_config))
    return folder


#: Functions that write the checkpoints, by model family.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "colpali": colpali,
    "colqwen2": colqwen2,
    "colmodernvbert": colmodernvbert,
    "siglip": siglip,
    "siglip2": siglip2,
    "clip": clip,
    "blip": blip,
    "colbert_bert": colbert_bert,
    "cross_encoder": cross_encoder,
    "colbert_modernbert": colbert_modernbert,
    "gte_modernbert": gte_modernbert,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen2_5_omni": qwen2_5_omni,
    "jina_v4": jina_v4,
}

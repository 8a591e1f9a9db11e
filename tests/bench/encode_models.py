"""Encoders with the shapes of published models and random weights, and their operations."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from pipeline.config import parse
from pipeline.registry import ENCODERS

PAGE = (1240, 1754)  # A4 at 150 dpi
#: Distinct pages. Writing more would take longer than reading them.
NUM_PAGES = 16
#: Tokens per page with its prompt, rounded up.
PAGE_TOKENS = 1100
#: At most 768 merged patches per page, as in ColQwen2.
QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 768 * 28 * 28}


def spec(folder: Path, family: str, num_layers: int | None, device: str, batch: int) -> Any:
    """Returns the spec of an encoder of `SHAPES`, whose checkpoint is written if it is missing.

    The language model has `num_layers`, with as much of the other towers, or all.
    """
    name, write = SHAPES[family]
    if not (folder / "config.json").exists():
        write(folder, num_layers)
    dtype = "bfloat16" if device == "cuda" else "float32"
    fields = {"model": str(folder), "dtype": dtype, "max_batch_tokens": batch * PAGE_TOKENS}
    return parse(ENCODERS.load(name).Spec, {"name": name, **fields})


def pages(number: int) -> pa.Table:
    """Returns items with JPEG files of pages. After `NUM_PAGES`, they are repeated."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(min(number, NUM_PAGES)):
        small = generator.integers(0, 255, (PAGE[1] // 16, PAGE[0] // 16, 3), dtype=np.uint8)
        file = io.BytesIO()  # about the size of a scan
        Image.fromarray(small).resize(PAGE).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    numbers = range(number)
    return pa.table(
        {
            "item_id": [f"{i:04}" for i in numbers],
            "image": [files[i % NUM_PAGES] for i in numbers],
        }
    )


class Operations(TorchFunctionMode):
    """Counts the operations of linear layers, convolutions and attention products.

    A product and a sum are two operations. The products of attention are counted in full, also
    those above the diagonal of causal attention. Normalisations, activations and positional
    encodings are not counted.

    Attributes:
        count: Number of operations.

    >>> with Operations() as operations:
    ...     _ = torch.nn.Linear(3, 4)(torch.zeros(5, 3))
    >>> operations.count
    120
    """

    WEIGHTED = (
        torch.nn.functional.linear,
        torch.nn.functional.conv1d,
        torch.nn.functional.conv2d,
        torch.nn.functional.conv3d,
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if function in self.WEIGHTED:
            self.count += 2 * result.numel() * args[1][0].numel()
        elif function is torch.nn.functional.scaled_dot_product_attention:
            query_BHND, key_BGMD = args[:2]
            self.count += 4 * query_BHND.numel() * key_BGMD.shape[2]
        elif str(function) == "torch_attn._varlen_attn":  # see `pipeline.encoders.varlen`
            query_THD, bounds = args[0], args[3]
            pairs = int(bounds.diff().long().square().sum())
            self.count += 4 * pairs * query_THD[0].numel()
        return result


# -- checkpoints -----------------------------------------------------------------------------------


def _words(*special: str, pad: str, eos: str, bos: str | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [name for name in (pad, eos, bos, *special) if name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate([*names, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token=bos
    )
    words.add_special_tokens({"additional_special_tokens": list(special)})
    return words


def _save(folder: Path, model_class: Any, settings: Any, *files: Any) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 2 B weights in float32 need too much memory
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model_class(settings).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    for file in files:
        file.save_pretrained(folder)


def _scaled(depth: int, num_layers: int | None, total: int) -> int:
    """Returns the layers of a tower for `num_layers` of the `total` layers of a language model."""
    return depth if num_layers is None else max(1, num_layers * depth // total)


def _colpali(folder: Path, num_layers: int | None) -> None:
    """Writes a model with the architecture of ColPali: SigLIP so400m at 448 pixels and Gemma 2B."""
    from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor
    from transformers.models.siglip import SiglipImageProcessorPil

    words = _words("<image>", pad="<pad>", eos="<eos>", bos="<bos>")
    fields = {"size": {"height": 448, "width": 448}, "image_seq_length": 1024}
    images = SiglipImageProcessorPil.from_dict(fields)
    processor = ColPaliProcessor(images, words)
    text = {
        "model_type": "gemma",
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": num_layers or 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": _scaled(27, num_layers, 18),
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": processor.image_token_id,
        "projection_dim": 2048,
        "hidden_size": 2048,
    }
    settings = ColPaliConfig(vlm_config=vlm, embedding_dim=128)
    _save(folder, ColPaliForRetrieval, settings, processor)


def _qwen_words(names: dict[str, str], *more: str) -> tuple[Any, dict[str, Any]]:
    """Creates a tokenizer; `names` are special tokens by the configuration field of their id."""
    special = ["<|im_start|>", "<|im_end|>", *names.values(), *more]
    words = _words(*special, pad="<|endoftext|>", eos="<|end|>")
    return words, {field: words.convert_tokens_to_ids(name) for field, name in names.items()}


VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
OMNI_TOKENS = {
    "image_token_index": "<|IMAGE|>",
    "video_token_index": "<|VIDEO|>",
    "audio_token_index": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}


def _qwen_text(words: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(words),
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        **more,
    }


def _colqwen2(folder: Path, num_layers: int | None) -> None:
    """Writes a model with the shape of ColQwen2: Qwen2-VL 2B with at most 768 merged patches."""
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    words, ids = _qwen_words(VISION_TOKENS)
    processor = ColQwen2Processor(Qwen2VLImageProcessorPil(size=QWEN_SIZE), words)
    text = _qwen_text(
        words,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=num_layers or 28,
        num_attention_heads=12,
    )
    depth = _scaled(32, num_layers, 28)
    vision = {"depth": depth, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16}
    vlm = {"model_type": "qwen2_vl", "text_config": text, "vision_config": vision, **ids}
    settings = ColQwen2Config(vlm_config=vlm, embedding_dim=128)
    _save(folder, ColQwen2ForRetrieval, settings, processor)


def _qwen2_5_text(words: Any, num_layers: int | None) -> dict[str, Any]:
    """Returns the language model of Qwen2.5-VL-3B and of the thinker of Qwen2.5-Omni-3B."""
    return _qwen_text(
        words,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=num_layers or 36,
        num_attention_heads=16,
    )


def _qwen2_5_vision(num_layers: int | None) -> dict[str, Any]:
    depth = _scaled(32, num_layers, 36)
    return {
        "depth": depth,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [layer for layer in (7, 15, 23, 31) if layer < depth],
    }


def _qwen2_5_vl(folder: Path, num_layers: int | None) -> None:
    """Writes a model with the shape of Qwen2.5-VL-3B with at most 768 merged patches."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    words, ids = _qwen_words(VISION_TOKENS)
    settings = Qwen2_5_VLConfig(
        text_config=_qwen2_5_text(words, num_layers),
        vision_config={**_qwen2_5_vision(num_layers), "tokens_per_second": 2},
        **ids,
    )
    images = Qwen2VLImageProcessorPil(size=QWEN_SIZE)
    _save(folder, Qwen2_5_VLForConditionalGeneration, settings, words, images)


def _qwen2_5_omni(folder: Path, num_layers: int | None) -> None:
    """Writes a model with the shape of the thinker of Qwen2.5-Omni-3B."""
    from transformers import (
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniThinkerForConditionalGeneration,
        WhisperFeatureExtractor,
    )
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    words, ids = _qwen_words(OMNI_TOKENS)
    audio = {
        "num_mel_bins": 128,
        "d_model": 1280,
        "encoder_layers": _scaled(32, num_layers, 36),
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "max_source_positions": 1500,
        "n_window": 100,
        "output_dim": 2048,
    }
    settings = Qwen2_5OmniThinkerConfig(
        text_config=_qwen2_5_text(words, num_layers),
        vision_config=_qwen2_5_vision(num_layers),
        audio_config=audio,
        **ids,
    )
    _save(folder, Qwen2_5OmniThinkerForConditionalGeneration, settings, words)
    extractor = WhisperFeatureExtractor(
        feature_size=128, chunk_length=300, return_attention_mask=True
    )
    images = Qwen2VLImageProcessorPil(size=QWEN_SIZE)
    # Published checkpoints also have both in one file.
    both = {**extractor.to_dict(), **images.to_dict(), "processor_class": "Qwen2_5OmniProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(both), "utf-8")


#: Names of the encoders of the families, and functions that write their checkpoints.
SHAPES: dict[str, tuple[str, Callable[[Path, int | None], None]]] = {
    "colpali": ("colpali", _colpali),
    "colqwen2": ("colpali", _colqwen2),
    "qwen2_5_vl": ("qwen_vl", _qwen2_5_vl),
    "qwen2_5_omni": ("qwen_omni", _qwen2_5_omni),
}

"""Families of late-interaction models: a vision-language model with a linear projection.

Checkpoints have the layout of one of two libraries. That of transformers (`ColQwen2ForRetrieval`)
has a type of its own and the settings of the vision-language model in `vlm_config`. That of
colpali-engine has the type of the vision-language model, and the projection among its weights.
Prompts are those of the processors of transformers 5.23 and colpali-engine 0.3.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

#: Placeholder of the image, video or audio in the prompt of an item.
CONTENT = "{content}"
_VISION_CHAT = f"<|im_start|>user\n{CONTENT}Describe the image.<|im_end|><|endoftext|>"
_OMNI_CHAT = (
    "<|im_start|>system\nYou are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, "
    "capable of perceiving auditory and visual inputs, as well as generating text and speech."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_TILES = "{}User:<image>Describe the image.<end_of_utterance>\nAssistant:"


@dataclass(frozen=True)
class Family:
    """Declaration of a family.

    Attributes:
        title: Name of its models.
        media: How images are read: as a "square", as "tiles", as a "grid" in the aspect ratio of
            the image, or as such a grid beside videos and audio ("omni").
        page: Prompt of an item. `{content}` or `<image>` is replaced with its tokens.
        before, after: Texts before the prefix of a query and after its augmentation tokens.
        prefix: Prefix of queries.
        augmentation: Augmentation token, or empty for the padding token.
        num_augmentation: Number of augmentation tokens that the model was trained with.
        max_patches: Maximum number of patches per image, or null for that of the checkpoint.
        library: Library whose layout the checkpoint has, or the owner of a layout.
    """

    title: str
    media: Literal["square", "tiles", "grid", "omni"]
    page: str
    before: str = ""
    after: str = ""
    prefix: str = ""
    augmentation: str = ""
    num_augmentation: int = 10
    max_patches: int | None = None
    library: str = "colpali-engine"


def _qwen(title: str, **more: Any) -> Family:
    return Family(title, "grid", _VISION_CHAT, augmentation="<|endoftext|>", **more)


_OMNI_BEFORE, _OMNI_AFTER = _OMNI_CHAT.split("{}")


#: Families by the type in config.json.
FAMILIES = {
    "colpali": Family(
        *("ColPali", "square", "<image><bos>Describe the image.", "<bos>", "\n", "Question: "),
        library="transformers",
    ),
    "colqwen2": _qwen("ColQwen2", after="\n", prefix="Query: ", library="transformers"),
    "colmodernvbert": Family(
        *("ColModernVBert", "tiles", _TILES.format("<|begin_of_text|>")),
        augmentation="<end_of_utterance>",
        library="transformers",
    ),
    # The processor adds a <bos> to the one of the prompt.
    "paligemma": Family("ColPali", "square", "<image><bos>Describe the image.", "<bos>"),
    "qwen2_vl": _qwen("ColQwen2"),
    "qwen2_5_vl": _qwen("ColQwen2.5"),
    "qwen3_vl": _qwen("ColQwen3"),
    "qwen3_5": _qwen("ColQwen3.5"),
    "colqwen3": _qwen("ColQwen3", max_patches=1280, library="TomoroAI"),
    "ops_colqwen3": Family(
        *("Ops-ColQwen3", "grid"),
        _VISION_CHAT.replace("<|endoftext|>", "<|im_start|>assistant\n<|endoftext|>"),
        prefix="Query: ",
        augmentation="<|endoftext|>",
        library="OpenSearch-AI",
    ),
    "qwen2_5_omni_thinker": Family(
        *("ColQwen-Omni", "omni", _OMNI_CHAT.format(f"{CONTENT}Describe the content.")),
        *(_OMNI_BEFORE, _OMNI_AFTER, "Query: ", "<|endoftext|>"),
    ),
    "idefics3": Family(
        *("ColIdefics3", "tiles", _TILES.format("<|im_start|>")),
        augmentation="<end_of_utterance>",
    ),
    "modernvbert": Family(
        *("ColModernVBert", "tiles", _TILES.format("<|begin_of_text|>")),
        augmentation="<end_of_utterance>",
    ),
    "gemma3": Family(
        *("ColGemma3", "square"),
        "<bos><start_of_turn>user\n<start_of_image>Describe this image<end_of_turn>\n",
        *("<bos><start_of_turn>user\n", "<end_of_turn>\n", "Query: "),
        num_augmentation=0,
    ),
}
#: Types that transformers does not know, by the type that has their fields and their backbone.
BACKBONES = {"colqwen3": "qwen3_vl", "ops_colqwen3": "qwen3_vl"}
#: Names under which libraries save the projection. Older versions keep the prefix of peft.
PROJECTION = re.compile(
    r"(?:base_model\\?\.model\\?\.|model\.)?(?:custom_text_proj|linear|embedding_proj_layer)"
    r"(?:\.base_layer)?\.(weight|bias)"
)


def projection_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the saved names of the weight and the bias of a projection, by `weight` and `bias`.

    >>> projection_names(["model.custom_text_proj.weight", "visual.merger.linear.weight"])
    {'weight': 'model.custom_text_proj.weight'}
    """
    return {found[1]: name for name in names if (found := PROJECTION.fullmatch(name))}

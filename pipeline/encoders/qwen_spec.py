"""Specs and prompts that the embedders on Qwen-VL and Qwen-Omni share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import AfterValidator, Field

from pipeline.config import SpecError
from pipeline.encoders.layers import Layers
from pipeline.encoders.loading import CheckpointSpec

#: Placeholder in a prompt for the images and the text.
CONTENT = "{content}"

CHAT = (
    "<|im_start|>system\n{instruction}<|im_end|>\n"
    "<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n"
)

DOCUMENT_PROMPT = CHAT.replace("{instruction}", "Represent the user's input.")

QUERY_PROMPT = CHAT.replace(
    "{instruction}", "Retrieve images or text relevant to the user's query."
)

#: Placeholder tokens of images and audio, one per token: of Qwen-VL, and of Qwen2.5-Omni.
PLACES = ("<|image_pad|>", "<|video_pad|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>")


def _check_prompt(prompt: str) -> str:
    if prompt.count(CONTENT) != 1:
        raise SpecError("", prompt, f"a text that contains {CONTENT} exactly once")
    for place in PLACES:
        if place in prompt:
            rule = f"a text without other placeholders than {CONTENT}"
            raise SpecError("", prompt, rule, f"contains {place}")
    return prompt


Prompt = Annotated[str, AfterValidator(_check_prompt)]


class QwenSpec(CheckpointSpec):
    """Base of the specs of all families on these models.

    Attributes:
        min_pixels, max_pixels: Bounds of an image as the model reads it; null: the checkpoint's
            own. Those of Qwen3-VL allow 16384 tokens per image; the code of Qwen3-VL-Embedding sets
            4096 and 1843200, which is at most 1800 tokens.
        max_item_tokens: Maximum number of tokens of an item or a query, prompt included, if the
            model's window is not shorter.
    """

    if TYPE_CHECKING:  # a field of every subclass, with values of its own
        documents: str

    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    max_item_tokens: int = Field(8192, ge=1)


class StatesSpec(QwenSpec):
    """Base of the specs of single-vector embedders whose hidden states are token vectors (SMART).

    The default prompts are those of Qwen3-VL-Embedding. Other models need others, which contain
    `{content}`: GME has "You are a helpful assistant." as its system prompt before items, and
    `<|endoftext|>` as the last token, which must be written at the end of the prompt. Tokens that
    the checkpoint's tokenizer appends to every text need not be.

    Attributes:
        layer: The hidden state that gives the token vectors: 0 is the output of the embeddings, -1
            that of the last layer; or a list of layers, which are concatenated. The pooled vector
            is always the last layer's.
        document_prompt, query_prompt: Prompts of items and queries, which replace `{content}`.
        mask_composed: Whether the image tokens of a query of a text and an image are dropped
            (SMART, appendix B). The text tokens have attended to them.
        bidirectional: Whether all tokens attend to each other.
        max_frames: Maximum number of frames per video.
    """

    if TYPE_CHECKING:  # likewise
        keep: str

    layer: Layers = -1
    document_prompt: Prompt = DOCUMENT_PROMPT
    query_prompt: Prompt = QUERY_PROMPT
    mask_composed: bool = True
    bidirectional: bool = False
    max_frames: int = Field(64, ge=1)


QwenSpecT = TypeVar("QwenSpecT", bound=QwenSpec)
StatesSpecT = TypeVar("StatesSpecT", bound=StatesSpec)

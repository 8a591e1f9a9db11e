"""Specs and prompts shared by the embedders based on Qwen-VL and Qwen-Omni."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from pipeline.config import SpecError
from pipeline.encoders.appended import AppendedTokensSpec
from pipeline.encoders.layers import Layers
from pipeline.encoders.loading import CheckpointSpec
from pipeline.encoders.templates import fill_template

#: Placeholder in a prompt for the images and the text.
CONTENT = "{content}"

CHAT = (
    "<|im_start|>system\n{instruction}<|im_end|>\n"
    "<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n"
)

DOCUMENT_PROMPT = fill_template(CHAT, "Represent the user's input.")

QUERY_PROMPT = fill_template(CHAT)

#: Placeholder tokens of images and audio in Qwen-VL and Qwen2.5-Omni.
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>")


def _check_prompt(prompt: str) -> str:
    others = [placeholder for placeholder in PLACEHOLDERS if placeholder in prompt]
    if prompt.count(CONTENT) != 1 or others:
        rule = f"a text that contains {CONTENT} exactly once, and no other placeholder"
        raise SpecError("", prompt, rule, f"contains {others[0]}" if others else None)
    return prompt


Prompt = Annotated[str, AfterValidator(_check_prompt)]

#: Position ids: in time, row and column, or one number per token.
Positions = Literal["3d", "1d"]

#: Libraries whose steps on images, videos and instructions differ.
Preprocessing = Literal["transformers", "gme", "vlm2vec", "qwen3_vl_embedding"]


class QwenSpec(AppendedTokensSpec, CheckpointSpec):
    """Base of the specs of all families on these models."""

    if TYPE_CHECKING:  # defined by each subclass with different values
        documents: str

    min_pixels: int | None = Field(None, ge=1)
    """Minimum number of pixels per image after resizing. If null, the checkpoint's value is used.
    Qwen3-VL-Embedding uses 4096.
    """
    max_pixels: int | None = Field(None, ge=1)
    """Maximum number of pixels per image after resizing. If null, the checkpoint's value is used.
    Qwen3-VL allows 16384 tokens per image. Qwen3-VL-Embedding uses 1843200, at most 1800 tokens."""
    max_item_tokens: int = Field(8192, ge=1)
    """Maximum number of tokens per item or query, including the prompt, further limited by the
    context length of the model.
    """


class StatesSpec(QwenSpec):
    """Base of the specs of single-vector embedders whose hidden states are token vectors (SMART).

    The default prompts are those of Qwen3-VL-Embedding. Other models need their own, which contain
    `{content}`. GME, for example, uses the system prompt "You are a helpful assistant." for items
    and `<|endoftext|>` as the last token, which the prompt must end with. Tokens that the
    checkpoint's tokenizer appends to every text need not be included.
    """

    if TYPE_CHECKING:  # defined by each subclass with different values
        output_tokens: str

    layer: Layers = -1
    """Hidden state used as token vectors: 0 is the output of the embeddings, -1 that of the last
    layer. The states of a list of layers are concatenated.
    """
    pooled_layer: int = -1
    """Hidden state of the last token that is the pooled vector, numbered like `layer` (SMART,
    table 4)."""
    document_prompt: Prompt = DOCUMENT_PROMPT
    """Prompt of items. `{content}` is replaced with the item."""
    query_prompt: Prompt = QUERY_PROMPT
    """Prompt of queries. `{content}` is replaced with the query, and `{instruction}` or the
    instruction of the default prompt with that of the benchmark's task."""
    mask_composed: bool = True
    """Drop the image and audio tokens of composed queries (SMART, appendix B). The text tokens have
    attended to them.
    """
    bidirectional: bool = False
    """Use bidirectional attention."""
    max_frames: int = Field(64, ge=1)
    """Maximum number of frames per video."""


QwenSpecT = TypeVar("QwenSpecT", bound=QwenSpec)
StatesSpecT = TypeVar("StatesSpecT", bound=StatesSpec)

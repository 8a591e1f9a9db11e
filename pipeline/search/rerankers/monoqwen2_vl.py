"""Reranking of images with MonoQwen2-VL, whose objective is that of MonoT5."""

from __future__ import annotations

from typing import Literal

from transformers import Qwen2VLForConditionalGeneration

from pipeline.search.rerankers.pairs import AnswerReranker, PairSpec

#: Prompt of the model card in the template of Qwen2-VL.
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
    "{document}Assert the relevance of the previous image document to the following query, "
    "answer True or False. The query is: {query}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class MonoQwen2VL(AnswerReranker["MonoQwen2VL.Spec"]):
    """Reranker that asks a Qwen2-VL whether an image is relevant to a query.

    The score is the probability of "True" against "False". Queries are texts. The score of a video
    is the highest score of its frames. Items without an image keep their ranks.
    """

    class Spec(PairSpec):
        """Checkpoint: a Qwen2-VL, or a LoRA adapter of one."""

        name: Literal["monoqwen2_vl"] = "monoqwen2_vl"

    model_type = "qwen2_vl"
    model_class = Qwen2VLForConditionalGeneration
    answers = ("True", "False")

    def prompt(self) -> str:
        """Returns the prompt of the model card."""
        return PROMPT

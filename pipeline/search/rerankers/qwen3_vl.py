"""Reranking with Qwen3-VL-Reranker (Li et al., 2026)."""

from __future__ import annotations

from typing import Literal

from transformers import Qwen3VLForConditionalGeneration

from pipeline.search.rerankers.pairs import AnswerReranker, Documents, PairSpec

#: Prompt of the model's own code.
PROMPT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class Qwen3VL(AnswerReranker["Qwen3VL.Spec"]):
    """Reranker that asks a Qwen3-VL whether an item meets the requirements of a query.

    The score is the probability of "yes" against "no". Queries are texts or images. Items are
    pages, images, videos or texts. The frames of a video are read together. Items without the
    selected content keep their ranks.
    """

    class Spec(PairSpec):
        """Checkpoint, the content of items, and the instruction."""

        name: Literal["qwen3_vl"] = "qwen3_vl"
        documents: Documents = "images"
        """Content of an item that is read: `images` (the images, or the text of items without
        images), "text", or "both", the text after the images."""
        instruction: str = (
            "Given a search query, retrieve relevant candidates that answer the query."
        )
        """Task in the prompt."""

    query_kinds = (str, bytes)
    model_type = "qwen3_vl"
    model_class = Qwen3VLForConditionalGeneration
    answers = ("yes", "no")
    preprocessing = "qwen3_vl_embedding"  # the two models share their steps on images
    pixels = (4 * 32 * 32, 1800 * 32 * 32)
    reads_video = True

    def prompt(self) -> str:
        """Returns the prompt with the instruction."""
        return PROMPT.replace("{instruction}", self.spec.instruction)

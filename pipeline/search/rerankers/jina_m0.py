"""Reranking with jina-reranker-m0, a Qwen2-VL with a head of two layers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from pipeline.encoders.loading import load_model
from pipeline.search.rerankers.pairs import PairReranker, PairSpec

#: Id of the token after the prompt, whose state is scored.
SCORE_TOKEN = 100
#: Logit at which the model's own code places a score of 0.5.
LOGIT_BIAS = 2.65


#: Names of weights by patterns of saved names. The library renames those of its own classes only.
NAMES = {
    r"^visual": "model.visual",
    r"^model(?!\.(language_model|visual))": "model.language_model",
}


class ScoredQwen2VL(Qwen2VLForConditionalGeneration):
    """Qwen2-VL with a head that computes a score from a state."""

    def __init__(self, config: Qwen2VLConfig):
        super().__init__(config)
        width = config.get_text_config().hidden_size
        self.score = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )


class JinaM0(PairReranker["JinaM0.Spec"]):
    """Reranker that computes a score from the state of a token after an item and a query.

    The score is the sigmoid of the logit minus 2.65, as in the model's own code. Queries are texts
    or images. Items are images or texts. The score of a video is the highest score of its frames.
    Items without the selected content keep their ranks.
    """

    class Spec(PairSpec):
        """Checkpoint and the content of items."""

        name: Literal["jina_m0"] = "jina_m0"
        documents: Literal["images", "text"] = "images"
        """Content of an item that is read: `images` (the images, or the text of items without
        images), or "text"."""

    query_kinds = (str, bytes)
    model_type = "qwen2_vl"
    pixels = (56 * 56, 768 * 28 * 28)
    end = (SCORE_TOKEN,)

    def prompt(self) -> str:
        """Returns the prompt of the model's own code."""
        return "**Document**:\n{document}\n**Query**:\n{query}"

    def load(self, spec: Spec) -> Any:
        """Loads the model with its head."""
        model: Any = load_model(spec, ScoredQwen2VL, optional_weights=("lm_head.",), renamed=NAMES)
        self._head = model.score
        return model

    def head(self, states_BD: torch.Tensor) -> torch.Tensor:
        """Returns scores between 0 and 1."""
        return torch.sigmoid(self._head(states_BD).squeeze(1).double() - LOGIT_BIAS)

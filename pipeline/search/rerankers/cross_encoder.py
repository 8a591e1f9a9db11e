"""Reranking of texts with a cross-encoder of the library sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from pipeline import config, extras
from pipeline.config import SpecError, reading
from pipeline.encoders import check_query_size
from pipeline.encoders.loading import MODEL_RULE, ModelName, hash_files, load_json
from pipeline.encoders.sentence_transformers import FILES, check_modules
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.runtime.checkpoint import (
    LOAD_ERRORS,
    check_folder,
    check_safetensors,
    find_checkpoint,
)
from pipeline.search.rerankers import OPTIONS, Reranker, RerankerSpec, Source
from pipeline.search.rerankers.contents import item_texts
from pipeline.search.results import RerankScore

#: Fields that do not affect the score of a pair, or whose files are hashed instead.
NOT_IN_FINGERPRINT = ("model", "revision", "batch_size", "trust_remote_code", *OPTIONS)
RULE = "a cross-encoder that sentence-transformers can load"


class TextCrossEncoder(Reranker["TextCrossEncoder.Spec"]):
    """Reranker that runs a cross-encoder with the library sentence-transformers.

    A text query is scored together with the text of an item, or its caption if it has no text. The
    score is that of `CrossEncoder.predict`: the logit after the activation function of the model. A
    text that exceeds the limit of the model is truncated by the library. Items without a text keep
    their ranks.
    """

    class Spec(RerankerSpec):
        """Checkpoint and its precision."""

        name: Literal["cross_encoder"] = "cross_encoder"
        model: ModelName
        """Hub name, or local folder."""
        revision: str | None = None
        """Branch, tag or commit of a model on the hub."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Dtype of the weights and activations."""
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
        """Attention implementation. `flash_attention_2` needs the package flash-attn and a GPU."""
        batch_size: int = Field(32, ge=1)
        """Number of pairs per forward pass."""
        trust_remote_code: Literal[False] = False
        """Always false: code in checkpoints is never executed."""

    def __init__(self, spec: Spec):
        super().__init__(spec)
        folder = find_checkpoint(spec.model, spec.revision, FILES, MODEL_RULE)
        _check_files(spec, folder)
        self._model = _load(spec, folder)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        settings = config.dump(spec, exclude=NOT_IN_FINGERPRINT)
        self.fingerprint = config.digest({"files": hash_files(folder, FILES), "settings": settings})

    @classmethod
    def check_spec(cls, spec: Spec) -> None:
        """Checks the files of the checkpoint. Weights are not loaded."""
        extras.require("sentence_transformers")
        is_local = Path(spec.model).is_dir()
        files = [name for name in FILES if is_local or not name.endswith(".safetensors")]
        folder = find_checkpoint(spec.model, spec.revision, files, MODEL_RULE)
        _check_files(spec, folder, with_weights=is_local)

    def score(
        self,
        source: Source,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Returns scores by item id per query, omitting items without a text."""
        lengths = [self._check_length(str(query)) for query in queries]
        texts = item_texts(source.index, (i for ids in candidates for i in ids))
        pairs = [(q, i) for q, ids in enumerate(candidates) for i in ids if i in texts]
        inputs = [(str(queries[q]), texts[i]) for q, i in pairs]
        with TOKENIZER_LOCK:
            scores = self._model.predict(
                inputs, batch_size=self.spec.batch_size, show_progress_bar=False
            )
            sizes = self._sizes([texts[i] for _, i in pairs])
        if not np.isfinite(scores).all():
            problem = f"returns NaN or infinity in {self.spec.dtype}"
            raise SpecError("rerank.model", self.spec.model, "a model with finite scores", problem)
        found: list[dict[str, RerankScore]] = [{} for _ in queries]
        for (q, item_id), score, size in zip(pairs, scores.tolist(), sizes, strict=True):
            cut = max(lengths[q] + size - self._limit, 0)
            found[q][item_id] = RerankScore(score=score, num_truncated_tokens=cut)
        return found

    @property
    def _limit(self) -> int:
        return self._model.max_seq_length or 2**31

    def _check_length(self, query: str) -> int:
        """Returns the number of tokens of a query and those that join it with an item."""
        with TOKENIZER_LOCK:
            (size,) = self._sizes([query])
        size += self._model.tokenizer.num_special_tokens_to_add(pair=True)
        check_query_size(query, size, self._limit - 1, " with an item")
        return size

    def _sizes(self, texts: Sequence[str]) -> list[int]:
        if not texts:
            return []
        options = {"add_special_tokens": False, "truncation": False, "verbose": False}
        return [len(ids) for ids in self._model.tokenizer(list(texts), **options)["input_ids"]]


def _load(spec: TextCrossEncoder.Spec, folder: Path) -> Any:
    extras.require("sentence_transformers")
    from sentence_transformers import CrossEncoder

    options = {
        "dtype": getattr(torch, spec.dtype),
        "attn_implementation": spec.attention,
        "use_safetensors": True,
    }
    with reading("model", spec.model, RULE, *LOAD_ERRORS, problem="cannot be loaded"):
        model = CrossEncoder(
            str(folder), trust_remote_code=False, local_files_only=True, model_kwargs=options
        )
    if model.num_labels != 1:
        raise SpecError("model", spec.model, "a cross-encoder with one score per pair", "has more")
    return model.eval()


def _check_files(spec: TextCrossEncoder.Spec, folder: Path, with_weights: bool = True) -> None:
    """Checks that a checkpoint has no code and no pickled weights, and is a cross-encoder."""
    check_folder(spec.model, folder)
    if with_weights:
        check_safetensors(spec.model, folder)
    parts = load_json(folder / "modules.json", spec.model) or []
    check_modules(parts, spec.model)
    settings = load_json(folder / "config.json", spec.model) or {}
    architecture = (settings.get("architectures") or [""])[0]
    is_scored = any(part["type"].endswith(".LogitScore") for part in parts)
    if not architecture.endswith("ForSequenceClassification") and not is_scored:
        # The library would add a head with random weights.
        problem = f"is a {architecture or 'model without a head'}"
        raise SpecError("model", spec.model, "a cross-encoder (ForSequenceClassification)", problem)

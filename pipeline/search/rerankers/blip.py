"""Reranking of search results with the image-text matching head of BLIP, as a baseline.

In contrast to EDJE, the vision tower runs when a query is answered, once per candidate image (Li et
al., 2022, section 4; the baseline of EDJE, table 2).
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from PIL import Image
from transformers import BlipForImageTextRetrieval, BlipProcessor

from pipeline.config import SpecError
from pipeline.encoders.images import open_query_image
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    Checkpoint,
    check_checkpoint,
    checkpoint_fingerprint,
    load_model,
    load_processor,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.index.listing import chunks
from pipeline.index.reader import IndexReader
from pipeline.search.previews import Previews
from pipeline.search.rerankers import (
    OPTIONS,
    Reranker,
    RerankerSpec,
    Source,
)
from pipeline.search.rerankers.contents import NO_IMAGE, NO_TEXT
from pipeline.search.results import RerankScore

#: Fields that do not affect the score of a pair.
NOT_IN_FINGERPRINT = (*NOT_IN_FINGERPRINTS, *OPTIONS)
#: Number of images that pass the vision tower at once, and of pairs that are scored at once.
IMAGE_BATCH = 16
PAIR_BATCH = 64
#: Maximum number of images whose features are cached.
MAX_CACHED = 4096


class Blip(Reranker["Blip.Spec"]):
    """Reranker by BLIP's probability that image and text match.

    The score of a pair is the logit of "match" of the head. A text query is matched with the images
    of items, which are read from their source, and an image query with their texts. Items without
    one keep their ranks.
    """

    class Spec(Checkpoint, RerankerSpec):
        """Checkpoint of a BLIP model for image-text retrieval."""

        name: Literal["blip"] = "blip"
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Dtype of the weights and activations."""
        attention: Literal["sdpa", "eager"] = "eager"
        """Attention implementation."""

    query_kinds = (str, bytes)

    def __init__(self, spec: Spec):
        super().__init__(spec)
        check_checkpoint(spec, "blip")
        self._model: Any = load_model(spec, BlipForImageTextRetrieval)
        self._processor = load_processor(spec, BlipProcessor)
        self.fingerprint = checkpoint_fingerprint(spec, NOT_IN_FINGERPRINT)
        # The tower scores no pairs.
        parts: Any = self._model.text_encoder, self._model.itm_head
        self.num_parameters = sum(p.numel() for part in parts for p in part.parameters())
        #: By the URI of the index and the item id.
        self._features: dict[tuple[str, str], torch.Tensor] = {}

    @classmethod
    def check_spec(cls, spec: Spec) -> None:
        """Checks that the checkpoint exists and is a BLIP model."""
        check_checkpoint(spec, "blip")

    def missing(self, query: str | bytes) -> str:
        """Returns the reason why an item cannot be read, which depends on the type of the query."""
        return NO_IMAGE if isinstance(query, str) else NO_TEXT

    def score(
        self,
        source: Source,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Returns logits by item id per query, omitting items without the modality to match."""
        item_ids = sorted({item_id for ids in candidates for item_id in ids})
        if all(isinstance(query, str) for query in queries):
            features = self._image_features(source.index, item_ids)
            pairs = [
                (str(query), features[i])
                for query, ids in zip(queries, candidates, strict=True)
                for i in ids
                if i in features
            ]
            known = set(features)
        else:
            stored = source.index.items(item_ids, ["item_id", "text", "caption"]).to_pylist()
            texts = {row["item_id"]: row["text"] or row["caption"] for row in stored}
            known = {item_id for item_id, text in texts.items() if text and text.strip()}
            pairs = []
            for query, ids in zip(queries, candidates, strict=True):
                assert isinstance(query, bytes)
                (feature,) = self._encode_images([open_query_image(query)])
                pairs += [(texts[i], feature) for i in ids if i in known]
        scores = iter(self._pair_scores(pairs))
        return [
            {i: RerankScore(score=next(scores)) for i in ids if i in known} for ids in candidates
        ]

    def _image_features(
        self, index: IndexReader, item_ids: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Returns the states of the vision tower (N, D) of the items with an image, by id."""
        cached = self._features
        features = {i: cached[index.uri, i] for i in item_ids if (index.uri, i) in cached}
        previews, images = Previews(index), {}
        for item_id in item_ids:
            if item_id not in features:
                with contextlib.suppress(SpecError):  # no image
                    images[item_id] = previews.image(item_id)
        new: dict[str, torch.Tensor] = {}
        for batch in chunks(images, IMAGE_BATCH):
            opened = [Image.open(io.BytesIO(images[i])).convert("RGB") for i in batch]
            new |= zip(batch, self._encode_images(opened), strict=True)
        if len(cached) + len(new) > MAX_CACHED:
            cached.clear()
        cached |= {(index.uri, i): new[i] for i in itertools.islice(new, MAX_CACHED)}
        return {**features, **new}

    @torch.inference_mode()
    def _encode_images(self, images: Sequence[Image.Image]) -> list[torch.Tensor]:
        pixels = self._processor.image_processor(list(images), return_tensors="pt")["pixel_values"]
        pixels = pixels.to(self._model.device, self._model.dtype)
        return list(self._model.vision_model(pixel_values=pixels).last_hidden_state)

    @torch.inference_mode()
    def _pair_scores(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> list[float]:
        """Returns the logit of "match" of each pair of a text and the features of an image."""
        scores: list[float] = []
        for first in range(0, len(pairs), PAIR_BATCH):
            texts, features = zip(*pairs[first : first + PAIR_BATCH], strict=True)
            with TOKENIZER_LOCK:
                inputs = self._processor.tokenizer(
                    list(texts), padding=True, truncation=True, return_tensors="pt"
                ).to(self._model.device)
            features_BND = torch.stack(features)
            output = self._model.text_encoder(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                encoder_hidden_states=features_BND,
                encoder_attention_mask=torch.ones(
                    features_BND.shape[:2], dtype=torch.long, device=features_BND.device
                ),
            )
            scores += self._model.itm_head(output.last_hidden_state[:, 0])[:, 1].tolist()
        return scores

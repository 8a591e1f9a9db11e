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

from pipeline.config import SpecError, absolute
from pipeline.encoders.images import open_query_image
from pipeline.encoders.loading import (
    CheckpointSpec,
    check_checkpoint,
    checkpoint_fingerprint,
    load_model,
    load_processor,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.index.listing import chunks
from pipeline.index.reader import IndexReader
from pipeline.schema import DEFAULT_RERANK_DEPTH
from pipeline.search.options import check_count
from pipeline.search.previews import Previews
from pipeline.search.query import AnyQueries, readable_queries
from pipeline.search.rerank import QueryEncoderSource, Reranker
from pipeline.search.results import JointScore

#: Number of images that pass the vision tower at once, and of pairs that are scored at once.
IMAGE_BATCH = 16
PAIR_BATCH = 64
#: Maximum number of images whose features are cached.
MAX_CACHED = 4096


class BlipSpec(CheckpointSpec):
    """Checkpoint of a BLIP model for image-text retrieval."""

    name: Literal["blip"] = "blip"
    attention: Literal["sdpa", "eager"] = "eager"


class BlipReranker(Reranker):
    """Reranks the best items of each query by the probability that image and text match.

    The score of a pair is the logit of "match" of the head. A text query is matched with the images
    of items, which are read from their source, and an image query with their texts. Items without
    one keep their ranks.

    Args:
        folder: Folder of a checkpoint such as Salesforce/blip-itm-base-flickr.
        rerank_depth: Maximum number of first-stage items to rerank per query, at least 1.
        add_first_stage: Whether to add the score of the first stage, as in BLIP's own evaluation.

    Raises:
        SpecError: The folder does not contain a BLIP model, or the depth is invalid.
    """

    def __init__(
        self,
        folder: str,
        rerank_depth: int = DEFAULT_RERANK_DEPTH,
        add_first_stage: bool = False,
    ):
        check_count("rerank_depth", rerank_depth)
        self.folder = absolute(folder)
        self.rerank_depth, self.add_first_stage = rerank_depth, add_first_stage
        spec = BlipSpec(model=self.folder, dtype="float32")
        check_checkpoint(spec, "blip")
        self._model: Any = load_model(spec, BlipForImageTextRetrieval)
        self._processor = load_processor(spec, BlipProcessor)
        self.metadata = {"fingerprints": {"blip": checkpoint_fingerprint(spec)}}
        self._features: dict[str, torch.Tensor] = {}  # of the items of one index
        self._index: str | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters that score pairs, without the vision tower."""
        parts = (self._model.text_encoder, self._model.itm_head)
        return sum(parameter.numel() for part in parts for parameter in part.parameters())

    def check(self, index: IndexReader, queries: AnyQueries) -> Sequence[str | bytes]:
        """Checks that the queries are texts or images."""
        return readable_queries(queries, self.folder)

    def score(
        self,
        source: QueryEncoderSource,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, JointScore]]:
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
            {i: JointScore(logit=next(scores)) for i in ids if i in known} for ids in candidates
        ]

    def _image_features(
        self, index: IndexReader, item_ids: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Returns the states of the vision tower (N, D) of the items with an image, by id."""
        if index.uri != self._index:
            self._features, self._index = {}, index.uri
        features = {i: self._features[i] for i in item_ids if i in self._features}
        previews, images = Previews(index), {}
        for item_id in item_ids:
            if item_id not in features:
                with contextlib.suppress(SpecError):  # no image
                    images[item_id] = previews.image(item_id)
        new: dict[str, torch.Tensor] = {}
        for batch in chunks(images, IMAGE_BATCH):
            opened = [Image.open(io.BytesIO(images[i])).convert("RGB") for i in batch]
            new |= zip(batch, self._encode_images(opened), strict=True)
        if len(self._features) + len(new) > MAX_CACHED:
            self._features.clear()
        self._features |= itertools.islice(new.items(), MAX_CACHED)
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

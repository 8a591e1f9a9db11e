"""Base of the rerankers that read a query and an item with a Qwen-VL model."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from transformers import PretrainedConfig

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders import check_query_size
from pipeline.encoders.batching import group_passes
from pipeline.encoders.images import open_query_image
from pipeline.encoders.loading import (
    NOT_IN_FINGERPRINTS,
    CheckpointFields,
    check_checkpoint,
    checkpoint_fingerprint,
    load_model,
)
from pipeline.encoders.model_inputs import ModelInput, collate
from pipeline.encoders.qwen_model import positioned
from pipeline.encoders.qwen_reader import QwenReader, SequenceWriter
from pipeline.encoders.qwen_spec import Preprocessing
from pipeline.search.rerankers import OPTIONS, Reranker, RerankerSpec, Source
from pipeline.search.rerankers.contents import NO_IMAGE, NO_TEXT, ItemImages, TimedImage, item_texts
from pipeline.search.results import RerankScore
from pipeline.tokens import SPECIAL, TEXT

#: Fields that do not affect the score of a pair.
NOT_IN_FINGERPRINT = (*NOT_IN_FINGERPRINTS, *OPTIONS)
#: Number of pairs whose model inputs are in memory at the same time.
PAIRS_IN_MEMORY = 16
#: Placeholders in a prompt for the query and the item.
QUERY, DOCUMENT = "{query}", "{document}"


@dataclass(frozen=True)
class Content:
    """Query or item: images or the frames of a video, and a text."""

    text: str = ""
    images: Sequence[TimedImage] = ()
    is_video: bool = False


class PairSpec(CheckpointFields, RerankerSpec):
    """Fields of all rerankers that are based on Qwen-VL."""

    min_pixels: int | None = Field(None, ge=1)
    """Minimum number of pixels per image after resizing. If null, that of the model's own code."""
    max_pixels: int | None = Field(None, ge=1)
    """Maximum number of pixels per image after resizing. If null, that of the model's own code."""
    max_pair_tokens: int = Field(10240, ge=64)
    """Maximum number of tokens of a query and an item with the prompt. Longer texts of items are
    truncated. A query can have half as many."""
    max_frames: int = Field(8, ge=1)
    """Maximum number of frames per video."""

    @property
    def max_item_tokens(self) -> int:
        """Limit of the reader's sequences."""
        return self.max_pair_tokens


PairSpecT = TypeVar("PairSpecT", bound=PairSpec)
Documents = Literal["images", "text", "both"]


class PairReader(QwenReader[Any]):
    """Reader of pairs of a query and an item.

    Args:
        prompt: Prompt with `{query}` and `{document}`.
        end: Ids of tokens after the prompt.
    """

    def __init__(
        self,
        spec: PairSpec,
        settings: PretrainedConfig,
        prompt: str,
        preprocessing: Preprocessing,
        end: Sequence[int] = (),
    ):
        self.preprocessing = preprocessing
        super().__init__(spec, settings)
        self._end = list(end)
        self._pieces = re.split(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})", prompt)

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Raises an error: an item is read together with a query."""
        raise NotImplementedError

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Raises an error: a query is read together with an item."""
        raise NotImplementedError

    def read_pair(self, query: Content, document: Content) -> tuple[ModelInput, int]:
        """Returns the sequence of a pair, and the number of tokens that were truncated.

        Raises:
            SpecError: The query is too long.
            Unreadable: The images of the item have too many tokens.
        """
        writer = self._write_pair(query, document)
        removed = 0
        if len(writer.ids) > self.limit:
            size = len(self._write_pair(query, Content()).ids)
            check_query_size(query.text or "an image", size, self.limit // 2, " with the prompt")
        while (excess := len(writer.ids) - self.limit) > 0:
            starts = [
                span[0]
                for kind, span in zip(writer.kinds, writer.spans, strict=True)
                if kind == TEXT
            ]
            if excess >= len(starts):
                raise Unreadable("too many tokens", f"{len(writer.ids)}, at most {self.limit}")
            removed += excess
            document = replace(document, text=document.text[: starts[-excess]])
            writer = self._write_pair(query, document)
        media: dict[str, torch.Tensor] = {}
        for part in [query, document] if self._query_is_first else [document, query]:
            if part.is_video:
                media |= self.video_inputs(self._grids(part.images))
                continue
            for name, tensor in self.image_inputs(part.images).items():
                media[name] = torch.cat([media[name], tensor]) if name in media else tensor
        return self._cast_pixels(writer.build(media)), removed

    @property
    def _query_is_first(self) -> bool:
        return self._pieces.index(QUERY) < self._pieces.index(DOCUMENT)

    def _grids(self, frames: Sequence[TimedImage]) -> list[Sequence[TimedImage]]:
        depth = self.images.temporal_patch_size
        return [frames[start : start + depth] for start in range(0, len(frames), depth)]

    def _write_pair(self, query: Content, document: Content) -> SequenceWriter:
        writer = self.writer_class(self)
        for piece in self._pieces:
            if piece not in (QUERY, DOCUMENT):
                writer.add_prompt(piece)
                continue
            part = query if piece == QUERY else document
            if part.is_video:
                self.write_media(writer, video=self._grids(part.images))
            else:
                self.write_media(writer, images=part.images)
            writer.add_text(part.text, is_content=piece == DOCUMENT)
        writer.finish()
        writer.add_ids(self._end, SPECIAL)
        return writer


class PairReranker(Reranker[PairSpecT]):
    """Base class of rerankers that compute the score of a pair from the state of its last token.

    Attributes:
        model_type: Type of the checkpoint.
        preprocessing: Library whose steps on images are reproduced.
        pixels: Minimum and maximum number of pixels per image, or None for the checkpoint's.
        reads_video: Whether the frames of a video are read together. Otherwise the score of a
            video is the highest score of its frames.
    """

    model_type: ClassVar[str]
    preprocessing: ClassVar[Preprocessing] = "transformers"
    pixels: ClassVar[tuple[int, int] | None] = None
    end: ClassVar[tuple[int, ...]] = ()
    reads_video: ClassVar[bool] = False

    def __init__(self, spec: PairSpecT):
        super().__init__(spec)
        settings = check_checkpoint(spec, self.model_type)
        if self.pixels is not None:
            low, high = self.pixels
            limits = {
                "min_pixels": spec.min_pixels or min(low, spec.max_pixels or low),
                "max_pixels": spec.max_pixels or max(high, spec.min_pixels or high),
            }
            spec = spec.model_copy(update=limits)
        self._reader = PairReader(spec, settings, self.prompt(), self.preprocessing, self.end)
        model = self.load(spec)
        self._backbone: Any = model.model
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.fingerprint = checkpoint_fingerprint(spec, NOT_IN_FINGERPRINT)

    @classmethod
    def check_spec(cls, spec: Any) -> None:
        """Checks that the checkpoint exists and has the expected type."""
        check_checkpoint(spec, cls.model_type)

    @abstractmethod
    def prompt(self) -> str:
        """Returns the prompt with `{query}` and `{document}`."""

    @abstractmethod
    def load(self, spec: PairSpecT) -> Any:
        """Loads the model and what `head` needs."""

    @abstractmethod
    def head(self, states_BD: torch.Tensor) -> torch.Tensor:
        """Computes the scores (B,) of pairs from the states of their last tokens."""

    @property
    def documents(self) -> Documents:
        """Content of an item that is read."""
        fields = vars(self.spec)
        return fields.get("documents", "images")

    def missing(self, query: str | bytes) -> str:
        """Returns the reason why an item cannot be read."""
        return NO_TEXT if self.documents == "text" else NO_IMAGE

    def score(
        self,
        source: Source,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Returns scores by item id per query, omitting items without the content to read."""
        contents = [self._query(query) for query in queries]
        found: list[dict[str, RerankScore]] = [{} for _ in queries]
        pending: list[tuple[int, str, ModelInput, int]] = []
        for q, item_id, document in self._documents(source, candidates):
            try:
                inputs, removed = self._reader.read_pair(contents[q], document)
            except Unreadable as error:
                found[q].setdefault(item_id, RerankScore(problem=f"has {error.reason}"))
                continue
            pending.append((q, item_id, inputs, removed))
            if len(pending) == PAIRS_IN_MEMORY:
                self._score_pending(pending, found)
                pending = []
        self._score_pending(pending, found)
        return found

    def _query(self, query: str | bytes) -> Content:
        if isinstance(query, str):
            return Content(query)
        return Content(images=[(open_query_image(query), np.nan, np.nan)])

    def _documents(
        self, source: Source, candidates: Sequence[list[str]]
    ) -> Iterator[tuple[int, str, Content]]:
        """Yields the contents of each candidate: one, or several whose best score counts."""
        texts: Mapping[str, str] = {}
        if self._reads_texts:
            texts = item_texts(source.index, (i for ids in candidates for i in ids))
        images = ItemImages(source.index, self.spec.max_frames)
        for q, item_ids in enumerate(candidates):
            for item_id in item_ids:
                seen = [] if self.documents == "text" else images.read(item_id)
                text = texts.get(item_id, "") if self.documents != "images" or not seen else ""
                if seen and not self.reads_video:
                    yield from ((q, item_id, Content(text, [frame])) for frame in _still(seen))
                elif seen or text:
                    is_video = bool(seen) and not np.isnan(seen[0][1])
                    yield q, item_id, Content(text, seen, is_video)

    @property
    def _reads_texts(self) -> bool:
        """True if items without an image can be read."""
        return "documents" in type(self.spec).model_fields

    def _score_pending(
        self,
        pending: Sequence[tuple[int, str, ModelInput, int]],
        found: Sequence[dict[str, RerankScore]],
    ) -> None:
        ordered = sorted(pending, key=lambda entry: len(entry[2]))
        scores = self._scores([inputs for _, _, inputs, _ in ordered])
        for (q, item_id, _, removed), score in zip(ordered, scores, strict=True):
            before = found[q].get(item_id, RerankScore()).score
            if before is None or score > before:
                found[q][item_id] = RerankScore(score=score, num_truncated_tokens=removed)

    @torch.inference_mode()
    def _scores(self, inputs: Sequence[ModelInput]) -> list[float]:
        """Computes the scores of sequences that are sorted by length."""
        scores: list[float] = []
        device = self._backbone.device
        for batch in group_passes(inputs, self.spec.max_batch_tokens):
            names = {name for sequence in batch for name in sequence.media}
            media = {
                name: torch.cat([s.media[name] for s in batch if name in s.media])
                for name in sorted(names)
            }
            collated = collate(batch, media, "left").map(lambda tensor: tensor.to(device))
            kwargs = positioned(self._backbone, collated.kwargs)
            states_BLD = self._backbone(**kwargs, use_cache=False).last_hidden_state
            scores += self.head(states_BLD[:, -1]).tolist()
        if not np.isfinite(scores).all():
            problem = f"returns NaN or infinity in {self.spec.dtype}"
            raise SpecError("rerank.model", self.spec.model, "a model with finite scores", problem)
        return scores


def _still(images: Sequence[TimedImage]) -> Iterator[tuple[Image.Image, float, float]]:
    return ((image, np.nan, np.nan) for image, _, _ in images)


class AnswerReranker(PairReranker[PairSpecT]):
    """Base class of rerankers by the probability of one answer against another, each a token.

    Attributes:
        model_class: Class of the model.
        answers: Tokens of the positive and of the negative answer.
    """

    model_class: ClassVar[Any]
    answers: ClassVar[tuple[str, str]]

    def load(self, spec: PairSpecT) -> Any:
        """Loads the model and the weights of the two answers."""
        model: Any = load_model(spec, self.model_class)
        yes, no = (_token_id(self._reader.tokenizer, name, spec.model) for name in self.answers)
        weight_VD = model.lm_head.weight
        self._direction_D = (weight_VD[yes].float() - weight_VD[no].float()).detach()
        return model

    def head(self, states_BD: torch.Tensor) -> torch.Tensor:
        """Returns the probabilities of the positive answer."""
        logits_B = states_BD.float() @ self._direction_D.to(states_BD.device)
        return torch.sigmoid(logits_B.double())


def _token_id(tokenizer: Any, token: str, model: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        rule = "a checkpoint with the tokenizer of this model"
        raise SpecError("model", model, rule, f"has no token {token}")
    return vocabulary[token]

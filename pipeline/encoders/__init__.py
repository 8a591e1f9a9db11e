"""Encoders: items and queries -> token vectors, one file a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import ComponentSpec, ComponentSpecT, SpecError
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: What a query may be, and what each is called.
QUERY_KINDS = {"text": "a text", "image": "an image", "composed": "a text with an image"}


class Attention(NamedTuple):
    """What attention statistics an encoder can give, see `pipeline.taps`.

    Attributes:
        statistics: their names.
        num_layers: layers of the model.
    """

    statistics: tuple[str, ...]
    num_layers: int


@dataclass(frozen=True)
class EncodedQueries:
    """Queries as an encoder reads them.

    Attributes:
        tokens: a `TokenBatch` of B queries; `spans` are offsets into the query texts.
        token_texts: for each query the text of each real token, for explanations.
    """

    tokens: TokenBatch
    token_texts: list[list[str]]


class Encoder(ABC, Generic[ComponentSpecT]):
    """A model that gives each item one vector per token, and often one pooled vector.

    Subclasses carry a nested `Spec` (the constructor's whole argument) whose first field is
    `name: Literal["..."]`. Constructing one may be slow; `check` is what a job calls first.
    """

    Spec: ClassVar[type[ComponentSpec]]
    needs: ClassVar[tuple[str, ...]]  # what every item must bring, see `schema.PAYLOAD`
    prepares: ClassVar[bool] = False  # whether `preparer` does anything
    can_be_spread: ClassVar[bool] = False  # over the GPUs of an actor, see `sequences`
    nothing: ClassVar[str] = "no tokens"  # why an item cannot be indexed of which no token is left

    dim: int  # D of the token vectors
    num_states: int = 1  # hidden states that a token vector has side by side
    pooled_dim: int | None  # P of the pooled vector, None if the model has none
    #: Factor by which the model was trained to multiply single-vector scores; None: it has none.
    logit_scale: float | None = None
    normalised: bool  # whether the token vectors have unit length
    has_spans: bool  # whether tokens carry character offsets
    has_extents: bool  # whether tokens carry boxes or times
    has_confidence: bool = False  # whether tokens carry the confidence of a recogniser
    fingerprint: str  # hash of the weights and of every setting that changes a query vector
    spec: ComponentSpecT  # what it was built from

    @classmethod
    @abstractmethod
    def check(cls, spec: ComponentSpecT) -> None:
        """Raises `SpecError` if the encoder cannot be built here (missing folder, bad layer)."""

    @classmethod
    def check_queries(cls, spec: ComponentSpecT) -> None:
        """Raises `SpecError` if it cannot encode queries here, which may take less than items."""
        cls.check(spec)

    @classmethod
    def needs_of(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """What every item must bring; an encoder around another one asks that."""
        return cls.needs

    @classmethod
    def wants(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """What `encode` reads of the items that bring it: what it needs, and what it can use."""
        return cls.needs

    @classmethod
    def query_kinds(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """What a query may be, of `QUERY_KINDS`; none: queries are vectors."""
        return ("text",)

    @classmethod
    def attention(cls, spec: ComponentSpecT) -> Attention | None:
        """The attention statistics it can give, without loading the model; None: it gives none."""
        return None

    @classmethod
    def columns_prefix(cls, spec: ComponentSpecT) -> str:
        """How the encoder's own columns begin. Encoders of one space of vectors share theirs."""
        return spec.name

    @classmethod
    def preparer(cls, spec: ComponentSpecT) -> Callable[[pa.Table], pa.Table]:
        """What gives items all that `encode` reads, the stored `text` among it.

        Work apart from the model that gives the vectors, done without its weights: recognising
        text and speech, bringing pictures into the model's form. It may run in processes of its
        own, ahead of the model's.
        """
        return lambda items: items

    @classmethod
    def has_remarks(cls, spec: ComponentSpecT) -> bool:
        """Returns whether `remarks` may find anything; it runs in a task, which takes seconds."""
        return False

    @classmethod
    def remarks(cls, spec: ComponentSpecT, ids: Callable[[], Iterable[str]]) -> list[str]:
        """Returns remarks for the end of an index job, about inputs that were not used.

        Args:
            spec: Spec of the encoder.
            ids: Streams the ids of all items of the index and of their parents.
        """
        return []

    @abstractmethod
    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items in batches formed by token count.

        Args:
            items: Table of items with the columns that `wants` names.
            taps: Attention statistics of one layer each to compute, for encoders with `attention`.

        Yields:
            (rows, batch): indices into `items`, each row once over all batches, and their tokens.
            Batches depend only on `items`, so that equal input gives bit-identical output.
        """

    @abstractmethod
    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order."""

    def encode_pictures(self, pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes pictures as queries, in order, for encoders whose `query_kinds` has "image".

        Args:
            pictures: files of PNG, JPEG or WebP.

        Raises:
            SpecError: one is no picture, or the encoder reads none.
        """
        raise self._not_read("image")

    def encode_composed(self, texts: Sequence[str], pictures: Sequence[bytes]) -> EncodedQueries:
        """Encodes queries of a text and an image each, for `query_kinds` with "composed".

        Args:
            texts: Texts of the queries.
            pictures: Contents of PNG, JPEG or WebP files, one per text.

        Raises:
            SpecError: A part of a query is invalid, or the encoder reads no such queries.
        """
        raise self._not_read("composed")

    def _not_read(self, kind: str) -> SpecError:
        return not_read(kind, self.query_kinds(self.spec), type(self).__name__)


class Trainable(Encoder[ComponentSpecT]):
    """An encoder whose model can be trained: it gives tokens with gradients.

    Reading is work for the CPU, apart from the model, and may be done ahead of it.
    """

    model: Any  # of the transformers library
    device: Any  # of the model
    has_projection: ClassVar[bool] = False  # has `projection`, which the spec can replace
    #: How the names of the model's weights begin in its checkpoint, of which it may be a part.
    part_of_checkpoint: ClassVar[str] = ""
    #: The linear layers that LoRA is put beside if nothing else is said: of the language model,
    #: and not of the tower of its pictures.
    lora_layers: ClassVar[str] = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"

    @property
    def projection(self) -> torch.nn.Module:
        """Module that maps hidden states to token vectors, for encoders with `has_projection`."""
        raise AssertionError(f"{type(self).__name__} has no projection")

    @abstractmethod
    def read_queries(self, texts: Sequence[str]) -> list[Any]:
        """Query texts as the model reads them."""

    @abstractmethod
    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Items, by the names of their columns, as the model reads them."""

    @abstractmethod
    def tokens(self, inputs: Sequence[Any], taps: Sequence[Tap] = ()) -> TokenBatch:
        """The tokens of what was read, in order, with gradients."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the model with all that it reads by, as the field `model` names it."""


def not_read(kind: str, kinds: Sequence[str], encoder: str) -> SpecError:
    """The error of a query of a kind that an encoder does not read.

    >>> str(not_read("composed", ["text", "image"], "X"))
    "query must be a text or an image, got 'a text with an image', which is not supported by X"
    """
    rule = " or ".join(QUERY_KINDS[each] for each in kinds) or "query vectors"
    return SpecError("query", QUERY_KINDS[kind], rule, f"is not supported by {encoder}")


def batches_by_size(sizes: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Groups items of like size so that a padded batch stays within `budget` tokens.

    Args:
        sizes: (B,) the number of tokens of each item.
        budget: the most that number of items x longest item may be; an item longer than this is a
            batch by itself.

    Yields:
        Indices of the items of a batch, short items first, equal sizes in their order.

    >>> [rows.tolist() for rows in batches_by_size(np.array([3, 1, 9, 1, 2]), budget=6)]
    [[1, 3, 4], [0], [2]]
    """
    batch: list[int] = []
    for row in np.argsort(sizes, kind="stable"):  # ascending: `row` is the longest so far
        if batch and (len(batch) + 1) * sizes[row] > budget:
            yield np.array(batch)
            batch = []
        batch.append(int(row))
    if batch:
        yield np.array(batch)

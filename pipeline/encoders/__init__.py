"""Base classes of encoders, which map items and queries to token vectors.

Each model family is one module of this package.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import ComponentSpec, ComponentSpecT, SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders.appended import AppendedTokens
from pipeline.encoders.templates import DEFAULT_INSTRUCTION, Templates
from pipeline.schema import is_blank
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: Kinds of queries, with their names in messages. "composed" are combinations of the others.
QUERY_KINDS = {
    "text": "a text",
    "image": "an image",
    "audio": "audio",
    "video": "a video",
    "composed": "a combination of these",
}


class AttentionInfo(NamedTuple):
    """Attention statistics that an encoder can compute. See `pipeline.taps`.

    Attributes:
        statistics: Names of the statistics.
        num_layers: Number of layers of the model.
    """

    statistics: tuple[str, ...]
    num_layers: int


@dataclass(frozen=True)
class EncodedQueries:
    """Token vectors of a batch of queries.

    Attributes:
        tokens: Tokens of B queries. `spans` are character offsets into the query texts.
        token_texts: Text of each real token of each query, used by explanations.
        texts: Text of each query, including text that was recognised in its media, or None for a
            query without text. None if the texts are unknown.
    """

    tokens: TokenBatch
    token_texts: list[list[str]]
    texts: list[str | None] | None = None


class Encoder(ABC, Generic[ComponentSpecT]):
    """Base class of encoders: one vector per token, and for most models one pooled vector.

    Subclasses define a nested `Spec`, the only constructor argument, whose first field is `name:
    Literal["..."]`. Constructing an encoder may load a model. Jobs call `check` before.

    Attributes:
        default_inputs: Names in `schema.PAYLOAD` of the inputs that every item must have, unless
            `required_inputs` is overridden.
        default_query_kinds: Supported keys of `QUERY_KINDS`, unless `query_kinds` is overridden.
        has_preprocessor: Whether `preprocessor` does any work.
        supports_device_map: Whether the model can be distributed over the GPUs of an actor. See
            `sequences`.
        empty_reason: Reason recorded for items that are rejected because they have no tokens.
        dim: Width D of the token vectors.
        num_states: Number of hidden states concatenated in a token vector.
        pooled_dim: Width P of the pooled vector, or None if the model has none.
        logit_scale: Factor by which the model was trained to multiply single-vector scores, or None
            if it has none.
        normalised: Whether the token vectors have unit length.
        has_spans: Whether tokens have character offsets.
        has_extents: Whether tokens have boxes or times.
        has_confidence: Whether tokens have the confidence of a recogniser.
        fingerprint: Hash of the weights and of all settings that affect query vectors.
        spec: Spec from which the encoder was built.
    """

    Spec: ClassVar[type[ComponentSpec]]
    default_inputs: ClassVar[tuple[str, ...]]
    default_query_kinds: ClassVar[tuple[str, ...]] = ("text",)
    has_preprocessor: ClassVar[bool] = False
    supports_device_map: ClassVar[bool] = False
    empty_reason: ClassVar[str] = "no tokens"

    dim: int
    num_states: int = 1
    pooled_dim: int | None
    logit_scale: float | None = None
    normalised: bool
    has_spans: bool
    has_extents: bool
    has_confidence: bool = False
    fingerprint: str
    spec: ComponentSpecT
    _instruction: str = DEFAULT_INSTRUCTION

    @classmethod
    @abstractmethod
    def check(cls, spec: ComponentSpecT) -> None:
        """Checks that the encoder can be built on this machine. Weights are not loaded.

        Raises:
            SpecError: The encoder cannot be built, for example because a folder or a layer does not
                exist.
        """

    @classmethod
    def check_queries(cls, spec: ComponentSpecT) -> None:
        """Checks that queries can be encoded on this machine. They may require less than items.

        Raises:
            SpecError: Queries cannot be encoded.
        """
        cls.check(spec)

    @classmethod
    def required_inputs(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """Returns the inputs that every item must have.

        Encoders that wrap another encoder return those of the wrapped one.
        """
        return cls.default_inputs

    @classmethod
    def supported_inputs(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """Returns all inputs that `encode` reads if an item has them.

        Some of them may be optional.
        """
        return cls.default_inputs

    @classmethod
    def query_kinds(cls, spec: ComponentSpecT) -> tuple[str, ...]:
        """Returns the supported keys of `QUERY_KINDS`, or none if queries are vectors."""
        return cls.default_query_kinds

    @classmethod
    def attention(cls, spec: ComponentSpecT) -> AttentionInfo | None:
        """Returns the supported attention statistics, or None. The model is not loaded."""
        return None

    @classmethod
    def column_prefix(cls, spec: ComponentSpecT) -> str:
        """Returns the prefix of the encoder's index columns.

        Encoders of one vector space share it.
        """
        return spec.name

    @classmethod
    def preprocessor(cls, spec: ComponentSpecT) -> Callable[[pa.Table], pa.Table]:
        """Returns a function that adds to items all columns that `encode` reads, including `text`.

        It does the work that needs no model weights, such as text and speech recognition and image
        preprocessing, and may run in separate processes ahead of the model.
        """
        return lambda items: items

    @classmethod
    def has_warnings(cls, spec: ComponentSpecT) -> bool:
        """Checks whether `warnings` may report anything.

        If not, an index job skips the task that computes them, which takes seconds.
        """
        return False

    @classmethod
    def warnings(cls, spec: ComponentSpecT, ids: Callable[[], Iterable[str]]) -> list[str]:
        """Returns warnings about unused inputs, which an index job prints at its end.

        Args:
            spec: Spec of the encoder.
            ids: Function that streams the ids of all items of the index and of their parents.
        """
        return []

    @abstractmethod
    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes items in batches formed by token count.

        Args:
            items: Table with the inputs of the items.
            taps: Attention statistics of one layer each that the batches contain in `taps`, for
                encoders that support `attention`.

        Yields:
            Tuples `(rows, batch)`: indices into `items`, each row once over all batches, and their
            tokens. The batches depend only on `items`, so equal inputs give bit-identical outputs.
        """

    @abstractmethod
    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order.

        Args:
            texts: Queries, at least one.

        Raises:
            SpecError: A text is empty or too long, or the encoder does not support text queries.
        """

    def encode_media(self, queries: Sequence[Mapping[str, Any]]) -> EncodedQueries:
        """Encodes queries with images, audio or video, of the supported kinds, in order.

        Args:
            queries: Contents of the queries, at least one. Like items, they have some of the
                columns `text`, `image`, `frames` and `audio` of `schema.PAYLOAD`, and the `span`
                of a video.

        Raises:
            SpecError: A query cannot be read, or the encoder supports only texts.
        """
        raise self._texts_only()

    def with_instruction(self, instruction: str) -> Self:
        """Returns the encoder with the instruction of a task in its query template.

        The model is shared. The fingerprint does not change, because it contains the template,
        which may have no slot for an instruction.

        Args:
            instruction: Description of what the queries search for.
        """
        instructed = copy.copy(self)
        instructed._instruction = instruction
        return instructed

    def templates(self) -> Templates | None:
        """Returns the templates of queries and items, with the instruction of a task if any.

        Returns None for encoders that read no texts and images.
        """
        return None

    def _texts_only(self) -> SpecError:
        return unsupported_query(["image"], self.query_kinds(self.spec), type(self).__name__)


class Trainable(Encoder[ComponentSpecT]):
    """Base class of encoders whose model can be trained: it computes tokens with gradients.

    Preprocessing runs on the CPU, needs no weights, and may be done ahead of the model.

    Attributes:
        model: Model of the transformers library.
        device: Device of the model.
        appended: Learned tokens that are appended to items. If None, no tokens are appended.
        has_projection: Whether the model has a `projection`, which the field `projection` of the
            spec can replace.
        head: Trainable layers behind `model` that are not part of it, if any.
        checkpoint_prefix: Prefix of the names of the model's weights in its checkpoint, for models
            that are a submodule of the checkpoint's model.
        lora_target_modules: Pattern of the linear layers that LoRA adapts by default: those of the
            language model, not of the vision tower.
        has_task_adapters: Whether the checkpoint has one LoRA adapter per task, so that LoRA cannot
            train another one.
    """

    model: Any
    device: Any
    appended: AppendedTokens | None = None
    has_projection: ClassVar[bool] = False
    head: torch.nn.Module | None = None
    checkpoint_prefix: ClassVar[str] = ""
    lora_target_modules: ClassVar[str] = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    has_task_adapters: ClassVar[bool] = False

    @property
    def projection(self) -> torch.nn.Module:
        """Module that maps hidden states to token vectors, for encoders with `has_projection`."""
        raise AssertionError(f"{type(self).__name__} has no projection")

    @property
    @abstractmethod
    def embedding(self) -> torch.nn.Module:
        """Module that maps token ids to input embeddings."""

    @abstractmethod
    def append_tokens(self, tokens: AppendedTokens) -> None:
        """Appends learned tokens to each sequence of an item, in place of those of the spec."""

    @classmethod
    @abstractmethod
    def weight_files(cls, spec: ComponentSpecT) -> list[Path]:
        """Returns the weight files of the model, its adapter and its projection."""

    @abstractmethod
    def read_queries(self, texts: Sequence[str]) -> list[Any]:
        """Returns the model inputs of query texts."""

    @abstractmethod
    def read_items(self, items: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Returns the model inputs of items, mappings from column names to values."""

    @abstractmethod
    def tokens(self, inputs: Sequence[Any], taps: Sequence[Tap] = ()) -> TokenBatch:
        """Computes the tokens of preprocessed inputs. Gradients flow through the result.

        Args:
            inputs: Results of `read_queries` or `read_items`.
            taps: Attention statistics of one layer each that the batch contains in `taps`.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Saves the model and its preprocessing files to an existing folder.

        The field `model` of a spec can then name it.
        """


def check_query_texts(texts: Sequence[str]) -> None:
    """Raises `SpecError` unless there is at least one query, and each has at least one word."""
    if not texts:
        raise SpecError("query", [], "at least one text")
    for text in texts:
        if is_blank(text):
            raise SpecError("query", text, "a text with at least one word")


def check_query_size(text: str, size: int, limit: int | None, note: str = "") -> None:
    """Checks that a query does not have more tokens than its encoder supports."""
    if limit is not None and size > limit:
        rule = f"a text of at most {limit} tokens{note}"
        raise SpecError("query", text, rule, f"has {size} tokens")


@contextlib.contextmanager
def readable_query(value: Any) -> Iterator[None]:
    """Converts `Unreadable` inside the block to an error about the query `value`."""
    try:
        yield
    except Unreadable as error:
        raise SpecError("query", value, "a readable input", note=f" ({error.detail})") from None


def unsupported_query(parts: Sequence[str], kinds: Sequence[str], encoder: str) -> SpecError:
    """Builds the error for the parts of a query that an encoder does not support together.

    `kinds` are the supported keys of `QUERY_KINDS`.

    >>> str(unsupported_query(["text", "image"], ["text", "image"], "X"))
    "query must be a text or an image, got 'a text with an image', which is not supported by X"
    """
    rule = " or ".join(QUERY_KINDS[kind] for kind in kinds) or "query vectors"
    value = " with ".join(QUERY_KINDS[part] for part in parts)
    return SpecError("query", value, rule, f"is not supported by {encoder}")


def batches_by_size(sizes: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Groups items of similar size into batches with at most `budget` tokens after padding.

    An item that is longer forms a batch by itself. Sizes (B,) ascend over the batches, and items of
    equal size keep their order.

    >>> [rows.tolist() for rows in batches_by_size(np.array([3, 1, 9, 1, 2]), budget=6)]
    [[1, 3, 4], [0], [2]]
    """
    batch: list[int] = []
    for row in np.argsort(sizes, kind="stable"):  # ascending, so `row` is the longest so far
        if batch and (len(batch) + 1) * sizes[row] > budget:
            yield np.array(batch)
            batch = []
        batch.append(int(row))
    if batch:
        yield np.array(batch)

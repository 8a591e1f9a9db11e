"""The spec of contrastive training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline import config
from pipeline.config import Uri
from pipeline.registry import CompressorSpec
from pipeline.search.scores import Score
from pipeline.train.learner import BaseSpec
from pipeline.train.lora import Lora
from pipeline.train.losses import Positives, Reduction

#: Values of `trainable` for which the model itself has no gradients, so that its output can be
#: cached.
FROZEN = ("projection", "adapter")

#: Maximum number of appended tokens.
MAX_APPENDED = 1 << 16


class Distillation(config.Spec):
    """Distillation from the scores of another model, the teacher."""

    kind: Literal["kl", "margin_mse"] = "kl"
    """`kl`, the divergence from the teacher's distribution over the documents that it scored for a
    query; or `margin_mse`, the squared error of its margins."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of this loss."""
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor on the teacher's scores, which corresponds to dividing this model's scores by the
    temperature for `kl`."""


class ContrastiveSpec(BaseSpec):
    """Options of contrastive training.

    If the encoder has an `adapter`, it is merged into the weights before training. With
    `trainable: lora`, the adapter itself is trained further instead. The encoder's
    `appended_tokens` are trained further.
    """

    name: Literal["contrastive"] = "contrastive"
    trainable: Literal["all", "projection", "lora", "tokens", "adapter"] = "all"
    """Trainable parameters: `all` of the model and its projection; only the `projection`, which
    maps hidden states to vectors, for queries and documents alike; `lora`, low-rank matrices
    beside its layers; the appended `tokens` and the projection, if the encoder has one; or an
    `adapter` behind any frozen encoder (SMART, eq. 6). Appended tokens are trained with `all`
    and `lora` too, and the compressor's parameters always."""
    lora: Lora | None = None
    """LoRA settings."""
    adapter_dim: int = Field(128, ge=1)
    """Dimension of an adapter's vectors. For an encoder whose `layer` is a list, the adapter
    also learns the weight of each layer."""
    hidden_states_cache: Uri | None = None
    """Folder in which hidden states of the frozen model are cached, so that it runs once per
    query and document. Null runs it in each epoch. For `projection` and `adapter`."""
    hidden_states_dtype: Literal["float16", "float32"] = "float16"
    """Precision of the cached hidden states."""
    validation_compressors: tuple[CompressorSpec, ...] = ()
    """Additional compressors with which the validation documents are evaluated, for example
    other budgets. They must not have parameters, as these would not be trained. The names of
    their metrics end with the compressor in parentheses."""
    compressor: CompressorSpec = Field(default="none", validate_default=True)
    """Compressor of the documents' vectors."""
    num_appended_tokens: int | None = Field(None, ge=1, le=MAX_APPENDED)
    """Number of new learned tokens that are appended to each document, for AGC and MemTok. Null
    trains those of `encoder.appended_tokens`, if any."""
    score: Score = "maxsim"
    """Score of a query and a document: `maxsim` (SMART, eq. 4); `single_vector`, the inner
    product of the single vectors (eq. 2); `hybrid`, their sum (eq. 5)."""
    reduction: Reduction = "mean"
    """MaxSim as the `mean` or the `sum` over the query's tokens. Sums are larger by a factor of
    the query length; a temperature of 1 is common for them."""
    temperature: float = Field(0.07, gt=0, allow_inf_nan=False)
    """Temperature tau of eq. 7."""
    learn_temperature: bool = False
    """Trains the temperature, starting from `temperature`."""
    positives: Positives = "any"
    """Target for a query with several positives in the batch: `any` maximises their total
    probability (SaMer, eq. 7); `all` is the cross entropy with a target that they share
    equally."""
    symmetric: bool = False
    """Averages the loss of queries over documents with that of documents over queries."""
    contrastive_weight: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Weight of the contrastive loss; 0 trains by distillation only."""
    distillation: Distillation | None = None
    """Distillation of the data's teacher scores, added to the contrastive loss."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        is_uncached, is_frozen = self.hidden_states_cache is None, self.trainable in FROZEN
        rule = f"null when trainable is {self.trainable}"
        self.require(is_uncached or is_frozen, "hidden_states_cache", rule)
        is_valid = self.num_appended_tokens is None or self.appended_folder is None
        rule = "null when encoder.appended_tokens is given"
        self.require(is_valid, "num_appended_tokens", rule)
        has_no_tokens = not self.has_appended_tokens
        rule = "null with appended tokens, which pass through the model in each step"
        self.require(has_no_tokens or is_uncached, "hidden_states_cache", rule)
        rule = "one of all, lora, tokens if tokens are appended"
        self.require(has_no_tokens or not is_frozen, "trainable", rule)
        is_valid = self.lora is None or self.trainable == "lora"
        self.require(is_valid, "lora", "null unless trainable is lora")
        is_valid = self.trainable != "projection" or self.score == "maxsim"
        self.require(is_valid, "score", "maxsim when only the projection is trained")
        has_loss = self.contrastive_weight > 0 or self.distillation is not None
        self.require(has_loss, "contrastive_weight", "greater than 0 without distillation")
        return self

    @property
    def has_appended_tokens(self) -> bool:
        """True if learned tokens are appended to documents."""
        return self.num_appended_tokens is not None or self.appended_folder is not None

    @property
    def appended_folder(self) -> str | None:
        """Folder of the appended tokens that the spec of the encoder names, or None."""
        return getattr(self.encoder, "appended_tokens", None)

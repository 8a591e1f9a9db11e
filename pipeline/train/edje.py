"""Training of EDJE, a joint encoder for reranking, on the hidden states of a frozen encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch.utils.checkpoint import checkpoint

from pipeline import config
from pipeline.config import SpecError, Uri
from pipeline.encoders.edje import objectives
from pipeline.encoders.edje.adapter import Adapter
from pipeline.encoders.edje.candidates import candidate_pairs, rerank_scores
from pipeline.encoders.edje.joint import JointEncoder, Texts
from pipeline.encoders.edje.model import Edje, read_metadata
from pipeline.registry import COMPRESSORS, ENCODERS, CompressorSpec
from pipeline.runtime import distributed
from pipeline.runtime.atomic import check_writable
from pipeline.runtime.distributed import gather_rows
from pipeline.schema import DEFAULT_RERANK_DEPTH
from pipeline.tokens import PROMPT, TokenBatch, normalise, unit_vectors
from pipeline.train.data.base import NO_LABEL, Batch, TrainingData
from pipeline.train.data.quality import Quality, ranking
from pipeline.train.frozen import FrozenEncoder
from pipeline.train.learner import BaseSpec, Embedded, Learner, concatenate
from pipeline.train.losses import LOWEST, info_nce, late_scores

#: Prefix of the names of the teacher's tensors.
TEACHER = "teacher_"
#: Temperature of negatives for scores without a scale of their own. Late-interaction scores are
#: means of cosines, for which colpali-engine's contrastive loss has the same temperature.
DEFAULT_TEMPERATURE = 0.02


@dataclass(frozen=True)
class ModelInputs:
    """A batch as the models read it.

    Attributes:
        queries: Texts, or their cached hidden states.
        documents: Items, or their cached hidden states.
        texts: Tokenized queries by the name of the joint encoder that reads them.
    """

    queries: Sequence[str] | TokenBatch
    documents: Sequence[Mapping[str, Any]] | TokenBatch
    texts: dict[str, Texts]


class Distillation(config.Spec):
    """Distillation from the logits of a teacher, which is the local variant in the paper."""

    teacher: Uri
    """Folder of a trained EDJE on the same encoder."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of this loss."""


class EdjeLearner(Learner["EdjeLearner.Spec"]):
    """Trains the adapter behind a frozen encoder, and the joint encoder that reads its tokens.

    One relevant document is sampled for each query that has relevant documents in the batch. They
    form a positive pair. Each pair also gets negative documents for its query and negative queries
    for its document. These are sampled from the most similar ones by the frozen encoder that are
    not relevant (section 4). The documents and queries of all workers are candidates. Negatives and
    masked words are sampled again in each step.
    """

    class Spec(BaseSpec):
        """Options of EDJE training. Defaults are the values of the paper, if it specifies them.

        The `encoder` is frozen. The adapter reads its hidden states. Its similarities determine the
        negatives, and the candidates that are reranked in evaluations.
        """

        name: Literal["edje"] = "edje"
        index: str | None = None
        """Index whose encoder is used in place of `encoder`, and whose vectors select the default
        of `first_stage`."""
        hidden_states_cache: Uri | None = None
        """Folder in which its hidden states are cached, so that it runs once per query and
        document. Null runs it in each epoch."""
        hidden_states_dtype: Literal["float16", "float32"] = "float16"
        """Precision of the cached hidden states."""
        init_from: Uri | None = None
        """Folder of a trained EDJE to initialise the weights from; null initialises new ones."""
        adapter: Adapter.Spec | None = None
        """Settings of the adapter. Null uses those of `init_from`, or the paper's."""
        joint: JointEncoder.Spec | None = None
        """Settings of the joint encoder. Null uses those of `init_from`, or the bundled model."""
        first_stage: Literal["single_vector", "maxsim"] = "single_vector"
        """Similarity of the frozen encoder: `single_vector`, the inner product of the single
        vectors, or `maxsim`."""
        compressor: CompressorSpec = Field(default="none", validate_default=True)
        """Compressor of the items' vectors in the first stage of evaluations, for `maxsim`.
        Negatives are selected with all vectors, because harder negatives teach more."""
        itm: float = Field(1.0, ge=0, allow_inf_nan=False)
        """Weight of image-text matching; 0 disables it."""
        mlm: float = Field(1.0, ge=0, allow_inf_nan=False)
        """Weight of masked language modelling, on positive pairs."""
        recovery: float = Field(1.0, ge=0, allow_inf_nan=False)
        """Weight of text-embedding recovery, from texts only. For an encoder without a single
        vector, the mean of the text's vectors is recovered."""
        contrast: float = Field(0.0, ge=0, allow_inf_nan=False)
        """Weight of the contrast between words and vision tokens that are not yet read together,
        which is not in the paper."""
        contrast_temperature: float = Field(0.05, gt=0, allow_inf_nan=False)
        """Temperature of `contrast`."""
        distillation: Distillation | None = None
        """Distillation of a teacher's logits, on the pairs of image-text matching."""
        mask_probability: float = Field(0.5, gt=0, lt=1)
        """Probability that a word is masked."""
        negatives: Literal["sampled", "top"] = "sampled"
        """`sampled` draws among the `negatives_top_k` most similar candidates with probability
        softmax(similarity / temperature). `top` takes the most similar ones."""
        num_negatives: int = Field(3, ge=1)
        """Negative documents per positive pair, and as many negative queries."""
        negatives_top_k: int = Field(10, ge=1)
        """Number of candidates that `sampled` draws from."""
        negatives_temperature: float | None = Field(None, gt=0, allow_inf_nan=False)
        """Temperature of `sampled`. Null is the encoder's own, 1 / exp(logit_scale), for `single`
        scores of an encoder that has one, and `DEFAULT_TEMPERATURE` otherwise."""
        pair_mini_batch_size: int | None = Field(None, ge=1)
        """Maximum number of pairs in one forward pass of the joint encoder. Activations of larger
        batches are recomputed in the backward pass. Null for no limit."""
        rerank_depth: int = Field(DEFAULT_RERANK_DEPTH, ge=1)
        """Number of candidates of the first stage that evaluations rerank."""
        add_first_stage: bool = False
        """Adds the first stage's score to that of the joint encoder there."""

        @model_validator(mode="before")
        @classmethod
        def _read_index(cls, fields: Any) -> Any:
            """Reads the encoder from an index, so that stored specs do not depend on it."""
            if not isinstance(fields, Mapping) or fields.get("index") is None:
                return fields
            if fields.get("encoder") is not None:
                raise SpecError("encoder", fields["encoder"], "null if index is set")
            from pipeline.index.reader import IndexReader  # needs Lance
            from pipeline.search.options import representation_info

            info = representation_info(IndexReader(config.absolute(str(fields["index"]))))
            first_stage = "single_vector" if info.pooled_column else "maxsim"
            read = {"index": None, "encoder": info.encoder.spec}
            return {"first_stage": first_stage, **fields, **read}

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            has_loss = self.itm or self.contrast or self.distillation is not None
            rule = "greater than 0 unless distillation or contrast is set"
            self.require(bool(has_loss), "itm", rule)
            is_valid = self.compressor.name == "none" or self.first_stage == "maxsim"
            self.require(is_valid, "first_stage", "maxsim for compressed vectors")
            is_valid = self.negatives != "sampled" or self.negatives_top_k >= self.num_negatives
            rule = f"at least num_negatives={self.num_negatives}"
            self.require(is_valid, "negatives_top_k", rule)
            for field in ("adapter", "joint"):
                is_valid = self.init_from is None or getattr(self, field) is None
                self.require(is_valid, field, "null when `init_from` is set")
            return self

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.encoder: Any = ENCODERS.build(spec.encoder)
        if self.encoder.pooled_dim is None and spec.first_stage == "single_vector":
            rule = "maxsim (the encoder has no single vector)"
            raise SpecError("learner.first_stage", "single_vector", rule)
        self.compressor = COMPRESSORS.build(spec.compressor)
        vision = {"spec": config.dump(spec.encoder), "fingerprint": self.encoder.fingerprint}
        if spec.init_from is not None:
            edje = Edje.load(spec.init_from, "init_from").requires_grad_(True)
            self._check_vision(edje, "init_from", spec.init_from)
            edje.vision = vision
        else:
            text_dim = self.encoder.pooled_dim or self.encoder.dim
            with config.within("learner.joint"):
                joint = JointEncoder(spec.joint or JointEncoder.Spec(), text_dim)
            with config.within("learner.adapter"):
                adapter = Adapter(spec.adapter or Adapter.Spec(), self.encoder.dim, joint.dim)
            edje = Edje(adapter.to(joint.device), joint, vision)
        self.edje, self.device = edje.train(), edje.joint.device
        #: Module of `forward`; only the loss uses the joint encoder.
        self.model = edje.adapter
        # Parameters that no loss uses get no gradient.
        for module in edje.joint.language_head():
            module.requires_grad_(spec.mlm > 0)
        edje.joint.recover.requires_grad_(spec.recovery > 0)
        self._matches = spec.itm > 0 or spec.distillation is not None
        edje.joint.match.requires_grad_(self._matches)
        edje.joint.language.get_input_embeddings().requires_grad_(True)  # to which one may be tied
        # In a dict, so that its weights are not this module's.
        self._of = {"": edje}
        if spec.distillation is not None:
            teacher = Edje.load(spec.distillation.teacher, "distillation.teacher")
            self._check_vision(teacher, "distillation.teacher", spec.distillation.teacher)
            self._of[TEACHER] = teacher
        self.frozen = FrozenEncoder(
            self.encoder, spec.hidden_states_cache, spec.hidden_states_dtype
        )
        self._half = False

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if a model is missing or if options contradict each other."""
        with config.within("encoder"):
            ENCODERS.load(spec.encoder.name).check(spec.encoder)
        compressor = COMPRESSORS.build(spec.compressor)
        is_trained = compressor.needs_appended or isinstance(spec.compressor, config.TrainedSpec)
        if compressor.needs_fit or compressor.needs_taps or is_trained:
            rule = "one of none, hpool, samer, spatial, random"
            raise SpecError("compressor.name", spec.compressor.name, rule)
        if spec.hidden_states_cache is not None:
            check_writable(spec.hidden_states_cache, "hidden_states_cache")
        if spec.init_from is not None:
            read_metadata(spec.init_from, "init_from")
        else:
            with config.within("joint"):
                JointEncoder.check(spec.joint or JointEncoder.Spec())
        if spec.distillation is not None:
            read_metadata(spec.distillation.teacher, "distillation.teacher")

    def _check_vision(self, edje: Edje, field: str, folder: str) -> None:
        if edje.vision["fingerprint"] != self.encoder.fingerprint:
            rule = "the folder of an EDJE trained on this encoder"
            raise SpecError(f"learner.{field}", folder, rule, "was trained on another")

    # -- the frozen encoder ------------------------------------------------------------------------

    def prepare(self, data: TrainingData) -> None:
        """Caches the missing hidden states, if the spec names a cache."""
        self.frozen.prepare(data)

    # -- embedding ---------------------------------------------------------------------------------

    def read(self, batch: Batch) -> ModelInputs:
        """Tokenizes the texts, and reads hidden states if they are cached."""
        texts = {name: edje.joint.tokenise(batch.queries) for name, edje in self._of.items()}
        queries = self.frozen.queries(batch.queries)
        documents = self.frozen.documents(batch.documents, batch.document_keys)
        return ModelInputs(queries, documents, texts)

    def mini_batches(self, inputs: ModelInputs, size: int) -> list[ModelInputs]:
        """Splits the documents in order, and the queries into the same number of groups."""
        num_queries, num_documents = len(inputs.queries), len(inputs.documents)
        count = max(1, -(-num_documents // size))

        def select(values: Any, rows: slice) -> Any:
            return values.take(rows) if isinstance(values, TokenBatch | Texts) else values[rows]

        mini_batches = []
        for number in range(count):
            rows = slice(num_queries * number // count, num_queries * (number + 1) // count)
            documents = select(inputs.documents, slice(number * size, (number + 1) * size))
            texts = {name: select(tokenized, rows) for name, tokenized in inputs.texts.items()}
            mini_batches.append(ModelInputs(select(inputs.queries, rows), documents, texts))
        return mini_batches

    def forward(self, mini_batch: ModelInputs) -> Embedded:
        """Returns the documents' tokens, and what the loss needs of the frozen encoder."""
        # The loss, which runs the joint encoder, has to use the same precision.
        self._half = torch.is_autocast_enabled(self.device.type)
        queries = self.frozen.states(mini_batch.queries)
        documents = self.frozen.states(mini_batch.documents)
        embedded: Embedded = {}
        for name, edje in self._of.items():
            if name == TEACHER and not self.edje.training:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and name != TEACHER):
                tokens, mask = edje.adapter.tokens(documents)
            texts = mini_batch.texts[name].to(self.device)
            embedded |= {
                f"{name}tokens": tokens.float(),
                f"{name}tokens_mask": mask,
                f"{name}ids": texts.ids,
                f"{name}text_mask": texts.mask,
                f"{name}is_word": texts.is_word,
            }
        for name, frozen in (("query", queries), ("document", documents)):
            frozen = frozen.to(self.device)
            if frozen.pooled is not None:
                embedded[f"{name}_pooled"] = frozen.pooled.float()
            elif name == "query":
                sums = (frozen.vectors.float() * frozen.mask.unsqueeze(2)).sum(dim=1)
                embedded["query_pooled"] = normalise(sums)
            if self.spec.first_stage == "maxsim":
                if name == "document":
                    frozen = self._compared(frozen)
                embedded[f"{name}_vectors"] = unit_vectors(frozen)
                embedded[f"{name}_mask"] = frozen.mask
        return embedded

    @torch.no_grad()
    def _compared(self, documents: TokenBatch) -> TokenBatch:
        """Returns the documents for the first stage: uncompressed in training, else compressed."""
        if documents.kind is not None:
            mask = documents.mask & (documents.kind != PROMPT)
            documents = dataclasses.replace(documents, mask=mask)
        return documents if self.edje.training else self.compressor.compress(documents)

    def similarity(self, embedded: Embedded) -> torch.Tensor:
        """Returns the (Q, B) similarities of the frozen encoder, by single vectors or MaxSim."""
        with torch.no_grad():
            if self.spec.first_stage == "single_vector":
                return embedded["query_pooled"] @ embedded["document_pooled"].T
            names = ("query_vectors", "query_mask", "document_vectors", "document_mask")
            return late_scores(*(embedded[name] for name in names))

    # -- objective ---------------------------------------------------------------------------------

    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes the weighted sum of the losses that the spec enables (section 4)."""
        spec = self.spec
        gathered_batch = {name: gather_rows(tensor) for name, tensor in embedded.items()}
        facts = batch.query_labels.to(self.device), batch.document_labels.to(self.device)
        query_labels, document_labels = (gather_rows(labels) for labels in facts)
        relevant_QB = data.relevant(query_labels, document_labels)
        is_filler_B = (document_labels == NO_LABEL).all(dim=1)
        num_own = len(batch.queries)
        own_rows = slice(distributed.rank() * num_own, (distributed.rank() + 1) * num_own)
        positives_A2 = sample_positives(relevant_QB, own_rows)
        metrics: dict[str, float] = {}
        terms: dict[str, tuple[float, torch.Tensor]] = {}
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._half):
            if self._matches:
                pairs_P2, is_match_P = self._pairs(
                    self.similarity(gathered_batch), ~relevant_QB & ~is_filler_B, positives_A2
                )
                logits_P = self._logits(self.edje, gathered_batch, pairs_P2)
                terms["itm"] = (spec.itm, objectives.matching_loss(logits_P, is_match_P))
                right_P = (logits_P.detach() > 0) == is_match_P
                metrics["itm_accuracy"] = right_P.float().mean().item() if len(right_P) else 0.0
            if spec.mlm:
                terms["mlm"] = (spec.mlm, self._masked_words(gathered_batch, positives_A2))
            if spec.recovery or spec.contrast:
                texts = texts_of(gathered_batch).take(own_rows)
                text_QLH = self._in_mini_batches(
                    lambda rows: self.edje.joint.text_states(texts.take(rows)),
                    torch.arange(num_own, device=self.device),
                )
            if spec.recovery:
                target_QP = gathered_batch["query_pooled"][own_rows]
                recovered_QP = self.edje.joint.text_embeddings(text_QLH)
                terms["recovery"] = (
                    spec.recovery,
                    objectives.recovery_loss(recovered_QP, target_QP),
                )
            if spec.contrast:
                losses = self._contrast(
                    text_QLH, texts.is_word, gathered_batch, relevant_QB[own_rows], is_filler_B
                )
                terms["contrast"] = (spec.contrast, losses)
            if spec.distillation is not None:
                with torch.no_grad():
                    teacher_P = self._logits(self._of[TEACHER], gathered_batch, pairs_P2, TEACHER)
                losses = objectives.distillation_loss(logits_P, teacher_P)
                terms["distillation"] = (spec.distillation.weight, losses)
        total = torch.zeros((), device=self.device)
        if not len(positives_A2):  # every weight needs a gradient, as on other workers
            trained = [p for p in self.edje.joint.parameters() if p.requires_grad]
            total = sum(((0 * tensor).sum() for tensor in (embedded["tokens"], *trained)), total)
        for name, (weight, losses) in terms.items():
            # Every pair, word or text has the same weight, however they are distributed.
            count = torch.tensor(float(len(losses)), device=self.device)
            mean = losses.sum() / distributed.mean(count).clamp_min(1e-6)
            total = total + weight * mean
            metrics[name] = mean.item()
        return total, metrics

    @property
    def negatives_temperature(self) -> float:
        """Returns the temperature with which negatives are sampled."""
        if self.spec.negatives_temperature is not None:
            return self.spec.negatives_temperature
        scale = self.encoder.logit_scale if self.spec.first_stage == "single_vector" else None
        return DEFAULT_TEMPERATURE if scale is None else 1 / scale

    def _pairs(
        self, similarity_QB: torch.Tensor, is_negative_QB: torch.Tensor, positives_A2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(P, 2) positive pairs, negative documents, negative queries; and which are positive."""
        spec = self.spec
        temperature = self.negatives_temperature if spec.negatives == "sampled" else None
        query_A, document_A = positives_A2.unbind(1)
        pairs = [positives_A2]
        for axis, similarity, allowed, anchor_A in (
            (1, similarity_QB, is_negative_QB, query_A),
            (0, similarity_QB.T, is_negative_QB.T, document_A),
        ):
            row_AK, there_AK = objectives.hard_negatives(
                similarity[anchor_A],
                allowed[anchor_A],
                spec.num_negatives,
                temperature,
                spec.negatives_top_k,
            )
            negatives_AK2 = positives_A2.unsqueeze(1).repeat(1, row_AK.shape[1], 1)
            negatives_AK2[..., axis] = row_AK
            pairs.append(negatives_AK2[there_AK])
        pairs_P2 = torch.cat(pairs)
        return pairs_P2, torch.arange(len(pairs_P2), device=self.device) < len(positives_A2)

    def _logits(
        self, edje: Edje, gathered_batch: Embedded, pairs_P2: torch.Tensor, name: str = ""
    ) -> torch.Tensor:
        texts, tokens = (
            texts_of(gathered_batch, name),
            (gathered_batch[f"{name}tokens"], gathered_batch[f"{name}tokens_mask"]),
        )
        return self._in_mini_batches(
            lambda pairs: edje.joint.logits(texts, *tokens, pairs), pairs_P2
        )

    def _contrast(
        self,
        text_QLH: torch.Tensor,
        is_word_QL: torch.Tensor,
        gathered_batch: Embedded,
        relevant_QB: torch.Tensor,
        is_filler_B: torch.Tensor,
    ) -> torch.Tensor:
        """Computes InfoNCE of this worker's texts among the items of all workers.

            s(t, v) = 1/|t| * sum over words i of max over tokens j of cos(w_i, y_j)

        w are the hidden states of the text without an item, y the vision tokens. This aligns words
        with tokens before both are read together (ALBEF; Li et al., 2021), which matching alone
        learns slowly.
        """
        mask_BV = gathered_batch["tokens_mask"]
        scores_QB = late_scores(
            normalise(text_QLH.float()), is_word_QL, normalise(gathered_batch["tokens"]), mask_BV
        )
        is_there_B = mask_BV.any(dim=1) & ~is_filler_B
        return info_nce(
            scores_QB.masked_fill(~is_there_B, LOWEST),
            relevant_QB & is_there_B,
            self.spec.contrast_temperature,
        )

    def _masked_words(self, gathered_batch: Embedded, positives_A2: torch.Tensor) -> torch.Tensor:
        """Computes the loss of each masked word, given the vision tokens and the other words."""
        joint, texts = self.edje.joint, texts_of(gathered_batch)
        query_A, document_A = positives_A2.unbind(1)
        ids_AL, is_word_AL = texts.ids[query_A], texts.is_word[query_A]
        masked_AL, is_masked_AL = objectives.mask_words(
            ids_AL, is_word_AL, joint.mask_id, self.spec.mask_probability
        )

        def states(rows: torch.Tensor) -> torch.Tensor:
            document = document_A[rows]
            return joint.states(
                joint.words(masked_AL[rows]),
                texts.mask[query_A[rows]],
                gathered_batch["tokens"][document],
                gathered_batch["tokens_mask"][document],
            )

        states_ALH = self._in_mini_batches(states, torch.arange(len(query_A), device=self.device))
        logits_TW = joint.word_logits(states_ALH[is_masked_AL])
        return objectives.masked_language_loss(logits_TW, ids_AL[is_masked_AL])

    def _in_mini_batches(
        self, run: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        size = self.spec.pair_mini_batch_size
        if size is None or len(rows) <= size:
            return run(rows)
        if not torch.is_grad_enabled():
            return torch.cat([run(some) for some in rows.split(size)])
        return torch.cat([checkpoint(run, some, use_reentrant=False) for some in rows.split(size)])

    # -- quality -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, validation: Batch, data: TrainingData) -> Quality:
        """Evaluates text-to-item and item-to-text retrieval, reranked and by the first stage."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for mini_batch in self.mini_batches(self.read(validation), 64):
            for name, tensor in self(mini_batch).items():
                tensors.setdefault(name, []).append(tensor)
        embedded = {name: concatenate(rows) for name, rows in tensors.items()}
        first_QB = self.similarity(embedded)
        facts = validation.query_labels, validation.document_labels
        relevant_QB = data.relevant(*(labels.to(self.device) for labels in facts))
        quality = data.quality(self._reranked(embedded, first_QB), validation)
        backwards = ranking(self._reranked(embedded, first_QB.T, True), relevant_QB.T)
        quality |= _named("item to text", backwards)
        quality |= _named("first stage", ranking(first_QB, relevant_QB))
        quality |= _named("first stage item to text", ranking(first_QB.T, relevant_QB.T))
        return quality

    def _reranked(
        self, embedded: Embedded, first: torch.Tensor, backwards: bool = False
    ) -> torch.Tensor:
        """Reranks first-stage scores of shape (Q, B) or, in the backward direction, (B, Q)."""
        pairs = candidate_pairs(first, self.spec.rerank_depth)
        tokens = embedded["tokens"], embedded["tokens_mask"]
        text_item = pairs.flip(1) if backwards else pairs
        scores = self.edje.joint.scores(texts_of(embedded), *tokens, text_item)
        return rerank_scores(first, pairs, scores, self.spec.add_first_stage)

    def save(self, folder: Path) -> None:
        """Writes the adapter and the joint encoder in the format that `Edje.load` reads."""
        self.edje.save(folder)


def sample_positives(relevant_QB: torch.Tensor, own_rows: slice) -> torch.Tensor:
    """Samples (A, 2) rows of a query of this worker and a relevant document, uniformly.

    >>> relevant = torch.tensor([[True, False], [False, False], [False, True]])
    >>> sample_positives(relevant, slice(1, 3)).tolist()
    [[2, 1]]
    """
    query_A = relevant_QB[own_rows].any(dim=1).nonzero().squeeze(1) + own_rows.start
    if not len(query_A):
        return torch.zeros(0, 2, dtype=torch.int64, device=relevant_QB.device)
    chance_AB = relevant_QB[query_A].float().cpu()
    document_A = torch.multinomial(chance_AB, 1).squeeze(1).to(relevant_QB.device)
    return torch.stack([query_A, document_A], dim=1)


def texts_of(embedded: Embedded, name: str = "") -> Texts:
    """Returns the tokenized texts of an embedded batch."""
    ids = embedded[f"{name}ids"]
    num_truncated = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    return Texts(ids, embedded[f"{name}text_mask"], embedded[f"{name}is_word"], num_truncated)


def _named(name: str, quality: Quality) -> Quality:
    return {f"{name} {measure}": values for measure, values in quality.items()}

"""Training of EDJE, the joint encoder that reranks, over what a frozen encoder sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch.utils.checkpoint import checkpoint

from pipeline import config, distributed
from pipeline.atomic import check_writable
from pipeline.config import SpecError, Uri
from pipeline.distributed import gathered
from pipeline.registry import COMPRESSORS, ENCODERS, CompressorSpec
from pipeline.rerank import objectives
from pipeline.rerank.adapter import Adapter
from pipeline.rerank.candidates import candidate_pairs, rerank_scores
from pipeline.rerank.edje import Edje, read_metadata
from pipeline.rerank.joint import JointEncoder, Texts
from pipeline.schema import DEFAULT_RERANK_DEPTH
from pipeline.tokens import PROMPT, TokenBatch, normalise, unit_vectors
from pipeline.train.frozen import encoded, kept, query_key
from pipeline.train.learner import BaseSpec, Embedded, Learner, joined
from pipeline.train.losses import LOWEST, info_nce_each, late_scores
from pipeline.training_data.base import NOTHING, Batch, TrainingData
from pipeline.training_data.quality import Quality, ranking

if TYPE_CHECKING:
    from pipeline.train.states import States

#: What the teacher's tensors are called, beside the student's.
TEACHER = "teacher_"
#: Temperature of negatives for scores without a scale of their own. Late-interaction scores are
#: means of cosines, for which colpali-engine's contrastive loss has the same temperature.
DEFAULT_TEMPERATURE = 0.02


@dataclass(frozen=True)
class Read:
    """A batch: texts and items, or their states, and the texts as the joint encoders read them."""

    queries: Sequence[str] | TokenBatch
    documents: Sequence[Mapping[str, Any]] | TokenBatch
    texts: dict[str, Texts]


class Distillation(config.Spec):
    """Learning the logits of another EDJE, the teacher: local to compressed, in the paper.

    Attributes:
        teacher: a folder that training EDJE wrote, on the same encoder.
        weight: of this loss.
    """

    teacher: Uri
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)


class EdjeLearner(Learner["EdjeLearner.Spec"]):
    """An adapter behind a frozen encoder, and the joint encoder that reads what it makes.

    **A batch.** Of each query with a relevant document in the batch one is drawn: a positive pair.
    For each there are negative documents for its query and negative queries for its document, those
    that the frozen encoder finds most similar and the data do not call relevant (section 4).
    Candidates are those of all workers.

    Which documents and queries are negatives, and which words are masked, is drawn anew each time.
    """

    class Spec(BaseSpec):
        """What is trained, and by which losses; the paper's values where it has them.

        Attributes:
            encoder: the frozen one; its states are what the adapter reads, its similarities choose
                the negatives and the pools.
            states: a folder in which its states are kept, so that it runs once for each query and
                document; null: it runs in each epoch.
            states_dtype: of the kept states.
            start: a folder that training EDJE wrote, to go on from; null: begin anew.
            adapter: null: that of `start`, or else the paper's.
            joint: null: that of `start`, or else the bundled model.
            first_stage: the similarity of the frozen encoder: `single`, the product of the single
                vectors, or `late`, MaxSim.
            compressor: of the items' vectors in the first stage of measurements, for `late`.
                Negatives are chosen by all vectors: what is like in these is like in fewer, and the
                more a negative is like the positive, the more there is to learn from it.
            itm: the weight of image-text matching; 0: none.
            mlm: of masked language modelling, on positive pairs.
            recovery: of text-embedding recovery, from texts alone; of an encoder without a single
                vector the mean of the text's vectors is what is recovered.
            contrast: of words with vision tokens, before both are read together; it is not in
                the paper.
            contrast_temperature: of it.
            distillation: of a teacher's logits, on the pairs of image-text matching.
            masked: the probability that a word is masked.
            negatives: `sampled` draws among the `negatives_top_k` most similar candidates with
                probability softmax(similarity / temperature); `top` takes the most similar ones.
            num_negatives: Negative documents per positive pair, and as many negative queries.
            negatives_top_k: Number of candidates that `sampled` draws from.
            negatives_temperature: Temperature of `sampled`. Null is the encoder's own, 1 /
                exp(logit_scale), for `single` scores of an encoder that has one, and
                `DEFAULT_TEMPERATURE` otherwise.
            pairs_at_once: pairs that go through the joint encoder at once; of a batch with more,
                each does so twice (once for the loss, once for its gradients). Null: all.
            rerank_depth: Number of candidates of the first stage that a measurement reranks.
            add_first_stage: whether its score is added to the joint encoder's there.
        """

        renamed: ClassVar[Mapping[str, str]] = {"pool": "rerank_depth"}

        name: Literal["edje"] = "edje"
        states: Uri | None = None
        states_dtype: Literal["float16", "float32"] = "float16"
        start: Uri | None = None
        adapter: Adapter.Spec | None = None
        joint: JointEncoder.Spec | None = None
        first_stage: Literal["single", "late"] = "single"
        compressor: CompressorSpec = Field(default="none", validate_default=True)
        itm: float = Field(1.0, ge=0, allow_inf_nan=False)
        mlm: float = Field(1.0, ge=0, allow_inf_nan=False)
        recovery: float = Field(1.0, ge=0, allow_inf_nan=False)
        contrast: float = Field(0.0, ge=0, allow_inf_nan=False)
        contrast_temperature: float = Field(0.05, gt=0, allow_inf_nan=False)
        distillation: Distillation | None = None
        masked: float = Field(0.5, gt=0, lt=1)
        negatives: Literal["sampled", "top"] = "sampled"
        num_negatives: int = Field(3, ge=1)
        negatives_top_k: int = Field(10, ge=1)
        negatives_temperature: float | None = Field(None, gt=0, allow_inf_nan=False)
        pairs_at_once: int | None = Field(None, ge=1)
        rerank_depth: int = Field(DEFAULT_RERANK_DEPTH, ge=1)
        add_first_stage: bool = False

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            if self.itm == 0 and self.contrast == 0 and self.distillation is None:
                rule = "greater than 0 unless distillation or contrast is set"
                raise SpecError("itm", 0, rule)
            if self.compressor.name != "none" and self.first_stage != "late":
                raise SpecError("first_stage", self.first_stage, "late for compressed vectors")
            if self.negatives == "sampled" and self.negatives_top_k < self.num_negatives:
                rule = f"at least num_negatives={self.num_negatives}"
                raise SpecError("negatives_top_k", self.negatives_top_k, rule)
            for field in ("adapter", "joint"):
                own = getattr(self, field)
                if self.start is not None and own is not None:
                    rule = "null when `start` is set"
                    raise SpecError(field, config.dump(own), rule)
            return self

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.encoder: Any = ENCODERS.build(spec.encoder)
        if self.encoder.pooled_dim is None and spec.first_stage == "single":
            rule = "late (the encoder has no single vector)"
            raise SpecError("learner.first_stage", "single", rule)
        self.compressor = COMPRESSORS.build(spec.compressor)
        vision = {"spec": config.dump(spec.encoder), "fingerprint": self.encoder.fingerprint}
        if spec.start is not None:
            edje = Edje.load(spec.start, "start").requires_grad_(True)
            self._check_vision(edje, "start", spec.start)
            edje.vision = vision
        else:
            text_dim = self.encoder.pooled_dim or self.encoder.dim
            with config.within("learner.joint"):
                joint = JointEncoder(spec.joint or JointEncoder.Spec(), text_dim)
            with config.within("learner.adapter"):
                adapter = Adapter(spec.adapter or Adapter.Spec(), self.encoder.dim, joint.dim)
            edje = Edje(adapter.to(joint.device), joint, vision)
        self.edje, self.device = edje.train(), edje.joint.device
        #: What `forward` uses; the joint encoder is the loss's own.
        self.model = edje.adapter
        # What no loss uses has no gradient.
        for module in edje.joint.head_of_words():
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
        self._states: States | None = None
        self._half = False

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if a part of it is not there, or does not fit."""
        with config.within("encoder"):
            ENCODERS.load(spec.encoder.name).check(spec.encoder)
        compressor = COMPRESSORS.load(spec.compressor.name)
        if compressor.needs_fit or COMPRESSORS.build(spec.compressor).needs_taps:
            rule = "one of none, hpool, samer, spatial, random"
            raise SpecError("compressor.name", spec.compressor.name, rule)
        if spec.states is not None:
            check_writable(spec.states, "states")
        if spec.start is not None:
            read_metadata(spec.start, "start")
        else:
            with config.within("joint"):
                JointEncoder.check(spec.joint or JointEncoder.Spec())
        if spec.distillation is not None:
            read_metadata(spec.distillation.teacher, "distillation.teacher")

    def _check_vision(self, edje: Edje, field: str, folder: str) -> None:
        """Raises `SpecError` if an adapter is one of another encoder's states."""
        if edje.vision["fingerprint"] != self.encoder.fingerprint:
            rule = "the folder of an EDJE trained on this encoder"
            raise SpecError(f"learner.{field}", folder, rule, "was trained on another")

    # -- the frozen encoder ------------------------------------------------------------------------

    def prepare(self, data: TrainingData) -> None:
        """Keeps the states of all that is not there yet, if the spec says so; see `kept`."""
        if self.spec.states is None:
            return
        about = {
            "encoder": config.dump(self.spec.encoder) | {"max_batch_tokens": None},
            "weights": self.encoder.fingerprint,
            "taps": [],
        }
        where = (self.spec.states, self.spec.states_dtype)
        self._states = kept(where, about, data, self._frozen, self._frozen)

    def _frozen(self, inputs: Any) -> TokenBatch:
        return inputs if isinstance(inputs, TokenBatch) else encoded(self.encoder, inputs)

    # -- embedding ---------------------------------------------------------------------------------

    def read(self, batch: Batch) -> Read:
        """The texts through the tokenizers, and kept states if there are."""
        texts = {name: edje.joint.read(batch.queries) for name, edje in self._of.items()}
        if self._states is None:
            return Read(batch.queries, batch.documents, texts)
        queries = self._states.read([query_key(text) for text in batch.queries])
        return Read(queries, self._states.read(batch.document_keys), texts)

    def parts(self, read: Read, size: int) -> list[Read]:
        """Documents in their order, and as many parts of the queries."""
        num_queries, num_documents = len(read.queries), len(read.documents)
        num_parts = max(1, -(-num_documents // size))

        def take(inputs: Any, own: slice) -> Any:
            return inputs.take(own) if isinstance(inputs, TokenBatch | Texts) else inputs[own]

        parts = []
        for number in range(num_parts):
            first, last = (num_queries * n // num_parts for n in (number, number + 1))
            own = slice(first, last)
            documents = take(read.documents, slice(number * size, (number + 1) * size))
            texts = {name: take(each, own) for name, each in read.texts.items()}
            parts.append(Read(take(read.queries, own), documents, texts))
        return parts

    def forward(self, part: Read) -> Embedded:
        """The tokens of a part's documents, and all that the loss needs of what is frozen."""
        # The loss, which has the joint encoder, is to be computed as this is.
        self._half = torch.is_autocast_enabled(self.device.type)
        queries, documents = self._frozen(part.queries), self._frozen(part.documents)
        embedded: Embedded = {}
        for name, edje in self._of.items():
            if name == TEACHER and not self.edje.training:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and name != TEACHER):
                tokens, mask = edje.adapter.tokens(documents)
            texts = part.texts[name].to(self.device)
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
            if self.spec.first_stage == "late":
                if name == "document":
                    frozen = self._compared(frozen)
                embedded[f"{name}_vectors"] = unit_vectors(frozen)
                embedded[f"{name}_mask"] = frozen.mask
        return embedded

    @torch.no_grad()
    def _compared(self, documents: TokenBatch) -> TokenBatch:
        """What queries are compared with: in training all vectors, else the first stage's."""
        if documents.kind is not None:
            mask = documents.mask & (documents.kind != PROMPT)
            documents = dataclasses.replace(documents, mask=mask)
        return documents if self.edje.training else self.compressor.compress(documents)

    def similarity(self, embedded: Embedded) -> torch.Tensor:
        """(Q, B) the frozen encoder's, by single vectors or MaxSim."""
        with torch.no_grad():
            if self.spec.first_stage == "single":
                return embedded["query_pooled"] @ embedded["document_pooled"].T
            names = ("query_vectors", "query_mask", "document_vectors", "document_mask")
            return late_scores(*(embedded[name] for name in names))

    # -- objective ---------------------------------------------------------------------------------

    def loss(
        self, embedded: Embedded, batch: Batch, data: TrainingData
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum of the losses that the spec has (section 4)."""
        spec = self.spec
        every = {name: gathered(tensor) for name, tensor in embedded.items()}
        facts = batch.query_facts.to(self.device), batch.document_facts.to(self.device)
        query_facts, document_facts = (gathered(own) for own in facts)
        relevant_QB = data.relevant(query_facts, document_facts)
        is_filler_B = (document_facts == NOTHING).all(dim=1)
        num_own = len(batch.queries)
        own = slice(distributed.rank() * num_own, (distributed.rank() + 1) * num_own)
        positives_A2 = drawn(relevant_QB, own)
        figures: dict[str, float] = {}
        parts: dict[str, tuple[float, torch.Tensor]] = {}
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._half):
            if self._matches:
                pairs_P2, is_match_P = self._pairs(
                    self.similarity(every), ~relevant_QB & ~is_filler_B, positives_A2
                )
                logits_P = self._logits(self.edje, every, pairs_P2)
                parts["itm"] = (spec.itm, objectives.matching(logits_P, is_match_P))
                right_P = (logits_P.detach() > 0) == is_match_P
                figures["itm_accuracy"] = right_P.float().mean().item() if len(right_P) else 0.0
            if spec.mlm:
                parts["mlm"] = (spec.mlm, self._masked_words(every, positives_A2))
            if spec.recovery or spec.contrast:
                texts = texts_of(every).take(own)
                alone_QLH = self._in_parts(
                    lambda rows: self.edje.joint.of_texts(texts.take(rows)),
                    torch.arange(num_own, device=self.device),
                )
            if spec.recovery:
                target_QP = every["query_pooled"][own]
                made_QP = self.edje.joint.recovered(alone_QLH)
                parts["recovery"] = (spec.recovery, objectives.recovery(made_QP, target_QP))
            if spec.contrast:
                losses = self._contrast(
                    alone_QLH, texts.is_word, every, relevant_QB[own], is_filler_B
                )
                parts["contrast"] = (spec.contrast, losses)
            if spec.distillation is not None:
                with torch.no_grad():
                    teacher_P = self._logits(self._of[TEACHER], every, pairs_P2, TEACHER)
                losses = objectives.distillation(logits_P, teacher_P)
                parts["distillation"] = (spec.distillation.weight, losses)
        total = torch.zeros((), device=self.device)
        if not len(positives_A2):  # every weight has a gradient, as those of other workers have
            trained = [p for p in self.edje.joint.parameters() if p.requires_grad]
            total = sum(((0 * own).sum() for own in (embedded["tokens"], *trained)), total)
        for name, (weight, losses) in parts.items():
            # Each pair, word or text counts the same, whichever worker has how many.
            count = torch.tensor(float(len(losses)), device=self.device)
            mean = losses.sum() / distributed.mean(count).clamp_min(1e-6)
            total = total + weight * mean
            figures[name] = mean.item()
        return total, figures

    @property
    def negatives_temperature(self) -> float:
        """The temperature that negatives are drawn with."""
        if self.spec.negatives_temperature is not None:
            return self.spec.negatives_temperature
        scale = self.encoder.logit_scale if self.spec.first_stage == "single" else None
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
        self, edje: Edje, every: Embedded, pairs_P2: torch.Tensor, name: str = ""
    ) -> torch.Tensor:
        texts, tokens = texts_of(every, name), (every[f"{name}tokens"], every[f"{name}tokens_mask"])
        return self._in_parts(lambda pairs: edje.joint.logits(texts, *tokens, pairs), pairs_P2)

    def _contrast(
        self,
        alone_QLH: torch.Tensor,
        is_word_QL: torch.Tensor,
        every: Embedded,
        relevant_QB: torch.Tensor,
        is_filler_B: torch.Tensor,
    ) -> torch.Tensor:
        """(A,) InfoNCE of each own text with a relevant item, among the items of all workers:

            s(t, v) = 1/|t| * sum over words i of max over tokens j of cos(w_i, y_j)

        w are the states of the text alone, y the vision tokens. So words and what they mean are
        alike before both are read together (ALBEF; Li et al., 2021), which matching alone takes
        long to find out.
        """
        mask_BV = every["tokens_mask"]
        scores_QB = late_scores(
            normalise(alone_QLH.float()), is_word_QL, normalise(every["tokens"]), mask_BV
        )
        is_there_B = mask_BV.any(dim=1) & ~is_filler_B
        return info_nce_each(
            scores_QB.masked_fill(~is_there_B, LOWEST),
            relevant_QB & is_there_B,
            self.spec.contrast_temperature,
        )

    def _masked_words(self, every: Embedded, positives_A2: torch.Tensor) -> torch.Tensor:
        """The loss of each masked word, given the vision tokens and the other words."""
        joint, texts = self.edje.joint, texts_of(every)
        query_A, document_A = positives_A2.unbind(1)
        ids_AL, is_word_AL = texts.ids[query_A], texts.is_word[query_A]
        masked_AL, is_masked_AL = objectives.masked(
            ids_AL, is_word_AL, joint.mask_id, self.spec.masked
        )

        def states(rows: torch.Tensor) -> torch.Tensor:
            document = document_A[rows]
            return joint.states(
                joint.words(masked_AL[rows]),
                texts.mask[query_A[rows]],
                every["tokens"][document],
                every["tokens_mask"][document],
            )

        states_ALH = self._in_parts(states, torch.arange(len(query_A), device=self.device))
        logits_TW = joint.word_logits(states_ALH[is_masked_AL])
        return objectives.masked_words(logits_TW, ids_AL[is_masked_AL])

    def _in_parts(
        self, run: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """What `run` gives of rows, of so many at once as the spec says."""
        size = self.spec.pairs_at_once
        if size is None or len(rows) <= size:
            return run(rows)
        if not torch.is_grad_enabled():
            return torch.cat([run(part) for part in rows.split(size)])
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in rows.split(size)])

    # -- quality -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, held_out: Batch, data: TrainingData) -> Quality:
        """Text to item and item to text, reranked and as the first stage has them."""
        every: dict[str, list[torch.Tensor]] = {}
        for part in self.parts(self.read(held_out), 64):
            for name, tensor in self(part).items():
                every.setdefault(name, []).append(tensor)
        embedded = {name: joined(parts) for name, parts in every.items()}
        first_QB = self.similarity(embedded)
        facts = held_out.query_facts, held_out.document_facts
        relevant_QB = data.relevant(*(own.to(self.device) for own in facts))
        quality = data.quality(self._reranked(embedded, first_QB), held_out)
        backwards = ranking(self._reranked(embedded, first_QB.T, True), relevant_QB.T)
        quality |= _named("item to text", backwards)
        quality |= _named("first stage", ranking(first_QB, relevant_QB))
        quality |= _named("first stage item to text", ranking(first_QB.T, relevant_QB.T))
        return quality

    def _reranked(
        self, embedded: Embedded, first: torch.Tensor, backwards: bool = False
    ) -> torch.Tensor:
        """Scores as those of the first stage: (Q, B), or backwards (B, Q)."""
        pairs = candidate_pairs(first, self.spec.rerank_depth)
        tokens = embedded["tokens"], embedded["tokens_mask"]
        text_item = pairs.flip(1) if backwards else pairs
        scores = self.edje.joint.scores(texts_of(embedded), *tokens, text_item)
        return rerank_scores(first, pairs, scores, self.spec.add_first_stage)

    def save(self, folder: Path) -> None:
        """The adapter and the joint encoder, as `Edje.load` reads them."""
        self.edje.save(folder)


def drawn(relevant_QB: torch.Tensor, own: slice) -> torch.Tensor:
    """(A, 2) int64: of each own query with a relevant document one of these, all as likely.

    >>> drawn(torch.tensor([[True, False], [False, False], [False, True]]), slice(1, 3)).tolist()
    [[2, 1]]
    """
    query_A = relevant_QB[own].any(dim=1).nonzero().squeeze(1) + own.start
    if not len(query_A):
        return torch.zeros(0, 2, dtype=torch.int64, device=relevant_QB.device)
    chance_AB = relevant_QB[query_A].float().cpu()
    document_A = torch.multinomial(chance_AB, 1).squeeze(1).to(relevant_QB.device)
    return torch.stack([query_A, document_A], dim=1)


def texts_of(embedded: Embedded, name: str = "") -> Texts:
    """The texts that a batch was embedded with."""
    ids = embedded[f"{name}ids"]
    num_cut = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    return Texts(ids, embedded[f"{name}text_mask"], embedded[f"{name}is_word"], num_cut)


def _named(name: str, quality: Quality) -> Quality:
    return {f"{name} {measure}": values for measure, values in quality.items()}

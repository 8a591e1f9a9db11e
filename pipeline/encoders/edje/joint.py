"""Joint encoder of EDJE, a small language model that reads the tokens of an item and a text.

The input sequence is [vision tokens ; text]. Vision tokens take the place of word embeddings, "as
if they originated from text" (EDJE, Figure 2). They are followed by [CLS], the words and [SEP], as
produced by the tokenizer of the model. The heads are applied to the hidden state of [CLS].
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from pipeline.config import SpecError
from pipeline.encoders import batches_by_size
from pipeline.encoders.edje.cuda_layers import CudaLayers
from pipeline.encoders.loading import (
    BUNDLED,
    TOKENIZER_FILES,
    CheckpointFields,
    ModelName,
    check_checkpoint,
    check_tokenizer,
    load_model,
    load_processor,
    require_one_of,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK
from pipeline.tokens import pad

#: Supported model types. Other types do not accept embeddings with explicit positions.
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
#: Prefixes of the weights of masked-language heads.
LANGUAGE_HEADS = ("cls.", "lm_head.", "generator_")
#: Maximum number of padded tokens per forward pass of `scores` on a CPU, so that activations fit in
#: the caches. At 5,120 tokens int8 is a quarter slower, and float32 and bfloat16 are hardly faster.
CPU_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Texts:
    """Batch of Q tokenised texts.

    Attributes:
        ids: (Q, L) int64, token ids, right-padded.
        mask: (Q, L) bool, False for padding.
        is_word: (Q, L) bool, True for tokens that are neither padding nor special tokens.
        num_truncated: (Q,) int64, number of truncated tokens per text.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    is_word: torch.Tensor
    num_truncated: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: slice | torch.Tensor) -> Texts:
        """Selects texts by row. The padding does not change."""
        return Texts(self.ids[rows], self.mask[rows], self.is_word[rows], self.num_truncated[rows])

    def to(self, device: torch.device) -> Texts:
        """Copies the texts to a device."""
        return Texts(*(tensor.to(device) for tensor in vars(self).values()))


class JointEncoder(torch.nn.Module):
    """Language model with heads for matching, masked words and text embeddings.

    By default, a text has the same positions as it would have without an item, and all vision
    tokens share the first position, which is that of [CLS]. The model therefore treats the vision
    tokens as a set and can infer the location of a patch only from its state. See `Spec.positions`
    for alternatives. If the model has two token types, vision tokens have the second type.

    The masked-language head is loaded from the checkpoint. If the checkpoint has none, it is
    initialised randomly and tied to the word embeddings. The heads for matching (one logit per
    pair) and for text embeddings are linear layers on top of [CLS].

    Args:
        spec: Settings.
        text_dim: Dimension of the recovered text embeddings.
        may_lack: Prefixes of weights that may be missing from the checkpoint.
    """

    class Spec(CheckpointFields):
        """Options of the joint encoder.

        On a CPU, `scores` limits `max_batch_tokens` to `CPU_BATCH_TOKENS`.
        """

        model: ModelName = BUNDLED
        """`bundled` (all-MiniLM-L6-v2), a hub name, or a folder written by `save_pretrained`. The
        checkpoint may lack a masked-language head."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Data type of the weights and of the computation."""
        attention: Literal["sdpa", "eager"] = "sdpa"
        """Attention implementation."""
        max_text_tokens: int = Field(64, ge=3)
        """Maximum number of tokens per text, including special tokens. Longer texts are
        truncated."""
        positions: Literal["text", "patches", "sequence"] = "text"
        """Position ids. With `text`, all vision tokens have the first position, and the text has
        the same positions as without an item. With `patches`, vision tokens are numbered after the
        `max_text_tokens` positions of the text. If the position table of the model is too short
        (576 + 64 tokens exceed the 512 positions of BERT), they are distributed evenly over the
        remaining positions. With `sequence`, vision tokens and text are numbered consecutively."""
        token_type: Literal[0, 1] = 1
        """Token type of the vision tokens, in models with two types."""
        quantise: Literal["int8"] | None = None
        """`int8` computes matrix products of `scores` in 8 bits on a CPU. Weights are scaled per
        output channel and activations per forward pass, so scores depend slightly on the batch."""

        @model_validator(mode="after")
        def _check_quantised_dtype(self) -> Self:
            is_valid = not self.quantise or self.dtype == "float32"
            self.require(is_valid, "quantise", "null unless dtype is float32")
            return self

    def __init__(self, spec: Spec, text_dim: int, may_lack: tuple[str, ...] = LANGUAGE_HEADS):
        super().__init__()
        self.check(spec)
        self.spec = spec
        self.tokenizer = _tokenizer(spec)
        with _quiet():  # transformers warns about newly initialised heads
            self.language = load_model(spec, AutoModelForMaskedLM, optional_weights=may_lack)
        self.language.requires_grad_(True)
        settings, words = self.language.config, self.language.get_input_embeddings()
        assert isinstance(words, torch.nn.Embedding)
        self._words = words
        #: Dimension d_language of the vision tokens.
        self.dim = self._words.embedding_dim
        base, weight = self._base, self._words.weight
        # Some models number positions from the padding id + 1.
        padding_id: int | None = getattr(base.embeddings, "padding_idx", None)
        self._first = 0 if padding_id is None else padding_id + 1
        self._num_positions = settings.max_position_embeddings - self._first
        parameters = inspect.signature(base.forward).parameters
        has_types = "token_type_ids" in parameters and getattr(settings, "type_vocab_size", 1) > 1
        self._type = spec.token_type if has_types else None
        # `patches` needs at least one position after the text.
        max_tokens = self._num_positions - (spec.positions == "patches")
        rule = f"at most {max_tokens} for a model with {self._num_positions} positions"
        spec.require(spec.max_text_tokens <= max_tokens, "max_text_tokens", rule)
        self.match = torch.nn.Linear(settings.hidden_size, 1)
        self.recover = torch.nn.Linear(settings.hidden_size, text_dim)
        self.to(weight.device)
        self.match.to(weight.dtype)
        self.recover.to(weight.dtype)
        device = weight.device.type
        spec.require(not spec.quantise or device == "cpu", "quantise", f"null on {device}")
        self._layer_cache: tuple[Any, _Layers | CudaLayers | None] = (None, None)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is missing or has an unsupported type."""
        check_checkpoint(spec, *MODEL_TYPES)
        require_one_of(spec, TOKENIZER_FILES)
        _tokenizer(spec)

    @property
    def _base(self) -> Any:
        """The model without its head. The type is Any because torch does not type submodules."""
        return self.language.base_model

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._words.weight.device

    @property
    def mask_id(self) -> int:
        """Token id of the mask."""
        return self.tokenizer.mask_token_id

    def language_head(self) -> list[torch.nn.Module]:
        """Returns the modules of the masked-language head, in order."""
        base = self._base
        return [module for module in self.language.children() if module is not base]

    # -- inputs ------------------------------------------------------------------------------------

    def tokenise(self, texts: Sequence[str]) -> Texts:
        """Tokenises texts and truncates them to `max_text_tokens` tokens."""
        if not texts:
            empty = torch.zeros(0, 0, dtype=torch.int64)
            return Texts(empty, empty.bool(), empty.bool(), empty[:, :0].sum(dim=1))
        with TOKENIZER_LOCK:
            output = self.tokenizer(
                list(texts),
                truncation="only_first",
                max_length=self.spec.max_text_tokens,
                stride=0,
                return_overflowing_tokens=True,
                return_special_tokens_mask=True,
                split_special_tokens=True,  # "[SEP]" in a text is not a special token
            )
        ids: list[np.ndarray] = []
        is_word: list[np.ndarray] = []
        num_truncated = torch.zeros(len(texts), dtype=torch.int64)
        # The first chunk of each text is kept, and the others are counted as truncated.
        for number, text in enumerate(output["overflow_to_sample_mapping"]):
            is_text = np.array(output["special_tokens_mask"][number], dtype=np.int64) == 0
            if text == len(ids):
                ids.append(np.array(output["input_ids"][number], dtype=np.int64))
                is_word.append(is_text)
            else:
                num_truncated[text] += int(is_text.sum())
        lengths = np.array([len(text_ids) for text_ids in ids])
        padded, mask = pad(np.concatenate(ids), lengths)
        return Texts(padded, mask, pad(np.concatenate(is_word), lengths)[0], num_truncated)

    def words(self, ids_QL: torch.Tensor) -> torch.Tensor:
        """Returns the word embeddings of token ids: (Q, L, dim)."""
        return self._words(ids_QL)

    def states(
        self,
        words_PLD: torch.Tensor,
        text_mask_PL: torch.Tensor,
        tokens_PVD: torch.Tensor,
        mask_PV: torch.Tensor,
        first: int | None = None,
    ) -> torch.Tensor:
        """Computes the hidden states (P, L, H) of the text tokens in P sequences, [CLS] first.

        In the last layer, they are computed for the `first` tokens only, unless it is None. Masks
        are False at padding.

        Raises:
            SpecError: A sequence is longer than the position table of the model.
        """
        if not len(words_PLD):  # transformers rejects an empty batch
            size = self.language.config.hidden_size
            return words_PLD.new_zeros(*words_PLD[:, :first].shape[:2], size)
        inputs, mask_PS = self._inputs(words_PLD, text_mask_PL, tokens_PVD, mask_PV)
        num_vision, base = mask_PV.shape[1], self._base
        text_rows = slice(num_vision, None if first is None else num_vision + first)
        if self.spec.attention != "sdpa":
            output = base(**inputs, attention_mask=mask_PS.long())
            return output.last_hidden_state[:, text_rows]
        states_PSH = self._embed(inputs)
        *layers, last = base.encoder.layer
        for layer in layers:
            states_PSH = _apply_layer(layer, states_PSH, mask_PS, slice(None))
        return _apply_layer(last, states_PSH, mask_PS, text_rows)

    def _embed(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Computes the input of the first layer: (P, S, H)."""
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
        """Returns the arguments of the model's embedding module, and the mask (P, S)."""
        num_vision = mask_PV.shape[1]
        mask_PS = torch.cat([mask_PV, text_mask_PL], dim=1)
        if self.spec.positions == "sequence":
            position_PS = (mask_PS.cumsum(dim=1) - 1).clamp_min(0)
            if position_PS.numel() and int(position_PS.max()) >= self._num_positions:
                longest = int(position_PS.max()) + 1
                rule = f"text for sequences of more than {self._num_positions} tokens"
                note = f" for a sequence of {longest} tokens"
                raise SpecError("positions", "sequence", rule, note=note)
        else:
            position_S = torch.arange(mask_PS.shape[1], device=mask_PS.device) - num_vision
            position_PS = position_S.clamp_min(0).expand_as(mask_PS)
            if self.spec.positions == "patches":
                text_PL = position_PS[:, num_vision:]
                position_PS = torch.cat([self._patch_positions(mask_PV), text_PL], dim=1)
        inputs = {
            "inputs_embeds": torch.cat([tokens_PVD.to(words_PLD.dtype), words_PLD], dim=1),
            "position_ids": position_PS + self._first,
        }
        if self._type is not None:
            types_PS = torch.zeros_like(position_PS)
            types_PS[:, :num_vision] = self._type
            inputs["token_type_ids"] = types_PS
        return inputs, mask_PS

    def _patch_positions(self, mask_PV: torch.Tensor) -> torch.Tensor:
        """Returns the positions of vision tokens after those of the text: (P, V) int64."""
        first = self.spec.max_text_tokens
        number_V = torch.arange(mask_PV.shape[1], device=mask_PV.device)
        count_P1 = mask_PV.sum(dim=1, keepdim=True)
        num_free = self._num_positions - first
        # If there are more tokens than positions, neighbouring tokens share positions.
        offset_PV = number_V * num_free // count_P1.clamp_min(num_free)
        return first + offset_PV.clamp_max(num_free - 1)

    def text_states(self, texts: Texts) -> torch.Tensor:
        """Computes the states (Q, L, H) of texts without items."""
        mask_Q0 = texts.mask[:, :0]
        words_QLD = self.words(texts.ids)
        return self.states(words_QLD, texts.mask, words_QLD[:, :0], mask_Q0)

    # -- heads -------------------------------------------------------------------------------------

    def logits(
        self,
        texts: Texts,
        tokens_BVD: torch.Tensor,
        mask_BV: torch.Tensor,
        pairs_P2: torch.Tensor,
        words_QLD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the matching logits (P,) float32 of pairs (text, item) in one forward pass.

        `words_QLD` are the word embeddings of the texts, if they are known.
        """
        text_P, item_P = pairs_P2.unbind(1)
        words_QLD = self.words(texts.ids) if words_QLD is None else words_QLD
        states_PLH = self.states(
            words_QLD[text_P], texts.mask[text_P], tokens_BVD[item_P], mask_BV[item_P], first=1
        )
        return self.match(states_PLH[:, 0]).squeeze(1).float()

    def word_logits(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Computes the vocabulary logits (T, W) of states."""
        for module in self.language_head():
            states_TH = module(states_TH)
        return states_TH

    def text_embeddings(self, states_QLH: torch.Tensor) -> torch.Tensor:
        """Computes the text embeddings (Q, text_dim) from the output of `text_states`."""
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
        """Computes the matching logits (P,) float32 of pairs in batches of similar length.

        Texts and items that belong to several pairs are copied and embedded only once, and the last
        layer computes only the state of [CLS]. In float32 and without `quantise`, the result equals
        that of `logits` up to rounding errors.

        Args:
            texts: Q texts.
            tokens_BVD: Vision tokens of B items, of any dtype, right-padded.
            mask_BV: bool, False for padding. An item may have no tokens.
            pairs_P2: int64, pairs (text, item); None pairs text i with item i.

        Raises:
            SpecError: The tokens have another dimension than the word embeddings.
        """
        if tokens_BVD.shape[2] != self.dim:
            value = f"vectors of dimension {tokens_BVD.shape[2]}"
            raise SpecError("tokens", value, f"vectors of dimension {self.dim}")
        texts = texts if isinstance(texts, Texts) else self.tokenise(texts)
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
            num_words = int(length_P[row_R].max())
            num_vision = int(vision_P[row_R].max())
            batch_texts = Texts(
                texts.ids[:, :num_words],
                texts.mask[:, :num_words],
                texts.is_word[:, :num_words],
                texts.num_truncated,
            )
            arguments = (
                batch_texts,
                tokens_BVD[:, :num_vision],
                mask_BV[:, :num_vision],
                pairs_P2[row_R.to(self.device)],
                words_QLD[:, :num_words],
            )
            is_padded = int(sizes_P[rows].min()) < num_words + num_vision
            scores_P[row_R.to(self.device)] = (
                self.logits(*arguments)
                if layers is None
                else self._optimised_logits(layers, is_padded, *arguments)
            )
        return scores_P

    def _optimised_logits(
        self,
        layers: _Layers | CudaLayers,
        is_padded: bool,
        texts: Texts,
        tokens_BVD: torch.Tensor,
        mask_BV: torch.Tensor,
        pairs_P2: torch.Tensor,
        words_QLD: torch.Tensor,
    ) -> torch.Tensor:
        text_P, item_P = pairs_P2.unbind(1)
        inputs, mask_PS = self._inputs(
            words_QLD[text_P], texts.mask[text_P], tokens_BVD[item_P], mask_BV[item_P]
        )
        mask_P11S = mask_PS[:, None, None] if is_padded else None
        # The custom operators compute in the dtype of the weights and do not support autocast.
        with torch.autocast(self.device.type, enabled=False):
            states_PH = layers(self._embed(inputs), mask_P11S, mask_BV.shape[1])
            return self.match(states_PH).squeeze(1).float()

    def _layers(self) -> _Layers | CudaLayers | None:
        """Returns the layers optimised for inference, or None in training and for custom layers.

        They are cached and built again when the weights change.
        """
        base = self._base
        weights = list(base.encoder.parameters())
        if self.language.training or self.spec.attention != "sdpa":
            return None
        versions = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if self._layer_cache[0] != versions:
            linear = {type(m) for m in base.encoder.modules() if hasattr(m, "in_features")}
            is_plain = linear == {torch.nn.Linear}  # no LoRA
            layers: _Layers | CudaLayers | None = None
            if is_plain and CudaLayers.supports(base):
                layers = CudaLayers(base)
            elif is_plain:
                layers = _Layers(base, self.spec.quantise == "int8")
            self._layer_cache = versions, layers
        return self._layer_cache[1]

    def __getstate__(self) -> dict[str, Any]:
        # The optimised layers are specific to a machine.
        return {**super().__getstate__(), "_layer_cache": (None, None)}


def _apply_layer(
    layer: Any, states_PSH: torch.Tensor, mask_PS: torch.Tensor, rows: slice
) -> torch.Tensor:
    """Computes the output of a BERT layer at the positions `rows`: (P, R, H)."""
    attention = layer.attention.self

    def heads(linear: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs).unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)

    attended = functional.scaled_dot_product_attention(
        heads(attention.query, states_PSH[:, rows]),
        heads(attention.key, states_PSH),
        heads(attention.value, states_PSH),
        attn_mask=mask_PS[:, None, None],
        dropout_p=attention.dropout.p if layer.training else 0.0,
    )
    hidden = layer.attention.output(attended.transpose(1, 2).flatten(2), states_PSH[:, rows])
    return layer.output(layer.intermediate(hidden), hidden)


class _Layers:
    """Layers of a BERT-like language model that are optimised for inference.

    A single matrix product computes queries, keys and values. On a CPU, weights are packed for
    oneDNN or quantised to 8 bits. Padding is masked only if the batch contains any. The last layer
    computes only one position.
    """

    def __init__(self, base: Any, in_int8: bool):
        self.layers = []
        for layer in base.encoder.layer:
            attention, act = layer.attention.self, layer.intermediate.intermediate_act_fn
            self.heads = attention.num_attention_heads
            up = [layer.intermediate.dense]
            products = (
                _fuse_linear([attention.query, attention.key, attention.value], in_int8),
                _fuse_linear([layer.attention.output.dense], in_int8),
                _fuse_linear(up, in_int8, act, base.config.hidden_act == "gelu"),
                _fuse_linear([layer.output.dense], in_int8),
            )
            norms = layer.attention.output.LayerNorm, layer.output.LayerNorm
            self.layers.append((products, norms))

    def __call__(
        self, states_PSH: torch.Tensor, mask_P11S: torch.Tensor | None, position: int
    ) -> torch.Tensor:
        """Computes the states (P, H) at one position of the last layer."""
        for number, ((qkv, out, up, down), (norm, output_norm)) in enumerate(self.layers, 1):
            rows = slice(position, position + 1) if number == len(self.layers) else slice(None)
            split = qkv(states_PSH).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = split
            attended = functional.scaled_dot_product_attention(
                query[:, :, rows], key, value, attn_mask=mask_P11S
            )
            states_PSH = norm(out(attended.transpose(1, 2).flatten(2)) + states_PSH[:, rows])
            states_PSH = output_norm(down(up(states_PSH)) + states_PSH)
        return states_PSH[:, 0]


def _fuse_linear(
    layers: Sequence[torch.nn.Linear],
    in_int8: bool,
    act: Callable[[torch.Tensor], torch.Tensor] | None = None,
    is_gelu: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fuses parallel linear layers and an activation into one function."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = torch.cat([layer.bias.detach() for layer in layers])
    if in_int8:
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
        zero = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():  # quantised tensors are deprecated
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, bias)

        # Without VNNI instructions, sums of two products saturate at 16 bits unless inputs have 7.
        in_7_bits = not torch.cpu._is_vnni_supported()

        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.quantized.linear_dynamic(x, packed, reduce_range=in_7_bits)

    elif weight.device.type == "cpu" and _onednn_supports(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        post_op: tuple[str, list[float], str]
        post_op = ("gelu", [], "none") if is_gelu else ("none", [], "")

        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, *post_op)

        if is_gelu:
            return product
    else:

        def product(x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, weight, bias)

    return product if act is None else lambda x: act(product(x))


def _onednn_supports(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    is_bfloat16 = dtype == torch.bfloat16
    return dtype == torch.float32 or (is_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the log messages of transformers."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _tokenizer(spec: JointEncoder.Spec) -> Any:
    tokenizer = load_processor(spec, AutoTokenizer)
    check_tokenizer(spec.model, tokenizer, "cls_token", "mask_token")
    tokenizer.truncation_side = "right"
    return tokenizer

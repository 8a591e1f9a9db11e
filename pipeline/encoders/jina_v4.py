"""jina-embeddings-v4: Qwen2.5-VL with a projector, one pooled vector, and an adapter a task.

The layout is that of `jinaai/jina-embeddings-v4` (Günther et al., 2025), which comes with code of
its own; here transformers' own backbone reads its files. Taken from that code: the prompts, what is
pooled, that the prefix of a text-matching passage is that of a query, and that the adapters lie in
the folder `adapters` as peft writes them. Inferred, since no such checkpoint could be opened here:
the type `qwen2_5_vl` in its config.json, the projector's name among the weights, and that of an
adapter's tensor, `base_model.model.NAME.lora_A.TASK.weight`. A projector under
another name is an error, and so is an adapter of which no tensor has such a name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders import Attention
from pipeline.encoders.layers import attention_info
from pipeline.encoders.loading import (
    ADAPTER_SETTINGS,
    NOT_IN_FINGERPRINTS,
    WEIGHTS,
    adapter_of,
    check_checkpoint,
    fingerprint_of,
    folder_of,
    hashed,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_model import load_backbone, run
from pipeline.encoders.qwen_reader import QwenReader, Shown
from pipeline.encoders.qwen_spec import CONTENT, QwenSpec
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.tokens import VISUAL

PROJECTOR = "multi_vector_projector"
PICTURE_PROMPT = f"<|im_start|>user\n{CONTENT}Describe the image.<|im_end|>\n"
QUERY_PROMPT, PASSAGE_PROMPT = f"Query: {CONTENT}", f"Passage: {CONTENT}"

#: A tensor of an adapter: whose, which of the two, and for which task.
LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(?:default\.)?([^.]+)\.weight")
#: Ways of LoRA that are more than a product added to a weight.
OTHER_WAYS = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


class JinaV4(SequenceEncoder["JinaV4.Spec"]):
    """The projected states of all tokens, beside the mean of the states.

    The pooled vector is the mean over a text, or over a picture's tokens and their two boundaries.
    Of what has several pictures each is read by itself.
    """

    class Spec(QwenSpec):
        """Which checkpoint, for which task, and what is kept.

        Attributes:
            adapter: of several tasks, a hub name or a folder; null: the checkpoint's own folder
                `adapters`. If it has none its weights are taken to be a task's already.
            task: whose adapter is added to the weights.
            keep: "all" also keeps the tokens of the prompt around a picture, as the model's own
                code does; "visual" the patches alone.
            documents: what is read of an item: "pictures", and the text of those that have none;
                or its "text".
            truncate_dim: numbers of the pooled vector; null: all. The model is trained for 128,
                256, 512, 1024 and 2048, which is all.
        """

        name: Literal["jina_v4"] = "jina_v4"
        task: Literal["retrieval", "text-matching", "code"] = "retrieval"
        keep: Literal["all", "visual"] = "all"
        documents: Literal["pictures", "text"] = "pictures"
        truncate_dim: int | None = Field(None, ge=1)
        max_item_tokens: int = Field(32768, ge=1)

    normalised = True
    nothing = "no picture and no text"
    padding_side = "left"
    has_spans = True

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        projector = self.model.get_submodule(PROJECTOR)
        self.dim = projector.out_features
        self.pooled_dim = spec.truncate_dim or projector.in_features
        adapters = _adapters(spec)
        self.fingerprint = fingerprint_of(
            spec,
            (*NOT_IN_FINGERPRINTS, "documents", "max_item_tokens"),
            adapters=hashed(adapters, [*WEIGHTS, *ADAPTER_SETTINGS]) if adapters else {},
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Raises `SpecError` if the checkpoint is not there, is another, or not for the task."""
        width = check_checkpoint(spec, "qwen2_5_vl").get_text_config().hidden_size
        if (spec.truncate_dim or 0) > width:
            raise SpecError("truncate_dim", spec.truncate_dim, f"at most {width}")
        if Path(spec.model).is_dir():  # else its weights are not there yet
            _projector(spec, folder_of(spec, WEIGHTS))
            if adapters := _adapters(spec):
                _products(spec, adapters)
        cls.reader(spec)

    @classmethod
    def wants(cls, spec: Spec) -> tuple[str, ...]:
        """What `documents` says; the text of an item needs no work."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames")

    @classmethod
    def attention(cls, spec: Spec) -> Attention:
        """Column sums, and the row of the last token, which is not what is pooled."""
        settings = check_checkpoint(spec, "qwen2_5_vl").get_text_config()
        return attention_info(settings, ("column_sums", "eos_row"))

    @classmethod
    def query_kinds(cls, spec: Spec) -> tuple[str, ...]:
        """A picture is read as a document's is."""
        return ("text", "image")

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """The backbone with the projector in it, and the task's adapter added to both."""
        plain = spec.model_copy(update={"adapter": None})  # that of several tasks is none of peft's
        model = load_backbone(plain, device_map)
        projector = _projector(spec, folder_of(spec, WEIGHTS))
        model.add_module(PROJECTOR, projector.to(model.device, model.dtype).eval())
        if adapters := _adapters(spec):
            add_adapter(model, spec, _products(spec, adapters))
        return model

    @classmethod
    def reader(cls, spec: Spec) -> JinaReader:
        """What reads pictures, texts and queries."""
        return JinaReader(spec)

    def attending(self) -> PreTrainedModel:
        """The language model, behind the vision tower."""
        return self.model.language_model

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The projected states, and the mean of those that are pooled."""
        is_pooled_BL1 = inputs.pop("is_pooled").unsqueeze(2)
        states_BLD = run(self.model, inputs).last_hidden_state
        sums_BD = states_BLD.float().masked_fill(~is_pooled_BL1, 0).sum(dim=1)
        means_BD = sums_BD / is_pooled_BL1.sum(dim=1)
        projector = self.model.get_submodule(PROJECTOR)
        return projector(states_BLD), means_BD[:, : self.pooled_dim]


class JinaReader(QwenReader["JinaV4.Spec"]):
    """Pictures, texts and queries in the model's own prompts."""

    def __init__(self, spec: JinaV4.Spec):
        super().__init__(spec, check_checkpoint(spec, "qwen2_5_vl"))
        self._passage = QUERY_PROMPT if spec.task == "text-matching" else PASSAGE_PROMPT

    def item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """A sequence a picture; or the text.

        Raises:
            Unreadable: a picture is too long and narrow, or has too many tokens, or the text has.
        """
        shown, text = self.content_of(item)
        if shown:
            return [self._picture(one) for one in shown]
        return [self._text(self._passage, text)] if text else []

    def _picture(self, shown: Shown) -> ModelInput:
        _, written = self.fitting(1, lambda _: self.write(PICTURE_PROMPT, images=[shown]))
        is_visual = torch.tensor(written.kinds) == VISUAL
        where = is_visual.nonzero()
        is_pooled = torch.zeros_like(is_visual)
        is_pooled[int(where[0]) - 1 : int(where[-1]) + 2] = True  # with the boundaries
        keep = is_visual if self.spec.keep == "visual" else None
        return written.read(self.pixels_of([shown]), keep, is_pooled=is_pooled)

    def _text(self, prompt: str, text: str) -> ModelInput:
        _, written = self.fitting(1, lambda _: self.write(prompt, text))
        return written.read({}, is_pooled=torch.ones(len(written.ids), dtype=torch.bool))

    def picture(self, picture: Image.Image) -> tuple[ModelInput, list[str]]:
        """A query picture, read as a document's is."""
        return self.named(self._picture((picture, np.nan, np.nan)))

    def text(self, text: str) -> tuple[ModelInput, list[str]]:
        """A query text behind its prefix."""
        try:
            read = self._text(QUERY_PROMPT, text)
        except Unreadable as error:
            raise SpecError("query", text, "a readable input", note=f" ({error.detail})") from None
        return self.named(read, text)


def _tensors(
    folder: Path, wanted: re.Pattern, field: str, value: str
) -> Iterator[tuple[re.Match, torch.Tensor]]:
    """Those of a folder's files whose names match in full.

    Raises:
        SpecError: for `field`: a file is damaged.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    if found := wanted.fullmatch(name):
                        yield found, file.get_tensor(name)
        except SafetensorError as error:
            rule = "a folder with safetensors files"
            raise SpecError(field, value, rule, f"cannot be read ({error})") from None


def _projector(spec: JinaV4.Spec, folder: Path) -> torch.nn.Linear:
    """The projector of a checkpoint.

    Raises:
        SpecError: it has none, as those have not that are made for other engines.
    """
    wanted = re.compile(rf"{PROJECTOR}\.(weight|bias)")
    found = {name[1]: tensor for name, tensor in _tensors(folder, wanted, "model", spec.model)}
    if missing := {"weight", "bias"} - found.keys():
        rule = "a jina-embeddings-v4 checkpoint"
        problem = f"has no weights {PROJECTOR}.{min(missing)}"
        raise SpecError("model", spec.model, rule, problem)
    width_out, width_in = found["weight"].shape
    projector = torch.nn.Linear(width_in, width_out)
    projector.load_state_dict(found)
    return projector.requires_grad_(False)


def _adapters(spec: JinaV4.Spec) -> Path | None:
    """The folder of the adapters, if there is one."""
    if spec.adapter is not None:
        return adapter_of(spec.adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
    folder = folder_of(spec, ["adapters/*"]) / "adapters"
    return folder if (folder / "adapter_config.json").is_file() else None


def _products(spec: JinaV4.Spec, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By the name of a layer the two matrices of the task's adapter, whose product is added.

    The second is multiplied by the adapter's scale.

    Raises:
        SpecError: the adapter has none for the task, or is not of this kind.
    """
    rule = "a LoRA adapter of jina-embeddings-v4 as peft writes it"
    where = spec.adapter or str(folder)
    try:
        settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise SpecError("adapter", where, rule, "has no valid adapter_config.json")
    if unknown := [way for way in OTHER_WAYS if settings.get(way)]:
        raise SpecError("adapter", where, rule, f"has the unsupported setting {unknown[0]}")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not rank or alpha is None:
        raise SpecError("adapter", where, rule, "has no r or lora_alpha in its settings")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    products: dict[str, dict[str, torch.Tensor]] = {}
    tasks = set()
    for found, tensor in _tensors(folder, LORA, "adapter", where):
        name, which, task = found.groups()
        tasks.add(task)
        if task == spec.task:
            products.setdefault(name, {})[which] = tensor
    if not tasks:
        raise SpecError("adapter", where, rule, "has no tensors NAME.lora_A.TASK.weight")
    if not products:
        problem = "has no adapter in the checkpoint"
        raise SpecError.unknown_name("task", spec.task, sorted(tasks), problem)
    if half := [name for name, both in products.items() if len(both) < 2]:
        raise SpecError("adapter", where, rule, f"has only one of two matrices for {half[0]}")
    return {name: (both["A"], both["B"].float() * scale) for name, both in products.items()}


def add_adapter(
    model: PreTrainedModel,
    spec: JinaV4.Spec,
    products: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Adds an adapter to the weights of a model: W + B A for each of its layers.

    Args:
        model: Model to change in place.
        spec: Spec of the encoder.
        products: A and B by the name of the layer in a `ForConditionalGeneration` model, of which
            this model is the submodule `model`; older versions have the language model there.

    Raises:
        SpecError: The adapter belongs to another model.
    """
    modules = dict(model.named_modules())
    for name, (down, up) in products.items():
        own = re.sub(r"^layers\.", "language_model.layers.", name.removeprefix("model."))
        weight = getattr(modules.get(own), "weight", None)
        if weight is None or weight.shape != (len(up), down.shape[1]):
            rule = f"an adapter of {spec.model}"
            raise SpecError("adapter", spec.adapter, rule, f"has another shape for {name}")
        with torch.no_grad():
            weight += (up.to(weight.device) @ down.float().to(weight.device)).to(weight.dtype)

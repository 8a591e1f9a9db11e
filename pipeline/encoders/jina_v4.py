"""jina-embeddings-v4: Qwen2.5-VL with a projector, a pooled vector and one adapter per task.

The layout is that of `jinaai/jina-embeddings-v4` (Günther et al., 2025), which ships custom code.
Here its files are loaded into the backbone of transformers. Taken from the custom code: the
prompts, the pooling, the query prefix of text-matching passages, and the location of the adapters
in the folder `adapters`, in the format of peft. Inferred, because the checkpoint was not available
for testing: the type `qwen2_5_vl` in its config.json, the name of the projector's weights, and the
names of the adapter's tensors, `base_model.model.NAME.lora_A.TASK.weight`. Other names of the
projector or of all adapter tensors raise an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from pipeline.config import SpecError, reading
from pipeline.encoders import AttentionInfo, readable_query
from pipeline.encoders.images import item_images
from pipeline.encoders.layers import attention_info
from pipeline.encoders.loading import (
    ADAPTER_SETTINGS,
    NOT_IN_FINGERPRINTS,
    WEIGHTS,
    adapter_folders,
    check_checkpoint,
    checkpoint_fingerprint,
    checkpoint_folder,
    hash_files,
    load_linear,
    matching_tensors,
    weight_files,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_model import load_backbone, run
from pipeline.encoders.qwen_reader import QwenReader, TimedImage
from pipeline.encoders.qwen_spec import CONTENT, QwenSpec
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.encoders.templates import SPECIAL_TOKEN
from pipeline.encoders.trained import appended_hashes, check_appended_tokens
from pipeline.tokens import VISUAL

PROJECTOR = "multi_vector_projector"
IMAGE_PROMPT = f"<|im_start|>user\n{CONTENT}Describe the image.<|im_end|>\n"
QUERY_PROMPT, PASSAGE_PROMPT = f"Query: {CONTENT}", f"Passage: {CONTENT}"

#: Name of a tensor of an adapter, with its layer, matrix (A or B) and task.
LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(?:default\.)?([^.]+)\.weight")
#: Unsupported LoRA variants, whose update is not only a product of two matrices.
UNSUPPORTED_VARIANTS = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


class JinaV4(SequenceEncoder["JinaV4.Spec"]):
    """Encoder that returns the projected states of all tokens, and the mean of the states.

    The pooled vector is the mean over all tokens of a text, or over the tokens of an image and its
    two boundary tokens. Items with several images are encoded one image at a time.
    """

    class Spec(QwenSpec):
        """Checkpoint and task of jina-embeddings-v4, and the tokens that are kept.

        The field `adapter` names a folder or hub model with the adapters of all tasks. Null: the
        checkpoint's folder `adapters`. If there is none, the weights are assumed to be trained for
        the task.
        """

        name: Literal["jina_v4"] = "jina_v4"
        task: Literal["retrieval", "text-matching", "code"] = "retrieval"
        """Task whose adapter is added to the weights."""
        output_tokens: Literal["all", "visual"] = "all"
        """"all" keeps image tokens and the prompt around them, as the custom code does; "visual"
        only image tokens.
        """
        documents: Literal["images", "text"] = "images"
        """Content of an item that is encoded: `images` (the images, or the text of items without
        images) or "text".
        """
        truncate_dim: int | None = Field(None, ge=1)
        """Number of dimensions of the pooled vector. If null, all 2048 are used. The model is
        trained for 128, 256, 512, 1024 and 2048."""
        max_item_tokens: int = Field(32768, ge=1)

    default_query_kinds = ("text", "image", "video")
    empty_reason = "no image and no text"
    padding_side = "left"
    has_spans = True
    has_task_adapters = True

    def __init__(self, spec: Spec, device_map: str | None = None):
        super().__init__(spec, device_map)
        projector = self.model.get_submodule(PROJECTOR)
        self.dim = projector.out_features
        self.pooled_dim = spec.truncate_dim or projector.in_features
        adapters = _find_adapters(spec)
        self.fingerprint = checkpoint_fingerprint(
            spec,
            (*NOT_IN_FINGERPRINTS, "documents", "max_item_tokens"),
            adapters=hash_files(adapters, [*WEIGHTS, ADAPTER_SETTINGS]) if adapters else {},
            **appended_hashes(spec),
        )

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the checkpoint exists, has the expected type, and supports the task."""
        width = check_checkpoint(spec, "qwen2_5_vl").get_text_config().hidden_size
        check_appended_tokens(spec, width)
        spec.require((spec.truncate_dim or 0) <= width, "truncate_dim", f"at most {width}")
        if Path(spec.model).is_dir():  # the weights of a hub model may not have been downloaded yet
            _load_projector(spec, width)
            if adapters := _find_adapters(spec):
                _load_products(spec, adapters)
        cls.reader(spec)

    @classmethod
    def supported_inputs(cls, spec: Spec) -> tuple[str, ...]:
        """Returns the inputs selected by `documents`."""
        return ("text",) if spec.documents == "text" else ("text", "image", "frames")

    @classmethod
    def attention(cls, spec: Spec) -> AttentionInfo:
        """Returns column sums and the row of the last token, which is not the pooled one."""
        settings = check_checkpoint(spec, "qwen2_5_vl").get_text_config()
        return attention_info(settings, ("column_sums", "eos_row"), spec)

    @classmethod
    def load(cls, spec: Spec, device_map: str | None) -> PreTrainedModel:
        """Loads the backbone with the projector, and adds the task's adapter to both."""
        # peft cannot load an adapter of several tasks.
        base = spec.model_copy(update={"adapter": None})
        model = load_backbone(base, device_map, unused=(f"{PROJECTOR}.",))
        projector = _load_projector(spec, model.config.get_text_config().hidden_size)
        model.add_module(PROJECTOR, projector.to(model.device, model.dtype).eval())
        if adapters := _find_adapters(spec):
            add_adapter(model, spec, _load_products(spec, adapters))
        return model

    @classmethod
    def weight_files(cls, spec: Spec) -> list[Path]:
        """Returns the weight files of the model, its projector and the adapters."""
        return weight_files(spec, *filter(None, [_find_adapters(spec)]))

    @classmethod
    def reader(cls, spec: Spec) -> JinaReader:
        """Returns the reader of images, texts and queries."""
        return JinaReader(spec)

    def attention_module(self) -> PreTrainedModel:
        """Returns the language model."""
        return self.model.language_model

    def forward(
        self, inputs: dict[str, torch.Tensor], mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the projected hidden states and the mean of the pooled ones."""
        is_pooled_BL1 = inputs.pop("is_pooled").unsqueeze(2)
        states_BLD = run(self.model, inputs).last_hidden_state
        sums_BD = states_BLD.float().masked_fill(~is_pooled_BL1, 0).sum(dim=1)
        means_BD = sums_BD / is_pooled_BL1.sum(dim=1)
        projector = self.model.get_submodule(PROJECTOR)
        return projector(states_BLD), means_BD[:, : self.pooled_dim]


class JinaReader(QwenReader["JinaV4.Spec"]):
    """Reader of images, texts and queries with the prompts of the model."""

    def __init__(self, spec: JinaV4.Spec):
        super().__init__(spec, check_checkpoint(spec, "qwen2_5_vl"))
        self.token_ids(SPECIAL_TOKEN.findall(IMAGE_PROMPT))
        self._passage = QUERY_PROMPT if spec.task == "text-matching" else PASSAGE_PROMPT

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Builds one sequence per image, or a single sequence for a text."""
        images, text = self.item_content(item)
        if images:
            return [self._read_image(image) for image in images]
        return [self._read_text(self._passage, text)] if text else []

    def _read_image(self, image: TimedImage) -> ModelInput:
        _, writer = self.fit_to_limit(1, lambda _: self.write(IMAGE_PROMPT, images=[image]))
        is_visual = torch.tensor(writer.kinds) == VISUAL
        positions = is_visual.nonzero()
        is_pooled = torch.zeros_like(is_visual)
        is_pooled[int(positions[0]) - 1 : int(positions[-1]) + 2] = True  # includes the boundaries
        keep = is_visual if self.spec.output_tokens == "visual" else None
        return writer.build(self.image_inputs([image]), keep, is_pooled=is_pooled)

    def _read_text(self, prompt: str, text: str) -> ModelInput:
        _, writer = self.fit_to_limit(1, lambda _: self.write(prompt, text))
        return writer.build({}, is_pooled=torch.ones(len(writer.ids), dtype=torch.bool))

    def read_media_query(self, query: Mapping[str, Any]) -> tuple[list[ModelInput], list[str]]:
        """Returns one sequence per image or frame, built like those of a document."""
        sequences = [self._read_image(image) for image in item_images(query)]
        return sequences, [name for each in sequences for name in self.with_token_names(each)[1]]

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a text query with its prefix."""
        with readable_query(text):
            inputs = self._read_text(QUERY_PROMPT, text)
        return self.with_token_names(inputs, text)


def _load_projector(spec: JinaV4.Spec, width: int) -> torch.nn.Linear:
    """Loads the projector of a checkpoint, which those converted for other engines lack."""
    folder = checkpoint_folder(spec, WEIGHTS)
    projector = load_linear(folder, width, "model", spec.model, prefix=f"{PROJECTOR}.")
    return projector.requires_grad_(False)


def _find_adapters(spec: JinaV4.Spec) -> Path | None:
    if spec.adapter is not None:
        return adapter_folders(spec, [*WEIGHTS, ADAPTER_SETTINGS])[-1]
    folder = checkpoint_folder(spec, ["adapters/*"]) / "adapters"
    return folder if (folder / "adapter_config.json").is_file() else None


def _load_products(spec: JinaV4.Spec, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loads the two matrices of the task's adapter, by layer. Their product is the weight update.

    The second matrix includes the scale of the adapter.
    """
    rule = "a LoRA adapter of jina-embeddings-v4 in the format of peft"
    source = spec.adapter or str(folder)
    with reading("adapter", source, rule, ValueError, AttributeError):
        settings = json.loads((folder / ADAPTER_SETTINGS).read_text("utf-8"))
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
    unknown = [variant for variant in UNSUPPORTED_VARIANTS if settings.get(variant)]
    if unknown or not rank or alpha is None:
        problem = "has no r or lora_alpha in its settings"
        problem = f"has the unsupported setting {unknown[0]}" if unknown else problem
        raise SpecError("adapter", source, rule, problem)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    products: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for found, tensor in matching_tensors(folder, LORA, "adapter", source):
        name, matrix, task = found.groups()
        products.setdefault(task, {}).setdefault(name, {})[matrix] = tensor
    selected = products.get(spec.task, {})
    incomplete = [name for name, matrices in selected.items() if len(matrices) < 2]
    if incomplete or not products:
        problem = "has no tensors NAME.lora_A.TASK.weight"
        problem = f"has only one of two matrices for {incomplete[0]}" if incomplete else problem
        raise SpecError("adapter", source, rule, problem)
    if not selected:
        problem = "has no adapter in the checkpoint"
        raise SpecError.unknown_name("task", spec.task, sorted(products), problem)
    return {name: (pair["A"], pair["B"].float() * scale) for name, pair in selected.items()}


def add_adapter(
    model: PreTrainedModel,
    spec: JinaV4.Spec,
    products: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Adds an adapter in place to the weights of a model: W + B A for each of its layers.

    `products` are A and B by the name of the layer in a `ForConditionalGeneration` model, whose
    submodule `model` is the first argument. Older versions had the language model's layers directly
    in `model`.
    """
    modules = dict(model.named_modules())
    for name, (down, up) in products.items():
        module = re.sub(r"^layers\.", "language_model.layers.", name.removeprefix("model."))
        weight = getattr(modules.get(module), "weight", None)
        if weight is None or weight.shape != (len(up), down.shape[1]):
            rule = f"an adapter of {spec.model}"
            raise SpecError("adapter", spec.adapter, rule, f"has another shape for {name}")
        with torch.no_grad():
            weight += (up.to(weight.device) @ down.float().to(weight.device)).to(weight.dtype)

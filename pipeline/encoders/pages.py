"""Readers of the late-interaction families: images, and with ColQwen-Omni video and audio."""

from __future__ import annotations

import dataclasses
import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import Field
from transformers import (
    ColModernVBertProcessor,
    ColPaliProcessor,
    Gemma3Processor,
    Idefics3Processor,
    PaliGemmaProcessor,
    PretrainedConfig,
)

from pipeline import config
from pipeline.config import reading
from pipeline.encoders import check_query_size
from pipeline.encoders.appended import AppendedTokensSpec
from pipeline.encoders.families import Family
from pipeline.encoders.images import grid_extents, item_images
from pipeline.encoders.loading import (
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    CheckpointSpec,
    check_tokenizer,
    load_json,
    load_processor,
    processor_folder,
    require_one_of,
)
from pipeline.encoders.model_inputs import ModelInput
from pipeline.encoders.qwen_omni import QwenOmni, QwenOmniReader
from pipeline.encoders.qwen_vl import QwenVL, QwenVLReader
from pipeline.encoders.reader import Reader
from pipeline.encoders.templates import (
    TemplateSpec,
    check_declared,
    check_special_tokens,
    fill_template,
)
from pipeline.encoders.tokenizing import TOKENIZER_LOCK, ids_between, text_kinds, token_names
from pipeline.runtime.checkpoint import LOAD_ERRORS
from pipeline.tokens import AUDIO, PROMPT, VISUAL

#: Classes of processors by the type of the vision-language model and the library.
PROCESSORS: dict[tuple[str, str], Any] = {
    ("paligemma", "transformers"): ColPaliProcessor,
    ("modernvbert", "transformers"): ColModernVBertProcessor,
    ("paligemma", "colpali-engine"): PaliGemmaProcessor,
    ("modernvbert", "colpali-engine"): Idefics3Processor,
    ("idefics3", "colpali-engine"): Idefics3Processor,
    ("gemma3", "colpali-engine"): Gemma3Processor,
}
#: Name of the token before a tile.
TILE = re.compile(r"<row_(\d+)_col_(\d+)>")


class PageSpec(TemplateSpec, AppendedTokensSpec, CheckpointSpec):
    """Checkpoint, the tokens that are kept, and settings that its family supports."""

    name: Literal["colpali"] = "colpali"
    query_prefix: str | None = None
    """Prefix of each query. If null, the checkpoint's or the family's is used. `{instruction}`
    is replaced with the instruction of the benchmark's task."""
    num_augmentation: int | None = Field(None, ge=0)
    """Number of augmentation tokens appended to each query, whose vectors contribute to MaxSim.
    If null, that of the family: 10, or none for ColGemma3."""
    projection: config.Uri | None = None
    """Folder with a projection in a safetensors file, `weight` and optionally `bias`, as
    training writes it. Null: the checkpoint's projection.
    """
    output_tokens: Literal["all", "visual", "tiles"] = "all"
    """"all" keeps patches and prompt tokens, as the libraries do. "visual" keeps only patches,
    and audio. "tiles" keeps only patches of tiles, which form one grid, without the downscaled
    image of ColIdefics3 and ColModernVBert.
    """
    min_pixels: int | None = Field(None, ge=1)
    """Minimum number of pixels per image after resizing, for ColQwen models. If null, the
    checkpoint's value is used."""
    max_pixels: int | None = Field(None, ge=1)
    """Maximum number of pixels per image after resizing, for ColQwen models. If null, the
    checkpoint's value is used."""
    positions: Literal["3d", "1d"] = "3d"
    """Positions of the patches of ColQwen models: "3d" in time, row and column, with which they
    were trained, or consecutive, as in transformers 5."""
    bidirectional: bool = False
    """Use bidirectional attention. ColQwen models are trained with causal attention."""
    bidirectional_queries: bool = True
    """Use bidirectional attention in the queries of ColPali, as transformers does.
    colpali-engine uses causal attention if queries are padded.
    """


def page_reader(spec: PageSpec, settings: PretrainedConfig, family: Family) -> PageReader:
    """Returns the reader of a family. `settings` are those of the vision-language model."""
    if family.media in ("grid", "omni"):
        return QwenPageReader(spec, settings, family)
    return ProcessorPageReader(spec, settings, family)


class PageReader(Reader[PageSpec]):
    """Base of the readers of images and queries.

    Queries are formatted as the libraries do, except that special tokens spelled out in a query
    are plain text. A processor would accept an image placeholder as an image.
    """

    def __init__(self, spec: PageSpec, settings: PretrainedConfig, family: Family):
        super().__init__(spec)
        for files in (PROCESSOR_FILES, TOKENIZER_FILES):
            require_one_of(spec, files)
        self.settings, self.family = settings, family
        self.max_positions = settings.get_text_config().max_position_embeddings

    def _set_query_template(self) -> None:
        """Sets the parts of queries. The prefix must not contradict that of the checkpoint."""
        spec, family = self.spec, self.family
        needs_bos = "<bos>" in family.before
        check_tokenizer(spec.model, self.tokenizer, "pad_token", *["bos_token"] * needs_bos)
        prefix, folder = family.prefix, processor_folder(spec)
        for name in PROCESSOR_FILES:
            settings = load_json(folder / name, spec.model) or {}
            # The default of the processor's class is not a declaration of the checkpoint.
            if (declared := settings.get("query_prefix")) is not None:
                check_declared(spec, "query_prefix", spec.query_prefix, declared, name)
                prefix = declared
        self.prefix = prefix if spec.query_prefix is None else spec.query_prefix
        vocabulary = self.tokenizer.get_vocab()
        check_special_tokens("query_prefix", self.prefix, vocabulary, spec.model)
        token = family.augmentation or self.tokenizer.pad_token
        check_special_tokens("model", token, vocabulary, spec.model)
        count = spec.num_augmentation
        self.augmentation = token * (family.num_augmentation if count is None else count)

    @abstractmethod
    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the model input of an image in RGB, displayed from `start` to `stop` s, or NaN.

        Raises:
            Unreadable: The model cannot read the image.
        """

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns one sequence per image."""
        return [self.read_image(*timed) for timed in item_images(item)]

    def read_text_query(self, text: str) -> tuple[ModelInput, list[str]]:
        """Returns the sequence of a text query, with its prefix and augmentation tokens."""
        prefix = fill_template(self.prefix, self.instruction)
        before, after = self.family.before + prefix, self.augmentation + self.family.after
        ids = ids_between(self.tokenizer, before, text, after)
        check_query_size(text, len(ids), self.max_positions, " with the prompt")
        query = ModelInput.create(self.query_inputs(ids), {}, text_kinds(self.tokenizer, ids))
        return query, token_names(self.tokenizer, query)

    @abstractmethod
    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the model inputs of a query, by name."""


class ProcessorPageReader(PageReader):
    """Reader that uses the processor of the library: a square of patches, or tiles.

    Tiles have full resolution and are followed by the downscaled image. Extents are relative to the
    whole image, so each location is covered twice.
    """

    def __init__(self, spec: PageSpec, settings: PretrainedConfig, family: Family):
        super().__init__(spec, settings, family)
        processor_class = PROCESSORS[settings.model_type, family.library]
        self.processor = processor = load_processor(spec, processor_class)
        if scale := getattr(settings, "scale_factor", None):  # few adapters record the number
            vision = settings.vision_config
            processor.image_seq_len = (vision.image_size // vision.patch_size // scale) ** 2
        self.tokenizer = processor.tokenizer
        self._set_query_template()
        self._image_id = settings.image_token_id
        rule = f"a {family.title} whose processor reads images"
        with reading("model", spec.model, rule, *LOAD_ERRORS):
            self.read_image(Image.new("RGB", (64, 64)), torch.nan, torch.nan)

    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the patches in row-major order with the prompt, the downscaled image last."""
        with TOKENIZER_LOCK:
            if hasattr(self.processor, "process_images"):  # a processor of transformers
                output = self.processor.process_images([image], return_tensors="pt")
            else:
                page = [self.family.page]
                output = self.processor(text=page, images=[image], return_tensors="pt")
        ids = output["input_ids"][0]
        is_visual = ids == self._image_id
        boxes = self._boxes(ids, int(is_visual.sum()))
        extents = torch.full((len(ids), 6), torch.nan)
        extents[is_visual] = torch.cat(boxes)
        extents[is_visual, 4], extents[is_visual, 5] = start, stop
        keep = torch.ones_like(is_visual) if self.spec.output_tokens == "all" else is_visual.clone()
        if self.spec.output_tokens == "tiles" and len(boxes) > 1:
            keep[is_visual.nonzero()[-len(boxes[-1]) :]] = False  # the downscaled image is last
        is_tiled = self.family.media == "tiles"
        names = ("pixel_values", "pixel_attention_mask") if is_tiled else ("pixel_values",)
        return ModelInput.create(
            {name: output[name][0] for name in ("input_ids", "token_type_ids") if name in output},
            {name: output[name][0] if is_tiled else output[name] for name in names},
            torch.where(is_visual, VISUAL, PROMPT),
            keep=keep,
            extents=extents,
        )

    def _boxes(self, ids: torch.Tensor, num_visual: int) -> list[torch.Tensor]:
        """Returns the extents (T, 6) of the tokens of each tile, then of the whole image."""
        names = self.tokenizer.convert_ids_to_tokens(ids) if self.family.media == "tiles" else ()
        found = (TILE.fullmatch(name) for name in names)
        tiles = [(int(match[1]) - 1, int(match[2]) - 1) for match in found if match]
        side = math.isqrt(num_visual // (len(tiles) + 1))
        whole = grid_extents(side, side)
        if not tiles:
            return [whole]
        rows, columns = (1 + max(indices) for indices in zip(*tiles, strict=True))
        scale = torch.tensor([columns, rows, columns, rows, 1, 1])
        shifts = (torch.tensor([c, r, c, r, 0, 0]) for r, c in tiles)
        return [*((whole + shift) / scale for shift in shifts), whole]

    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the token ids, and the token types that select the attention mask."""
        if self.settings.model_type == "gemma3":  # type 1 marks images
            return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
        if self.settings.model_type != "paligemma":
            return {"input_ids": ids}
        # Type 0 is bidirectional. Without token types, transformers 5.23 uses causal attention if
        # the implementation is eager or the batch has padding, and bidirectional attention
        # otherwise.
        types = torch.full_like(ids, 0 if self.spec.bidirectional_queries else 1)
        return {"input_ids": ids, "token_type_ids": types}


class QwenPageReader(PageReader):
    """Reader that resizes an image to multiples of the patch size, for the ColQwen families.

    ColQwen-Omni also reads videos, as one sequence, and audio, as another.
    """

    def __init__(self, spec: PageSpec, settings: PretrainedConfig, family: Family):
        super().__init__(spec, settings, family)
        is_omni = family.media == "omni"
        fields: dict[str, Any] = {
            name: getattr(spec, name)
            for name in ("model", "revision", "dtype", "min_pixels", "max_pixels")
        }
        if fields["max_pixels"] is None and family.max_patches:
            vision = settings.vision_config
            patch_size = vision.patch_size * vision.spatial_merge_size
            fields["max_pixels"] = family.max_patches * patch_size**2
        inner = QwenOmni.Spec if is_omni else QwenVL.Spec
        reader: Any = QwenOmniReader if is_omni else QwenVLReader
        fields |= {"document_prompt": family.page, "query_prompt": family.page}
        self._inner = reader(inner(**fields), settings)
        self.tokenizer = self._inner.tokenizer
        self._set_query_template()

    def save(self, folder: Path) -> None:
        """Copies the preprocessing files of the checkpoint to those of a trained model."""
        self._inner.save(folder)

    def read_item(self, item: Mapping[str, Any]) -> list[ModelInput]:
        """Returns one sequence per image, or with ColQwen-Omni for the video and for the audio."""
        if self.family.media != "omni" or item.get("image"):
            return super().read_item(item)
        parts = [{**item, other: None} for other in ("audio", "frames") if item.get(other)]
        if len(parts) < 2:
            parts = [dict(item)]
        return [self._select(inputs) for part in parts for inputs in self._inner.read_item(part)]

    def read_image(self, image: Image.Image, start: float, stop: float) -> ModelInput:
        """Returns the merged patches in row-major order, between the parts of the prompt."""
        return self._select(self._inner.read_still(image, start, stop))

    def _select(self, inputs: ModelInput) -> ModelInput:
        """Keeps the tokens that the spec selects, without the input of single-vector embedders."""
        sequence = {name: v for name, v in inputs.sequence.items() if name != "is_pooled"}
        keep = torch.ones_like(inputs.keep)
        is_media = torch.isin(inputs.kind, torch.tensor([VISUAL, AUDIO], dtype=torch.int8))
        kind = torch.where(is_media, inputs.kind, PROMPT)
        if self.spec.output_tokens == "visual":
            keep = is_media
        return dataclasses.replace(inputs, sequence=sequence, keep=keep, kind=kind)

    def query_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the token ids, and the types or positions of tokens without images."""
        if self.family.media == "omni":
            return {
                "input_ids": ids,
                "position_ids": torch.arange(len(ids)).unsqueeze(1).expand(-1, 3),
            }
        return {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}

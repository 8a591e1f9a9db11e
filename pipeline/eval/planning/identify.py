"""Identifies the family of a checkpoint from its settings and the headers of its weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from transformers import PretrainedConfig

from pipeline.config import SpecError, parse
from pipeline.encoders import colbert, dual, qwen_model, qwen_omni
from pipeline.encoders.families import FAMILIES, projection_names
from pipeline.encoders.loading import (
    ADAPTER_SETTINGS,
    MODEL_RULE,
    SETTINGS,
    CheckpointFields,
    adapter_folders,
    checkpoint_folder,
    load_json,
    load_model_config,
)
from pipeline.runtime.checkpoint import (
    check_safetensors,
    find_checkpoint,
    list_model,
    read_headers,
    reading_hub,
)

#: Files that tell libraries apart, besides those that affect vectors.
MARKERS = (
    "modules.json",
    "artifact.metadata",
    "config_sentence_transformers.json",
    "*/config.json",
)
#: Titles of families whose checkpoints have no other mark than their type.
TITLES = {
    "bert": "BERT",
    "clip": "CLIP",
    "modernbert": "ModernBERT",
    "qwen2_5_omni": "Qwen2.5-Omni",
    "qwen2_5_omni_thinker": "Qwen2.5-Omni",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "qwen3_vl": "Qwen3-VL",
    "siglip": "SigLIP",
    "siglip2": "SigLIP 2",
}


@dataclass(frozen=True)
class Files:
    """Files of a model or an adapter.

    Attributes:
        names: Names of all files.
        shapes: Shapes of the weights by name, as far as headers can be read.
        parameters: Number of parameters by dtype.
        size: Size of the weights, in bytes.
        license: License field of the model card.
        gated: Whether the terms of the model have to be accepted.
    """

    names: list[str]
    shapes: dict[str, tuple[int, ...]]
    parameters: Counter[str]
    size: int
    license: str | None
    gated: bool = False


@dataclass(frozen=True)
class Identity:
    """Family and layout of a checkpoint.

    Attributes:
        encoder: Name of the encoder that loads it.
        family: Title of its family.
        library: Library whose layout it has.
        base: Name of the base model of an adapter.
        adapter: Name of the adapter, which may be the model itself.
        width: Dimensions of the token vectors.
        files: Files of the model and, if it is an adapter, of its base.
    """

    encoder: str
    family: str
    library: str
    base: str | None
    adapter: str | None
    width: int
    files: list[Files]


def identify(model: str, revision: str | None = None, adapter: str | None = None) -> Identity:
    """Identifies a checkpoint. Of a hub model, only settings and headers are downloaded.

    Raises:
        SpecError: The checkpoint does not exist, is not accessible, or has no known family.
    """
    spec = parse(CheckpointFields, {"model": model, "revision": revision, "adapter": adapter})
    model_folder = find_checkpoint(
        model, revision, [*SETTINGS, ADAPTER_SETTINGS, *MARKERS], MODEL_RULE
    )
    folder = checkpoint_folder(spec, SETTINGS)
    settings = load_model_config(model, folder)
    adapters = adapter_folders(spec, [ADAPTER_SETTINGS])
    base, base_revision = None, None
    if adapters:
        declared = load_json(adapters[0] / ADAPTER_SETTINGS, model)
        base, base_revision = model, revision
        if folder != model_folder:
            base = declared["base_model_name_or_path"]
            base_revision = None if Path(base).is_dir() else declared.get("revision")
    files = [read_files(model, revision)]
    if base and base != model:
        files.append(read_files(base, base_revision))
    elif adapter:
        files.append(read_files(adapter, None))
    shapes = {name: shape for each in files for name, shape in each.shapes.items()}
    encoder, family, library, width = _family(model, model_folder, settings, shapes)
    return Identity(encoder, family, library, base, adapter or (base and model), width, files)


def _family(
    model: str, folder: Path, settings: PretrainedConfig, shapes: dict[str, tuple[int, ...]]
) -> tuple[str, str, str, int]:
    """Returns the encoder, the family, the library and the width of the token vectors."""
    kind, text = settings.model_type, settings.get_text_config()
    title = TITLES.get(kind, kind)
    width = getattr(text, "hidden_size", 0)
    late = FAMILIES.get(kind)
    if late and late.library == "transformers":
        return "colpali", late.title, late.library, settings.embedding_dim
    if "multi_vector_projector.weight" in shapes:
        projected = shapes["multi_vector_projector.weight"][0]
        return "jina_v4", "jina-embeddings-v4", "the checkpoint's code", projected
    name = projection_names(shapes).get("weight")
    if late and (name or (not shapes and _has_class(model, folder, settings, "Col"))):
        projected = shapes[name][0] if name else 128
        projected = min(projected, getattr(settings, "dims", None) or projected)
        return "colpali", late.title, late.library, projected
    modules = load_json(folder / "modules.json", model) or []
    is_late = any("pylate" in module.get("type", "") for module in modules)
    if kind in colbert.TYPES and (is_late or _has_class(model, folder, settings, "HF_ColBERT")):
        dense = load_json(folder / "1_Dense/config.json", model) or {}
        projected = shapes.get("linear.weight", (dense.get("out_features", width),))[0]
        return "colbert", "ColBERT", "PyLate" if is_late else "ColBERT", projected
    library = "sentence-transformers" if modules else "transformers"
    if kind in qwen_model.MODELS:
        return "qwen_vl", title, library, width
    if kind in qwen_omni.MODELS:
        thinker = getattr(settings, "thinker_config", settings)
        return "qwen_omni", title, library, thinker.get_text_config().hidden_size
    if kind in dual.CLASSES:
        return "dual", title, library, settings.vision_config.hidden_size
    if not hasattr(settings, "vision_config") and hasattr(text, "num_hidden_layers"):
        return "minilm", title, library, width
    rule = "a checkpoint of a family in docs/reference/encoders.md"
    note = "; the encoder http reads models behind an endpoint"
    raise SpecError("model", model, rule, f"is a {kind} without a known projection", note)


def _has_class(model: str, folder: Path, settings: PretrainedConfig, prefix: str) -> bool:
    """Checks whether the files name a class of a library that begins with `prefix`."""
    names: list[Any] = [*(settings.architectures or ())]
    for file in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        names.append((load_json(folder / file, model) or {}).get("processor_class"))
    return any(str(name).startswith(prefix) for name in names)


def read_files(model: str, revision: str | None) -> Files:
    """Reads names, headers and card of a model or adapter. Weights are not downloaded.

    Offline, headers are those of the cache.
    """
    if Path(model).is_dir():
        check_safetensors(model, Path(model))
    patterns = [*SETTINGS, ADAPTER_SETTINGS]
    if (info := list_model(model, revision, MODEL_RULE)) is None:
        return _local_files(find_checkpoint(model, revision, patterns, MODEL_RULE))
    names = [sibling.rfilename for sibling in info.siblings or ()]
    try:
        with reading_hub(model, revision, MODEL_RULE):
            headers = [
                huggingface_hub.HfApi().parse_safetensors_file_metadata(
                    model, name, revision=info.sha
                )
                for name in names
                if name.endswith(".safetensors") and "/" not in name
            ]
    except httpx2.TransportError:  # the cache has the model
        return _local_files(find_checkpoint(model, revision, patterns, MODEL_RULE))
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.parameter_count
    sizes = [tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors.values()]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    card = info.card_data.to_dict() if info.card_data else {}
    return Files(names, shapes, counts, sum(sizes), card.get("license"), bool(info.gated))


def _local_files(folder: Path) -> Files:
    headers = read_headers(folder)
    shapes = {name: tuple(tensor["shape"]) for name, tensor in headers.items()}
    counts: Counter[str] = Counter()
    for name, tensor in headers.items():
        counts[tensor["dtype"]] += math.prod(shapes[name])
    offsets = [tensor["data_offsets"] for tensor in headers.values()]
    card = folder / "README.md"
    fields = huggingface_hub.ModelCard.load(card).data.to_dict() if card.is_file() else {}
    names = [path.name for path in folder.iterdir()]
    size = sum(last - first for first, last in offsets)
    return Files(names, shapes, counts, size, fields.get("license"))

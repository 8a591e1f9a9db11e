"""Checkpoints of the transformers library: found, checked, hashed and loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import safetensors
import torch
from pydantic import Field, field_validator
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from pipeline import config, extras
from pipeline.checkpoint import find_checkpoint
from pipeline.config import SpecError

WEIGHTS = ["*.safetensors"]
#: Everything else of a checkpoint that bears on the vectors.
SETTINGS = [
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
]
#: Of a LoRA adapter as peft writes it.
ADAPTER_SETTINGS = ["adapter_config.json"]
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: One of each must be there: the library would else take an image processor, or a tokenizer without
#: words, of no model at all.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
MODEL_RULE = "the path of an existing folder, or the hub name of a model"


class CheckpointFields(config.Spec):
    """Fields of the specs of all models with weights of the transformers library.

    Attributes:
        model: a hub name, or a local folder as `save_pretrained` writes it.
        revision: branch, tag or commit of a model from the hub.
        adapter: a LoRA adapter as peft writes it, a hub name or a folder; its weights are merged
            into the model's.
        dtype: of the weights and of what is computed.
        attention: the implementation; `flash_attention_2` needs its package and a GPU.
        max_batch_tokens: padded tokens of one forward pass.
        trust_remote_code: whether code may run that comes with a checkpoint. The families here are
            transformers' own classes and need none.
    """

    model: str
    revision: str | None = None
    adapter: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    max_batch_tokens: int = Field(16384, ge=1)
    trust_remote_code: Literal[False] = False

    @field_validator("model", "adapter")
    @classmethod
    def _make_folder_absolute(cls, model: str | None) -> str | None:
        # Actors run in other working directories.
        return config.absolute(model) if model and Path(model).expanduser().is_dir() else model


class CheckpointSpec(CheckpointFields, config.ComponentSpec):
    """Base of the specs of encoders with weights of the transformers library."""


#: Fields that change no query vector: where files came from, and what a batch is.
NOT_IN_FINGERPRINTS = ("model", "revision", "adapter", "max_batch_tokens", "trust_remote_code")


class Checkpoint(Protocol):
    """Fields of a spec that name a checkpoint and say how it is loaded."""

    @property
    def model(self) -> str:
        """Folder or name of the checkpoint."""
        ...

    @property
    def revision(self) -> str | None:
        """Revision on the model hub."""
        ...

    @property
    def adapter(self) -> str | None:
        """Folder of a LoRA adapter."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype of the weights."""
        ...

    @property
    def attention(self) -> str:
        """Implementation of attention."""
        ...


#: Type of the specs of a family of checkpoints.
CheckpointSpecT = TypeVar("CheckpointSpecT", bound=CheckpointSpec)


def folder_of(spec: Checkpoint, files: Iterable[str]) -> Path:
    """The checkpoint's folder; `files` of a model on the hub are downloaded if need be.

    Raises:
        SpecError: for `model`: it is no folder, and the hub does not give it.
    """
    return find_checkpoint(spec.model, spec.revision, list(files), MODEL_RULE)


def adapter_of(adapter: str | None, files: Iterable[str]) -> Path | None:
    """Returns the folder of an adapter, which may be on the hub; None for none.

    Raises:
        SpecError: For `adapter`: it does not exist, is not in peft's form, or its weights are not
            safetensors.
    """
    if adapter is None:
        return None
    files = list(files)
    try:
        folder = find_checkpoint(adapter, None, files, MODEL_RULE)
    except SpecError as error:
        raise error.at("adapter") from None
    if not (folder / "adapter_config.json").is_file():
        rule = "a LoRA adapter as peft writes it"
        raise SpecError("adapter", adapter, rule, "has no adapter_config.json")
    # Of an adapter on the hub they may not be there yet. peft would read a pickle instead.
    are_there = Path(adapter).is_dir() or set(WEIGHTS) <= set(files)
    if are_there and not (folder / ADAPTER_WEIGHTS).is_file():
        rule = "an adapter with safetensors (pickled weights are not loaded)"
        raise SpecError("adapter", adapter, rule, f"has no {ADAPTER_WEIGHTS}")
    return folder


def check_checkpoint(spec: Checkpoint, *model_types: str) -> PretrainedConfig:
    """Checks that a checkpoint can be loaded and returns its settings, without loading weights.

    Args:
        spec: Spec that names the checkpoint.
        model_types: Model types that the family supports.

    Raises:
        SpecError: The checkpoint is missing, of another type, or has no safetensors files.
    """
    folder = folder_of(spec, SETTINGS)
    settings = settings_of(spec, folder)
    if settings.model_type not in model_types:
        rule = f"a checkpoint of the type {' or '.join(model_types)}"
        raise SpecError("model", spec.model, rule, f"is a {settings.model_type}")
    if Path(spec.model).is_dir() and not any(folder.glob("*.safetensors")):
        rule = "a checkpoint with weights as *.safetensors (pickled weights are not loaded)"
        raise SpecError("model", spec.model, rule, "has no safetensors file")
    adapter_of(spec.adapter, ADAPTER_SETTINGS)
    return settings


def settings_of(spec: Checkpoint, folder: Path) -> PretrainedConfig:
    """What its config.json says.

    Raises:
        SpecError: there is none, or the library does not know the class.
    """
    if not (folder / "config.json").is_file():
        rule = "a checkpoint with a config.json"
        raise SpecError("model", spec.model, rule, "has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        rule, problem = "a model that transformers can load", f"cannot be loaded ({_said(error)})"
        raise SpecError("model", spec.model, rule, problem) from None


def require_one_of(spec: Checkpoint, names: Sequence[str]) -> None:
    """Raises `SpecError` if a checkpoint has none of these files."""
    folder = folder_of(spec, SETTINGS)
    if not any((folder / name).is_file() for name in names):
        rule = f"a checkpoint with one of {', '.join(names)}"
        raise SpecError("model", spec.model, rule, "has none of them")


def load_processor(spec: CheckpointFields, processor_class: Any, **options: Any) -> Any:
    """The processor of a checkpoint.

    Raises:
        SpecError: its files are not there, or not of this class.
    """
    folder = folder_of(spec, SETTINGS)
    try:
        return processor_class.from_pretrained(folder, trust_remote_code=False, **options)
    except (ValueError, OSError, KeyError, TypeError, ImportError, AttributeError) as error:
        rule = f"a checkpoint with a {processor_class.__name__}"
        problem = f"has no usable processor ({_said(error)})"
        raise SpecError("model", spec.model, rule, problem) from None


class BoundedSpec(Checkpoint, Protocol):
    """A checkpoint whose images are bounded in size."""

    @property
    def max_pixels(self) -> int | None:
        """Maximum number of pixels per image."""
        ...


def check_patches(spec: BoundedSpec, images: Any, vision: PretrainedConfig) -> None:
    """Checks an image processor of Qwen2-VL's kind against the tower that sees its patches.

    Raises:
        SpecError: it is one of another model, or `min_pixels` is more than `max_pixels`; of those
            the spec may have one and the checkpoint the other.
    """
    for own, of_model in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        given, wanted = getattr(images, own), getattr(vision, of_model)
        if given != wanted:
            rule = f"a checkpoint whose image processor has the model's {own}, {wanted}"
            raise SpecError("model", spec.model, rule, f"has {own} {given}")
    least, most = images.size["shortest_edge"], images.size["longest_edge"]
    if least > most:
        if spec.max_pixels is None:
            raise SpecError("min_pixels", least, f"at most {most} (the checkpoint's max_pixels)")
        raise SpecError("max_pixels", most, f"at least {least} (min_pixels)")


def load_model(
    spec: Checkpoint,
    model_class: Any,
    device_map: str | None = None,
    may_lack: tuple[str, ...] = (),
    folder: Path | None = None,
) -> PreTrainedModel:
    """Loads a model in evaluation mode, with its adapter merged, on the GPU if there is one.

    Args:
        spec: Spec that names the checkpoint.
        model_class: Class of the transformers library.
        device_map: "auto" spreads the model over the GPUs of this process.
        may_lack: Prefixes of weights that are not used and may be missing.
        folder: Folder of the checkpoint, if it is known.

    Raises:
        SpecError: the weights cannot be loaded.
    """
    # Where the weights go, which may be another machine than the one that checked the spec.
    if spec.attention == "flash_attention_2" and not is_flash_attn_2_available():
        problem = "needs the package flash-attn and a GPU"
        raise SpecError("attention", spec.attention, "sdpa or eager", problem)
    if device_map:
        extras.require("accelerate")
    folder = folder or folder_of(spec, [*WEIGHTS, *SETTINGS])
    options: dict[str, Any] = {"device_map": device_map} if device_map else {}
    try:
        model, found = model_class.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=spec.attention,
            dtype=getattr(torch, spec.dtype),
            **options,
        )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if "out of memory" in str(error).lower():
            raise
        rule = f"a {model_class.__name__} checkpoint"
        raise SpecError("model", spec.model, rule, f"cannot be loaded ({_said(error)})") from None
    # In the place of both the library makes random ones up.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith(may_lack))
    if missing:
        rule = f"a {model_class.__name__} checkpoint"
        problem = f"has no weights {', '.join(missing[:3])}"
        raise SpecError("model", spec.model, rule, problem)
    if found["mismatched_keys"]:
        name, there, wanted = min(found["mismatched_keys"])
        there, wanted = (" x ".join(map(str, shape)) for shape in (there, wanted))
        rule = f"a checkpoint whose weights match its config.json ({wanted})"
        raise SpecError("model", spec.model, rule, f"has {name} of shape {there}")
    adapter = adapter_of(spec.adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
    if adapter is not None:
        model = merged(model, adapter, spec)
    if not device_map:
        model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval()


def merged(model: PreTrainedModel, adapter: Path, spec: Checkpoint) -> PreTrainedModel:
    """A model with the weights of a LoRA adapter added to its own.

    Raises:
        MissingExtra: peft is not installed.
        SpecError: The adapter is of another model.
    """
    extras.require("peft")
    from peft import PeftConfig, PeftModel

    rule = f"a LoRA adapter of {spec.model}"
    try:
        settings = PeftConfig.from_pretrained(str(adapter))
        if settings.peft_type != "LORA":
            raise SpecError(
                "adapter", spec.adapter, rule, f"has the peft type {settings.peft_type}"
            )
        tuned = PeftModel(model, settings)
        found = tuned.load_adapter(str(adapter), tuned.active_adapter)
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise SpecError("adapter", spec.adapter, rule, f"cannot be read ({_said(error)})") from None
    # Layers without a weight would stay as they are, and weights without a layer be left out.
    for keys, problem in (
        (found.missing_keys, "has no weights"),
        (found.unexpected_keys, "has weights of an unknown layer:"),
    ):
        if keys:
            raise SpecError("adapter", spec.adapter, rule, f"{problem} {min(keys)}")
    return tuned.merge_and_unload()


def linear_in(
    folder: Path, width: int, field: str, value: str, prefix: str = ""
) -> torch.nn.Linear:
    """Loads a linear layer, `weight` and optionally `bias`, from a folder's safetensors files.

    Args:
        folder: Folder of the files.
        width: Expected input dimension.
        field: Field of the spec that names the folder, for error messages.
        value: Value of the field.
        prefix: Prefix of the names of the weights.

    Raises:
        SpecError: There is no such layer, or it has another input dimension.
    """
    check_unchanged(folder, field)
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in {f"{prefix}weight", f"{prefix}bias"} & set(file.keys()):
                    found[name.removeprefix(prefix)] = file.get_tensor(name).float()
        except safetensors.SafetensorError as error:
            rule = "a folder with safetensors files"
            raise SpecError(field, value, rule, f"cannot be read ({error})") from None
    if "weight" not in found:
        rule = f"a folder with {prefix}weight in a safetensors file"
        raise SpecError(field, value, rule, f"has no projection in {folder.name}")
    weight = found["weight"]
    if weight.ndim != 2 or weight.shape[1] != width:
        shape = " x ".join(map(str, weight.shape))
        raise SpecError(
            field, value, f"a projection of vectors of width {width}", f"has the shape {shape}"
        )
    layer = torch.nn.Linear(width, len(weight), bias="bias" in found)
    layer.load_state_dict(found)
    return layer


def fingerprint_of(
    spec: CheckpointSpec, ignored: Iterable[str] = NOT_IN_FINGERPRINTS, **more: Any
) -> str:
    """Hashes the files of a checkpoint and the settings that change a query vector.

    The origin of the files and the batching of documents do not count. `attention` does: its
    implementations differ visibly in half precision.

    Args:
        spec: Spec of the encoder.
        ignored: Fields of the spec that do not change a vector.
        more: Further values that change one.
    """
    folder = folder_of(spec, [*WEIGHTS, *SETTINGS])
    adapter = adapter_of(spec.adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
    files = hashed(folder, [*WEIGHTS, *SETTINGS])
    if adapter:
        files |= hashed(adapter, [*WEIGHTS, *ADAPTER_SETTINGS])
    ignored = set(ignored)
    settings = {name: value for name, value in config.dump(spec).items() if name not in ignored}
    return config.digest({"files": files, "settings": settings, **more})


def hashed(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """The hashes of a folder's files by name."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {path.name: sha256(path) for path in paths}


def check_unchanged(folder: Path | str, field: str) -> None:
    """Raises `SpecError` if a folder's weights are not what its `training.json` says was trained.

    A folder without that file may have any.
    """
    about = Path(folder) / "training.json"
    if not about.is_file():
        return
    try:
        trained = json.loads(about.read_text("utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        trained = None
    if hashed(Path(folder), ["*.safetensors"]) != trained:
        rule = "an unmodified output folder of training"
        raise SpecError(field, str(folder), rule, "has modified or corrupted weights")


def sha256(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _said(error: Exception) -> str:
    """The first line of what an error says; of torch's, which only announces, the first two."""
    first, second, *_ = [*str(error).splitlines(), "", ""]
    said = f"{first} {second.strip()}" if first.endswith(":") else first
    return said or type(error).__name__

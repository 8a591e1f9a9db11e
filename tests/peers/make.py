"""Makes checkpoints and vectors with the libraries that checkpoints come from.

Run it in an environment that has the libraries, which the suite does not need. One needs the
project's dependencies with colpali-engine, torchvision and qwen-vl-utils, each installed with
`--no-deps` in the version that the manifests name. A second one needs transformers 5.3 and PyLate
for the families in `OLD_TRANSFORMERS`:

    python -m tests.peers.make FAMILY...

The weights are those of `remake.weight`, so that manifests suffice to remake the files. Everything
is computed in float32 on the CPU, one input at a time, with image processors of the PIL backend.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.peers import remake
from tests.tiny import checkpoints as tiny

LIBRARIES = (
    *("colpali-engine", "transformers", "peft", "torch", "tokenizers", "sentence-transformers"),
    "pylate",
)
#: Files that libraries write and no library reads.
IGNORED = ("README.md", ".gitattributes")
Vectors = dict[str, np.ndarray]


def define_torchvision_operators() -> None:
    """Lets torchvision be imported where its compiled operators do not load."""
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


def rewrite_weights(folder: Path, rename: Callable[[str], str] = str) -> None:
    """Replaces all weights below a folder with those of their names."""
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                name: remake.weight(rename(name), piece.get_shape(), piece.get_dtype())
                for name, piece in shapes.items()
            }
        save_file(tensors, path, {"format": "pt"})


class Family:
    """Checkpoints of one family in a temporary folder, and their vectors."""

    def __init__(self, name: str):
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.sources: dict[str, dict[str, str]] = {}
        self.vectors: Vectors = {}

    def path(self, name: str) -> Path:
        return self.folder / name

    def fill(self, name: str, rename: Callable[[str], str] = str) -> Path:
        """Fills the weights of a checkpoint; `rename` gives the name that they are made of."""
        folder = self.path(name)
        rewrite_weights(folder, rename)
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, "pt") as file:
                self.sources[str(path.relative_to(self.folder))] = {
                    tensor: rename(tensor)
                    for tensor in file.keys()  # noqa: SIM118
                }
        return folder

    def add(self, variant: str, vectors: Vectors) -> None:
        """Adds the vectors of a variant."""
        for name, values in vectors.items():
            assert np.isfinite(values).all(), (self.name, variant, name)
            self.vectors[f"{variant}/{name}"] = remake.stored_coordinates(values)

    def same(self, variant: str, vectors: Vectors, tolerance: float = 2e-6) -> None:
        """Checks that vectors equal those of a variant."""
        for name, values in vectors.items():
            found = remake.stored_coordinates(values)
            difference = np.abs(found - self.vectors[f"{variant}/{name}"]).max()
            assert difference < tolerance, (self.name, variant, name, difference)

    def differ(self, one: str, other: str) -> None:
        """Checks that two variants have different vectors."""
        for name in [name for name in self.vectors if name.startswith(f"{one}/")]:
            a, b = self.vectors[name], self.vectors[name.replace(f"{one}/", f"{other}/", 1)]
            assert a.shape != b.shape or np.abs(a - b).max() > 1e-2, (self.name, one, other)

    def write(self, data: Path) -> None:
        """Writes the manifest, the files and the vectors."""
        (data / "files").mkdir(parents=True, exist_ok=True)
        manifest: dict[str, Any] = {"versions": versions(), "files": {}, "weights": {}}
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = str(path.relative_to(self.folder))
            if path.name in IGNORED:
                continue
            if path.suffix == ".safetensors":
                manifest["weights"][name] = {}
                with safe_open(path, "pt") as file:
                    for tensor in file.keys():  # noqa: SIM118
                        piece = file.get_slice(tensor)
                        source = self.sources[name][tensor]
                        manifest["weights"][name][tensor] = [
                            piece.get_dtype(),
                            piece.get_shape(),
                            *([source] if source != tensor else []),
                        ]
                continue
            text = path.read_text("utf-8").replace(str(self.folder), "{folder}")
            if path.suffix == ".json":  # one line for the many values of a vocabulary
                text = compact(json.loads(text), text)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            stored = f"{path.stem}-{digest}{path.suffix}"
            (data / "files" / stored).write_text(text, "utf-8")
            manifest["files"][name] = stored
        (data / f"{self.name}.json").write_text(dump(manifest), "utf-8")
        np.savez_compressed(data / f"{self.name}.npz", **self.vectors)
        shutil.rmtree(self.folder)


def compact(value: Any, text: str) -> str:
    """Returns JSON without indentation where it is large."""
    return (
        json.dumps(value, ensure_ascii=False, separators=(",", ":")) if len(text) > 8000 else text
    )


def dump(manifest: dict[str, Any]) -> str:
    """Returns a manifest as JSON with one tensor or file per line."""
    lines = json.dumps(manifest, indent=1)
    return re.sub(r"\[\s+([^\]\[]*?(?:\[[^\]]*\][^\]\[]*?)?)\s+\]", _one_line, lines) + "\n"


def _one_line(found: re.Match) -> str:
    return re.sub(r"\s*\n\s*", " ", found.group(0)).replace("[ ", "[").replace(" ]", "]")


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tokenizer(*special: str, **options: Any):
    """Trains a byte-level tokenizer that knows the words of the prompts."""
    return tiny.tokenizer(*special, texts=[*tiny.abstracts(50), *[PROMPTS] * 300], **options)


#: Words that become tokens of their own, so that sequences are short.
PROMPTS = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving"
    " auditory and visual inputs, as well as generating text and speech.\nuser\nassistant\nsystem\n"
    " Describe the content. Describe the image. Query: Question: User: Assistant:"
    " Represent the user's input. Represent the given image. You are a helpful assistant."
    " Understand the content of the provided video."
    " Retrieve images or text relevant to the user's query."
)


def number(values: list[torch.Tensor], kind: str) -> Vectors:
    """Names arrays by kind and number."""
    return {f"{kind}.{index}": value.detach().float().numpy() for index, value in enumerate(values)}


@torch.no_grad()
def encode_engine(model, processor) -> Vectors:
    """Encodes images and queries of the engine one by one."""
    model.eval()
    found = number([model(**processor.process_images([i]))[0] for i in remake.images()], "images")
    queries = [model(**processor.process_queries([text]))[0] for text in remake.QUERIES]
    return found | number(queries, "queries")


def save_old_processor(folder: Path, processor, images, extractor=None) -> None:
    """Saves the files of a processor as transformers 4 did."""
    processor.tokenizer.backend_tokenizer.no_padding()  # set by each call
    processor.tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    lengths = {
        name: getattr(processor, name, None) for name in ("image_seq_len", "image_seq_length")
    }
    if lengths := {name: value for name, value in lengths.items() if value}:
        (folder / "processor_config.json").write_text(json.dumps(lengths))
    if extractor:  # published checkpoints have both in one file
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**extractor.to_dict(), **json.loads(path.read_text("utf-8"))}))


TARGETS = (
    "(.*(model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|"
    ".*(custom_text_proj).*$)"
)


def save_adapter(folder: Path, model, targets: str | list[str], **more: Any) -> None:
    """Saves an adapter as the engine's training does."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        init_lora_weights="gaussian",
        bias="none",
        task_type="FEATURE_EXTRACTION",
        target_modules=targets,
        **more,
    )
    get_peft_model(model, lora).save_pretrained(folder)


def check_loaded(model, folder: Path) -> None:
    """Checks that a model contains all weights of a folder, whatever it calls them."""
    tensors = model.state_dict().values()
    contained = {digest(tensor) for tensor in tensors if tensor.device.type == "cpu"}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert digest(file.get_tensor(name)) in contained, f"{name} is not in the model"


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).digest()


FAMILIES: dict[str, Callable[[Family], None]] = {}


def family(function: Callable[[Family], None]) -> Callable[[Family], None]:
    FAMILIES[function.__name__] = function
    return function


# colpali-engine


def engine_layouts(
    current: Family,
    model_class: Any,
    config: Any,
    processor,
    images,
    targets: str = TARGETS,
    old_adapter: dict[str, str] | None = None,
    load: Callable[[Path], Any] | None = None,
    load_old: Callable[[Path], Any] | None = None,
    old_base: dict[str, str] | None = None,
    variants: bool = False,
    encode: Callable[[Any], Vectors] | None = None,
    extractor=None,
    misnamed: dict[str, str] | None = None,
) -> None:
    """Makes base, adapter and merged checkpoint.

    Args:
        old_adapter: Patterns that change the names of an adapter into those of transformers 4.
        old_base: Patterns that change the names of a base likewise.
        variants: Make sharded, bfloat16, DoRA and rsLoRA as well.
        misnamed: Patterns of names that the class saves wrongly, so that it cannot load them. Those
            of published checkpoints replace them.
    """
    from peft import PeftModel

    encode = encode or (lambda model: encode_engine(model, processor))
    load = load or (lambda folder: model_class.from_pretrained(folder, torch_dtype=torch.float32))
    base = current.path("base")
    model_class(config).save_pretrained(base)
    processor.save_pretrained(base)
    if misnamed:
        shutil.copytree(base, current.path("misnamed"))
        rename_tensors(current, base, misnamed)
    current.fill("base")
    model = load(base)
    check_loaded(model, base)
    current.add("base", encode(model))
    if misnamed:
        current.fill("misnamed", lambda name: renamed(name, misnamed))

    def adapter(name: str, **more: Any) -> Any:
        model = load(base)
        model.name_or_path = model.config._name_or_path = str(base)
        save_adapter(current.path(name), model, targets, **more)
        save_old_processor(current.path(name), processor, images, extractor)
        folder = current.fill(name)
        if more:  # transformers drops the magnitudes of DoRA
            loaded = PeftModel.from_pretrained(load(base), folder).base_model.model
        else:
            loaded = load(folder)
        check_loaded(loaded, folder)
        current.add(name, encode(loaded))
        current.differ(name, "base")

    adapter("adapter")
    if old_adapter:
        folder = current.path("adapter_old_names")
        shutil.copytree(current.path("adapter"), folder)
        rename_tensors(current, folder, old_adapter)
        loaded = (load_old or load)(folder)
        check_loaded(loaded, folder)
        current.same("adapter", encode(loaded))
    if old_base:
        folder = current.path("base_old_names")
        shutil.copytree(base, folder)
        rename_tensors(current, folder, old_base)
        (folder / "processor_config.json").unlink()
        save_old_processor(folder, processor, images, extractor)
        flatten_config(folder / "config.json")
        loaded = load(folder)
        check_loaded(loaded, folder)
        current.same("base", encode(loaded))
    if variants:
        adapter("dora", use_dora=True)
        adapter("rslora", use_rslora=True)
        model = load(base)
        model.save_pretrained(current.path("sharded"), max_shard_size="60KB")
        save_old_processor(current.path("sharded"), processor, images)
        assert len(list(current.path("sharded").glob("*.safetensors"))) > 2
        current.fill("sharded")
        current.same("base", encode(load(current.path("sharded"))))
        model.to(torch.bfloat16).save_pretrained(current.path("bf16"))
        save_old_processor(current.path("bf16"), processor, images)
        current.fill("bf16")
        current.add("bf16", encode(load(current.path("bf16"))))


def flatten_config(path: Path) -> None:
    """Writes the settings of the text model of a Qwen-VL at the top, as transformers 4 did."""
    config = json.loads(path.read_text("utf-8"))
    if not config["model_type"].startswith("qwen2"):
        return
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text = {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    config |= {**text, "torch_dtype": config.pop("dtype"), "transformers_version": "4.45.0"}
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {**rope, "type": "mrope"}
    path.write_text(json.dumps(config, indent=2), "utf-8")


def rename_tensors(current: Family, folder: Path, patterns: dict[str, str]) -> None:
    """Renames the tensors of a checkpoint, whose weights remain those of the former names."""
    for path in folder.rglob("*.safetensors"):
        name = str(path.relative_to(current.folder))
        tensors, sources = {}, {}
        with safe_open(path, "pt") as file:
            for old in file.keys():  # noqa: SIM118
                new = renamed(old, patterns)
                tensors[new], sources[new] = file.get_tensor(old), old
        assert any(new != old for new, old in sources.items()), list(sources)[:3]
        save_file(tensors, path, {"format": "pt"})
        current.sources[name] = sources


def renamed(name: str, patterns: dict[str, str]) -> str:
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


QWEN_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
    *("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"),
)


def qwen_tokenizer():
    return tokenizer(*QWEN_TOKENS, pad="<|endoftext|>", eos="<|im_end|>")


def qwen_images():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 4 * 16 * 16, "longest_edge": 24 * 16 * 16}
    return Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size)


def qwen_config(config_class: Any, words, text: dict, vision: dict) -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    text = {"num_hidden_layers": 2, "rope_parameters": rope, **text}
    return tiny.qwen_settings(config_class, words, text, {"patch_size": 8, **vision})


def qwen2_config(words, **vision: Any) -> Any:
    from transformers import Qwen2VLConfig

    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, **vision}
    return qwen_config(Qwen2VLConfig, words, {}, vision)


def qwen2_5_config(words) -> Any:
    from transformers import Qwen2_5_VLConfig

    return qwen_config(Qwen2_5_VLConfig, words, {}, {**tiny.QWEN2_5_VISION, "window_size": 32})


def qwen3_config(words, **more: Any) -> Any:
    from transformers import Qwen3VLConfig

    return qwen_config(Qwen3VLConfig, words, tiny.QWEN3_TEXT, {**tiny.QWEN3_VISION, **more})


def qwen_processor(processor_class: Any, words, images) -> Any:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    videos = Qwen2VLVideoProcessor(patch_size=8, merge_size=2, temporal_patch_size=2)
    return processor_class(images, words, video_processor=videos)


OLD_QWEN_ADAPTER = {r"^base_model\.model\.language_model\.": "base_model.model.model."}

OLD_QWEN_BASE = {r"^language_model\.": "model."}


@family
def colpali(current: Family) -> None:
    from colpali_engine.models import ColPali, ColPaliProcessor
    from transformers import ColPaliConfig, ColPaliForRetrieval, PaliGemmaConfig
    from transformers import ColPaliProcessor as ColPaliHFProcessor
    from transformers.models.siglip import SiglipImageProcessorPil

    words = tokenizer("<image>", pad="<pad>", eos="<eos>", bos="<bos>")
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = ColPaliProcessor(images, words)
    words = processor.tokenizer
    config = PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "pad_token_id": words.pad_token_id,
        },
        vision_config={**tiny.SIGLIP, "projection_dim": 32, "vision_use_head": False},
        image_token_id=processor.image_token_id,
        projection_dim=32,
        hidden_size=32,
    )
    engine_layouts(
        current,
        ColPali,
        config,
        processor,
        images,
        old_adapter={
            r"^base_model\.model\.model\.model\.language_model\.": (
                "base_model.model.model.language_model.model."
            )
        },
        targets=TARGETS.replace("(model)", "(language_model)"),
        old_base={r"^model\.vision_tower\.": "model.vision_tower.vision_model."},
    )
    hf_images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    hf_images.image_seq_length = 16
    current.add(
        "hf",
        save_hf(
            current,
            ColPaliForRetrieval,
            ColPaliConfig(vlm_config=config.to_dict(), embedding_dim=128),
            ColPaliHFProcessor(hf_images, words),
        ),
    )


@family
def colqwen2(current: Family) -> None:
    from colpali_engine.models import ColQwen2, ColQwen2Processor
    from transformers import ColQwen2Config, ColQwen2ForRetrieval
    from transformers import ColQwen2Processor as ColQwen2HFProcessor

    words, images = qwen_tokenizer(), qwen_images()
    processor = qwen_processor(ColQwen2Processor, words, images)
    engine_layouts(
        current,
        ColQwen2,
        qwen2_config(words),
        processor,
        images,
        old_adapter=OLD_QWEN_ADAPTER,
        old_base=OLD_QWEN_BASE,
        variants=True,
    )
    # The class of transformers 5 gives pages one-dimensional positions, unlike the engine and
    # transformers 4. The conversion of a checkpoint must keep its vectors, which are the engine's.
    hf = save_hf(
        current,
        ColQwen2ForRetrieval,
        ColQwen2Config(vlm_config=qwen2_config(words).to_dict(), embedding_dim=128),
        ColQwen2HFProcessor(images, words),
    )
    pages = {key.split("/")[1]: v for key, v in current.vectors.items() if key.startswith("base/i")}
    current.vectors |= {f"hf/{name}": values for name, values in pages.items()}
    queries = {name: values for name, values in hf.items() if name.startswith("queries")}
    current.add("hf", queries)


def save_hf(current: Family, model_class: Any, config: Any, processor) -> Vectors:
    """Makes the checkpoint of transformers' class with the weights of `base`.

    Returns its vectors.
    """
    folder = current.path("hf")
    model_class(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    sources = {
        bare_name(name): name
        for path in current.path("base").glob("*.safetensors")
        for name in current.sources[str(path.relative_to(current.folder))]
    }
    current.fill("hf", lambda name: sources[bare_name(name)])
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    with torch.no_grad():
        for image in remake.images():
            inputs = processor.process_images([image], return_tensors="pt")
            found[f"images.{len(found)}"] = model(**inputs).embeddings[0].numpy()
        texts = [processor.process_queries([text], return_tensors="pt") for text in remake.QUERIES]
        return found | number([model(**inputs).embeddings[0] for inputs in texts], "queries")


def bare_name(name: str) -> str:
    """Returns the name of a weight without the modules that contain the model."""
    name = name.replace("embedding_proj_layer", "custom_text_proj")
    return re.sub(
        r"(^|\.)(vlm|model|language_model|vision_model|base_model)(?=\.)", "", name
    ).strip(".")


@family
def colqwen2_5(current: Family) -> None:
    from colpali_engine.models import ColQwen2_5, ColQwen2_5_Processor

    words, images = qwen_tokenizer(), qwen_images()
    processor = qwen_processor(ColQwen2_5_Processor, words, images)
    engine_layouts(
        current,
        ColQwen2_5,
        qwen2_5_config(words),
        processor,
        images,
        old_adapter=OLD_QWEN_ADAPTER,
        old_base=OLD_QWEN_BASE,
    )


@family
def colqwen3(current: Family) -> None:
    from colpali_engine.models import ColQwen3, ColQwen3Processor

    words, images = qwen_tokenizer(), qwen_images()
    processor = qwen_processor(ColQwen3Processor, words, images)
    engine_layouts(current, ColQwen3, qwen3_config(words), processor, images)


@family
def colidefics3(current: Family) -> None:
    from colpali_engine.models import ColIdefics3, ColIdefics3Processor
    from transformers import Idefics3Config
    from transformers.models.idefics3 import Idefics3ImageProcessorPil

    words = idefics3_tokenizer()
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    processor = ColIdefics3Processor(images, words, image_seq_len=4)
    words = processor.tokenizer
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": words.pad_token_id,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=words.pad_token_id,
    )
    targets = TARGETS.replace("(model)", "(text_model)")
    engine_layouts(current, ColIdefics3, config, processor, images, targets)


def idefics3_tokenizer(*special: str, **more: Any):
    more = more or {"pad": "<|im_end|>", "eos": "<|im_end|>", "bos": "<|im_start|>"}
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return tokenizer(
        *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
        *tiles,
        *special,
        **more,
    )


@family
def biqwen2_5(current: Family) -> None:
    from colpali_engine.models import BiQwen2_5, BiQwen2_5_Processor

    words, images = qwen_tokenizer(), qwen_images()
    processor = qwen_processor(BiQwen2_5_Processor, words, images)

    def load(folder: Path) -> Any:  # without the argument its from_pretrained fails
        return BiQwen2_5.from_pretrained(folder, key_mapping={}, torch_dtype=torch.float32)

    engine_layouts(
        current,
        BiQwen2_5,
        qwen2_5_config(words),
        processor,
        images,
        load=load,
        old_adapter=OLD_QWEN_ADAPTER,
        load_old=lambda folder: BiQwen2_5.from_pretrained(
            folder,
            key_mapping={r"^model\.layers": "language_model.layers"},
            torch_dtype=torch.float32,
        ),
    )


@family
def colqwen3_5(current: Family) -> None:
    from colpali_engine.models import ColQwen3_5, ColQwen3_5Processor
    from transformers import Qwen3_5Config

    words, images = qwen_tokenizer(), qwen_images()
    processor = qwen_processor(ColQwen3_5Processor, words, images)
    text = {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    config = qwen_config(Qwen3_5Config, words, text, vision)
    config.dim = 160  # a width of the checkpoint's own
    targets = TARGETS.replace("(down_proj", "(in_proj_qkv|in_proj_z|out_proj|down_proj")
    engine_layouts(current, ColQwen3_5, config, processor, images, targets)


GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
)


@family
def colgemma3(current: Family) -> None:
    """The template and the tokenizer, like that of published Gemmas, both write a `<bos>`."""
    from colpali_engine.models import ColGemma3, ColGemmaProcessor3
    from transformers import Gemma3Config
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = tokenizer(
        *("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
        "<image_soft_token>",
        pad="<pad>",
        eos="<eos>",
        bos="<bos>",
        chat_template=GEMMA_TEMPLATE,
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    add_special_tokens(words, "<bos>")
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = ColGemmaProcessor3(images, words, image_seq_length=4, chat_template=GEMMA_TEMPLATE)
    ids = words.convert_tokens_to_ids
    config = Gemma3Config(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": words.pad_token_id,
        },
        vision_config={**tiny.SIGLIP, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
    )
    targets = TARGETS.replace("(model)", "(language_model)")
    engine_layouts(current, ColGemma3, config, processor, images, targets)


def add_special_tokens(words, first: str, last: str = "") -> None:
    """Makes a tokenizer add special tokens to each text."""
    from tokenizers import processors

    names = [name for name in (first, last) if name]
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(),
        special_tokens=[(name, words.convert_tokens_to_ids(name)) for name in names],
    )


def modernvbert(processor_class: Any) -> tuple[Any, Any, Any]:
    """Returns config, processor and image processor of ModernVBERT."""
    from transformers import ModernVBertConfig
    from transformers.models.idefics3 import Idefics3ImageProcessorPil

    words = idefics3_tokenizer(
        "<|begin_of_text|>", pad="[PAD]", eos="[SEP]", bos="[CLS]", sep_token="[SEP]"
    )
    add_special_tokens(words, "[CLS]", "[SEP]")
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    processor = processor_class(images, words, image_seq_len=4)
    words = processor.tokenizer
    config = ModernVBertConfig(
        text_config={
            "model_type": "modernbert",
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "pad_token_id": words.pad_token_id,
        },
        vision_config=tiny.SIGLIP,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=2,
    )
    return config, processor, images


MODERNVBERT_TARGETS = "(.*(text_model).*(Wqkv|Wo|Wi).*$|.*(custom_text_proj).*$)"


@family
def colmodernvbert(current: Family) -> None:
    from colpali_engine.models import ColModernVBert, ColModernVBertProcessor
    from transformers import ColModernVBertConfig, ColModernVBertForRetrieval
    from transformers import ColModernVBertProcessor as ColModernVBertHFProcessor

    config, processor, images = modernvbert(ColModernVBertProcessor)
    engine_layouts(
        current, ColModernVBert, config, processor, images, MODERNVBERT_TARGETS,
        misnamed={r"^base_model\.model\.(model\.)?": r"\1"},
    )  # fmt: skip
    hf_config = ColModernVBertConfig(vlm_config=config.to_dict(), embedding_dim=128)
    hf = ColModernVBertHFProcessor(images, processor.tokenizer, image_seq_len=4)
    current.add("hf", save_hf(current, ColModernVBertForRetrieval, hf_config, hf))


@family
def bimodernvbert(current: Family) -> None:
    from colpali_engine.models import BiModernVBert, BiModernVBertProcessor

    config, processor, images = modernvbert(BiModernVBertProcessor)
    engine_layouts(current, BiModernVBert, config, processor, images, MODERNVBERT_TARGETS)


OMNI_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@family
def colqwen_omni(current: Family) -> None:
    """Needs transformers 5.3: with 5.23 the engine's class cannot be constructed."""
    from colpali_engine.models import ColQwen2_5Omni, ColQwen2_5OmniProcessor
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    words = tokenizer(
        *QWEN_TOKENS,
        pad="<|endoftext|>",
        eos="<|im_end|>",
        extra_special_tokens={
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        chat_template=OMNI_TEMPLATE,
    )
    size = {"shortest_edge": 4 * 16 * 16, "longest_edge": 24 * 16 * 16}
    images = Qwen2VLImageProcessor(
        patch_size=8, merge_size=2, temporal_patch_size=2, size=size,
        min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"],
    )  # fmt: skip
    videos = Qwen2VLVideoProcessor(patch_size=8, merge_size=2, temporal_patch_size=2, size=size)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=6, return_attention_mask=True)
    processor = ColQwen2_5OmniProcessor(images, videos, extractor, words)

    def encode_media(model) -> Vectors:
        found = encode_engine(model, processor)
        with torch.no_grad():
            audio = model(**processor.process_audios([remake.audio()]))[0]
            frames = np.stack([np.asarray(frame) for frame in remake.frames()])
            # `process_videos` resizes by the defaults of the class instead of the checkpoint's.
            conversation = [
                {"role": "system", "content": [{"type": "text", "text": OMNI_SYSTEM}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "video"},
                        {"type": "text", "text": "Describe the content."},
                    ],
                },
            ]
            text = processor.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
            clip = processor(
                text=[text], videos=[frames], fps=2.0, size=size, do_sample_frames=False,
                return_tensors="pt",
            )  # fmt: skip
            video = model(**clip)[0]
        return found | number([audio], "audio") | number([video], "video")

    engine_layouts(
        current,
        ColQwen2_5Omni,
        omni_config(words),
        processor,
        images,
        encode=encode_media,
        extractor=extractor,
        misnamed={r"^base_model\\\.model\\\.": ""},
    )


#: The engine's system prompt.
OMNI_SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable "
    "of perceiving auditory and visual inputs, as well as generating text and speech."
)


def omni_config(words) -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    text = {"num_hidden_layers": 2, "rope_parameters": rope}
    return tiny.omni_settings(words, text, {"patch_size": 8, "window_size": 32})


# Single-vector models on Qwen-VL, by the steps of their published code


def dense_vectors(
    run: Callable[..., torch.Tensor], kinds: dict[str, list[dict[str, Any]]]
) -> Vectors:
    """Returns the last token's vectors, of unit length, for the arguments of each input."""
    found = {}
    with torch.no_grad():
        for kind, inputs in kinds.items():
            states = [run(**arguments)[0, -1] for arguments in inputs]
            found |= number([torch.nn.functional.normalize(v, dim=-1) for v in states], kind)
    return found


@family
def gme(current: Family) -> None:
    """GME passes embeddings without positions, so tokens have consecutive ones."""
    from transformers import Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )

    words = qwen_tokenizer()
    limits = {"min_pixels": 256 * 28 * 28, "max_pixels": 1280 * 28 * 28}
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, **limits)
    config = qwen2_config(words, patch_size=14)
    Qwen2VLForConditionalGeneration(config).save_pretrained(current.path("model"))
    save_old_processor(current.path("model"), qwen_processor_of(words, images), images)
    current.fill("model")
    model = Qwen2VLForConditionalGeneration.from_pretrained(current.path("model")).eval()
    check_loaded(model, current.path("model"))
    images = Qwen2VLImageProcessorPil.from_pretrained(current.path("model"))

    def run(text: str = "", image=None, instruction: str = "You are a helpful assistant."):
        pads, media = "", {}
        if image:  # first resized to the grid, then into the limits of the processor
            height, width = smart_resize(image.height, image.width, 28, 4 * 28**2, 16384 * 28**2)
            media = images([image.resize((width, height))], return_tensors="pt")
            count = int(media["image_grid_thw"].prod()) // 4
            pads = f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
        prompt = (
            f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{pads}{text}<|im_end|>"
            "\n<|im_start|>assistant\n<|endoftext|>"
        )
        ids = words(prompt, return_tensors="pt")["input_ids"]
        embeddings = model.get_input_embeddings()(ids)
        if image:
            found = model.model.visual(media["pixel_values"], grid_thw=media["image_grid_thw"])
            embeddings[ids == config.image_token_id] = found.pooler_output
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        language_model = model.model.language_model
        return language_model(inputs_embeds=embeddings, position_ids=positions).last_hidden_state

    queries = [{"text": text} for text in remake.QUERIES]
    texts = [{"text": text} for text in remake.TEXTS]
    current.add("texts", dense_vectors(run, {"texts": texts, "queries": queries}))
    instruction = remake.INSTRUCTION + "."
    instructed = [{**query, "instruction": instruction} for query in queries]
    current.add("instructed", dense_vectors(run, {"queries": instructed}))
    for name, pictures in {
        "images": remake.images(),
        "grid_images": remake.grid_images(),
    }.items():
        pages = [{"image": picture} for picture in pictures]
        current.add(name, dense_vectors(run, {name: pages}))


@family
def vlm2vec(current: Family) -> None:
    """VLM2Vec-V2: a DoRA adapter of Qwen2-VL with its head, and prompts without boundaries.

    Its own classes count images by the token before them, find none, and give consecutive
    positions.
    """
    from peft import PeftModel
    from transformers import Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    words, images = qwen_tokenizer(), qwen_images()
    base = current.path("base")
    Qwen2VLForConditionalGeneration(qwen2_config(words)).save_pretrained(base)
    save_old_processor(base, qwen_processor_of(words, images), images)
    current.fill("base")
    model = Qwen2VLForConditionalGeneration.from_pretrained(base)
    model.name_or_path = model.config._name_or_path = str(base)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    save_adapter(current.path("adapter"), model, targets, use_dora=True)
    save_old_processor(current.path("adapter"), qwen_processor_of(words, images), images)
    current.fill("adapter")
    shutil.copytree(current.path("adapter"), current.path("adapter_old_names"))
    old_names = {r"^base_model\.model\.model\.language_model\.": "base_model.model.model."}
    rename_tensors(current, current.path("adapter_old_names"), old_names)
    plain = Qwen2VLForConditionalGeneration.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, current.path("adapter")).base_model.model.eval()
    check_loaded(model, current.path("adapter"))
    size = {"shortest_edge": 4 * 16 * 16, "longest_edge": 24 * 16 * 16}
    videos = Qwen2VLVideoProcessor(
        patch_size=8, merge_size=2, temporal_patch_size=2, size=size, do_sample_frames=False
    )

    def run(text: str, image=None, frames=None):
        media, name = {}, "image"
        if image:
            media = images([image], return_tensors="pt")
        if frames:
            name, array = "video", np.stack([np.asarray(frame) for frame in frames])
            media = videos([array], return_tensors="pt")
            media = {key: media[key] for key in ("pixel_values_videos", "video_grid_thw")}
        if media:
            pads = f"<|{name}_pad|>" * (int(media[f"{name}_grid_thw"].prod()) // 4)
            text = f"{pads} {text}"
        ids = words(text, return_tensors="pt")["input_ids"]
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        return model.model(input_ids=ids, position_ids=positions, **media).last_hidden_state

    page = "Represent the given image."
    pages = [{"text": page, "image": image} for image in remake.images()]
    clip = {"text": "Understand the content of the provided video.", "frames": remake.frames()}
    queries = [{"text": text} for text in remake.QUERIES]
    for kind, inputs in {"images": pages, "video": [clip], "queries": queries}.items():
        current.add(kind, dense_vectors(run, {kind: inputs}))


QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@family
def qwen3_vl_embedding(current: Family) -> None:
    """Qwen3-VL-Embedding, by the steps of its authors' embedder."""
    import qwen_vl_utils.vision_process as vision
    from PIL import Image
    from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    def resize(video, size, **options):  # of torchvision; its resampling differs from Pillow's
        frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in video]
        frames = [np.asarray(frame.resize(size[::-1], Image.BICUBIC)) for frame in frames]
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)

    vision.transforms.functional.resize = resize
    words = tokenizer(
        *QWEN_TOKENS, pad="<|endoftext|>", eos="<|im_end|>", chat_template=QWEN3_TEMPLATE
    )
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    images = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size, **half)
    processor = Qwen3VLProcessor(images, words, Qwen3VLVideoProcessor(**half), QWEN3_TEMPLATE)
    folder = current.path("model")
    Qwen3VLForConditionalGeneration(qwen3_config(words, patch_size=16)).save_pretrained(folder)
    save_old_processor(folder, processor, images)
    current.fill("model")
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    check_loaded(model, folder)

    def run(text: str = "", instruction: str = "Represent the user's input.", **media: Any):
        factor = 32 * 32
        content: list[dict[str, Any]] = []
        if "video" in media:
            content.append({"type": "video", **media, "total_pixels": 10 * 768 * factor})
        if "image" in media:
            limits = {"min_pixels": 4 * factor, "max_pixels": 1800 * factor}
            content.append({"type": "image", **media, **limits})
        if text or not content:
            content.append({"type": "text", "text": text or "NULL"})
        conversation = [
            {"role": "system", "content": [{"type": "text", "text": instruction}]},
            {"role": "user", "content": content},
        ]
        prompt = processor.apply_chat_template(
            [conversation], add_generation_prompt=True, tokenize=False
        )
        # The processor of transformers 5.23 adds boundaries to those of the template.
        prompt = [re.sub(r"<.vision_start.>(<.video_pad.>)<.vision_end.>", r"\1", *prompt)]
        pages, clips, options = vision.process_vision_info(
            [conversation],
            image_patch_size=16,
            return_video_metadata=True,
            return_video_kwargs=True,
        )
        videos, metadata = zip(*clips, strict=True) if clips else (None, None)
        inputs = processor(
            text=prompt,
            images=pages,
            videos=videos and list(videos),
            video_metadata=metadata and list(metadata),
            do_resize=False,
            return_tensors="pt",
            **options,
        )
        return model.model(**inputs).last_hidden_state

    kinds = {
        "images": [{"image": image} for image in remake.images()],
        "texts": [{"text": text} for text in remake.TEXTS],
        "queries": [{"text": text} for text in remake.QUERIES],
    }
    current.add("default", dense_vectors(run, kinds))
    instructed = {"instruction": remake.INSTRUCTION + "."}  # the code adds a missing full stop
    queries = {"queries": [{"text": text, **instructed} for text in remake.QUERIES]}
    current.add("instructed", dense_vectors(run, queries))
    current.add("empty", dense_vectors(run, {"empty": [{}]}))
    for name, frames in {"large_video": remake.large_frames(), "video": remake.frames()}.items():
        current.add(name, dense_vectors(run, {name: [{"video": frames}]}))


# Text models


def text_config(words, **more: Any) -> dict[str, Any]:
    """Returns the settings of a tiny text model."""
    return {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "pad_token_id": words.pad_token_id,
        "max_position_embeddings": 128,
        **more,
    }


@family
def pylate(current: Family) -> None:
    """Needs transformers 5.3 and sentence-transformers 5.3, like PyLate 1.6."""
    from pylate.models import ColBERT
    from transformers import ModernBertConfig, ModernBertModel

    words = tokenizer(
        "[UNK]", pad="[PAD]", eos="[SEP]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", unk_token="[UNK]",
    )  # fmt: skip
    add_special_tokens(words, "[CLS]", "[SEP]")
    ids = {
        f"{role}_token_id": words.convert_tokens_to_ids(token)
        for role, token in {"cls": "[CLS]", "bos": "[CLS]", "sep": "[SEP]", "eos": "[SEP]"}.items()
    }
    backbone, folder = current.path("backbone"), current.path("model")
    settings = ModernBertConfig(**text_config(words), local_attention=8, **ids)
    ModernBertModel(settings).save_pretrained(backbone)
    words.save_pretrained(backbone)
    model = ColBERT(
        str(backbone), embedding_size=32, query_length=24, document_length=40,
        query_prefix="[Q] ", document_prefix="[D] ", device="cpu",
    )  # fmt: skip
    model.save_pretrained(str(folder))
    shutil.rmtree(backbone)
    current.fill("model")
    model = ColBERT(str(folder), device="cpu").float()
    check_loaded(model, folder)
    check_loaded(model, folder / "1_Dense")
    found = {}
    for kind, values, is_query in (
        ("texts", remake.TEXTS, False),
        ("queries", remake.QUERIES, True),
    ):
        vectors = [
            model.encode([text], is_query=is_query, show_progress_bar=False)[0] for text in values
        ]
        found |= {f"{kind}.{index}": np.asarray(vector) for index, vector in enumerate(vectors)}
    current.add("model", found)


def qwen_processor_of(words, images) -> Any:
    from transformers import Qwen2VLProcessor

    return qwen_processor(Qwen2VLProcessor, words, images)


#: Families of libraries that do not run with the project's version of transformers.
OLD_TRANSFORMERS = ("colqwen_omni", "pylate")


def main() -> None:
    """Makes the families of these names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--data", type=Path, default=remake.DATA, help="folder that is written")
    arguments = parser.parse_args()
    define_torchvision_operators()
    torch.set_num_threads(1)
    for name in arguments.families:
        current = Family(name)
        FAMILIES[name](current)
        current.write(arguments.data)
        print(name, {key: value.shape for key, value in current.vectors.items()})


if __name__ == "__main__":
    main()
